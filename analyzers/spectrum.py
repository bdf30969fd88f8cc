"""Singular values of a matrix, plain and in the norm of its input, and what they say about low rank."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

DIRECTIONS = (1, 4, 16, 64)
POINTS = 48
DAMPING = 0.01


@dataclass(frozen=True)
class Spectrum:
    """Of one matrix [rows, cols].

    curve: pairs (index from 1, singular value over the largest) at up to 48 indices, evenly spread in
    logarithm.
    largest: the largest singular value. effective_rank: exp of the entropy of s / sum s (Roy and Vetterli
    2007).
    stable_rank: sum s^2 / s_1^2. concentration: share of the energy sum s^2 in the first 1, 4, 16, 64
    directions.
    """

    largest: float
    effective_rank: float
    stable_rank: float
    concentration: dict[int, float]
    curve: tuple[tuple[int, float], ...]

    def energy(self, rank: int) -> float | None:
        """Share of the energy in the first `rank` directions, where it is one of those kept."""
        return self.concentration.get(rank)


def singular_values(matrix: Tensor, hessian: Tensor | None = None) -> Tensor:
    """Descending, float64, [min(rows, cols)], of W or of W H^(1/2). matrix: [rows, cols]; hessian: [cols,
    cols].

    From the eigenvalues of the smaller Gram matrix, so those below 1e-8 of the largest are noise.
    """
    w = matrix.to(torch.float64)
    rows, cols = w.shape
    if hessian is not None and tuple(hessian.shape) != (cols, cols):
        raise ValueError(f"hessian of shape {list(hessian.shape)} for a {rows} x {cols} matrix")
    if hessian is None:
        gram = w @ w.T if rows <= cols else w.T @ w
    else:
        h = hessian.to(torch.float64)
        h = (h + h.T) / 2
        h.diagonal().add_(DAMPING * max(float(h.diagonal().mean()), 1e-30))
        if rows <= cols:
            gram = w @ h @ w.T
        else:
            root, info = torch.linalg.cholesky_ex(h)
            if int(info) != 0:
                values, vectors = torch.linalg.eigh(h)
                root = vectors * values.clamp_min(0.0).sqrt()
            gram = root.T @ (w.T @ w) @ root
    squares: Tensor = torch.linalg.eigvalsh((gram + gram.T) / 2)
    return squares.flip(0).clamp_min(0.0).sqrt()


def summarise(values: Tensor) -> Spectrum:
    """The summary of singular values, descending."""
    s = values.to(torch.float64)
    energy = s.square()
    total, largest = float(energy.sum()), float(s[0])
    if total <= 0.0:
        return Spectrum(0.0, 0.0, 0.0, dict.fromkeys(DIRECTIONS, 0.0), ())
    p = s / s.sum()
    entropy = float(-(p * p.clamp_min(1e-300).log()).sum())
    concentration = {d: float(energy[:d].sum()) / total for d in DIRECTIONS}
    count = s.numel()
    spread = (math.exp(math.log(count) * i / (POINTS - 1)) for i in range(POINTS))
    indices = sorted({min(count, max(1, round(x))) for x in spread})
    curve = tuple((i, float(s[i - 1]) / largest) for i in indices)
    return Spectrum(largest, math.exp(entropy), total / largest**2, concentration, curve)


def spectrum(matrix: Tensor, hessian: Tensor | None = None) -> Spectrum:
    """Of W, or of W H^(1/2).

    matrix: [rows, cols]; hessian: [cols, cols] or None. Raises ValueError on sizes.
    """
    if matrix.ndim != 2:
        raise ValueError(f"a matrix is needed, not shape {list(matrix.shape)}")
    return summarise(singular_values(matrix, hessian))
