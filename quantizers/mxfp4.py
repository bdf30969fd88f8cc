"""`mxfp4`: OCP Microscaling FP4, blocks of 32 with power-of-two scales (format `mxfp4`).

The specification (MX 1.0, section 6.3) takes floor(log2(max)) less the largest element exponent as the
block's exponent, which clips maxima above 6 steps; here that one and its neighbours are tried and the least
error wins.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nstf.kernels.formats import EncodedTensor, Node, bitpack, decode, stored_bytes
from nstf.kernels.formats import mxfp4 as fmt
from nstf.proposals import Recipe, Room, Signature, Target
from nstf.quantizers.rounding.estimate import Form, expected_losses
from nstf.quantizers.rounding.levels import Levels
from nstf.quantizers.rounding.matrix import Rounding, encode_rows
from nstf.quantizers.rounding.sweep import Rounded
from nstf.quantizers.stats import Stats

__all__ = ["Params", "bits", "decode", "encode", "estimate", "estimate_many", "forms", "proposals", "tree"]

_TABLE = tuple(sorted(set(fmt.E2M1)))  # 15 values: the two zeros are one
LEVELS = Levels(4, table=_TABLE, scale="e8m0", ratios=(1.0, 2.0, 0.5), fit=False, refit=False)
_CODES = torch.tensor([fmt.E2M1.index(v) for v in _TABLE], dtype=torch.uint8, device="cpu")

BY_ROWS = True


@dataclass(frozen=True)
class Params:
    """`rounding`, `damping`, `act_order` and `lead` as in `int_grid`; the rest is the standard's."""

    rounding: str = "nearest"
    damping: float = 0.01
    act_order: bool = True
    lead: int = 1

    def __post_init__(self) -> None:
        tree(self)
        _rounding(self)


def tree(params: Params) -> Node:
    """The stored form."""
    return Node("mxfp4", fmt.Params(params.lead))


def bits(shape: tuple[int, ...], params: Params) -> float:
    """Bits per weight on disk, scales included, without the file's header."""
    return stored_bytes(tree(params), shape) * 8 / math.prod(shape)


def encode(weight: Tensor, params: Params, stats: Stats | None = None, scratch: int = 0) -> EncodedTensor:
    """`weight` (any floating dtype) as an encoded tensor. scratch: as in `encode_rows`. Raises ValueError on weights that do
    not fit."""
    arrays = encode_rows(weight, params.lead, LEVELS, fmt.BLOCK, _rounding(params), stats, _pack, scratch)
    return EncodedTensor(tree(params), tuple(weight.shape), arrays)


def estimate(weight: Tensor, params: Params, stats: Stats | None = None) -> float:
    """The expected loss of `encode`, without encoding."""
    return estimate_many(weight, [params], stats)[0]


def estimate_many(weight: Tensor, params: Sequence[Params], stats: Stats | None = None) -> list[float]:
    """`estimate` for several params, all with the same `lead`."""
    return expected_losses(weight, params[0].lead, forms(weight, params, stats), stats)


def forms(weight: Tensor, params: Sequence[Params], stats: Stats | None = None) -> list[Form]:
    """What estimates round to, for each of several params."""
    return [Form(LEVELS, fmt.BLOCK, _rounding(p)) for p in params]


def proposals(signature: Signature, target: Target, room: Room) -> list[Recipe]:
    """The standard's one form; none where another method loses less at 4 bits."""
    if room.from_bits > 4:
        room.skip("mxfp4", f"another method loses less up to {room.from_bits} bits a weight")
        return []
    return [Recipe("mxfp4")]


def _pack(rounded: Rounded) -> dict[str, Tensor]:
    codes = _CODES.to(rounded.codes.device)[rounded.codes.int()]
    exponent = torch.frexp(rounded.grid.scale.double())[1] - 1
    return {"codes": bitpack.pack(codes, 4), "scale": (exponent + 127).clamp(0, 254).to(torch.uint8)}


def _rounding(params: Params) -> Rounding:
    return Rounding(params.rounding, params.damping, params.act_order)
