"""`--to hf`: decoded weights in a plain Hugging Face folder: config, tokenizer, safetensors shards."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nstf.errors import UnsupportedError
from nstf.kernels.formats import stored_bytes
from nstf.runtime.artifact import Artifact
from nstf.runtime.handed_on import files_for_others
from nstf_convert.export.plan import ExportPlan, Item, decoded, without_attention_plan
from nstf_convert.export.shards import Array, write_weights
from nstf_convert.export.writing import Files, listed
from nstf_convert.pipeline.propose.recipe import describe


def plan(artifact: Artifact, dtype: str | None) -> ExportPlan:
    """What the folder holds. dtype: torch's name of the weights' dtype, None for that of the source model."""
    items = []
    for name in exported_names(artifact):
        record, kind = artifact.record(name), _dtype_of(artifact, name, dtype)
        exact = record.tree.kind == "dense" and str(record.tree.params.dtype) == _word(kind)
        wide = kind in (torch.float32, torch.float64)
        size = stored_bytes(record.tree, record.shape)
        items.append(
            Item(
                name,
                (name,),
                describe(record.tree),
                _word(kind),
                "exact" if exact else "widened" if wide else "rounded",
                size,
                math.prod(record.shape) * kind.itemsize,
            )
        )
    return ExportPlan(
        "hf", tuple(items), files_bytes(artifact), without_attention_plan(artifact, "the folder")
    )


def write(artifact: Artifact, plan: ExportPlan, folder: Path, dtype: str | None, shard_bytes: int) -> Files:
    """Writes the folder's files. shard_bytes: largest weight file; a larger tensor gets a file of its own."""
    copy_files(artifact, folder, {} if dtype is None else {"dtype": dtype})
    arrays = {}
    for item in plan.items:
        kind = _dtype_of(artifact, item.name, dtype)
        arrays[item.name] = Array(
            kind, artifact.record(item.name).shape, partial(_decoded, artifact, item.name, kind)
        )
    write_weights(arrays, folder, shard_bytes)
    return listed(folder)


def exported_names(artifact: Artifact) -> list[str]:
    """The parameters to write: each but those that transformers ties to another that is written, whichever of the two is
    stored here.

    Leaving out more would make transformers fill the hole with random values.
    """
    tied, names = tied_by_transformers(artifact), artifact.names()
    where = {name: artifact.stored_name(name) for name in names}
    return [n for n in names if tied.get(n) not in where or where[tied[n]] != where[n]]


def copy_files(artifact: Artifact, folder: Path, config: dict[str, Any]) -> None:
    """Writes the files that the artifact carries for its model, config.json with some entries replaced."""
    for name, content in files_for_others(artifact):
        if name == "config.json" and config:
            changed = json.loads(content)
            if "dtype" in config:
                changed.pop("torch_dtype", None)
            content = json.dumps({**changed, **config}, indent=2, sort_keys=True).encode() + b"\n"
        (folder / name).write_bytes(content)


def files_bytes(artifact: Artifact) -> int:
    """Bytes of the files that the artifact carries, unpacked."""
    return sum(record.size for record in artifact.manifest.files.values())


def tied_by_transformers(artifact: Artifact) -> dict[str, str]:
    """{name: the name it is tied to} of the parameters that the model's class ties by itself."""
    if "config.json" not in artifact.file_names():
        return {}
    from nstf.runtime.artifact.config import limits_of
    from nstf.runtime.skeleton import build_skeleton, tied_aliases

    try:
        return tied_aliases(build_skeleton(artifact.config(), limits=limits_of(artifact.manifest)))
    except UnsupportedError:
        return {}


def _decoded(artifact: Artifact, name: str, kind: torch.dtype) -> torch.Tensor:
    return decoded(artifact.encoded(name), kind, name)


def _dtype_of(artifact: Artifact, name: str, dtype: str | None) -> torch.dtype:
    """The dtype a tensor is written in; integers and booleans keep theirs."""
    source: torch.dtype = getattr(torch, artifact.record(name).dtype)
    return getattr(torch, dtype) if dtype is not None and source.is_floating_point else source


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
