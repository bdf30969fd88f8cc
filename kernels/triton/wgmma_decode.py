# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""Numbers from codes for wgmma.py: a step's words, in the lanes that have them, to the left operand of a product."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nstf.kernels.triton import numbers as _numbers
from nstf.kernels.triton import operands as _operands

# Functions of plain Triton that work on elements alone, for use in Gluon.
codes_at = gluon.jit(_numbers.codes_at.fn)
numbers32 = gluon.jit(_numbers.numbers32.fn)
scale_value = gluon.jit(_numbers.scale_value.fn)
looked_up = gluon.jit(_operands.looked_up.fn)
bytes_of = gluon.jit(_operands.bytes_of.fn)


@gluon.jit
def _rounded(low, high, DTYPE: gl.constexpr):
    """Two float32 rounded to DTYPE, in a word."""
    if DTYPE == gl.float16:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, True, 1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, True, 1
        )


@gluon.jit
def _less(pairs, other, DTYPE: gl.constexpr):
    """Two numbers of a word less two others."""
    if DTYPE == gl.float16:
        return gl.inline_asm_elementwise(
            "sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [pairs, other], gl.int32, True, 1
        )
    else:
        return gl.inline_asm_elementwise(
            "sub.rn.bf16x2 $0, $1, $2;", "=r,r,r", [pairs, other], gl.int32, True, 1
        )


@gluon.jit
def _times(pairs, other, DTYPE: gl.constexpr):
    """Two numbers of a word times two others."""
    if DTYPE == gl.float16:
        return gl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [pairs, other], gl.int32, True, 1
        )
    else:
        return gl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [pairs, other], gl.int32, True, 1
        )


@gluon.jit
def per_group(
    scale,
    zeros,
    local,
    rows,
    place,
    R: gl.constexpr,
    SPAN: gl.constexpr,
    BN: gl.constexpr,
    GROUP: gl.constexpr,
    GROUPS: gl.constexpr,
    RUNS: gl.constexpr,
    FLUSH: gl.constexpr,
    WHOLE: gl.constexpr,
    ZERO: gl.constexpr,
):
    """Scales and zeros, as they are stored, of the groups that begin in step R of the chunk at `place`: a load for each."""
    n, _, c, _ = place
    # Rows that do not exist have those of others: in bounds, and never stored.
    row = gl.minimum(gl.maximum(n * BN + local, 0), rows - 1)
    scales = ()
    offsets = ()
    for i in gl.static_range(RUNS):
        if (R * RUNS + i) % FLUSH == 0:
            at = row * GROUPS + gl.minimum((c * SPAN + (R * RUNS + i) * 32) // GROUP, GROUPS - 1)
            if not WHOLE:
                scales = scales + (gl.load(scale + at),)
            if ZERO < 0:
                offsets = offsets + (gl.load(zeros + at),)
    return scales, offsets


@gluon.jit
def _with_exponent(words, magic, MASK: gl.constexpr):
    """words & MASK | magic, in one instruction: of two constants the assembler makes two."""
    mask = gl.full_like(words, MASK)
    magic = gl.full_like(words, 0) + magic
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [words, mask, magic], gl.int32, True, 1
    )


@gluon.jit
def _spread(values, like):
    """[rows] -> the shape of `like`, [rows, 16]."""
    wide, _ = gl.broadcast(values[:, None], like)
    return wide


@gluon.jit
def decoded(
    w,
    values,
    table,
    factor,
    less,
    raw,
    raw_zero,
    magic,
    R: gl.constexpr,
    RUNS: gl.constexpr,
    FLUSH: gl.constexpr,
    DTYPE: gl.constexpr,
    PLANES: gl.constexpr,
    SHIFTS: gl.constexpr,
    BITS: gl.constexpr,
    ZERO: gl.constexpr,
    SCALES: gl.constexpr,
    MODE: gl.constexpr,
    EXPONENT: gl.constexpr,
    BIAS: gl.constexpr,
    PAIRS: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """The numbers of step R of a chunk, two to a word, [rows, 16] for each run; and scale and zero of the last group."""
    MAGIC: gl.constexpr = 0x64006400 if DTYPE == gl.float16 else 0x43004300
    POWER: gl.constexpr = 1024.0 if DTYPE == gl.float16 else 128.0
    N0: gl.constexpr = 16 // PLANES[0]
    REST: gl.constexpr = ((1 << (BITS - 1)) - 1) * 0x00010001
    SIGN: gl.constexpr = (1 << (BITS - 1)) * 0x00010001
    LOW: gl.constexpr = (10 if DTYPE == gl.float16 else 7) - (BITS - 1 - EXPONENT)
    UP: gl.constexpr = 2.0 ** ((15 if DTYPE == gl.float16 else 127) - BIAS)
    found = ()
    for i in gl.static_range(RUNS):
        if (R * RUNS + i) % FLUSH == 0:
            if not WHOLE:
                factor = scale_value(raw[i // FLUSH], SCALES)
                if SCALES == 1 and MODE == 1:
                    # The largest float times the largest step stays in the range of float16.
                    factor = factor * 0.25
            if ZERO < 0:
                less = raw_zero[i // FLUSH].to(gl.float32)
        if MODE == 2:
            t = values[(R * RUNS + i) % N0]
        elif PAIRS and MODE == 0 and len(PLANES) == 1:
            t = _with_exponent(w[0] >> ((R * RUNS + i) % N0 * BITS), magic, REST | SIGN)
        else:
            t = codes_at(w[0], w[1], w[2], R * RUNS + i, PLANES, SHIFTS)
        if PAIRS:
            if MODE == 0:
                if len(PLANES) > 1:
                    t = t | MAGIC
                t = _less(t, _spread(_rounded(less + POWER, less + POWER, DTYPE), t), DTYPE)
            elif MODE == 1:
                # The bits of the float in place, then the difference of the biases.
                t = ((t & SIGN) << (16 - BITS)) | ((t & REST) << LOW)
                t = _times(t, _spread(_rounded(less * 0 + UP, less * 0 + UP, DTYPE), t), DTYPE)
            if not WHOLE:
                t = _times(t, _spread(_rounded(factor, factor, DTYPE), t), DTYPE)
        else:
            if MODE == 2:
                low = t.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
                high = (t >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
            else:
                zero = _spread(less, t)
                low = numbers32(t & 0xFFFF, table, zero, MODE, BITS, EXPONENT, BIAS)
                high = numbers32((t >> 16) & 0xFFFF, table, zero, MODE, BITS, EXPONENT, BIAS)
            if not WHOLE:
                scales = _spread(factor, t)
                low = low * scales
                high = high * scales
            t = _rounded(low, high, DTYPE)
        found = found + (t,)
    return found, factor, less


@gluon.jit
def operand_of(pairs, RUNS: gl.constexpr, BN: gl.constexpr, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Runs of pairs side by side, [BN, 32 RUNS], as left operand: nothing changes lanes."""
    if RUNS == 4:
        both = gl.join(gl.join(pairs[0], pairs[1]), gl.join(pairs[2], pairs[3]))
        both = gl.reshape(gl.permute(both, (0, 3, 2, 1)), [BN, 64])
    elif RUNS == 2:
        both = gl.reshape(gl.permute(gl.join(pairs[0], pairs[1]), (0, 2, 1)), [BN, 32])
    else:
        both = pairs[0]
    low = both.to(gl.int16).to(DTYPE, bitcast=True)
    high = (both >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    wide = gl.reshape(gl.join(low, high), [BN, 32 * RUNS])
    return gl.convert_layout(wide, LAYOUT, assert_trivial=True)
