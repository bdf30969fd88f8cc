"""Pieces of the report's page: tables, folded details, numbers. Every text is escaped."""

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
