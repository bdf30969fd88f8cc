"""The LDL factor of a Hessian: H + damping = (U + I) D (U + I)^T with U strictly upper triangular.

The loss of a rounding error dW is tr(dW H dW^T) = sum_j D_j eta_j^2 with eta = dW (U + I), which is what the
error-feedback sweep minimises column by column (Chee et al., QuIP, 2023).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_DAMPING = 1.0


@dataclass(frozen=True, eq=False)
class Factor:
    """`hessian`: the damped matrix, float32 [n, n], columns in their own order; `feedback`: U, float32 [n, n],
    and `diagonal`: D, float32 [n], in the order of rounding; `order`: that order, int64 [n], None for the columns'
    own; `damping`: the one used, relative to the mean diagonal `mean`; `recovery`: what had to be done to a Hessian that
    could not be factored as it was, "" when nothing was.
    """

    hessian: Tensor
    feedback: Tensor
    diagonal: Tensor
    order: Tensor | None
    damping: float
    mean: float
    recovery: str

    @property
    def importance(self) -> Tensor:
        """D in the columns' own order, float32 [n]: what each target's squared error adds to the loss."""
        if self.order is None:
            return self.diagonal
        return torch.empty_like(self.diagonal).index_copy_(0, self.order, self.diagonal)


def factor(hessian: Tensor, damping: float = 0.01, act_order: bool = False) -> Factor:
    """The factor of `hessian` [n, n] + damping * mean diagonal * I, computed on the CPU in float64.

    Recovery, in this order, each reported in `recovery`:
    1. A matrix with non-finite entries is replaced by its diagonal (non-finite or negative entries by the
       mean of the others): no feedback, still weighted.
    2. A column with a zero diagonal (an input that was never active) loses its off-diagonal entries and
       gets the damping as its diagonal: its weights are rounded to nearest.
    3. While the Cholesky factorisation fails, the damping grows tenfold, up to 1.0 times the mean diagonal.
    4. If it still fails, the diagonal alone is used.

    `act_order`: columns by descending diagonal (Frantar et al., GPTQ, 2022, "act-order"). Raises ValueError
    on a matrix that is not square or on damping outside (0, 1].
    """
    if hessian.dim() != 2 or hessian.shape[0] != hessian.shape[1]:
        raise ValueError(f"a Hessian must be square, not {list(hessian.shape)}")
    if not 0 < damping <= LARGEST_DAMPING:
        raise ValueError(f"damping must be above 0 and at most {LARGEST_DAMPING}, not {damping}")
    matrix = hessian.detach().to("cpu", torch.float64)
    matrix = (matrix + matrix.T) / 2
    notes = []
    if not bool(torch.isfinite(matrix).all()):
        matrix = torch.diag(_usable_diagonal(matrix.diagonal()))
        notes.append("non-finite entries: diagonal only")
    diagonal = matrix.diagonal()
    dead = diagonal <= 0
    if bool(dead.any()):
        notes.append(f"{int(dead.sum())} dead columns")
        alive = (~dead).double()
        matrix = matrix * alive[:, None] * alive[None, :]
        diagonal = matrix.diagonal()
    mean = float(diagonal.sum() / max(1, int((~dead).sum()))) or 1.0
    order = torch.argsort(diagonal, descending=True, stable=True) if act_order else None
    used = damping
    while True:
        damped = matrix + used * mean * torch.eye(len(matrix), dtype=torch.float64)
        ordered = damped if order is None else damped[order][:, order]
        # H = R R^T with R upper triangular is the Cholesky factor of the flipped matrix, flipped back.
        lower, info = torch.linalg.cholesky_ex(ordered.flip(0, 1))
        if int(info) == 0 and bool(torch.isfinite(lower).all()):
            upper = lower.flip(0, 1)
            break
        if used >= LARGEST_DAMPING:
            damped = torch.diag(damped.diagonal())
            upper = torch.diag(ordered.diagonal().sqrt())
            notes.append("indefinite: diagonal only")
            break
        used = min(used * 10, LARGEST_DAMPING)
    if used != damping:
        notes.append(f"damping {used:g}")
    roots = upper.diagonal()
    feedback = (upper / roots).triu_(1).float()
    return Factor(damped.float(), feedback, roots.square().float(), order, used, mean, "; ".join(notes))


def _usable_diagonal(diagonal: Tensor) -> Tensor:
    good = torch.isfinite(diagonal) & (diagonal > 0)
    mean = diagonal[good].mean() if bool(good.any()) else torch.ones((), dtype=diagonal.dtype)
    return torch.where(good, diagonal, mean)
