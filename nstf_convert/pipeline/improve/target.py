"""The weight that a compressed prefix calls for: what to round instead of W, given the inputs W will really see.

x are the original model's inputs of a layer, x~ those its compressed predecessors give, H~ = E[x~ x~^T]. The best
linear map of x~ to what the original computes, W x, is

    W* = W + D,    D = (W (E[x x~^T] - H~) + R) (H~ + damping)^{-1},    R = 0

(Li et al., GPTAQ, 2025, in closed form). A layer whose output y is added to a residual stream r can also undo what
went wrong in the stream before it: with R = E[(r - r~) x~^T] the sum r~ + W* x~ is the best fit of r + W x.

D is estimated from few tokens, and goes too far for it. Held-out tokens tell how far to go: the share of D that
minimises the error there is a ratio of two traces.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nstf.analyzers.moments import mean_outer

# Rows of a weight that are solved for at a time.
ROWS = 4096


@dataclass(frozen=True, eq=False)
class Moments:
    """hessian: E[x~ x~^T]; cross: E[x x~^T], both [in, in]; stream: E[(r - r~) x~^T] [out, in] or None; mass: what
    the tokens weigh in all."""

    hessian: Tensor
    cross: Tensor | None
    stream: Tensor | None
    mass: float


@dataclass(frozen=True, eq=False)
class Rows:
    """Inputs of one layer by batch, [n, in] each. rows: under the compressed prefix; originals: the original model's,
    the same tokens; lag: r - r~ [n, out]; weights: [n]. Empty or None: not known."""

    rows: Sequence[Tensor]
    originals: Sequence[Tensor] = ()
    lag: Sequence[Tensor] = ()
    weights: Sequence[Tensor] | None = None

    def part(self, batches: slice) -> "Rows":
        """Some of the batches."""
        weights = None if self.weights is None else self.weights[batches]
        return Rows(self.rows[batches], self.originals[batches], self.lag[batches], weights)


def moments(data: Rows, workers: int) -> Moments:
    """The second moments of some batches."""
    hessian = mean_outer(data.rows, data.rows, data.weights, workers)
    cross = mean_outer(data.originals, data.rows, data.weights, workers) if data.originals else None
    stream = mean_outer(data.lag, data.rows, data.weights, workers) if data.lag else None
    if data.weights is None:
        mass = float(sum(r.shape[0] for r in data.rows))
    else:
        mass = sum(float(w.sum(dtype=torch.float64)) for w in data.weights)
    return Moments(hessian, cross, stream, mass)


def joined(a: Moments, b: Moments) -> Moments:
    """The moments of two sets of tokens together."""
    share = b.mass / max(a.mass + b.mass, 1e-30)

    def mix(x: Tensor | None, y: Tensor | None) -> Tensor | None:
        return None if x is None or y is None else x.lerp(y, share)

    return Moments(
        a.hessian.lerp(b.hessian, share), mix(a.cross, b.cross), mix(a.stream, b.stream), a.mass + b.mass
    )


def target(
    weight: Tensor, fit: Moments, held_out: Moments, row_weight: Tensor | None, damping: float
) -> tuple[Tensor, float]:
    """(the weight to round instead of `weight` [out, in], the share of D it took, 0..1).

    The share is found on `held_out` with the D of `fit`; D itself then comes from both. row_weight: [out], what a
    squared error of each output counts.
    """
    direction = _direction(weight, fit, damping)
    wanted = (_slope(weight, held_out, slice(None)) * direction).sum(1, dtype=torch.float64)
    energy = ((direction @ held_out.hessian) * direction).sum(1, dtype=torch.float64)
    if row_weight is not None:
        wanted, energy = wanted * row_weight.double(), energy * row_weight.double()
    share = float(wanted.sum()) / max(float(energy.sum()), 1e-30)
    share = min(max(share, 0.0), 1.0) if share == share else 0.0
    if share == 0.0:
        return weight, 0.0
    return weight + share * _direction(weight, joined(fit, held_out), damping), share


def _slope(weight: Tensor, m: Moments, rows: slice) -> Tensor:
    """W (E[x x~^T] - H~) + R: half the negative gradient of the squared error at W, for some rows: [rows, in]."""
    slope = torch.zeros_like(weight) if m.cross is None else weight @ (m.cross - m.hessian)
    return slope if m.stream is None else slope + m.stream[rows]


def _direction(weight: Tensor, m: Moments, damping: float) -> Tensor:
    """D: [out, in]."""
    # In place: of a wide layer's matrix each copy in float64 takes gigabytes.
    damped = m.hessian.double()
    damped.diagonal().add_(damping * damped.diagonal().mean().clamp_min(1e-30))
    factor, failed = torch.linalg.cholesky_ex(damped)
    del damped
    if int(failed) or not bool(torch.isfinite(factor).all()):
        return torch.zeros_like(weight)
    out = torch.empty_like(weight, dtype=torch.float32)
    # Some rows at a time: the double copies of a whole head would take 24 bytes a weight.
    for start in range(0, weight.shape[0], ROWS):
        rows = slice(start, start + ROWS)
        out[rows] = torch.cholesky_solve(_slope(weight[rows], m, rows).double().T, factor).T
    return out
