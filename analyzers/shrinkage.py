"""Shrinkage of a Hessian towards its diagonal: correlations that a sample shows are larger than those of new text.

Error feedback trusts every correlation of H. Those between two inputs that are only an accident of the sample send
errors where new text punishes them; damping, a shrinkage towards a multiple of the identity, is ruled by the few
largest inputs. Scaling all off-diagonal entries by 1 - rho treats every pair of inputs the same.
"""

from torch import Tensor

# Columns whose correlations are looked at when the sampling error is estimated.
MAX_COLUMNS = 1024


def sampling_share(hessian: Tensor, tokens: float) -> float:
    """The shrinkage that sampling `tokens` independent tokens asks for, 0 to 1.

    hessian: [n, n]. With r_ij the correlations: sum (1 - r_ij^2)^2 / tokens over sum r_ij^2, i != j, the estimated
    variance over what was observed (Schaefer and Strimmer 2005, for Gaussian inputs).
    """
    step = -(-hessian.shape[0] // MAX_COLUMNS)
    part = hessian[::step, ::step].double()
    root = part.diagonal().clamp_min(0).sqrt()
    alive = root > 0
    part, root = part[alive][:, alive], root[alive]
    if len(root) < 2:
        return 0.0
    squares = (part / root / root[:, None]).square_().clamp_max_(1)
    squares.fill_diagonal_(0)
    pairs = len(root) * (len(root) - 1)
    observed = float(squares.sum())
    # (1 - r^2)^2 is 1 on the diagonal, which does not count.
    variance = (float((1 - squares).square_().sum()) - len(root)) / max(tokens, 1.0)
    return min(1.0, variance / observed) if observed > 1e-12 * pairs else 1.0


def shrunk(hessian: Tensor, share: float) -> Tensor:
    """`hessian` with its off-diagonal entries scaled by 1 - share, in place. Raises ValueError unless 0 <= share <= 1."""
    if not 0 <= share <= 1:
        raise ValueError(f"a shrinkage of {share} is not between 0 and 1")
    diagonal = hessian.diagonal().clone()
    hessian.mul_(1 - share)
    hessian.diagonal().copy_(diagonal)
    return hessian


def effective_tokens(weights: Tensor) -> float:
    """How many tokens of equal weight give as precise a mean: (sum w)^2 / sum w^2 (Kish 1965)."""
    w = weights.double()
    return float(w.sum().square() / w.square().sum().clamp_min(1e-300))
