"""Which matrices of an artifact run as GPU kernels, and the side file of kernels compiled ahead for them."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from nstf.kernels.formats import EncodedTensor
from nstf.kernels.torch.rows import expert
from nstf.runtime.artifact import Artifact

SUFFIX = ".nstfk"


def matrices(artifact: Artifact) -> Iterator[EncodedTensor]:
    """Every matrix [out, in] that activations may be multiplied by; of a stack of experts the first one.

    A tensor that several names share comes once, a table that is only looked up not at all. Transposed uses
    (transformers' Conv1D) run on the reference.
    """
    shared = {artifact.stored_name(name) for name in artifact.names() if artifact.stored_name(name) != name}
    roles = artifact.manifest.plan.get("roles")
    roles = roles if isinstance(roles, dict) and not _ties_head(artifact) else {}
    for name in artifact.names():
        if artifact.stored_name(name) != name or (roles.get(name) == "embedding" and name not in shared):
            continue
        encoded: EncodedTensor | None = artifact.encoded(name)
        if encoded is not None and len(encoded.shape) == 3:
            encoded = expert(encoded, 0)
        if encoded is not None and len(encoded.shape) == 2:
            yield encoded


def _ties_head(artifact: Artifact) -> bool:
    """Whether the table of embeddings may be the output layer too: unless the config says no, it may."""
    if "config.json" not in artifact.file_names():
        return True
    try:
        config = json.loads(artifact.file("config.json"))
    except ValueError:
        return True
    return not isinstance(config, dict) or config.get("tie_word_embeddings", True) is not False


def side_path(artifact: str | os.PathLike[str], target: str) -> Path:
    """`model.gfx942.nstfk` beside `model.nstf`."""
    path = Path(artifact)
    return path.with_name(f"{path.stem}.{target}{SUFFIX}")
