"""Which plain formats and which corrections of them are tried."""

from pathlib import Path

import pytest
import torch

from nstf.analyzers.signatures import Signature
from nstf.decomposers import add
from nstf.proposals import Room, Target
from nstf.quantizers.stats import Stats, loss
from nstf_convert.pipeline.machine import machine
from nstf_convert.pipeline.propose import candidates as cand
from nstf_convert.pipeline.propose import methods, structure
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.pipeline.propose.candidates import Candidate
from nstf_convert.pipeline.propose.encoder import Encoder
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import Statistics, Unit
from nstf_convert.pipeline.store.workdir import WorkDir


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["noise", "outliers"])
def test_a_hybrid_is_left_out_only_where_its_correction_cannot_pay(kind) -> None:
    weight = 0.02 * normal(64, 96)
    if kind == "outliers":
        weight = weight + normal(64, 8, seed=1) @ normal(8, 96, seed=2)
    unit, known = Unit("w", (64, 96), "float32", "mlp"), Signature(weight, Stats())
    simple = cand.plain_recipes(known, methods.method_families(None), few=False)
    losses = cand.estimates(known, simple)
    rivals = [Candidate(r, *cand.price(unit, r), v) for r, v in zip(simple, losses, strict=True)]

    def proposed(*allowed: str, bits: float = 3.0) -> list[Recipe]:
        among = [c for c in rivals if c.recipe.method in (*allowed, "dense")]
        points = [(cand.arrays_bytes(unit, c.recipe), c.loss) for c in among]
        room = Room(
            frozenset(allowed), rival=structure.rival_of(points, known.signal), planned=bits,
            size_of=lambda recipe: cand.arrays_bytes(unit, recipe),
        )  # fmt: skip
        return add.proposals(known, Target(), room)

    possible = [r for r in proposed("int_grid", "trellis") if r.parts["base"].method == "int_grid"]
    assert bool(possible) == (kind == "outliers")
    assert proposed("int_grid", "trellis", bits=4.5) == []
    # Integers may gain more than the energy says: where no better code is allowed none of them is ruled out. A rank of 24
    # is more than a quarter.
    assert len(proposed("int_grid")) == 3
    tools = cand.tools(unit, known, rivals)
    found = methods.losses(known, possible, tools, lambda recipe: pytest.fail("it was made"))
    assert bool(found) == (kind == "outliers")
    for recipe, value in found:
        made = recipes.encode(recipe, weight, Stats(), 1)
        true = loss(weight, recipes.decode(made).reshape(weight.shape), Stats(), 1)
        assert value == pytest.approx(true, rel=0.3)


@pytest.mark.parametrize("engine", ["gguf", "onnx"])
def test_at_the_bits_of_a_plan_an_engine_gets_nothing_that_it_cannot_hold(
    engine: str, tmp_path: Path
) -> None:
    weight, unit = normal(64, 128), Unit("w", (64, 128), "float32", "up")
    allowed = methods.method_families([f"for:{engine}"])
    with WorkDir(tmp_path / "work", {}) as work:
        encoder = Encoder(
            work, lambda name: weight, Statistics(None), "x", None, machine("cpu", None, None, 1)
        )
        held = {c.recipe for c in encoder.candidates(unit, allowed)}
        assert held and encoder.at_few_bits(unit, allowed, 3.0) == []


def test_few_candidates_are_the_integers_beyond_the_trellis_codes_where_there_are_any() -> None:
    allowed = methods.method_families(None)

    def tried(few: bool, cols: int = 64, allowed: set[str] = allowed) -> list[tuple[str, int | None]]:
        known = Signature(normal(128, cols), Stats(), dtype="bfloat16")
        found = cand.plain_recipes(known, allowed, few)
        return [(r.method, r.params.get("bits")) for r in found if r.method != "trellis"]

    assert set(tried(True)) == {("int_grid", 6), ("int_grid", 7), ("int_grid", 8), ("dense", None)}
    assert set(tried(True)) < set(tried(False)) and ("int_grid", 2) in tried(False)
    for without in ({"cols": 8}, {"allowed": allowed - {"trellis"}}):
        assert [m for m in tried(True, **without) if m[0] == "int_grid"] == [
            m for m in tried(False, **without) if m[0] == "int_grid"
        ]


def test_few_candidates_of_a_timed_plan_have_fast_forms_of_every_width_among_them() -> None:
    known = Signature(normal(128, 64), Stats(), dtype="bfloat16")
    allowed = methods.method_families(None, timed=True)
    found = cand.plain_recipes(known, allowed, few=True, timed=True)
    assert {r.params["bits"] for r in found if r.method == "int_grid" and r.params["group"] == 32} == set(
        range(2, 9)
    )
    assert {"shuffle", "grid16", "dense"} < {r.method for r in found}
    plain = [r for r in cand.plain_recipes(known, allowed, few=False) if r.method != "trellis"]
    assert len([r for r in found if r.method != "trellis"]) < len(plain) * 0.7
