"""How heavy the tails of a weight are: what decides between uniform and non-uniform grids, and the group size."""

from dataclasses import dataclass

import torch
from torch import Tensor

TOP_SHARE = 1000
"""The largest weights are the top 1 in 1000 by magnitude."""
BLOCK = 4096
SAMPLE = 1 << 22
"""Elements beyond which blocks of 4096, evenly spaced, stand for the tensor; extremes are always of all."""


@dataclass(frozen=True)
class Outliers:
    """kurtosis: fourth moment over squared variance (3 for a Gaussian). max_over_std: largest |w - mean| in
    standard deviations. top_energy: share of sum w^2 in the top 0.1 % of the weights. zero_share: of exact
    zeros. elements_used: how many were looked at, fewer than all in a sampled tensor.
    """

    std: float
    kurtosis: float
    max_over_std: float
    top_energy: float
    zero_share: float
    elements_used: int


def outliers(weight: Tensor) -> Outliers:
    """Of all elements of a tensor. Raises ValueError for an empty one, NaN or infinity."""
    flat = weight.detach().reshape(-1)
    if flat.numel() == 0:
        raise ValueError("a tensor without elements has no outliers")
    lowest, highest = (float(x) for x in torch.aminmax(flat))
    if not (abs(lowest) < float("inf") and abs(highest) < float("inf")):  # NaN compares false
        raise ValueError(f"weight of shape {list(weight.shape)} holds NaN or infinity")
    values = _sample(flat).to(torch.float64)
    mean = float(values.mean())
    square = (values - mean).square_()
    variance = float(square.mean())
    fourth = float(square.square_().mean())
    energies = values.square()
    energy = float(energies.sum())
    top = torch.topk(energies, max(1, energies.numel() // TOP_SHARE), sorted=False).values
    return Outliers(
        std=variance**0.5,
        kurtosis=fourth / variance**2 if variance > 0 else 0.0,
        max_over_std=max(highest - mean, mean - lowest) / variance**0.5 if variance > 0 else 0.0,
        top_energy=float(top.sum()) / energy if energy > 0 else 0.0,
        zero_share=float((values == 0).double().mean()),
        elements_used=values.numel(),
    )


def _sample(flat: Tensor) -> Tensor:
    if flat.numel() <= SAMPLE:
        return flat
    blocks = flat[: flat.numel() // BLOCK * BLOCK].reshape(-1, BLOCK)
    count = SAMPLE // BLOCK
    return blocks[torch.arange(count) * blocks.shape[0] // count].reshape(-1)
