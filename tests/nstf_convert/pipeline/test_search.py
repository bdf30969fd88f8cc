"""The measured local search: what it accepts, where it stops, and that it can be repeated."""

import pytest

from nstf_convert.measure import Similarity
from nstf_convert.options import EFFORTS
from nstf_convert.pipeline import convert
from nstf_convert.pipeline.improve.search import better, gain
from nstf_convert.pipeline.mix import Measured


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


def test_a_search_by_steps_gives_the_same_bytes_and_says_what_it_did(options) -> None:
    first = convert(options(("ratio", 0.4), search=True, search_steps=3))
    content = first.output.read_bytes()
    second = convert(options(("ratio", 0.4), search=True, search_steps=3, force=True))
    assert second.output.read_bytes() == content
    facts = first.report["accuracy"]["search"]
    assert facts["steps"] == 3 == len(facts["moves"])
    assert facts["minutes"] is None and facts["steps_allowed"] == 3 and facts["ended"] == "steps"
    assert facts["accepted"] == sum(m["accepted"] for m in facts["moves"])


def test_a_search_without_time_or_steps_does_nothing(options) -> None:
    for changes in ({"search_minutes": 0.0}, {"search_steps": 0}):
        report = convert(options(("ratio", 0.4), search=True, force=True, **changes)).report["accuracy"]
        assert report["search"] is None


def test_a_search_stops_when_its_time_is_over(options) -> None:
    report = convert(options(("ratio", 0.4), search=True, search_minutes=1e-6)).report["accuracy"]
    assert report["search"]["ended"] == "time"
    assert report["search"]["minutes"] == 1e-6


def test_by_default_a_few_moves_are_tried_and_the_result_is_never_worse(options) -> None:
    plain = convert(options(("ratio", 0.4))).report["accuracy"]
    searched = convert(options(("ratio", 0.4), search=True, force=True)).report["accuracy"]
    assert 0 < searched["search"]["steps"] <= EFFORTS["best"].search_steps
    assert searched["search"]["minutes"] is None
    assert searched["selection"] <= plain["selection"]
