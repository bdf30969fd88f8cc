"""Rounding to nearest: every weight alone, scales by the weighted squared error of their group."""

from torch import Tensor

from nstf.quantizers.rounding.levels import Levels
from nstf.quantizers.rounding.steps import in_steps
from nstf.quantizers.rounding.sweep import Rounded, sweep


def nearest(weight: Tensor, levels: Levels, group: int, importance: Tensor) -> Rounded:
    """Codes and scales of `weight` float32 [rows, cols]; `importance` float32 [cols]: the Hessian's diagonal."""
    found = sweep(weight, levels, group, importance)
    if levels.steps == 256:
        return found
    return sweep(weight, levels, group, importance, None, in_steps(weight, found.grid, levels, importance))
