"""A large table is decoded a part at a time, to the same values."""

import pytest
import torch

from nstf.kernels.formats import decode
from nstf.quantizers.stats import Stats, loss
from nstf_convert.pipeline.machine import machine
from nstf_convert.pipeline.propose import decoded as module
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.pipeline.propose import units
from nstf_convert.pipeline.propose.encoder import Encoder
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import Statistics, Unit, working_bytes
from nstf_convert.pipeline.store.workdir import WorkDir

CPU = torch.device("cpu")
FORMS = [
    Recipe("int_grid", {"bits": 3, "group": 32}),
    Recipe("grid16", {"group": 64, "scale_bits": 8}),
    Recipe("trellis", {"quarter_bits": 8}),
    Recipe("dense", {"dtype": "bfloat16"}),
]


@pytest.mark.parametrize("recipe", FORMS, ids=lambda r: r.method)
def test_parts_give_the_values_of_the_whole(recipe, monkeypatch) -> None:
    weight = torch.randn(80, 64, generator=torch.Generator().manual_seed(0))
    encoded = recipes.encode(recipe, weight, Stats(), 1)
    monkeypatch.setattr(module, "PART", 37 * 64)
    parts = []
    real = module.decode_rows
    monkeypatch.setattr(module, "decode_rows", lambda e, rows: parts.append(rows) or real(e, rows))
    assert torch.equal(module.decoded(encoded, CPU), decode(encoded))
    assert [(p.start, p.stop) for p in parts] == [(0, 37), (37, 74), (74, 80)]


def test_what_is_not_by_rows_is_decoded_as_a_whole(monkeypatch) -> None:
    weight = torch.randn(80, 64, generator=torch.Generator().manual_seed(0))
    encoded = recipes.permuted(recipes.encode(FORMS[0], weight, Stats(), 1), (1, 0), (64, 80))
    monkeypatch.setattr(module, "PART", 1)
    monkeypatch.setattr(module, "decode_rows", lambda *args: pytest.fail("it was decoded by rows"))
    assert torch.equal(module.decoded(encoded, CPU), decode(encoded))


@pytest.mark.parametrize("recipe", FORMS[:3], ids=lambda r: r.method)
def test_a_large_table_is_encoded_as_the_checkpoint_has_it_to_the_same_bytes(
    recipe, monkeypatch, tmp_path
) -> None:
    table = torch.randn(160, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    unit = Unit("table.weight", (160, 64), "bfloat16", "embedding", uses=("embedding",))

    def stored(folder: str) -> tuple[torch.Tensor, float, list[bytes]]:
        with WorkDir(tmp_path / folder, {}) as work:
            known = machine("cpu", None, None, 1)
            encoder = Encoder(work, lambda name: table, Statistics(None), "x", None, known)
            lost = encoder.encode(unit, recipe).loss
            arrays = encoder.load(unit, recipe).arrays
            return encoder.inner(unit), lost, [a.numpy().tobytes() for a in arrays.values()]

    inner, lost, arrays = stored("small")
    assert inner.dtype == torch.float32
    monkeypatch.setattr(units, "LARGE_TABLE", 1000)
    monkeypatch.setattr(module, "PART", 1000)
    monkeypatch.setattr(module, "decoded", lambda *args: pytest.fail("it was decoded as a whole"))
    again = stored("large")
    assert again[0].data_ptr() == table.data_ptr()
    assert again[1:] == (lost, arrays)


def test_a_loss_by_rows_is_that_of_the_whole(monkeypatch) -> None:
    weight = torch.randn(80, 64, generator=torch.Generator().manual_seed(0))
    known = Stats(torch.eye(64) + 0.1, torch.rand(80))
    encoded = recipes.encode(FORMS[0], weight, known, 1)
    monkeypatch.setattr(module, "PART", 1)
    assert module.lost(weight, encoded, known, 1) == loss(weight, decode(encoded), known)


def test_a_large_table_takes_little_more_than_itself() -> None:
    # 1 B parameters of Llama's shape fit 6 GiB with it.
    table = Unit("table.weight", (128256, 2048), "bfloat16", "embedding", uses=("embedding", "head"))
    assert working_bytes(table) < 2.6 * 2**30
    small = Unit("small.weight", (576, 576), "bfloat16", "linear")
    assert working_bytes(small) == 24 * 576 * 576 + 48 * 576 * 576


def test_a_large_matrix_that_reads_activations_is_expanded(monkeypatch) -> None:
    # Front to back works on the whole of it in float32: a mixed product would fail, and its memory is counted.
    monkeypatch.setattr(units, "LARGE_TABLE", 1000)
    head = Unit("head.weight", (160, 64), "bfloat16", "head", uses=("head",))
    assert not head.large_table and head.inner(torch.zeros(160, 64).bfloat16()).dtype == torch.float32
    assert working_bytes(head) == 24 * 160 * 64 + 48 * 64 * 64
