"""The memory that tensors are read into: a GPU copies several times as fast from pages that stay where they are."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_PINNED: ContextVar[bool] = ContextVar("pinned", default=False)


@contextmanager
def for_gpu() -> Iterator[None]:
    """What this thread reads inside lies in pinned pages, which torch keeps and hands out again."""
    token = _PINNED.set(True)
    try:
        yield
    finally:
        _PINNED.reset(token)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of the host, not initialised."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=_PINNED.get())


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. From pinned pages the copy is under way when this returns, in the current stream."""
    return value if value.device == device else value.to(device, non_blocking=_PINNED.get())
