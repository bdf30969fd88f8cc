"""8-bit scales that use fewer than all of their steps: what GGUF's Q6_K holds (`Params.steps` of int_grid)."""

import torch
from torch import Tensor

from nstf.kernels.formats.scales import super_in_steps
from nstf.quantizers.rounding.levels import Levels
from nstf.quantizers.rounding.search import search
from nstf.quantizers.rounding.sweep import Grid, spans


def in_steps(weight: Tensor, grid: Grid, levels: Levels, importance: Tensor) -> Grid:
    """Scales in fewer steps of a wider super-scale, of which the 256th part is a float16 too.

    They are searched again: scales that are rounded after the search leave a tenth more loss.
    """
    if levels.steps == 256:
        return grid
    rows, cols = weight.shape
    largest = super_in_steps(grid.largest, levels.steps)
    scale = torch.empty_like(grid.scale)
    for columns, numbers in spans(cols, grid.group):
        x = weight[:, columns].reshape(rows, numbers.stop - numbers.start, -1)
        h = importance[columns].to(weight).view(x.shape[1:])
        scale[:, numbers] = search(x, h, levels, largest.unsqueeze(1))[0].squeeze(2)
    return Grid(torch.minimum(scale, largest * (levels.steps / 256)), grid.zero, largest, grid.group)
