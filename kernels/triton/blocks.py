"""Products with decoded weights, a block of rows at a time, by the library's dense product."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# 64 MiB in 16 bits: large enough for the library's best kernels, small beside any model.
BLOCK_NUMEL = 1 << 25


def block(width: int) -> int:
    """Rows of a block."""
    return max(16, BLOCK_NUMEL // width // 16 * 16)


def blocks(x: Tensor, some: Callable[[slice, torch.dtype], Tensor], out: int, dtype: torch.dtype) -> Tensor:
    """x W^T as `dtype`. some: decodes rows of W, of which there are `out`."""
    step = block(x.shape[1])
    wider = dtype == torch.float32 != x.dtype
    if step >= out:
        weight = some(slice(0, out), x.dtype)
        return product32(x, weight) if wider else F.linear(x, weight).to(dtype)
    y = x.new_empty(len(x), out, dtype=torch.float32 if wider else x.dtype)
    for start in range(0, out, step):
        stop = min(out, start + step)
        weight = some(slice(start, stop), x.dtype)
        if wider:
            y[:, start:stop] = product32(x, weight)
        else:
            torch.mm(x, weight.T, out=y[:, start:stop])
    return y.to(dtype)


def product32(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, in] @ weight [out, in].T in float32; on a GPU from 16-bit operands as they are."""
    if x.device.type != "cuda" or x.dtype == torch.float32:
        return x.float() @ weight.float().T
    return torch.mm(x, weight.T, out_dtype=torch.float32)
