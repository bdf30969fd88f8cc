"""Weights decoded before their product's activations are there, while the link between ranks is what is waited for."""

import torch
from torch import Tensor

from nstf.kernels.formats import EncodedTensor
from nstf.kernels.registry import choose
from nstf.kernels.torch import reference
from nstf.kernels.torch.rows import decode_rows
from nstf.kernels.triton import linear as triton_linear

# Of the decoded matrices of one sum: gate and up of a 70B model's layer on two ranks, in 16 bits, are 470 MB.
MOST_BYTES = 1 << 29


def decoded_ahead(
    encoded: EncodedTensor, batch: int, dtype: torch.dtype, most_bytes: int = MOST_BYTES
) -> Tensor | None:
    """The decoded matrix [out, in], or None where the product at this batch reads the codes themselves.

    dtype: of the activations. None too for a matrix that takes more than most_bytes decoded.
    """
    out, width = encoded.shape
    device = next(iter(encoded.arrays.values())).device
    if out * width * dtype.itemsize > most_bytes:
        return None
    kernel = choose(encoded, device, batch)
    if kernel is reference:
        return decode_rows(encoded, slice(0, out), dtype)
    if kernel is triton_linear:
        return triton_linear.whole(encoded, batch, dtype)
    return None
