"""The plan's parser: what it keeps, and what it refuses by name."""

import copy
import json
from typing import Any

import pytest

from nstf.runtime.attention_plan import parse_plan


def plan() -> dict[str, Any]:
    band = {
        "pattern": "streaming",
        "params": {"sink": 4, "window": 16},
        "min_length": 24,
        "error": 0.1,
        "mass": 0.9,
    }
    full = {"pattern": "full", "params": {}, "min_length": 0, "error": 0.0, "mass": 1.0}
    blocks = {
        "pattern": "block_topk",
        "params": {"block": 64, "threshold": 0.9},
        "min_length": 9,
        "error": 0,
        "mass": 1,
    }
    keep = {"evict": False, "sink": 0, "recent": 0, "min_length": 0}
    evict = {"evict": True, "sink": 4, "recent": 16, "min_length": 24}
    return {
        "version": 1,
        "profile_lengths": [64, 128],
        "queries": 32,
        "error_bound": 0.2,
        "kld_budget": 0.01,
        "kld_measured": None,
        "kld_covers": ["streaming"],
        "head_dim": 16,
        "layers": [{"heads": [band, dict(band), full, blocks], "groups": [evict, keep]}],
    }


def test_a_plan_survives_the_round_trip_through_json() -> None:
    parsed = parse_plan(plan())
    assert parse_plan(parsed.to_json()) == parsed
    assert parse_plan(parsed.to_json().encode()) == parsed
    assert parsed.layers[0].heads[0].streaming == (4, 16, 24)
    assert parsed.layers[0].heads[3].streaming is None


def change(path: str, value: Any) -> dict[str, Any]:
    changed: Any = copy.deepcopy(plan())
    at = changed
    *parents, last = [int(step) if step.isdigit() else step for step in path.split("/")]
    for step in parents:
        at = at[step]
    at[last] = value
    return dict(changed)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("version", 2, "version 2 is not known"),
        ("version", "1", "version '1' is not known"),
        ("extra", 1, "unknown key 'extra'"),
        ("layers", [], "list of 1 to"),
        ("layers", "x" * 99, "instead of a list"),
        ("layers/0", [1], "instead of an object"),
        ("queries", True, "queries"),
        ("queries", 0, "queries"),
        ("queries", 10**40, "queries"),
        ("error_bound", float("nan"), "error_bound"),
        ("kld_measured", float("inf"), "kld_measured"),
        ("kld_covers", ["magic"], "kld_covers names 'magic'"),
        ("profile_lengths", [-1], r"profile_lengths\[0\]"),
        ("profile_lengths", list(range(1, 99)), "98 entries"),
        ("layers/0/heads/0/pattern", "diagonal", "pattern 'diagonal' is not known"),
        ("layers/0/heads/0/pattern", ["streaming"], "is not known"),
        ("layers/0/heads/0/params", {"sink": 4}, "must be exactly"),
        ("layers/0/heads/0/params/window", 0, "params.window"),
        ("layers/0/heads/0/params/window", 2**40, "params.window"),
        ("layers/0/heads/0/params/window", 2.5, "params.window"),
        ("layers/0/heads/3/params/threshold", 1.5, "params.threshold"),
        ("layers/0/heads/2/mass", 7, "mass"),
        ("layers/0/heads/2/error", -1, "error"),
        ("layers/0/groups/0/evict", 1, "not true or false"),
        ("layers/0/groups/0/recent", 0, "recent"),
        ("layers/0/groups/0/recent", 32, "evicts with"),
        ("layers/0/groups/1/evict", True, "recent"),
        ("layers/0/groups", [{"evict": False, "sink": 0, "recent": 0, "min_length": 0}] * 3, "do not divide"),
    ],
)
def test_a_wrong_field_is_refused_by_name(path: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_plan(change(path, value))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, b"\xff\xfe", '{"version": NaN}'])
def test_text_that_is_no_plan_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match="attention plan"):
        parse_plan(text)


def test_a_missing_key_is_named() -> None:
    broken = plan()
    del broken["layers"][0]["heads"][1]["mass"]
    with pytest.raises(ValueError, match=r"layers\[0\].heads\[1\]: missing key 'mass'"):
        parse_plan(json.dumps(broken))


def test_absurdly_long_text_is_refused_unread() -> None:
    with pytest.raises(ValueError, match="bytes of JSON"):
        parse_plan(" " * (2**26 + 1))
