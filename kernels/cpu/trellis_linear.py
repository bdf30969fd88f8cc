"""Trellis codes times activations on the CPU: a tile is decoded into the first cache and used at once.

The weights cross the memory bus encoded; nothing dense is kept. For one row of activations and for small batches.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nstf.kernels.cpu import ext
from nstf.kernels.formats import trellis
from nstf.kernels.formats.scales import matrix_shape
from nstf.kernels.formats.tree import EncodedTensor
from nstf.kernels.memo import per_encoded

NAME = "cpu.trellis_linear"
FORMATS = (trellis.KIND,)

# Above, decoding once and a dense product are faster.
LARGEST_BATCH = 16


@dataclass(frozen=True)
class _Section:
    codes: Tensor
    quarter_bits: int
    rows: Tensor


@dataclass(frozen=True)
class _Prepared:
    """The sections' rows and the row scales, made once: both are small beside the codes."""

    sections: tuple[_Section, ...]
    scales: Tensor


def available() -> bool:
    return hasattr(ext, "trellis_matmul")


def supports(encoded: EncodedTensor, device: torch.device, batch: int) -> bool:
    return device.type == "cpu" and batch <= LARGEST_BATCH and encoded.tree.params.lead == 1


def matmul(x: Tensor, encoded: EncodedTensor) -> Tensor:
    """x: [batch, in] -> [batch, out], computed in float32."""
    prepared = _prepared(encoded)
    width = trellis.tiles(x.shape[1]) * trellis.SIDE
    padded = F.pad(x.to(torch.float32), (0, width - x.shape[1])).contiguous()
    y = torch.empty(len(x), encoded.shape[0], dtype=torch.float32, device="cpu")
    for section in prepared.sections:
        rows = len(section.codes) * trellis.SIDE
        out = torch.empty(len(x), rows, dtype=torch.float32, device="cpu")
        ext.trellis_matmul(
            section.codes,
            section.quarter_bits,
            trellis.codebook(section.quarter_bits),
            padded,
            out,
            torch.get_num_threads(),
        )
        y[:, section.rows] = out[:, : len(section.rows)]
    y *= prepared.scales
    return y.to(x.dtype)


@per_encoded
def _prepared(encoded: EncodedTensor) -> _Prepared:
    params, arrays = encoded.tree.params, dict(encoded.arrays)
    rows, cols = matrix_shape(encoded.shape, params.lead)
    found = tuple(_Section(*section) for section in trellis.sections(params, arrays, rows, cols))
    return _Prepared(found, trellis.read_scales(params, arrays))
