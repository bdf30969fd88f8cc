"""`Levels`: what an elementwise quantiser can represent, apart from its scales.

A value is scale * (code - zero) on a uniform grid (`table` is None) or scale * table[code] otherwise, one
scale per group of a row. Everything the search and the sweep need to know about a format is here.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

F16_MAX = 65504.0


@dataclass(frozen=True)
class Levels:
    """`table`: representable values in ascending order, None for a uniform grid of 2**bits codes;
    `symmetric`: the zero of a uniform grid is 2**(bits-1), else it is searched per group; `scale`: how
    scales are stored, `f16`, `f32`, `u8` (8-bit codes under a float16 per row) or `e8m0` (powers of two);
    `ratios`: the scales to try, as multiples of the one at which the largest weight of the group meets the
    largest level; `signs`: try negative scales too (they move the extra level of an even-sized grid to the
    other side); `fit`: the search ends with least squares on the codes it found; `refit`: LDLQ may fit
    scales again; `steps`: how many of the 256 steps of a `u8` scale are used, see `Params.steps` of int_grid.
    """

    bits: int
    symmetric: bool = True
    table: tuple[float, ...] | None = None
    scale: str = "f16"
    ratios: tuple[float, ...] = (1.0,)
    signs: bool = False
    fit: bool = True
    refit: bool = True
    steps: int = 256

    @property
    def count(self) -> int:
        """How many codes there are."""
        return len(self.table) if self.table is not None else 1 << self.bits

    @property
    def reach(self) -> float:
        """The largest magnitude at scale 1 (uniform: of the symmetric grid's negative end)."""
        if self.table is not None:
            return max(abs(v) for v in self.table)
        return float(1 << (self.bits - 1)) if self.symmetric else float((1 << self.bits) - 1)

    def values(self, device: torch.device | str = "cpu") -> Tensor:
        """The table as float32; empty for a uniform grid."""
        return _values(self.table or (), torch.device(device))

    def midpoints(self, device: torch.device | str = "cpu") -> Tensor:
        """Decision thresholds between neighbouring table values."""
        return _midpoints(self.table or (), torch.device(device))

    def codes_of(self, x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Codes (float32) of the nearest levels; `scale` and `zero` broadcast against `x`."""
        inverse = torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)
        if self.table is None:
            return (x * inverse).add_(zero).clamp_(0, self.count - 1).round_()
        return torch.bucketize((x * inverse).contiguous(), self.midpoints(x.device)).float()

    def points_of(self, codes: Tensor, zero: Tensor) -> Tensor:
        """The values of codes at scale 1."""
        if self.table is None:
            return codes - zero
        return self.values(codes.device)[codes.int()]

    def round_scale(self, scale: Tensor, largest: Tensor) -> Tensor:
        """`scale` as it can be stored; `largest`: the row's super-scale, broadcastable, for 8-bit scales."""
        if self.scale == "f16":
            return scale.clamp(-F16_MAX, F16_MAX).half().float()
        if self.scale == "u8":
            steps = torch.where(largest == 0, torch.zeros_like(largest), 256 / largest)
            return largest * (scale * steps).round().clamp(1, 256) / 256
        if self.scale == "e8m0":
            exponent = torch.frexp(scale)[1] - 1
            power = torch.ldexp(
                torch.ones_like(scale, dtype=torch.float64), exponent.clamp(-127, 127)
            ).float()
            return torch.where(scale == 0, power.new_full((), 2.0**-127), power)
        return scale


# Kept on each device: copying them there for every group would make the processor wait for the device.
@lru_cache(maxsize=256)
def _values(table: tuple[float, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(table, dtype=torch.float32, device=device)


@lru_cache(maxsize=256)
def _midpoints(table: tuple[float, ...], device: torch.device) -> Tensor:
    values = _values(table, device)
    with torch.inference_mode(False):
        return (values[1:] + values[:-1]) / 2
