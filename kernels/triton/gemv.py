# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""One row of activations times a packed matrix, from the codes: y = W x.

A program takes `ROWS` rows and goes over all columns; a thread loads four words (16 bytes) of each of its rows and the
activations they meet, which all its rows share. The work per weight is what limits such a kernel, more than the bytes
(an H200 brings 2 weights a byte faster than it can spend 4 instructions on each), so a code becomes a number without a
conversion. With a 1.0 around it, a field of a word is the float 1 + code 2^(o-8): one `and-or`, after one shift a byte.
The ones add up to a sum of activations, the same for all rows, which is subtracted once per group. For fp8 and mxfp4
sign and exponent move to their places in a float32, whose bias is put right by powers of two on the activations.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.packed import LANES, Layout, Packed
from nstf.kernels.triton.spec import KernelSpec, pointer_type

ONE = 0x3F800000


@triton.jit
def _field(
    w, table, one, OFFSET: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr, EXPONENT: tl.constexpr
):
    """The float32 that a field of a word makes, times what `_factor` undoes, plus 1 in mode 0."""
    if MODE == 0:
        # The byte moves to bits 15..22, the top of the mantissa.
        BYTE: tl.constexpr = OFFSET // 8
        if BYTE < 2:
            t = w << (15 - 8 * BYTE)
        else:
            t = w >> (8 * BYTE - 15)
        MASK: tl.constexpr = ((1 << BITS) - 1) << (15 + OFFSET % 8)
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


@triton.jit
def _plane(
    acc,
    x,
    words,
    scale,
    zeros,
    table,
    row,
    rows,
    cols,
    one,
    width,  # words of a row
    BITS: tl.constexpr,
    WEIGHT: tl.constexpr,  # of this plane in the code
    ZERO: tl.constexpr,  # to subtract; -1: read from `zeros`; 0: none
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALES: tl.constexpr,
    MODE: tl.constexpr,
    EXPONENT: tl.constexpr,
    FACTOR: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    QUADS: tl.constexpr,
    LANES: tl.constexpr,
):
    """acc [QUADS, ROWS] plus the products of one plane, lane by lane, scaled."""
    J: tl.constexpr = 16 // BITS
    RUN: tl.constexpr = 2 * LANES
    SPAN: tl.constexpr = RUN * J
    # The scale changes after every FLUSH runs of a chunk.
    UNIFORM: tl.constexpr = GROUP % RUN == 0 or GROUPS == 1
    FLUSH: tl.constexpr = (
        J if (GROUP % SPAN == 0 or GROUPS == 1) else (GROUP // RUN if UNIFORM and SPAN % GROUP == 0 else 1)
    )
    lane = tl.arange(0, QUADS)
    four = tl.arange(0, 4)
    eight = tl.arange(0, 8)
    row_ok = (row < rows)[None, :]
    for start in range(0, width // 4, QUADS):
        quad = start + lane
        chunk = quad // (LANES // 4)
        inside = quad % (LANES // 4)
        at = row[None, :, None] * width + (quad * 4)[:, None, None] + four[None, None, :]
        if EVEN:
            w = tl.load(words + at)
        else:
            w = tl.load(words + at, mask=row_ok[:, :, None] & (quad * 4 < width)[:, None, None], other=0)
        part = tl.zeros([QUADS, ROWS, 4], tl.float32)
        ones = tl.zeros([QUADS, 4], tl.float32)
        plain = tl.zeros([QUADS, 4], tl.float32)
        for j in tl.static_range(J):
            first = chunk * SPAN + j * RUN + inside * 8
            k = first[:, None] + eight[None, :]
            if EVEN:
                some = tl.load(x + k)
            else:
                some = tl.load(x + k, mask=k < cols, other=0.0)
            some = some.to(tl.float32)
            low, high = tl.split(tl.reshape(some, [QUADS, 4, 2]))
            for half in tl.static_range(2):
                value = low if half == 0 else high
                if MODE == 0:
                    more = value * (WEIGHT * (1 << (8 - (j * BITS) % 8)))
                    ones += more
                    if ZERO > 0:
                        ones += value * ZERO
                    elif ZERO < 0:
                        plain += value
                elif MODE == 1:
                    more = value * FACTOR
                else:
                    more = value
                part += _field(w, table, one, 16 * half + j * BITS, BITS, MODE, EXPONENT) * more[:, None, :]
            if (j + 1) % FLUSH == 0:
                if UNIFORM:
                    total = tl.sum(part, axis=2)
                    if MODE == 0:
                        total -= tl.sum(ones, axis=1)[:, None]
                    if GROUPS > 1:
                        begin = chunk * SPAN + (j + 1 - FLUSH) * RUN
                        at_group = row[None, :] * GROUPS + (begin // GROUP)[:, None]
                        # A padded chunk may lie behind the last group.
                        inside_row = row_ok & (begin < cols)[:, None]
                        if EVEN:
                            step = tl.load(scale + at_group)
                        else:
                            step = tl.load(scale + at_group, mask=inside_row, other=0)
                        if ZERO < 0:
                            if EVEN:
                                zero = tl.load(zeros + at_group)
                            else:
                                zero = tl.load(zeros + at_group, mask=inside_row, other=0)
                            total -= zero.to(tl.float32) * tl.sum(plain, axis=1)[:, None]
                        acc += total * scale_value(step, SCALES)
                    else:
                        if ZERO < 0:
                            zero = tl.load(zeros + row, mask=row < rows, other=0)
                            total -= zero.to(tl.float32)[None, :] * tl.sum(plain, axis=1)[:, None]
                        acc += total
                else:
                    k_word = (chunk * SPAN + j * RUN + inside * 8)[:, None] + (2 * four)[None, :]
                    at_word = row[None, :, None] * GROUPS + (k_word // GROUP)[:, None, :]
                    ok = row_ok[:, :, None] & (k_word < cols)[:, None, :]
                    step = scale_value(tl.load(scale + at_word, mask=ok, other=0), SCALES)
                    if MODE == 0:
                        part -= ones[:, None, :]
                    if ZERO < 0:
                        zero = tl.load(zeros + at_word, mask=ok, other=0)
                        part -= zero.to(tl.float32) * plain[:, None, :]
                    acc += tl.sum(part * step, axis=2)
                part = tl.zeros([QUADS, ROWS, 4], tl.float32)
                ones = tl.zeros([QUADS, 4], tl.float32)
                plain = tl.zeros([QUADS, 4], tl.float32)
    return acc


@triton.jit
def gemv_kernel(
    x,  # [cols]
    words,  # i32: all planes
    scale,  # [rows, GROUPS]
    zeros,  # u8 [rows, GROUPS]
    row_scale,  # f32 [rows]
    table,  # f16 [16]
    y,  # [rows]
    rows,
    cols,
    padded,
    one,  # 0x3F800000, the bits of 1.0: an instruction has room for a single constant, the mask
    PLANES: tl.constexpr,  # bits of each plane
    SHIFTS: tl.constexpr,  # and where they lie in the code
    ZERO: tl.constexpr,  # to subtract from a code; -1: read from `zeros`; 0: none
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALES: tl.constexpr,
    MODE: tl.constexpr,
    EXPONENT: tl.constexpr,
    FACTOR: tl.constexpr,
    AFTER: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    QUADS: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros([QUADS, ROWS], tl.float32)
    for plane in tl.static_range(len(PLANES)):
        acc = _plane(
            acc,
            x,
            words + rows * (padded // 32) * SHIFTS[plane],
            scale,
            zeros,
            table,
            row,
            rows,
            cols,
            one,
            padded // 32 * PLANES[plane],
            PLANES[plane],
            1 << SHIFTS[plane],
            ZERO if plane == 0 else 0,
            GROUP,
            GROUPS,
            SCALES,
            MODE,
            EXPONENT,
            FACTOR,
            EVEN,
            ROWS,
            QUADS,
            LANES,
        )
    out = tl.sum(acc, axis=0)
    if GROUPS == 1:
        out *= scale_value(tl.load(scale + row, mask=row < rows, other=0), SCALES)
    if SCALES == 1:
        out *= tl.load(row_scale + row, mask=row < rows, other=0)
    out *= AFTER
    tl.store(y + row, out.to(y.dtype.element_ty), mask=row < rows)


def lanes_of(arch: str) -> int:
    """Threads of a warp: 64 on CDNA (gfx9), 32 elsewhere."""
    return 64 if arch.startswith("gfx9") else 32


def gemv_spec(
    layout: Layout,
    dtype: torch.dtype,
    arch: str,
    out: torch.dtype | None = None,
    warps: int = 0,
    rows: int = 0,
) -> KernelSpec:
    """The launch for x [cols] of `dtype` times this matrix, to y of `out` (x's dtype when None).

    `warps` and `rows` of a program override the choice.
    """
    out = out or dtype
    lanes = lanes_of(arch)
    quads_of_row = layout.padded * max(b for b, _ in layout.planes) // 128
    if not warps:
        warps = max(1, min(4, triton.cdiv(quads_of_row, lanes)))
    quads = min(lanes * warps, triton.next_power_of_2(quads_of_row))
    rows = rows or (8 if layout.rows >= 4096 else 4)
    even = layout.rows % rows == 0 and layout.cols == layout.padded
    even = even and all(layout.padded * b // 128 % quads == 0 for b, _ in layout.planes)
    exponent = 127 - layout.bias - 60 if layout.exponent else 0
    constants = {
        "PLANES": tuple(b for b, _ in layout.planes),
        "SHIFTS": tuple(s for _, s in layout.planes),
        "ZERO": layout.zero,
        "GROUP": layout.group,
        "GROUPS": layout.groups,
        "SCALES": layout.scales,
        "MODE": layout.mode,
        "EXPONENT": layout.exponent,
        "FACTOR": 2.0**60 if layout.exponent else 1.0,
        "AFTER": 2.0**exponent,
        "EVEN": even,
        "ROWS": rows,
        "QUADS": quads,
        "LANES": LANES,
    }
    return KernelSpec(
        name=f"gemv_{layout_name(layout)}_{pointer_type(dtype)[1:]}_{layout.groups}x{layout.group}_r{rows}w{warps}"
        + (f"_{pointer_type(out)[1:]}" if out != dtype else "")
        + ("e" if even else ""),
        fn=gemv_kernel,
        signature={
            "x": pointer_type(dtype),
            "words": "*i32",
            "scale": scale_type(layout),
            "zeros": "*u8",
            "row_scale": "*fp32",
            "table": "*fp16",
            "y": pointer_type(out),
            "rows": "i32",
            "cols": "i32",
            "padded": "i32",
            "one": "i32",
        },
        constants=constants,
        divisible=("x", "words", "scale", "zeros", "row_scale", "table", "y", *even_sizes(layout)),
        num_warps=warps,
        num_stages=1,
        kind="gemv",
        grid=(triton.cdiv(layout.rows, rows), 1, 1),
    )


def gemv(x: Tensor, packed: Packed, spec: KernelSpec, out: torch.dtype | None = None) -> Tensor:
    """x [1, cols] -> y [1, rows] of `out` (x's dtype when None), as the spec was made for."""
    layout = packed.layout
    y = torch.empty(1, layout.rows, dtype=out or x.dtype, device=x.device)
    launch(spec, x, *leaf_arguments(packed), y, layout.rows, layout.cols, layout.padded, ONE)
    return y


def leaf_arguments(packed: Packed) -> tuple[Tensor, ...]:
    """words, scale, zeros, row_scale, table: what a matrix lacks is stood in for by its words, never read."""
    words = packed.words

    def present(array: Tensor | None) -> Tensor:
        return words if array is None else array

    return (words, packed.scale, present(packed.zeros), present(packed.row_scale), present(packed.table))


def launch(spec: KernelSpec, *arguments: object) -> None:
    """Runs the kernel of a spec on the current device."""
    spec.fn[spec.grid](
        *arguments, **spec.constants, num_warps=spec.num_warps, num_stages=spec.num_stages, **spec.options
    )


def scale_type(layout: Layout) -> str:
    """The pointer type of the stored scales."""
    return "*u8" if layout.scales != 0 else "*fp32" if layout.wide_scales else "*fp16"


def layout_name(layout: Layout) -> str:
    """`int4`, `fp8`, `fp4`, `grid4`, with what else the code depends on."""
    mode = ("int", "fp", "grid")[layout.mode]
    return f"{mode}{layout.bits}{'' if layout.symmetric else 'z'}s{layout.scales}b{layout.bias}"


def even_sizes(layout: Layout) -> tuple[str, ...]:
    """The sizes among the run-time arguments that are multiples of 16."""
    sizes = {"rows": layout.rows, "cols": layout.cols, "padded": layout.padded}
    return tuple(name for name, size in sizes.items() if size % 16 == 0)
