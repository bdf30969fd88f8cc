"""The reference: x @ decode(W).T. A big matrix is decoded a block of rows at a time, to bound the memory."""

import torch
from torch import Tensor

from nstf.kernels.formats.tree import EncodedTensor
from nstf.kernels.torch.rows import decode_rows, row_wise

NAME = "torch.reference"
FORMATS: tuple[str, ...] = ()

# 16 MiB in float32: large enough for an efficient product, small beside any model.
BLOCK_NUMEL = 1 << 22


def available() -> bool:
    return True


def supports(encoded: EncodedTensor, device: torch.device, batch: int) -> bool:
    return True


def matmul(x: Tensor, encoded: EncodedTensor) -> Tensor:
    """x: [batch, in] -> [batch, out]. The product runs in x's dtype, on weights decoded in float32."""
    return _product(x, encoded, x.dtype)


def matmul32(x: Tensor, encoded: EncodedTensor) -> Tensor:
    """As `matmul` with the same weights, rounded to x's dtype, but a product in float32."""
    return _product(x.float(), encoded, x.dtype)


def _product(x: Tensor, encoded: EncodedTensor, weights: torch.dtype) -> Tensor:
    out, width = encoded.shape
    rows = max(1, BLOCK_NUMEL // width)
    if rows >= out or not row_wise(encoded):
        return x @ decode_rows(encoded, slice(0, out), weights).to(x.dtype).T
    y = x.new_empty(x.shape[0], out)
    for start in range(0, out, rows):
        stop = min(out, start + rows)
        y[:, start:stop] = x @ decode_rows(encoded, slice(start, stop), weights).to(x.dtype).T
    return y
