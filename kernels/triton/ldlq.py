# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The rounding sweep of quantizers/rounding/sweep.py over a block of columns on a GPU.

Rows do not influence each other, so a program takes some of them through all columns of the block. Their targets stay in
registers; each rounded column adds its error times its row of U to them. Matrices are transposed, [columns, rows]: threads
beside each other then read numbers beside each other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128  # most columns of a block
ROWS = 32  # of a program
WARPS = 4


@triton.jit
def _nearest(y, zero, table, middles, top, STEPS: tl.constexpr):
    """(code - zero or the table's value, code) of the level nearest to y; STEPS of a binary search, 0 without a table."""
    if STEPS == 0:
        # Adding 1.5 * 2^23 leaves no bits for a fraction: to the nearest, ties to even.
        code = (tl.minimum(tl.maximum(y + zero, 0.0), top.to(tl.float32)) + 12582912.0) - 12582912.0
        return code - zero, code.to(tl.int32)
    code = tl.zeros_like(y).to(tl.int32)
    for step in tl.static_range(STEPS):
        probe = code + (1 << (STEPS - 1 - step))
        inside = probe <= top
        above = y > tl.load(middles + probe - 1, mask=inside, other=float("inf"))
        code = tl.where(inside & above, probe, code)
    return tl.load(table + code), code


@triton.jit(do_not_specialize=["start", "end", "rows", "groups", "top"])
def _sweep(
    weight,  # f32 [cols, rows]
    target,  # f32 [cols, rows]
    upper,  # f32 [cols, cols]
    diagonal,  # f32 [cols]
    group_of,  # i32 [cols]
    scale_of,  # f32 [rows, groups]
    zero_of,  # f32 [rows, groups]
    table,  # f32 [top + 1]
    middles,  # f32 [top]
    codes,  # u8 [cols, rows]
    error,  # f32 [cols, rows]
    loss,  # f64 [rows]
    start,
    end,
    rows,
    cols,
    groups,
    top,  # the largest code
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    lane = tl.arange(0, BLOCK)
    inside = start + lane < end
    at = (start + lane).to(tl.int64)[:, None] * rows + row[None, :]
    targets = tl.load(target + at, mask=inside[:, None] & live[None, :], other=0.0)
    lost = tl.zeros([ROWS], tl.float32)
    for j in range(end - start):
        column = start + j
        group = tl.load(group_of + column)
        scale = tl.load(scale_of + row * groups + group, mask=live, other=0.0)
        zero = tl.load(zero_of + row * groups + group, mask=live, other=0.0)
        inverse = tl.where(scale == 0.0, 0.0, 1.0 / tl.where(scale == 0.0, 1.0, scale))
        x = tl.sum(tl.where(lane[:, None] == j, targets, 0.0), 0)
        point, code = _nearest(x * inverse, zero, table, middles, top, STEPS)
        value = point * scale
        here = tl.cast(column, tl.int64) * rows + row
        left = tl.load(weight + here, mask=live, other=0.0) - value
        tl.store(error + here, left, mask=live)
        tl.store(codes + here, code.to(tl.uint8), mask=live)
        lost += (x - value) * (x - value) * tl.load(diagonal + column)
        # U is zero at and before the column, so finished targets stay as they are.
        u = tl.load(upper + tl.cast(column, tl.int64) * cols + start + lane, mask=inside, other=0.0)
        targets += u[:, None] * left[None, :]
    before = tl.load(loss + row, mask=live, other=0.0)
    tl.store(loss + row, before + lost.to(tl.float64) / 2, mask=live)


def sweep_block(
    weight: Tensor,
    target: Tensor,
    upper: Tensor,
    diagonal: Tensor,
    group_of: Tensor,
    scale: Tensor,
    zero: Tensor,
    table: Tensor,
    middles: Tensor,
    count: int,
    columns: slice,
    codes: Tensor,
    error: Tensor,
    loss: Tensor,
) -> None:
    """Rounds at most 128 columns; fills `codes` and `error` there and adds to `loss` [rows], float64.

    weight, target, codes, error: [cols, rows] in the order of the sweep, as are upper [cols, cols], diagonal and group_of
    (int32) [cols]. scale, zero: [rows, groups]. table, middles: empty for the integers below `count`. All contiguous.
    """
    cols, rows = weight.shape
    with torch.cuda.device_of(weight):
        _sweep[(triton.cdiv(rows, ROWS),)](
            weight,
            target,
            upper,
            diagonal,
            group_of,
            scale,
            zero,
            table,
            middles,
            codes,
            error,
            loss,
            columns.start,
            columns.stop,
            rows,
            cols,
            scale.shape[1],
            count - 1,
            STEPS=(count - 1).bit_length() if len(table) else 0,
            BLOCK=max(16, triton.next_power_of_2(columns.stop - columns.start)),
            ROWS=ROWS,
            num_warps=WARPS,
        )
