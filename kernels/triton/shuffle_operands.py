# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""Shuffle codes and activations as operands of NVIDIA's matrix instructions, for shuffle_mma.py."""

import triton
import triton.language as tl

from nstf.kernels.triton.byte_product import mma_bytes
from nstf.kernels.triton.operands import columns_of


@triton.jit
def _upper(word, DOT: tl.constexpr, HARDWARE: tl.constexpr):
    """The upper half of each word: by the multiplier where the unit for shifts has more to do."""
    if DOT and HARDWARE == 1:
        return tl.inline_asm_elementwise(
            "dp2a.lo.u32.u32 $0, $1, $2, 0;", "=r,r,r", [word, 0x0100], tl.uint32, True, 1
        )
    else:
        return word >> 16


@triton.jit
def selectors_of(word, DOT: tl.constexpr, HARDWARE: tl.constexpr):
    """What looks up eight symbols: the first four and the others in the lower half of a table, and in the upper half.

    A symbol's highest bit asks `prmt` for the sign of an entry of the other half. Entries are below 128, so that is 0.
    """
    other = word ^ 0x88888888
    return (word, _upper(word, DOT, HARDWARE), other, _upper(other, DOT, HARDWARE))


@triton.jit
def _look_up(low, high, selectors, HARDWARE: tl.constexpr):
    """Four bytes of a half of a table: 0 for symbols of the other half."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selectors], tl.uint32, True, 1
        )
    else:
        found = selectors & 0
        for i in tl.static_range(4):
            symbol = (selectors >> (4 * i)) & 15
            word = tl.where(symbol < 4, low, high)
            entry = tl.where(symbol < 8, (word >> (symbol % 4 * 8)) & 0xFF, 0)
            found |= entry << (8 * i)
        return found


@triton.jit
def _levels(a, b, own, BYTES: tl.constexpr, HARDWARE: tl.constexpr):
    """The levels of eight columns: words whose products are to be added (BYTES), or their sums; four columns each."""
    first = _look_up(own[0], own[1], a[0], HARDWARE)
    second = _look_up(own[0], own[1], a[1], HARDWARE)
    first2 = _look_up(own[2], own[3], a[2], HARDWARE)
    second2 = _look_up(own[2], own[3], a[3], HARDWARE)
    first3 = _look_up(own[4], own[5], b[0], HARDWARE)
    second3 = _look_up(own[4], own[5], b[1], HARDWARE)
    first4 = _look_up(own[6], own[7], b[2], HARDWARE)
    second4 = _look_up(own[6], own[7], b[3], HARDWARE)
    if BYTES:
        return (first, second, first2, second2, first3, second3, first4, second4)
    else:
        return (first + first2 + first3 + first4, second + second2 + second3 + second4)


@triton.jit
def _pair(levels, magic, UPPER: tl.constexpr, HARDWARE: tl.constexpr):
    """Two of four levels as 16-bit floats beside a power of two, whose upper byte `magic` has."""
    if HARDWARE == 1:
        if UPPER:
            return tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, $2, 0x4342;", "=r,r,r", [levels, magic], tl.uint32, True, 1
            )
        else:
            return tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, $2, 0x4140;", "=r,r,r", [levels, magic], tl.uint32, True, 1
            )
    else:
        two = levels >> (16 if UPPER else 0)
        return (two & 0xFF) | ((two & 0xFF00) << 8) | ((magic & 0xFF) * 0x01000100)


@triton.jit
def _floats(word, HALF: tl.constexpr):
    """[n] pairs of 16-bit floats -> [n, 2] float32."""
    if HALF:
        low = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = (word << 16).to(tl.float32, bitcast=True)
        high = (word & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _mma_halves(a0, a1, a2, a3, b0, b1, c, S: tl.constexpr, HALF: tl.constexpr, HARDWARE: tl.constexpr):
    """c + A @ B on operands of m16n8k16 as the lanes hold them: [32 S] words each, c: four float32."""
    if HARDWARE == 1:
        if HALF:
            return tl.inline_asm_elementwise(
                "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
                "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
                [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
                (tl.float32, tl.float32, tl.float32, tl.float32),
                True,
                1,
            )
        else:
            return tl.inline_asm_elementwise(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
                "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
                [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
                (tl.float32, tl.float32, tl.float32, tl.float32),
                True,
                1,
            )
    else:
        left = tl.join(
            tl.join(_floats(a0, HALF), _floats(a2, HALF)), tl.join(_floats(a1, HALF), _floats(a3, HALF))
        )
        left = tl.permute(tl.reshape(left, [S, 8, 4, 2, 2, 2]), (0, 5, 1, 4, 2, 3))
        right = tl.reshape(tl.join(_floats(b0, HALF), _floats(b1, HALF)), [S, 8, 4, 2, 2])
        right = tl.reshape(tl.permute(right, (0, 4, 2, 3, 1)), [S, 16, 8])
        found = tl.dot(tl.reshape(left, [S, 16, 16]), right, input_precision="ieee")
        found = tl.permute(tl.reshape(found, [S, 2, 8, 4, 2]), (0, 2, 3, 4, 1))
        even, odd = tl.split(tl.reshape(found, [32 * S, 2, 2]))
        c0, c1 = tl.split(even)
        c2, c3 = tl.split(odd)
        return c[0] + c0, c[1] + c1, c[2] + c2, c[3] + c3


@triton.jit
def grown_sums(
    total, even, odd, xs,
    P: tl.constexpr, W: tl.constexpr, NT: tl.constexpr, S: tl.constexpr, BYTES: tl.constexpr,
    HALF: tl.constexpr, HARDWARE: tl.constexpr, magic,
):  # fmt: skip
    """The sums of the pair P of rows with the products of W words of columns added, for each tile of activations."""
    grown = ()
    for n in tl.static_range(NT):
        acc = (
            total[(P * NT + n) * 4],
            total[(P * NT + n) * 4 + 1],
            total[(P * NT + n) * 4 + 2],
            total[(P * NT + n) * 4 + 3],
        )
        for w in tl.static_range(W):
            if BYTES:
                b0 = xs[(n * W + w) * 2]
                b1 = xs[(n * W + w) * 2 + 1]
                for i in tl.static_range(4):
                    acc = mma_bytes(
                        even[8 * w + 2 * i], odd[8 * w + 2 * i], even[8 * w + 2 * i + 1], odd[8 * w + 2 * i + 1],
                        b0, b1, acc, S, HARDWARE,
                    )  # fmt: skip
            else:
                for h in tl.static_range(2):
                    acc = _mma_halves(
                        _pair(even[2 * w + h], magic, False, HARDWARE), _pair(odd[2 * w + h], magic, False, HARDWARE),
                        _pair(even[2 * w + h], magic, True, HARDWARE), _pair(odd[2 * w + h], magic, True, HARDWARE),
                        xs[(n * W + w) * 4 + 2 * h], xs[(n * W + w) * 4 + 2 * h + 1], acc, S, HALF, HARDWARE,
                    )  # fmt: skip
        grown = grown + (acc[0], acc[1], acc[2], acc[3])
    return grown


@triton.jit
def tables_of(table, lanes, AT: tl.constexpr):
    """The eight words of both tables of a phase, in every thread: from uniform registers they are moved at every use.

    lanes: zeros, which the compiler does not know.
    """
    four = tl.arange(0, 4)[None, :]
    at = table.to(tl.pointer_type(tl.uint32)) + AT + (lanes * 16)[:, None] + four
    return columns_of(tl.load(at), 4) + columns_of(tl.load(at + 4), 4)


@triton.jit
def words_at(at, W: tl.constexpr, ok, MASKED: tl.constexpr):
    """W neighbouring words in each lane."""
    if W == 2:
        wide = at.to(tl.pointer_type(tl.uint64))
        two = tl.load(wide, mask=ok, other=0) if MASKED else tl.load(wide)
        return (two.to(tl.uint32), (two >> 32).to(tl.uint32))
    else:
        return (tl.load(at, mask=ok, other=0) if MASKED else tl.load(at),)


@triton.jit
def step_of(words, W: tl.constexpr, DOT: tl.constexpr, HARDWARE: tl.constexpr):
    found = ()
    for w in tl.static_range(W):
        found = found + selectors_of(words[w], DOT, HARDWARE)
    return found


@triton.jit
def joined_steps(one, other, W: tl.constexpr, DOT: tl.constexpr, HARDWARE: tl.constexpr):
    """Selectors of the exclusive or of two steps."""
    found = ()
    for w in tl.static_range(W):
        found = found + selectors_of(one[4 * w] ^ other[4 * w], DOT, HARDWARE)
    return found


@triton.jit
def row_levels(
    a, b, own, table, lanes,
    R: tl.constexpr, PHASES: tl.constexpr, KEPT: tl.constexpr, W: tl.constexpr, BYTES: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """The levels of row R at these selectors of both tables, for W words of columns."""
    AT: tl.constexpr = (R % PHASES) * 8
    # Tables of many phases do not fit the registers.
    E: tl.constexpr = AT if KEPT else 0
    here = own if KEPT else tables_of(table, lanes, AT)
    now = (
        here[E], here[E + 1], here[E + 2], here[E + 3], here[E + 4], here[E + 5], here[E + 6], here[E + 7]
    )  # fmt: skip
    found = ()
    for w in tl.static_range(W):
        first = (a[4 * w], a[4 * w + 1], a[4 * w + 2], a[4 * w + 3])
        second = (b[4 * w], b[4 * w + 1], b[4 * w + 2], b[4 * w + 3])
        found = found + _levels(first, second, now, BYTES, HARDWARE)
    return found


@triton.jit
def ask_for(
    words,
    groups,
    chunk,
    chunks,
    begin,
    Q: tl.constexpr,
    STEPS: tl.constexpr,
    group,
    t,
    HARDWARE: tl.constexpr,
):
    """The steps of a chunk on their way to the second-level cache."""
    if HARDWARE == 1:
        LINES: tl.constexpr = (STEPS * 32 + 511) // 512
        at = words + ((group * chunks + tl.minimum(chunk, chunks - 1)) * (2 * Q) + begin) * 8
        for k in tl.static_range(LINES):
            step = tl.minimum((t + 4 * k) * 4, STEPS - 1)
            tl.inline_asm_elementwise(
                "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
                "=r,l",
                [(at + step * 8).to(tl.int64)],
                tl.uint32,
                False,
                1,
            )


@triton.jit
def activations_of(x, line, k, batch, cols, COUNT: tl.constexpr, WIDE: tl.constexpr):
    """COUNT times [n] float32: neighbours in a row of activations from column k on, in loads of 16 bytes."""
    found = ()
    for i in tl.static_range(COUNT // WIDE):
        at = k[:, None] + (i * WIDE + tl.arange(0, WIDE))[None, :]
        ok = (at < cols) & (line < batch)[:, None]
        found = found + columns_of(
            tl.load(x + line[:, None] * cols + at, mask=ok, other=0.0).to(tl.float32), WIDE
        )
    return found


@triton.jit
def number_of(value, up, CARRIES: tl.constexpr):
    """A whole number whose bytes are its digits; carries make those below the highest signed."""
    # A sum with 1.5 * 2^23 has the number in its mantissa.
    number = (value * up + 12582912.0).to(tl.int32, bitcast=True) - (0x4B400000 - CARRIES)
    return (number ^ CARRIES).to(tl.uint32, bitcast=True)


@triton.jit
def digit_of(n0, n1, n2, n3, which, HARDWARE: tl.constexpr):
    """The digit `which` of four numbers, a byte each."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            prmt.b32 a, $1, $2, $5;
            prmt.b32 b, $3, $4, $5;
            prmt.b32 $0, a, b, 0x5410;
            }""",
            "=r,r,r,r,r,r",
            [n0, n1, n2, n3, which * 0x11 + 0x40],
            tl.uint32,
            True,
            1,
        )
    else:
        a = (n0 >> (which * 8)) & 0xFF
        b = (n1 >> (which * 8)) & 0xFF
        c = (n2 >> (which * 8)) & 0xFF
        return a | (b << 8) | (c << 16) | (((n3 >> (which * 8)) & 0xFF) << 24)
