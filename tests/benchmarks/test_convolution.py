"""benchmarks/convolution.py: times of single convolutions in a table, what is chosen by it, files that come back."""

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
        return torch.randn(count, 3, 32, 32, generator=g), torch.randint(10, (count,), generator=g)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("convolution", "convolution_forms", "convolution_prices", "photographs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import convolution
    import convolution_forms
    import convolution_prices
    import photographs

    for module in (convolution, convolution_forms, photographs):
        monkeypatch.setattr(module, "Pictures", Noise)
    monkeypatch.setattr(photographs, "TESTED", 32)
    monkeypatch.setattr(convolution_prices, "ROUNDS", 1)
    monkeypatch.setattr(convolution_prices, "LARGE_SIDE", 32)
    monkeypatch.setattr(convolution, "LARGE_SIZE", 32)


@pytest.fixture
def network(tmp_path: Path) -> Path:
    import photographs
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=10
    )
    photographs.save(ResNetForImageClassification(config).eval(), tmp_path / "model")
    return tmp_path / "model"


def test_what_is_chosen_by_a_stored_table_is_healed_saved_and_timed(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import convolution

    prices, rows = tmp_path / "prices.json", tmp_path / "rows.json"

    def run(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["convolution.py", *map(str, arguments)])
        convolution.main()

    run("prices", network, "--threads", 1, "--json", prices)
    table = json.loads(prices.read_text("utf-8"))
    assert table["threads"] == 1
    assert min(table["seconds"].values()) > 0
    files = tmp_path / "files"
    run(
        *("alike", network, "--no-times", "--threads", 1, "--pictures", 16, "--inputs", 4, "--heal-steps", 0, 2),
        *("--prices", prices, "--save", files, "--json", rows, "--only", "chosen 0.25", "int3 row"),
    )  # fmt: skip
    found = {row["file"]: row for row in json.loads(rows.read_text("utf-8"))}
    assert list(found) == [
        "float32", "chosen 0.25", "int3 row", "chosen 0.25, healed 2", "int3 row, healed 2",
    ]  # fmt: skip
    saved = [
        files / f"{n}.nstf" for n in ("chosen-0.25", "chosen-0.25-healed-2", "int3-row", "int3-row-healed-2")
    ]
    run("times", network, *saved, "--threads", 1, "--pictures", 2, "--json", rows)
    timed = {row["file"]: row for row in json.loads(rows.read_text("utf-8"))}
    for name, file in (("int3 row", "int3-row"), ("chosen 0.25, healed 2", "chosen-0.25-healed-2")):
        assert timed[file]["kld"] == pytest.approx(found[name]["kld"], abs=1e-4)
        assert timed[file]["ms"] > 0
    assert timed["float32"]["kld"] == pytest.approx(0, abs=1e-6)


def test_a_recipe_that_the_table_lacks_is_an_error_that_says_what_to_do(network: Path) -> None:
    import convolution_prices
    from transformers import ResNetForImageClassification

    model = ResNetForImageClassification.from_pretrained(network)
    prices = convolution_prices.measure(model, 1)
    with pytest.raises(SystemExit, match="measure it again with"):
        prices.of(convolution_prices.integers(7, 0), (16, 16, 3, 3), (1, 16, 8, 8), (1, 1))


def test_the_choice_takes_no_longer_than_allowed_and_spends_time_where_it_saves_loss() -> None:
    import convolution_forms

    seconds = {n: {"svd 0.2": 1.0, "integers": 4.0} for n in "ab"}
    lost = {"a": {"svd 0.2": 9.0, "integers": 0.0}, "b": {"svd 0.2": 1.0, "integers": 0.0}}
    assert convolution_forms.cheapest(lost, seconds, 5.5) == {"a": "integers", "b": "svd 0.2"}
    assert convolution_forms.cheapest(lost, seconds, 2.0) == {"a": "svd 0.2", "b": "svd 0.2"}
    assert convolution_forms.cheapest(lost, seconds, 9.0) == {"a": "integers", "b": "integers"}
