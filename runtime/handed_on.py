"""The files that an artifact carries for its model, as exports give them to others.

Whoever made the artifact wrote them, and `from_pretrained` of an exported folder reads them: settings go on without what
leads to code, to a repository or to another file, as they are given to transformers here.
"""

import json
from collections.abc import Iterator

from nstf.runtime.artifact import Artifact
from nstf.runtime.skeleton import harmless
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
            kept = harmless(stated)
            yield name, content if kept == stated else json.dumps(kept, indent=2).encode() + b"\n"
        else:
            yield name, without_code(name, content, artifact.where)
