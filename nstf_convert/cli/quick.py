"""`nstf generate ARTIFACT PROMPT` without typer, whose import (pydantic among it) takes twice as long as the first token of
a small model.

Only for command lines of the plainest kind, and only where all goes well: whatever else is asked, and whatever is wrong with
a file, is the full command's, which starts from the beginning and says what it has to say.
"""

from __future__ import annotations

import os
import sys

from nstf.runtime.imports import uncollected

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST = {"--max-new-tokens": 1 << 30, "--threads": 1024}


def generate(words: Sequence[str]) -> int | None:
    """Runs the command and returns its exit code, or None with nothing written where the full command has to."""
    request = parsed(words)
    if request is None:
        return None
    artifact, prompt, numbers, exact = request
    with uncollected():
        from nstf.runtime import engine_text

        pieces = engine_text.stream(
            artifact, prompt, numbers.get("--max-new-tokens", 128), exact, numbers.get("--threads")
        )
        try:
            piece = next(pieces, "")
        except Exception:
            return None
    try:
        while True:
            sys.stdout.write(piece)
            sys.stdout.flush()
            try:
                piece = next(pieces)
            except StopIteration:
                break
        sys.stdout.write("\n")
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on: no error, as in typer
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def parsed(words: Sequence[str]) -> tuple[str, str, dict[str, int], bool] | None:
    """(artifact, prompt, numbers by option, --exact) of a plain `generate`; None for any other command line."""
    if not words or words[0] != "generate":
        return None
    end = words.index("--") if "--" in words else len(words)
    head, plain = list(words[1:end]), list(words[end + 1 :])
    numbers: dict[str, int] = {}
    given: list[str] = []
    exact = False
    while head:
        word = head.pop(0)
        if not word.startswith("-"):
            given.append(word)
            continue
        name, stated, value = word.partition("=")
        if word == "--exact" and not exact:
            exact = True
        elif name in _MOST and name not in numbers:
            if not stated:
                value = head.pop(0) if head else ""
            if not (
                value.isascii() and value.isdecimal() and len(value) < 10 and 1 <= int(value) <= _MOST[name]
            ):
                return None
            numbers[name] = int(value)
        else:
            return None
    given += plain
    if len(given) != 2 or not given[0] or given[1] == "-" or not given[1].strip():
        return None
    if any("\ud800" <= c <= "\udfff" for c in given[1]):
        return None
    return given[0], given[1], numbers, exact
