"""Where results and messages go: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import logging
import math
import os
import sys

from nstf_convert.notice import NOTICE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

SHORTEST_NAME = 24
LONGEST_NAME = 32


def print_json(data: Any) -> None:
    """Writes strict JSON on stdout: sorted keys, NaN and infinities as null."""
    sys.stdout.write(json.dumps(plain(data), indent=2, sort_keys=True, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """`value` with tuples as lists, keys as strings and numbers that JSON cannot hold as None."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool) or value is None else str(value)


def clean(text: object) -> str:
    """`text` on one line, with control characters (terminal escapes in a file's names) made visible."""
    joined = " ".join(str(text).split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in joined)


def print_pairs(title: str, pairs: Sequence[tuple[str, object]]) -> None:
    """A heading and aligned `name  value` lines on stdout; long values wrap under themselves."""
    import textwrap

    import typer

    if title:
        typer.echo(title)
    names = [clean(name) for name, _ in pairs]
    # Of names that a file states: longer ones move their own value to the right.
    width = min(max(map(len, names), default=0), LONGEST_NAME)
    columns = max(60, terminal_width())
    for name, (_, value) in zip(names, pairs, strict=True):
        lines = textwrap.wrap(clean(value), columns - width - 4, break_on_hyphens=False) or ["-"]
        typer.echo(f"  {name:<{width}}  {lines[0]}")
        for line in lines[1:]:
            typer.echo(f"  {'':<{width}}  {line}")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> None:
    """A table on stdout; the first `left` columns are aligned left, the others right.

    In a pipe nothing is cut: one line a row, made for grep and awk. On a terminal the first column gives way at
    its start (the ends of tensors' names tell them apart) until a row fits on a line.
    """
    import typer

    cells = [[clean(c) for c in row] for row in rows]
    widths = [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(columns)]
    terminal = sys.stdout.isatty()
    if terminal:
        room = terminal_width() - sum(widths[1:]) - 2 * (len(columns) - 1)
        widths[0] = min(widths[0], max(SHORTEST_NAME, room))
    bold = terminal and "NO_COLOR" not in os.environ
    for number, row in enumerate([list(columns), *cells]):
        first = row[0] if len(row[0]) <= widths[0] else "…" + row[0][len(row[0]) - widths[0] + 1 :]
        pairs = zip([first, *row[1:]], widths, strict=True)
        line = "  ".join(f"{c:<{w}}" if i < left else f"{c:>{w}}" for i, (c, w) in enumerate(pairs)).rstrip()
        typer.echo(typer.style(line, bold=True) if bold and number == 0 else line)


def terminal_width() -> int:
    """Columns of the terminal, 100 in a pipe (where a narrow default would only break lines)."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        return 100


def setup_logging(quiet: bool, verbose: bool, debug: bool) -> None:
    """Sends the records of nstf's loggers to stderr: stages if verbose, one bar unless quiet, warnings always."""
    level = logging.DEBUG if debug else logging.INFO if verbose else logging.WARNING if quiet else NOTICE
    for name in ("nstf", "nstf_convert"):
        logger = logging.getLogger(name)
        logger.handlers = [_StderrHandler()]
        logger.setLevel(level)
        logger.propagate = False


class _StderrHandler(logging.Handler):
    """Plain lines on the stderr of the moment, above a tqdm bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        from nstf_convert.cli.schema import with_flags

        prefix = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        line = prefix + with_flags(clean(record.getMessage()))
        tqdm = sys.modules.get("tqdm")
        if tqdm is not None:
            tqdm.tqdm.write(line, file=sys.stderr)
        else:
            sys.stderr.write(line + "\n")
