"""The parts of benchmarks/frontier.py and guard.py that need no other tool."""

import importlib
import math
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def benchmarks_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_figures_are_kept_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    frontier = importlib.import_module("frontier")
    results = frontier.Results(tmp_path / "frontier.json")
    results.put({"docs": 0.1}, "kld", "avx2", "Q4_0")
    results.put({"docs": 0.2}, "kld", "avx512", "Q4_0")
    again = frontier.Results(tmp_path / "frontier.json")
    assert again.get("kld", "avx2", "Q4_0") == {"docs": 0.1}
    assert not again.get("kld", "avx2", "Q8_0")
    assert [p.name for p in tmp_path.iterdir()] == ["frontier.json"]


def test_the_table_has_ours_over_the_peer_by_instruction_set() -> None:
    frontier = importlib.import_module("frontier")
    how = {"threads": 2, "rounds": 5, "prompt": 128, "tokens": 64}
    speed = {
        "how": how,
        "nstf Q4_0": {"prefill": 600.0, "decode": 90.0},
        "llama.cpp Q4_0": {"prefill": 400.0, "decode": 60.0},
    }
    text = frontier.table(
        {
            "processor": "A Processor",
            "bytes": {"Q4_0": {"avx2": 999, "llama.cpp": 1000}, "Q8_0": {"avx2": 1999, "llama.cpp": 2000}},
            "kld": {"llama.cpp": {"Q4_0": {"docs": 0.1}}, "avx2": {"Q4_0": {"docs": 0.03}}},
            "speed": {"avx2": speed},
            "start": {"Q4_0": {"nstf": 0.3, "llama.cpp": 0.2}},
        }
    )
    assert text.startswith(
        "A Processor, avx2, 2 threads, medians of 5 rounds; prompt 128, 64 tokens decoded."
    )
    assert "| Q4_0 | 999 | 600.0 (1.50) | 90.0 (1.50) | 0.03000 (0.30) |" in text
    assert "first token, Q4_0: 0.30 s, 1.50 times llama.cpp's" in text
    assert "Q8_0" not in text


def test_a_figure_is_worse_beyond_its_tolerance_only() -> None:
    guard = importlib.import_module("guard")
    name = "default avx2 decode"
    kept = {name: 1.0, "0.3 KLD": 1.0}
    worse = {n: w for n, _, _, w in guard.compare(kept, {name: 1.09, "0.3 KLD": 1.06, "new decode": 9.0})}
    assert worse == {name: False, "0.3 KLD": True, "new decode": False}
    assert guard.kind().endswith(guard.ext.isa())


def test_the_bytes_of_equal_loss_lie_on_lines_of_logarithms() -> None:
    """Losses that fall by e each million bytes, on the second text twice as large; within, between and beyond the sizes."""
    frontier = importlib.import_module("frontier")
    sizes = (10_000_000, 12_000_000, 20_000_000)
    losses = {s: {"a": math.exp(-s / 1e6), "b": 2 * math.exp(-s / 1e6)} for s in sizes}
    cases = [
        ({"a": -11}, 11e6),
        ({"a": -13}, 13e6),
        ({"a": -25}, 25e6),
        ({"a": -9}, 9e6),
        ({"a": -13, "b": -14}, 14.69e6),
    ]
    for wanted, found in cases:
        size = frontier.equal_size(losses, {text: math.exp(v) for text, v in wanted.items()})
        assert size == pytest.approx(frontier.SPARE * found, rel=1e-3)
