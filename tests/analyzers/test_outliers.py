"""Tails of weights."""

import pytest
import torch

from nstf.analyzers import outliers as module
from nstf.analyzers.outliers import outliers


def gaussian(count: int = 200_000) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0))


def test_gaussian_has_kurtosis_three() -> None:
    o = outliers(gaussian())
    assert o.kurtosis == pytest.approx(3.0, abs=0.05) and o.std == pytest.approx(1.0, abs=0.01)
    assert 4.0 < o.max_over_std < 6.0
    # E[x^2; |x| > 3.29] of a Gaussian is 1.2 % of its energy.
    assert o.top_energy == pytest.approx(0.0127, abs=0.001)


def test_one_large_weight_shows_in_every_figure() -> None:
    w = gaussian().reshape(400, 500)
    w[3, 7] = 1000.0
    o = outliers(w)
    assert o.max_over_std > 300 and o.kurtosis > 1000 and o.top_energy > 0.8


def test_constant_and_zero_tensors_have_no_tails() -> None:
    assert outliers(torch.zeros(10)).zero_share == 1.0
    constant = outliers(torch.full((10,), 2.0))
    assert (constant.std, constant.kurtosis, constant.max_over_std, constant.zero_share) == (
        0.0,
        0.0,
        0.0,
        0.0,
    )


def test_half_precision_is_measured_in_double() -> None:
    assert outliers(gaussian().to(torch.bfloat16)).kurtosis == pytest.approx(3.0, abs=0.05)


def test_large_tensors_are_sampled_and_say_so(monkeypatch) -> None:
    monkeypatch.setattr(module, "SAMPLE", 1 << 16)
    w = gaussian(500_000)
    w[123_457] = 99.0
    o = outliers(w)
    assert o.elements_used == 1 << 16 and o.max_over_std > 90


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_weights_are_refused(bad) -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        outliers(torch.tensor([1.0, bad]))
    with pytest.raises(ValueError, match="without elements"):
        outliers(torch.zeros(0))
