"""Whether a JSON schema has a text that ends: `{"properties": {"a": {"$ref": "#"}}, "required": ["a"]}` has none.

A grammar of such a schema has a first token, and a next one after each, until the answer's length is used up.
"""

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

# Schemas of more parts are not looked through, nor are chains of more references from part to part.
MOST_PARTS, MOST_ROUNDS = 10_000, 64
FOR_PEOPLE = ("description", "title", "$comment")
# Whose values are no rules but what an answer may be.
VALUES = ("const", "default", "enum", "examples")
# Whose keys are names of the user's, each with a rule: a property may be called `const`.
NAMES = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
# What a rule has of other rules, which are joined with its own: those that hold patterns.
_OTHERS = frozenset(("$ref", "anyOf", "oneOf"))
_HOLDERS = frozenset(
    ("pattern", "format", "properties", "patternProperties", "additionalProperties", "items", "prefixItems")
)
# What a part of a schema is: a rule with keywords, names with rules, or a value.
_RULE, _RULES_BY_NAME, _VALUE = range(3)


def can_end(schema: Any) -> bool:
    """False where every text of the schema (parsed JSON) would go on without end. True also where that is not known: of
    references to other documents, and of what is too large to look through."""
    parts: dict[int, Any] = {}
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if id(part) in parts or not isinstance(part, dict):
            continue
        parts[id(part)] = part
        if len(parts) > MOST_PARTS:
            return True
        waiting += [found for group in _groups(part, schema) for found in group]
    # What ends is found from the inside out: first what needs nothing, then what needs only that.
    ended: set[int] = set()
    order = list(parts.values())[::-1]
    for _ in range(MOST_ROUNDS):
        before = len(ended)
        for part in order:
            if id(part) not in ended and all(_any_ends(group, ended) for group in _groups(part, schema)):
                ended.add(id(part))
        if len(ended) == before:
            return not isinstance(schema, dict) or id(schema) in ended
    return True


def parts_of(schema: Any) -> int:
    """The names in the objects of a schema and the entries of its lists, without the plain values of `enum`."""
    return _parts(schema)[0]


def choices_of(schema: Any) -> int:
    """The plain values (texts, numbers, true, false, null) in all the lists of a schema that are called `enum`."""
    return _parts(schema)[1]


def _parts(schema: Any) -> tuple[int, int]:
    count, choices, waiting = 0, 0, [(schema, _RULE)]
    while waiting:
        part, kind = waiting.pop()
        if isinstance(part, dict):
            count += len(part)
            for key, value in part.items():
                within = _kind_inside(kind, key)
                if kind == _RULE and key == "enum" and isinstance(value, list):
                    inner = [v for v in value if isinstance(v, dict | list)]
                    # Each of these is a rule of the grammar; plain values are words of one pattern.
                    count += len(inner)
                    choices += len(value) - len(inner)
                    waiting += [(v, within) for v in inner]
                elif isinstance(value, dict | list):
                    waiting.append((value, within))
        elif isinstance(part, list):
            count += len(part)
            waiting += [(v, kind) for v in part if isinstance(v, dict | list)]
    return count, choices


def text_bytes(schema: Any) -> int:
    """Bytes of the names, texts and numbers of a schema in UTF-8, without the texts that only people read."""
    count, waiting = 0, [(schema, _RULE)]
    while waiting:
        part, kind = waiting.pop()
        if isinstance(part, str):
            count += _bytes(part)
        elif isinstance(part, int | float) and not isinstance(part, bool):
            count += len(repr(part))
        elif isinstance(part, list):
            waiting += [(value, kind) for value in part]
        elif isinstance(part, dict):
            for key, value in part.items():
                count += _bytes(key)
                if not (kind == _RULE and key in FOR_PEOPLE and isinstance(value, str)):
                    waiting.append((value, _kind_inside(kind, key)))
    return count


def _kind_inside(kind: int, key: str) -> int:
    """What is under a key of a part. In a value that an answer must have, a `title` is as much a part of it as any other."""
    if kind == _RULES_BY_NAME:
        return _RULE
    if kind == _VALUE or key in VALUES:
        return _VALUE
    return _RULES_BY_NAME if key in NAMES else _RULE


def stray_reference(schema: Any) -> str | None:
    """A `$ref` that may lead to what is counted here as no rule: into a value, to all names together, or elsewhere than down
    from a rule (another document, an `$id`, an `$anchor`). None where there is none.

    By its path alone: what a part is follows from the keys that lead to it, from whichever rule a library begins.
    """
    for part in _rules(schema):
        reference = part.get("$ref")
        if isinstance(reference, str) and not _leads_to_a_rule(reference):
            return reference
    return None


def _rules(schema: Any) -> Iterator[dict[str, Any]]:
    """The parts of a schema that have keywords."""
    waiting = [(schema, _RULE)]
    while waiting:
        part, kind = waiting.pop()
        if isinstance(part, list):
            # Names stand in objects; what a list has in their place is counted as rules.
            inside = _RULE if kind == _RULES_BY_NAME else kind
            waiting += [(value, inside) for value in part if isinstance(value, dict | list)]
        elif isinstance(part, dict):
            if kind == _RULE:
                yield part
            waiting += [(v, _kind_inside(kind, k)) for k, v in part.items() if isinstance(v, dict | list)]


def _leads_to_a_rule(reference: str) -> bool:
    if reference == "#":
        return True
    if not reference.startswith("#/") or "%2f" in reference.lower():
        return False
    kind = _RULE
    for name in unquote(reference[2:]).split("/"):
        kind = _kind_inside(kind, name.replace("~1", "/").replace("~0", "~"))
    return kind == _RULE


def patterns_of(schema: Any) -> tuple[int, int]:
    """(the names of properties that a schema gives by regular expressions, all its regular expressions, formats too, where
    parts are joined so that one text may have to follow several, else 0)."""
    named, count, joins = 0, 0, False
    for part in _rules(schema):
        others = _OTHERS & part.keys()
        joins |= "allOf" in part or bool(others and (len(others) > 1 or _HOLDERS & part.keys()))
        own = part.get("patternProperties")
        named += len(own) if isinstance(own, dict) else 0
        count += ("pattern" in part) + ("format" in part)
    return named, named + count if joins else 0


def common_multiple(schema: Any, most: int) -> int:
    """The least common multiple of all `multipleOf` of a schema without decimal points; above `most`: of the first ones."""
    found = 1
    for part in _rules(schema):
        step = part.get("multipleOf")
        if isinstance(step, int) and not isinstance(step, bool):
            found = math.lcm(found, step or 1)
        elif isinstance(step, float) and math.isfinite(step):
            found = math.lcm(found, _digits(step) or 1)
        if found > most:
            break
    return found


def _digits(number: float) -> int:
    """A number without sign and decimal point: 25 of 0.25, 100 of 100."""
    _, digits, exponent = Decimal(repr(number)).normalize().as_tuple()
    assert isinstance(exponent, int)  # it is finite
    return int("".join(map(str, digits)) + "0" * max(exponent, 0))


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _any_ends(group: list[Any], ended: set[int]) -> bool:
    return any(not isinstance(part, dict) or id(part) in ended for part in group)


def _groups(part: Mapping[str, Any], whole: Any) -> Iterator[list[Any]]:
    """What a text of this part has inside: of each group one."""
    if "const" in part or "enum" in part:
        return
    if isinstance(part.get("$ref"), str):
        yield [_referred(part["$ref"], whole)]
    for one in _list(part.get("allOf")):
        yield [one]
    for name in ("anyOf", "oneOf"):
        if choices := _list(part.get(name)):
            yield choices
    if part.get("type") in ("object", ["object"]):
        properties = part.get("properties")
        known = properties if isinstance(properties, dict) else {}
        others = True if "patternProperties" in part else part.get("additionalProperties", True)
        for name in _list(part.get("required")):
            yield [known.get(name, others) if isinstance(name, str) else True]
    if part.get("type") in ("array", ["array"]):
        least = part.get("minItems", 0)
        first = _list(part.get("prefixItems"))
        if isinstance(least, int):
            yield from ([one] for one in first[:least])
            if least > len(first):
                yield [part.get("items", True)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: str, whole: Any) -> Any:
    """The part that a reference within the schema names; True, which ends, for any other."""
    head, *names = unquote(reference).split("/")
    if head != "#":
        return True
    found = whole
    for name in names:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        # Python makes no number of more than 4,300 digits.
        elif isinstance(found, list) and name.isdecimal() and len(name) < 10 and int(name) < len(found):
            found = found[int(name)]
        else:
            return True
    return found
