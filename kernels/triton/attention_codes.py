# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
# Triton adds tuples; it does not unpack them into one.
# ruff: noqa: RUF005
"""Products with stored pages, inside kernels: codes become float16 in registers.

A shift and an AND-OR make two numbers 2^b + code of a word's field, a packed multiply-add the stored values, whose rounding
is that of 16-bit pages. The two halves of a word follow one another along the sum (channels of keys, positions of values):
on NVIDIA a register of two numbers is a register of a matrix instruction's operand as it stands. Fields are multiplied one
after the other; with a join of all fields Triton would go through local memory.

Minimums and scales of 4 and 2 bits are eighths (attention_record.py), and so are the numbers: queries are multiplied by 8
beforehand, and sums of values at the end.

Keys and values are the left operands and queries and weights the right ones: matrix instructions have 16 rows and 8 columns,
and a key has few queries.

Order of a sum: each of the four threads that share a row takes neighbouring words, so that it reads them at once. `QUAD` is
4 for the instructions of NVIDIA, with two words of a thread side by side in the sum (Triton's `kWidth` of 4), and 1 where
words are taken as they come.
"""

import triton
import triton.language as tl

from nstf.kernels.triton.attention_record import unit_of


@triton.jit
def _fields(words, J: tl.constexpr, BITS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Field J of both halves of each word as two float16 in a word: 2^BITS + code, for 8 bits 1024 + code."""
    PLACE: tl.constexpr = 0 if BITS == 8 else 10 - BITS
    if J * BITS >= PLACE:
        moved = words >> (J * BITS - PLACE)
    else:
        moved = words << (PLACE - J * BITS)
    if ASSEMBLY:
        # One instruction: of a mask and a base that it sees apart, the compiler makes two.
        if BITS == 8:
            return tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x00FF00FF, 0x64006400, 0xEA;", "=r,r", [moved], tl.int32, True, 1
            )
        elif BITS == 4:
            return tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x03C003C0, 0x4C004C00, 0xEA;", "=r,r", [moved], tl.int32, True, 1
            )
        else:
            return tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x03000300, 0x44004400, 0xEA;", "=r,r", [moved], tl.int32, True, 1
            )
    else:
        BASE: tl.constexpr = 25 if BITS == 8 else 15 + BITS
        return (moved & ((((1 << BITS) - 1) << PLACE) * 0x00010001)) | (BASE * 0x04000400)


@triton.jit
def _half(field):
    """The lower half of each word as float16."""
    return field.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _values(fields, low, step, BITS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """(lower, upper) float16: low + step code of each word's two fields. low, step: two float16 in a word, of that shape."""
    if ASSEMBLY:
        if BITS == 8:
            # 256 steps taken off the minimum would cost it an eighth of a step.
            lower, upper = tl.inline_asm_elementwise(
                "{ .reg .b32 x; mov.b32 x, 0xE400E400; add.rn.f16x2 x, $2, x; "
                "fma.rn.f16x2 x, x, $4, $3; mov.b32 {$0, $1}, x; }",
                "=h,=h,r,r,r", [fields, low, step], (tl.float16, tl.float16), True, 1,
            )  # fmt: skip
        else:
            lower, upper = tl.inline_asm_elementwise(
                "{ .reg .b32 x; fma.rn.f16x2 x, $2, $4, $3; mov.b32 {$0, $1}, x; }",
                "=h,=h,r,r,r", [fields, low, step], (tl.float16, tl.float16), True, 1,
            )  # fmt: skip
    else:
        lower = _half(fields)
        upper = _half(fields >> 16)
        if BITS == 8:
            lower = lower - 1024.0
            upper = upper - 1024.0
        lower = lower * _half(step) + _half(low)
        upper = upper * _half(step >> 16) + _half(low >> 16)
    return lower, upper


@triton.jit
def _lowered(low, step, BITS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Minimums less 2^BITS steps: two float16 in a word, as `_values` needs them."""
    if BITS == 8:
        return low
    elif ASSEMBLY:
        # -16 or -4, twice.
        if BITS == 4:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 m; mov.b32 m, 0xCC00CC00; fma.rn.f16x2 $0, $2, m, $1; }",
                "=r,r,r", [low, step], tl.int32, True, 1,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 m; mov.b32 m, 0xC400C400; fma.rn.f16x2 $0, $2, m, $1; }",
                "=r,r,r", [low, step], tl.int32, True, 1,
            )  # fmt: skip
    else:
        one = (_half(low).to(tl.float32) - _half(step).to(tl.float32) * (1 << BITS)).to(tl.float16)
        two = (_half(low >> 16).to(tl.float32) - _half(step >> 16).to(tl.float32) * (1 << BITS)).to(
            tl.float16
        )
        return _word(one) | (_word(two) << 16)


@triton.jit
def _codes(words, J: tl.constexpr, BITS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """(lower, upper) float16: field J of both halves of each word, times 2^(J BITS mod 8 - 24).

    The lowest bits of a float16 without an exponent: codes as they stand. NVIDIA's matrix instructions take such numbers
    as they are; AMD's of MI200 (CDNA2) take them for 0.
    """
    return _halves_of(
        (words >> (J * BITS // 8 * 8)) & ((((1 << BITS) - 1) << (J * BITS % 8)) * 0x00010001), ASSEMBLY
    )


@triton.jit
def _word(x):
    """The bits of a float16 as the lower half of a word."""
    return x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _twice(x):
    """A float16 in both halves of a word."""
    word = _word(x)
    return word | (word << 16)


@triton.jit
def _quads(words, QUAD: tl.constexpr):
    """Columns of words [R, W] in the order of the sum: column 2 QUAD i + 2 t + r of the result is t W / QUAD + 2 i + r."""
    R: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    if QUAD == 1 or W <= 2 * QUAD:
        return words
    else:
        apart = tl.reshape(words, [R, QUAD, W // (2 * QUAD), 2])
        return tl.reshape(tl.permute(apart, (0, 2, 1, 3)), [R, W])


@triton.jit
def _from_quads(i, W: tl.constexpr, QUAD: tl.constexpr):
    """Which column of W stands in place i of that order."""
    if QUAD == 1 or W <= 2 * QUAD:
        return i
    else:
        return (i // 2) % QUAD * (W // QUAD) + i // (2 * QUAD) * 2 + i % 2


@triton.jit
def position_in(part, STEP: tl.constexpr, QUAD: tl.constexpr):
    """The positions of a page that the rows of a step's numbers are: of STEP neighbours."""
    i = tl.arange(0, STEP)
    return part * STEP + 2 * _from_quads(i // 2, STEP // 2, QUAD) + i % 2


@triton.jit
def key_channel(RUN: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr, QUAD: tl.constexpr):
    """The channels of a run of keys, in the order of the sum."""
    W: tl.constexpr = SIZE * BITS // 32
    if BITS == 16:
        return tl.arange(0, SIZE)
    elif W < 8:
        i = tl.arange(0, 4 * W)
        word = _from_quads(i // 2 % W, W, QUAD)
        return (RUN + i // (2 * W) * (16 // BITS // 2)) * 2 * W + 2 * word + i % 2
    else:
        B: tl.constexpr = W if W < 32 else 32
        i = tl.arange(0, 2 * B)
        first = (RUN % (16 // BITS)) * 2 * W + (RUN // (16 // BITS)) * 2 * B
        return first + 2 * _from_quads(i // 2, B, QUAD) + i % 2


@triton.jit
def value_channel(RUN: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr):
    """The channels of a run of values, in order."""
    C: tl.constexpr = SIZE * BITS // 16
    if BITS == 16:
        return tl.arange(0, SIZE)
    elif C < 16:
        i = tl.arange(0, 2 * C)
        return (RUN + i // C * (16 // BITS // 2)) * C + i % C
    else:
        B: tl.constexpr = C if C < 32 else 32
        return (RUN % (16 // BITS)) * C + RUN // (16 // BITS) * B + tl.arange(0, B)


@triton.constexpr_function
def key_group(run: int, size: int, bits: int) -> int:
    """Which 64 channels a run of keys belongs to."""
    words, fields = size * bits // 32, 16 // bits
    return 0 if words < 8 else ((run % fields) * 2 * words + (run // fields) * 2 * min(words, 32)) // 64


@triton.constexpr_function
def value_group(run: int, size: int, bits: int) -> int:
    """Which 64 channels a run of values belongs to."""
    words, fields = size * bits // 16, 16 // bits
    return 0 if words < 16 else ((run % fields) * words + run // fields * min(words, 32)) // 64


@triton.jit
def _halves_of(words, ASSEMBLY: tl.constexpr):
    """(lower, upper) float16 of each word."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], (tl.float16, tl.float16), True, 1
        )
    else:
        return _half(words), _half(words >> 16)


@triton.jit
def _folded_scores(
    queries, words, at, n,
    ROWS: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr, RUNS: tl.constexpr,
    QUAD: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Scores [n, ROWS] of keys by channel: the sum of (q step) code over the channels, and the sum of q low, once a page.

    Queries are not multiplied by `unit_of` before, but scores after: q step has to stay within float16.
    """
    N: tl.constexpr = n.shape[0]
    W: tl.constexpr = SIZE * BITS // 32
    B: tl.constexpr = W if W < 32 else 32
    FIELDS: tl.constexpr = 16 // BITS
    scales = words + at * 4 + 2 * SIZE * BITS
    scores = tl.zeros([N, ROWS], tl.float32)
    base = tl.zeros([16, ROWS], tl.float32)  # 16 equal rows: what instructions have
    none = tl.zeros([16, B], tl.int32)
    for RUN in tl.static_range(RUNS):
        column = RUN // FIELDS * B + tl.arange(0, B)
        code = _quads(tl.load(words + at * 4 + n[:, None] * W + column[None, :]), QUAD)
        lower, upper = _codes(code, RUN % FIELDS, BITS, ASSEMBLY)
        pair = (RUN % FIELDS) * W + RUN // FIELDS * B + _from_quads(tl.arange(0, B), B, QUAD)
        one, two = _halves_of(tl.load(scales + SIZE // 2 + pair), ASSEMBLY)
        low_one, low_two = _halves_of(tl.load(scales + pair)[None, :] + none, ASSEMBLY)
        step = tl.reshape(tl.join(one, two), [2 * B])
        # All fields in the units of the first.
        turned = queries[RUN] * (step * (1.0 / (1 << ((RUN % FIELDS) * BITS % 8))))[:, None]
        scores = tl.dot(tl.reshape(tl.join(lower, upper), [N, 2 * B]), turned, scores)
        base = tl.dot(tl.reshape(tl.join(low_one, low_two), [16, 2 * B]), queries[RUN], base)
    return scores * (16777216.0 * unit_of(BITS)) + (tl.max(base, axis=0) * unit_of(BITS))[None, :]


@triton.jit
def far_scores(
    queries, words, halves, wide, at, n,
    ROWS: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr, CHANNEL: tl.constexpr, RUNS: tl.constexpr,
    QUAD: tl.constexpr, WIDE: tl.constexpr, ASSEMBLY: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Scores [n, ROWS] of positions n of a stored page; queries: by run [channels, ROWS], as they are multiplied."""
    N: tl.constexpr = n.shape[0]
    scores = tl.zeros([N, ROWS], tl.float32)
    if BITS == 16:
        page = tl.load(wide + at * 8 + n[:, None] * SIZE + tl.arange(0, SIZE)[None, :])
        if WIDE:
            page = page.to(tl.float32)
        scores = tl.dot(page, queries[0], scores, input_precision="ieee")
    elif FOLD:
        scores = _folded_scores(queries, words, at, n, ROWS, SIZE, BITS, RUNS, QUAD, ASSEMBLY)
    else:
        W: tl.constexpr = SIZE * BITS // 32
        B: tl.constexpr = W if W < 32 else 32
        FIELDS: tl.constexpr = 16 // BITS
        PAIRS: tl.constexpr = 2 * B if W < 8 else B  # of channels in a run
        pairs = halves + at * 8 + 4 * SIZE * BITS
        scales = words + at * 4 + 2 * SIZE * BITS
        zero = tl.zeros([N, PAIRS], tl.int32)
        for RUN in tl.static_range(RUNS):
            column = (0 if W < 8 else RUN // FIELDS) * B + tl.arange(0, B)
            code = _quads(tl.load(words + at * 4 + n[:, None] * W + column[None, :]), QUAD)
            if W < 8:
                one = _fields(code, RUN, BITS, ASSEMBLY)
                two = _fields(code, RUN + FIELDS // 2, BITS, ASSEMBLY)
                fields = tl.reshape(tl.permute(tl.join(one, two), (0, 2, 1)), [N, PAIRS])
            else:
                fields = _fields(code, RUN % FIELDS, BITS, ASSEMBLY)
            if CHANNEL:
                i = tl.arange(0, PAIRS)
                if W < 8:
                    pair = (RUN + i // W * (FIELDS // 2)) * W + _from_quads(i % W, W, QUAD)
                else:
                    pair = (RUN % FIELDS) * W + RUN // FIELDS * B + _from_quads(i, B, QUAD)
                step = tl.load(scales + SIZE // 2 + pair)
                low = _lowered(tl.load(scales + pair), step, BITS, ASSEMBLY)
                low = low[None, :]
                step = step[None, :]
            else:
                by = pairs + key_group(RUN, SIZE, BITS) * 64 + n
                step = _twice(tl.load(by + SIZE))
                low = _lowered(_twice(tl.load(by)), step, BITS, ASSEMBLY)
                low = low[:, None]
                step = step[:, None]
            lower, upper = _values(fields, low + zero, step + zero, BITS, ASSEMBLY)
            numbers = tl.reshape(tl.join(lower, upper), [N, 2 * PAIRS])
            scores = tl.dot(numbers, queries[RUN], scores)
    return scores


@triton.jit
def add_far_values(
    parts, weights, fade, words, halves, wide, at, part, n,
    ROWS: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr, CHANNEL: tl.constexpr, RUNS: tl.constexpr,
    SKIP: tl.constexpr, QUAD: tl.constexpr, WIDE: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """The runs [channels, ROWS] of the sum, faded, and weights [n, ROWS] times positions n of a stored page.

    part: n are the positions of `position_in(part, ...)`.
    """
    found = ()
    if BITS == 16:
        page = tl.load(wide + at * 8 + SKIP // 2 + n[:, None] * SIZE + tl.arange(0, SIZE)[None, :])
        if WIDE:
            page = page.to(tl.float32)
        found = (
            tl.dot(tl.trans(page), weights.to(page.dtype), parts[0] * fade[None, :], input_precision="ieee"),
        )
    else:
        C: tl.constexpr = SIZE * BITS // 16
        B: tl.constexpr = C if C < 32 else 32
        FIELDS: tl.constexpr = 16 // BITS
        PAIRS: tl.constexpr = n.shape[0] // 2  # of positions
        OUT: tl.constexpr = 2 * C if C < 16 else B
        pairs = halves + at * 8 + (SKIP + 8 * SIZE * BITS) // 2
        codes = words + at * 4 + SKIP // 4 + part * PAIRS
        scales = words + at * 4 + (SKIP + 8 * SIZE * BITS) // 4 + part * PAIRS
        short = weights.to(tl.float16)
        zero = tl.zeros([OUT, PAIRS], tl.int32)
        p = tl.arange(0, PAIRS)
        for RUN in tl.static_range(RUNS):
            row = (0 if C < 16 else RUN // FIELDS) * B + tl.arange(0, B)
            code = _quads(tl.load(codes + row[:, None] * 32 + p[None, :]), QUAD)
            if C < 16:
                one = _fields(code, RUN, BITS, ASSEMBLY)
                two = _fields(code, RUN + FIELDS // 2, BITS, ASSEMBLY)
                fields = tl.reshape(tl.permute(tl.join(one, two), (2, 0, 1)), [OUT, PAIRS])
            else:
                fields = _fields(code, RUN % FIELDS, BITS, ASSEMBLY)
            if CHANNEL:
                c = value_channel(RUN, SIZE, BITS)
                step = _twice(tl.load(pairs + SIZE + c))
                low = _lowered(_twice(tl.load(pairs + c)), step, BITS, ASSEMBLY)
                low = low[:, None]
                step = step[:, None]
            else:
                by = scales + value_group(RUN, SIZE, BITS) * 32 + _from_quads(p, PAIRS, QUAD)
                step = tl.load(by + SIZE // 2)
                low = _lowered(tl.load(by), step, BITS, ASSEMBLY)
                low = low[None, :]
                step = step[None, :]
            lower, upper = _values(fields, low + zero, step + zero, BITS, ASSEMBLY)
            numbers = tl.reshape(tl.join(lower, upper), [OUT, 2 * PAIRS])
            found = found + (tl.dot(numbers, short, parts[RUN] * fade[None, :]),)
    return found
