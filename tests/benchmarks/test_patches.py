"""benchmarks/patches.py: every form of a ViT's stem is encoded, runs, and its loss and times come out."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]


class Noise:
    """Instead of photographs, for which scikit-learn would be needed."""

    def __init__(self, test: bool) -> None:
        self.test = test

    def draw(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(seed)
        return torch.randn(count, 3, 48, 48, generator=g), torch.randint(10, (count,), generator=g)


def test_a_stem_is_compared_as_bits_and_as_low_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("convolution", "convolution_prices", "patches", "photographs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import patches
    import photographs

    for module in (patches, photographs):
        monkeypatch.setattr(module, "Pictures", Noise)
    monkeypatch.setattr(photographs, "TESTED", 16)
    monkeypatch.setattr(patches, "RANKS", (8, 32))
    torch.manual_seed(0)
    photographs.save(patches.build(64, 1).eval(), tmp_path / "vit")
    rows_file = tmp_path / "rows.json"
    monkeypatch.setattr(
        sys,
        "argv",
        [*f"patches.py compare {tmp_path / 'vit'} --threads 1 --pictures 8 --json".split(), str(rows_file)],
    )
    patches.main()
    rows = {row["stem"]: row for row in json.loads(rows_file.read_text("utf-8"))}
    assert (
        list(rows) == ["float32", *patches.forms(64, 768)] and "low rank 32" in rows and "shuffle 3" in rows
    )
    assert rows["float32"]["kld"] == pytest.approx(0, abs=1e-9)
    # A rank of 8 loses most, 8 bits lose least, and bytes are those of the arrays.
    losses = {name: row["expected"] for name, row in rows.items() if name != "float32"}
    assert (
        max(losses, key=losses.__getitem__) == "low rank 8"
        and min(losses, key=losses.__getitem__) == "int8 row"
    )
    assert rows["int4 row"]["bytes"] == 64 * 768 // 2 + 2 * 64
    assert all(row["stem_us"] > 0 and row["whole_ms"] > 0 for row in rows.values())
