"""`fp8`: E4M3 floating point, OCP's or AMD's variant, one scale per row or group (format `fp8`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from nstf.kernels.formats import EncodedTensor, Node, decode, stored_bytes
from nstf.kernels.formats import fp8 as fmt
from nstf.proposals import Recipe, Room, Signature, Target
from nstf.quantizers.rounding.estimate import Form, expected_losses
from nstf.quantizers.rounding.levels import Levels
from nstf.quantizers.rounding.matrix import Rounding, encode_rows
from nstf.quantizers.rounding.sweep import Rounded
from nstf.quantizers.stats import Stats

__all__ = ["Params", "bits", "decode", "encode", "estimate", "estimate_many", "forms", "proposals", "tree"]

BY_ROWS = True


@dataclass(frozen=True)
class Params:
    """`variant` e4m3fn (OCP, up to 448) or e4m3fnuz (AMD CDNA3, up to 240); `group` columns share a scale (0:
    the row); `scale_bits` 16 or 32; `rounding`, `damping`, `act_order` and `lead` as in `int_grid`.
    """

    variant: str = "e4m3fn"
    group: int = 0
    scale_bits: int = 16
    rounding: str = "nearest"
    damping: float = 0.01
    act_order: bool = True
    lead: int = 1

    def __post_init__(self) -> None:
        tree(self)
        _rounding(self)


def tree(params: Params) -> Node:
    """The stored form."""
    return Node("fp8", fmt.Params(params.variant, params.group, params.scale_bits, params.lead))


def bits(shape: tuple[int, ...], params: Params) -> float:
    """Bits per weight on disk, scales included, without the file's header."""
    return stored_bytes(tree(params), shape) * 8 / math.prod(shape)


def encode(weight: Tensor, params: Params, stats: Stats | None = None, scratch: int = 0) -> EncodedTensor:
    """`weight` (any floating dtype) as an encoded tensor. scratch: as in `encode_rows`. Raises ValueError on weights that do
    not fit."""
    form = levels(params)
    scale_dtype = torch.float16 if params.scale_bits == 16 else torch.float32

    def pack(rounded: Rounded) -> dict[str, Tensor]:
        values = form.values(rounded.codes.device)[rounded.codes.int()]
        codes = values.to(fmt.torch_dtype(params.variant)).view(torch.uint8)
        return {"codes": codes, "scale": rounded.grid.scale.to(scale_dtype)}

    arrays = encode_rows(weight, params.lead, form, params.group, _rounding(params), stats, pack, scratch)
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
    """Both variants with a scale for each row; none where little is looked at, since 8-bit integers lose less."""
    if room.from_bits:
        room.skip("fp8", "little is looked at: 8-bit integers lose less")
        return []
    return [Recipe("fp8", {"variant": variant, "group": 0}) for variant in ("e4m3fn", "e4m3fnuz")]


def levels(params: Params) -> Levels:
    """The finite values of the type. A floating grid gains next to nothing from clipping, so few scales are
    tried."""
    scale = "f16" if params.scale_bits == 16 else "f32"
    return Levels(8, table=_finite(params.variant), scale=scale, ratios=(1.0, 0.97, 0.93), fit=False)


@cache
def _finite(variant: str) -> tuple[float, ...]:
    values = fmt.values_of_codes(variant)
    return tuple(sorted(set(values[torch.isfinite(values)].tolist())))


def _rounding(params: Params) -> Rounding:
    return Rounding(params.rounding, params.damping, params.act_order)
