"""Decompositions of one tensor share what they find out, and give the same numbers as each on its own."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nstf.decomposers import cp, modes, norms, svd, tensor_train, tucker
from nstf.decomposers.factors import dense_leaf
from nstf.decomposers.remembered import Remembered
from nstf.quantizers.stats import Stats

VIEW = (4, 6, 5, 8)
STEPS: dict[Any, list[Any]] = {
    svd: [svd.Params(3), svd.Params(7)],
    tucker: [tucker.Params((3, 4, 5, 6), VIEW), tucker.Params((2, 6, 3, 8), VIEW)],
    tensor_train: [tensor_train.Params((3, 9, 6), VIEW), tensor_train.Params((4, 8, 5), VIEW)],
    cp: [cp.Params(3, VIEW), cp.Params(5, VIEW)],
}


def _inputs(seed: int = 0) -> tuple[Tensor, Stats]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(120, 40, generator=generator)
    rows = torch.rand(24, generator=generator)
    return torch.randn(24, 40, generator=generator), Stats(x.T @ x / 120, rows)


def _arrays(module: Any, weight: Tensor, params: Any, stats: Stats, *remembered: Remembered) -> list[Tensor]:
    made = module.decompose(weight, params, stats.hessian, stats.row_weight, *remembered)
    encoded = made.encode(dense_leaf("float32"))
    return [v for m in (encoded.arrays, made.metrics) for v in m.values() if v is not None]


@pytest.mark.parametrize("module", STEPS, ids=lambda m: m.NAME if hasattr(m, "NAME") else m.KIND)
def test_steps_of_a_rank_share_spectra_and_change_no_bit(module: Any) -> None:
    weight, stats = _inputs()
    other, _ = _inputs(1)
    remembered = Remembered(weight, stats.derived)
    for tensor in (weight, other, weight):
        for params in STEPS[module]:
            alone = _arrays(module, tensor, params, stats)
            shared = _arrays(module, tensor, params, stats, remembered)
            assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


def test_a_view_is_whitened_once_and_a_hessian_factored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, stats = _inputs()
    factored, bases = [], []
    root, eigen = norms.cholesky, modes.gram_eigen
    for module in (svd, modes):
        monkeypatch.setattr(module, "cholesky", lambda h: factored.append(h) or root(h))
    monkeypatch.setattr(modes, "gram_eigen", lambda matrix: bases.append(matrix) or eigen(matrix))
    view = (4, 6, 40)
    for tensor in (weight, weight.clone()):  # of one layer's inputs
        remembered = Remembered(tensor, stats.derived)
        for ranks in ((3, 4, 9), (2, 5, 12)):
            tucker.decompose(tensor, tucker.Params(ranks, view), stats.hessian, stats.row_weight, remembered)
    assert len(factored) == 1 and len(bases) == 2 * len(view)


def test_of_a_large_tensor_nothing_is_kept() -> None:
    from nstf_convert.pipeline.propose import recipe as recipes

    kept: list[Any] = []
    weight = torch.zeros(1, 1, 1).expand(2, 3000, 4000)
    recipes.remembered(weight, Stats(), 1).of_inputs("a", lambda: kept.append(0))
    recipes.remembered(weight, Stats(), 1).of_tensor(weight, "a", 0, lambda: kept.append(0))
    assert len(kept) == 2
