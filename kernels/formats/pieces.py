"""Contiguous copies of a rank's parts of stored arrays.

Fresh memory is handed out a page at a time, at its first touch: in pages of 4 KiB that takes twice as long as the copy. So
large copies are in large pages, where the system has some (docs/scale.md has the times).
"""

from __future__ import annotations

import math
import mmap

from nstf.kernels.lazy import torch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# Of less, a large page would be mostly empty.
LARGE_BYTES = 1 << 23


def own(part: Tensor) -> Tensor:
    """A contiguous copy of a part of an array; the part itself where it is contiguous."""
    return part if part.is_contiguous() else room(part).copy_(part)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The numbers of parts, [n], one part after the other; a single contiguous part is not copied."""
    if len(parts) == 1:
        return own(parts[0]).view(-1)
    out, at = room(parts[0], sum(part.numel() for part in parts)), 0
    for part in parts:
        out[at : at + part.numel()].view(part.shape).copy_(part)
        at += part.numel()
    return out


def room(like: Tensor, count: int | None = None) -> Tensor:
    """Uninitialised memory for a tensor of this shape, or [count], of the same dtype on its device."""
    shape = like.shape if count is None else (count,)
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or size < LARGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return torch.empty(shape, dtype=like.dtype, device="cpu")  # which says that there is no memory, if so
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a system without large pages
    return torch.frombuffer(memory, dtype=like.dtype, count=math.prod(shape)).view(shape)
