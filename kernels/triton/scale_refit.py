# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The pass of quantizers/rounding/ldlq.py over the scales of each row's groups, on a GPU in one launch.

Codes are fixed, so what a row's loss knows about its scales is a form of as many numbers as it has groups: slopes along
them, and second derivatives between them. Torch makes both by a few large products; the pass from group to group, thousands
of small steps where every one waits for the last, is this kernel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.scale_search import _stored

# Numbers of a program: rows times groups, the latter filled up to a power of two.
NUMBERS = 2048
WARPS = 4
FEWEST = 16  # groups that a program is compiled for

_SIZES = ["rows", "groups", "mode"]
_ARRAYS = ["along", "across", "scale_of", "largest", "gain"]


# Not compiled again for other sizes, nor for rows that start anywhere.
@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ARRAYS)
def _refit(
    along,  # f32 [rows, groups]
    across,  # f32 [groups, rows, groups]
    scale_of,  # f32 [rows, groups]
    largest,  # f32 [rows]
    gain,  # f64 [rows]
    rows,
    groups,
    mode,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, GROUPS)[None, :]
    live = (row[:, None] < rows) & (lane < groups)
    at = row.to(tl.int64)[:, None] * groups + lane
    slopes = tl.load(along + at, mask=live, other=0.0)
    scales = tl.load(scale_of + at, mask=live, other=0.0)
    top = tl.load(largest + row, mask=row < rows, other=0.0)
    gained = tl.zeros([ROWS], tl.float64)
    for group in range(groups):
        here = lane == group
        with_others = tl.load(across + tl.cast(group, tl.int64) * rows * groups + at, mask=live, other=0.0)
        slope = tl.sum(tl.where(here, slopes, 0.0), 1)
        curve = tl.sum(tl.where(here, with_others, 0.0), 1)
        old = tl.sum(tl.where(here, scales, 0.0), 1)
        step = tl.where(curve > 0.0, tl.div_rn(slope, tl.maximum(curve, 1e-30)), 0.0)
        new = _stored(old + step, mode, top)
        change = new - old
        drop = change * (slope - change * curve * 0.5)
        keep = drop > 0.0
        gained += tl.where(keep, drop, 0.0).to(tl.float64)
        slopes -= tl.where(keep, change, 0.0)[:, None] * with_others
        scales = tl.where(here & keep[:, None], new[:, None], scales)
    tl.store(scale_of + at, scales, mask=live)
    tl.store(gain + row, gained, mask=row < rows)


def refit_groups(along: Tensor, across: Tensor, scale: Tensor, largest: Tensor, mode: int) -> Tensor:
    """Fits the scales [rows, groups] of some rows in place; what that takes off each row's loss, float64 [rows].

    along: [rows, groups], what the loss falls by for a scale. across: [groups, rows, groups], the second derivatives by two
    scales of a row. largest: [rows], the super-scales of 8-bit scales. mode: how scales are stored, of SCALE_MODES. float32,
    contiguous.
    """
    rows, groups = along.shape
    gain = torch.empty(rows, dtype=torch.float64, device=along.device)
    wide = max(FEWEST, triton.next_power_of_2(groups))
    each = max(1, NUMBERS // wide)
    with torch.cuda.device_of(along):
        _refit[(triton.cdiv(rows, each),)](
            along, across, scale, largest, gain, rows, groups, mode, ROWS=each, GROUPS=wide, num_warps=WARPS
        )
    return gain
