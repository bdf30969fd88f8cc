"""The weight that a compressed prefix calls for: what to round instead of W, given the inputs W will really see.

x are the original model's inputs of a layer, x~ those its compressed predecessors give, H~ = E[x~ x~^T]. The best
linear map of x~ to what the original computes, W x, is

    W* = W + D,    D = (W E[(x - x~) x~^T] + R) (H~ + damping)^{-1},    R = 0

(Li et al., GPTAQ, 2025, in closed form). A layer whose output y is added to a residual stream r can also undo what
went wrong in the stream before it: with R = E[(r - r~) x~^T] the sum r~ + W* x~ is the best fit of r + W x.

D is estimated from few tokens, and goes too far for it. Held-out tokens tell how far to go: the share of D that
minimises the error there is a ratio of two traces.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nstf.analyzers.moments import begun_mean_outer
from nstf_convert.pipeline.products import outer

# Of a weight that are solved for at a time: rows at least, and elements; as many as fit the scratch where that is more, and
# bytes that an element takes of it. Of 4096 x 14336 a GPU solves all rows in 43 ms, and in parts of 585 in 117.
ROWS, ELEMENTS, SCRATCH_BYTES = 256, 1 << 23, 32


@dataclass(frozen=True, eq=False)
class Moments:
    """hessian: E[x~ x~^T]; shift: E[(x - x~) x~^T], both [in, in]; stream: E[(r - r~) x~^T] [out, in] or None; mass: what
    the tokens weigh in all."""

    hessian: Tensor
    shift: Tensor | None
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


def moments(parts: Sequence[Rows], workers: int, each: Callable[..., Iterable[Any]] = map) -> list[Moments]:
    """The second moments of each set of batches, so many at a time by `each`, a `map`."""
    found = [_begun(data, workers, each) for data in parts]
    return [finish() for finish in found]


def _begun(data: Rows, workers: int, each: Callable[..., Iterable[Any]]) -> Callable[[], Moments]:
    given: dict[str, Any] = {"weights": data.weights, "workers": workers, "each": each}
    hessian = begun_mean_outer(data.rows, data.rows, **given)
    shift = stream = None
    if data.originals:
        shift = begun_mean_outer(data.originals, data.rows, difference=True, product=outer, **given)
    if data.lag:
        stream = begun_mean_outer(data.lag, data.rows, product=outer, **given)

    def finish() -> Moments:
        if data.weights is None:
            mass = float(sum(r.shape[0] for r in data.rows))
        else:
            mass = sum(float(w.sum(dtype=torch.float64)) for w in data.weights)
        return Moments(hessian(), shift and shift(), stream and stream(), mass)

    return finish


def joined(a: Moments, b: Moments) -> Moments:
    """The moments of two sets of tokens together, in the memory of the first."""
    share = b.mass / max(a.mass + b.mass, 1e-30)

    def mix(x: Tensor | None, y: Tensor | None) -> Tensor | None:
        return None if x is None or y is None else x.lerp_(y, share)

    return Moments(
        a.hessian.lerp_(b.hessian, share), mix(a.shift, b.shift), mix(a.stream, b.stream), a.mass + b.mass
    )


def targets(
    weights: Sequence[tuple[Tensor, Tensor | None]],
    parts: list[Moments],
    damping: float,
    each: Callable[..., Iterable[Any]] = map,
    scratch: int = 0,
    judging: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[list[tuple[Tensor, float]], Moments]:
    """([the weight to round instead of each, the share of D it took, 0..1], the moments of all tokens).

    weights: (weight [out, in], [out] what a squared error of each output counts or None) that read one input. parts: the
    moments of tokens to fit and of tokens held out, which are used up. The share is found on those held out with the D of
    the others; D itself then comes from both. each: a `map` that may work on several weights at a time. Beside the moments
    a float64 and a float32 matrix of [in, in] are in memory, and what solving takes: `scratch` bytes where that is more than
    for ELEMENTS. judging: a block in which products that only say how far to go are computed.
    """
    held_out, fit = parts.pop(), parts.pop()
    shares = _shares(weights, fit, held_out, damping, each, scratch, judging)
    both = joined(fit, held_out)
    del fit, held_out
    if not any(shares):
        return [(weight, 0.0) for weight, _ in weights], both
    system = _System(both, damping, scratch)

    def corrected(weight: Tensor, share: float) -> tuple[Tensor, float]:
        return (weight + share * system.direction(weight) if share else weight), share

    return list(each(corrected, [weight for weight, _ in weights], shares)), both


def _shares(
    weights: Sequence[tuple[Tensor, Tensor | None]],
    fit: Moments,
    held_out: Moments,
    damping: float,
    each: Callable[..., Iterable[Any]],
    scratch: int,
    judging: Callable[[], AbstractContextManager[None]],
) -> list[float]:
    """How far each weight goes along the D of `fit` to lose least on `held_out`: a ratio of two traces."""
    system = _System(fit, damping, scratch)
    directions = list(each(system.direction, [weight for weight, _ in weights]))
    del system

    def one(pair: tuple[Tensor, Tensor | None], direction: Tensor) -> float:
        weight, row_weight = pair
        wanted = (_slope(weight, held_out.shift, held_out.stream) * direction).sum(1, dtype=torch.float64)
        energy = ((direction @ held_out.hessian) * direction).sum(1, dtype=torch.float64)
        if row_weight is not None:
            wanted, energy = wanted * row_weight.double(), energy * row_weight.double()
        share = float(wanted.sum()) / max(float(energy.sum()), 1e-30)
        return min(max(share, 0.0), 1.0) if share == share else 0.0

    with judging():
        return list(each(one, weights, directions))


def _slope(weight: Tensor, shift: Tensor | None, stream: Tensor | None) -> Tensor:
    """W E[(x - x~) x~^T] + R: half the negative gradient of the squared error at W, for some rows: [rows, in]."""
    slope = torch.zeros_like(weight) if shift is None else weight @ shift
    return slope if stream is None else slope + stream


class _System:
    """What D is solved from: the factor of the damped Hessian, once for all weights that read the input."""

    def __init__(self, known: Moments, damping: float, scratch: int) -> None:
        # In place: of a wide layer's matrix each copy in float64 takes gigabytes. The transpose of a symmetric matrix has
        # the columns' layout that the library works in.
        factor = known.hessian.double().mT
        factor.diagonal().add_(damping * factor.diagonal().mean().clamp_min(1e-30))
        info = torch.empty((), dtype=torch.int32, device=factor.device)
        torch.linalg.cholesky_ex(factor, out=(factor, info))
        failed, trace = torch.stack([info.double(), factor.diagonal().sum()]).tolist()
        self.usable = failed == 0 and math.isfinite(trace)
        self.factor, self.shift, self.stream = factor, known.shift, known.stream
        self.elements = max(ELEMENTS, scratch // SCRATCH_BYTES)

    def direction(self, weight: Tensor) -> Tensor:
        """D: [out, in]."""
        if not self.usable:
            return torch.zeros_like(weight)
        out = torch.empty_like(weight, dtype=torch.float32)
        # Some rows at a time: the double copies of a whole head would take 24 bytes a weight.
        step = max(ROWS, self.elements // weight.shape[1])
        for start in range(0, weight.shape[0], step):
            rows = slice(start, start + step)
            stream = None if self.stream is None else self.stream[rows]
            slope = _slope(weight[rows], self.shift, stream)
            # Two triangular systems: torch's own solution copies the factor.
            half = torch.linalg.solve_triangular(self.factor, slope.double().T, upper=False)
            out[rows] = torch.linalg.solve_triangular(self.factor.mT, half, upper=True).T
        return out
