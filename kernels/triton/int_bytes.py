# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""One or two rows of activations times codes of 2, 3 and 4 bits on NVIDIA: the matrix cores take codes where they lie.

m16n8k32 multiplies unsigned bytes. A code that is masked where it lies in its byte is the code times a power of two, and one
mask does so for four columns: a quarter of an instruction a weight (0.4 at 3 bits), where the operands of 16 bits of
skinny.py take one. Codes at different places of their bytes have sums of their own, which are brought to one power of two
when their group ends. Codes in the other bytes of a masked word meet activations that are zero.

Activations are whole numbers, scaled by a power of two for each warp, whose three digits to the base of 256 (-128 to 127)
take a column of the eight each, as in trellis_bytes.py: what is below 2^-22 of the largest of a warp's columns is lost. Sums
of a group are exact: they start at the bits of 1.5 * 2^23, so that no conversion is needed, and the zero point's share is
taken off with that number.

As in skinny.py a warp keeps the activations of its columns as operands and goes down the rows, sixteen at a time; lane
4 g + t holds rows g and g + 8, and columns 8 t .. 8 t + 7 of every run of 32. Two blocks of rows are on their way: words go
into the registers of those that were just multiplied, since a copy of words that have not arrived would wait for them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.launching import (
    launch,
    layout_name,
    leaf_arguments,
    multiples,
    overlap_options,
    overlaps,
    processors_of,
    scale_type,
)
from nstf.kernels.triton.operands import columns_of, over_warps
from nstf.kernels.triton.packed import EXPONENT, INTEGER, LANES, RUN, STEPS, Layout, Packed
from nstf.kernels.triton.shuffle_operands import number_of
from nstf.kernels.triton.spec import KernelSpec, pointer_type
from nstf.kernels.triton.sums import sum_spec
from nstf.kernels.triton.trellis import hardware_of
from nstf.kernels.triton.trellis_bytes import mma_bytes

LARGEST_BATCH = 2
# Below, skinny.py begins and ends faster (docs/gpu_speed.md).
LEAST_WEIGHTS = 50_000_000
# Runs of a sum: more would leave the bits of a float32's mantissa.
MOST_RUNS = 4
_BLOCKS = tl.constexpr(2)  # of rows on their way
_AHEAD = tl.constexpr(2)  # blocks more that go to the second-level cache before activations are there


@triton.constexpr_function
def _runs(bits):
    """Runs of a word."""
    return 16 // bits


@triton.constexpr_function
def _place(bits, r):
    """Bit of its byte where a code of a run begins."""
    # Of ten codes of 3 bits the third pair lies across two bytes, and is moved to the lower one.
    return (0, 3, 0, 1, 4)[r % 5] if bits == 3 else r % (16 // bits) % (8 // bits) * bits


@triton.constexpr_function
def _upper(bits, r):
    """Whether codes of a run are in the upper byte of their half of a word."""
    return r % 5 > 2 if bits == 3 else r % (16 // bits) >= 8 // bits


@triton.constexpr_function
def _places(bits):
    """All places of a word's codes."""
    return (0, 1, 3, 4) if bits == 3 else tuple(range(0, 8, bits))


@triton.constexpr_function
def _joined(bits, flush):
    """Whether the two runs that a masked word has codes of end in one sum."""
    return bits != 3 and flush % (16 // bits) == 0


@triton.constexpr_function
def _meets(bits, r, flush, place):
    """Whether a run has an operand of its own, with codes at this place."""
    joined = bits != 3 and flush % (16 // bits) == 0
    at = (0, 3, 0, 1, 4)[r % 5] if bits == 3 else r % (16 // bits) % (8 // bits) * bits
    return at == place and not (joined and r % (16 // bits) >= 8 // bits)


@triton.constexpr_function
def _any(bits, begin, flush, place):
    """Whether a sum has codes at this place."""
    found = [
        (0, 3, 0, 1, 4)[r % 5] if bits == 3 else r % (16 // bits) % (8 // bits) * bits
        for r in range(begin, begin + flush)
    ]
    return place in found


@triton.constexpr_function
def _half_of(place):
    return 2.0**-place


@triton.jit
def _masked(w, BITS: tl.constexpr, J: tl.constexpr):
    """The codes of run J of words, each where it lies in its byte."""
    if BITS == 3:
        if J == 2:
            return (w >> 6) & 0x00070007
        elif J % 3 == 0:
            return w & 0x0E070E07
        else:
            return w & 0x70387038
    else:
        return w & ((((1 << BITS) - 1) << _place(BITS, J)) * 0x01010101)


@triton.jit
def _pair(n0, n1, which, HARDWARE: tl.constexpr):
    """A digit of two numbers, each of them twice."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [n0, n1, which * 0x1111 + 0x4400], tl.uint32, True, 1
        )
    else:
        return ((n0 >> (which * 8)) & 0xFF) * 0x0101 + ((n1 >> (which * 8)) & 0xFF) * 0x01010000


@triton.jit
def _activations(x, line, k, batch, cols, end):
    """[n, 8]: neighbours in a row of activations from column k on, 0 from column `end` on."""
    at = k[:, None] + tl.arange(0, 8)[None, :]
    return tl.load(x + line[:, None] * cols + at, mask=(at < end) & (line < batch)[:, None], other=0.0)


@triton.jit
def _words(
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
def _scales(
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
def _row_scales(array, first, rows, g):
    """Of rows g and g + 8."""
    found = ()
    for h in tl.static_range(2):
        row = first + g + 8 * h
        found = found + (tl.load(array + row, mask=row < rows, other=0.0),)
    return found


@triton.jit
def _scale(
    found, B: tl.constexpr, F: tl.constexpr, H: tl.constexpr, COUNT: tl.constexpr, BYTES: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Of what `_scales` found for all blocks that of sum F of block B in row g or (H = 1) g + 8, as float32."""
    if not WIDE:
        stored = found[(2 * B + H) * COUNT + F]
    else:
        word = found[(2 * B + H) * (len(found) // _BLOCKS // 2) + F * BYTES // 4]
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
def _ask_for(words, first, rows, width, chunk, lane, CHUNKS: tl.constexpr):
    """The words of 16 rows on their way to the second-level cache."""
    for k in tl.static_range((CHUNKS + 3) // 4):
        row = tl.minimum(first + lane % 16, rows - 1)
        word = tl.minimum(chunk * 16 + (2 * k + lane // 16) * 32, width - 1)
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l", [(words + row * width + word).to(tl.int64)], tl.uint32, False, 1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "each"])
def int_bytes_kernel(
    x,  # [batch, cols]
    words,  # i32 [rows, width]
    scale,  # f16, or u8 in steps [rows, GROUPS]
    row_scale,  # f32 [rows], of steps
    y,  # [batch, rows], or f32 [programs along the columns, batch, rows]
    batch,
    rows,
    cols,
    width,
    each,  # chunks of a program
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    STEPS: tl.constexpr,
    FLUSH: tl.constexpr,  # runs of a sum
    WIDE: tl.constexpr,  # scales of a row are loaded at once
    EVEN: tl.constexpr,  # chunks fill the warps
    ROWS16: tl.constexpr,  # rows come in sixteens
    HARDWARE: tl.constexpr,
    PDL: tl.constexpr,
    S: tl.constexpr,  # warps, side by side along the columns
    CHUNKS: tl.constexpr,  # of each warp
):
    J: tl.constexpr = 16 // BITS
    RUNS: tl.constexpr = CHUNKS * J
    SUMS: tl.constexpr = RUNS // FLUSH
    PLACES: tl.constexpr = _places(BITS)
    BYTES: tl.constexpr = 1 if STEPS else 2

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.arange(0, 32 * S)
    warp = i // 32
    g = i // 4 % 8
    t = i % 4
    chunk = tl.program_id(1) * each + warp * CHUNKS
    run = chunk * J
    # Of a program's last warp only what is its own.
    end = tl.minimum((tl.program_id(1) + 1) * each * J * 32, cols)
    begin = tl.program_id(0) * 16
    step = tl.num_programs(0) * 16

    w = ()
    scales = ()
    factors = ()
    for b in tl.static_range(_BLOCKS):
        if STEPS:
            factors = factors + _row_scales(row_scale, begin + b * step, rows, g)
        w = w + _words(words, begin + b * step, rows, width, chunk, g, t, CHUNKS, EVEN, ROWS16)
        scales = scales + _scales(
            scale, begin + b * step, rows, run, g, GROUP, GROUPS, RUNS, FLUSH, WIDE, ROWS16
        )
    if PDL:
        for d in tl.static_range(_AHEAD):
            _ask_for(words, begin + (_BLOCKS + d) * step, rows, width, chunk, i % 32, CHUNKS)
        tl.extra.cuda.gdc_wait()

    # The largest number of a warp's columns: sixteen lanes for each of two rows of activations.
    line = g // 4
    most = tl.zeros([32 * S], tl.float32)
    # All loads before what waits for them.
    slices = ()
    for q in tl.static_range((RUNS + 3) // 4):
        own = (g % 4 * 4 + t + 16 * q) * 8
        slices = slices + (
            _activations(x, line, tl.where(own < RUNS * 32, run * 32 + own, end), batch, cols, end),
        )
    some = ()
    for r in tl.static_range(RUNS):
        some = some + (_activations(x, line, (run + r) * 32 + t * 8, batch, cols, end),)
    for q in tl.static_range((RUNS + 3) // 4):
        values = columns_of(slices[q].to(tl.float32), 8)
        for j in tl.static_range(8):
            most = tl.maximum(most, tl.abs(values[j]), propagate_nan=tl.PropagateNan.ALL)
    # As whole numbers, of which a NaN is the largest.
    exponent = tl.max(tl.reshape(most.to(tl.int32, bitcast=True) >> 23, [S, 2, 16]), axis=2)
    back = tl.where(exponent == 255, float("nan"), 1.0)
    exponent = tl.maximum(exponent, 22)
    up = ((275 - exponent) << 23).to(tl.float32, bitcast=True)
    up = tl.reshape(tl.broadcast_to(up[:, :, None], [S, 2, 16]), [32 * S])
    back *= ((exponent - 21) << 23).to(tl.float32, bitcast=True)
    worth = tl.arange(0, 4)[None, None, :]
    worth = tl.where(worth < 3, (1 << (8 * worth)).to(tl.float32), 0.0)
    back = tl.reshape(back[:, :, None] * worth, [S, 1, 4, 2])

    # A column of the eight for each digit; that of the fourth is worth nothing.
    which = (g % 4).to(tl.uint32)
    pairs = ()
    for r in tl.static_range(RUNS):
        values = columns_of(some[r].to(tl.float32), 8)
        for m in tl.static_range(4):
            n0 = number_of(values[2 * m], up, 0x8080)
            n1 = number_of(values[2 * m + 1], up, 0x8080)
            pairs = pairs + (_pair(n0, n1, which, HARDWARE),)
    # What the codes of each run meet: with the run that has the other bytes, where both end in one sum.
    met = ()
    for r in tl.static_range(RUNS):
        for m in tl.static_range(4):
            if _joined(BITS, FLUSH):
                if _upper(BITS, r):
                    met = met + (pairs[4 * r + m],)
                else:
                    other = pairs[4 * (r + _runs(BITS) // 2) + m]
                    met = met + ((pairs[4 * r + m] & 0x00FF00FF) | (other & 0xFF00FF00),)
            elif _upper(BITS, r):
                met = met + (pairs[4 * r + m] & 0xFF00FF00,)
            else:
                met = met + (pairs[4 * r + m] & 0x00FF00FF,)

    zero = tl.zeros([32 * S], tl.int32)
    magic = zero + 0x4B400000  # the bits of 1.5 * 2^23
    # What is too much in each sum: that number, and the zero point times the activations.
    offsets = ()
    for f in tl.static_range(SUMS):
        for e in tl.static_range(len(PLACES)):
            acc = (zero, zero, zero, zero)
            for r in tl.static_range(f * FLUSH, (f + 1) * FLUSH):
                if _meets(BITS, r, FLUSH, PLACES[e]):
                    one = zero.to(tl.uint32, bitcast=True) + (1 << (BITS - 1 + PLACES[e])) * 0x01010101
                    for m in tl.static_range(2):
                        acc = mma_bytes(
                            one, one, one, one, met[4 * r + 2 * m], met[4 * r + 2 * m + 1], acc, S, HARDWARE
                        )
            offsets = offsets + (acc[0].to(tl.float32) + 12582912.0, acc[1].to(tl.float32) + 12582912.0)

    # A lane has columns 2 t and 2 t + 1 of the sums.
    first_worth, second_worth = tl.split(back)
    first_worth = tl.reshape(tl.broadcast_to(first_worth, [S, 8, 4]), [32 * S])
    second_worth = tl.reshape(tl.broadcast_to(second_worth, [S, 8, 4]), [32 * S])

    for first in range(begin, rows, 2 * step):
        coming = ()
        next_scales = ()
        next_factors = ()
        sums = ()
        for b in tl.static_range(_BLOCKS):
            total = (zero.to(tl.float32), zero.to(tl.float32), zero.to(tl.float32), zero.to(tl.float32))
            for f in tl.static_range(SUMS):
                part = (zero.to(tl.float32), zero.to(tl.float32), zero.to(tl.float32), zero.to(tl.float32))
                for e in tl.static_range(len(PLACES)):
                    if _any(BITS, f * FLUSH, FLUSH, PLACES[e]):
                        acc = (magic, magic, magic, magic)
                        for r in tl.static_range(f * FLUSH, (f + 1) * FLUSH):
                            if _meets(BITS, r, FLUSH, PLACES[e]):
                                for m in tl.static_range(2):
                                    acc = mma_bytes(
                                        _masked(w[(b * CHUNKS + r // J) * 8 + 2 * m], BITS, r % J),
                                        _masked(w[(b * CHUNKS + r // J) * 8 + 2 * m + 4], BITS, r % J),
                                        _masked(w[(b * CHUNKS + r // J) * 8 + 2 * m + 1], BITS, r % J),
                                        _masked(w[(b * CHUNKS + r // J) * 8 + 2 * m + 5], BITS, r % J),
                                        met[4 * r + 2 * m], met[4 * r + 2 * m + 1], acc, S, HARDWARE,
                                    )  # fmt: skip
                        left = offsets[2 * (f * len(PLACES) + e)]
                        right = offsets[2 * (f * len(PLACES) + e) + 1]
                        part = (
                            part[0] + (acc[0].to(tl.float32, bitcast=True) - left) * _half_of(PLACES[e]),
                            part[1] + (acc[1].to(tl.float32, bitcast=True) - right) * _half_of(PLACES[e]),
                            part[2] + (acc[2].to(tl.float32, bitcast=True) - left) * _half_of(PLACES[e]),
                            part[3] + (acc[3].to(tl.float32, bitcast=True) - right) * _half_of(PLACES[e]),
                        )
                upper_scale = _scale(scales, b, f, 0, SUMS, BYTES, WIDE)
                lower_scale = _scale(scales, b, f, 1, SUMS, BYTES, WIDE)
                total = (
                    total[0] + part[0] * upper_scale,
                    total[1] + part[1] * upper_scale,
                    total[2] + part[2] * lower_scale,
                    total[3] + part[3] * lower_scale,
                )
            upper = total[0] * first_worth + total[1] * second_worth
            lower = total[2] * first_worth + total[3] * second_worth
            if STEPS:
                upper *= factors[2 * b]
                lower *= factors[2 * b + 1]
            sums = sums + (tl.reshape(tl.join(upper, lower), [S, 8, 4, 2]),)
            # Into the registers that have just become free.
            later = first + (_BLOCKS + b) * step
            if STEPS:
                next_factors = next_factors + _row_scales(row_scale, later, rows, g)
            coming = coming + _words(words, later, rows, width, chunk, g, t, CHUNKS, EVEN, ROWS16)
            next_scales = next_scales + _scales(
                scale, later, rows, run, g, GROUP, GROUPS, RUNS, FLUSH, WIDE, ROWS16
            )
        w = coming
        scales = next_scales
        factors = next_factors
        both = tl.reshape(tl.permute(tl.join(sums[0], sums[1]), (0, 4, 3, 1, 2)), [S, 32, 4])
        # The two lanes of each row of activations as if they were warps.
        both = tl.permute(tl.reshape(both, [S, 32, 2, 2]), (0, 3, 1, 2))
        out = over_warps(tl.reshape(both, [2 * S, 32, 2]), 2 * S, 32, 2)
        inside = tl.arange(0, 32)
        row = first + inside // 16 * step + inside % 16
        lines = tl.arange(0, 2)
        at = (tl.program_id(1) * batch + lines)[None, :] * rows + row[:, None]
        tl.store(y + at, out.to(y.dtype.element_ty), mask=(row < rows)[:, None] & (lines < batch)[None, :])


def possible(layout: Layout, batch: int, dtype: torch.dtype, arch: str) -> bool:
    """Whether this kernel does it: symmetric integers of up to 4 bits, groups of whole runs, one or two rows of 16-bit
    activations, matrix instructions for bytes."""
    if not arch.startswith("sm_") or int(arch[3:]) < 80 or dtype not in (torch.float16, torch.bfloat16):
        return False
    known = layout.mode == INTEGER and layout.symmetric and layout.scales != EXPONENT and layout.bits <= 4
    grouped = not layout.whole and layout.group % RUN == 0 and layout.cols % 8 == 0
    return known and grouped and 1 <= batch <= LARGEST_BATCH


def suits(layout: Layout, batch: int, dtype: torch.dtype, arch: str) -> bool:
    """Whether to take it, by measurement: not for 4 bits in groups of 128, where skinny.py is as fast, nor for small
    matrices."""
    if not possible(layout, batch, dtype, arch) or layout.rows * layout.cols < LEAST_WEIGHTS:
        return False
    return layout.bits < 4 or layout.group < 128


def int_bytes_specs(
    layout: Layout,
    batch: int,
    dtype: torch.dtype,
    arch: str,
    out: torch.dtype | None = None,
    tile: dict[str, int] | None = None,
) -> list[KernelSpec]:
    """The launches for X [batch, cols]: the product and, when the columns take several programs, the sum of their parts.

    `tile` overrides the choice; `out`: Y's dtype (X's when None).
    """
    out = out or dtype
    chosen = _tile(layout.bits, arch) | (tile or {})
    s, many, limit = chosen["S"], chosen["CHUNKS"], chosen["REGISTERS"]
    runs = 16 // layout.bits
    chunks = layout.padded // (RUN * runs)
    split = triton.cdiv(chunks, s * many)
    flush = _flush(layout.group // RUN, runs * many)
    count = runs * many // flush
    even = layout.cols == layout.padded and chunks % (split * s * many) == 0
    wide = even and layout.group == RUN * flush and 1 < count <= 16 and count & (count - 1) == 0
    whole_blocks = layout.rows % 16 == 0
    sizes = {"rows": layout.rows, "cols": layout.cols, "width": layout.width(layout.bits)}
    product = KernelSpec(
        name=f"int_bytes_{layout_name(layout)}_{pointer_type(dtype)[1:]}_{layout.groups}x{layout.group}_s{s}c{many}"
        + ("e" if even else "")
        + ("w" if wide else "")
        + ("r" if whole_blocks else "")
        + (f"_{pointer_type(out)[1:]}" if split == 1 and out != dtype else "")
        + ("p" if split > 1 else ""),
        fn=int_bytes_kernel,
        signature={
            "x": pointer_type(dtype),
            "words": "*i32",
            "scale": scale_type(layout),
            "row_scale": "*fp32",
            "y": "*fp32" if split > 1 else pointer_type(out),
            "batch": "i32",
            **dict.fromkeys(sizes, "i32"),
            "each": "i32",
        },
        constants={
            "BITS": layout.bits,
            "GROUP": layout.group,
            "GROUPS": layout.groups,
            "STEPS": layout.scales == STEPS,
            "FLUSH": flush,
            "WIDE": wide,
            "EVEN": even,
            "ROWS16": whole_blocks,
            "HARDWARE": hardware_of(arch),
            "PDL": overlaps(arch),
            "S": s,
            "CHUNKS": many,
        },
        divisible=("x", "words", "scale", "row_scale", "y", *multiples(sizes)),
        num_warps=s,
        num_stages=1,
        options=overlap_options(arch) | ({} if triton.knobs.runtime.interpret else {"maxnreg": limit}),
        batch=batch,
        kind="int_bytes",
        grid=(min(triton.cdiv(layout.rows, 16), max(1, chosen["PROGRAMS"] // split)), split, 1),
    )
    return [product] if split == 1 else [product, sum_spec(batch * layout.rows, split, out, arch)]


def int_bytes(x: Tensor, packed: Packed, specs: list[KernelSpec], out: torch.dtype | None = None) -> Tensor:
    """x [batch, cols] -> y [batch, rows] of `out` (x's dtype when None), as the specs were made for."""
    layout, batch, split, many = packed.layout, len(x), specs[0].grid[1], specs[0].constants["CHUNKS"]
    y = torch.empty(batch, layout.rows, dtype=out or x.dtype, device=x.device)
    parts = y if split == 1 else torch.empty(split, *y.shape, dtype=torch.float32, device=x.device)
    width = layout.width(layout.bits)
    # As many for each program, in whole warps.
    each = triton.cdiv(triton.cdiv(width // LANES, split), many) * many
    words, scale, _, row_scale, _ = leaf_arguments(packed)
    launch(specs[0], x, words, scale, row_scale, parts, batch, layout.rows, layout.cols, width, each)
    if split > 1:
        launch(specs[1], parts, y, y.numel())
    return y


def _flush(group: int, runs: int) -> int:
    """Runs of a sum, of warps that have so many, with scales for groups of so many."""
    return next(n for n in (MOST_RUNS, 2, 1) if runs % n == 0 and group % n == 0)


def _tile(bits: int, arch: str) -> dict[str, int]:
    """Four warps of 256 columns each, 320 where ten codes make a word, as many programs as registers leave room for: from
    sweeps on an H200."""
    programs, registers = {2: (3, 168), 3: (2, 255), 4: (3, 168)}[bits]
    return {
        "S": 4,
        "CHUNKS": {2: 1, 3: 2, 4: 2}[bits],
        "PROGRAMS": processors_of(arch) * programs,
        "REGISTERS": registers,
    }
