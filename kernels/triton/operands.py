# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""Codes and activations as operands of NVIDIA's m16n8k16, for skinny.py and trellis_gemm.py.

A warp's tile is [16 rows, 32 columns] of weights by [32, N] of activations; S of them, one for each warp, make a tensor.
Lane 4 g + t holds of the weights the rows g and g + 8, and of their columns those at places 4 t .. 4 t + 3 of either half of
the 32. What lies at which place is up to us, so a lane's columns are those that it loads: 8 t .. 8 t + 7 of a run of 32
(a tile's row of sixteen for a trellis), for weights and activations alike. Loads are written in two dimensions, a lane by
its numbers, since with more the way Triton deals tensors to lanes differs between its versions.
"""

import triton
import triton.language as tl

from nstf.kernels.triton.numbers import numbers32

# The interpreter has no assembler.
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def word_tile(
    words, first, rows, width, chunk, chunks, APART: tl.constexpr, S: tl.constexpr, EVEN: tl.constexpr
):
    """[S, 16, 16] words of a chunk of each warp (chunks APART from one warp to the next), in the order of operands."""
    # Two dimensions: which thread loads what must not depend on how Triton orders dimensions of equal contiguity.
    i = tl.arange(0, 64 * S)
    row = first + i // (32 * S) * 8 + i // 4 % 8
    c = chunk + i // 32 % S * APART
    ok = row < rows
    if not EVEN:
        ok = ok & (c < chunks)
    at = row * width + c * 16 + i % 4 * 4
    w = tl.load(words + at[:, None] + tl.arange(0, 4)[None, :], mask=ok[:, None], other=0)
    w = tl.reshape(w, [2, S, 8, 4, 2, 2])
    return tl.reshape(tl.permute(w, (1, 0, 2, 4, 3, 5)), [S, 16, 16])


@triton.jit
def word_tiles(
    words,
    first,
    rows,
    padded,
    chunk0,
    PLANES: tl.constexpr,
    SHIFTS: tl.constexpr,
    S: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The words of 16 rows from `first` on for each warp: for each of its chunks (of the narrowest plane) all planes."""
    J: tl.constexpr = 16 // PLANES[len(PLANES) - 1]
    found = ()
    for c in tl.static_range(CHUNKS):
        for p in tl.static_range(len(PLANES)):
            width = padded // (32 * (16 // PLANES[p])) * 16
            plane = words + SHIFTS[p] * (padded // 32) * rows
            for i in tl.static_range(J // (16 // PLANES[p])):
                found = found + (
                    word_tile(
                        plane,
                        first,
                        rows,
                        width,
                        (chunk0 + c) * (J // (16 // PLANES[p])) + i,
                        width // 16,
                        CHUNKS * (J // (16 // PLANES[p])),
                        S,
                        EVEN,
                    ),
                )
    return found


@triton.jit
def per_group(
    array,
    first,
    rows,
    cols,
    chunk0,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SPAN: tl.constexpr,
    FLUSH: tl.constexpr,
    S: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """What 16 rows from `first` on need of an array [rows, GROUPS]: [S, 16] for every sum that ends."""
    row = (first + tl.arange(0, 16))[None, :]
    chunk = (chunk0 + tl.arange(0, S) * CHUNKS)[:, None]
    found = ()
    for c in tl.static_range(CHUNKS):
        for f in tl.static_range(SPAN // (32 * FLUSH)):
            k = (chunk + c) * SPAN + f * FLUSH * 32
            ok = (row < rows) & (k < cols)
            found = found + (tl.load(array + row * GROUPS + k // GROUP, mask=ok, other=0),)
    return found


@triton.jit
def side_by_side(array, first, rows, chunk0, GROUPS: tl.constexpr, COUNT: tl.constexpr, S: tl.constexpr):
    """[64 S, COUNT]: the same of an array, all groups of a warp's columns in one load, for each lane of an operand."""
    i = tl.arange(0, 64 * S)
    row = first + i // (32 * S) * 8 + i // 4 % 8
    group = (chunk0 + i // 32 % S * COUNT)[:, None] + tl.arange(0, COUNT)[None, :]
    return tl.load(
        array + row[:, None] * GROUPS + group, mask=(row < rows)[:, None] & (group < GROUPS), other=0
    )


@triton.jit
def columns_of(tile, COUNT: tl.constexpr):
    """[n, COUNT] -> its COUNT columns."""
    LEVELS: tl.constexpr = (COUNT > 1) + (COUNT > 2) + (COUNT > 4) + (COUNT > 8)
    parts = (tile,)
    for level in tl.static_range(LEVELS):
        halves = ()
        for i in tl.static_range(1 << level):
            wide = tl.reshape(parts[i], [tile.shape[0], 2, COUNT >> (level + 1)])
            left, right = tl.split(tl.permute(wide, (0, 2, 1)))
            halves = halves + (left, right)
        parts = halves
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (tl.reshape(parts[i], [tile.shape[0]]),)
    return found


@triton.jit
def spread(values, S: tl.constexpr, N: tl.constexpr):
    """[64 S], one for each lane of an operand -> [S, 16, N], where the four lanes of a row have the same."""
    values = tl.reshape(tl.permute(tl.reshape(values, [2, S, 8, 4]), (1, 0, 2, 3)), [S, 16, 1, 4, 1])
    return tl.reshape(tl.broadcast_to(values, [S, 16, N // 8, 4, 2]), [S, 16, N])


@triton.jit
def load_factors(
    array,
    first,
    rows,
    cols,
    chunk0,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SPAN: tl.constexpr,
    FLUSH: tl.constexpr,
    S: tl.constexpr,
    CHUNKS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """What is loaded of such an array ahead of its use: one tile, or one for each sum where groups do not fit."""
    if COUNT > 0:
        return (side_by_side(array, first, rows, chunk0 * SPAN // GROUP, GROUPS, COUNT, S),)
    else:
        return per_group(array, first, rows, cols, chunk0, GROUP, GROUPS, SPAN, FLUSH, S, CHUNKS)


@triton.jit
def factor_of(
    found, AT: tl.constexpr, FLUSHED: tl.constexpr, S: tl.constexpr, N: tl.constexpr, COUNT: tl.constexpr
):
    """[S, 16, 1 or N]: the value for the sum AT of a warp, FLUSHED of which make a group."""
    if COUNT > 0:
        return spread(found[AT // FLUSHED], S, N)
    else:
        return found[AT][:, :, None]


@triton.jit
def activation_tile(
    x, batch, cols, begin, APART: tl.constexpr, S: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr
):
    """[S, 32, N]: a run of columns of each warp (APART columns from one to the next), in the order of the words."""
    i = tl.arange(0, 4 * S * N)
    line = i // (32 * S) * 8 + i // 4 % 8
    k = begin + i // 32 % S * APART + i % 4 * 8
    ok = line < batch
    if not EVEN:
        # Eight neighbours: columns come in multiples of 8 where a group is one of 32.
        ok = ok & (k < cols)
    at = line * cols + k
    some = tl.load(x + at[:, None] + tl.arange(0, 8)[None, :], mask=ok[:, None], other=0.0)
    some = tl.reshape(some, [N // 8, S, 8, 4, 2, 2, 2])
    return tl.reshape(tl.permute(some, (1, 4, 3, 5, 6, 0, 2)), [S, 32, N])


@triton.jit
def halves(t, DTYPE: tl.constexpr):
    """[S, 16, 16] pairs of 16-bit numbers in words -> [S, 16, 32]."""
    low = t.to(tl.int16).to(DTYPE, bitcast=True)
    high = (t >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.reshape(tl.join(low, high), [t.shape[0], t.shape[1], 2 * t.shape[2]])


@triton.jit
def float_pairs(w, J: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr, EXPONENT: tl.constexpr):
    """The two floats of run J in each word, as 16-bit floats that keep the bias of their code."""
    MANTISSA: tl.constexpr = 10 if DTYPE == tl.float16 else 7
    LOW: tl.constexpr = MANTISSA - (BITS - 1 - EXPONENT)
    UP: tl.constexpr = 16 - BITS - BITS * J
    SIGN: tl.constexpr = -0x7FFF8000
    REST: tl.constexpr = (((1 << (BITS - 1)) - 1) << LOW) * 0x00010001
    v = w
    if UP > 0:
        v = w << UP
    return (v & SIGN) | ((v >> (16 - BITS - LOW)) & REST)


@triton.jit
def looked_up(w, entries):
    """Words of eight 4-bit codes -> for each run the two float16 of a table: bytes chosen by nibbles, NVIDIA's `prmt`.

    entries: the low bytes of the sixteen, four to a word, then the high bytes.
    """
    if _INTERPRETED:
        return _looked_up_plainly(w, entries)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 s, m, a, b, l0, h0, l1, h1;
        and.b32 s, $4, 0x7777;
        shr.u32 m, $4, 1;
        and.b32 m, m, 0x4444;
        or.b32 m, m, 0x3210;
        prmt.b32 a, $5, $6, s;
        prmt.b32 b, $7, $8, s;
        prmt.b32 l0, a, b, m;
        prmt.b32 a, $9, $10, s;
        prmt.b32 b, $11, $12, s;
        prmt.b32 h0, a, b, m;
        shr.u32 m, $4, 16;
        and.b32 s, m, 0x7777;
        shr.u32 m, m, 1;
        and.b32 m, m, 0x4444;
        or.b32 m, m, 0x3210;
        prmt.b32 a, $5, $6, s;
        prmt.b32 b, $7, $8, s;
        prmt.b32 l1, a, b, m;
        prmt.b32 a, $9, $10, s;
        prmt.b32 b, $11, $12, s;
        prmt.b32 h1, a, b, m;
        prmt.b32 a, l0, h0, 0x5140;
        prmt.b32 b, l1, h1, 0x5140;
        prmt.b32 $0, a, b, 0x5410;
        prmt.b32 $1, a, b, 0x7632;
        prmt.b32 a, l0, h0, 0x7362;
        prmt.b32 b, l1, h1, 0x7362;
        prmt.b32 $2, a, b, 0x5410;
        prmt.b32 $3, a, b, 0x7632;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
        [
            w,
            entries[0],
            entries[1],
            entries[2],
            entries[3],
            entries[4],
            entries[5],
            entries[6],
            entries[7],
        ],
        (tl.int32, tl.int32, tl.int32, tl.int32),
        True,
        1,
    )


@triton.jit
def _looked_up_plainly(w, entries):
    """`looked_up` without its instruction."""
    found = ()
    for j in tl.static_range(4):
        pair = w & 0
        for half in tl.static_range(2):
            code = (w >> (16 * half + 4 * j)) & 15
            for high in tl.static_range(2):
                four = entries[4 * high]
                for i in tl.static_range(1, 4):
                    four = tl.where(code // 4 == i, entries[4 * high + i], four)
                pair |= ((four >> (code % 4 * 8)) & 0xFF) << (16 * half + 8 * high)
        found = found + (pair,)
    return found


@triton.jit
def bytes_of(table, HIGH: tl.constexpr):
    """The low (or high) bytes of sixteen float16, as four words."""
    found = ()
    for i in tl.static_range(4):
        word = tl.load(table + 4 * i).to(tl.uint16, bitcast=True).to(tl.int32) * 0
        for j in tl.static_range(4):
            value = tl.load(table + 4 * i + j).to(tl.uint16, bitcast=True).to(tl.int32)
            word |= ((value >> (8 * HIGH)) & 0xFF) << (8 * j)
        found = found + (word,)
    return found


@triton.jit
def plain_numbers(
    t,
    table,
    DTYPE: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    EXPONENT: tl.constexpr,
    BIAS: tl.constexpr,
    ZERO: tl.constexpr,
):
    """[S, 16, 16] pairs of codes -> [S, 16, 32] numbers, one by one."""
    KNOWN: tl.constexpr = ZERO if ZERO > 0 else 0
    low = numbers32(t & 0xFFFF, table, KNOWN, MODE, BITS, EXPONENT, BIAS)
    high = numbers32((t >> 16) & 0xFFFF, table, KNOWN, MODE, BITS, EXPONENT, BIAS)
    both = tl.reshape(tl.join(low, high), [t.shape[0], t.shape[1], 2 * t.shape[2]])
    return both.to(DTYPE)


@triton.jit
def over_warps(acc, S: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    """[S, R, N] -> [R, N], summed in a fixed order."""
    # Halves that meet in a thread: tl.sum over warps goes through shuffles, and local memory all in one bank.
    if S == 1:
        return tl.reshape(acc, [R, N])
    LEVELS: tl.constexpr = (S > 1) + (S > 2) + (S > 4) + (S > 8) + (S > 16)
    for level in tl.static_range(LEVELS):
        left, right = tl.split(tl.permute(tl.reshape(acc, [2, S >> (level + 1), R, N]), (1, 2, 3, 0)))
        acc = left + right
    return tl.reshape(acc, [R, N])


@triton.jit
def scaled(xs, COUNT: tl.constexpr, S: tl.constexpr, N: tl.constexpr):
    """COUNT times [S, 32, N] as float16, every row scaled for each warp so that its largest number lies below 2^15; and
    what to multiply results with, [S, N]. Of a bfloat16 nothing is lost but what is below 2^-38 of that largest number."""
    most = tl.zeros([S, N], tl.float32)
    for i in tl.static_range(COUNT):
        most = tl.maximum(most, tl.max(tl.abs(xs[i].to(tl.float32)), axis=1))
    exponent = tl.maximum(most.to(tl.int32, bitcast=True) >> 23, 15)
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    back = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    found = ()
    for i in tl.static_range(COUNT):
        found = found + ((xs[i].to(tl.float32) * up[:, None, :]).to(tl.float16),)
    return found, back
