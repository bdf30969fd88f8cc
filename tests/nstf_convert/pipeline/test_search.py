"""The measured local search: what it accepts, where it stops, and that it can be repeated."""

import shutil
from typing import Any

import pytest

from nstf_convert.measure import Similarity
from nstf_convert.options import EFFORTS, ConvertOptions
from nstf_convert.pipeline import convert
from nstf_convert.pipeline.improve.search import better, gain
from nstf_convert.pipeline.mix import Measured

from .conftest import QUICK, Converted, make_options, run


def measured(windows: list[float], domains: str = "aabb") -> Measured:
    return Measured(Similarity(1.0, 1.0, 0.0, len(windows)), tuple(windows), tuple(domains))


def test_a_gain_is_paired_and_domains_count_the_same() -> None:
    before, after = measured([1.0, 3.0, 2.0], "aab"), measured([0.9, 2.9, 1.5], "aab")
    average, error, domains = gain(before, after)
    assert average == pytest.approx(0.3)
    assert error == pytest.approx(0.0, abs=1e-12)
    assert {d: m for d, (m, _) in domains.items()} == pytest.approx({"a": 0.1, "b": 0.5})
    assert before.score == pytest.approx(2.0)


def test_a_gain_below_its_noise_is_not_accepted() -> None:
    before = measured([1.0, 1.0, 1.0, 1.0])
    assert better(before, measured([0.9, 0.91, 0.9, 0.9]))
    assert not better(before, measured([0.5, 1.4, 1.0, 1.0]))
    assert not better(before, before)
    assert not better(before, measured([float("nan"), 0.5, 0.5, 0.5]))


def test_no_domain_may_lose_for_the_others() -> None:
    before = measured([1.0, 1.0, 1.0, 1.0])
    assert not better(before, measured([0.5, 0.5, 1.1, 1.1]))


@pytest.fixture(scope="module")
def plain(small, tmp_path_factory) -> Converted:
    """A conversion without search, with its work directory."""
    folder = tmp_path_factory.mktemp("plain")
    return run(
        make_options(small, ("ratio", 0.4), output=folder / "out.nstf", work_dir=folder / "work", **QUICK)
    )


@pytest.fixture
def prepared(plain, options, tmp_path):
    """Makes ConvertOptions of a search that finds the plan and its encodings ready."""

    def make(**changes: Any) -> ConvertOptions:
        work = shutil.copytree(plain.work, tmp_path / "work")
        return options(("ratio", 0.4), search=True, work_dir=work, **changes)

    return make


def test_a_search_by_steps_gives_the_same_bytes_and_says_what_it_did(options, prepared, tmp_path) -> None:
    first = run(options(("ratio", 0.4), search=True, search_steps=3, output=tmp_path / "first.nstf"))
    assert convert(prepared(search_steps=3)).output.read_bytes() == first.content
    facts = first.result.report["accuracy"]["search"]
    assert facts["steps"] == 3 == len(facts["moves"])
    assert facts["minutes"] is None and facts["steps_allowed"] == 3 and facts["ended"] == "steps"
    assert facts["accepted"] == sum(m["accepted"] for m in facts["moves"])


@pytest.mark.parametrize("limit", [{"search_minutes": 0.0}, {"search_steps": 0}])
def test_a_search_without_time_or_steps_does_nothing(prepared, plain, limit) -> None:
    searched = run(prepared(**limit))
    assert searched.result.report["accuracy"]["search"] is None
    assert searched.content == plain.content


def test_a_search_stops_when_its_time_is_over(prepared) -> None:
    report = convert(prepared(search_minutes=1e-6)).report["accuracy"]
    assert report["search"]["ended"] == "time"
    assert report["search"]["minutes"] == 1e-6


def test_by_default_a_few_moves_are_tried_and_the_result_is_never_worse(prepared, plain) -> None:
    searched = convert(prepared()).report["accuracy"]
    assert 0 < searched["search"]["steps"] <= EFFORTS["best"].search_steps
    assert searched["search"]["minutes"] is None
    assert searched["selection"] <= plain.result.report["accuracy"]["selection"]
