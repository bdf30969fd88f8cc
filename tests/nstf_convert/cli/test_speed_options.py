"""--target, --prefer, --min-speed and the frontier, as typed."""

import json

import pytest

from nstf.errors import BudgetError


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--target", "gfx9000"],
            "unknown target 'gfx9000': choose from cpu, avx2, avx2-vnni, avx512, neon, gfx90a",
        ),
        (["--target", "avx2,,sm_9"], "unknown target 'sm_9'"),
        (["--prefer", "fast"], "the preference 'fast' is not known: choose balance, size, speed"),
        (["--min-speed", "very"], "--min-speed 'very' is no speed: write 1.5"),
    ],
)
def test_a_mistake_in_the_options_of_speed_is_one_line_and_exit_code_2(
    nstf, tiny, tmp_path, words, line
) -> None:
    result = nstf("convert", tiny.folder, "--budget", "0.5", "-o", tmp_path / "out.nstf", *words)
    assert result.code == 2
    assert line in result.err and len(result.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_options_of_speed_reach_the_pipeline(nstf, tiny, tmp_path, pipeline) -> None:
    words = ["--target", "avx2, sm_90", "--prefer", "speed", "--min-speed", "300 tok/s"]
    assert nstf("convert", tiny.folder, "--budget", "0.5", "-o", tmp_path / "out.nstf", *words).code == 0
    assert pipeline.options.target == ("avx2", "sm_90")
    assert pipeline.options.prefer == "speed"
    assert pipeline.options.speed_asked == ("rate", 300.0)


def test_a_speed_that_cannot_be_met_is_one_line_and_exit_code_3(nstf, tiny, tmp_path, pipeline) -> None:
    pipeline.error = BudgetError(
        "`min_speed` 9 cannot be met within 10 bytes on cpu: the fastest file ...", 10
    )
    result = nstf("convert", tiny.folder, "--budget", "0.5", "-o", tmp_path / "out.nstf", "--min-speed", "9")
    assert result.code == 3
    assert "--min-speed 9 cannot be met" in result.err and len(result.err.splitlines()) == 1


def test_the_frontier_as_a_table_a_figure_and_json(nstf, tiny, tmp_path, monkeypatch) -> None:
    from nstf_convert import pipeline

    point = {
        "prefer": "balance",
        "size_bytes": 1000,
        "bits_per_weight": 4.0,
        "expected_loss": 0.01,
        "products_seconds": [0.01, 0.001],
        "rates": [90.0, None],
    }
    found = {"targets": ["avx2", "sm_90"], "points": [point]}
    monkeypatch.setattr(pipeline, "frontier", lambda options: found)
    figure = tmp_path / "frontier.svg"
    shown = nstf("plan", tiny.folder, "--frontier", "--svg", figure)
    assert shown.code == 0
    assert "tokens/s, avx2, sm_90" in shown.out and "90.0, (1 ms)" in shown.out
    assert figure.read_text().startswith("<svg xmlns=") and "1000 bytes" in figure.read_text()
    assert json.loads(nstf("plan", tiny.folder, "--frontier", "--json").out) == found


def test_a_figure_that_cannot_be_put_there_is_told_before_any_plan(nstf, tiny, tmp_path, monkeypatch) -> None:
    from nstf_convert import pipeline

    monkeypatch.setattr(pipeline, "frontier", lambda options: pytest.fail("plans were made"))
    shown = nstf("plan", tiny.folder, "--frontier", "--svg", tmp_path)
    assert shown.code == 2 and "is a folder, a device or a pipe" in shown.err


def test_a_frontier_has_no_budget_and_a_figure_has_a_frontier(nstf, tiny, tmp_path) -> None:
    both = nstf("plan", tiny.folder, "--frontier", "--budget", "0.5")
    assert both.code == 2 and "--frontier shows many sizes: leave the budget out" in both.err
    alone = nstf("plan", tiny.folder, "--budget", "0.5", "--svg", tmp_path / "a.svg")
    assert alone.code == 2 and "--svg draws the frontier: add --frontier" in alone.err
    nowhere = nstf("plan", tiny.folder, "--frontier", "--svg", tmp_path / "none" / "a.svg")
    assert nowhere.code == 2 and "does not exist" in nowhere.err
