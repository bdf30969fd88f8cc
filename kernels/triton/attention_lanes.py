# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
"""What the lanes of a warp do for attention_bytes.py: one number or word of each, [32], lane 4 g + t.

With HARDWARE 1 NVIDIA's instructions, one each; else what they compute, for the interpreter.
"""

import triton
import triton.language as tl


@triton.jit
def low_half(word):
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def high_half(word):
    return (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def two_halves(low, high):
    """A word of two float32, rounded to float16."""
    one = low.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return one | (high.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@triton.jit
def packed(low, high, HARDWARE: tl.constexpr):
    """As `two_halves`."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], tl.uint32, True, 1
        )
    else:
        return two_halves(low, high)


@triton.jit
def unpacked(word, HARDWARE: tl.constexpr):
    """Both halves as float32."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }",
            "=f,=f,r", [word], (tl.float32, tl.float32), True, 1,
        )  # fmt: skip
    else:
        return low_half(word).to(tl.float32), high_half(word).to(tl.float32)


@triton.jit
def product2(a, b, HARDWARE: tl.constexpr):
    """Two products of float16."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, True, 1)
    else:
        return two_halves(
            low_half(a).to(tl.float32) * low_half(b).to(tl.float32),
            high_half(a).to(tl.float32) * high_half(b).to(tl.float32),
        )


@triton.jit
def sum2(a, b, c, HARDWARE: tl.constexpr):
    """Two a b + c of float16."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.uint32, True, 1
        )
    else:
        return two_halves(
            low_half(a).to(tl.float32) * low_half(b).to(tl.float32) + low_half(c).to(tl.float32),
            high_half(a).to(tl.float32) * high_half(b).to(tl.float32) + high_half(c).to(tl.float32),
        )


@triton.jit
def largest2(a, b, HARDWARE: tl.constexpr):
    """Of two float16 the larger one of a and |b|."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 x; abs.f16x2 x, $2; max.NaN.f16x2 $0, $1, x; }", "=r,r,r", [a, b], tl.uint32, True, 1
        )
    else:
        return two_halves(
            tl.maximum(low_half(a).to(tl.float32), tl.abs(low_half(b).to(tl.float32))),
            tl.maximum(high_half(a).to(tl.float32), tl.abs(high_half(b).to(tl.float32))),
        )


@triton.jit
def digits2(y, by, near, more, HARDWARE: tl.constexpr):
    """A digit of two float16 numbers y times a power of two, in the lowest byte of each half.

    near, a power of two in both halves: y near is below 127.5. High digits, with by = 0 and more = 1: the rounded number.
    Low digits, with by = near and more = 254: 254 times what rounding leaves. 1.5 * 2^10 has whole numbers in its mantissa.
    """
    if HARDWARE == 1:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 h, k; mov.b32 k, 0x66006600; fma.rn.f16x2 h, $1, $2, k; sub.rn.f16x2 h, k, h; "
            "fma.rn.f16x2 h, $1, $3, h; fma.rn.f16x2 $0, h, $4, k; }",
            "=r,r,r,r,r", [y, by, near, more], tl.uint32, True, 1,
        )  # fmt: skip
    else:
        k = two_halves(tl.full([32], 1536.0, tl.float32), tl.full([32], 1536.0, tl.float32))
        h = sum2(y, by, k, HARDWARE) ^ 0x80008000
        h = two_halves(
            1536.0 + low_half(h).to(tl.float32),
            1536.0 + high_half(h).to(tl.float32),
        )
        return sum2(sum2(y, near, h, HARDWARE), more, k, HARDWARE)


@triton.jit
def even_bytes(a, b, HARDWARE: tl.constexpr):
    """Bytes 0 and 2 of two words: a, b, a, b."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x6240;", "=r,r,r", [a, b], tl.uint32, True, 1)
    else:
        return (a & 0x00FF00FF) | ((b & 0x00FF00FF) << 8)


@triton.jit
def low_bytes(a, b, HARDWARE: tl.constexpr):
    """Bytes 0 and 1 of two words: a, b, a, b."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x5140;", "=r,r,r", [a, b], tl.uint32, True, 1)
    else:
        return (a & 0xFF) | ((b & 0xFF) << 8) | ((a & 0xFF00) << 8) | ((b & 0xFF00) << 16)


@triton.jit
def same_halves(a, b, odd, HARDWARE: tl.constexpr):
    """The lower or, in lanes that are odd, the upper halves of two words. odd: 0 or 1."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, odd * 0x2222 + 0x5410], tl.uint32, True, 1
        )
    else:
        return tl.where(odd == 1, (a >> 16) | (b & 0xFFFF0000), (a & 0xFFFF) | (b << 16))


@triton.jit
def most_of_columns(x, HARDWARE: tl.constexpr):
    """The largest of the four lanes t of a g; x: float32."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 x, y; shfl.sync.bfly.b32 x, $1, 1, 0x1f, 0xffffffff; max.NaN.f32 x, x, $1; "
            "shfl.sync.bfly.b32 y, x, 2, 0x1f, 0xffffffff; max.NaN.f32 $0, x, y; }",
            "=f,f", [x], tl.float32, True, 1,
        )  # fmt: skip
    else:
        most = tl.max(tl.reshape(x, [8, 4]), axis=1)
        return tl.reshape(tl.broadcast_to(most[:, None], [8, 4]), [32])


@triton.jit
def most_of_rows(x, HARDWARE: tl.constexpr):
    """The largest of the eight lanes g of a t; x: float32."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 x, y; shfl.sync.bfly.b32 x, $1, 4, 0x1f, 0xffffffff; max.f32 x, x, $1; "
            "shfl.sync.bfly.b32 y, x, 8, 0x1f, 0xffffffff; max.f32 x, x, y; "
            "shfl.sync.bfly.b32 y, x, 16, 0x1f, 0xffffffff; max.f32 $0, x, y; }",
            "=f,f", [x], tl.float32, True, 1,
        )  # fmt: skip
    else:
        most = tl.max(tl.reshape(x, [8, 4]), axis=0)
        return tl.reshape(tl.broadcast_to(most[None, :], [8, 4]), [32])


@triton.jit
def most2_of_columns(x, HARDWARE: tl.constexpr):
    """As `most_of_columns`, of words of two float16 that are not negative."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 x, y; shfl.sync.bfly.b32 x, $1, 1, 0x1f, 0xffffffff; max.f16x2 x, x, $1; "
            "shfl.sync.bfly.b32 y, x, 2, 0x1f, 0xffffffff; max.f16x2 $0, x, y; }",
            "=r,r", [x], tl.uint32, True, 1,
        )  # fmt: skip
    else:
        return two_halves(
            most_of_columns(low_half(x).to(tl.float32), 0), most_of_columns(high_half(x).to(tl.float32), 0)
        )


@triton.jit
def most2_of_rows(x, HARDWARE: tl.constexpr):
    """As `most_of_rows`, of words of two float16 that are not negative."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 x, y; shfl.sync.bfly.b32 x, $1, 4, 0x1f, 0xffffffff; max.f16x2 x, x, $1; "
            "shfl.sync.bfly.b32 y, x, 8, 0x1f, 0xffffffff; max.f16x2 x, x, y; "
            "shfl.sync.bfly.b32 y, x, 16, 0x1f, 0xffffffff; max.f16x2 $0, x, y; }",
            "=r,r", [x], tl.uint32, True, 1,
        )  # fmt: skip
    else:
        return two_halves(
            most_of_rows(low_half(x).to(tl.float32), 0), most_of_rows(high_half(x).to(tl.float32), 0)
        )


@triton.jit
def of_query(x, HARDWARE: tl.constexpr):
    """What the lanes of column 2 t have, in the lanes t; x: float32, the same in the four lanes of a g."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;",
            "=f,f,r", [x, tl.arange(0, 32) % 4 * 8], tl.float32, True, 1,
        )  # fmt: skip
    else:
        own, _ = tl.split(tl.reshape(tl.max(tl.reshape(x, [8, 4]), axis=1), [4, 2]))
        return tl.reshape(tl.broadcast_to(own[None, :], [8, 4]), [32])


@triton.jit
def turned_over(x, HARDWARE: tl.constexpr):
    """Words as an 8 x 8 matrix of halves, row g and columns 2 t and 2 t + 1, transposed."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise(
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], tl.uint32, True, 1
        )
    else:
        matrix = tl.reshape(tl.join(x & 0xFFFF, x >> 16), [8, 8])
        low, high = tl.split(tl.reshape(tl.trans(matrix), [32, 2]))
        return low | (high << 16)


@triton.jit
def mma_equal_rows(a, b, q0, q1, c, HARDWARE: tl.constexpr):
    """c + A @ B of float16; all rows of A are the same: words a and b of a lane's columns; of B they are q0 and q1.

    Columns 2 t and 2 t + 1 of B are the same.
    """
    if HARDWARE == 1:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{$0, $1, $2, $3}, {$4, $4, $5, $5}, {$6, $7}, {$8, $9, $10, $11};",
            "=f,=f,=f,=f,r,r,r,r,f,f,f,f",
            [a, b, q0, q1, c[0], c[1], c[2], c[3]],
            (tl.float32, tl.float32, tl.float32, tl.float32),
            True,
            1,
        )
    else:
        own = low_half(a).to(tl.float32) * low_half(q0).to(tl.float32)
        own += high_half(a).to(tl.float32) * high_half(q0).to(tl.float32)
        own += low_half(b).to(tl.float32) * low_half(q1).to(tl.float32)
        own += high_half(b).to(tl.float32) * high_half(q1).to(tl.float32)
        column = tl.sum(tl.reshape(own, [8, 4]), axis=1)
        sums = of_query(tl.reshape(tl.broadcast_to(column[:, None], [8, 4]), [32]), 0)
        return c[0] + sums, c[1] + sums, c[2] + sums, c[3] + sums
