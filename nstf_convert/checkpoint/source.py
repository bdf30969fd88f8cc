"""What every reader returns: the raw tensors of one checkpoint, under the names the file uses."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from nstf.runtime.side_by_side import side_by_side

BYTES_PER_SAMPLE = 4096
SAMPLES_PER_TENSOR = 16
FULL_DIGEST_LIMIT = 512 << 20
BLOCK_BYTES = 8 << 20
DIGEST_THREADS = 4


@dataclass(frozen=True)
class TensorInfo:
    """Shape, dtype (torch's name, for instance "bfloat16") and size of a tensor of the reference model."""

    shape: tuple[int, ...]
    dtype: str
    size_bytes: int

    @staticmethod
    def of(shape: tuple[int, ...], dtype: str) -> "TensorInfo":
        """The info of a dense tensor; `dtype` must be an attribute of torch."""
        return TensorInfo(shape, dtype, math.prod(shape) * torch_dtype(dtype).itemsize)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name. Raises ValueError for anything else."""
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype


@dataclass(frozen=True)
class Source:
    """Raw tensors of one checkpoint; nothing is read before `read` is called.

    infos: what `read` returns, by name; stored_bytes: bytes a tensor takes in the file (differs from
    `infos[name].size_bytes` for quantised GGUF blocks); read_bytes(name, start, length): stored bytes of a
    tensor, for fingerprints and tie detection; aliases: names that the file itself says share storage with
    another name;
    describe(name): where the tensor lives, for messages.
    """

    kind: str
    infos: Mapping[str, TensorInfo]
    stored_bytes: Mapping[str, int]
    read: Callable[[str], Tensor]
    read_bytes: Callable[[str, int, int], bytes]
    describe: Callable[[str], str]
    close: Callable[[], None]
    aliases: Mapping[str, str] = field(default_factory=dict)


def sample_digest(source: Source, name: str) -> bytes:
    """SHA-256 of up to 16 pieces of 4 KiB of one tensor's stored bytes: cheap, and no proof of equality."""
    size = source.stored_bytes[name]
    digest = hashlib.sha256(f"{source.infos[name].dtype} {source.infos[name].shape} {size}".encode())
    if size <= BYTES_PER_SAMPLE * SAMPLES_PER_TENSOR:
        digest.update(source.read_bytes(name, 0, size))
        return digest.digest()
    step = (size - BYTES_PER_SAMPLE) / (SAMPLES_PER_TENSOR - 1)
    for i in range(SAMPLES_PER_TENSOR):
        digest.update(source.read_bytes(name, int(i * step), BYTES_PER_SAMPLE))
    return digest.digest()


def full_digest(source: Source, name: str) -> bytes:
    """SHA-256 of all stored bytes of one tensor, read in blocks of 8 MiB."""
    size = source.stored_bytes[name]
    digest = hashlib.sha256(f"{source.infos[name].dtype} {source.infos[name].shape} {size}".encode())
    for start in range(0, size, BLOCK_BYTES):
        digest.update(source.read_bytes(name, start, min(BLOCK_BYTES, size - start)))
    return digest.digest()


def is_sampled(source: Source) -> bool:
    """Whether `source_digest` leaves bytes out."""
    return sum(source.stored_bytes.values()) > FULL_DIGEST_LIMIT


def source_digest(source: Source) -> str:
    """SHA-256 over names, shapes and contents: all bytes up to 512 MiB of tensors, samples beyond."""
    small = not is_sampled(source)
    digest, names = hashlib.sha256(b"full" if small else b"sampled"), sorted(source.infos)
    # Reading and hashing go on side by side without Python's lock; other readers have one place in their file.
    threads = DIGEST_THREADS if source.kind == "safetensors" else 1
    found = side_by_side(partial(full_digest if small else sample_digest, source), names, threads)
    for name, own in zip(names, found, strict=True):
        digest.update(f"{len(name)}:{name}".encode())
        digest.update(own)
    return digest.hexdigest()
