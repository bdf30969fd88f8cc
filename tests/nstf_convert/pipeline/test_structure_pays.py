"""Plans take decompositions that were made, and only where the file measures better with them."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nstf.kernels.formats import Node, dense
from nstf_convert.pipeline.allocate import plan as plans
from nstf_convert.pipeline.improve import max_kl, pays
from nstf_convert.pipeline.improve import run as runs
from nstf_convert.pipeline.improve import search as searches
from nstf_convert.pipeline.improve.run import Run
from nstf_convert.pipeline.outcome import Planned, Trial
from nstf_convert.pipeline.propose.candidates import Candidate
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.table import Table

TREE = Node("dense", dense.Params("float32"))
PLAIN = Candidate(Recipe("int_grid", {"bits": 4}), TREE, 100, 5.0)


def low_rank(rank: int, loss: float, exact: bool = False) -> Candidate:
    return Candidate(Recipe("svd", {"rank": rank}), TREE, 90, loss, exact)


class Fake(Run):
    """One tensor; decompositions lose 10 when they are made."""

    def encode(self, planned: Planned) -> None:
        self.table = self.table.replaced({n: (r, 10.0) for n, r in planned.mix.items()})

    def measure(self, planned: Planned) -> Trial:
        self.tried.append({"planned": planned})
        decomposed = any(r.family == "decomposed" for r in planned.mix.values())
        return Trial(planned, SimpleNamespace(score=2.0 if decomposed else 1.0))  # type: ignore[arg-type]


def least(session: Any, table: Table, *_: Any) -> Planned:
    """The plan of the candidate that is expected to lose least."""
    best = min(table.candidates["w"], key=lambda c: c.loss)
    return Planned({"w": best.recipe}, best.loss, best.size_bytes, "mix")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setattr(plans, "plan_mix", least)
    monkeypatch.setattr(plans, "exact_size", lambda *_: 100)
    session = SimpleNamespace(
        stages=SimpleNamespace(stage=lambda name: nullcontext()),
        statistics=SimpleNamespace(has_hessian=lambda unit: True),
        units={"w": None},
        options=SimpleNamespace(level=SimpleNamespace(thorough=False), search_limits=None, heals=False),
        calibration=None,
    )
    table = Table({"w": [PLAIN, *(low_rank(r, 1.0 + 0.1 * r) for r in range(1, 9))]})
    return Fake(session, SimpleNamespace(widest=lambda: None), table, set())  # type: ignore[arg-type]


def test_a_plan_has_no_decomposition_that_was_not_made_however_many_disappoint(fake: Fake) -> None:
    assert len(fake.table.candidates["w"]) - 1 > runs.CONFIRM_ROUNDS
    planned = fake.plan(1000)
    assert planned.mix["w"] == PLAIN.recipe
    made = [c for c in fake.table.candidates["w"] if c.exact]
    assert len(made) == runs.CONFIRM_ROUNDS and all(c.loss == 10.0 for c in made)


def test_ranks_that_are_found_for_a_plan_are_confirmed_too(fake: Fake) -> None:
    chosen = low_rank(1, 1.0, exact=True)
    fake.table = Table({"w": [PLAIN, chosen]})
    hybrid = Candidate(Recipe("add", {}, {}), TREE, 90, 0.5)
    fake.session.encoder = SimpleNamespace(  # type: ignore[misc]
        each=lambda units, work, tick: {"w": [hybrid]}, grown=lambda *_: [hybrid]
    )
    start = replace(fake._planned(fake.table, 1000, None, True), price=1.0)
    assert fake._with_ranks(start, 1000, None, True).mix["w"] == chosen.recipe
    assert fake.table.find("w", hybrid.recipe).loss == 10.0  # type: ignore[union-attr]


def test_structure_that_measures_worse_is_left_to_no_later_plan(fake: Fake) -> None:
    fake.table = Table({"w": [PLAIN, low_rank(1, 1.0, exact=True)]})
    mix = fake.measure(fake.plan(1000))
    assert mix.planned.mix["w"].family == "decomposed"
    better = pays.structure_that_pays(fake, mix, 1000, fake.measure)
    assert better.planned.mix["w"] == PLAIN.recipe
    assert fake.plan(1000).mix["w"] == PLAIN.recipe
    assert len(fake.table.candidates["w"]) == 2  # the report still has them


@pytest.mark.parametrize(("single_score", "kept"), [(3.0, True), (1.5, False)])
def test_a_plain_file_that_is_too_slow_is_no_rival_of_a_fast_one(
    fake: Fake, monkeypatch: Any, single_score: float, kept: bool
) -> None:
    """Under `speed` structure may lose as much as the single format of the bound, which here is slower than all."""
    int3 = Candidate(Recipe("int_grid", {"bits": 3}), TREE, 80, 6.0)
    fake.table = Table({"w": [PLAIN, int3, low_rank(1, 1.0, exact=True)]})
    mix = fake.measure(fake.plan(1000))
    single = Planned({"w": int3.recipe}, 6.0, 80, "uniform int3")
    monkeypatch.setattr(plans, "uniforms", lambda *_: [single])
    monkeypatch.setattr(Run, "fast_enough", lambda *_: False)
    fake.timing = SimpleNamespace(prefer="speed", bounds_time=False, bounds={}, of=lambda mix: 1.0)  # type: ignore[assignment]

    def steps(planned: Planned) -> Trial:
        trial = fake.measure(planned)
        score = single_score if planned is single else trial.score
        return Trial(planned, SimpleNamespace(score=score))  # type: ignore[arg-type]

    found = pays.structure_that_pays(fake, mix, 1000, steps)
    assert (found is mix) == kept and fake.plain_only != kept


@pytest.mark.parametrize("plain_only", [False, True])
def test_single_steps_of_the_search_bring_no_decomposition_back(fake: Fake, plain_only: bool) -> None:
    larger = Candidate(Recipe("svd", {"rank": 9}), TREE, 110, 1.0, exact=True)
    fake.table, fake.plain_only = Table({"w": [PLAIN, larger]}), plain_only
    start = fake.measure(Planned({"w": PLAIN.recipe}, PLAIN.loss, PLAIN.size_bytes, "mix"))
    found = [p.mix["w"] for p, _ in searches._singles(fake, searches._State(start), 1000)]
    assert found == ([] if plain_only else [larger.recipe])


RANKS = {4: 0.4, 8: 0.2, 16: 0.1, 24: 0.05}


class Ranked(Fake):
    """Two tensors within 100 bytes: one as a low rank of as many bytes as its rank or in 90 bytes of integers, one in some
    bits of 10 bytes each. A low rank loses `truth` times what is expected of it."""

    truth = 6.0

    def _planned(self, table: Table, budget_bytes: int, weights: Any, exact: bool) -> Planned:
        seen = self._as_planned(table).candidates
        pairs = [(a, b) for a in seen["w"] for b in seen["v"] if a.size_bytes + b.size_bytes <= 100]
        a, b = min(pairs, key=lambda p: p[0].loss + p[1].loss)
        return Planned(
            {"w": a.recipe, "v": b.recipe}, a.loss + b.loss, a.size_bytes + b.size_bytes, "mix", 0.01
        )

    def encode(self, planned: Planned) -> None:
        pass

    def measure(self, planned: Planned) -> Trial:
        found = {n: self.table.find(n, r) for n, r in planned.mix.items()}
        score = sum(c.loss * (self.truth if c.recipe.method == "svd" else 1.0) for c in found.values())
        return Trial(planned, SimpleNamespace(score=score))  # type: ignore[arg-type]


@pytest.fixture
def ranked(fake: Fake) -> Ranked:
    """The first plan knows a rank of 8; the others are found when its ranks are adapted."""
    prices = []

    def grown(unit: Any, allowed: Any, chosen: Candidate, price: float) -> list[Candidate]:
        prices.append(price)
        return [Candidate(Recipe("svd", {"rank": r}), TREE, r, loss, True) for r, loss in RANKS.items()]

    session = SimpleNamespace(
        **{**vars(fake.session), "units": {n: SimpleNamespace(name=n) for n in "wv"}},
        encoder=SimpleNamespace(
            grown=grown, each=lambda units, work, tick: {u.name: work(u) for u in units},
        ),
    )  # fmt: skip
    plain = Candidate(Recipe("int_grid", {"bits": 6}), TREE, 60, 0.9)
    bits = [Candidate(Recipe("int_grid", {"bits": b}), TREE, 10 * b, 4.0 ** (2 - b / 2)) for b in range(3, 9)]
    first = [Candidate(Recipe("svd", {"rank": 8}), TREE, 8, 0.2, True), plain]
    run = Ranked(session, SimpleNamespace(widest=lambda: None), Table({"w": first, "v": bits}), set())  # type: ignore[arg-type]
    run.prices = prices  # type: ignore[attr-defined]
    return run


def rank_in(trial: Trial) -> int:
    return int(trial.planned.mix["w"].params["rank"])


def test_ranks_follow_what_the_mix_measured(ranked: Ranked) -> None:
    """At first 20 bytes go to the other tensor's bits; that a low rank loses six times as much is worth them to its rank."""
    mix = ranked.measure(
        Planned({"w": low_rank(8, 0.2).recipe, "v": Recipe("int_grid", {"bits": 8})}, 0.2, 88, "mix")
    )
    found = pays.structure_that_pays(ranked, mix, 100, ranked.measure)
    assert rank_in(found) > 8 and found.score < mix.score and not ranked.plain_only
    assert ranked.factor == pytest.approx(6.0, rel=0.3) and ranked.rounds[0].factor == 1.0
    # What a byte of its ranks is worth is held against what they measured, not against what was expected.
    assert ranked.prices[-1] == pytest.approx(0.01 / ranked.factor)  # type: ignore[attr-defined]


def test_next_ranks_of_convolutions_are_worked_out_where_time_is_bounded(ranked: Ranked) -> None:
    """At no price of a byte too: what such a plan is short of is time."""
    asked = []
    ranked.session.units["w"].role = "conv"
    ranked.session.units["v"].role = "up"
    ranked.session.encoder.beside = lambda unit, allowed, recipe: (
        asked.append(recipe) or [replace(low_rank(16, 0.1, True), size_bytes=16)]
    )
    ranked.timing = SimpleNamespace(bounds_time=True, bounds={})  # type: ignore[assignment]
    planned = replace(ranked.planned(1000, None, True), price=0.0)
    assert ranked._with_ranks(planned, 1000, None, True).mix["w"] == low_rank(16, 0.1).recipe
    assert asked == [low_rank(8, 0.2).recipe] and ranked.prices == []  # type: ignore[attr-defined]
    ranked.timing = SimpleNamespace(bounds_time=False, bounds={})  # type: ignore[assignment]
    ranked.grown.clear()
    assert ranked._with_ranks(planned, 1000, None, True) is planned


def test_ranks_that_lose_what_is_expected_of_them_stay(ranked: Ranked) -> None:
    ranked.truth = 1.0
    mix = ranked.measure(
        Planned({"w": low_rank(8, 0.2).recipe, "v": Recipe("int_grid", {"bits": 8})}, 0.2, 88, "mix")
    )
    assert pays.structure_that_pays(ranked, mix, 100, ranked.measure) is mix
    assert len(ranked.rounds) == 1 and ranked.factor == 1.0 and ranked.prices == []  # type: ignore[attr-defined]


def test_a_mix_of_other_ranks_that_measures_worse_is_not_kept(ranked: Ranked) -> None:
    mix = ranked.measure(
        Planned({"w": low_rank(8, 0.2).recipe, "v": Recipe("int_grid", {"bits": 8})}, 0.2, 88, "mix")
    )

    def worse(planned: Planned) -> Trial:
        trial = ranked.measure(planned)
        return replace(trial, measured=SimpleNamespace(score=trial.score + 10.0 * decomposed(planned)))

    def decomposed(planned: Planned) -> bool:
        return pays.decomposed(planned.mix)

    assert pays.structure_that_pays(ranked, mix, 100, worse) is mix
    assert ranked.factor == 1.0 and not ranked.plain_only and len(ranked.rounds) > 1


def test_under_a_bound_on_the_loss_structure_has_to_pay_too(fake: Fake, monkeypatch: Any) -> None:
    fake.table = Table({"w": [PLAIN, low_rank(1, 1.0, exact=True)]})
    monkeypatch.setattr(max_kl, "_range", lambda run: (0, 1000))
    monkeypatch.setattr(max_kl, "_encoded", lambda run, best: SimpleNamespace(measured=None, best=best))
    monkeypatch.setattr(max_kl, "replace", lambda final, search: final)
    final: Any = max_kl._within(fake, 3.0, 3.0)
    assert final.best.score == 1.0 and final.best.planned.mix["w"] == PLAIN.recipe
