"""The norm a decomposition is fitted in: the input covariance H = E[x x^T], damped, and its square roots."""

import torch
from torch import Tensor

DAMPING = 0.01
"""Share of the mean diagonal added to H: GPTQ's default (Frantar et al. 2023)."""


def damped(hessian: Tensor, damping: float = DAMPING) -> Tensor:
    """H + damping * mean(diag H) * I in float64, symmetrised. hessian: [n, n].

    A channel that is never active thus still has some weight. Raises ValueError for a matrix that is not
    square, not finite, or has a negative mean diagonal.
    """
    if hessian.ndim != 2 or hessian.shape[0] != hessian.shape[1]:
        raise ValueError(f"hessian of shape {list(hessian.shape)} is not square")
    h = hessian.to(torch.float64)
    if not bool(torch.isfinite(h).all()):
        raise ValueError("hessian holds NaN or infinity")
    mean = float(h.diagonal().mean())
    if mean < 0:
        raise ValueError(f"hessian has a negative mean diagonal ({mean:g})")
    h = (h + h.T) / 2
    # An input that never fired has H = 0: every error is free then, so the plain norm serves.
    h.diagonal().add_(damping * mean if mean > 0 else 1.0)
    return h


def cholesky(h: Tensor) -> Tensor:
    """Lower triangular L with L L^T = h, float64. If h is not positive definite, it is lifted until it is.

    The lift is |smallest eigenvalue| + 1e-6 of the mean diagonal, as in SVD-LLM (Wang et al. 2024).
    """
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(h)
    if int(info) == 0:
        return factor
    lowest = float(torch.linalg.eigvalsh(h)[0])
    lifted = h.clone()
    lifted.diagonal().add_(abs(min(lowest, 0.0)) + 1e-6 * max(float(h.diagonal().mean()), 1e-30))
    factor = torch.linalg.cholesky(lifted)
    return factor


def solve_spd(gram: Tensor, right: Tensor) -> Tensor:
    """gram^+ right for a symmetric positive semidefinite gram [r, r] and right [r, m], float64.

    A relative ridge of 1e-12 keeps a rank-deficient gram (zero or repeated factors) solvable.
    """
    lifted = gram.clone()
    lifted.diagonal().add_(1e-12 * gram.diagonal().mean().clamp_min(1e-300))
    factor, info = torch.linalg.cholesky_ex(lifted)
    if int(info) == 0:
        return torch.cholesky_solve(right, factor)
    solution: Tensor = torch.linalg.pinv(gram, hermitian=True) @ right
    return solution
