"""Where the values and members of a JSON text are, so that a mutation is a cut of bytes and no new dump."""

import json
import re
from dataclasses import dataclass

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[-+0-9.eE]+|true|false|null|[\[\]{},:]')


@dataclass(frozen=True)
class Spans:
    """values: (start, end) of every value; members: of every item of an object or list, with its comma."""

    values: list[tuple[int, int]]
    members: list[tuple[int, int]]
    integers: list[tuple[int, int]]
    # Objects with a "kind": trees and their children.
    trees: list[tuple[int, int]]


def spans(text: bytes) -> Spans:
    """text: a canonical JSON text (no blanks)."""
    found = Spans([], [], [], [])
    tokens = [(m.start(), m.end()) for m in _TOKEN.finditer(text)]
    _value(text, tokens, 0, found)
    return found


def _value(text: bytes, tokens: list[tuple[int, int]], at: int, found: Spans) -> int:
    """Reads the value at token `at`; gives back the token behind it."""
    start, end = tokens[at]
    opening = text[start:end]
    if opening not in (b"{", b"["):
        found.values.append((start, end))
        if opening.isdigit():
            found.integers.append((start, end))
        return at + 1
    closing = b"}" if opening == b"{" else b"]"
    at += 1
    while text[slice(*tokens[at])] != closing:
        first = tokens[at][0]
        at = _value(text, tokens, at + 2 if opening == b"{" else at, found)
        if text[slice(*tokens[at])] == b",":
            at += 1
            found.members.append((first, tokens[at][0]))
        else:  # the last: from the comma before it, where there is one
            before = first - (text[first - 1 : first] == b",")
            found.members.append((before, tokens[at][0]))
    end = tokens[at][1]
    found.values.append((start, end))
    if opening == b"{" and "kind" in json.loads(text[start:end]):
        found.trees.append((start, end))
    return at + 1
