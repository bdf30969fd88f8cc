"""LDLQ: a sweep with error feedback, then scales refitted with codes fixed and swept again.

Frantar et al., GPTQ, 2022; Chee et al., QuIP, 2023 (LDLQ and its equivalence to GPTQ).
"""

from dataclasses import replace

import torch
from torch import Tensor

from nstf.kernels import cpu
from nstf.kernels.formats.scales import group_size
from nstf.quantizers.rounding.factor import Factor
from nstf.quantizers.rounding.levels import Levels
from nstf.quantizers.rounding.products import products_of_errors
from nstf.quantizers.rounding.steps import in_steps
from nstf.quantizers.rounding.sweep import SCALE_MODES, Grid, Rounded, compiled, in_triton, sweep

# Numbers that torch holds while it works out how the scales of some groups act on each other, 4 bytes each, and how many
# groups that may be: all rows at once if there is room for them.
ROOM, BLOCKS = 1 << 26, (64, 32, 16)
# Of scale refit and sweep on the frozen scales: the first takes off 1 to 6 % of the loss, the second 1 %,
# later ones 0.5 %.
ROUNDS = 2


def ldlq(weight: Tensor, levels: Levels, group: int, factor: Factor) -> Rounded:
    """Codes and scales of `weight` float32 [rows, cols] that keep tr(dW H dW^T) small; H is `factor.hessian`.

    The scale search weighs errors with D: on SmolLM2-135M that leaves 3 to 7 % less loss than the diagonal
    of H. An ordered factor (activation order) makes the groups static: their scales come from the weights
    as they are, so the storage does not change. What follows the sweep is kept row by row, where it lowers
    the loss.
    """
    with products_of_errors(weight.device, weight.shape[1]):
        return _swept(weight, levels, group, factor)


def _swept(weight: Tensor, levels: Levels, group: int, factor: Factor) -> Rounded:
    importance = factor.importance
    grid = None
    if factor.order is not None or levels.steps < 256:
        grid = in_steps(weight, sweep(weight, levels, group, importance).grid, levels, importance)
    best = sweep(weight, levels, group, importance, factor, grid)
    for _ in range(ROUNDS if levels.refit else 0):
        best = _refitted(weight, best, levels, factor)
        again = sweep(weight, levels, group, importance, factor, best.grid)
        better = again.row_loss < best.row_loss
        codes = torch.where(better.unsqueeze(1), again.codes, best.codes)
        best = Rounded(codes, best.grid, torch.where(better, again.row_loss, best.row_loss))
    return best


def _refitted(weight: Tensor, rounded: Rounded, levels: Levels, factor: Factor) -> Rounded:
    """`refit`, but for rows where a scale would pass the last step it may use."""
    found = refit(weight, rounded, levels, factor)
    if levels.steps == 256:
        return found
    within = (found.grid.scale * 256 <= found.grid.largest * levels.steps).all(1)
    scale = torch.where(within.unsqueeze(1), found.grid.scale, rounded.grid.scale)
    loss = torch.where(within, found.row_loss, rounded.row_loss)
    return Rounded(found.codes, replace(found.grid, scale=scale), loss)


def refit(weight: Tensor, rounded: Rounded, levels: Levels, factor: Factor) -> Rounded:
    """The same codes with scales refitted group after group (one Gauss-Seidel pass over each row's groups).

    With dW = W - Q and the points p_g of group g (its values at scale 1, zero elsewhere) the best change of
    s_g is (p_g H dW^T) / (p_g H p_g^T). It is stored rounded, and kept only where the rounded change lowers
    the row's loss; the loss therefore never rises.
    """
    if compiled(weight):
        return refit_compiled(weight, rounded, levels, factor)
    groups, cols = rounded.grid.scale.shape[1], weight.shape[1]
    alike = groups * group_size(cols, rounded.grid.group) == cols
    in_blocks = in_triton(weight) and alike
    return (refit_in_blocks if in_blocks else refit_torch)(weight, rounded, levels, factor)


def refit_compiled(
    weight: Tensor, rounded: Rounded, levels: Levels, factor: Factor, most_lanes: int = 16
) -> Rounded:
    """`refit` in C++ (kernels/cpu/ldlq.cpp); `most_lanes`: the widest vectors to use."""
    cols, grid = weight.shape[1], rounded.grid
    scale = grid.scale.clone(memory_format=torch.contiguous_format)
    gain = torch.empty_like(rounded.row_loss)
    cpu.ext.ldlq_refit(
        weight=weight.contiguous(),
        hessian=factor.hessian,
        table=levels.values(),
        width=min(group_size(cols, grid.group), cols),
        bits=levels.bits,
        mode=SCALE_MODES.index(levels.scale),
        scale=scale,
        zero=grid.zero.contiguous(),
        largest=grid.largest.contiguous(),
        codes=rounded.codes,
        gain=gain,
        threads=torch.get_num_threads(),
        most_lanes=most_lanes,
    )
    return Rounded(rounded.codes, replace(grid, scale=scale), rounded.row_loss - gain)


def refit_torch(weight: Tensor, rounded: Rounded, levels: Levels, factor: Factor) -> Rounded:
    """`refit` in torch."""
    cols, group = weight.shape[1], rounded.grid.group
    width = group_size(cols, group)
    hessian = factor.hessian.to(weight)
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


def refit_in_blocks(weight: Tensor, rounded: Rounded, levels: Levels, factor: Factor) -> Rounded:
    """`refit` on a GPU, for groups of one width. A Triton kernel goes over some neighbouring groups of all rows, whose
    second derivatives by each other are a product; what has changed then moves the slopes of all later columns at once.
    """
    from nstf.kernels.triton.scale_refit import refit_groups

    rows, cols = weight.shape
    groups = rounded.grid.scale.shape[1]
    width = cols // groups
    hessian = factor.hessian.to(weight)
    points = replace_scale(rounded, 1.0).decode(levels)
    slope = (weight - rounded.decode(levels)) @ hessian
    scale, largest = rounded.grid.scale.clone(), rounded.grid.largest.reshape(-1)
    mode, gain = SCALE_MODES.index(levels.scale), torch.zeros_like(rounded.row_loss)
    block = next((b for b in BLOCKS if rows * b * b * width <= ROOM), BLOCKS[-1])
    for first in range(0, groups, block):
        own = slice(first, min(first + block, groups))
        count = own.stop - first
        columns = slice(first * width, own.stop * width)
        before, fitted = scale[:, own], scale[:, own].clone(memory_format=torch.contiguous_format)
        inner = hessian[columns, columns].reshape(count, width, -1)
        at_once = max(1, ROOM // (count * count * width))
        for some in (slice(r, r + at_once) for r in range(0, rows, at_once)):
            part = points[some, columns].contiguous()
            along = (part * slope[some, columns]).view(-1, count, width).sum(2)
            change = torch.bmm(part.view(-1, count, width).transpose(0, 1), inner).mul_(part)
            across = change.view(count, -1, count, width).sum(3)
            # Rows of a matrix that is contiguous: the kernel fits them where they are.
            gain[some] += refit_groups(along, across, fitted[some], largest[some], mode)
        if columns.stop < cols:
            moved = (points[:, columns].reshape(rows, count, width) * (fitted - before)[:, :, None]).view(
                rows, -1
            )
            slope[:, columns.stop :] -= moved @ hessian[columns, columns.stop :]
        scale[:, own] = fitted
    grid = replace(rounded.grid, scale=scale)
    return Rounded(rounded.codes, grid, rounded.row_loss - gain)


def replace_scale(rounded: Rounded, value: float) -> Rounded:
    """The same codes with every scale set to `value`."""
    grid = rounded.grid
    return replace(
        rounded, grid=Grid(torch.full_like(grid.scale, value), grid.zero, grid.largest, grid.group)
    )
