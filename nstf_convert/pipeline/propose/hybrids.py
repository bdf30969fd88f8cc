"""Hybrids: a low-rank correction with 4-bit factors added to a low-bit base. They pay only at very low rates, if at all."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from nstf.decomposers.factors import lead_for
from nstf.kernels.formats import decode
from nstf.quantizers.stats import Stats
from nstf_convert.pipeline.propose import candidates as cand
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.pipeline.propose.candidates import Candidate
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import Unit
from nstf_convert.planner.hull import Option, lower_hull

# The loss of a base follows the energy that it stores about as well as this.
ENERGY_SLACK = 0.95


def all_recipes(allowed: set[str]) -> list[Recipe]:
    """Those that are tried, with methods among `allowed`."""
    integers = [
        Recipe("int_grid", {"bits": b, "group": 64, "symmetric": True, "scale_bits": 8}) for b in (2, 3, 4)
    ]
    codes = [Recipe("trellis", {"quarter_bits": q}) for q in (6, 8, 10)]
    bases = [(base, rank) for base in integers for rank in (8, 24)]
    bases += [(base, rank) for base in codes for rank in (8, 16, 32)]
    return [
        Recipe(
            "add",
            {},
            {"base": base, "correction": Recipe("svd", {"rank": rank}, {"factor": cand.FACTORS[1]})},
        )
        for base, rank in bases
        if base.method in allowed
    ]


def that_may_win(
    unit: Unit, wanted: Sequence[Recipe], inner: Tensor, stats: Stats, rivals: Sequence[Candidate]
) -> list[Recipe]:
    """Hybrids that the energy a correction can take away at most does not rule out.

    Trellis codes lose in proportion to the energy of what they store. Integers lose by the range of their groups, which a
    correction may narrow by far more, but never less than trellis codes of as many bits; where these are not among the
    rivals no hybrid of integers is ruled out. What no correction of a rank can take away follows from a bound
    (`svd.low_rank_bounds`), and where that does not settle it from the singular values. Rivals are taken by their lower
    hull: between two of them a plan spends bytes on other tensors. rivals: other candidates of the tensor.
    """
    from nstf.decomposers import svd

    rows = math.prod(unit.inner_shape[: unit.lead])
    matrix = inner.reshape(rows, -1)
    weight = None if stats.row_weight is None else stats.row_weight.reshape(-1)
    options = [Option(c.size_bytes, c.loss) for c in rivals]
    hull = [options[i] for i in lower_hull(options)]
    codes = {c.recipe.params.get("quarter_bits"): c.loss for c in rivals if c.recipe.method == "trellis"}

    def promising(left: Sequence[float], some: Sequence[Recipe]) -> list[Recipe]:
        """Those of some hybrids whose base beats the hull on the share of the energy that is left at each rank."""
        bases = [codes.get(_quarter_bits(r.parts["base"]), 0.0) for r in some]
        least = [ENERGY_SLACK * left[_rank(r)] * base for r, base in zip(some, bases, strict=True)]
        return [r for r, v in zip(some, least, strict=True) if v < _on_hull(hull, cand.price(unit, r)[1])]

    most = max(_rank(r) for r in wanted)
    bounds = svd.low_rank_bounds(matrix, None, weight, range(most + 1))
    possible = promising([b / max(bounds[0], 1e-300) for b in bounds], wanted)
    if not possible:
        return []
    energy = svd.singular_values(matrix, None, weight).square()
    tails = energy.flip(0).cumsum(0).flip(0)[: most + 1] / energy.sum().clamp_min(1e-300)
    return promising(tails.tolist(), possible)


def _quarter_bits(base: Recipe) -> int:
    return int(base.params["quarter_bits"] if base.method == "trellis" else 4 * base.params["bits"])


def _on_hull(hull: Sequence[Option], size_bytes: int) -> float:
    """The loss that mixing the hull's options gives at a size; infinite below the smallest."""
    sizes, losses = [float(o.size_bytes) for o in hull], [o.loss for o in hull]
    return float(np.interp(size_bytes, sizes, losses, left=math.inf))


def losses(
    unit: Unit,
    wanted: Sequence[Recipe],
    inner: Tensor,
    stats: Stats,
    prepared: Any,
    rivals: Sequence[Candidate],
) -> list[tuple[Recipe, float]]:
    """Hybrids that may win with expected losses: their corrections really made and rounded, their bases estimated on what
    is left.

    A correction before its factors are rounded loses less: where a rival of no more bytes loses less than even that, the
    hybrid is left out. rivals: other candidates of the tensor.
    """
    out = []
    for rank in dict.fromkeys(_rank(recipe) for recipe in wanted):
        own = [r for r in wanted if _rank(r) == rank]
        left = inner - prepared.truncate(rank).dense()
        possible = [r for r in own if not _beaten(unit, r, _base_loss(unit, r, left, stats), rivals)]
        for recipe in possible:
            correction = _correction(recipe, prepared, rank)
            left = inner - decode(recipes.on_device(correction, inner.device)).reshape(inner.shape)
            out.append((recipe, _base_loss(unit, recipe, left, stats)))
    return out


def _rank(hybrid: Recipe) -> int:
    return int(hybrid.parts["correction"].params["rank"])


def _base_loss(unit: Unit, hybrid: Recipe, left: Tensor, stats: Stats) -> float:
    """The loss that a hybrid's base is expected to have on what its correction leaves."""
    base = hybrid.parts["base"]
    if base.method == "trellis":
        return recipes.estimate(base, left, stats, unit.lead)
    sample, sampled = cand.sample_rows(unit, left, stats)
    return recipes.estimate(base, sample, sampled, 1)


def _beaten(unit: Unit, recipe: Recipe, value: float, rivals: Sequence[Candidate]) -> bool:
    size = cand.price(unit, recipe)[1]
    return any(c.size_bytes <= size and c.loss <= value for c in rivals)


def _correction(recipe: Recipe, prepared: Any, rank: int) -> Any:
    factor = recipe.parts["correction"].parts["factor"]

    def leaf(name: str, value: Tensor, metric: Tensor | None) -> Any:
        return recipes.encode(factor, value.contiguous(), Stats(metric), lead_for(tuple(value.shape)))

    return prepared.truncate(rank).encode(leaf)
