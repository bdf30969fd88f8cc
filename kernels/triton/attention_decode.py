# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Attention of one query per sequence over pages of 16, 8, 4 or 2 bits, in two kernels that a captured graph holds.

`append` turns the queries, keys and values of the new token, puts keys and values into their place, and stores page P - 1 as
codes when page P is full: the first query that reads it so is the next one. `decode` deals the pages of a sequence and head
to several programs (flash-decoding, Dao et al. 2023); the last to arrive adds up their parts in the order of the programs.
Both read the position from device memory, and have a grid that does not depend on it.

Codes become float16 in registers: a shift and an AND-OR make two numbers 1 + code / 2^b, a packed multiply-add the stored
values, whose rounding is that of 16-bit pages. A field of all words holds a run of neighbouring channels
(attention_pages.py); runs are multiplied one after the other, so that registers of codes become operands of matrix
instructions without a detour through local memory.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.arrival import arrive, generation
from nstf.kernels.triton.attention_pages import (
    Forms,
    Pages,
    place_of,
    store_codes,
    turned_by_hadamard,
)
from nstf.kernels.triton.decode_step import _turned
from nstf.kernels.triton.launching import launch, processors_of
from nstf.kernels.triton.spec import KernelSpec, pointer_type

# Programs that share the pages of a head, at most.
MOST_SPLITS = 128
# Windows of heads that see everything.
EVERYTHING = 1 << 30
LOG2E = 1.4426950408889634


@triton.jit
def append_kernel(
    qkv,  # [batch, (heads + 2 KV) SIZE]
    bias,  # f32 [(heads + 2 KV) SIZE]
    q_gain,  # f32 [SIZE]
    k_gain,
    cos,  # f32 [capacity, SIZE / 2]
    sin,
    position,  # i64 [1], or [batch] where LINES
    q,  # f32 [batch, heads, SIZE]
    near_keys,
    near_values,
    words,
    halves,
    wide,
    table,
    members,
    places,
    offset,
    sink,
    ring,
    scale,  # of q, for powers of two
    epsilon,
    LINES: tl.constexpr,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    K_BITS: tl.constexpr,
    K_CHANNEL: tl.constexpr,
    K_ROTATE: tl.constexpr,
    V_BITS: tl.constexpr,
    V_CHANNEL: tl.constexpr,
    V_ROTATE: tl.constexpr,
    V_SKIP: tl.constexpr,
    RECORD: tl.constexpr,
):
    line = tl.program_id(0) // KEPT
    head = tl.program_id(0) % KEPT
    number = tl.load(members + head)
    at = tl.load(position + line * LINES)
    page = at // 64
    d = tl.arange(0, SIZE)
    g = tl.arange(0, ROWS)
    two = tl.arange(0, 2)
    here = qkv + line.to(tl.int64) * ((GROUP + 2) * KV * SIZE)
    queries = number * GROUP + tl.minimum(g, GROUP - 1)
    turned = _turned(here, 0, queries, d, cos, sin, at, q_gain, bias, epsilon, SIZE, NORM, BIAS) * scale
    # Two equal rows: a tensor of one row has no layout to turn in.
    key = _turned(
        here, GROUP * KV * SIZE, number + two * 0, d, cos, sin, at, k_gain, bias, epsilon, SIZE, NORM, BIAS
    )
    if K_ROTATE:
        turned = turned_by_hadamard(turned, ROWS, SIZE)
        key = turned_by_hadamard(key, 2, SIZE)
    into = q + (line * (GROUP * KV) + number * GROUP + g)[:, None] * SIZE + d[None, :]
    tl.store(into, turned, mask=(g < GROUP)[:, None])
    from_v = (GROUP + 1) * KV * SIZE + number * SIZE + (two * 0)[:, None] + d[None, :]
    value = tl.load(here + from_v).to(tl.float32)
    if BIAS:
        value += tl.load(bias + from_v)
    if V_ROTATE:
        value = turned_by_hadamard(value, 2, SIZE)
    first = (two == 0)[:, None] & (d >= 0)[None, :]
    place = place_of(table, line, places, page, sink, ring, offset, head, RECORD)
    lane = (line * KEPT + head) * 128
    row = (two * 0)[:, None] + d[None, :]
    if K_BITS == 16:
        tl.store(wide + place * 8 + (at % 64) * SIZE + row, key.to(wide.dtype.element_ty), mask=first)
    else:
        tl.store(
            near_keys + (lane + at % 128) * SIZE + row, key.to(near_keys.dtype.element_ty), mask=first
        )
    if V_BITS == 16:
        tl.store(
            wide + place * 8 + V_SKIP // 2 + (at % 64) * SIZE + row, value.to(wide.dtype.element_ty), mask=first
        )
    else:
        tl.store(
            near_values + (lane + at % 128) * SIZE + row, value.to(near_values.dtype.element_ty), mask=first
        )
    if K_BITS < 16 or V_BITS < 16:
        # The other half of what stands in 16 bits: nothing of it was written here.
        if (at % 64 == 63) & (page > 0):
            old = place_of(table, line, places, page - 1, sink, ring, offset, head, RECORD)
            n = tl.arange(0, 64)
            from_near = (lane + ((page - 1) % 2) * 64 + n)[:, None] * SIZE + d[None, :]
            if K_BITS < 16:
                x = tl.load(near_keys + from_near).to(tl.float32)
                store_codes(x, words, halves, old, K_BITS, K_CHANNEL, SIZE, 0)
            if V_BITS < 16:
                y = tl.load(near_values + from_near).to(tl.float32)
                store_codes(y, words, halves, old, V_BITS, V_CHANNEL, SIZE, V_SKIP)


@triton.jit
def _fields(words, J: tl.constexpr, BITS: tl.constexpr):
    """Field J of both halves of each word at the top of the mantissa of a float16: 1 + code / 2^BITS."""
    PLACE: tl.constexpr = 10 - BITS
    if J * BITS >= PLACE:
        moved = words >> (J * BITS - PLACE)
    else:
        moved = words << (PLACE - J * BITS)
    return (moved & ((((1 << BITS) - 1) << PLACE) * 0x00010001)) | 0x3C003C00


@triton.jit
def _half(field):
    """The lower half of each word as float16."""
    return field.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _pairs(words, J: tl.constexpr, BITS: tl.constexpr):
    """Field J of words [64, W]: float16 [64, 2 W], neighbouring channels."""
    both = _fields(words, J, BITS)
    return tl.reshape(tl.join(_half(both), _half(both >> 16)), [words.shape[0], 2 * words.shape[1]])


@triton.jit
def _quads(words, J: tl.constexpr, BITS: tl.constexpr):
    """Fields J and J + 8 / BITS of a few words [64, W]: float16 [64, 4 W]."""
    other = _pairs(words, J + 8 // BITS, BITS)
    return tl.reshape(tl.join(_pairs(words, J, BITS), other), [words.shape[0], 4 * words.shape[1]])


@triton.jit
def _scales(pairs, low_at, step_at, BITS: tl.constexpr):
    """(factor, what is added) that make stored values of 1 + code / 2^BITS, float16."""
    low = tl.load(pairs + low_at)
    step = tl.load(pairs + step_at).to(tl.float32) * (1 << BITS)
    if BITS < 8:
        low = (low.to(tl.float32) - step).to(tl.float16)
    return step.to(tl.float16), low


@triton.jit
def _values(numbers, step, low, BITS: tl.constexpr):
    if BITS == 8:
        # 256 steps taken off the minimum would cost it an eighth of a step.
        numbers = numbers - 1.0
    return numbers * step + low


@triton.jit
def _key_channel(RUN: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr):
    """The channels of a run of keys, in order."""
    W: tl.constexpr = SIZE * BITS // 32
    if BITS == 16:
        return tl.arange(0, SIZE)
    elif W < 8:
        i = tl.arange(0, 4 * W)
        return RUN * 2 * W + i // 2 + (i % 2) * (16 // BITS // 2) * 2 * W
    else:
        B: tl.constexpr = W if W < 32 else 32
        return (RUN % (16 // BITS)) * 2 * W + (RUN // (16 // BITS)) * 2 * B + tl.arange(0, 2 * B)


@triton.jit
def _value_channel(RUN: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr):
    """The channels of a run of values, in order: a run of 16 words and more is one half of them."""
    W: tl.constexpr = SIZE * BITS // 32
    if BITS == 16 or W < 16:
        return _key_channel(RUN, SIZE, BITS)
    else:
        return _key_channel_half(RUN, SIZE, BITS)


@triton.jit
def _key_channel_half(RUN: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr):
    W: tl.constexpr = SIZE * BITS // 32
    B: tl.constexpr = W if W < 32 else 32
    PAIR: tl.constexpr = RUN // 2
    first = (PAIR % (16 // BITS)) * 2 * W + (PAIR // (16 // BITS)) * 2 * B + RUN % 2
    return first + 2 * tl.arange(0, B)


@triton.constexpr_function
def _group(pair: int, size: int, bits: int) -> int:
    """Which 64 channels a run of pairs belongs to."""
    words = size * bits // 32
    fields = 16 // bits
    if words < 8:
        return 0
    return ((pair % fields) * 2 * words + (pair // fields) * 2 * min(words, 32)) // 64


@triton.jit
def _words_of(words, at, n, SKIP: tl.constexpr, BLOCK: tl.constexpr, W: tl.constexpr, B: tl.constexpr):
    """Columns BLOCK B .. of the words [64, W] of a page, of positions n."""
    return tl.load(words + at * 4 + SKIP // 4 + n[:, None] * W + (BLOCK * B + tl.arange(0, B))[None, :])


@triton.jit
def _far_scores(
    queries, words, halves, wide, at, n,
    ROWS: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr, CHANNEL: tl.constexpr, RUNS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Scores [ROWS, n] of positions n of a stored page; queries: by run, as they are multiplied."""
    scores = tl.zeros([ROWS, n.shape[0]], tl.float32)
    if BITS == 16:
        page = tl.load(wide + at * 8 + n[:, None] * SIZE + tl.arange(0, SIZE)[None, :])
        if WIDE:
            page = page.to(tl.float32)
        scores = tl.dot(queries[0], tl.trans(page), scores, input_precision="ieee")
    else:
        W: tl.constexpr = SIZE * BITS // 32
        B: tl.constexpr = W if W < 32 else 32
        FIELDS: tl.constexpr = 16 // BITS
        GROUPS: tl.constexpr = SIZE // 64
        pairs = halves + at * 8 + 4 * SIZE * BITS
        steps = ()
        for G in tl.static_range(0 if CHANNEL else GROUPS):
            steps = steps + (_scales(pairs, n * GROUPS + G, (64 + n) * GROUPS + G, BITS),)
        for RUN in tl.static_range(RUNS):
            code = _words_of(words, at, n, 0, 0 if W < 8 else RUN // FIELDS, W, B)
            numbers = _quads(code, RUN, BITS) if W < 8 else _pairs(code, RUN % FIELDS, BITS)
            if CHANNEL:
                c = _key_channel(RUN, SIZE, BITS)
                step, low = _scales(pairs, c, SIZE + c, BITS)
                numbers = _values(numbers, step[None, :], low[None, :], BITS)
            else:
                step, low = steps[_group(RUN, SIZE, BITS)]
                numbers = _values(numbers, step[:, None], low[:, None], BITS)
            scores = tl.dot(queries[RUN], tl.trans(numbers), scores)
    return scores


@triton.jit
def _add_far_values(
    parts, weights, fade, words, halves, wide, at, n,
    ROWS: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr, CHANNEL: tl.constexpr, RUNS: tl.constexpr,
    SKIP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The runs of the sum, faded, and weights [ROWS, n] times positions n of a stored page."""
    found = ()
    if BITS == 16:
        page = tl.load(wide + at * 8 + SKIP // 2 + n[:, None] * SIZE + tl.arange(0, SIZE)[None, :])
        if WIDE:
            page = page.to(tl.float32)
        found = (tl.dot(weights.to(page.dtype), page, parts[0] * fade[:, None], input_precision="ieee"),)
    else:
        W: tl.constexpr = SIZE * BITS // 32
        B: tl.constexpr = W if W < 32 else 32
        FIELDS: tl.constexpr = 16 // BITS
        SPLIT: tl.constexpr = 2 if W >= 16 else 1
        GROUPS: tl.constexpr = SIZE // 64
        pairs = halves + at * 8 + (SKIP + 8 * SIZE * BITS) // 2
        short = weights.to(tl.float16)
        steps = ()
        for G in tl.static_range(0 if CHANNEL else GROUPS):
            steps = steps + (_scales(pairs, n * GROUPS + G, (64 + n) * GROUPS + G, BITS),)
        for RUN in tl.static_range(RUNS):
            code = _words_of(words, at, n, SKIP, 0 if W < 8 else RUN // SPLIT // FIELDS, W, B)
            if W < 8:
                numbers = _quads(code, RUN, BITS)
            elif SPLIT == 1:
                numbers = _pairs(code, RUN % FIELDS, BITS)
            else:
                numbers = _half(_fields(code, RUN // SPLIT % FIELDS, BITS) >> (16 * (RUN % 2)))
            if CHANNEL:
                c = _value_channel(RUN, SIZE, BITS)
                step, low = _scales(pairs, c, SIZE + c, BITS)
                numbers = _values(numbers, step[None, :], low[None, :], BITS)
            else:
                step, low = steps[_group(RUN // SPLIT, SIZE, BITS)]
                numbers = _values(numbers, step[:, None], low[:, None], BITS)
            found = found + (tl.dot(short, numbers, parts[RUN] * fade[:, None]),)
    return found


@triton.jit
def _short(x, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """x rounded to DTYPE, as it is multiplied."""
    if WIDE:
        return x.to(DTYPE).to(tl.float32)
    else:
        return x.to(DTYPE)


@triton.jit
def _visible(scores, place, at, sinks, windows, lengths):
    """Scores of the positions that each row's rule lets it see; -inf for others."""
    seen = (place[None, :] < sinks[:, None]) | (place[None, :] > at - windows[:, None])
    seen = (seen | (at + 1 < lengths)[:, None]) & (place <= at)[None, :]
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def decode_kernel(
    q,  # f32 [batch, heads, SIZE], turned, times scale log2(e)
    near_keys,
    near_values,
    near_words,  # near_values as i32
    words,
    halves,
    wide,
    table,
    members,
    rules,  # i32 [heads, 3]: sink, window, min_length
    position,
    parts,  # f32 [batch KEPT, MOST, ROWS (SIZE + 2)]
    counters,  # i32 [batch KEPT]: zero between launches
    out,  # [batch, heads SIZE]
    places,
    offset,
    sink,
    ring,
    LINES: tl.constexpr,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    SIZE: tl.constexpr,
    K_BITS: tl.constexpr,
    K_CHANNEL: tl.constexpr,
    K_RUNS: tl.constexpr,
    V_BITS: tl.constexpr,
    V_CHANNEL: tl.constexpr,
    V_ROTATE: tl.constexpr,
    V_RUNS: tl.constexpr,
    V_SKIP: tl.constexpr,
    RECORD: tl.constexpr,
    MASKED: tl.constexpr,  # whether a rule hides anything
    MOST: tl.constexpr,
    EACH: tl.constexpr,  # pages of a program before another one helps
    STEP: tl.constexpr,  # positions at a time: 64 or 32
    WIDE: tl.constexpr,  # multiply in float32: the interpreter has no bfloat16
    GENERATION: tl.constexpr,
):
    DTYPE: tl.constexpr = wide.dtype.element_ty
    pair = tl.program_id(0)
    split = tl.program_id(1)
    line = pair // KEPT
    head = pair % KEPT
    number = tl.load(members + head)
    at = tl.load(position + line * LINES).to(tl.int32)
    page = at // 64
    g = tl.arange(0, ROWS)
    steps = 64 // STEP
    rows = number * GROUP + tl.minimum(g, GROUP - 1)
    sinks = tl.load(rules + rows * 3)
    windows = tl.load(rules + rows * 3 + 1)
    lengths = tl.load(rules + rows * 3 + 2)
    first = tl.zeros([], tl.int32)
    front = tl.zeros([], tl.int32)
    if MASKED:
        lows = tl.where(at + 1 < lengths, 0, tl.maximum(at - windows + 1, 0))
        first = tl.min(lows, axis=0) // 64
        front = tl.minimum((tl.max(sinks, axis=0) + 63) // 64, first)
    pages = front + page - first + 1
    # Pages that are read in their stored form.
    far = tl.minimum(front, tl.maximum(page - 1, 0)) + tl.maximum(page - 1 - first, 0)
    active = tl.maximum(1, tl.minimum(tl.num_programs(1), (pages + EACH - 1) // EACH))
    if split >= active:
        return
    mine = q + (line * (GROUP * KV) + rows)[:, None] * SIZE
    queries = ()
    for RUN in tl.static_range(K_RUNS):
        some = tl.load(mine + _key_channel(RUN, SIZE, K_BITS)[None, :])
        queries = queries + (_short(some, DTYPE if K_BITS == 16 else tl.float16, WIDE and K_BITS == 16),)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = ()
    for RUN in tl.static_range(V_RUNS):
        c = _value_channel(RUN, SIZE, V_BITS)
        acc = acc + (tl.zeros([ROWS, c.shape[0]], tl.float32),)
    for step in range(0, (far - split + active - 1) // active * steps):
        tile = split + step // steps * active
        n = step % steps * STEP + tl.arange(0, STEP)
        this = tl.where(tile < front, tile, first + tile - front)
        place = place_of(table, line, places, this, sink, ring, offset, head, RECORD)
        scores = _far_scores(
            queries, words, halves, wide, place, n, ROWS, SIZE, K_BITS, K_CHANNEL, K_RUNS, WIDE
        )
        if MASKED:
            scores = _visible(scores, this * 64 + n, at, sinks, windows, lengths)
        higher = tl.maximum(top, tl.max(scores, axis=1))
        # A row may see nothing of its program's pages so far.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - level[:, None])
        fade = tl.exp2(top - level)
        total = total * fade + tl.sum(weights, axis=1)
        acc = _add_far_values(
            acc, weights, fade, words, halves, wide, place, n,
            ROWS, SIZE, V_BITS, V_CHANNEL, V_RUNS, V_SKIP, WIDE,
        )  # fmt: skip
        top = higher

    # The page of the query and the one before it, by the programs that have the fewest others.
    all_channels = tl.arange(0, SIZE)
    lane = (line * KEPT + head) * 128
    whole = _short(tl.load(mine + all_channels[None, :]), DTYPE, WIDE)
    # One or two pages: nothing to load ahead, and the local memory is the other loop's.
    begin = far + (split + active - far % active) % active
    for step in tl.range(0, (pages - begin + active - 1) // active * steps, num_stages=1):
        tile = begin + step // steps * active
        n = step % steps * STEP + tl.arange(0, STEP)
        this = tl.where(tile < front, tile, first + tile - front)
        known = this * 64 + n <= at
        place = place_of(table, line, places, this, sink, ring, offset, head, RECORD)
        if K_BITS == 16:
            from_k = wide + place * 8 + n[:, None] * SIZE
        else:
            from_k = near_keys + (lane + (this % 2) * 64 + n)[:, None] * SIZE
        held = tl.load(from_k + all_channels[None, :], mask=known[:, None], other=0.0)
        if WIDE:
            held = held.to(tl.float32)
        scores = tl.dot(whole, tl.trans(held), input_precision="ieee")
        scores = _visible(scores, this * 64 + n, at, sinks, windows, lengths)
        higher = tl.maximum(top, tl.max(scores, axis=1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - level[:, None])
        fade = tl.exp2(top - level)
        total = total * fade + tl.sum(weights, axis=1)
        if V_BITS == 16:
            from_v = wide + place * 8 + V_SKIP // 2 + n[:, None] * SIZE
        else:
            from_v = near_values + (lane + (this % 2) * 64 + n)[:, None] * SIZE
        found = ()
        for RUN in tl.static_range(V_RUNS):
            if V_BITS == 16 or SIZE * V_BITS // 32 < 16:
                more = tl.load(
                    from_v + _value_channel(RUN, SIZE, V_BITS)[None, :], mask=known[:, None], other=0.0
                )
            else:
                # Every other channel of a run: of whole words, as neighbours lie.
                column = (_value_channel(RUN, SIZE, V_BITS) // 2)[None, :]
                two = tl.load(near_words + (lane + (this % 2) * 64 + n)[:, None] * (SIZE // 2) + column)
                more = (two >> (16 * (RUN % 2))).to(tl.int16).to(DTYPE, bitcast=True)
                more = tl.where(known[:, None], more, tl.zeros([1, 1], DTYPE))
            if WIDE:
                more = more.to(tl.float32)
            found = found + (
                tl.dot(weights.to(more.dtype), more, acc[RUN] * fade[:, None], input_precision="ieee"),
            )
        acc = found
        top = higher

    each = ROWS * (SIZE + 2)
    lines = parts + pair.to(tl.int64) * (MOST * each)
    block = lines + split * each
    for RUN in tl.static_range(V_RUNS):
        c = _value_channel(RUN, SIZE, V_BITS)
        tl.store(block + g[:, None] * SIZE + c[None, :], acc[RUN])
    tl.store(block + ROWS * SIZE + g, top)
    tl.store(block + ROWS * (SIZE + 1) + g, total)
    if arrive(counters + pair, GENERATION, "acq_rel") == active - 1:
        tl.debug_barrier()
        sum_of = tl.zeros([ROWS, SIZE], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        for i in range(active):
            block = lines + i * each
            # Past the first-level cache, which knows nothing of other multiprocessors.
            theirs = tl.load(block + g[:, None] * SIZE + all_channels[None, :], cache_modifier=".cg")
            their_top = tl.load(block + ROWS * SIZE + g, cache_modifier=".cg")
            their_total = tl.load(block + ROWS * (SIZE + 1) + g, cache_modifier=".cg")
            higher = tl.maximum(top, their_top)
            level = tl.where(higher == float("-inf"), 0.0, higher)
            fade = tl.exp2(top - level)
            weight = tl.exp2(their_top - level)
            sum_of = sum_of * fade[:, None] + theirs * weight[:, None]
            total = total * fade + their_total * weight
            top = higher
        sum_of = sum_of / total[:, None]
        if V_ROTATE:
            sum_of = turned_by_hadamard(sum_of, ROWS, SIZE)
        into = out + (line * (GROUP * KV) + number * GROUP + g)[:, None] * SIZE + all_channels[None, :]
        tl.store(into, sum_of.to(out.dtype.element_ty), mask=(g < GROUP)[:, None])
        tl.store(counters + pair, 0)


@dataclass(frozen=True)
class Scratch:
    """Where the queries of a layer lie, and where the programs of a launch meet. Launches that follow one another share it."""

    q: Tensor
    parts: Tensor
    counters: Tensor


def rows_of(group: int) -> int:
    """Rows that the matrix cores take for the queries of a key."""
    return max(16, triton.next_power_of_2(group))


def scratch(batch: int, heads: int, kv_heads: int, size: int, device: torch.device) -> Scratch:
    rows = rows_of(heads // kv_heads)
    return Scratch(
        torch.empty(batch * heads * size, device=device),
        torch.empty(batch * kv_heads * MOST_SPLITS * rows * (size + 2), device=device),
        torch.zeros(batch * kv_heads, dtype=torch.int32, device=device),
    )


def _runs(forms: Forms) -> tuple[int, int]:
    """Runs of channels of keys and of values."""

    def keys(bits: int) -> int:
        words = forms.size * bits // 32
        return 1 if bits == 16 else 16 // bits // 2 if words < 8 else (16 // bits) * max(1, words // 32)

    values = forms.values.bits
    split = 2 if values < 16 and forms.size * values // 32 >= 16 else 1
    return keys(forms.keys.bits), keys(values) * split


def _shared(pages: Pages, batch: int, heads: int, kv_heads: int) -> tuple[dict[str, str], dict[str, Any]]:
    """The types of the arguments and the constants that both kernels have."""
    forms, dtype = pages.forms, pointer_type(pages.dtype)
    types = {
        "position": "*i64",
        "q": "*fp32",
        "near_keys": dtype,
        "near_values": dtype,
        "near_words": "*i32",
        "words": "*i32",
        "halves": "*fp16",
        "wide": dtype,
        "table": "*i64",
        "members": "*i32",
        **dict.fromkeys(("places", "offset", "sink", "ring"), "i32"),
    }
    constants = {
        "KV": kv_heads,
        "GROUP": heads // kv_heads,
        "ROWS": rows_of(heads // kv_heads),
        "KEPT": pages.heads,
        "SIZE": forms.size,
        "K_BITS": forms.keys.bits,
        "K_CHANNEL": forms.keys.channel,
        "V_BITS": forms.values.bits,
        "V_CHANNEL": forms.values.channel,
        "V_ROTATE": forms.values.rotate,
        "V_SKIP": forms.keys.size_bytes(forms.size),
        "RECORD": forms.record_bytes,
    }
    return types, constants


_POINTERS = ("q", "near_keys", "near_values", "near_words", "words", "halves", "wide", "table", "members", "position")


def append_spec(
    pages: Pages, batch: int, heads: int, kv_heads: int, norm: bool, bias: bool, lines: bool = False
) -> KernelSpec:
    """lines: positions [batch], one for each sequence, instead of one for all."""
    types, constants = _shared(pages, batch, heads, kv_heads)
    dtype = pointer_type(pages.dtype)
    signature = {
        **{"qkv": dtype, "bias": "*fp32", "q_gain": "*fp32", "k_gain": "*fp32", "cos": "*fp32", "sin": "*fp32"},
        **types,
        "scale": "fp32",
        "epsilon": "fp32",
    }
    return KernelSpec(
        name=f"attention_append_{dtype[1:]}",
        fn=append_kernel,
        signature={name: signature[name] for name in append_kernel.arg_names if name in signature},
        constants={
            **constants, "K_ROTATE": pages.forms.keys.rotate, "LINES": int(lines), "NORM": norm, "BIAS": bias,
        },  # fmt: skip
        divisible=("qkv", "bias", "q_gain", "k_gain", "cos", "sin", *_POINTERS),
        num_warps=8 if pages.forms.size > 128 else 4,
        num_stages=1,
        batch=batch,
        kind="attention_append",
        grid=(batch * pages.heads, 1, 1),
    )


def decode_spec(
    pages: Pages,
    batch: int,
    heads: int,
    kv_heads: int,
    masked: bool,
    arch: str,
    context: int,
    tile: dict[str, int] | None = None,
    lines: bool = False,
) -> KernelSpec:
    """context: positions that may come, which bound the programs. `tile` overrides the choice of warps, stages and so on."""
    types, constants = _shared(pages, batch, heads, kv_heads)
    dtype = pointer_type(pages.dtype)
    runs = _runs(pages.forms)
    tile = _tile(pages.forms, arch) | (tile or {})
    keys = min(context, (pages.ring + min(pages.sink, 1 << 20)) * 64)
    wanted = tile["RESIDENT"] * processors_of(arch) // (batch * pages.heads)
    fits = max(1, min(MOST_SPLITS, triton.cdiv(keys, 64 * tile["EACH"]), wanted))
    signature = {**types, "rules": "*i32", "parts": "*fp32", "counters": "*i32", "out": dtype}
    constants |= {
        "K_RUNS": runs[0],
        "V_RUNS": runs[1],
        "LINES": int(lines),
        "MASKED": masked,
        "MOST": MOST_SPLITS,
        "EACH": tile["EACH"],
        "STEP": tile["STEP"],
        "WIDE": pages.dtype == torch.bfloat16 and triton.knobs.runtime.interpret,
        "GENERATION": generation(arch),
    }
    return KernelSpec(
        name=f"attention_decode_{dtype[1:]}_{pages.forms.keys.bits}_{pages.forms.values.bits}",
        fn=decode_kernel,
        signature={name: signature[name] for name in decode_kernel.arg_names if name in signature},
        constants=constants,
        divisible=(*_POINTERS, "rules", "parts", "counters", "out"),
        num_warps=tile["WARPS"],
        num_stages=tile["STAGES"],
        batch=batch,
        kind="attention_decode",
        grid=(batch * pages.heads, fits, 1),
    )


def _tile(forms: Forms, arch: str) -> dict[str, int]:
    """RESIDENT: programs for each multiprocessor. Not tuned on a card yet: registers and spills of the compiled code chose.

    A run of 16 channels is work for one warp: more would unpack the same words again (the compiled loop has as many
    instructions a warp with two). Pages of 16 bits are one run.
    """
    warps = 4 if forms.values.bits == 16 else 1
    if forms.size > 128:
        warps *= 2
    small = arch.startswith(("gfx11", "gfx12"))
    if small:
        warps *= 2
    step = 32 if small or forms.size > 128 or 8 in (forms.keys.bits, forms.values.bits) else 64
    return {"WARPS": warps, "STAGES": 2, "EACH": 2, "STEP": step, "RESIDENT": max(2, 8 // warps)}



def append(
    pages: Pages,
    qkv: Tensor,
    bias: Tensor | None,
    gains: tuple[Tensor, Tensor] | None,
    angles: tuple[Tensor, Tensor],
    position: Tensor,
    room: Scratch,
    shape: tuple[int, int],
    scale: float,
    epsilon: float,
) -> None:
    """Puts the keys and values of one token into the pages, and its queries into `room`, for these heads of a layer.

    qkv: [batch, (heads + 2 KV) size]. shape: query and KV heads of the layer. position: int64 [1], or [batch].
    """
    cos, sin = angles
    spec = append_spec(
        pages, len(qkv), *shape, gains is not None, bias is not None, lines=len(position) > 1
    )
    q_gain, k_gain = gains or (cos, cos)
    launch(
        spec, qkv, cos if bias is None else bias, q_gain, k_gain, cos, sin, position, room.q,
        pages.near_keys, pages.near_values, *pages.words(), pages.table, pages.members, pages.table.shape[1],
        pages.offset, pages.sink, pages.ring, scale * LOG2E, epsilon,
    )  # fmt: skip


def decode(
    pages: Pages,
    rules: Tensor,
    masked: bool,
    position: Tensor,
    room: Scratch,
    out: Tensor,
    shape: tuple[int, int],
    arch: str,
    context: int,
    tile: dict[str, int] | None = None,
) -> None:
    """Attention of the queries in `room` over the pages, into the columns of these heads of out [batch, heads size]."""
    spec = decode_spec(
        pages, len(out), *shape, masked, arch, context, tile, lines=len(position) > 1
    )
    launch(
        spec, room.q, pages.near_keys, pages.near_values, pages.near_values.view(torch.int32), *pages.words(), pages.table, pages.members, rules, position,
        room.parts, room.counters, out, pages.table.shape[1], pages.offset, pages.sink, pages.ring,
    )  # fmt: skip
