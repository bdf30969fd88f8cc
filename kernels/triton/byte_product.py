# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Products of bytes on NVIDIA's matrix cores (m16n8k32): what all kernels that take codes as bytes multiply with.

With HARDWARE 1 it is the instruction, else what that computes, for the interpreter.
"""

import triton
import triton.language as tl


@triton.jit
def _bytes(word, SIGNED: tl.constexpr):
    """[n] words -> their bytes, float32 [n, 4]."""
    if SIGNED:
        a, b = (word << 24).to(tl.int32) >> 24, (word << 16).to(tl.int32) >> 24
        c, d = (word << 8).to(tl.int32) >> 24, word.to(tl.int32) >> 24
    else:
        a, b, c, d = word & 0xFF, (word >> 8) & 0xFF, (word >> 16) & 0xFF, word >> 24
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [word.shape[0], 4]).to(tl.float32)


@triton.jit
def mma_bytes(
    a0, a1, a2, a3, b0, b1, c, S: tl.constexpr, HARDWARE: tl.constexpr, SIGNED: tl.constexpr = True
):
    """c + A @ B on operands as the lanes hold them: [32 S] words each, c: four int32.

    A: unsigned bytes [16, 32] for each of S warps; B [32, 8]: signed ones, or (SIGNED false) unsigned ones.
    """
    if HARDWARE == 1:
        OF: tl.constexpr = "s8" if SIGNED else "u8"
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k32.row.col.s32.u8." + OF + ".s32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
            (tl.int32, tl.int32, tl.int32, tl.int32),
            True,
            1,
        )
    else:
        left = tl.join(
            tl.join(_bytes(a0, False), _bytes(a2, False)), tl.join(_bytes(a1, False), _bytes(a3, False))
        )
        left = tl.permute(tl.reshape(left, [S, 8, 4, 4, 2, 2]), (0, 5, 1, 4, 2, 3))
        right = tl.reshape(tl.join(_bytes(b0, SIGNED), _bytes(b1, SIGNED)), [S, 8, 4, 4, 2])
        right = tl.reshape(tl.permute(right, (0, 4, 2, 3, 1)), [S, 32, 8])
        found = tl.dot(tl.reshape(left, [S, 16, 32]), right).to(tl.int32)  # exact: 32 products below 2^16
        found = tl.permute(tl.reshape(found, [S, 2, 8, 4, 2]), (0, 2, 3, 4, 1))
        even, odd = tl.split(tl.reshape(found, [32 * S, 2, 2]))
        c0, c1 = tl.split(even)
        c2, c3 = tl.split(odd)
        return c[0] + c0, c[1] + c1, c[2] + c2, c[3] + c3
