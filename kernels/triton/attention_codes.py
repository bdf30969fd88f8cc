# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
# Triton adds tuples; it does not unpack them into one.
# ruff: noqa: RUF005
"""Products with stored pages, inside kernels: codes become float16 in registers.

A shift and an AND-OR make two numbers 1 + code / 2^b of a word's field, a packed multiply-add the stored values, whose
rounding is that of 16-bit pages. A field of all words holds a run of neighbouring channels (attention_pages.py); runs are
multiplied one after the other, so that registers of codes become operands of matrix instructions without a detour through
local memory. With a join of all fields Triton would take that detour.
"""

import triton
import triton.language as tl


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
def key_channel(RUN: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr):
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
def value_channel(RUN: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr):
    """The channels of a run of values, in order: a run of 16 words and more is one half of them."""
    W: tl.constexpr = SIZE * BITS // 32
    if BITS == 16 or W < 16:
        return key_channel(RUN, SIZE, BITS)
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
def far_scores(
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
                c = key_channel(RUN, SIZE, BITS)
                step, low = _scales(pairs, c, SIZE + c, BITS)
                numbers = _values(numbers, step[None, :], low[None, :], BITS)
            else:
                step, low = steps[_group(RUN, SIZE, BITS)]
                numbers = _values(numbers, step[:, None], low[:, None], BITS)
            scores = tl.dot(queries[RUN], tl.trans(numbers), scores)
    return scores


@triton.jit
def add_far_values(
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
                c = value_channel(RUN, SIZE, BITS)
                step, low = _scales(pairs, c, SIZE + c, BITS)
                numbers = _values(numbers, step[None, :], low[None, :], BITS)
            else:
                step, low = steps[_group(RUN // SPLIT, SIZE, BITS)]
                numbers = _values(numbers, step[:, None], low[:, None], BITS)
            found = found + (tl.dot(short, numbers, parts[RUN] * fade[:, None]),)
    return found
