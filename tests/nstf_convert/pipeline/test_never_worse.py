"""The written file never loses to the best single format of the same size, whatever the model and the budget."""

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from nstf_convert.pipeline import Budget, ConvertOptions, convert
from nstf_convert.pipeline.allocate.plan import uniforms
from nstf_convert.pipeline.header import Meta
from nstf_convert.pipeline.improve import rival
from nstf_convert.pipeline.improve import run as runs
from nstf_convert.pipeline.improve.rival import few_layers
from nstf_convert.pipeline.improve.run import Run
from nstf_convert.pipeline.outcome import Planned, Trial
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.propose.methods import method_families
from nstf_convert.pipeline.propose.table import Table, build_table
from nstf_convert.pipeline.session import Session
from nstf_convert.report.build import layer_of

EXAMPLES = Path(__file__).parents[3] / "examples"
TEXT = EXAMPLES / "data" / "prose.txt"
OTHER = EXAMPLES / "data" / "speeches.txt"


def score(accuracy: dict) -> float:
    return accuracy["mean_kl"] if "mean_kl" in accuracy else accuracy["relative_l2"]


@pytest.fixture
def to_the_end(monkeypatch) -> None:
    """No single format is given up."""
    monkeypatch.setattr(rival, "LOOKS", ())
    monkeypatch.setattr(rival, "FIRST_LOOK", math.inf)


def assert_never_worse(report: dict) -> None:
    accuracy = report["accuracy"]
    uniform = accuracy["uniform"]
    assert report["file"]["size_bytes"] <= report["budget"]["bytes"]
    assert accuracy["stopped"] == []
    assert uniform is not None and uniform["size_bytes"] <= report["budget"]["bytes"]
    # On the windows that choose, where several datasets count the same, and on those that report.
    assert accuracy["selection"] <= uniform["selection"]
    assert sum(accuracy["domains"].values()) <= sum(uniform["domains"].values())


@pytest.mark.parametrize("ratio", [0.3, pytest.param(0.55, marks=pytest.mark.slow)])
def test_a_default_conversion_never_loses_to_uniform_by_the_same_steps(
    default_options, monkeypatch, to_the_end, ratio
) -> None:
    encoded = []
    real = Run.in_a_pass

    def in_a_pass(run, planned, done=()):
        encoded.append(planned.label)
        return real(run, planned, done)

    monkeypatch.setattr(Run, "in_a_pass", in_a_pass)
    report = convert(default_options(("ratio", ratio))).report
    assert_never_worse(report)
    assert encoded[0] == "mix"
    assert report["accuracy"]["uniform"]["encoding"] in encoded[1:]


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.2, 0.3, 0.5])
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_moe", "tiny_conv"])
def test_a_sample_model_never_loses_to_uniform(name, ratio, to_the_end, tmp_path) -> None:
    language = name != "tiny_conv"
    report = convert(
        ConvertOptions(
            model=str(EXAMPLES / name / "model"),
            output=tmp_path / "out.nstf",
            budget=Budget("ratio", ratio),
            datasets=(str(TEXT), str(OTHER)) if language else (),
            samples=16,
            seq_len=64,
            formats=("int_grid", "grid16", "fp8", "mxfp4", "svd", "tucker", "add"),
            attention_plan=False,
            search_steps=2,
        )
    ).report
    assert_never_worse(report)
    if language:
        assert list(report["accuracy"]["domains"]) == [TEXT.name, OTHER.name]


@pytest.fixture
def run(options, tmp_path):
    chosen = options(("ratio", 0.6), formats=("int_grid", "grid16"), work_dir=tmp_path / "work", samples=12)
    allowed = method_families(chosen.formats)
    with Session(chosen, Stages()) as session:
        table = build_table(session, allowed, lambda unit: None)
        # Of integers those of as many bits as the grid has.
        same = {
            n: [c for c in found if c.recipe.params.get("bits", 4) == 4]
            for n, found in table.candidates.items()
        }
        yield Run(session, Meta(session, None), replace(table, candidates=same), allowed)


def believing(table: Table, method: str, factor: float) -> Table:
    """The table with the expected losses of one method times a factor."""
    changed = {
        n: [replace(c, loss=c.loss * (factor if c.recipe.method == method else 1.0)) for c in candidates]
        for n, candidates in table.candidates.items()
    }
    return replace(table, candidates=changed)


def uniform_method_of(planned: Planned) -> str:
    return next(iter(planned.mix.values())).method


def uniform_method(trial: Trial) -> str:
    return uniform_method_of(trial.planned)


@pytest.mark.parametrize("layers", [1, 3], ids=["of a few layers", "of all layers"])
def test_a_format_that_is_expected_to_lose_but_measures_better_is_found(run, monkeypatch, layers) -> None:
    monkeypatch.setattr(rival, "few_layers", lambda names: [n for n in names if layer_of(n) in range(layers)])
    budget = run.session.options.budget.size_bytes(run.session.checkpoint.total_bytes, 0)
    found = uniforms(run.session, run.table, budget, run.meta.widest())
    assert {uniform_method_of(p) for p in found} == {"int_grid", "grid16"}
    winner = uniform_method_of(run.rivals(budget)[0])
    # The loss model errs by a factor of 5 against the winner.
    run.table = believing(run.table, winner, 5.0)
    expected = uniforms(run.session, run.table, budget, run.meta.widest())
    assert uniform_method_of(expected[0]) != winner
    rivals = run.rivals(budget)
    assert winner in {uniform_method_of(p) for p in rivals}
    assert run.best(rivals).score == min(run.encoded(p).score for p in rivals)


def test_without_hessians_formats_are_compared_by_a_wide_margin_of_expected_losses(
    run, monkeypatch, caplog
) -> None:
    caplog.set_level("INFO", "nstf")
    monkeypatch.setattr(Session, "keeps_hessians", property(lambda self: False))
    encoded = []
    monkeypatch.setattr(Run, "encoded", lambda self, p: encoded.append(p) or self.measure(p))
    budget = run.session.options.budget.size_bytes(run.session.checkpoint.total_bytes, 0)
    run.best(run.rivals(budget))
    assert len(encoded) == 2
    run.table = believing(run.table, "grid16", 5.0)
    encoded.clear()
    run.best(run.rivals(budget))
    assert [uniform_method_of(p) for p in encoded] == ["int_grid"]
    assert "the Hessians were not kept: single formats are compared by their expected losses" in caplog.text


def test_what_a_single_format_will_lose_follows_from_its_first_layers() -> None:
    # Both expectations are right: 3 of 4 times as much in the rest, too.
    assert rival.expected_score(2.0, 1.0, 3.0, (2.0, 4.0), (1.0, 2.0)) == pytest.approx(6.0)
    # The format's first layers lost half of what was expected of them beside the mix's: so may the rest.
    assert rival.expected_score(1.0, 1.0, 3.0, (2.0, 4.0), (1.0, 2.0)) == pytest.approx(3.0)
    # They lost more: the rest is not held to do so.
    assert rival.expected_score(9.0, 1.0, 3.0, (2.0, 4.0), (1.0, 2.0)) == pytest.approx(13.0)
    # A mix that expects no loss says nothing about the rest.
    assert rival.expected_score(2.0, 1.0, 3.0, (2.0, 4.0), (1.0, 0.0)) == 2.0


@pytest.fixture
def front_to_back(run):
    """The run, encoding front to back, with its mix by these steps."""
    object.__setattr__(run.session.options, "prefix", True)
    budget = run.session.options.budget.size_bytes(run.session.checkpoint.total_bytes, 0)
    return run, run.encoded(run.plan(budget)), run.rivals(budget)


def test_a_single_format_that_cannot_win_is_given_up_after_its_first_layers(
    front_to_back, monkeypatch, caplog
) -> None:
    run, mix, rivals = front_to_back
    caplog.set_level("INFO", "nstf")
    monkeypatch.setattr(rival, "FIRST_LOOK", math.inf)
    monkeypatch.setattr(rival, "LOOKS", ((1 / 6, math.inf), (1 / 3, 0.0)))
    assert rivals and run.best(rivals[:1], mix) is None
    (stopped,) = run.stopped
    assert stopped.encoding == rivals[0].label and 0.2 < stopped.share < 0.9
    looked = re.findall(r"after (\d+) % of the weights", caplog.text)
    assert len(looked) == 2 and 0 < int(looked[0]) < int(looked[1]) < 100
    assert stopped.mix == mix.score and 0 < stopped.mix_part < stopped.mix
    assert f"{rivals[0].label}: {stopped.part:.6g} after" in caplog.text
    # One that goes on comes to the same as by itself.
    monkeypatch.setattr(rival, "LOOKS", ((1 / 6, math.inf), (1 / 3, math.inf)))
    run.stopped.clear()
    trial = run.best(rivals[:1], mix)
    assert trial is not None and not run.stopped
    assert trial.score == run.in_a_pass(rivals[0]).score
    # What was expected of it is about what it measures.
    assert 0.5 < stopped.expected / trial.score < 2


def test_a_single_format_that_a_few_layers_rule_out_is_not_encoded(
    front_to_back, monkeypatch, caplog
) -> None:
    run, mix, rivals = front_to_back
    caplog.set_level("INFO", "nstf")
    monkeypatch.setattr(rival, "FIRST_LOOK", 0.0)
    encoded = []
    monkeypatch.setattr(runs, "encode_in_pass", lambda *args: encoded.append(args))
    assert run.best(rivals[:1], mix) is None and not encoded
    (stopped,) = run.stopped
    assert stopped.encoding == rivals[0].label and 0 < stopped.share < 1
    assert stopped.part > 0 < stopped.mix_part and stopped.mix == mix.score
    assert f"{rivals[0].label}: {stopped.part:.6g} by a few layers" in caplog.text
    # What is expected of it is about what it measures.
    monkeypatch.undo()
    assert 0.5 < stopped.expected / run.in_a_pass(rivals[0]).score < 2


def test_the_best_effort_gives_no_family_up(front_to_back, monkeypatch) -> None:
    run, mix, _ = front_to_back
    monkeypatch.setattr(rival, "LOOKS", ((1 / 6, 0.0), (1 / 3, 0.0)))
    monkeypatch.setattr(rival, "FIRST_LOOK", 0.0)
    monkeypatch.setattr(runs, "HOPELESS", 0.0)
    object.__setattr__(run.session.options, "effort", "best")
    budget = run.session.options.budget.size_bytes(run.session.checkpoint.total_bytes, 0)
    rivals = run.rivals(budget)
    assert {uniform_method_of(p) for p in rivals} == {"int_grid", "grid16"}
    tried = len(run.tried)
    best = run.best(rivals, mix)
    assert best is not None and not run.stopped and len(run.tried) == tried + 2
    assert best.score == min(t["mean_kl"] for t in run.tried[tried:])


def test_the_few_layers_are_spread_over_the_depth() -> None:
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(24)] + ["lm_head.weight"]
    assert few_layers(names) == [names[4], names[12], names[20]]
    assert few_layers(names[:4]) == [names[2]]
    assert few_layers(names[24:]) == names[24:]


def test_a_format_that_is_expected_to_lose_ten_times_as_much_is_not_measured(run, monkeypatch) -> None:
    monkeypatch.setattr(Run, "_on_a_few_layers", lambda *args: pytest.fail("it was measured"))
    run.table = believing(run.table, "grid16", 50.0)
    budget = run.session.options.budget.size_bytes(run.session.checkpoint.total_bytes, 0)
    assert uniform_method(run.best(run.rivals(budget))) == "int_grid"


def test_without_a_comparison_the_format_that_is_expected_to_lose_least_is_the_rival(
    run, monkeypatch
) -> None:
    monkeypatch.setattr(Run, "_on_a_few_layers", lambda *args: pytest.fail("it was measured"))
    budget = run.session.options.budget.size_bytes(run.session.checkpoint.total_bytes, 0)
    expected = uniforms(run.session, run.table, budget, run.meta.widest())
    assert len(expected) == 2
    run.session.options = replace(run.session.options, effort="fast")
    assert [p.label for p in run.rivals(budget)] == [expected[0].label]


@pytest.mark.parametrize("search", [False, True])
def test_windows_that_choose_between_two_files_only_report_too(options, search) -> None:
    steps = {"search": True, "search_steps": 1} if search else {}
    report = convert(options(("ratio", 0.6), effort="fast", formats=("int_grid",), **steps)).report
    accuracy = report["accuracy"]
    assert (accuracy["selection"] == pytest.approx(accuracy["final"]["mean_kl"])) == (not search)
    assert accuracy["protocol"]["windows_that_report"] == accuracy["protocol"]["windows_that_choose"] == 8
    assert_never_worse(report)


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_mix_without_a_finite_score_gives_up_no_format(score: float) -> None:
    mix = SimpleNamespace(score=score)
    assert rival.by_few_layers(None, None, mix, (), (1.0, 1.0), (1.0, 1.0)) is None
    assert rival.by_few_layers(None, None, SimpleNamespace(score=1.0), (), (1.0, 1.0), (1.0, score)) is None
