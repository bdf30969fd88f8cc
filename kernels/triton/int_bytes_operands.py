# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""Codes where they lie in their bytes, activations as digits and scales, for int_bytes.py: what each lane loads and how."""

import triton
import triton.language as tl

from nstf.kernels.triton.operands import columns_of

BLOCKS = tl.constexpr(2)  # of rows on their way


@triton.constexpr_function
def runs_of(bits):
    """Runs of a word."""
    return 16 // bits


@triton.constexpr_function
def place_of(bits, r):
    """Bit of its byte where a code of a run begins."""
    # Of ten codes of 3 bits the third pair lies across two bytes, and is moved to the lower one.
    return (0, 3, 0, 1, 4)[r % 5] if bits == 3 else r % (16 // bits) % (8 // bits) * bits


@triton.constexpr_function
def is_upper(bits, r):
    """Whether codes of a run are in the upper byte of their half of a word."""
    return r % 5 > 2 if bits == 3 else r % (16 // bits) >= 8 // bits


@triton.constexpr_function
def places_of(bits):
    """All places of a word's codes."""
    return (0, 1, 3, 4) if bits == 3 else tuple(range(0, 8, bits))


@triton.constexpr_function
def joined(bits, flush):
    """Whether the two runs that a masked word has codes of end in one sum."""
    return bits != 3 and flush % (16 // bits) == 0


@triton.constexpr_function
def meets(bits, r, flush, place):
    """Whether a run has an operand of its own, with codes at this place."""
    joined = bits != 3 and flush % (16 // bits) == 0
    at = (0, 3, 0, 1, 4)[r % 5] if bits == 3 else r % (16 // bits) % (8 // bits) * bits
    return at == place and not (joined and r % (16 // bits) >= 8 // bits)


@triton.constexpr_function
def has_place(bits, begin, flush, place):
    """Whether a sum has codes at this place."""
    found = [
        (0, 3, 0, 1, 4)[r % 5] if bits == 3 else r % (16 // bits) % (8 // bits) * bits
        for r in range(begin, begin + flush)
    ]
    return place in found


@triton.constexpr_function
def inverse_power(place):
    return 2.0**-place


@triton.jit
def masked(w, BITS: tl.constexpr, J: tl.constexpr):
    """The codes of run J of words, each where it lies in its byte."""
    if BITS == 3:
        if J == 2:
            return (w >> 6) & 0x00070007
        elif J % 3 == 0:
            return w & 0x0E070E07
        else:
            return w & 0x70387038
    else:
        return w & ((((1 << BITS) - 1) << place_of(BITS, J)) * 0x01010101)


@triton.jit
def digit_pair(n0, n1, which, HARDWARE: tl.constexpr):
    """A digit of two numbers, each of them twice."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [n0, n1, which * 0x1111 + 0x4400], tl.uint32, True, 1
        )
    else:
        return ((n0 >> (which * 8)) & 0xFF) * 0x0101 + ((n1 >> (which * 8)) & 0xFF) * 0x01010000


@triton.jit
def eight_activations(x, line, k, batch, cols, end):
    """[n, 8]: neighbours in a row of activations from column k on, 0 from column `end` on."""
    at = k[:, None] + tl.arange(0, 8)[None, :]
    return tl.load(x + line[:, None] * cols + at, mask=(at < end) & (line < batch)[:, None], other=0.0)


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
    array, first, rows, run, g,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, RUNS: tl.constexpr, FLUSH: tl.constexpr, WIDE: tl.constexpr,
    ROWS16: tl.constexpr,
):  # fmt: skip
    """The stored scales of rows g and g + 8 for each sum of FLUSH runs, first all of row g; WIDE: words of their bytes."""
    COUNT: tl.constexpr = RUNS // FLUSH
    BYTES: tl.constexpr = array.dtype.element_ty.primitive_bitwidth // 8
    found = ()
    for h in tl.static_range(2):
        row = g + 8 * h
        if not ROWS16:
            row = tl.minimum(row, rows - 1 - first)
        if WIDE:
            # One word for each lane: with a second dimension Triton may deal them to other lanes.
            at = array + first.to(tl.int64) * GROUPS + (row * GROUPS + run // FLUSH)
            for i in tl.static_range((COUNT * BYTES + 7) // 8):
                if COUNT * BYTES == 2:
                    some = tl.load(at.to(tl.pointer_type(tl.uint16)), mask=first < rows, other=0)
                    found = found + (some.to(tl.uint32),)
                elif COUNT * BYTES == 4:
                    found = found + (tl.load(at.to(tl.pointer_type(tl.uint32)), mask=first < rows, other=0),)
                else:
                    some = tl.load(at.to(tl.pointer_type(tl.uint64)) + i, mask=first < rows, other=0)
                    found = found + (some.to(tl.uint32), (some >> 32).to(tl.uint32))
        else:
            for f in tl.static_range(COUNT):
                if GROUP == FLUSH * 32:
                    # One address for all of them.
                    group = run // FLUSH + f
                    at = array + first.to(tl.int64) * GROUPS + (row * GROUPS + run // FLUSH) + f
                else:
                    group = (run + f * FLUSH) // (GROUP // 32)
                    at = array + first.to(tl.int64) * GROUPS + (row * GROUPS + group)
                found = found + (tl.load(at, mask=(first < rows) & (group < GROUPS), other=0),)
    return found


@triton.jit
def row_scales(array, first, rows, g):
    """Of rows g and g + 8."""
    found = ()
    for h in tl.static_range(2):
        row = first + g + 8 * h
        found = found + (tl.load(array + row, mask=row < rows, other=0.0),)
    return found


@triton.jit
def scale_at(
    found, B: tl.constexpr, F: tl.constexpr, H: tl.constexpr, COUNT: tl.constexpr, BYTES: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Of what `block_scales` found for all blocks that of sum F of block B in row g or (H = 1) g + 8, as float32."""
    if not WIDE:
        stored = found[(2 * B + H) * COUNT + F]
    else:
        word = found[(2 * B + H) * (len(found) // BLOCKS // 2) + F * BYTES // 4]
        if BYTES == 2:
            stored = (word >> (F % 2 * 16)).to(tl.uint16).to(tl.float16, bitcast=True)
        else:
            stored = (word >> (F % 4 * 8)) & 0xFF
    if BYTES == 2:
        return stored.to(tl.float32)
    else:
        # A step of 1 to 256, by its bits beside 2^23: conversions are slow.
        return (stored.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388607.0


@triton.jit
def prefetch(words, first, rows, width, chunk, lane, CHUNKS: tl.constexpr):
    """The words of 16 rows on their way to the second-level cache."""
    for k in tl.static_range((CHUNKS + 3) // 4):
        row = tl.minimum(first + lane % 16, rows - 1)
        word = tl.minimum(chunk * 16 + (2 * k + lane // 16) * 32, width - 1)
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l", [(words + row * width + word).to(tl.int64)], tl.uint32, False, 1,
        )  # fmt: skip
