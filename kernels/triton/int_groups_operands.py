# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""Codes as 16-bit floats, their scales and matrix instructions for int_groups.py, as the lanes hold them.

Every tensor has one number for each lane of S warps, [32 S]; lane 4 g + t.
"""

import triton
import triton.language as tl

from nstf.kernels.triton.operands import columns_of


@triton.constexpr_function
def places_of(bits, half):
    """For each code of half a word (shift, bit of the number at which it then lies)."""
    if half or bits == 4:
        return tuple((bits * j, 0) for j in range(16 // bits))
    # A bfloat16 has seven bits for both.
    found = []
    for j in range(16 // bits):
        shift = bits * j // 6 * 6
        found.append((shift, bits * j - shift))
    return tuple(found)


@triton.jit
def _numbers(word, HALF: tl.constexpr):
    """[n] words -> their 16-bit floats, float32 [n, 2]."""
    both = tl.join(word & 0xFFFF, word >> 16)
    if HALF:
        return both.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (both << 16).to(tl.float32, bitcast=True)


@triton.jit
def mma_pairs(a0, a1, a2, a3, b0, b1, c, S: tl.constexpr, HALF: tl.constexpr, HARDWARE: tl.constexpr):
    """c + A @ B on operands as the lanes hold them: [32 S] words of two 16-bit floats each, c: four float32.

    A: [16, 16] for each of S warps; B: [16, 8].
    """
    if HARDWARE == 1:
        OF: tl.constexpr = "f16.f16" if HALF else "bf16.bf16"
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32." + OF + ".f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
            (tl.float32, tl.float32, tl.float32, tl.float32),
            True,
            1,
        )
    else:
        left = tl.join(
            tl.join(_numbers(a0, HALF), _numbers(a2, HALF)), tl.join(_numbers(a1, HALF), _numbers(a3, HALF))
        )
        left = tl.permute(tl.reshape(left, [S, 8, 4, 2, 2, 2]), (0, 5, 1, 4, 2, 3))
        right = tl.reshape(tl.join(_numbers(b0, HALF), _numbers(b1, HALF)), [S, 8, 4, 2, 2])
        right = tl.reshape(tl.permute(right, (0, 4, 2, 3, 1)), [S, 16, 8])
        found = tl.dot(tl.reshape(left, [S, 16, 16]), right, input_precision="ieee")
        found = tl.permute(tl.reshape(found, [S, 2, 8, 4, 2]), (0, 2, 3, 4, 1))
        even, odd = tl.split(tl.reshape(found, [32 * S, 2, 2]))
        c0, c1 = tl.split(even)
        c2, c3 = tl.split(odd)
        return c[0] + c0, c[1] + c1, c[2] + c2, c[3] + c3


@triton.jit
def divided(word, PLACE: tl.constexpr):
    """Two bfloat16 in a word times 2^-PLACE."""
    low = (word << 16).to(tl.float32, bitcast=True) * 2.0**-PLACE
    high = (word & 0xFFFF0000).to(tl.float32, bitcast=True) * 2.0**-PLACE
    return (low.to(tl.uint32, bitcast=True) >> 16) | (high.to(tl.uint32, bitcast=True) & 0xFFFF0000)


@triton.jit
def from_lane(v, M: tl.constexpr, S: tl.constexpr, HARDWARE: tl.constexpr):
    """What the lane has whose number differs by M."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise(
            "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r", [v, M], tl.float32, True, 1
        )
    else:
        low, high = tl.split(tl.permute(tl.reshape(v, [32 * S // (2 * M), 2, M]), (0, 2, 1)))
        return tl.reshape(tl.permute(tl.join(high, low), (0, 2, 1)), [32 * S])


@triton.jit
def block_words(
    words, first, rows, width, chunk, g, t, CHUNKS: tl.constexpr, EVEN: tl.constexpr, ROWS16: tl.constexpr
):
    """The words of 16 rows: for each chunk four of row g, then four of row g + 8."""
    found = ()
    for c in tl.static_range(CHUNKS):
        own = chunk + c
        if not EVEN:
            # Beyond the last chunk activations are zero.
            own = tl.minimum(own, width // 16 - 1)
        for h in tl.static_range(2):
            row = g + 8 * h
            if not ROWS16:
                row = tl.minimum(row, rows - 1 - first)
            # What all blocks share last: it stays in registers.
            at = words + first.to(tl.int64) * width + (row * width + own * 16 + t * 4)[:, None]
            some = tl.load(at + tl.arange(0, 4)[None, :], mask=first < rows)
            found = found + columns_of(some.to(tl.uint32, bitcast=True), 4)
    return found


@triton.jit
def block_scales(
    array, first, rows, group, own, g,
    GROUPS: tl.constexpr, PAIRED: tl.constexpr, STEPS: tl.constexpr, ROWS16: tl.constexpr,
):  # fmt: skip
    """The stored scales of rows g and g + 8 for groups `group` and the next; those that a lane has no `own` are 0."""
    found = ()
    for h in tl.static_range(2):
        row = g + 8 * h
        if not ROWS16:
            row = tl.minimum(row, rows - 1 - first)
        at = array + first.to(tl.int64) * GROUPS + (row * GROUPS + group)
        if PAIRED:
            ok = own & (first < rows)
            if STEPS:
                found = found + (tl.load(at.to(tl.pointer_type(tl.uint16)), mask=ok, other=0),)
            else:
                found = found + (tl.load(at.to(tl.pointer_type(tl.uint32)), mask=ok, other=0),)
        else:
            for e in tl.static_range(2):
                found = found + (tl.load(at + e, mask=own & (first < rows) & (group + e < GROUPS), other=0),)
    return found


@triton.jit
def scale_at(found, H: tl.constexpr, E: tl.constexpr, PAIRED: tl.constexpr, STEPS: tl.constexpr):
    """One of the scales that `block_scales` loaded, f32 [32 S]. H: row g or g + 8; E: group `group` or the next."""
    if PAIRED:
        stored = found[H]
        if STEPS:
            stored = (stored.to(tl.uint32) >> (8 * E)) & 0xFF
        else:
            stored = (stored >> (16 * E)).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        stored = found[2 * H + E]
    if STEPS:
        # A step of 1 to 256, by its bits beside 2^23: conversions are slow.
        return (stored.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388607.0
    else:
        return stored.to(tl.float32)
