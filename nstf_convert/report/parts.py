"""Pieces of the report's page: tables, folded details, numbers. Every text is escaped."""

import math
from collections.abc import Sequence

from nstf_convert.report.svg import escape

Row = Sequence[object]


def details(title: str, content: str) -> str:
    """A part that is folded until it is asked for. content: markup."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def table(columns: Row, rows: Sequence[Row], left: Sequence[str] = ()) -> str:
    """A table. left: columns of words."""
    styles = [' class="left wrap"' if name in left else "" for name in columns]
    head = "".join(f"<th{style}>{escape(c)}</th>" for c, style in zip(columns, styles, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{style}>{cell(c)}</td>' for c, style in zip(row, styles, strict=True))}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


class Raw(str):
    """A cell that is markup already: numbers of ours, never text of the model."""


def cell(value: object) -> str:
    """The markup of a cell."""
    return str(value) if isinstance(value, Raw) else escape(value)


def number(value: object, form: str) -> str:
    """`value` formatted, or `-` when it was not measured."""
    return format(value, form) if isinstance(value, int | float) else "-"


def measured(value: object, error: object, form: str) -> tuple[str, str]:
    """(value, standard error) with as many decimals as the error's first two digits need: `0.0000312`, `0.0000021`.

    form: of the value, such as `.5f`, where more decimals are not needed. The error is "" when there is none.
    """
    if not isinstance(value, int | float):
        return "-", ""
    least = int(form.strip(".f"))
    scale = error if isinstance(error, int | float) and error > 0 else value
    decimals = least
    if scale and math.isfinite(scale) and abs(scale) < 10.0**-least * 10:
        decimals = max(least, min(12, 1 - math.floor(math.log10(abs(scale)))))
    text = f"{value:.{decimals}f}"
    return text, f"{error:.{decimals}f}" if isinstance(error, int | float) else ""
