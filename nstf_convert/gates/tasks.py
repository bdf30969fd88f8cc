"""Multiple-choice tasks as JSON lines, and their strict reader.

    {"context": "The capital of France is", "choices": [" Paris", " Rome"], "answer": 0}

context: what comes before; choices: two or more continuations, appended to the context exactly as they are written, so
that a choice begins with the space that belongs there; answer: the index of the right one, from 0. Optional: `id`, a
name of the question in the results, or its number; `task`, the group its accuracy is also reported in. Empty lines are
skipped; any other key is an error, as a misspelt one would be silently ignored otherwise.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nstf.errors import UsageError
from nstf.runtime.artifact.header import check_values
from nstf_convert.checkpoint.paths import read_given

KEYS = ("context", "choices", "answer", "id", "task")
MAX_CHOICES = 100
MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class Question:
    """One line: `answer` is the index of the right one among `choices`; `task` is the group, "" without one."""

    context: str
    choices: tuple[str, ...]
    answer: int
    name: str
    task: str = ""


def read_tasks(path: Path, limit: int | None = None) -> list[Question]:
    """The questions of a JSON lines file, the first `limit` of them.

    Raises UsageError that names the line: not JSON, a key that is missing, unknown or of another type, an answer that
    is no index of the choices.
    """
    raw = read_given(path, MAX_BYTES, "`tasks`")
    found: list[Question] = []
    # One at a time, as there may be one for each byte. Lines of bytes end at b"\n" alone: those of splitlines() also at
    # characters that JSON allows inside a string, such as U+2028.
    for number, encoded in enumerate(io.BytesIO(raw), 1):
        try:
            line = encoded.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"`tasks` {path}, line {number}: not UTF-8 text (byte {error.start}): give JSON lines"
            ) from error
        if line.strip():
            try:
                found.append(parse(line, number))
            except ValueError as error:
                raise UsageError(f"`tasks` {path}, line {number}: {error}") from error
            if len(found) == limit:
                break
    if not found:
        raise UsageError(
            f"`tasks` {path}: no question inside: give one JSON object a line, such as {EXAMPLE}"
        )
    return found


EXAMPLE = '{"context": "The sky is", "choices": [" blue", " loud"], "answer": 0}'


def parse(line: str, number: int) -> Question:
    """The question of one line. Raises ValueError that says what is wrong with it."""
    try:
        check_values(line, "it")
        data = json.loads(line, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos}): write {EXAMPLE}") from error
    except RecursionError as error:
        raise ValueError(f"nested too deeply: write {EXAMPLE}") from error
    if not isinstance(data, dict):
        raise ValueError(f"not an object: write {EXAMPLE}")
    unknown = [key for key in data if key not in KEYS]
    if unknown:
        raise ValueError(f"unknown key {unknown[0][:40]!r}: there are {', '.join(KEYS)}")
    for key in ("context", "choices", "answer"):
        if key not in data:
            raise ValueError(f"the key {key!r} is missing: write {EXAMPLE}")
    choices = _choices(data["choices"])
    answer = data["answer"]
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(
            f"'answer' is {json.dumps(answer)[:40]}: give the index of the right choice, 0 to {len(choices) - 1}"
        )
    context = _string(data, "context", "")
    if type(data.get("id")) is int:  # as many data sets have it
        data["id"] = str(data["id"])
    return Question(context, choices, answer, _string(data, "id", str(number)), _string(data, "task", ""))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice: remove one")
    return found


def _choices(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not 2 <= len(value) <= MAX_CHOICES:
        raise ValueError(f"'choices' must be a list of 2 to {MAX_CHOICES} texts")
    for index, choice in enumerate(value):
        if not isinstance(choice, str) or not choice.strip():
            raise ValueError(f"choice {index} is not a text, or empty")
        _check_whole(choice, f"choice {index}")
    if len(set(value)) != len(value):
        raise ValueError("two choices are the same text: no model can tell them apart")
    return tuple(value)


def _string(data: Mapping[str, Any], key: str, default: str) -> str:
    value = data.get(key, default)
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be a text, not {json.dumps(value)[:40]}")
    _check_whole(value, repr(key))
    return value


def _check_whole(text: str, what: str) -> None:
    """Raises ValueError for halves of characters, which JSON can hold and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} is not Unicode (half a character at {error.start}): write it again"
        ) from error


def joined_without_space(questions: Sequence[Question]) -> int:
    """How many questions have a choice that runs into the context's last word: most often a forgotten space."""
    return sum(
        any(q.context[-1:].isalnum() and choice[:1].isalnum() for choice in q.choices) for q in questions
    )
