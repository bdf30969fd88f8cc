"""The LDL factor of a Hessian: H + damping = (U + I) D (U + I)^T with U strictly upper triangular.

The loss of a rounding error dW is tr(dW H dW^T) = sum_j D_j eta_j^2 with eta = dW (U + I), which is what the
error-feedback sweep minimises column by column (Chee et al., QuIP, 2023).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_DAMPING = 1.0
_CHUNK = 1024  # columns of an inverse that are made at a time


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

    def fed(self, errors: Tensor) -> Tensor:
        """What target errors eta make of the weights: dW = eta (U + I)^-1, float32 [rows, n], columns in their own order."""
        ordered = errors if self.order is None else errors[:, self.order]
        found = torch.linalg.solve_triangular(
            self.feedback, ordered, upper=True, left=False, unitriangular=True
        )
        return found if self.order is None else torch.empty_like(found).index_copy_(1, self.order, found)


def factor(hessian: Tensor, damping: float = 0.01, act_order: bool = False) -> Factor:
    """The factor of `hessian` [n, n] + damping * mean diagonal * I, made in float64 on the Hessian's device.

    Recovery, in this order, each reported in `recovery`:
    1. A matrix with non-finite entries is replaced by its diagonal (non-finite or negative entries by the
       mean of the others): no feedback, still weighted.
    2. A column with a zero diagonal (an input that was never active) loses its off-diagonal entries and
       gets the damping as its diagonal: its weights are rounded to nearest.
    3. While the Cholesky factorisation fails, the damping grows tenfold, up to 1.0 times the mean diagonal.
    4. If it still fails, the diagonal alone is used.

    `act_order`: columns by descending diagonal (Frantar et al., GPTQ, 2022, "act-order"). Needs two and a half times the
    size of the Hessian in float64, itself included. Raises ValueError on a matrix that is not square or on damping
    outside (0, 1].
    """
    if hessian.dim() != 2 or hessian.shape[0] != hessian.shape[1]:
        raise ValueError(f"a Hessian must be square, not {list(hessian.shape)}")
    if not 0 < damping <= LARGEST_DAMPING:
        raise ValueError(f"damping must be above 0 and at most {LARGEST_DAMPING}, not {damping}")
    matrix, mean, notes = _usable(hessian)
    diagonal = matrix.diagonal().double()
    order = torch.argsort(diagonal, descending=True, stable=True) if act_order else None
    used = damping
    while True:
        matrix.diagonal().copy_(diagonal + used * mean)
        lower = _cholesky(matrix, order)
        if lower is not None:
            break
        if used >= LARGEST_DAMPING:
            matrix = torch.diag(matrix.diagonal())
            lower = _flipped(matrix, order).sqrt_()
            notes.append("indefinite: diagonal only")
            break
        used = min(used * 10, LARGEST_DAMPING)
    if used != damping:
        notes.append(f"damping {used:g}")
    # H = R R^T with R upper triangular is the Cholesky factor of the flipped matrix, flipped back.
    roots = lower.diagonal().clone()
    lower = lower.div_(roots).tril_(-1).float()
    feedback = lower.flip(0, 1).contiguous()
    return Factor(matrix, feedback, roots.square_().flip(0).float(), order, used, mean, "; ".join(notes))


def gains(feedback: Tensor) -> tuple[Tensor, Tensor]:
    """What becomes of target errors eta of variance 1: dW = eta K and the targets move by eta (I - K), K = (U + I)^-1.

    feedback: U, strictly upper triangular [n, n]. -> (squared norms of the rows of K, of the columns of I - K), each [n].
    """
    n = len(feedback)
    kept, added = feedback.new_zeros(n), feedback.new_zeros(n)
    for start in range(0, n, _CHUNK):
        end = min(start + _CHUNK, n)
        unit = feedback.new_zeros(end, end - start)
        unit[start:].fill_diagonal_(1)
        inverse = torch.linalg.solve_triangular(feedback[:end, :end], unit, upper=True, unitriangular=True)
        kept[:end] += inverse.square().sum(1)
        added[start:end] = inverse.sub_(unit).square_().sum(0)
    return kept, added


def _usable(hessian: Tensor) -> tuple[Tensor, float, list[str]]:
    """A symmetric finite float32 copy without dead columns, its mean live diagonal, and what had to be done."""
    half = hessian.detach().float() / 2
    matrix = half + half.T
    del half
    notes = []
    total, live, trace = _summary(matrix)
    if not math.isfinite(total):
        matrix = torch.diag(_usable_diagonal(hessian.detach().float().diagonal()))
        notes.append("non-finite entries: diagonal only")
        _, live, trace = _summary(matrix)
    if live < len(matrix):
        notes.append(f"{len(matrix) - int(live)} dead columns")
        alive = (matrix.diagonal() > 0).float()
        matrix.mul_(alive[:, None]).mul_(alive)
    return matrix, trace / max(1.0, live) or 1.0, notes


def _summary(matrix: Tensor) -> tuple[float, float, float]:
    """(sum of all entries, positive diagonal entries, their sum)."""
    diagonal = matrix.diagonal().double()
    live = diagonal > 0
    found = [matrix.sum(dtype=torch.float64), live.sum().double(), torch.where(live, diagonal, 0.0).sum()]
    total, count, trace = torch.stack(found).tolist()
    return total, count, trace


def _cholesky(matrix: Tensor, order: Tensor | None) -> Tensor | None:
    """The lower Cholesky factor of `_flipped(matrix, order)`, None when there is none."""
    # The transpose has the columns' layout that the library works in, so that nothing is copied.
    flipped = _flipped(matrix, order).mT
    info = torch.empty((), dtype=torch.int32, device=matrix.device)
    torch.linalg.cholesky_ex(flipped, out=(flipped, info))
    failed, trace = torch.stack([info.double(), flipped.diagonal().sum()]).tolist()
    return flipped if failed == 0 and math.isfinite(trace) else None


def _flipped(matrix: Tensor, order: Tensor | None) -> Tensor:
    """`matrix` in the reverse of an order, float64."""
    if order is None:
        return matrix.flip(0, 1).double()
    back = order.flip(0)
    return matrix.index_select(0, back).index_select(1, back).double()


def _usable_diagonal(diagonal: Tensor) -> Tensor:
    good = torch.isfinite(diagonal) & (diagonal > 0)
    mean = torch.where(good, diagonal, 0.0).sum() / good.sum().clamp_min(1)
    return torch.where(good, diagonal, torch.where(mean > 0, mean, torch.ones_like(mean)))
