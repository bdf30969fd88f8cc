# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Adds up what the programs of attention_decode.py found, each over its pages: a launch of its own.

How many programs had pages follows from the position, here as there (`extent`).
"""

import triton
import triton.language as tl

from nstf.kernels.triton.attention_pages import turned_by_hadamard


@triton.constexpr_function
def programs_apart(apart: int) -> int:
    """Programs for the last two pages alone, `apart` positions each; none where it is 0."""
    return 128 // apart if apart else 0


@triton.jit
def units_of(pages, far, at, NEAR: tl.constexpr):
    """So many times NEAR positions of the last pages are there."""
    return (pages - far - 1) * (64 // NEAR) + at % 64 // NEAR + 1


@triton.jit
def extent(sinks, windows, lengths, at, splits, MASKED: tl.constexpr, EACH: tl.constexpr):
    """(pages of sinks, first page of the window, pages in all, of them in stored form, programs that share them)."""
    page = at // 64
    first = tl.zeros([], tl.int32)
    front = tl.zeros([], tl.int32)
    if MASKED:
        lows = tl.where(at + 1 < lengths, 0, tl.maximum(at - windows + 1, 0))
        first = tl.min(lows, axis=0) // 64
        front = tl.minimum((tl.max(sinks, axis=0) + 63) // 64, first)
    pages = front + page - first + 1
    far = tl.minimum(front, tl.maximum(page - 1, 0)) + tl.maximum(page - 1 - first, 0)
    active = tl.maximum(1, tl.minimum(splits, (pages + EACH - 1) // EACH))
    return front, first, pages, far, active


@triton.jit
def _parts_of(block, s, c, row, active, GROUP: tl.constexpr, SIZE: tl.constexpr):
    """(sums [parts, channels], their running maxima) of a query; nothing of parts that are not there."""
    part = block + s * (GROUP * (SIZE + 2))
    sums = tl.load(part[:, None] + (row * SIZE + c)[None, :], mask=(s < active)[:, None], other=0.0)
    return sums, tl.load(part + (GROUP * SIZE + row), mask=s < active, other=float("-inf"))


@triton.jit
def merge_kernel(
    parts,  # f32 [batch KEPT, MOST, GROUP (SIZE + 2)]
    members,
    rules,
    position,
    out,  # [batch, heads SIZE]
    splits,  # programs of a head in the launch before
    LINES: tl.constexpr,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    SIZE: tl.constexpr,
    V_ROTATE: tl.constexpr,
    MASKED: tl.constexpr,
    MOST: tl.constexpr,
    EACH: tl.constexpr,
    APART: tl.constexpr,  # as in attention_decode.py
    WIDTH: tl.constexpr,  # channels of a program
    TILE: tl.constexpr,  # parts at a time
    SPAN: tl.constexpr,  # a power of two that is not below `splits`
    PDL: tl.constexpr,
):
    """Adds up the parts of one query: WIDTH of its channels."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0) // GROUP
    row = tl.program_id(0) % GROUP
    line = pair // KEPT
    number = tl.load(members + pair % KEPT)
    at = tl.load(position + line * LINES).to(tl.int32)
    rows = number * GROUP + tl.minimum(tl.arange(0, ROWS), GROUP - 1)
    sinks = tl.load(rules + rows * 3)
    windows = tl.load(rules + rows * 3 + 1)
    lengths = tl.load(rules + rows * 3 + 2)
    _, _, pages, far, active = extent(sinks, windows, lengths, at, splits, MASKED, EACH)
    if APART:
        active += units_of(pages, far, at, APART)
    if PDL:
        tl.extra.cuda.gdc_wait()
    c = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    block = parts + pair.to(tl.int64) * (MOST * GROUP * (SIZE + 2))
    # All loads of the first parts at once: one way to memory.
    s = tl.arange(0, TILE)
    theirs, level = _parts_of(block, s, c, row, active, GROUP, SIZE)
    all_parts = tl.arange(0, SPAN)
    from_top = block + all_parts * (GROUP * (SIZE + 2)) + GROUP * SIZE + row
    tops = tl.load(from_top, mask=all_parts < active, other=float("-inf"))
    totals = tl.load(from_top + GROUP, mask=all_parts < active, other=0.0)
    # The query's own position is in one of the parts: this is a number.
    top = tl.max(tops, axis=0)
    total = tl.sum(totals * tl.exp2(tops - top), axis=0)
    sum_of = tl.sum(theirs * tl.exp2(level - top)[:, None], axis=0)
    for i in range(TILE, active, TILE):
        more, its_level = _parts_of(block, i + s, c, row, active, GROUP, SIZE)
        sum_of += tl.sum(more * tl.exp2(its_level - top)[:, None], axis=0)
    sum_of = sum_of / total
    into = out + (line * (GROUP * KV) + number * GROUP + row) * SIZE + c
    if V_ROTATE:
        # Two equal rows: a tensor of one row has no layout to turn in.
        two = tl.arange(0, 2)[:, None]
        turned = turned_by_hadamard(sum_of[None, :] + two * 0.0, 2, SIZE)
        tl.store(
            into[None, :] + two * 0, turned.to(out.dtype.element_ty), mask=(two == 0) & (c >= 0)[None, :]
        )
    else:
        tl.store(into, sum_of.to(out.dtype.element_ty))
