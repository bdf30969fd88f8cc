"""The scale (and zero point) of one group per row, by search over clip ratios. Reference in torch."""

import torch
from torch import Tensor

from nstf.quantizers.rounding.levels import Levels


def search(x: Tensor, importance: Tensor, levels: Levels, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero per group that minimise sum_i importance_i (x_i - q(x_i))^2. -> (float32 [..., 1], same).

    `x`: [..., n], a group along the last axis; `importance`: broadcasts to it, positive; `largest`: the super-scales of
    8-bit scales, [..., 1]. Every ratio (times both signs, times three zero points where the grid is asymmetric) is tried,
    then the best is refined twice by least squares with its codes fixed. Ties keep the earlier candidate.
    """
    best = _Best(x, importance, levels, largest)
    if levels.table is None and not levels.symmetric:
        low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
        base = (high - low) / levels.reach
        for ratio in levels.ratios:
            scale = levels.round_scale(base * ratio, largest)
            middle = torch.where(scale == 0, torch.zeros_like(scale), -low * ratio / scale)
            for offset in (0.0, -1.0, 1.0):
                best.offer(scale, (middle.round() + offset).clamp(0, levels.count - 1))
    else:
        zero = (
            torch.full_like(x[..., :1], 1 << (levels.bits - 1))
            if levels.table is None
            else torch.zeros_like(x[..., :1])
        )
        # On an even-sized symmetric grid the longer side is the negative one: let the largest weight lie
        # there first.
        at = x.abs().argmax(-1, keepdim=True)
        peak = x.gather(-1, at)
        base = (-peak if levels.signs else peak.abs()) / levels.reach
        if levels.scale == "e8m0":
            # The specification's choice: floor(log2(max)) less the exponent of the largest level, 6 = 1.5 * 4.
            base = torch.ldexp(torch.ones_like(base), torch.frexp(peak.abs())[1] - 3)
            base = torch.where(peak == 0, torch.zeros_like(base), base)
        for ratio in levels.ratios:
            best.offer(levels.round_scale(base * ratio, largest), zero)
            if levels.signs:
                best.offer(levels.round_scale(-base * ratio, largest), zero)
    if levels.fit:
        for _ in range(2):
            points = best.points()
            weighted = points * importance
            fitted = (weighted * x).sum(-1, keepdim=True) / (weighted * points).sum(-1, keepdim=True).clamp(
                min=1e-30
            )
            best.offer(levels.round_scale(fitted, largest), best.zero)
    return best.scale, best.zero


class _Best:
    """The best (scale, zero) per group so far."""

    def __init__(self, x: Tensor, importance: Tensor, levels: Levels, largest: Tensor) -> None:
        self.x, self.importance, self.levels, self.largest = x, importance, levels, largest
        self.loss = torch.full_like(x[..., :1], float("inf"))
        self.scale = torch.zeros_like(self.loss)
        self.zero = torch.zeros_like(self.loss)

    def offer(self, scale: Tensor, zero: Tensor) -> None:
        points = self.levels.points_of(self.levels.codes_of(self.x, scale, zero), zero)
        loss = (points.mul_(-scale).add_(self.x).square_() * self.importance).sum(-1, keepdim=True)
        better = loss < self.loss
        self.loss = torch.where(better, loss, self.loss)
        self.scale = torch.where(better, scale, self.scale)
        self.zero = torch.where(better, zero, self.zero)

    def points(self) -> Tensor:
        return self.levels.points_of(self.levels.codes_of(self.x, self.scale, self.zero), self.zero)
