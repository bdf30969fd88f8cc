"""The memory that tensors are read into: a GPU copies several times as fast from pages that stay where they are."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_GPU: ContextVar[torch.device | None] = ContextVar("gpu", default=None)


@contextmanager
def for_gpu(device: torch.device) -> Iterator[None]:
    """What this thread reads inside, for a GPU, lies in pinned pages, which torch keeps and hands out again."""
    token = _GPU.set(device)
    try:
        yield
    finally:
        _GPU.reset(token)


def device() -> torch.device | None:
    """The GPU that this thread reads for, or None."""
    return _GPU.get()


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of the host, not initialised."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=_GPU.get() is not None)


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. From pinned pages the copy is under way when this returns, in the current stream."""
    return value if value.device == device else value.to(device, non_blocking=_GPU.get() is not None)
