"""Which decompositions are tried: those that a cheap look at the tensor does not rule out."""

import pytest
import torch

from nstf.decomposers import svd
from nstf.quantizers.stats import Stats, loss
from nstf_convert.pipeline.propose import candidates as cand
from nstf_convert.pipeline.propose import hybrids
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.pipeline.propose.candidates import Candidate
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import Unit


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rivals_of(unit: Unit, inner: torch.Tensor) -> list[Candidate]:
    wanted = cand.quantised_recipes()
    losses = cand.estimates(unit, inner, Stats(), wanted)
    found = [*zip(wanted, losses, strict=True), *cand.trellis_recipes(unit, inner, Stats())]
    return [Candidate(r, *cand.price(unit, r), v) for r, v in found]


def structured(role: str, inner: torch.Tensor) -> list[Recipe]:
    lead = 2 if role == "expert_stack" else 1
    unit = Unit("w", tuple(inner.shape), "float32", role, lead=lead)
    signal = loss(inner, torch.zeros_like(inner), Stats(), lead)
    return cand.structured_recipes(unit, inner, Stats(), None, rivals_of(unit, inner), signal)


@pytest.mark.parametrize(("role", "shape"), [("conv", (64, 48, 3, 3)), ("expert_stack", (16, 64, 64))])
def test_of_noise_no_decomposition_is_tried_and_of_structure_some_are(role, shape, monkeypatch) -> None:
    # Ranks of CP may exceed those of the unfoldings, which then say nothing.
    assert {r.method for r in structured(role, normal(*shape))} <= {"cp"}
    # Rank one along every axis but for a little noise.
    factors = [
        normal(n, seed=i).reshape([-1 if i == j else 1 for j in range(len(shape))])
        for i, n in enumerate(shape)
    ]
    plain = torch.stack([f.expand(shape) for f in factors]).prod(0)
    whole = structured(role, plain + 1e-3 * normal(*shape))
    assert {"cp", "tucker", "tensor_train"} >= {r.method for r in whole} > {"cp"}
    if role == "expert_stack":
        monkeypatch.setattr(cand, "LARGEST_STACK", plain.numel() // 2)
        assert structured(role, normal(*shape)) == []
        again = structured(role, plain + 1e-3 * normal(*shape))
        assert again == [r for r in whole if r.method != "cp"]


def test_a_hybrid_is_left_out_only_where_its_correction_cannot_pay() -> None:
    noise = 0.02 * normal(64, 96)
    outliers = normal(64, 8, seed=1) @ normal(8, 96, seed=2)
    found = {}
    for name, weight in (("noise", noise), ("outliers", noise + outliers)):
        unit = Unit("w", (64, 96), "float32", "mlp")
        prepared = svd.prepare(weight)
        wanted = [r for r in hybrids.all_recipes({"int_grid", "add"}) if hybrids._rank(r) == 8]
        rivals = rivals_of(unit, weight)
        found[name] = hybrids.losses(unit, wanted, weight, Stats(), prepared, rivals)
        possible = hybrids.that_may_win(unit, wanted, weight, Stats(), rivals)
        assert {str(r) for r, _ in found[name]} <= {str(r) for r in possible}
        assert bool(possible) == (name == "outliers")
        integers = [c for c in rivals if c.recipe.method != "trellis"]
        assert len(hybrids.that_may_win(unit, wanted, weight, Stats(), integers)) == len(wanted)
        for recipe, value in found[name]:
            made = recipes.encode(recipe, weight, Stats(), 1)
            true = loss(weight, recipes.decode(made).reshape(weight.shape), Stats(), 1)
            assert value == pytest.approx(true, rel=0.3)
    assert not found["noise"] and found["outliers"]


def test_few_candidates_are_the_integers_beyond_the_trellis_codes_where_there_are_any() -> None:
    allowed = cand.method_families(None)

    def methods(few: bool, cols: int = 64, allowed: set[str] = allowed) -> list[tuple[str, int | None]]:
        unit = Unit("w", (128, cols), "bfloat16", "mlp")
        return [(r.method, r.params.get("bits")) for r in cand.simple_recipes(unit, allowed, few)]

    assert set(methods(True)) == {("int_grid", 6), ("int_grid", 7), ("int_grid", 8), ("dense", None)}
    assert set(methods(True)) < set(methods(False)) and ("int_grid", 2) in methods(False)
    for without in ({"cols": 8}, {"allowed": allowed - {"trellis"}}):
        assert methods(True, **without) == methods(False, **without)


def test_few_candidates_of_a_timed_plan_have_fast_forms_of_every_width_among_them() -> None:
    unit = Unit("w", (128, 64), "bfloat16", "mlp")
    allowed = cand.method_families(None, timed=True)
    found = cand.simple_recipes(unit, allowed, few=True, timed=True)
    assert {r.params["bits"] for r in found if r.method == "int_grid" and r.params["group"] == 32} == set(
        range(2, 9)
    )
    assert {"shuffle", "grid16", "dense"} < {r.method for r in found}
    assert len(found) < len(cand.simple_recipes(unit, allowed, few=False)) * 0.7
