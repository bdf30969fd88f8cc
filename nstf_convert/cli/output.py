"""Where results and messages go: results on stdout, everything else on stderr."""

import json
import logging
import math
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import typer


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
    if title:
        typer.echo(title)
    width = max((len(name) for name, _ in pairs), default=0)
    columns = max(60, terminal_width())
    for name, value in pairs:
        lines = textwrap.wrap(clean(value), columns - width - 4, break_on_hyphens=False) or ["-"]
        typer.echo(f"  {name:<{width}}  {lines[0]}")
        for line in lines[1:]:
            typer.echo(f"  {'':<{width}}  {line}")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> None:
    """A table on stdout; the first `left` columns are aligned left, the others right.

    On a terminal rich draws it and shortens what does not fit; in a pipe it is plain aligned text, one line
    a row, nothing cut: made for grep and awk.
    """
    cells = [[clean(c) for c in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich(columns, cells, left)
        return
    widths = [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(columns)]
    for row in [list(columns), *cells]:
        line = "  ".join(
            f"{c:<{w}}" if i < left else f"{c:>{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        typer.echo(line.rstrip())


def _print_rich(columns: Sequence[str], cells: Sequence[Sequence[str]], left: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=i != 0, overflow="ellipsis")
    for row in cells:
        table.add_row(*(Text(c) for c in row))
    Console().print(table)


def terminal_width() -> int:
    """Columns of the terminal, 100 in a pipe (where a narrow default would only break lines)."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        return 100


def setup_logging(quiet: bool, debug: bool) -> None:
    """Sends the records of nstf's loggers to stderr: progress unless quiet, warnings always."""
    level = logging.DEBUG if debug else logging.WARNING if quiet else logging.INFO
    for name in ("nstf", "nstf_convert"):
        logger = logging.getLogger(name)
        logger.handlers = [_StderrHandler()]
        logger.setLevel(level)
        logger.propagate = False


class _StderrHandler(logging.Handler):
    """Plain lines on the stderr of the moment, above a tqdm bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        line = prefix + clean(record.getMessage())
        tqdm = sys.modules.get("tqdm")
        if tqdm is not None:
            tqdm.tqdm.write(line, file=sys.stderr)
        else:
            sys.stderr.write(line + "\n")
