"""The memory that tensors are read into: a GPU copies several times as fast from pages that stay where they are."""

from collections.abc import Iterator
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


def buffer(size: int) -> Tensor:
    """uint8 [size], not initialised."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=_PINNED.get())


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. From pinned pages the copy is under way when this returns, in the current stream."""
    return value if value.device == device else value.to(device, non_blocking=_PINNED.get())
