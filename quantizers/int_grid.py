"""`int_grid`: integers of 2 to 8 bits, symmetric or with a zero point, one scale per group (format `int`)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nstf.kernels.formats import EncodedTensor, Node, bitpack, decode, integer, stored_bytes
from nstf.proposals import Recipe, Room, Signature, Target
from nstf.quantizers.rounding.estimate import Form, expected_losses
from nstf.quantizers.rounding.levels import Levels
from nstf.quantizers.rounding.matrix import Rounding, encode_rows
from nstf.quantizers.rounding.sweep import Rounded
from nstf.quantizers.stats import Stats

__all__ = ["Params", "bits", "decode", "encode", "estimate", "estimate_many", "forms", "proposals", "tree"]


NAME = "int"
BY_ROWS = True


@dataclass(frozen=True)
class Params:
    """`bits` 2..8; `group` columns share a scale (0: the row); `symmetric` or with a zero point;
    `scale_bits` 16 or 8; `steps`: of the 256 steps of an 8-bit scale those that are used, 256 or 128 (then
    the 256th part of the super-scale is a float16 too: GGUF's Q6_K holds such scales); `rounding` nearest
    or ldlq; `damping` relative to the Hessian's mean diagonal; `act_order` (ldlq only); `lead` leading axes
    make the rows.
    """

    bits: int = 4
    group: int = 64
    symmetric: bool = True
    scale_bits: int = 16
    steps: int = 256
    rounding: str = "nearest"
    damping: float = 0.01
    act_order: bool = True
    lead: int = 1

    def __post_init__(self) -> None:
        tree(self)
        _rounding(self)
        if self.steps != 256 and (self.steps, self.scale_bits) != (128, 8):
            raise ValueError(f"steps must be 256, or 128 of 8-bit scales, not {self.steps}")


def tree(params: Params) -> Node:
    """The stored form."""
    return Node(
        "int", integer.Params(params.bits, params.group, params.symmetric, params.scale_bits, params.lead)
    )


def bits(shape: tuple[int, ...], params: Params) -> float:
    """Bits per weight on disk, scales and zero points included, without the file's header."""
    return stored_bytes(tree(params), shape) * 8 / math.prod(shape)


def encode(weight: Tensor, params: Params, stats: Stats | None = None, scratch: int = 0) -> EncodedTensor:
    """`weight` (any floating dtype) as an encoded tensor. scratch: as in `encode_rows`. Raises ValueError on weights or
    statistics that do not fit."""

    def pack(rounded: Rounded) -> dict[str, Tensor]:
        grid = rounded.grid
        arrays = {"codes": bitpack.pack(rounded.codes, params.bits)} | stored_scales(
            rounded, params.scale_bits
        )
        if not params.symmetric:
            arrays["zeros"] = bitpack.pack(grid.zero.to(torch.uint8), params.bits)
        return arrays

    arrays = encode_rows(
        weight, params.lead, levels(params), params.group, _rounding(params), stats, pack, scratch
    )
    return EncodedTensor(tree(params), tuple(weight.shape), arrays)


def estimate(weight: Tensor, params: Params, stats: Stats | None = None) -> float:
    """The expected loss of `encode`, without encoding."""
    return estimate_many(weight, [params], stats)[0]


def estimate_many(weight: Tensor, params: Sequence[Params], stats: Stats | None = None) -> list[float]:
    """`estimate` for several params, all with the same `lead`."""
    return expected_losses(weight, params[0].lead, forms(weight, params, stats), stats)


def forms(weight: Tensor, params: Sequence[Params], stats: Stats | None = None) -> list[Form]:
    """What estimates round to, for each of several params."""
    return [Form(levels(p), p.group, _rounding(p)) for p in params]


def proposals(signature: Signature, target: Target, room: Room) -> list[Recipe]:
    """Every number of bits, with scales for groups of 32 and 64, and for rows where a few bytes matter.

    Zero points pay below 6 bits; wide groups at many bits never reach the hull, so they are left out. Below `room.from_bits`
    only what is fast is left.
    """
    out = []
    for bits in range(2, 9):
        out += [_recipe(bits, group, True) for group in (32, 64)]
        out.append(_recipe(bits, 0, True, 16))
        if bits <= 5:
            out += [_recipe(bits, group, False) for group in ((32, 64) if bits < 5 else (32,))]
        if bits <= 3:
            out += [_recipe(bits, 128, symmetric) for symmetric in (True, False)]

    def fast(params: Mapping[str, Any]) -> bool:
        return target.timed and params["group"] == 32 and params["symmetric"]

    return [r for r in out if r.params["bits"] >= room.from_bits or fast(r.params)]


def _recipe(bits: int, group: int, symmetric: bool, scale_bits: int = 8) -> Recipe:
    return Recipe(
        "int_grid", {"bits": bits, "group": group, "symmetric": symmetric, "scale_bits": scale_bits}
    )


def levels(params: Params) -> Levels:
    """What the grid can represent, and the scales to try: fine grids need hardly any clipping, coarse ones
    much."""
    low, high, count = {2: (0.45, 1.25, 17), 3: (0.45, 1.2, 16), 4: (0.55, 1.15, 13)}.get(
        params.bits, (0.75, 1.05, 7)
    )
    ratios = tuple(high - (high - low) * i / (count - 1) for i in range(count))
    return Levels(
        params.bits,
        params.symmetric,
        scale="f16" if params.scale_bits == 16 else "u8",
        ratios=(1.0, *ratios),
        signs=params.symmetric and params.scale_bits == 16,
        steps=params.steps,
    )


def stored_scales(rounded: Rounded, scale_bits: int) -> dict[str, Tensor]:
    """The scale arrays of a `Rounded` whose scales are already representable."""
    grid = rounded.grid
    if scale_bits == 8:
        steps = torch.where(grid.largest == 0, torch.ones_like(grid.scale), grid.scale * 256 / grid.largest)
        return {
            "scale_codes": (steps.round().clamp(1, 256) - 1).to(torch.uint8),
            "scale_super": grid.largest.squeeze(1).half(),
        }
    return {"scale": grid.scale.half() if scale_bits == 16 else grid.scale}


def _rounding(params: Params) -> Rounding:
    return Rounding(params.rounding, params.damping, params.act_order)
