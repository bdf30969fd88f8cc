"""`linear`: activations times an encoded matrix, by the first kernel of the registry that supports it."""

import math

import torch
from torch import Tensor

from nstf.kernels.formats.tree import EncodedTensor
from nstf.kernels.registry import choose


def linear32(x: Tensor, encoded: EncodedTensor) -> Tensor:
    """x @ decode(encoded).T in float32: 16-bit activations are not rounded again, for sums over parts of a product.

    x: [..., in]. encoded: a matrix [out, in]. Returns [..., out] in float32.
    """
    if x.dtype == torch.float32:
        return linear(x, encoded)
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    if not len(flat):
        return x.new_zeros(*x.shape[:-1], encoded.shape[0], dtype=torch.float32)
    kernel = choose(encoded, x.device, len(flat))
    product = getattr(kernel, "matmul32", None)
    y: Tensor = kernel.matmul(flat.float(), encoded) if product is None else product(flat, encoded)
    return y.view(*x.shape[:-1], encoded.shape[0])


def linear(x: Tensor, encoded: EncodedTensor, bias: Tensor | None = None) -> Tensor:
    """x @ decode(encoded).T + bias, in x's dtype.

    x: [..., in], floating point. encoded: a matrix [out, in]. bias: [out]. Returns [..., out].
    Raises ValueError when the shapes do not fit.
    """
    if len(encoded.shape) != 2 or x.shape[-1] != encoded.shape[1]:
        raise ValueError(f"activations {list(x.shape)} do not fit an encoded matrix {list(encoded.shape)}")
    out, width = encoded.shape
    # This runs for every layer and token: nothing is done to a matrix of activations that need not be.
    flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), width)
    batch = flat.shape[0]
    if batch == 0:
        return x.new_zeros(*x.shape[:-1], out)
    y: Tensor = choose(encoded, x.device, batch).matmul(flat.contiguous(), encoded)
    if bias is not None:
        y = y + bias
    return y if x.dim() == 2 else y.view(*x.shape[:-1], out)
