"""The files that an artifact carries for its model, as exports give them to others.

Whoever made the artifact wrote them, and `from_pretrained` of an exported folder reads them: settings go on without what
leads to code, to a repository or to another file, as they are given to transformers here.
"""

import json
from collections.abc import Iterator
from typing import Any

from nstf.errors import NstfError
from nstf.runtime.artifact import Artifact
from nstf.runtime.skeleton import complete_config, harmless
from nstf.runtime.tokenizer_files import without_code


def files_for_others(artifact: Artifact) -> Iterator[tuple[str, bytes]]:
    """Names and contents. One of which nothing goes is byte for byte what is stored.

    Raises CorruptError for settings that are no JSON, UnsupportedError for names of classes that are none of a tokenizer or
    processor.
    """
    for name in artifact.handed_on():
        content = artifact.file(name)
        if name == "config.json":
            stated = artifact.object(name)
            kept = _asking_nothing(stated)
            yield name, content if kept == stated else json.dumps(kept, indent=2).encode() + b"\n"
        else:
            yield name, without_code(name, content, artifact.where)


def _asking_nothing(config: dict[str, Any]) -> dict[str, Any]:
    """A config without what leads to code or to a repository. transformers asks the hub for a backbone's name: in its place
    stands the config that opening the artifact makes of it, without asking."""
    kept: dict[str, Any] = harmless(config)
    of_timm = config.get("architectures") in (None, [], ["TimmBackbone"])
    if _without_backbones(kept, of_timm) == kept:
        return kept
    try:
        kept = harmless(complete_config(config))
    except NstfError:
        pass  # a model that transformers does not make: its config goes without the name
    without: dict[str, Any] = _without_backbones(kept, of_timm)
    return without


def _without_backbones(value: Any, may_be_timms: bool) -> Any:
    """A config without names of backbones, but for those of `timm`, whose own configs they are and ask for nothing. That a
    config is one of those is its own word, which transformers goes by in two places alone: may_be_timms."""
    if isinstance(value, list):
        return [_without_backbones(item, False) for item in value]
    if not isinstance(value, dict):
        return value
    of_timm = may_be_timms and value.get("model_type") == "timm_backbone"
    named = isinstance(value.get("backbone"), str) and not of_timm
    return {
        k: _without_backbones(v, k == "backbone_config")
        for k, v in value.items()
        if not (named and k == "backbone")
    }
