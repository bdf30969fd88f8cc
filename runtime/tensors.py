"""The tensors of an artifact, each decoded when it is asked for: for any architecture."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from nstf.errors import NstfError, UsageError, out_of_memory
from nstf.kernels.formats import EncodedTensor, FormatError, decode, dense
from nstf.runtime.artifact import Artifact, open_artifact
from nstf.runtime.artifact.header import corrupt, short


def load_tensors(
    path: str | os.PathLike[str],
    dtype: torch.dtype | str | None = torch.float32,
    verify: bool = True,
    mapped: bool = True,
) -> "DecodedTensors":
    """The tensors of an artifact by name, each decoded when it is asked for: works for any architecture.

    dtype: of the decoded floating-point tensors; None gives each the dtype it had in the source model.
    verify: check every SHA-256 first; a wrong one raises CorruptError. mapped: as for `load`.
    """
    return DecodedTensors(
        open_artifact(path, verify=verify, mapped=mapped), None if dtype is None else named_dtype(dtype)
    )


class DecodedTensors(Mapping[str, Tensor]):
    """Name -> dense tensor, decoded at each access and not kept. Shared names give equal tensors."""

    def __init__(self, artifact: Artifact, dtype: torch.dtype | None) -> None:
        self._artifact, self._dtype = artifact, dtype
        self._names = artifact.names()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._artifact.manifest.tensors:
            raise KeyError(name)
        self._artifact.check_unchanged()
        values = decoded(self._artifact, name)
        stated = self._artifact.record(name).dtype
        source = dense.torch_dtype(stated) if stated in dense.DTYPES else torch.float32
        dtype = self._dtype or source
        return values.to(dtype) if values.is_floating_point() and dtype.is_floating_point else values

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Stored(Protocol):
    """An artifact, or what a rank holds of one."""

    where: str

    def encoded(self, name: str) -> EncodedTensor:
        """A tensor as it is stored."""


def decoded(artifact: Stored, name: str) -> Tensor:
    """The dense tensor of a stranger's file. Raises as `decoding`."""
    with decoding(artifact.where, name):
        return decode(artifact.encoded(name))


@contextmanager
def decoding(path: str, name: str) -> Iterator[None]:
    """Says of which tensor of a file it is where its numbers contradict one another (CorruptError), or where memory ends
    (NstfError): a file of a few bytes may describe one that no machine holds."""
    try:
        yield
    except FormatError as error:
        raise corrupt(path, f"tensor {short(name)}: {error}") from error
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise NstfError(
            f"{path}: not enough memory for tensor {short(name)}; free some, or raise its limit"
        ) from error


def named_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype by object or torch's name. Raises UsageError."""
    name = str(dtype).removeprefix("torch.")
    found = dense.torch_dtype(name) if name in dense.DTYPES else None
    if found is None or not found.is_floating_point:
        raise UsageError(f"dtype {str(dtype)[:40]!r} is not one of float32, bfloat16, float16, float64")
    return found
