"""The loss that rounding will leave, from a sample of rows, without rounding the tensor.

With error feedback the targets are W + eta (I - K), eta being their rounding errors and K = (U + I)^-1. The sampled weights
are rounded to nearest, and the targets that follow from those errors a few times again, until the errors' size no longer
changes: no column waits for another, and one factor of the Hessian serves all forms. The loss is then
1/2 (sum_j D_j eta_j^2 - damping |eta K|^2).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nstf.kernels.formats.scales import group_size
from nstf.quantizers.rounding.factor import Factor
from nstf.quantizers.rounding.levels import Levels
from nstf.quantizers.rounding.matrix import Rounding, chunks, importance, matrix_view
from nstf.quantizers.rounding.steps import in_steps
from nstf.quantizers.rounding.sweep import Grid, launched_together, nearest_many, sweep_with_errors
from nstf.quantizers.stats import Stats, row_loss

# Weights that are looked at. Losses of independently rounded rows vary more: their errors add up in the few directions in
# which all inputs are large.
SAMPLE = {"nearest": 1 << 18, "ldlq": 1 << 16}
# Times that errors are fed back. Of 3 to 8 bits two leave 1 % of the loss out, of 2 bits three 4 %.
PASSES = 3
# What fitting the scales again after the sweep takes off the loss at groups of 32 columns, and how that falls with their
# size: measured on SmolLM2-135M at 2 to 8 bits, from groups of 32 to whole rows.
REFIT_GAIN, REFIT_POWER = 0.048, 0.6


@dataclass(frozen=True)
class Form:
    """What a recipe rounds to: `levels`, `group` columns to a scale (0: the row), `rounding`."""

    levels: Levels
    group: int
    rounding: Rounding


def expected_losses(weight: Tensor, lead: int, forms: Sequence[Form], stats: Stats | None) -> list[float]:
    """The loss that encoding in each form will leave.

    The sampled rows' loss is carried over to all rows by sum_j row_weight_j sum_i h_i w_ji^2, h being the Hessian's
    diagonal (the LDL diagonal under ldlq). Raises ValueError on weights or statistics that do not fit.
    """
    stats = stats or Stats()
    matrix = matrix_view(weight, lead)
    stats.check(*matrix.shape)
    found: dict[int, float] = {}
    for rounding in dict.fromkeys(form.rounding for form in forms):
        own = [i for i, form in enumerate(forms) if form.rounding == rounding]
        sample = _sample(matrix, rounding, stats)
        lost = sample.losses([forms[i] for i in own], rounding)
        sums = (lost * sample.weights).sum(1) * sample.carried
        found.update(zip(own, sums.tolist(), strict=True))
    losses = [found[i] for i in range(len(forms))]
    if not all(math.isfinite(value) for value in losses):
        raise ValueError("weights or row weights are NaN or infinite")
    return losses


@dataclass(frozen=True, eq=False)
class _Sample:
    """Some rows. `weights`: of their losses, [rows]; `diagonal`: of the scale search, [cols]; `carried`: all rows' energy
    over the sample's; `factor`: what feeds errors back, None without feedback."""

    rows: Tensor
    weights: Tensor
    diagonal: Tensor
    carried: Tensor
    factor: Factor | None
    hessian: Tensor | None

    def losses(self, forms: Sequence[Form], rounding: Rounding) -> Tensor:
        """The loss of every row in each form, float64 [forms, rows]."""
        x, factor = self.rows, self.factor
        together = launched_together(x, [(form.levels, form.group) for form in forms])
        if len(together) < len(forms) and together:
            return self._by_launches(forms, rounding, together)
        errors = x.new_empty(len(forms), *x.shape)
        grids = [self._rounded(form, out) for form, out in zip(forms, errors, strict=True)]
        if factor is None:
            return torch.stack([row_loss(error, self.hessian) for error in errors])
        change = errors
        for _ in range(PASSES):
            change = factor.fed(errors.flatten(0, 1)).view_as(errors)
            targets = errors.add(x).sub_(change)
            for form, first, target, out in zip(forms, grids, targets, errors, strict=True):
                # An order makes groups static: their scales are those of the weights, not of the targets.
                grid = first if rounding.act_order or form.levels.steps < 256 else None
                sweep_with_errors(target, form.levels, form.group, self.diagonal, grid, out)
        return self._lost(forms, errors, change, factor)

    def _by_launches(
        self, forms: Sequence[Form], rounding: Rounding, together: Sequence[Sequence[int]]
    ) -> Tensor:
        """`losses` with all forms of each of the lists `together` in one launch."""
        x, factor = self.rows, self.factor
        order = [at for same in together for at in same]
        ordered = [forms[at] for at in order]
        parts, start = [], 0
        for same in together:
            parts.append(slice(start, start + len(same)))
            start += len(same)
        given = [[(form.levels, form.group) for form in ordered[part]] for part in parts]
        diagonal = self.diagonal.to(x).contiguous()
        errors = x.new_empty(len(forms), *x.shape)
        scales = [
            nearest_many(x, own, diagonal, None, errors[part])[:2]
            for own, part in zip(given, parts, strict=True)
        ]
        if factor is None:
            lost = torch.stack([row_loss(error, self.hessian) for error in errors])
        else:
            change = errors
            for _ in range(PASSES):
                change = factor.fed(errors.flatten(0, 1)).view_as(errors)
                targets = errors.add(x).sub_(change)
                for own, part, known in zip(given, parts, scales, strict=True):
                    kept = known if rounding.act_order else None
                    nearest_many(targets[part], own, diagonal, kept, errors[part])
            lost = self._lost(ordered, errors, change, factor)
        places = torch.tensor(order, device="cpu").argsort()
        return lost[places.to(lost.device)]

    def _lost(self, forms: Sequence[Form], errors: Tensor, change: Tensor, factor: Factor) -> Tensor:
        """What target errors lose that `change` the weights, both [forms, rows, cols]: float64 [forms, rows]."""
        added = factor.damping * factor.mean
        lost = (errors.square() @ factor.importance - added * change.square().sum(2)).double() / 2
        kept = lost.new_tensor([[1 - _refit_gain(form, errors.shape[2])] for form in forms])
        return lost.clamp_min_(0) * kept

    def _rounded(self, form: Form, errors: Tensor) -> Grid:
        """The scales of the sampled rows, rounded to nearest; `errors` takes the weights less what they became."""
        given = self.rows, form.levels, form.group, self.diagonal
        grid = sweep_with_errors(*given, None, errors)[0].grid
        if form.levels.steps == 256:
            return grid
        grid = in_steps(self.rows, grid, form.levels, self.diagonal)
        sweep_with_errors(*given, grid, errors)
        return grid


def _refit_gain(form: Form, cols: int) -> float:
    """The share of the loss that fitting the scales again takes off."""
    if not form.levels.refit:
        return 0.0
    return float(min(REFIT_GAIN * (32 / group_size(cols, form.group)) ** REFIT_POWER, 0.1))


def _sample(matrix: Tensor, rounding: Rounding, stats: Stats) -> _Sample:
    rows, cols = matrix.shape
    weights = torch.ones(rows, dtype=torch.float64, device=matrix.device)
    if stats.row_weight is not None:
        weights = stats.row_weight.reshape(-1).double()
    factor = None
    if rounding.method == "ldlq" and stats.hessian is not None:
        factor = stats.ldl(rounding.damping, rounding.act_order)
    diagonal = (
        importance(stats, cols, rounding.damping, matrix.device) if factor is None else factor.importance
    )
    energy = torch.cat([matrix[s:e].float().square() @ diagonal for s, e in chunks(rows, cols)]) * weights
    # Of rows longer than the whole sample one is taken.
    step = min(rows, max(1, rows * cols // SAMPLE["nearest" if factor is None else "ldlq"]))
    picked = slice(step // 2, None, step)
    sampled = energy[picked].sum()
    carried = torch.where(sampled == 0, 1.0, energy.sum() / sampled)
    return _Sample(
        matrix[picked].float().contiguous(), weights[picked], diagonal, carried, factor, stats.hessian
    )
