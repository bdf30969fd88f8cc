"""Shrinkage of Hessians towards their diagonals."""

import pytest
import torch

from nstf.analyzers.shrinkage import effective_tokens, sampling_share, shrunk


def sample(tokens: int, n: int = 40, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(second moment of a sample, the true one) of correlated inputs of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(n) + 0.15 * torch.randn(n, n, generator=generator)
    mix = mix * torch.logspace(-1, 1, n)[:, None]
    x = torch.randn(tokens, n, generator=generator) @ mix.T
    return x.T @ x / tokens, mix @ mix.T


def test_less_data_asks_for_more_shrinkage() -> None:
    shares = [sampling_share(sample(t)[0], t) for t in (20, 200, 2000, 200_000)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.2
    assert shares[-1] < 0.01


@pytest.mark.parametrize("tokens", [30, 100, 300])
def test_a_shrunk_hessian_is_closer_to_the_true_one(tokens: int) -> None:
    for seed in range(5):
        found, true = sample(tokens, seed=seed)
        scale = true.diagonal().sqrt()
        before = ((found - true) / scale / scale[:, None]).norm()
        after = (
            (shrunk(found.clone(), sampling_share(found, tokens)) - true) / scale / scale[:, None]
        ).norm()
        assert after < before


def test_the_diagonal_stays_and_the_rest_is_scaled() -> None:
    found, _ = sample(50)
    result = shrunk(found.clone(), 0.25)
    assert torch.equal(result.diagonal(), found.diagonal())
    off = ~torch.eye(40, dtype=torch.bool)
    assert torch.allclose(result[off], 0.75 * found[off])
    with pytest.raises(ValueError, match=r"1\.5 is not between"):
        shrunk(found, 1.5)


def test_inputs_that_are_never_active_do_not_count() -> None:
    found, _ = sample(100)
    padded = torch.zeros(60, 60)
    padded[:40, :40] = found
    assert sampling_share(padded, 100) == pytest.approx(sampling_share(found, 100))
    assert sampling_share(torch.zeros(3, 3), 10) == 0.0


def test_effective_tokens_of_equal_weights_are_all_and_of_one_heavy_weight_one() -> None:
    assert effective_tokens(torch.full((50,), 3.0)) == pytest.approx(50)
    assert effective_tokens(torch.tensor([1e6, 1.0, 1.0])) == pytest.approx(1, abs=1e-4)
