# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Packed codes and stored scales as numbers, inside kernels: what is done between a word and a product."""

import triton
import triton.language as tl


@triton.jit
def codes_at(w0, w1, w2, J: tl.constexpr, PLANES: tl.constexpr, SHIFTS: tl.constexpr):
    """The two codes of run J in each word: one in either half of an int32. J counts from the chunk of each plane."""
    N0: tl.constexpr = 16 // PLANES[0]
    M0: tl.constexpr = ((1 << PLANES[0]) - 1) * 0x00010001
    t = (w0 >> ((J % N0) * PLANES[0])) & M0
    if len(PLANES) > 1:
        N1: tl.constexpr = 16 // PLANES[1]
        M1: tl.constexpr = ((1 << PLANES[1]) - 1) * 0x00010001
        t |= ((w1 >> ((J % N1) * PLANES[1])) & M1) << SHIFTS[1]
    if len(PLANES) > 2:
        N2: tl.constexpr = 16 // PLANES[2]
        M2: tl.constexpr = ((1 << PLANES[2]) - 1) * 0x00010001
        t |= ((w2 >> ((J % N2) * PLANES[2])) & M2) << SHIFTS[2]
    return t


@triton.jit
def numbers32(
    code, table, zero, MODE: tl.constexpr, BITS: tl.constexpr, EXPONENT: tl.constexpr, BIAS: tl.constexpr
):
    """Codes as the float32 they stand for, without their scale."""
    if MODE == 0:
        # Bits of 2^23 around a small integer: no conversion instruction, and exact.
        return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)
    elif MODE == 1:
        LOW: tl.constexpr = 23 - (BITS - 1 - EXPONENT)
        sign = code >> (BITS - 1)
        rest = (code & ((1 << (BITS - 1)) - 1)) << LOW
        return ((sign << 31) | rest).to(tl.float32, bitcast=True) * (2.0 ** (127 - BIAS))
    else:
        return tl.load(table + code).to(tl.float32)


@triton.jit
def pair16(
    t,
    zero,
    DTYPE: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    EXPONENT: tl.constexpr,
    AMD: tl.constexpr,
):
    """[BN, LANES] pairs of codes -> [BN, 2 LANES] numbers of 16 bits; floats times a power of two (`after_of`)."""
    if AMD and MODE == 0 and DTYPE == tl.bfloat16:
        # No vector ALU of theirs subtracts bfloat16. In float32, whose upper half small integers do not exceed.
        low = ((t & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)
        high = ((t >> 16) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)
        low = (low.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        high = (high.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        return tl.reshape(tl.join(low, high), [t.shape[0], 2 * t.shape[1]])
    MANTISSA: tl.constexpr = 10 if DTYPE == tl.float16 else 7
    if MODE == 0:
        # Constants, not an argument: only then does Triton move the change of layout from the numbers to the words.
        if DTYPE == tl.float16:
            t = t | 0x64006400  # 1024 + code
        else:
            t = t | 0x43004300  # 128 + code
    else:
        REST: tl.constexpr = ((1 << (BITS - 1)) - 1) * 0x00010001
        SIGN: tl.constexpr = (1 << (BITS - 1)) * 0x00010001
        LOW: tl.constexpr = MANTISSA - (BITS - 1 - EXPONENT)
        t = ((t & SIGN) << (16 - BITS)) | ((t & REST) << LOW)
    low = t.to(tl.int16).to(DTYPE, bitcast=True)
    high = (t >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    pairs = tl.reshape(tl.join(low, high), [t.shape[0], 2 * t.shape[1]])
    if MODE == 0:
        pairs -= ((1 << MANTISSA) + zero).to(DTYPE)
    return pairs


@triton.jit
def scale_value(scale, KIND: tl.constexpr):
    """A stored scale as float32."""
    if KIND == 0:
        return scale.to(tl.float32)
    elif KIND == 1:
        return scale.to(tl.float32) + 1.0
    else:
        code = scale.to(tl.int32)
        bits = tl.where(code == 0, 0x00400000, tl.where(code == 255, 0x7FC00000, code << 23))
        return bits.to(tl.float32, bitcast=True)
