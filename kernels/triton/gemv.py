# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""One row of activations times a packed matrix, from the codes: y = W x.

A thread keeps the activations of its columns for as long as the kernel runs and goes down the rows, four words (16 bytes)
of each of `ROWS` rows at a time, the next ones on their way while it computes. The work per weight is what limits such a
kernel, more than the bytes (an H200 brings 2 weights a byte faster than it can spend 4 instructions on each), so a code
becomes a number without a conversion. With a 1.0 around it, a field of a word at bit p is the float 1 + code 2^(p-23): one
`and-or`, after a shift that several fields of a word share. The powers of two go onto the activations, and the ones add up
to a sum of activations, the same for all rows. For fp8 and mxfp4 sign and exponent move to their places in a float32, whose
bias is put right by powers of two on the activations and on the result.

Error: float32 rounding of sums in which a one stands beside code 2^(p-23), p >= 11: below 1e-4 of sum |x w|.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.gemv_tile import places, tile_for
from nstf.kernels.triton.launching import (
    lanes_of,
    launch,
    layout_name,
    leaf_arguments,
    multiples,
    overlap_options,
    overlaps,
    processors_of,
    scale_type,
)
from nstf.kernels.triton.numbers import scale_value
from nstf.kernels.triton.packed import INTEGER, LANES, Layout, Packed
from nstf.kernels.triton.spec import KernelSpec, pointer_type
from nstf.kernels.triton.sums import sum_spec

# The home of the others is launching.py, sums.py and numbers.py.
__all__ = [
    "ONE",
    "gemv",
    "gemv_kernel",
    "gemv_specs",
    "lanes_of",
    "launch",
    "leaf_arguments",
    "multiples",
    "overlap_options",
    "overlaps",
    "processors_of",
    "scale_value",
    "sum_spec",
]

ONE = 0x3F800000


@triton.jit
def _field(
    w,
    table,
    one,
    OFFSET: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    MODE: tl.constexpr,
    EXPONENT: tl.constexpr,
):
    """The float32 that a field of a word makes, times what `FACTOR` undoes, plus 1 in mode 0."""
    if MODE == 0:
        if SHIFT > 0:
            t = w << SHIFT
        elif SHIFT < 0:
            t = w >> -SHIFT
        else:
            t = w
        MASK: tl.constexpr = ((1 << BITS) - 1) << (OFFSET + SHIFT)
        return ((t & MASK) | one).to(tl.float32, bitcast=True)
    elif MODE == 1:
        # An arithmetic shift: the copies of the sign bit are masked out, but for bit 31.
        MANTISSA: tl.constexpr = BITS - 1 - EXPONENT
        DOWN: tl.constexpr = 8 - EXPONENT
        LOW: tl.constexpr = 23 - MANTISSA
        KEEP: tl.constexpr = ((1 << (BITS - 1)) - 1) << LOW
        t = w
        if OFFSET + BITS < 32:
            t = w << (32 - BITS - OFFSET)
        return ((t >> DOWN) & (KEEP - 0x80000000)).to(tl.float32, bitcast=True)
    else:
        return tl.load(table + ((w >> OFFSET) & 15)).to(tl.float32)


@triton.jit
def _words(words, row, rows, lane, four, width, EVEN: tl.constexpr):
    """Four words of each row for each lane, zero outside the matrix."""
    at = row[None, :, None] * width + (lane * 4)[:, None, None] + four[None, None, :]
    ok = (row < rows)[None, :, None]
    if not EVEN:
        ok = ok & (lane * 4 < width)[:, None, None]
    return tl.load(words + at, mask=ok, other=0)


@triton.jit
def _per_group(
    array,
    row,
    rows,
    begin,
    four,
    cols,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    FLUSHES: tl.constexpr,
    STRIDE: tl.constexpr,
    UNIFORM: tl.constexpr,
    EVEN: tl.constexpr,
):
    """What each lane needs of an array [rows, GROUPS], once per group of its columns (else once per word)."""
    found = ()
    for i in tl.static_range(FLUSHES):
        k = begin + i * STRIDE
        if UNIFORM:
            ok = (row < rows)[None, :]
            if not EVEN:
                # A padded chunk may lie behind the last group.
                ok = ok & (k < cols)[:, None]
            found = found + (
                tl.load(array + row[None, :] * GROUPS + (k // GROUP)[:, None], mask=ok, other=0),
            )
        else:
            at = k[:, None] + (2 * four)[None, :]
            ok = (row < rows)[None, :, None] & (at < cols)[:, None, :]
            found = found + (
                tl.load(array + row[None, :, None] * GROUPS + (at // GROUP)[:, None, :], mask=ok, other=0),
            )
    return found


@triton.jit
def gemv_product(
    x,  # [cols]
    words,  # i32: one plane
    scale,  # [rows, GROUPS]
    zeros,  # u8 [rows, GROUPS]
    row_scale,  # f32 [rows]
    table,  # f16 [16]
    y,  # [rows], or f32 [programs along the columns, rows]
    rows,
    cols,
    width,  # words of a row
    one,  # 0x3F800000, the bits of 1.0: an instruction has room for a single constant, the mask
    BITS: tl.constexpr,
    WEIGHT: tl.constexpr,  # of this plane in the code
    ZERO: tl.constexpr,  # to subtract from a code; -1: read from `zeros`; 0: none
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALES: tl.constexpr,
    MODE: tl.constexpr,
    EXPONENT: tl.constexpr,
    FACTOR: tl.constexpr,
    AFTER: tl.constexpr,
    PLACES: tl.constexpr,  # the shift of each field
    AMD: tl.constexpr,
    PDL: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    QUADS: tl.constexpr,
    LANES: tl.constexpr,
    place,  # of this program among those along the rows
    places,
    across,  # likewise along the columns
):
    J: tl.constexpr = 16 // BITS
    RUN: tl.constexpr = 2 * LANES
    SPAN: tl.constexpr = RUN * J
    WHOLE: tl.constexpr = GROUPS == 1
    UNIFORM: tl.constexpr = WHOLE or GROUP % RUN == 0
    STEP: tl.constexpr = 1 if (WHOLE or not UNIFORM) else GROUP // RUN  # runs of a group
    FLUSH: tl.constexpr = J if (WHOLE or STEP % J == 0) else (STEP if J % STEP == 0 else 1)
    FLUSHES: tl.constexpr = J // FLUSH

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if AMD:
        # Into a vector register: with mask and ones both scalar, CDNA would take two instructions for `and-or`.
        one = tl.inline_asm_elementwise("v_mov_b32 $0, $1", "=v,v", [one], tl.int32, True, 1)
    lane = across * QUADS + tl.arange(0, QUADS)
    four = tl.arange(0, 4)
    eight = tl.arange(0, 8)
    begin = lane // (LANES // 4) * SPAN + lane % (LANES // 4) * 8

    # The activations of each field, and per group what the ones and the zero points will have added.
    xs = ()
    ones = ()
    plains = ()
    added = tl.zeros([QUADS, 4], tl.float32)
    plain = tl.zeros([QUADS, 4], tl.float32)
    for j in tl.static_range(J):
        k = (begin + j * RUN)[:, None] + eight[None, :]
        if EVEN:
            some = tl.load(x + k)
        else:
            some = tl.load(x + k, mask=k < cols, other=0.0)
        low, high = tl.split(tl.reshape(some.to(tl.float32), [QUADS, 4, 2]))
        for half in tl.static_range(2):
            value = low if half == 0 else high
            if MODE == 0:
                more = value * (WEIGHT * (1 << (23 - 16 * half - j * BITS - PLACES[2 * j + half])))
                added += more
                if ZERO > 0:
                    added += value * ZERO
                elif ZERO < 0:
                    plain += value
            else:
                more = value * FACTOR
            xs = xs + (more,)
        if (j + 1) % FLUSH == 0:
            if UNIFORM:
                ones = ones + (tl.sum(added, axis=1),)
                plains = plains + (tl.sum(plain, axis=1),)
            else:
                ones = ones + (added,)
                plains = plains + (plain,)
            added = tl.zeros([QUADS, 4], tl.float32)
            plain = tl.zeros([QUADS, 4], tl.float32)

    step = places * ROWS
    row = place * ROWS + tl.arange(0, ROWS)
    w = _words(words, row, rows, lane, four, width, EVEN)
    scales = ()
    if not WHOLE:
        scales = _per_group(
            scale, row, rows, begin, four, cols, GROUP, GROUPS, FLUSHES, FLUSH * RUN, UNIFORM, EVEN
        )
    for first in range(place * ROWS, rows, step):
        row = first + tl.arange(0, ROWS)
        next_row = row + step
        next_w = _words(words, next_row, rows, lane, four, width, EVEN)
        next_scales = ()
        if not WHOLE:
            next_scales = _per_group(
                scale, next_row, rows, begin, four, cols, GROUP, GROUPS, FLUSHES, FLUSH * RUN, UNIFORM, EVEN
            )
        zero = ()
        if ZERO < 0:
            zero = _per_group(
                zeros, row, rows, begin, four, cols, GROUP, GROUPS, FLUSHES, FLUSH * RUN, UNIFORM, EVEN
            )
        acc = tl.zeros([QUADS, ROWS], tl.float32)
        part = tl.zeros([QUADS, ROWS, 4], tl.float32)
        for j in tl.static_range(J):
            for half in tl.static_range(2):
                number = _field(
                    w, table, one, 16 * half + j * BITS, PLACES[2 * j + half], BITS, MODE, EXPONENT
                )
                part += number * xs[2 * j + half][:, None, :]
            if (j + 1) % FLUSH == 0:
                if UNIFORM:
                    total = tl.sum(part, axis=2)
                    if MODE == 0:
                        total -= ones[j // FLUSH][:, None]
                    if ZERO < 0:
                        total -= zero[j // FLUSH].to(tl.float32) * plains[j // FLUSH][:, None]
                    if WHOLE:
                        acc += total
                    else:
                        acc += total * scale_value(scales[j // FLUSH], SCALES)
                else:
                    if MODE == 0:
                        part -= ones[j // FLUSH][:, None, :]
                    if ZERO < 0:
                        part -= zero[j // FLUSH].to(tl.float32) * plains[j // FLUSH][:, None, :]
                    acc += tl.sum(part * scale_value(scales[j // FLUSH], SCALES), axis=2)
                part = tl.zeros([QUADS, ROWS, 4], tl.float32)
        out = tl.sum(acc, axis=0) * AFTER
        if WHOLE:
            out *= scale_value(tl.load(scale + row, mask=row < rows, other=0), SCALES)
        if SCALES == 1:
            out *= tl.load(row_scale + row, mask=row < rows, other=0)
        tl.store(y + across * rows + row, out.to(y.dtype.element_ty), mask=row < rows)
        w = next_w
        scales = next_scales


@triton.jit
def gemv_kernel(
    x, words, scale, zeros, row_scale, table, y, rows, cols, width, one,
    BITS: tl.constexpr, WEIGHT: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    SCALES: tl.constexpr, MODE: tl.constexpr, EXPONENT: tl.constexpr, FACTOR: tl.constexpr, AFTER: tl.constexpr,
    PLACES: tl.constexpr, AMD: tl.constexpr, PDL: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    QUADS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """`gemv_product` by a grid of programs along rows and columns."""
    gemv_product(
        x, words, scale, zeros, row_scale, table, y, rows, cols, width, one, BITS, WEIGHT, ZERO, GROUP, GROUPS,
        SCALES, MODE, EXPONENT, FACTOR, AFTER, PLACES, AMD, PDL, EVEN, ROWS, QUADS, LANES, tl.program_id(0),
        tl.num_programs(0), tl.program_id(1),
    )  # fmt: skip


def gemv_specs(
    layout: Layout,
    dtype: torch.dtype,
    arch: str,
    out: torch.dtype | None = None,
    tile: dict[str, int] | None = None,
) -> list[KernelSpec]:
    """The launches for x [cols] of `dtype` times this matrix, to y of `out` (x's dtype when None).

    One per plane of the codes and, for several planes or for rows too long for one program, the sum of their parts.
    `tile` overrides the choice.
    """
    out = out or dtype
    made, parts = [], 0
    chosen = [tile_for(layout, bits, arch) | (tile or {}) for bits, _ in layout.planes]
    total = sum(c["SPLIT"] for c in chosen)
    for (bits, shift), one in zip(layout.planes, chosen, strict=True):
        made.append(_plane_spec(layout, bits, shift, one, dtype, out if total == 1 else torch.float32, arch))
        parts += one["SPLIT"]
    return made if total == 1 else [*made, sum_spec(layout.rows, total, out, arch)]


def _plane_spec(
    layout: Layout,
    bits: int,
    shift: int,
    tile: dict[str, int],
    dtype: torch.dtype,
    out: torch.dtype,
    arch: str,
) -> KernelSpec:
    rows, quads, warps, split = tile["ROWS"], tile["QUADS"], tile["WARPS"], tile["SPLIT"]
    even = layout.cols == layout.padded and layout.cols == split * quads * 8 * (16 // bits)
    blocks = triton.cdiv(layout.rows, rows)
    sizes = {"rows": layout.rows, "cols": layout.cols, "width": layout.width(bits)}
    return KernelSpec(
        name=f"gemv_{layout_name(layout)}p{bits}a{shift}_{pointer_type(dtype)[1:]}_{pointer_type(out)[1:]}"
        f"_{layout.groups}x{layout.group}_r{rows}q{quads}w{warps}" + ("e" if even else ""),
        fn=gemv_kernel,
        signature={
            "x": pointer_type(dtype),
            "words": "*i32",
            "scale": scale_type(layout),
            "zeros": "*u8",
            "row_scale": "*fp32",
            "table": "*fp16",
            "y": pointer_type(out),
            **dict.fromkeys(sizes, "i32"),
            "one": "i32",
        },
        constants={
            "BITS": bits,
            "WEIGHT": 1 << shift,
            "ZERO": layout.zero if shift == 0 else 0,
            "GROUP": layout.group,
            "GROUPS": layout.groups,
            "SCALES": layout.scales,
            "MODE": layout.mode,
            "EXPONENT": layout.exponent,
            "FACTOR": 2.0**60 if layout.exponent else 1.0,
            "AFTER": 2.0 ** (127 - layout.bias - 60) if layout.exponent else 1.0,
            "PLACES": places(bits) if layout.mode == INTEGER else (0,) * 2 * (16 // bits),
            "AMD": arch.startswith("gfx") and not triton.knobs.runtime.interpret,
            "PDL": overlaps(arch),
            "EVEN": even,
            "ROWS": rows,
            "QUADS": quads,
            "LANES": LANES,
        },
        divisible=("x", "words", "scale", "zeros", "row_scale", "table", "y", *multiples(sizes), "one"),
        num_warps=warps,
        num_stages=1,
        options=overlap_options(arch),
        kind="gemv",
        grid=(min(blocks, triton.cdiv(tile["PROGRAMS"], split)), split, 1),
    )


def gemv(x: Tensor, packed: Packed, specs: list[KernelSpec], out: torch.dtype | None = None) -> Tensor:
    """x [1, cols] -> y [1, rows] of `out` (x's dtype when None), as the specs were made for."""
    layout = packed.layout
    y = torch.empty(1, layout.rows, dtype=out or x.dtype, device=x.device)
    parts = y
    if len(specs) > 1:
        parts = torch.empty(specs[-1].constants["SPLIT"], layout.rows, dtype=torch.float32, device=x.device)
    words, *others = leaf_arguments(packed)
    at = 0
    for spec, (bits, shift) in zip(specs, layout.planes, strict=False):
        plane = words[layout.start(shift) :] if shift else words
        into = parts[at:] if at else parts
        launch(spec, x, plane, *others, into, layout.rows, layout.cols, layout.width(bits), ONE)
        at += spec.grid[1]
    if len(specs) > 1:
        launch(specs[-1], parts, y, y.numel())
    return y
