"""A large table is decoded a part at a time, to the same values."""

import pytest
import torch

from nstf.kernels.formats import decode
from nstf.quantizers.stats import Stats
from nstf_convert.pipeline.propose import decoded as module
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.pipeline.propose.recipe import Recipe

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
