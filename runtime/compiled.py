"""Which matrices of an artifact run as GPU kernels, and the side file of kernels compiled ahead for them."""

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nstf.errors import CorruptError
from nstf.kernels.formats import EncodedTensor
from nstf.kernels.torch.rows import expert
from nstf.runtime.artifact import Artifact
from nstf.runtime.decoder_specs import decoder_specs, stacked_matrices

if TYPE_CHECKING:
    from nstf.kernels.triton.architecture import Architecture
    from nstf.kernels.triton.spec import KernelSpec

SUFFIX = ".nstfk"

_log = logging.getLogger("nstf")


def matrices(artifact: Artifact) -> Iterator[EncodedTensor]:
    """Every matrix [out, in] that activations may be multiplied by; of a stack of experts the first one.

    A tensor that several names share comes once, a table that is only looked up not at all. Transposed uses
    (transformers' Conv1D) run on the reference. Stacks that decoding makes come last, without their arrays.
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
    yield from stacked_matrices(artifact)


def all_specs(
    artifact: Artifact, batches: Iterable[int], dtype: torch.dtype, row: "Architecture"
) -> "dict[str, KernelSpec]":
    """Every kernel that an artifact's model launches for these rows of activations, by key; {} when no matrix has one."""
    from nstf.kernels.triton.aot import key, specs_of

    batches = tuple(batches)
    found = specs_of(((encoded, encoded.shape) for encoded in matrices(artifact)), batches, dtype, row)
    for spec in decoder_specs(artifact, batches, dtype, row) if found else ():
        found.setdefault(key(spec, row), spec)
    return found


def _ties_head(artifact: Artifact) -> bool:
    """Whether the table of embeddings may be the output layer too: unless the config says no, it may."""
    if "config.json" not in artifact.file_names():
        return True
    try:
        config = artifact.object("config.json")
    except CorruptError:
        return True
    return config.get("tie_word_embeddings", True) is not False


def side_path(artifact: str | os.PathLike[str], target: str) -> Path:
    """`model.gfx942.nstfk` beside `model.nstf`."""
    path = Path(artifact)
    return path.with_name(f"{path.stem}.{target}{SUFFIX}")


def use_compiled(artifact: Artifact, path: str | os.PathLike[str]) -> None:
    """Lets Triton find the kernels of a side file for this artifact. What does not match is compiled as ever.

    The code in the file runs on the GPU with the rights of this process: pass only a file that you made or trust.
    Raises CorruptError, UnsupportedError (a newer version), UsageError (no such file), NstfError (no Triton).
    """
    from nstf.kernels.triton.aot import target_here
    from nstf.kernels.triton.side_file import install, read

    side = read(path)
    done = install(side, lambda *needs: all_specs(artifact, *needs), target_here())
    if done.reason:
        _log.warning("%s: its kernels are not used, they are %s", os.fspath(path), done.reason)
    else:
        _log.info("%s: %d compiled kernels, %d left to compile", os.fspath(path), done.found, done.missing)
