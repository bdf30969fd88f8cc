"""docs/limits.md states the limits that the code has."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "bytes": 1, "": 1}


def rows() -> list[tuple[str, str, str, str]]:
    """(what, limit, file, constant) of every row that names one."""
    page = (ROOT / "docs" / "limits.md").read_text("utf-8")
    return re.findall(r"^\| (.+?) \| (.+?) \| `([\w/]+\.py)` (\w+) \|$", page, re.MULTILINE)


def stated(limit: str) -> float:
    """`2^18`, `256 MiB`, `100,000,000 bytes` or `64` as a number."""
    found = re.fullmatch(r"(?:2\^(\d+)|([\d,]+))(?: (\w+))?", limit)
    assert found, limit
    power, plain, unit = found.groups()
    return (2 ** int(power) if power else int(plain.replace(",", ""))) * UNITS[unit or ""]


def constant(path: str, name: str) -> float:
    """What a module assigns to a name; nothing is imported, since some modules need extras."""
    for node in ast.parse((ROOT / path).read_text("utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == name:
            assert isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            return float(eval(compile(ast.Expression(node.value), path, "eval"), {"__builtins__": {}}))
    raise AssertionError(f"{path} has no {name}")


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_a_limit_of_the_page_is_the_limit_of_the_code(row: tuple[str, str, str, str]) -> None:
    _, limit, path, name = row
    assert stated(limit) == constant(path, name)


def test_every_row_of_a_table_of_limits_names_its_constant() -> None:
    page = (ROOT / "docs" / "limits.md").read_text("utf-8").partition("## Limits on files")[2]
    lines = [line for line in page.splitlines() if line.startswith("| ") and "| limit |" not in line]
    assert len(lines) == len(rows())
