# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The search of kernels/torch/shuffle_search.py on a GPU: the same codes, but for the last bits of float sums.

A program (one thread block) owns a segment of 256 rows and rounds its 16 columns one after another. First it works out what
every value of every row costs: 256 numbers a row, since with a the newest symbol, b the one before and c the oldest a value
depends on a ^ c and b, or on a ^ c and a ^ b. Then it goes through the steps of a path: to each of the 256 states (a, b)
lead 16 ways, one for each z = a ^ c, of which the cheapest is taken. A way is one integer: its cost, c, and the state in
which its path stood 16 steps ago. That state comes along for nothing, and shortens the way back: first from one block of 16
steps to the one before, then all blocks at a time.

What bounds the time is that steps follow each other. So the ways of a state are one thread's, states change hands once a
step, through shared memory, and what a step reads else is loaded a step ahead: matrices of many rows keep more of the GPU
busy than those of many columns.
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
# Costs are kept over the cheapest path's every so many steps: between, sums stay below 2^19. By rows that end at a step.
NORMALISE = {1: 16, 2: 8}
# Of a program that has a multiprocessor for itself, and of those that share them: eight warps are faster alone, two programs
# of four warps faster than two of eight (docs/conversion.md).
WARPS = {"alone": 8, "beside": 4}
# Of a launch: four programs for each multiprocessor of the largest card, whose costs take 0.7 MB each at most.
MOST_ROWS = 528 * shuffle.SEGMENT
CONSTANTS = {
    "COLUMNS": reference.BLOCK,
    "SEGMENT": shuffle.SEGMENT,
    "GROUP": shuffle.GROUP,
    "STEPS_MOST": STEPS_MOST,
    "BLOCK_STEPS": BLOCK_STEPS,
    "FARTHEST": reference.FARTHEST,
    "MOST": reference.MOST,
}


@triton.jit(
    do_not_specialize=["rows", "steps", "low", "high"],
    do_not_specialize_on_alignment=["target", "weight", "feedback", "which", "costs"],
)
def _round_columns(
    target,  # f32 [rows, 16]
    weight,  # f32 [rows, 16]
    level,  # f32 [rows]
    importance,  # f32 [rows]: what a squared error of one level costs
    feedback,  # f32 [matrices, 16, 16]
    which,  # i32 [programs]: the matrix of a segment
    values,  # f32 [kinds, 256]: of (a ^ c, b), or of (a ^ c, a ^ b) where a row is the second that ends at its step
    kinds,  # i32 [32]: of rows in their group
    places,  # i32 [32]: the step at which a row of a group ends, after all steps of a path where it is the second one
    twice,  # i32 [steps]: whether two rows of a group end at a step
    ending,  # i32 [steps, 2]: the rows of a group that end at a step, -1: none
    rounded,  # f32 [rows, 16]
    symbols,  # u8 [rows / 32, steps, 16]
    placed,  # f32 [programs, 2, ENDS, path steps]: zeros; the targets in levels and what errors cost, by step
    costs,  # i32 [programs, ENDS, path steps + 1, 256]: shifted as in a way
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
    matrix_stride,
    feedback_stride,
    COLUMNS: tl.constexpr,
    SEGMENT: tl.constexpr,
    GROUP: tl.constexpr,
    STEPS_MOST: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
    FARTHEST: tl.constexpr,
    MOST: tl.constexpr,
    ENDS: tl.constexpr,  # rows that end at a step, at most
    NORMALISE: tl.constexpr,
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
    feedback += tl.load(which + program).to(tl.int64) * matrix_stride
    level += first_row
    importance += first_row
    rounded += first_row * COLUMNS
    symbols += first_row // GROUP * steps * COLUMNS
    placed += program * (2 * ENDS * PATH_STEPS)
    costs += program * (ENDS * (PATH_STEPS + 1) * 256)
    errors += program * (COLUMNS * SEGMENT)
    oldest += program * (PATH_STEPS * 256)
    starts += program * (BLOCKS * 256)
    stops += program * LANES

    own = tl.arange(0, SEGMENT)
    inside = own < count
    place = own // GROUP * steps + tl.load(places + own % GROUP)
    own_level = tl.load(level + own, inside, 0.0)
    tl.store(placed + ENDS * PATH_STEPS + place, tl.load(importance + own, inside, 0.0), inside)

    # Place s = 16 a + (a ^ b) has the paths to state (a, b), newest symbol and the one before: paths change hands through
    # shared memory, and in this order no two lanes want the same bank of it (of places 16 a + b eight would).
    place_of = tl.arange(0, 256)
    older = (place_of ^ (place_of >> 4)) & 15
    state = (place_of & 240) | older
    before = older << 8
    # Of a way (z, a, a ^ b): what it costs, and where its path stood: (b, a ^ z). In one dimension, so that the ways of a
    # state come to one thread whatever the version of Triton: of [16, 256] 3.6 deals them out, and a step takes longer.
    way = tl.arange(0, 4096)
    a, b = (way >> 4) & 15, (way ^ (way >> 4)) & 15
    first_cost = costs + ((way >> 8) << 4) + b
    second_cost = costs + (PATH_STEPS + 1) * 256 + ((way >> 8) << 4) + (way & 15)
    origin = (b << 4) | (b ^ a ^ (way >> 8))
    entry = tl.arange(0, 256)
    block_step = tl.arange(0, BLOCK_STEPS)
    lane = tl.arange(0, LANES)

    for column in range(COLUMNS):
        wanted = tl.load(target + own * target_stride + column, inside, 0.0)
        for i in range(column):
            wanted += tl.load(errors + i * SEGMENT + own) * tl.load(feedback + i * feedback_stride + column)
        x = tl.where(own_level > 0, wanted / tl.where(own_level > 0, own_level, 1.0), 0.0)
        tl.store(placed + place, tl.minimum(tl.maximum(x, low), high), inside)
        tl.debug_barrier()
        for n in tl.static_range(ENDS):
            for i in range(blocks):
                at = i * BLOCK_STEPS + block_step
                there = at < path_steps
                row = tl.load(ending + at % steps * 2 + n)
                kind = tl.load(kinds + row, row >= 0, 0)
                value = tl.load(values + kind[:, None] * 256 + entry[None, :])
                d = tl.load(placed + n * PATH_STEPS + at, there, 0.0)[:, None] - value
                price = tl.load(placed + (ENDS + n) * PATH_STEPS + at, there, 0.0)[:, None]
                cost = tl.minimum(d * d * price, FARTHEST).to(tl.int32) << 12
                tl.store(costs + (n * (PATH_STEPS + 1) + at[:, None]) * 256 + entry[None, :], cost)
        tl.debug_barrier()

        paths = tl.where(state == 0, 0, MOST << 12) | before | state
        step = 0
        first = tl.load(first_cost)
        if ENDS == 2:
            second = tl.load(second_cost, tl.load(twice) > 0, 0)
        for t in range(path_steps):
            ways = tl.gather(paths, origin, 0) + first
            first = tl.load(first_cost + (t + 1) * 256)
            if ENDS == 2:
                ways += second
                step = tl.where(step == steps - 1, 0, step + 1)
                second = tl.load(second_cost + (t + 1) * 256, tl.load(twice + step) > 0, 0)
            best = tl.min(tl.reshape(ways, [16, 256]), 0)  # of [a, b], which become b and c
            tl.store(oldest + t * 256 + state, ((best >> 8) & 15).to(tl.uint8))
            paths = (best & ~0xF00) | before
            if t % NORMALISE == NORMALISE - 1:
                paths -= (tl.min(paths, 0) >> 12) << 12
            if t % BLOCK_STEPS == BLOCK_STEPS - 1 or t == path_steps - 1:
                tl.store(starts + t // BLOCK_STEPS * 256 + state, (paths & 255).to(tl.uint8))
                paths = (paths & ~255) | state
        # Of equally cheap ends the one of the lowest older symbol, then the lowest newest one.
        end = ((paths >> 12) << 8) | ((state & 15) << 4) | (state >> 4)
        end = tl.min(end, 0) & 255
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
            newest, older_now = now >> 4, now & 15
            for n in tl.static_range(ENDS):
                own_row = tl.load(ending + own_step * 2 + n, there, -1)
                ends = there & (own_row >= 0)
                own_at = own_group * GROUP + own_row
                kind = tl.load(kinds + own_row, ends, 0)
                worth = (newest ^ c) * 16 + (older_now if n == 0 else newest ^ older_now)
                value = tl.load(values + kind * 256 + worth, ends, 0.0)
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
    which: Tensor | None = None,
    beside: int = 0,
) -> tuple[Tensor, Tensor]:
    """(rounded [rows, 16], codes u8 [rows / 32, 2 q, 8]) on the targets' GPU: see kernels/torch/shuffle_search.py."""
    rows, device = len(target), target.device
    if feedback is None:
        which = None  # one matrix of zeros stands for all
    if rows == 0:
        return torch.empty_like(target), target.new_empty(0, 2 * quarter_bits, 8, dtype=torch.uint8)
    if rows > MOST_ROWS:
        parts = [slice(i, i + MOST_ROWS) for i in range(0, rows, MOST_ROWS)]
        segments = [slice(p.start // shuffle.SEGMENT, p.stop // shuffle.SEGMENT) for p in parts]
        found = [
            round_columns(
                target[p], weight[p], level[p], importance[p], feedback, quarter_bits,
                None if which is None else which[s], beside,
            )
            for p, s in zip(parts, segments, strict=True)
        ]  # fmt: skip
        return torch.cat([r for r, _ in found]), torch.cat([c for _, c in found])
    feedback = _no_feedback(device) if feedback is None else feedback
    feedback = feedback if feedback.dim() == 3 else feedback[None]
    target, weight, feedback = (
        t if t.stride(-1) == 1 else t.contiguous() for t in (target, weight, feedback)
    )
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
        _first(programs, device) if which is None else which,
        form.values,
        form.kinds,
        form.places,
        form.twice,
        form.ending,
        rounded,
        symbols,
        target.new_zeros(programs, 2, form.ends, path_steps),
        symbols.new_empty(programs, form.ends, path_steps + 1, 256, dtype=torch.int32),
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
        feedback.stride(1),
        **CONSTANTS,
        ENDS=form.ends,
        NORMALISE=NORMALISE[form.ends],
        num_warps=_warps(programs + beside, device),
    )
    return rounded, symbols[..., ::2] | symbols[..., 1::2] << 4


class _Form:
    """What the kernel reads of a rate, on one device."""

    def __init__(self, quarter_bits: int, device: torch.device) -> None:
        rows = reference.row_values(quarter_bits, reference.float_tables(quarter_bits))  # [32, a, c, b]
        end, second = (torch.tensor(t).long() for t in shuffle.ends(quarter_bits))
        # With c = 0 these are the first rows' values at (a, b), the second ones' at (a, a ^ b).
        high, low = torch.arange(256) // 16, torch.arange(256) % 16
        entries = torch.stack(
            [rows[r, high, 0, high ^ low if second[r] else low] for r in range(shuffle.GROUP)]
        )
        distinct, kinds = torch.unique(entries, dim=0, return_inverse=True)
        ending = torch.full((2 * quarter_bits, 2), -1, dtype=torch.int32)
        ending[end, second] = torch.arange(shuffle.GROUP, dtype=torch.int32)
        self.values = distinct.contiguous().to(device)
        self.kinds = kinds.int().to(device)
        self.ends = 2 if bool(second.any()) else 1
        self.places = (end + second * (shuffle.SEGMENT // shuffle.GROUP * STEPS_MOST)).int().to(device)
        self.twice = (ending[:, 1] >= 0).int().to(device)
        self.ending = ending.to(device)
        self.low, self.high = float(rows.min()), float(rows.max())


def _warps(programs: int, device: torch.device) -> int:
    """Of a program, when so many run at the same time. They change no code."""
    if device.type != "cuda":
        return WARPS["alone"]
    # 64 lanes a warp on AMD: eight would be two threads for a state.
    alone = programs <= _multiprocessors(device) and torch.version.hip is None
    return WARPS["alone" if alone else "beside"]


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _form(quarter_bits: int, device: torch.device) -> _Form:
    return _Form(quarter_bits, device)


@cache
def _no_feedback(device: torch.device) -> Tensor:
    # From the host, which waits for the copy: what a launch fills other streams could read too early.
    return torch.zeros(reference.BLOCK, reference.BLOCK).to(device)


@cache
def _first(programs: int, device: torch.device) -> Tensor:
    """All segments are of the first matrix."""
    return torch.zeros(programs, dtype=torch.int32).to(device)
