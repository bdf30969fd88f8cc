"""`grid16`: sixteen levels fitted to the tensor, one scale per group (format `grid`).

The table is a weighted Lloyd-Max quantiser (Max, 1960; Lloyd, 1982) of the scaled weights: scales and codes
with the table fixed, then every level at the weighted mean of the weights it stands for, in turns.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nstf.kernels.formats import EncodedTensor, Node, bitpack, decode, grid, stored_bytes
from nstf.kernels.formats.scales import group_count, per_column
from nstf.proposals import Recipe, Room, Signature, Target
from nstf.quantizers.int_grid import stored_scales
from nstf.quantizers.rounding.estimate import Form, expected_losses
from nstf.quantizers.rounding.levels import Levels
from nstf.quantizers.rounding.matrix import Rounding, encode_rows, importance, matrix_view
from nstf.quantizers.rounding.sweep import Rounded, launched_together, nearest_many, sweep_with_errors
from nstf.quantizers.stats import Stats

__all__ = ["Params", "bits", "decode", "encode", "estimate", "estimate_many", "forms", "proposals", "tree"]

NAME = "grid"
SAMPLE, QUICK_SAMPLE = 1 << 16, 1 << 13  # weights the table is fitted on, to encode and to estimate
ROUNDS = 10
# An estimate fits no further than rounds gain so much: half of them, for three thousandths of the loss.
QUICK_GAIN = 1e-3
# Starts: fitted on normally distributed weights, where they are nearly the same for every group size. With
# signed scales the longer side can always be the negative one, which the fit makes use of. fmt: off
_SIGNED = (
    -1.0,
    -0.722,
    -0.555,
    -0.425,
    -0.315,
    -0.214,
    -0.123,
    -0.037,
    0.046,
    0.132,
    0.220,
    0.315,
    0.420,
    0.543,
    0.693,
    0.887,
)
_UNSIGNED = (
    -1.0,
    -0.750,
    -0.580,
    -0.446,
    -0.332,
    -0.230,
    -0.135,
    -0.041,
    0.041,
    0.135,
    0.230,
    0.332,
    0.446,
    0.580,
    0.750,
    1.0,
)
# fmt: on
BY_ROWS = True


@dataclass(frozen=True)
class Params:
    """`group` columns share a scale (0: the row); `scale_bits` 16 or 8; `rounding`, `damping`, `act_order`
    and `lead` as in `int_grid`.
    """

    group: int = 64
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
    return Node("grid", grid.Params(16, params.group, params.scale_bits, params.lead))


def bits(shape: tuple[int, ...], params: Params) -> float:
    """Bits per weight on disk, scales and table included, without the file's header."""
    return stored_bytes(tree(params), shape) * 8 / math.prod(shape)


def encode(weight: Tensor, params: Params, stats: Stats | None = None, scratch: int = 0) -> EncodedTensor:
    """`weight` (any floating dtype) as an encoded tensor. scratch: as in `encode_rows`. Raises ValueError on weights that do
    not fit."""
    form = fit(weight, params, stats)

    def pack(rounded: Rounded) -> dict[str, Tensor]:
        return {"codes": bitpack.pack(rounded.codes, 4)} | stored_scales(rounded, params.scale_bits)

    arrays = encode_rows(weight, params.lead, form, params.group, _rounding(params), stats, pack, scratch)
    arrays["table"] = form.values().half()
    return EncodedTensor(tree(params), tuple(weight.shape), arrays)


def estimate(weight: Tensor, params: Params, stats: Stats | None = None) -> float:
    """The expected loss of `encode`, without encoding."""
    return estimate_many(weight, [params], stats)[0]


def estimate_many(weight: Tensor, params: Sequence[Params], stats: Stats | None = None) -> list[float]:
    """`estimate` for several params, all with the same `lead`."""
    return expected_losses(weight, params[0].lead, forms(weight, params, stats), stats)


def forms(weight: Tensor, params: Sequence[Params], stats: Stats | None = None) -> list[Form]:
    """What estimates round to, for each of several params: tables fitted to few weights."""
    alike: dict[Rounding, list[int]] = {}
    for i, p in enumerate(params):
        alike.setdefault(_rounding(p), []).append(i)
    tables: dict[int, Levels] = {}
    for own in alike.values():
        tables |= dict(zip(own, _quick(weight, [params[i] for i in own], stats), strict=True))
    return [Form(tables[i], p.group, _rounding(p)) for i, p in enumerate(params)]


def _quick(weight: Tensor, params: Sequence[Params], stats: Stats | None) -> list[Levels]:
    return fit_many(weight, params, stats, QUICK_SAMPLE, QUICK_GAIN)


def proposals(signature: Signature, target: Target, room: Room) -> list[Recipe]:
    """Groups of 32 and of 64; where another method loses less at 4 bits only the faster one, and that for time alone."""
    groups = (32, 64) if room.from_bits <= 4 else (32,) if target.timed else ()
    if not groups:
        room.skip("grid16", f"another method loses less up to {room.from_bits} bits a weight")
    return [Recipe("grid16", {"group": group, "scale_bits": 8}) for group in groups]


def fit(weight: Tensor, params: Params, stats: Stats | None = None, sample: int = SAMPLE) -> Levels:
    """The table fitted to evenly spaced rows of `weight`, as float16 values in ascending order, largest
    magnitude 1.

    Every weight counts with the Hessian's diagonal (its LDL diagonal under ldlq), its row weight and its
    scale squared.
    """
    return fit_many(weight, [params], stats, sample)[0]


def fit_many(
    weight: Tensor,
    params: Sequence[Params],
    stats: Stats | None = None,
    sample: int = SAMPLE,
    least_gain: float = 0.0,
) -> list[Levels]:
    """`fit` for several params with the same rows and rounding, a round of all at a time: a GPU is asked once for each.

    least_gain: the fit of one ends with the first round that lowers its loss by less, as a share; 0: after all rounds.
    """
    stats, common = stats or Stats(), params[0]
    matrix = matrix_view(weight, common.lead)
    rows, cols = matrix.shape
    stats.check(rows, cols)
    picked = slice(None, None, max(1, -(-rows * cols // sample)))
    x = matrix[picked].float().contiguous()
    if not bool(torch.isfinite(x).all()):
        raise ValueError("the weight has NaN or infinite values")
    if common.rounding == "ldlq" and stats.hessian is not None:
        diagonal = stats.ldl(common.damping, common.act_order).importance
    else:
        diagonal = importance(stats, cols, common.damping, x.device)
    mass = diagonal.to(x).expand_as(x)
    if stats.row_weight is not None:
        mass = mass * stats.row_weight.reshape(-1).to(x)[picked].unsqueeze(1)
    forms = [_levels(_SIGNED if p.scale_bits == 16 else _UNSIGNED, p) for p in params]
    best, least, under_way = list(forms), [math.inf] * len(forms), list(range(len(forms)))
    for _ in range(ROUNDS):
        rounded = _rounded(x, [(forms[i], params[i].group) for i in under_way], diagonal)
        found = _sums(x, mass, *rounded).tolist()
        for i, (*sums, lost) in zip(list(under_way), found, strict=True):
            ended = least_gain > 0 and lost > (1 - least_gain) * least[i]
            if lost < least[i]:
                best[i], least[i] = forms[i], lost
            if ended:
                under_way.remove(i)
                continue
            old = forms[i].table or ()
            table = sorted(
                up / down if down > 0 else value
                for up, down, value in zip(sums[:16], sums[16:], old, strict=True)
            )
            peak = max(map(abs, table))
            if peak == 0 or not all(map(math.isfinite, table)):
                under_way.remove(i)
            else:
                forms[i] = _levels(tuple(value / peak for value in table), params[i])
        if not under_way:
            break
    return best


def _rounded(
    x: Tensor, forms: Sequence[tuple[Levels, int]], diagonal: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(scale of every weight, codes, errors), each [forms, rows, cols], of rounding to each of some (levels, group)."""
    rows, cols = x.shape
    if len(forms) > 1 and len(launched_together(x, forms)) == 1:
        errors = x.new_empty(len(forms), rows, cols)
        scales, _, codes = nearest_many(x, forms, diagonal.to(x).contiguous(), None, errors)
        each = [
            per_column(s[:, : group_count(cols, g)], g, cols) for s, (_, g) in zip(scales, forms, strict=True)
        ]
        return torch.stack(each), codes, errors
    found = [sweep_with_errors(x, levels, group, diagonal) for levels, group in forms]
    each = [per_column(r.grid.scale, g, cols) for (r, _), (_, g) in zip(found, forms, strict=True)]
    return torch.stack(each), torch.stack([r.codes for r, _ in found]), torch.stack([e for _, e in found])


def _sums(x: Tensor, mass: Tensor, scale: Tensor, codes: Tensor, error: Tensor) -> Tensor:
    """Of each form by level the sums that its best value is a quotient of, 16 and 16, and the loss: float64 [forms, 33]."""
    weighted = mass * scale
    terms = torch.stack([weighted * x, weighted * scale], 1).flatten(2).double()
    # As a product: sums by index have no fixed order on a GPU.
    stands_for = (codes.flatten(1)[:, None] == torch.arange(16, device=x.device)[:, None]).double()
    sums = torch.stack([t @ s.T for t, s in zip(terms, stands_for, strict=True)]).flatten(1)
    lost = torch.stack([part.sum(dtype=torch.float64) for part in error.square_().mul_(mass)])
    return torch.cat([sums, lost[:, None]], 1)


def _levels(table: tuple[float, ...], params: Params) -> Levels:
    ratios = (1.0, *(1.15 - 0.05 * i for i in range(13)))
    f16 = params.scale_bits == 16
    halves = tuple(torch.tensor(table, device="cpu").half().tolist())
    return Levels(4, table=halves, scale="f16" if f16 else "u8", ratios=ratios, signs=f16)


def _rounding(params: Params) -> Rounding:
    return Rounding(params.rounding, params.damping, params.act_order)
