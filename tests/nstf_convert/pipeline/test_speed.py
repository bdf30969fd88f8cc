"""Decode speed beside bytes and loss: bounds on time, preferences, targets."""

from dataclasses import replace

import pytest

from nstf.errors import BudgetError, UsageError
from nstf.kernels.cpu.engine_matrix import available
from nstf.kernels.triton.architecture import ARCHITECTURES
from nstf_convert.pipeline import convert, frontier, plan
from nstf_convert.pipeline.allocate import bounds
from nstf_convert.pipeline.allocate.plan import uniforms
from nstf_convert.pipeline.allocate.timing import PLAIN, Timing, only, uses_of
from nstf_convert.pipeline.header import Meta
from nstf_convert.pipeline.improve.run import Run
from nstf_convert.pipeline.mix import tree_of
from nstf_convert.pipeline.outcome import Planned
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.propose.methods import method_families
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.table import build_table
from nstf_convert.pipeline.propose.units import Unit
from nstf_convert.pipeline.session import Session
from nstf_convert.planner import TooSlow
from nstf_convert.report import frontier as drawn
from nstf_convert.report.speed import pairs
from nstf_convert.speed import cache, measure, model, targets, token
from nstf_convert.speed.token import Token

FORMATS = ("int_grid", "grid16", "shuffle", "trellis")


@pytest.fixture
def modelled(monkeypatch, tmp_path):
    """Every CPU by its model, without the time that a product takes to start: the matrices here are tiny."""
    family = {"avx2": "avx2", "neon": "neon"}

    def fake(atoms, isa, threads, size_bytes, batch=1):
        name = family.get(isa.split("-")[0], "avx512")
        return {a: model.seconds(targets.Target(name, isa, False), a) for a in atoms}

    monkeypatch.setattr(measure, "measure", fake)
    monkeypatch.setattr(cache, "folder", lambda: tmp_path / "speeds")
    monkeypatch.setattr(model, "CPUS", {n: replace(c, start_s=1e-12) for n, c in model.CPUS.items()})
    monkeypatch.setattr(Token, "_beside", lambda self, target: 1e-9)
    monkeypatch.setattr(Token, "run", lambda self, target, seconds, stored: self.rate(target, seconds))


@pytest.fixture
def quick_plan(options):
    """plan() of the small model on a target: its report."""

    def make(target: str, budget: float = 0.45, **changes):
        settings = {"formats": FORMATS, "prefer": "balance", "target": target} | changes
        return plan(options(("ratio", budget), **settings))

    return make


def bytes_of(report: dict, *kinds: str) -> int:
    return sum(t["size_bytes"] for t in report["tensors"] if t["encoding"].startswith(kinds))


def test_two_targets_get_different_formats_because_trellis_codes_are_slow_on_one(
    modelled, quick_plan
) -> None:
    slow, fast = quick_plan("avx2"), quick_plan("avx512")
    # Sums of bytes cost 0.6 cycles a weight with AVX2, more than reading it, and 0.15 with AVX-512.
    assert bytes_of(slow, "trellis") < 0.5 * bytes_of(fast, "trellis")
    others = ("shuffle", "int", "grid")
    assert bytes_of(slow, *others) > bytes_of(fast, *others)
    for report in (slow, fast):
        (found,) = report["speed"]["targets"]
        assert found["products_seconds"] <= report["speed"]["bound_seconds"] * 1.02
        assert report["speed"]["bound"] == "0.9 of the speed of an int or grid file of this size"


def test_a_file_for_two_targets_keeps_the_bound_on_both(modelled, quick_plan) -> None:
    alone = {name: quick_plan(name)["speed"] for name in ("avx2", "neon")}
    both = quick_plan("avx2,neon")["speed"]
    for found in both["targets"]:
        assert found["products_seconds"] <= 1.02 * alone[found["target"]]["bound_seconds"]


def test_a_file_for_a_gpu_has_groups_alike_where_that_saves_launches(options, modelled) -> None:
    def planned(least: str | None) -> tuple[float, list[list[str]]]:
        settings = {"formats": ("int_grid", "trellis"), "target": "sm_90", "prefer": "size"}
        report = plan(options(("ratio", 0.4), min_speed=least, **settings))
        stored = {t["name"]: t["encoding"] for t in report["tensors"]}
        layers = [[stored[f"model.layers.{i}.mlp.{p}_proj.weight"] for p in ("gate", "up")] for i in range(2)]
        return report["speed"]["targets"][0]["products_seconds"], layers

    # In matrices this small launches are nearly all the time there is, and what stacks saves all it can: integers of up to 4
    # bits, and trellises of one rate.
    seconds, layers = planned("0.98")
    assert all(gate == up and gate.startswith(("int", "trellis")) for gate, up in layers)
    assert seconds < 0.85 * planned(None)[0]


def test_launches_are_saved_by_formats_that_stack(run) -> None:
    run.timing.targets = targets.parse(["sm_90"], False)
    names = [f"model.layers.0.mlp.{p}_proj.weight" for p in ("gate", "up")]

    def saved(method: str, **params) -> float:
        return run.timing.saved(names, Recipe(method, params))

    plain = {"group": 32, "symmetric": True, "scale_bits": 8}
    assert saved("int_grid", bits=4, **plain) == ARCHITECTURES["sm_90"].launch_s
    assert saved("trellis", quarter_bits=12, block=32) == ARCHITECTURES["sm_90"].launch_s
    rows = run.session.units[names[0]].shape[0]
    sections = ((8, rows // 2), (12, rows - rows // 2))
    assert saved("int_grid", bits=5, **plain) == saved("trellis", sections=sections) == 0.0
    assert saved("grid16", group=32, scale_bits=8) == 0.0
    run.timing.targets = targets.parse(["avx2"], False)
    assert saved("int_grid", bits=4, **plain) == 0.0


def test_a_file_for_a_gpu_has_the_8_bit_floats_that_it_knows(options, modelled) -> None:
    settings = {"formats": ("fp8",), "prefer": "size"}
    for target, variant in (("gfx942", "e4m3fnuz"), ("gfx950", "e4m3fn")):
        report = convert(options(("ratio", 0.7), target=target, force=True, **settings)).report
        trees = [t["tree"] for t in report["tensors"] if t["encoding"].startswith("fp8")]
        assert trees and {t["variant"] for t in trees} == {variant}


@pytest.fixture
def run(options, tmp_path, modelled):
    chosen = options(
        ("ratio", 0.3), formats=FORMATS, work_dir=tmp_path / "work", target="avx2", prefer="balance"
    )
    allowed = method_families(chosen.formats)
    with Session(chosen, Stages()) as session:
        table = build_table(session, allowed, lambda unit: None)
        yield Run(session, Meta(session, None), table, allowed, Timing(session, 1 << 17))


@pytest.mark.parametrize("ratio", [0.35, 0.45, 0.6])
def test_balance_is_never_slower_than_nine_tenths_of_an_int_or_grid_file(run, ratio) -> None:
    budget = int(ratio * run.session.checkpoint.total_bytes)
    plain = only(run.table, PLAIN)
    assert plain is not None
    reference = bounds.plan(run.timing.preferring("size"), plain, budget, run.meta.widest(), None, True)
    balanced = run.plan(budget)
    assert balanced.size_bytes <= budget
    assert run.timing.of(balanced.mix) <= 1.01 * run.timing.of(reference.mix) / 0.9
    assert balanced.expected_loss <= bounds.SLACK * reference.expected_loss
    # Bytes alone would have had a file that is far slower.
    run.timing = run.timing.preferring("size")
    assert run.timing.of(run.plan(budget).mix) > 1.2 * run.timing.of(balanced.mix)


def test_the_yardstick_of_a_gpu_saves_launches_as_plans_do(options, tmp_path) -> None:
    """It was the time of an int or grid plan with a launch for every matrix: a fifth too much."""
    chosen = options(
        ("ratio", 0.45), formats=FORMATS, work_dir=tmp_path / "work", target="sm_90", prefer="balance"
    )
    with Session(chosen, Stages()) as session:
        table = build_table(session, method_families(chosen.formats), lambda unit: None)
        timing, meta = Timing(session, 1 << 17), Meta(session, None).widest()
        budget, plain = int(0.45 * session.checkpoint.total_bytes), only(table, PLAIN)
        assert plain is not None and timing.groups
        allowed = bounds.bound(timing, table, budget, meta)
        reference = bounds.plans.plan_mix(session, plain, budget, meta, exact=False)
        assert allowed is not None
        for one in (plain, replace(plain, fused=timing.groups)):
            try:
                found = bounds.plans.plan_mix(
                    session, one, budget, meta, None, False,
                    timing.seconds, 0.95 * bounds.BALANCE * allowed.seconds, timing.saved,
                )  # fmt: skip
            except (TooSlow, BudgetError):
                continue
            assert found.expected_loss > bounds.SLACK * reference.expected_loss


def test_an_error_of_one_table_does_not_hide_what_the_other_allows(run, monkeypatch) -> None:
    """Too slow as it is and too large where tensors run as one: then the plan of few formats stands."""
    run.timing.groups = dict.fromkeys(run.table.candidates, "one")
    budget = int(0.45 * run.session.checkpoint.total_bytes)
    meta = run.meta.widest()
    assert bounds.bound(run.timing, run.table, budget, meta) is not None
    real = bounds.plans.plan_mix

    def plan_mix(session, table, *rest):
        if table.fused:
            raise BudgetError("too large", budget + 1)
        if table is run.table:
            raise TooSlow(1.0, 0.5)
        return real(session, table, *rest)

    monkeypatch.setattr(bounds.plans, "plan_mix", plan_mix)
    found = bounds.plan(run.timing, run.table, budget, meta, None, True)
    assert {r.method for r in found.mix.values()} <= {*PLAIN, "dense"}
    monkeypatch.setattr(
        bounds.plans, "plan_mix", lambda *_: plan_mix(None, replace(run.table, fused={"x": "y"}))
    )
    with pytest.raises(BudgetError, match="too large"):
        bounds.plan(run.timing, run.table, budget, meta, None, True)


@pytest.mark.parametrize(("worse", "ends"), [(1.0, 2), (1.5, 1)])
def test_of_two_sets_of_options_only_what_may_win_is_planned_to_the_end(
    run, monkeypatch, worse, ends
) -> None:
    run.timing.groups = dict.fromkeys(run.table.candidates, "one")
    budget, meta = int(0.45 * run.session.checkpoint.total_bytes), run.meta.widest()
    assert bounds.bound(run.timing, run.table, budget, meta) is not None
    planned = []

    def plan_mix(session, table, budget_bytes, meta, weights, exact, *rest):
        planned.append(exact)
        loss = worse if table.fused else 1.0
        return Planned({}, loss if exact else 1.001 * loss, 1, "fused" if table.fused else "mix")

    monkeypatch.setattr(bounds.plans, "plan_mix", plan_mix)
    assert bounds.plan(run.timing, run.table, budget, meta, None, True).label == "mix"
    assert planned == [False, False] + [True] * ends


def test_speed_is_faster_still_and_loses_no_more_than_a_single_format(run) -> None:
    budget = int(0.45 * run.session.checkpoint.total_bytes)
    balanced = run.plan(budget)
    run.timing = run.timing.preferring("speed")
    fast = run.plan(budget)
    found = uniforms(run.session, run.table, budget, run.meta.widest())
    single = [p.expected_loss for p in found if next(iter(p.mix.values())).method in PLAIN]
    assert run.timing.of(fast.mix) < run.timing.of(balanced.mix)
    assert fast.expected_loss <= min(single)


def test_single_formats_that_are_too_slow_are_no_rivals(run) -> None:
    budget = int(0.45 * run.session.checkpoint.total_bytes)
    assert "trellis" not in {next(iter(p.mix.values())).method for p in run.rivals(budget)}
    run.timing = run.timing.preferring("size")
    assert "trellis" in {next(iter(p.mix.values())).method for p in run.rivals(budget)}


def test_a_least_speed_is_kept_or_refused_in_one_line(quick_plan, modelled) -> None:
    speed = quick_plan("avx2", min_speed="1.1")["speed"]
    assert speed["bound"] == "1.1 times the fastest single format of these bytes"
    assert speed["targets"][0]["products_seconds"] <= speed["bound_seconds"]
    rate = 1.05 * speed["targets"][0]["predicted_rate"]
    faster = quick_plan("avx2", min_speed=f"{rate:.1f}tok/s")["speed"]
    assert faster["targets"][0]["predicted_rate"] >= rate * 0.999
    with pytest.raises(
        BudgetError, match=r"`min_speed` 90 cannot be met within \d+ bytes on avx2: the fastest file"
    ) as e:
        quick_plan("avx2", min_speed="90")
    assert "\n" not in str(e.value)


def test_a_speed_that_the_rest_of_a_token_forbids_is_said_without_a_time_of_products(
    quick_plan, modelled, monkeypatch
) -> None:
    monkeypatch.setattr(Token, "_beside", lambda self, target: 0.5)
    with pytest.raises(BudgetError, match=r"`min_speed` 10tok/s cannot be met .* beside its products") as e:
        quick_plan("cpu", min_speed="10tok/s")
    assert "0 ms" not in str(e.value)


@pytest.mark.parametrize("text", ["fast", "-1", "0", "nan", "1.5 bananas", ""])
def test_what_is_no_speed_is_refused(options, text) -> None:
    with pytest.raises(UsageError, match="is no speed: write"):
        options(min_speed=text)


def test_an_unknown_preference_is_refused(options) -> None:
    with pytest.raises(UsageError, match="the preference 'fast' is not known: choose balance, size, speed"):
        options(prefer="fast")


def test_shuffle_codes_are_candidates_where_time_is_bounded(default_options) -> None:
    for prefer, expected in (("balance", True), ("size", False)):
        chosen = default_options(prefer=prefer)
        assert ("shuffle" in method_families(chosen.formats, chosen.bounds_time)) == expected


def test_a_written_file_is_timed_where_its_target_is_here(options) -> None:
    report = convert(options(("ratio", 0.4), prefer="balance", target="cpu,sm_90")).report
    ours, gpu = report["speed"]["targets"]
    assert gpu["prices"] == "modelled" and gpu["measured_rate"] is None
    if ours["prices"] == "measured":
        assert ours["measured_rate"] > 0 and ours["predicted_rate"] > 0
        assert any("measured" in text for _, text in pairs(report["speed"]))


@pytest.fixture
def compiled(monkeypatch):
    """The trees of the matrices that were compiled to predict a speed."""
    found = []
    kept = token.compile_matrix
    monkeypatch.setattr(
        token, "compile_matrix", lambda e, panels: found.append((e.tree, e.shape)) or kept(e, panels=panels)
    )
    return found


@pytest.mark.skipif(not available(), reason="the CPU engine was not built")
def test_the_speed_of_a_plan_is_that_of_the_engine_with_its_formats(options, tmp_path, compiled) -> None:
    chosen = options(("ratio", 0.4), formats=FORMATS, work_dir=tmp_path / "work", target="cpu", prefer="size")
    with Session(chosen, Stages()) as session:
        table = build_table(session, method_families(chosen.formats), lambda unit: None)
        timing = Timing(session, 1 << 17)
        mix = (
            Run(session, Meta(session, None), table, method_families(chosen.formats), timing).plan(50_000).mix
        )
        (rate,) = timing.rates(mix)
        assert rate is not None and rate > 0
        used = [u for u in session.units.values() if len(u.shape) == 2 and uses_of(u, session.config)]
        stored = [(tree_of(u, mix.get(u.name)), u.shape) for u in used]
        assert sorted(map(str, compiled)) == sorted(map(str, stored))
        assert len({str(tree) for tree, _ in compiled}) > 1


def test_a_model_that_the_engine_does_not_run_has_its_products_added_up(run, compiled, monkeypatch) -> None:
    monkeypatch.undo()
    timing = run.timing
    monkeypatch.setattr(timing.token, "rate", lambda target, seconds: 1.0 / seconds)
    assert timing.token.run(timing.targets[0], 1e-3, {}) == pytest.approx(1e3)


def test_the_frontier_trades_bytes_speed_and_loss(options, modelled) -> None:
    found = frontier(options(formats=FORMATS, prefer="balance", target="avx2"))
    by = {p: [x for x in found["points"] if x["prefer"] == p] for p in ("balance", "size", "speed")}
    assert all(len(points) >= 3 for points in by.values())
    for points in by.values():
        sizes = [p["size_bytes"] for p in points]
        assert sizes == sorted(sizes)
    last = {p: points[-3] for p, points in by.items()}
    assert last["size"]["expected_loss"] <= last["balance"]["expected_loss"] <= last["speed"]["expected_loss"]
    assert last["size"]["rates"][0] <= last["balance"]["rates"][0] <= last["speed"]["rates"][0]
    assert len(drawn.rows(found)) == len(found["points"])
    figure = drawn.figure(found)
    assert figure.startswith("<svg xmlns=") and figure.count("<title>") == len(found["points"])


def test_how_often_a_token_uses_a_tensor() -> None:
    matrix = Unit("w", (8, 4), "float32", "q")
    assert uses_of(matrix, None) == 1.0
    assert uses_of(replace(matrix, uses=("embedding",)), None) == 0.0
    assert uses_of(replace(matrix, uses=("embedding", "head")), None) == 1.0
    assert uses_of(replace(matrix, shape=(8,)), None) == 0.0
    experts = replace(matrix, shape=(16, 8, 4), lead=2, uses=("experts",))
    assert uses_of(experts, {"num_experts_per_tok": 4}) == 0.25
