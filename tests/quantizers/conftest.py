"""Small weights and a Hessian with the features of real ones: correlated inputs, a few of them large."""

import pytest
import torch
from torch import Tensor

from nstf.quantizers.stats import Stats


def correlated_hessian(cols: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(cols, cols, generator=generator, dtype=torch.float64) / cols**0.5
    x = torch.randn(8 * cols, cols, generator=generator, dtype=torch.float64)
    x = (x @ (mix + torch.eye(cols))) * torch.randn(cols, generator=generator, dtype=torch.float64).mul(
        0.6
    ).exp()
    return (x.T @ x / len(x)).float()


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.05


@pytest.fixture(scope="session")
def stats() -> Stats:
    """For 96 columns."""
    return Stats(correlated_hessian(96))


@pytest.fixture(scope="session")
def weight() -> Tensor:
    """[40, 96]"""
    return normal(40, 96)
