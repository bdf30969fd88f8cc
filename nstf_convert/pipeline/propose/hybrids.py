"""Expected losses of corrections on low-bit bases (nstf.decomposers.add): the correction made, the base estimated."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from nstf.decomposers import svd
from nstf.decomposers.add import rank_of
from nstf.decomposers.factors import lead_for
from nstf.kernels.formats import decode
from nstf.proposals import Signature
from nstf.quantizers.stats import Stats
from nstf_convert.pipeline.propose import candidates as cand
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.pipeline.propose.candidates import Candidate
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import Unit


def losses(
    unit: Unit, wanted: Sequence[Recipe], known: Signature, rivals: Sequence[Candidate]
) -> list[tuple[Recipe, float]]:
    """Hybrids that may win with expected losses: their corrections really made and rounded, their bases estimated on what
    is left.

    A correction before its factors are rounded loses less: where a rival of no more bytes loses less than even that, the
    hybrid is left out. rivals: other candidates of the tensor.
    """
    inner, stats = known.weight, known.stats
    prepared = svd.prepare(inner, stats.hessian, stats.row_weight, unit.lead)
    out = []
    for rank in dict.fromkeys(rank_of(recipe) for recipe in wanted):
        own = [r for r in wanted if rank_of(r) == rank]
        left = inner - prepared.truncate(rank).dense()
        possible = [r for r in own if not _beaten(unit, r, _base_loss(unit, r, left, stats), rivals)]
        for recipe in possible:
            correction = _correction(recipe, prepared, rank)
            left = inner - decode(recipes.on_device(correction, inner.device)).reshape(inner.shape)
            out.append((recipe, _base_loss(unit, recipe, left, stats)))
    return out


def _base_loss(unit: Unit, hybrid: Recipe, left: Tensor, stats: Stats) -> float:
    """The loss that a hybrid's base is expected to have on what its correction leaves."""
    base = hybrid.parts["base"]
    if cand.every_row(base):
        return recipes.estimate(base, left, stats, unit.lead)
    sample, sampled = cand.sample_rows(left, stats, unit.lead)
    return recipes.estimate(base, sample, sampled, 1)


def _beaten(unit: Unit, recipe: Recipe, value: float, rivals: Sequence[Candidate]) -> bool:
    size = cand.price(unit, recipe)[1]
    return any(c.size_bytes <= size and c.loss <= value for c in rivals)


def _correction(recipe: Recipe, prepared: Any, rank: int) -> Any:
    factor = recipe.parts["correction"].parts["factor"]

    def leaf(name: str, value: Tensor, metric: Tensor | None) -> Any:
        return recipes.encode(factor, value.contiguous(), Stats(metric), lead_for(tuple(value.shape)))

    return prepared.truncate(rank).encode(leaf)
