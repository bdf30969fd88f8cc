"""The step-by-step example runs as it stands, cell by cell, and says what it promises."""

import re
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "walkthrough.py"


def cells(text: str) -> list[str]:
    """The code cells, in order."""
    parts = re.split(r"^# %%(.*)$", text, flags=re.MULTILINE)
    assert not parts[0].strip()
    return [code for title, code in zip(parts[1::2], parts[2::2], strict=True) if "[markdown]" not in title]


def test_every_cell_of_the_walkthrough_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = EXAMPLE.read_text("utf-8")
    names: dict[str, object] = {"__file__": str(EXAMPLE), "__name__": "walkthrough"}
    for number, code in enumerate(cells(text)):
        exec(compile(code, f"{EXAMPLE.name}, cell {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert names["result"].size_bytes <= names["result"].budget_bytes  # type: ignore[attr-defined]
    assert str(names["text"]).startswith("The captain") and "'mean_kl'" in printed
    assert len(names["difference"].tensors) == 38  # type: ignore[attr-defined]
    assert "relative error 0.0" in printed or "relative error 0.1" in printed
