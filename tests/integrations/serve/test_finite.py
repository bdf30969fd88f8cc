"""Schemas of which no text ends are told from those that refer to themselves and may stop."""

import json
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from nstf.integrations.serve.finite import (
    MOST_PARTS,
    MOST_ROUNDS,
    can_end,
    choices_of,
    common_multiple,
    parts_of,
    patterns_of,
    stray_reference,
    text_bytes,
)

LOOP = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "schema",
    [
        LOOP,
        {"$ref": "#"},
        {
            "$defs": {"x": LOOP | {"properties": {"a": {"$ref": "#/$defs/x"}}}},
            "allOf": [{"$ref": "#/$defs/x"}],
        },
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [True, {"$ref": "#"}], "minItems": 2},
        {"anyOf": [LOOP | {"properties": {"a": {"$ref": "#/anyOf/1"}}}, {"$ref": "#/anyOf/0"}]},
        {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["b"]},
        {"type": "object", "properties": {"a~/b": {"$ref": "#/properties/a~0~1b"}}, "required": ["a~/b"]},
    ],
)
def test_what_requires_itself_never_ends(schema: Any) -> None:
    assert not can_end(schema) and not can_end(json.loads(json.dumps(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},  # or a number
        LOOP | {"type": ["object", "null"]},
        LOOP | {"properties": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}},
        LOOP | {"patternProperties": {"a": {}}, "properties": {}, "additionalProperties": {"$ref": "#"}},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "object", "properties": {"a": {"const": 1, "$ref": "#"}}, "required": ["a"]},
        {"$ref": "https://example.com/other.json"},
        {"$ref": "#/nowhere"},
        {"type": "object", "required": 3, "properties": [], "allOf": {}},
    ],
)
def test_what_may_stop_is_left_to_the_library(schema: Any) -> None:
    assert can_end(schema)


def test_looking_takes_little_time_whatever_the_schema() -> None:
    chain = {
        "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(2 * MOST_ROUNDS)},
        "$ref": "#/$defs/0",
    }
    chain["$defs"][str(2 * MOST_ROUNDS)] = {"type": "null"}
    assert can_end(chain) and can_end({"anyOf": [{"allOf": [{}]} for _ in range(MOST_PARTS)]})


def test_a_reference_by_a_number_of_any_length_is_none() -> None:
    for number in ("1" * 5000, "9", "١"):
        assert can_end({"anyOf": [{"$ref": f"#/anyOf/{number}"}, {"type": "integer"}]})


def test_names_and_entries_are_counted_but_those_of_enums() -> None:
    assert parts_of({"type": "object", "required": ["a"] * 10}) == 12
    assert parts_of({"enum": list(range(1000))}) == 1
    assert parts_of({"properties": {"enum": {"a": 1, "b": [2, 3]}}}) == 6
    # Objects and lists among them are read like any other part: a million `{}` took 18 s.
    assert parts_of({"enum": [{}, [], 1, {"a": 2}, [3]]}) == 1 + 4 + 2


def test_values_of_all_enums_are_counted_together() -> None:
    assert choices_of({"properties": {"a": {"enum": [1, None, {}]}, "b": {"enum": ["x", ["y"]]}}}) == 3
    assert choices_of({"enum": {"enum": [1]}, "required": ["a"], "const": [1, 2]}) == 0


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"enum": [1] * 1_900_000}, "1900000 values in `enum`; at most 16384"),
        ({"type": "object", "properties": {"a": {"enum": [None] * 20_000}}}, "20000 values in `enum`"),
        ({"enum": [{}] * 1_000_000}, "1000001 names and entries; at most 4096"),
        ({"enum": [10**250 + i for i in range(300)]}, "bytes of names, texts and numbers; at most 65536"),
    ],
    ids=["ones", "nulls", "objects", "digits"],
)
def test_a_schema_of_too_many_values_is_refused_before_it_is_read(schema: Any, said: str) -> None:
    """Bodies of 4 MB: 1.9 million numbers took 1 GiB and 4 s, a million objects 18 s."""
    pytest.importorskip("llguidance")
    from nstf.integrations.serve.errors import ApiError
    from nstf.integrations.serve.grammar import Grammars

    grammars = Grammars("{}", 8, [1])
    grammars._tokenizer = object()
    with pytest.raises(ApiError, match=said) as error:
        grammars.of(schema)
    assert (error.value.status, error.value.param) == (400, "response_format")


def test_a_schema_of_as_many_values_as_are_accepted_is_read() -> None:
    pytest.importorskip("llguidance")
    from nstf.integrations.serve.grammar import MOST_CHOICES, Grammars

    model = Path(__file__).parents[3] / "examples" / "tiny_llama" / "model"
    grammars = Grammars((model / "tokenizer.json").read_text(), 1000, [0])
    assert grammars.of({"type": "object", "properties": {"a": {"enum": [1] * MOST_CHOICES}}}).satisfiable


def test_a_schema_of_too_many_names_is_refused_before_it_is_read() -> None:
    # 20,000 required names took llguidance minutes, in which no other request was answered.
    pytest.importorskip("llguidance")
    from nstf.integrations.serve.errors import ApiError
    from nstf.integrations.serve.grammar import Grammars

    grammars = Grammars("{}", 8, [1])
    grammars._tokenizer = object()
    with pytest.raises(ApiError, match="20002 names and entries; at most 4096"):
        grammars.of({"type": "object", "required": [str(i) for i in range(20_000)]})


def test_texts_are_counted_but_those_for_people() -> None:
    said = {"title": "x" * 100, "description": "y" * 100, "$comment": "z"}
    assert text_bytes(said | {"type": "string"}) == len("titledescription$commenttypestring")
    assert text_bytes({"properties": {"title": {"const": "abc"}}}) == len("propertiestitleconstabc")
    assert choices_of({"enum": [1, 2]}) == 2 and parts_of({"enum": [1, 2]}) == 1
    assert choices_of({"const": {"enum": [1, 2]}}) == 0 and parts_of({"const": {"enum": [1, 2]}}) == 4
    # A property may be called so: what is under it is a rule.
    for name in ("const", "enum", "default", "examples", "properties"):
        rule = {"type": "string", "enum": ["a", "b"], "description": "x" * 50}
        for names in ("properties", "$defs"):
            said = {names: {name: rule}}
            assert (parts_of(said), choices_of(said)) == (5, 2)
            assert text_bytes(said) == len(f"{names}{name}typestringenumabdescription")
    # There a title is what the answer must have.
    for where in ("const", "enum", "default", "examples"):
        said = {where: {"title": "x" * 50} if where == "const" else [{"title": "x" * 50}]}
        assert text_bytes({"anyOf": [said]}) == len(f"anyOf{where}title") + 50
    assert text_bytes({"enum": ["\U0001f600", "\ud800"]}) == len("enum") + 4 + 3
    assert text_bytes({"enum": [12, -0.5, True, None]}) == len("enum") + 2 + 4


@pytest.mark.parametrize("schema", [{"enum": ["x" * 70_000]}, {"type": "string", "pattern": "a" * 70_000}])
def test_a_schema_of_too_much_text_is_refused_before_it_is_read(schema: Any) -> None:
    # Four million letters took ten seconds and 250 MiB before they were refused, 500,000 took as much and were accepted.
    pytest.importorskip("llguidance")
    from nstf.integrations.serve.errors import ApiError
    from nstf.integrations.serve.grammar import Grammars

    grammars = Grammars("{}", 8, [1])
    grammars._tokenizer = object()
    with pytest.raises(ApiError, match=r"700\d\d bytes of names, texts and numbers; at most 65536") as error:
        grammars.of(schema)
    assert error.value.status == 400


NAMES = {"type": "object", "properties": {str(i): {"type": "string"} for i in range(1300)}}
PAIR = {"type": "array", "minItems": 2, "maxItems": 2}
PAIRS = {
    "$defs": {f"d{i}": PAIR | {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(60)}
    | {"d60": {"type": "null"}},
    "$ref": "#/$defs/d0",
}


# Few names and letters, and 250 MiB for each answer while it was under way.
REPEATED = {"type": "string", "pattern": "^((a{20}){100}){100}$"}


@pytest.mark.parametrize("schema", [NAMES, PAIRS, REPEATED], ids=["names", "pairs", "repeated"])
def test_a_schema_beyond_what_the_library_follows_is_refused(schema: Any) -> None:
    """They have fewer names and entries than the limit; the first token of an answer ended it with a 500."""
    pytest.importorskip("llguidance")
    from nstf.integrations.serve.errors import ApiError
    from nstf.integrations.serve.grammar import Grammars

    model = Path(__file__).parents[3] / "examples" / "tiny_llama" / "model"
    grammars = Grammars((model / "tokenizer.json").read_text(), 1000, [0])
    with pytest.raises(ApiError, match="too complex") as error:
        grammars.of(schema)
    assert (error.value.status, error.value.param) == (400, "response_format")
    assert grammars.of({"type": "object", "properties": {"a": {"type": "integer"}}}).satisfiable
    assert grammars.of({"const": 1}).satisfiable and grammars.of({"type": "null"}).satisfiable


def patterns(count: int) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": f".*{chr(97 + i % 26)}.{{5}}z.*"} for i in range(count)]


JOINED: dict[str, Callable[[int], dict[str, Any]]] = {
    "allOf": lambda n: {"allOf": patterns(n)},
    "objects": lambda n: {"allOf": [{"type": "object", "properties": {"a": p}} for p in patterns(n)]},
    "references": lambda n: {
        "$defs": {
            f"d{i}": p | ({"$ref": f"#/$defs/d{i + 1}"} if i + 1 < n else {})
            for i, p in enumerate(patterns(n))
        },
        "$ref": "#/$defs/d0",
    },
    "references beside properties": lambda n: {
        "$defs": {
            f"d{i}": {"type": "object", "properties": {"a": p}}
            | ({"$ref": f"#/$defs/d{i + 1}"} if i + 1 < n else {})
            for i, p in enumerate(patterns(n))
        },
        "$ref": "#/$defs/d0",
    },
    "choices": lambda n: reduce(lambda inner, p: {**p, "anyOf": [inner]}, patterns(n - 1), patterns(1)[0]),
    "names": lambda n: {"allOf": [{"patternProperties": {p["pattern"]: {} for p in patterns(n)}}]},
}


@pytest.mark.parametrize("form", JOINED)
def test_patterns_that_one_text_must_follow_are_few(form: str) -> None:
    """Sixteen took 103 MiB, thirty 6 GiB and a minute, by a schema of 1,361 bytes: it ended the server."""
    pytest.importorskip("llguidance")
    from nstf.integrations.serve.errors import ApiError
    from nstf.integrations.serve.grammar import MOST_JOINED, Grammars

    assert [patterns_of(JOINED[form](n))[1] for n in (2, 13)] == [2, 13]
    grammars = Grammars("{}", 8, [1])
    grammars._tokenizer = object()
    with pytest.raises(ApiError, match=f"has {MOST_JOINED + 1} patterns in parts that are joined") as error:
        grammars.of(JOINED[form](MOST_JOINED + 1))
    assert (error.value.status, error.value.param) == (400, "response_format")


def test_properties_that_patterns_name_are_few() -> None:
    """Each two are looked at together: 676 of them took more than two minutes, in which no other schema was read."""
    pytest.importorskip("llguidance")
    from nstf.integrations.serve.errors import ApiError
    from nstf.integrations.serve.grammar import MOST_NAMED, Grammars

    grammars = Grammars("{}", 8, [1])
    grammars._tokenizer = object()
    names = {f"^a{i}x(.{{1,30}}x)*$": {"type": "integer"} for i in range(MOST_NAMED + 1)}
    with pytest.raises(ApiError, match="has 65 names in patternProperties") as error:
        grammars.of({"type": "object", "patternProperties": names})
    assert error.value.status == 400


def test_patterns_of_properties_apart_may_be_many() -> None:
    apart = {"type": "object", "properties": {f"a{i}": p for i, p in enumerate(patterns(50))}}
    assert patterns_of(apart) == (0, 0)
    assert patterns_of({"$defs": {"d": patterns(1)[0]}, "$ref": "#/$defs/d", "title": "x"}) == (0, 0)
    assert patterns_of({"type": "string", "anyOf": patterns(50)}) == (0, 0)
    named = {"allOf": [{"const": {"pattern": "x"}}, {"properties": {"pattern": {"type": "string"}}}]}
    assert patterns_of(named) == (0, 0)


def test_common_multiples_are_counted_without_decimal_points() -> None:
    def of(*steps: float) -> int:
        return common_multiple({"allOf": [{"multipleOf": step} for step in steps]}, 10_000)

    assert (of(), of(5, 10, 25), of(0.01, 0.25), of(1e-7), of(100)) == (1, 50, 25, 1, 100)
    assert common_multiple({"const": {"multipleOf": 99}}, 1000) == 1
    assert common_multiple({"properties": {"const": {"multipleOf": 99}}}, 1000) == 99
    assert of(0, -3, True, float("inf"), "x") == 3  # type: ignore[arg-type]
    assert of(97, 89, 101, *range(1, 5000)) > 10_000
    # More than a float holds: this was an OverflowError, and an answer of 500.
    assert of(10**400) > 10_000


# 12 s of processor time and 370 MiB before an answer had begun; parts that are joined have the common multiple.
STEP = {"type": "integer", "multipleOf": 999_983}
STEPS = {"allOf": [{"type": "integer", "multipleOf": step} for step in (97, 89, 101)]}


@pytest.mark.parametrize("schema", [STEP, STEPS], ids=["one", "joined"])
def test_steps_that_take_much_memory_are_refused_before_they_are_read(schema: Any) -> None:
    pytest.importorskip("llguidance")
    from nstf.integrations.serve.errors import ApiError
    from nstf.integrations.serve.grammar import Grammars

    grammars = Grammars("{}", 8, [1])
    grammars._tokenizer = object()
    with pytest.raises(ApiError, match="multipleOf") as error:
        grammars.of({"type": "object", "properties": {"a": schema}})
    assert (error.value.status, error.value.param) == (400, "response_format")


@pytest.mark.parametrize(
    "schema",
    [
        {"default": STEP, "$ref": "#/default"},
        {"examples": [STEP], "$ref": "#/examples/0"},
        {"enum": [STEP], "anyOf": [{"$ref": "#/enum/0"}]},
        {"foo": {"const": STEP}, "properties": {"a": {"$ref": "#/foo/const"}}},
        {"$defs": STEP, "$ref": "#/$defs"},
        {"default": STEP, "$ref": "#/d%65fault"},
        {"default": STEP, "$ref": "#%2Fdefault"},
        {"$defs": {"a": {"$id": "z", "default": STEP, "$ref": "#/default"}}, "$ref": "#/$defs/a"},
        {"$id": "http://x/y", "default": STEP, "$ref": "http://x/y#/default"},
        {"default": STEP, "$ref": "json-schema:///#/default"},
        {"default": {"$anchor": "x", **STEP}, "$ref": "#x"},
    ],
    ids=str,
)
def test_references_lead_to_rules_that_were_counted(schema: Any) -> None:
    """llguidance follows one into a value: 945 bytes of patterns there took 2.2 GiB, 1.4 KB ended the server."""
    pytest.importorskip("llguidance")
    from nstf.integrations.serve.errors import ApiError
    from nstf.integrations.serve.grammar import Grammars

    grammars = Grammars("{}", 8, [1])
    grammars._tokenizer = object()
    with pytest.raises(ApiError, match=r"\$ref '.*' leads to no rule of this schema") as error:
        grammars.of(schema)
    assert (error.value.status, error.value.param) == (400, "response_format")


def test_references_to_rules_are_none_that_stray() -> None:
    rule = {"type": "integer"}
    for schema in (
        {"$defs": {"a b": rule}, "$ref": "#/$defs/a%20b"},
        {
            "definitions": {"default": {"properties": {"const": rule}}},
            "$ref": "#/definitions/default/properties/const",
        },
        {"allOf": [rule, {"$ref": "#/allOf/0"}]},
        {"properties": {"a~/b": {"$ref": "#/properties/a~0~1b"}, "x": {"$ref": "#"}}},
        {"default": {"$ref": "#/default"}},  # a value, which is what it is
    ):
        assert stray_reference(schema) is None
    # Rules in a list where names with rules should stand are counted.
    assert common_multiple({"properties": [{"multipleOf": 99}], "$ref": "#/properties/0"}, 1000) == 99


def test_a_lexer_has_few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state takes 1 to 2 KB; llguidance's own limit is 250,000 of them an answer."""
    llguidance = pytest.importorskip("llguidance")
    from nstf.integrations.serve.grammar import MOST_STATES, Grammars

    given: dict[str, int] = {}
    own = llguidance.LLParserLimits
    monkeypatch.setattr(llguidance, "LLParserLimits", lambda **limits: given.update(limits) or own(**limits))
    model = Path(__file__).parents[3] / "examples" / "tiny_llama" / "model"
    Grammars((model / "tokenizer.json").read_text(), 1000, [0]).of({"type": "object"})
    assert own(**given).max_lexer_states == MOST_STATES <= 40_000
