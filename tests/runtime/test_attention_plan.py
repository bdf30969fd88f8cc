"""The plan's parser: what it keeps, and what it refuses by name."""

import copy
import json
from typing import Any

import pytest

from nstf.runtime.attention_plan import parse_plan
from nstf.runtime.kv_formats import PLAIN, KVFormat


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
        "pattern": "block_sparse",
        "params": {"threshold": 0.9, "stride": 8},
        "min_length": 9,
        "error": 0,
        "mass": 1,
    }
    plain = {"bits": 16, "by": "token", "rotate": False}
    four = {"bits": 4, "by": "channel", "rotate": True}
    keep = {"sink": 0, "recent": 0, "min_length": 0, "keys": four, "values": plain}
    evict = {"sink": 4, "recent": 16, "min_length": 24, "keys": dict(plain), "values": dict(plain)}
    return {
        "version": 2,
        "context": 128,
        "kv_budget": 0.5,
        "head_dim": 16,
        "kld": {"allowed": 0.01, "choose": 0.005, "report": None},
        "layers": [{"heads": [band, dict(band), full, blocks], "groups": [evict, keep]}],
        "lengths": [{"length": 128, "kld": 0.006, "passkey": [3, 3, 4], "needles": None}],
    }


def version_1() -> dict[str, Any]:
    new = plan()
    heads = new["layers"][0]["heads"]
    heads[3] = {**heads[3], "pattern": "block_topk", "params": {"block": 64, "threshold": 0.9}}
    keep = {"evict": False, "sink": 0, "recent": 0, "min_length": 0}
    evict = {"evict": True, "sink": 4, "recent": 16, "min_length": 24}
    return {
        "version": 1,
        "profile_lengths": [64, 128],
        "queries": 32,
        "error_bound": 0.2,
        "kld_budget": 0.01,
        "kld_measured": 0.002,
        "kld_covers": ["streaming"],
        "head_dim": 16,
        "layers": [{"heads": heads, "groups": [evict, keep]}],
    }


def test_a_plan_survives_the_round_trip_through_json() -> None:
    parsed = parse_plan(plan())
    assert parse_plan(parsed.to_json()) == parsed
    assert parse_plan(parsed.to_json().encode()) == parsed
    assert parsed.layers[0].heads[0].streaming == (4, 16, 24)
    assert parsed.layers[0].heads[3].streaming is None
    assert parsed.layers[0].heads[3].block_sparse == (0.9, 8, 9)
    assert parsed.layers[0].groups[1].keys == KVFormat(4, "channel", True)
    assert parsed.lengths[0].passkey == (3, 3, 4)
    assert parsed.patterns() == {"streaming": 2, "full": 1, "block_sparse": 1}


def test_lengths_may_be_missing() -> None:
    short = plan()
    del short["lengths"]
    assert parse_plan(short).lengths == ()


def test_version_1_is_read_as_version_2() -> None:
    parsed = parse_plan(version_1())
    assert parsed.version == 2
    assert (parsed.context, parsed.kv_budget) == (128, None)
    assert (parsed.kld.allowed, parsed.kld.choose, parsed.kld.report) == (0.01, 0.002, None)
    assert parsed.patterns() == {"streaming": 2, "full": 2}
    ring, kept = parsed.layers[0].groups
    assert (ring.sink, ring.recent, ring.min_length, ring.keys) == (4, 16, 24, PLAIN)
    assert (kept.recent, kept.evict, kept.values) == (0, False, PLAIN)
    assert parse_plan(parsed.to_json()) == parsed


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("queries_", 1, "unknown key 'queries_'"),
        ("profile_lengths", [-1], r"profile_lengths\[0\]"),
        ("profile_lengths", list(range(1, 99)), "98 entries"),
        ("kld_measured", float("inf"), "kld.choose"),
        ("layers", [{"heads": [1], "groups": [{"evict": 1}]}], "missing key 'min_length'"),
        ("layers", [{"heads": [1], "groups": [3]}], "int instead of an object"),
    ],
)
def test_a_wrong_field_of_version_1_is_refused_by_name(key: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_plan({**version_1(), key: value})


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
        ("version", 3, "version 3 is not known"),
        ("version", "1", "version '1' is not known"),
        ("version", True, "version True is not known"),
        ("extra", 1, "unknown key 'extra'"),
        ("layers", [], "list of 1 to"),
        ("layers", "x" * 99, "instead of a list"),
        ("layers/0", [1], "instead of an object"),
        ("context", True, "context"),
        ("context", 0, "context"),
        ("context", 10**40, "context"),
        ("kv_budget", float("nan"), "kv_budget"),
        ("kv_budget", 1.5, "kv_budget"),
        ("kld/report", float("inf"), "kld.report"),
        ("kld", {"allowed": 1}, "kld: missing key 'choose'"),
        ("lengths", [1], r"lengths\[0\]: int"),
        ("lengths/0/passkey", [1, 2], "2 entries"),
        ("lengths/0/passkey", [5, 2, 4], "5 found of 4 asked"),
        ("lengths/0/needles", [-1, 2, 4], r"needles\[0\]"),
        ("lengths/0/kld", "low", "kld"),
        ("layers/0/heads/0/pattern", "diagonal", "pattern 'diagonal' is not known"),
        ("layers/0/heads/0/pattern", "block_topk", "pattern 'block_topk' is not known"),
        ("layers/0/heads/0/pattern", ["streaming"], "is not known"),
        ("layers/0/heads/0/params", {"sink": 4}, "must be exactly"),
        ("layers/0/heads/0/params/window", 0, "params.window"),
        ("layers/0/heads/0/params/window", 2**40, "params.window"),
        ("layers/0/heads/0/params/window", 2.5, "params.window"),
        ("layers/0/heads/3/params/threshold", 1.5, "params.threshold"),
        ("layers/0/heads/3/params/threshold", 0, "params.threshold"),
        ("layers/0/heads/3/params/stride", 12, "not one of 8, 16"),
        ("layers/0/heads/3/params/stride", 8.0, "not one of 8, 16"),
        ("layers/0/heads/2/mass", 7, "mass"),
        ("layers/0/heads/2/error", -1, "error"),
        ("layers/0/groups/0/recent", 32, "evicts with"),
        ("layers/0/groups/1/recent", 16, "evicts with"),
        ("layers/0/groups/1/keys/bits", 3, "not one of 16, 8, 4, 2"),
        ("layers/0/groups/1/keys/bits", True, "not one of"),
        ("layers/0/groups/1/keys/by", "page", "not one of channel, token"),
        ("layers/0/groups/1/keys/by", ["token"], "not one of"),
        ("layers/0/groups/1/keys/rotate", 1, "not true or false"),
        ("layers/0/groups/1/values/rotate", True, "16 bits are stored as they are"),
        ("layers/0/groups/1/keys", None, "NoneType instead of an object"),
        ("layers/0/groups", [plan()["layers"][0]["groups"][1]] * 3, "do not divide"),
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
