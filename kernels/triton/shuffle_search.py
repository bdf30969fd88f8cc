# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The search of kernels/torch/shuffle_search.py on a GPU: the same codes, but for the last bits of float sums.

A program (one thread block) owns a segment of 256 rows and rounds its 16 columns one after another. At a step of a path it
holds all 16 x 16 x 16 ways (newest symbol a, the one before b, the oldest c) and takes the least over c. A way is one
integer: its cost, c, and the state in which its path stood 16 steps ago. That state comes along for nothing, and shortens
the way back: first from one block of 16 steps to the one before, then all blocks at a time.

At 4 bits a weight costs 4096 ways of five instructions. What bounds the time is that steps follow each other: matrices of
many rows keep more of the GPU busy than those of many columns.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.formats import shuffle
from nstf.kernels.torch import shuffle_search as reference

STEPS_MOST = 2 * shuffle.RATES[-1]
BLOCK_STEPS = 16
# Costs are kept over the cheapest path's every so many steps: between, sums stay below 2^19.
NORMALISE = 8
_WARPS = 8
CONSTANTS = {
    "COLUMNS": reference.BLOCK,
    "SEGMENT": shuffle.SEGMENT,
    "GROUP": shuffle.GROUP,
    "STEPS_MOST": STEPS_MOST,
    "BLOCK_STEPS": BLOCK_STEPS,
    "NORMALISE": NORMALISE,
    "FARTHEST": reference.FARTHEST,
    "MOST": reference.MOST,
}


@triton.jit(
    do_not_specialize=["rows", "steps", "low", "high"],
    do_not_specialize_on_alignment=["target", "weight", "feedback"],
)
def _round_columns(
    target,  # f32 [rows, 16]
    weight,  # f32 [rows, 16]
    level,  # f32 [rows]
    costs,  # f32 [rows]: of a squared error of one level
    feedback,  # f32 [16, 16]
    values,  # f32 [kinds, 16 a, 16 b, 16 c]
    kinds,  # i32 [32]: of rows in their group
    ending,  # i32 [steps, 2]: the rows of a group that end at a step, -1: none
    rounded,  # f32 [rows, 16]
    symbols,  # u8 [rows / 32, steps, 16]
    scaled,  # f32 [programs, 256]: targets in levels
    errors,  # f32 [programs, 16, 256]
    oldest,  # u8 [programs, 8 steps, 256]: c of every state
    starts,  # u8 [programs, blocks, 256]: the state at the start of the block
    stops,  # i32 [programs, 32]: the state at the end of the block
    rows,
    steps,  # of a group
    low,
    high,
    target_stride,
    weight_stride,
    feedback_stride,
    COLUMNS: tl.constexpr,
    SEGMENT: tl.constexpr,
    GROUP: tl.constexpr,
    STEPS_MOST: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
    NORMALISE: tl.constexpr,
    FARTHEST: tl.constexpr,
    MOST: tl.constexpr,
):
    PATH_STEPS: tl.constexpr = SEGMENT // GROUP * STEPS_MOST
    BLOCKS: tl.constexpr = PATH_STEPS // BLOCK_STEPS
    LANES: tl.constexpr = 32  # at least BLOCKS
    program = tl.program_id(0).to(tl.int64)
    first_row = program * SEGMENT
    count = tl.minimum(rows - first_row, SEGMENT).to(tl.int32)
    path_steps = count // GROUP * steps
    blocks = (path_steps + BLOCK_STEPS - 1) // BLOCK_STEPS
    target += first_row * target_stride
    weight += first_row * weight_stride
    level += first_row
    costs += first_row
    rounded += first_row * COLUMNS
    symbols += first_row // GROUP * steps * COLUMNS
    scaled += program * SEGMENT
    errors += program * (COLUMNS * SEGMENT)
    oldest += program * (PATH_STEPS * 256)
    starts += program * (BLOCKS * 256)
    stops += program * LANES

    own = tl.arange(0, SEGMENT)
    inside = own < count
    symbol = tl.arange(0, 16)
    state = symbol[:, None] * 16 + symbol[None, :]  # [newest, the one before]
    ways = symbol[:, None, None] * 256 + symbol[None, :, None] * 16 + symbol[None, None, :]
    older = (symbol << 8)[None, None, :]
    lane = tl.arange(0, LANES)
    own_level = tl.load(level + own, inside, 0.0)

    for column in range(COLUMNS):
        wanted = tl.load(target + own * target_stride + column, inside, 0.0)
        for i in range(column):
            wanted += tl.load(errors + i * SEGMENT + own) * tl.load(feedback + i * feedback_stride + column)
        x = tl.where(own_level > 0, wanted / tl.where(own_level > 0, own_level, 1.0), 0.0)
        tl.store(scaled + own, tl.minimum(tl.maximum(x, low), high))
        tl.debug_barrier()

        paths = tl.where(state == 0, 0, MOST << 12) | state  # [b, c]: cost, 4 bits of nothing, state
        for t in range(path_steps):
            group = t // steps
            step = t - group * steps
            key = paths[None, :, :] + older + tl.zeros([16, 16, 16], tl.int32)
            for n in tl.static_range(2):
                row = tl.load(ending + step * 2 + n)
                if row >= 0:
                    at = group * GROUP + row
                    d = tl.load(scaled + at) - tl.load(values + tl.load(kinds + row) * 4096 + ways)
                    cost = tl.minimum(d * d * tl.load(costs + at), FARTHEST)
                    key += cost.to(tl.int32) << 12
            best = tl.min(key, 2)  # [a, b], which become b and c
            tl.store(oldest + t * 256 + state, ((best >> 8) & 15).to(tl.uint8))
            paths = best & ~0xF00
            if t % NORMALISE == NORMALISE - 1:
                paths -= (tl.min(tl.min(paths, 1), 0) >> 12) << 12
            if t % BLOCK_STEPS == BLOCK_STEPS - 1 or t == path_steps - 1:
                tl.store(starts + t // BLOCK_STEPS * 256 + state, (paths & 255).to(tl.uint8))
                paths = (paths & ~255) | state
        # Of equally cheap ends the one of the lowest older symbol, then the lowest newest one.
        end = ((paths >> 12) << 8) | (symbol[None, :] * 16 + symbol[:, None])
        end = tl.min(tl.min(end, 1), 0) & 255
        at_end = (end & 15) * 16 + (end >> 4)
        tl.debug_barrier()
        for i in range(blocks):
            block = blocks - 1 - i
            tl.store(stops + block, at_end)
            at_end = tl.load(starts + block * 256 + at_end).to(tl.int32)
        tl.debug_barrier()

        now = tl.load(stops + lane, lane < blocks, 0)
        for i in range(BLOCK_STEPS):
            at_step = lane * BLOCK_STEPS + BLOCK_STEPS - 1 - i
            there = at_step < path_steps
            c = tl.load(oldest + at_step * 256 + now, there, 0).to(tl.int32)
            own_group = at_step // steps
            own_step = at_step - own_group * steps
            tl.store(symbols + at_step * COLUMNS + column, (now >> 4).to(tl.uint8), there)
            for n in tl.static_range(2):
                own_row = tl.load(ending + own_step * 2 + n, there, -1)
                ends = there & (own_row >= 0)
                own_at = own_group * GROUP + own_row
                kind = tl.load(kinds + own_row, ends, 0)
                value = tl.load(values + kind * 4096 + now * 16 + c, ends, 0.0)
                value = value * tl.load(level + own_at, ends, 0.0)
                tl.store(rounded + own_at * COLUMNS + column, value, ends)
                lost = tl.load(weight + own_at * weight_stride + column, ends, 0.0) - value
                tl.store(errors + column * SEGMENT + own_at, lost, ends)
            now = tl.where(there, (now & 15) * 16 + c, now)
        tl.debug_barrier()


def round_columns(
    target: Tensor,
    weight: Tensor,
    level: Tensor,
    importance: Tensor,
    feedback: Tensor | None,
    quarter_bits: int,
) -> tuple[Tensor, Tensor]:
    """(rounded [rows, 16], codes u8 [rows / 32, 2 q, 8]) on the targets' GPU: see kernels/torch/shuffle_search.py."""
    rows, device = len(target), target.device
    if rows == 0:
        return torch.empty_like(target), target.new_empty(0, 2 * quarter_bits, 8, dtype=torch.uint8)
    feedback = _no_feedback(device) if feedback is None else feedback
    target, weight, feedback = (t if t.stride(1) == 1 else t.contiguous() for t in (target, weight, feedback))
    form = _form(quarter_bits, device)
    programs, steps = -(-rows // shuffle.SEGMENT), 2 * quarter_bits
    path_steps = shuffle.SEGMENT // shuffle.GROUP * STEPS_MOST
    rounded = target.new_empty(rows, reference.BLOCK)
    symbols = target.new_empty(rows // shuffle.GROUP, steps, reference.BLOCK, dtype=torch.uint8)
    _round_columns[(programs,)](
        target,
        weight,
        level,
        reference.costs_of(importance, quarter_bits),
        feedback,
        form.values,
        form.kinds,
        form.ending,
        rounded,
        symbols,
        target.new_empty(programs, shuffle.SEGMENT),
        target.new_empty(programs, reference.BLOCK, shuffle.SEGMENT),
        symbols.new_empty(programs, path_steps, 256),
        symbols.new_empty(programs, path_steps // BLOCK_STEPS, 256),
        symbols.new_empty(programs, 32, dtype=torch.int32),
        rows,
        steps,
        form.low,
        form.high,
        target.stride(0),
        weight.stride(0),
        feedback.stride(0),
        **CONSTANTS,
        num_warps=_WARPS,
    )
    return rounded, symbols[..., ::2] | symbols[..., 1::2] << 4


class _Form:
    """What the kernel reads of a rate, on one device."""

    def __init__(self, quarter_bits: int, device: torch.device) -> None:
        rows = reference.row_values(quarter_bits, reference.float_tables(quarter_bits))  # [32, a, c, b]
        distinct, kinds = torch.unique(rows.transpose(2, 3).flatten(1), dim=0, return_inverse=True)
        end, second = shuffle.ends(quarter_bits)
        ending = torch.full((2 * quarter_bits, 2), -1, dtype=torch.int32)
        for row, (step, twice) in enumerate(zip(end, second, strict=True)):
            ending[step, int(twice)] = row
        self.values = distinct.contiguous().to(device)
        self.kinds = kinds.int().to(device)
        self.ending = ending.to(device)
        self.low, self.high = float(rows.min()), float(rows.max())


@cache
def _form(quarter_bits: int, device: torch.device) -> _Form:
    return _Form(quarter_bits, device)


@cache
def _no_feedback(device: torch.device) -> Tensor:
    return torch.zeros(reference.BLOCK, reference.BLOCK, device=device)
