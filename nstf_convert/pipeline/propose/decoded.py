"""The dense tensor of an encoding, within bounded memory."""

import math

import torch
from torch import Tensor

from nstf.kernels.formats import EncodedTensor, decode
from nstf.kernels.torch.rows import decode_rows, row_wise
from nstf.quantizers.stats import Stats, loss, loss_by_rows
from nstf_convert.pipeline.propose.recipe import on_device

# Weights decoded at a time: what decoding takes beside its result is up to 14 bytes a weight.
PART = 1 << 24


def decoded(encoded: EncodedTensor, device: torch.device) -> Tensor:
    """float32 on `device`, the same values as `decode`; rows a part at a time where the encoding is by rows, so that the
    table of a large vocabulary takes 4 bytes a weight instead of up to 18."""
    encoded = on_device(encoded, device)
    elements = math.prod(encoded.shape)
    if elements <= PART or not row_wise(encoded):
        return decode(encoded, torch.float32)
    rows = encoded.shape[0]
    out = torch.empty(encoded.shape, device=device)
    step = max(1, PART * rows // elements)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        out[part] = decode_rows(encoded, part)
    return out


def lost(weight: Tensor, encoded: EncodedTensor, stats: Stats, lead: int) -> float:
    """The expected loss of an encoding of `weight`, on its device; of a large table some rows are decoded at a time."""
    if weight.numel() <= PART or lead != 1 or not row_wise(encoded):
        return loss(weight, decoded(encoded, weight.device).reshape(weight.shape), stats, lead)
    there = on_device(encoded, weight.device)
    return loss_by_rows(weight, lambda rows: decode_rows(there, rows).flatten(1), stats)
