"""A mix that is to be fast keeps its promise as it measures, or is planned again with less structure."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from nstf.errors import BudgetError
from nstf.kernels.formats import Node, dense
from nstf_convert.pipeline.allocate import plan as plans
from nstf_convert.pipeline.improve import pays
from nstf_convert.pipeline.improve.run import Run
from nstf_convert.pipeline.outcome import Planned, Trial
from nstf_convert.pipeline.propose.candidates import Candidate
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.table import Table

TREE = Node("dense", dense.Params("float32"))
INT3, INT8 = (Recipe("int_grid", {"bits": bits}) for bits in (3, 8))
LOW_RANK = Recipe("svd", {"rank": 4})
SECONDS = {"int_grid": 1.0, "svd": 0.4}
# What the low rank of each tensor is expected to lose.
EXPECTED = (0.9, 0.5, 0.3, 0.2)


class Fast(Run):
    """Four tensors, as integers of 3 or 8 bits or as a low rank; a plan is the fastest that is expected to lose no more than
    3 bits everywhere. A low rank loses `truth` times what is expected, and is healed to a fifth of it; scores are roots of
    squares, as of models that are no language models."""

    truth = 5.0

    def _planned(self, table: Table, budget_bytes: int, weights: Any, exact: bool) -> Planned:
        seen = self._as_planned(table).candidates
        mixes = [dict(zip(seen, found, strict=True)) for found in itertools.product(*seen.values())]
        good = [m for m in mixes if sum(c.loss for c in m.values()) <= len(EXPECTED)]
        best = min(good, key=lambda m: sum(SECONDS[c.recipe.method] for c in m.values()))
        return Planned({n: c.recipe for n, c in best.items()}, sum(c.loss for c in best.values()), 90, "mix")

    def plan(self, budget_bytes: int, weights: Any = None, exact: bool = True) -> Planned:
        return self._planned(self.table, budget_bytes, weights, exact)

    def fast_enough(self, mix: Any, budget_bytes: int) -> bool:
        return pays.decomposed(mix)

    def measure(self, planned: Planned) -> Trial:
        lost = sum(
            c.loss * (self.truth if c.recipe.method == "svd" else 1.0)
            for n, found in self.table.candidates.items() for c in found if c.recipe == planned.mix[n]
        )  # fmt: skip
        trial = Trial(planned, SimpleNamespace(score=lost**0.5))  # type: ignore[arg-type]
        self.tried.append(planned.label)  # type: ignore[arg-type]
        return trial


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Fast:
    single = Planned({str(i): INT3 for i in range(len(EXPECTED))}, 4.0, 80, "uniform int3")
    monkeypatch.setattr(plans, "uniforms", lambda *_: [single])
    session = SimpleNamespace(
        stages=SimpleNamespace(stage=lambda name: nullcontext()),
        options=SimpleNamespace(heals=False, heal_minutes=0.0, heal_steps=None),
        calibration=SimpleNamespace(metadata={"language": False}),
    )
    table = Table({
        str(i): [
            Candidate(INT3, TREE, 20, 1.0), Candidate(INT8, TREE, 50, 0.01),
            Candidate(LOW_RANK, TREE, 20, loss, exact=True),
        ]
        for i, loss in enumerate(EXPECTED)
    })  # fmt: skip
    timing = SimpleNamespace(
        prefer="speed", bounds_time=True, bounds={},
        of=lambda mix: sum(SECONDS[r.method] for r in mix.values()),
    )  # fmt: skip
    return Fast(session, SimpleNamespace(widest=lambda: None), table, set(), timing)  # type: ignore[arg-type]


def structured(mix: Any) -> int:
    return sum(r.method == "svd" for r in mix.values())


def test_a_mix_that_breaks_its_promise_is_planned_again_and_the_second_keeps_it(fast: Fast) -> None:
    first = fast.measure(fast.plan(1000))
    assert structured(first.planned.mix) == 4
    found = pays.structure_that_pays(fast, first, 1000, fast.measure)
    assert structured(found.planned.mix) == 2 and found.score <= 2.0 and not fast.plain_only
    one, two = fast.rounds
    assert (one.factor, one.kept, two.kept) == (1.0, False, True)
    # The decompositions were seen to lose five times as much; the margin comes on top.
    assert two.factor == pytest.approx(pays.MARGIN * 5.0) and fast.factor == two.factor
    assert (one.seconds, two.seconds) == pytest.approx((1.6, 2.8)) and two.promise == pytest.approx(2.0)
    assert fast.tried == ["mix", "uniform int3", "mix, planned again"]


def test_a_promise_that_is_kept_at_once_needs_no_second_plan(fast: Fast) -> None:
    fast.truth = 1.0
    first = fast.measure(fast.plan(1000))
    assert pays.structure_that_pays(fast, first, 1000, fast.measure) is first
    assert len(fast.rounds) == 1 and fast.factor == 1.0


def test_where_no_structure_keeps_the_promise_plans_take_none_and_the_time_of_plans_without(
    fast: Fast,
) -> None:
    fast.truth = 1000.0
    first = fast.measure(fast.plan(1000))
    fast.timing.bounds[1000] = "that of plans with structure"  # type: ignore[union-attr]
    found = pays.structure_that_pays(fast, first, 1000, fast.measure)
    assert structured(found.planned.mix) == 0 and fast.plain_only and not any(r.kept for r in fast.rounds)
    assert found.planned.label == "mix without decompositions" and not fast.timing.bounds  # type: ignore[union-attr]


def test_both_sides_are_healed_before_they_are_compared(fast: Fast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unhealed the first mix loses more than twice what it may; healing takes more off it than off integers."""
    fast.session.options.heals, fast.session.options.heal_steps = True, 30  # type: ignore[misc]
    seen = []

    def heal(session: Any, mix: Any, minutes: float, load: Any, before: Any, steps: int) -> Any:
        seen.append((structured(mix), steps))
        share = 0.2 if structured(mix) else 0.9
        return SimpleNamespace(after=SimpleNamespace(score=before.score * share**0.5), facts={"steps": steps})

    monkeypatch.setattr(pays, "heal", heal)
    first = fast.measure(fast.plan(1000))
    assert first.score > 3.0
    found = pays.structure_that_pays(fast, first, 1000, fast.measure)
    assert found is first and not fast.plain_only  # as it was: the last steps heal it in full
    assert seen == [(0, 10), (4, 10)]
    assert fast.rounds[0].healed_steps == 10 and fast.rounds[0].score < fast.rounds[0].promise


def test_a_factor_that_was_too_large_is_taken_back_where_that_is_fast(
    fast: Fast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first mix measures as if its parts lost a hundred times as much, the others five times."""
    measure = fast.measure

    def uneven(planned: Planned) -> Trial:
        trial = measure(planned)
        score = 20.0 if structured(planned.mix) == 4 else trial.score
        return Trial(planned, SimpleNamespace(score=score))  # type: ignore[arg-type]

    monkeypatch.setattr(
        pays, "MARGIN", 0.05
    )  # 100 x 0.05: the second plan keeps its promise with room to spare
    first = uneven(fast.plan(1000))
    monkeypatch.setattr(pays, "SLACK", 0.9)
    found = pays.structure_that_pays(fast, first, 1000, uneven)
    kept = [r for r in fast.rounds if r.kept]
    assert found.score <= 2.0 and min(r.seconds for r in kept) == pytest.approx(
        fast.timing.of(found.planned.mix)
    )  # type: ignore[union-attr]
    assert len(fast.rounds) > 2 and fast.factor == min(r.factor for r in kept)


def test_a_mix_that_alone_is_small_enough_stays(fast: Fast, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(run: Run, budget_bytes: int) -> Planned:
        raise BudgetError("too small", 1)

    first = fast.measure(fast.plan(1000))
    monkeypatch.setattr(Run, "without_structure", none)
    assert pays.structure_that_pays(fast, first, 1000, fast.measure) is first and not fast.rounds


@pytest.mark.parametrize(
    ("of_loss", "of_time", "thorough", "prefer", "leaves"),
    [
        (1.01, 1.01, False, "balance", True),
        (1.01, 1.05, False, "balance", False),
        (1.05, 1.00, False, "balance", False),
        (0.99, 1.00, False, "balance", True),
        (1.01, 1.01, True, "balance", False),
        (1.01, 1.01, False, "speed", False),
        (1.01, 1.05, False, "size", True),
    ],
)
def test_decompositions_that_are_expected_to_save_next_to_nothing_are_left_before_they_are_measured(
    fast: Fast, monkeypatch: pytest.MonkeyPatch,
    of_loss: float, of_time: float, thorough: bool, prefer: str, leaves: bool,
) -> None:  # fmt: skip
    """Either way the plan without them is made once, and measured once at most."""
    fast.session.options.level = SimpleNamespace(every_family=thorough)
    fast.timing = SimpleNamespace(  # type: ignore[assignment]
        prefer=prefer, bounds_time=prefer != "size", of=lambda mix: 1.0 if pays.decomposed(mix) else of_time,
    )  # fmt: skip
    planned = fast.plan(1000)
    other = Planned(dict.fromkeys(planned.mix, INT8), of_loss * planned.expected_loss, 90, "mix")
    monkeypatch.setattr(Fast, "without_structure", lambda *_: other)
    found, plain = pays.worth_structure(fast, planned, 1000)
    assert fast.plain_only is leaves and not fast.tried
    assert (found.mix == other.mix and plain is None) if leaves else found is planned
    if not leaves:
        assert plain is (None if thorough or prefer == "speed" else other)
