"""The product with an encoded matrix as an autograd function: gradients reach what comes before, such as an adapter.

The stored matrix itself is not trained. For y = x W^T the way back is dL/dx = dL/dy W. Nothing dense is kept between
the two: the way back decodes W again, some rows at a time (Dettmers et al., QLoRA, 2023, do the same with NF4).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nstf.kernels.formats import EncodedTensor, rotated
from nstf.kernels.linear import linear as plain_linear
from nstf.kernels.torch.rows import children_of, decode_rows, row_wise
from nstf.kernels.triton.linear import rows as rows_on_gpu

# 16 MiB in float32, as the reference product takes; a GPU needs larger blocks for the library's best kernels.
BLOCK_NUMEL = 1 << 22
GPU_BLOCK_NUMEL = 1 << 25


def linear(x: Tensor, encoded: EncodedTensor, bias: Tensor | None = None) -> Tensor:
    """x @ decode(encoded).T + bias, differentiable in x and in the bias.

    x: [..., in]. encoded: a matrix [out, in]. bias: [out]. Returns [..., out] in x's dtype. Raises ValueError when the
    shapes do not fit.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return plain_linear(x, encoded, bias)
    y: Tensor = _Product.apply(x, encoded)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


def input_gradient(grad: Tensor, encoded: EncodedTensor) -> Tensor:
    """grad @ decode(encoded). grad: [..., out] -> [..., in] in its dtype; one block of rows is decoded at a time."""
    out, width = encoded.shape
    return _through(grad.reshape(-1, out), encoded).reshape(*grad.shape[:-1], width)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, encoded: EncodedTensor) -> Tensor:
        ctx.encoded = encoded
        return plain_linear(x, encoded)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return input_gradient(grad, ctx.encoded), None


def _through(grad: Tensor, encoded: EncodedTensor) -> Tensor:
    """grad [n, out] @ decode(encoded) -> [n, in]. Nodes that are products go through their parts, never whole."""
    kind, params = encoded.tree.kind, encoded.tree.params
    parts = children_of(encoded)
    if kind == "add":
        return _through(grad, parts["x"]) + _through(grad, parts["y"])
    if kind == "low_rank" and params.lead == 1:
        return _through(_through(grad, parts["a"]), parts["b"])
    if kind == "permute" and params.dims == (1, 0):
        return plain_linear(grad, parts["x"])
    if kind == "rotated" and params.lead == 1:
        return _through_rotation(grad, encoded)
    return _by_rows(grad, encoded)


def _through_rotation(grad: Tensor, encoded: EncodedTensor) -> Tensor:
    """W = S_o H_o X H_i S_i, and H is symmetric: grad W = (((grad S_o) H_o) X) H_i S_i; the transforms in float32."""
    params, (out, width) = encoded.tree.params, encoded.shape
    turned = grad
    if params.block_out:
        signs = rotated.signs(out, params.seed, 1, grad.device)
        turned = rotated.hadamard(grad.float() * signs, params.block_out).to(grad.dtype)
    turned = _through(turned, children_of(encoded)["x"])
    if params.block_in:
        signs = rotated.signs(width, params.seed, 0, grad.device)
        turned = (rotated.hadamard(turned.float(), params.block_in) * signs).to(grad.dtype)
    return turned


def _by_rows(grad: Tensor, encoded: EncodedTensor) -> Tensor:
    out, width = encoded.shape
    rows = max(1, (GPU_BLOCK_NUMEL if grad.device.type == "cuda" else BLOCK_NUMEL) // width)
    if rows >= out or not row_wise(encoded):
        return grad @ _rows(encoded, 0, out, grad.dtype)
    # 16-bit products of many blocks are summed in float32.
    total = grad.new_zeros(len(grad), width, dtype=torch.promote_types(grad.dtype, torch.float32))
    for start in range(0, out, rows):
        stop = min(out, start + rows)
        total += grad[:, start:stop] @ _rows(encoded, start, stop, grad.dtype)
    return total.to(grad.dtype)


def _rows(encoded: EncodedTensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """decode(encoded)[start:stop], by a kernel of the GPU where there is one."""
    device = next(iter(encoded.arrays.values())).device
    if device.type == "cuda":
        found = rows_on_gpu(encoded, torch.arange(start, stop, device=device), dtype)
        if found is not None:
            return found
    return decode_rows(encoded, slice(start, stop), dtype)
