"""Estimates: those of several methods made together, and figures of factors that outlive their Hessian."""

from types import SimpleNamespace

import pytest
import torch

from nstf import quantizers
from nstf.proposals import Recipe
from nstf.quantizers import estimate_forms, filled, grid16, shuffle, trellis
from nstf.quantizers.rounding import turned
from nstf.quantizers.stats import Stats
from nstf_convert.pipeline.propose import candidates


def _stats(cols: int, rows: int, figures: dict | None = None) -> Stats:
    inputs = torch.randn(4 * cols, cols) * torch.linspace(0.2, 2.0, cols)
    weights = torch.linspace(0.5, 1.5, rows)
    return Stats(inputs.T @ inputs / len(inputs), weights, figures={} if figures is None else figures)


def test_forms_of_several_methods_are_estimated_together_as_apart() -> None:
    weight = torch.randn(48, 96)
    stats = _stats(96, 48)
    recipes = [
        Recipe("int_grid", {"bits": 3, "group": 32, "scale_bits": 8}),
        Recipe("fp8", {"group": 0}),
        Recipe("int_grid", {"bits": 4, "group": 0}),
        Recipe("grid16", {"group": 32, "scale_bits": 8}),
        Recipe("mxfp4"),
        Recipe("grid16", {"group": 64, "scale_bits": 8}),
    ]
    wanted = [(r.method, filled(r, (48, 96), 1)) for r in recipes]
    apart = [quantizers.method(name).estimate(weight, params, stats) for name, params in wanted]
    assert estimate_forms(wanted, weight, stats) == pytest.approx(apart, rel=1e-6)


@pytest.mark.parametrize("method", [trellis, shuffle])
def test_figures_answer_for_a_hessian_that_was_read_again(method, monkeypatch) -> None:
    weight, known = torch.randn(64, 64), {}
    stats = _stats(64, 64, known)
    params = method.Params(quarter_bits=12, block=64, rounding="ldlq")
    first = method.estimate(weight, params, stats)

    def again(*_):
        raise AssertionError("the Hessian was factored once more")

    monkeypatch.setattr(turned, "factor", again)
    read_again = Stats(stats.hessian, stats.row_weight, figures=known)
    assert method.estimate(weight, params, read_again) == first


def test_formats_of_one_basis_share_a_factor(monkeypatch) -> None:
    weight, stats, made = torch.randn(64, 64), _stats(64, 64), []
    real = turned.factor
    monkeypatch.setattr(turned, "factor", lambda *given: made.append(1) or real(*given))
    for method in (trellis, shuffle):
        method.estimate(weight, method.Params(quarter_bits=12, block=64, rounding="ldlq"), stats)
    assert len(made) == 1


def test_candidates_that_are_estimated_together_keep_their_places(monkeypatch) -> None:
    """A GPU is asked once for what is rounded to nearest; the others of a tensor are estimated between them."""
    wanted = [
        Recipe("shuffle", {"quarter_bits": 12, "block": 64}),
        Recipe("int_grid", {"bits": 3, "group": 32, "scale_bits": 8}),
        Recipe("dense", {"dtype": "bfloat16"}),
        Recipe("grid16", {"group": 32, "scale_bits": 8}),
        Recipe("fp8", {"group": 0}),
    ]
    weight = torch.randn(48, 64)
    signature = SimpleNamespace(weight=weight, stats=_stats(64, 48), lead=1)
    apart = candidates.estimates(signature, wanted)
    monkeypatch.setattr(candidates, "_asks_at_once", lambda device: True)
    assert candidates.estimates(signature, wanted) == pytest.approx(apart, rel=1e-6)


def test_an_estimate_fits_a_table_no_further_than_that_gains(monkeypatch) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    params, rounds = [grid16.Params(32, 8), grid16.Params(64, 8)], []
    sums = grid16._sums
    monkeypatch.setattr(grid16, "_sums", lambda *given: rounds.append(1) or sums(*given))
    quick = grid16.estimate_many(weight, params)
    few = len(rounds)
    monkeypatch.setattr(grid16, "QUICK_GAIN", 0.0)
    thorough = grid16.estimate_many(weight, params)
    assert few < len(rounds) - few == grid16.ROUNDS
    assert all(q <= 1.01 * t for q, t in zip(quick, thorough, strict=True))
