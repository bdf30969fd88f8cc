"""LDLQ: a sweep with error feedback, scales refitted with codes fixed, and one more sweep on the frozen
scales.

Frantar et al., GPTQ, 2022; Chee et al., QuIP, 2023 (LDLQ and its equivalence to GPTQ).
"""

from dataclasses import replace

import torch
from torch import Tensor

from nstf.kernels.formats.scales import group_size
from nstf.quantizers.rounding.factor import Factor
from nstf.quantizers.rounding.levels import Levels
from nstf.quantizers.rounding.sweep import Grid, Rounded, sweep


def ldlq(weight: Tensor, levels: Levels, group: int, factor: Factor) -> Rounded:
    """Codes and scales of `weight` float32 [rows, cols] that keep tr(dW H dW^T) small; H is `factor.hessian`.

    The later steps are kept row by row, and only where they lower the loss. An ordered factor (activation
    order) makes the groups static: their scales come from the weights as they are, so the storage does not
    change.
    """
    importance = factor.hessian.diagonal()
    grid = None
    if factor.order is not None:
        importance = torch.empty_like(importance).index_copy_(0, factor.order, importance)
        grid = sweep(weight, levels, group, importance).grid
    first = sweep(weight, levels, group, importance, factor, grid)
    if not levels.refit:
        return first
    best = refit(weight, first, levels, factor)
    again = sweep(weight, levels, group, importance, factor, best.grid)
    better = again.row_loss < best.row_loss
    codes = torch.where(better.unsqueeze(1), again.codes, best.codes)
    return Rounded(codes, best.grid, torch.where(better, again.row_loss, best.row_loss))


def refit(weight: Tensor, rounded: Rounded, levels: Levels, factor: Factor) -> Rounded:
    """The same codes with scales refitted group after group (one Gauss-Seidel pass over each row's groups).

    With dW = W - Q and the points p_g of group g (its values at scale 1, zero elsewhere) the best change of
    s_g is (p_g H dW^T) / (p_g H p_g^T). It is stored rounded, and kept only where the rounded change lowers
    the row's loss; the loss therefore never rises.
    """
    cols, group = weight.shape[1], rounded.grid.group
    width, order = group_size(cols, group), factor.order
    hessian = factor.hessian.to(weight)
    if order is not None:
        back = torch.argsort(order)
        hessian = hessian[back][:, back]
    points = replace_scale(rounded, 1.0).decode(levels)
    scale = rounded.grid.scale.clone()
    slope = (weight - rounded.decode(levels)) @ hessian
    gain = torch.zeros_like(rounded.row_loss)
    for g in range(scale.shape[1]):
        part = slice(g * width, min((g + 1) * width, cols))
        p = points[:, part]
        change = p @ hessian[part]
        along = (p * slope[:, part]).sum(1, keepdim=True)
        across = (p * change[:, part]).sum(1, keepdim=True)
        old = scale[:, g : g + 1]
        step = torch.where(across > 0, along / across.clamp(min=1e-30), torch.zeros_like(along))
        new = levels.round_scale(old + step, rounded.grid.largest)
        delta = new - old
        drop = delta * (along - delta * across / 2)
        keep = drop > 0
        delta = torch.where(keep, delta, torch.zeros_like(delta))
        scale[:, g : g + 1] = torch.where(keep, new, old)
        slope -= delta * change
        gain += torch.where(keep, drop, torch.zeros_like(drop)).squeeze(1).double()
    grid = replace(rounded.grid, scale=scale)
    return Rounded(rounded.codes, grid, rounded.row_loss - gain)


def replace_scale(rounded: Rounded, value: float) -> Rounded:
    """The same codes with every scale set to `value`."""
    grid = rounded.grid
    return replace(
        rounded, grid=Grid(torch.full_like(grid.scale, value), grid.zero, grid.largest, grid.group)
    )
