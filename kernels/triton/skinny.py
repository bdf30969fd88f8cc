# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""One to sixteen rows of activations times a packed matrix on NVIDIA's matrix cores: Y = X W^T, codes straight to operands.

Each warp keeps the activations of its columns as operands of m16n8k16 for as long as the kernel runs, and goes down the
rows of W sixteen at a time. The four words that a lane loads (16 bytes) hold columns 8 t .. 8 t + 7 of a run for one row;
the instruction wants other columns of that lane, but a product does not mind the order of its columns as long as both
sides agree, so the activations are put into the order of the words and decoded weights never change lanes: no local
memory, no exchange. A code with the bits of a power of two around it is that power plus the code; what the power and the
zero point add is a multiple of the sum of the activations, from which the sums start instead of from zero. So a weight
costs half an and-or, most of a shift of two and an eighth of a matrix instruction.

The next words are on their way while these are multiplied. Weights, unlike activations, do not depend on the kernel
before, so the first of them are asked for before it has ended (`PDL`, programmatic dependent launch).

Error: float32 sums of products of 16-bit activations with exact integers beside 128 or 1024.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.launching import (
    even_sizes,
    launch,
    layout_constants,
    layout_name,
    leaf_arguments,
    overlap_options,
    overlaps,
    processors_of,
    scale_type,
)
from nstf.kernels.triton.numbers import codes_at, scale_value
from nstf.kernels.triton.operands import (
    activation_tile,
    bytes_of,
    columns_of,
    factor_of,
    float_pairs,
    halves,
    load_factors,
    looked_up,
    over_warps,
    plain_numbers,
    scaled,
    word_tiles,
)
from nstf.kernels.triton.packed import FLOAT, INTEGER, RUN, STEPS, TABLE, Layout, Packed
from nstf.kernels.triton.spec import KernelSpec, pointer_type
from nstf.kernels.triton.sums import sum_spec

LARGEST_BATCH = 16
_SMALL = 50_000_000


@triton.jit
def steps_of(row_scale, row, rows, SCALES: tl.constexpr):
    """The factors of the rows' steps, where there are any: asked for a block of rows ahead, as the words."""
    if SCALES == 1:
        return tl.load(row_scale + row, mask=row < rows, other=0)
    else:
        return row


@triton.jit
def skinny_product(
    x,  # [batch, cols]
    words,  # i32: all planes
    scale,  # [rows, GROUPS]
    zeros,  # u8 [rows, GROUPS]
    row_scale,  # f32 [rows]
    table,  # f16 [16]
    y,  # [batch, rows], or f32 [programs along the columns, batch, rows]
    batch,
    rows,
    cols,
    padded,
    ones,  # two 16-bit ones: an argument, so that nothing is folded and all operands are made the same way
    magic,  # the bits of 128 or 1024 in both halves: an instruction has room for a single constant, the mask
    PLANES: tl.constexpr,
    SHIFTS: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALES: tl.constexpr,
    MODE: tl.constexpr,
    EXPONENT: tl.constexpr,
    BIAS: tl.constexpr,
    AFTER: tl.constexpr,
    OFFSET: tl.constexpr,  # what is too much in each number: the power of two, with the zero where it is known
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,  # multiply in float32: the interpreter
    CONVERT: tl.constexpr,  # activations to scaled float16, for numbers that a bfloat16 does not hold
    PDL: tl.constexpr,
    N: tl.constexpr,
    S: tl.constexpr,  # warps, side by side along the columns
    CHUNKS: tl.constexpr,  # of the narrowest plane for each warp
    COUNT: tl.constexpr,  # groups in the columns of a warp; 0: not a whole power of two of them
    place,  # of this program among those along the rows
    places,
    across,  # likewise along the columns
):
    DTYPE: tl.constexpr = tl.float32 if WIDE else (tl.float16 if CONVERT else x.dtype.element_ty)
    J: tl.constexpr = 16 // PLANES[len(PLANES) - 1]
    SPAN: tl.constexpr = 32 * J
    WHOLE: tl.constexpr = GROUPS == 1
    STEP: tl.constexpr = 1 if WHOLE else GROUP // 32  # runs of a group
    FLUSH: tl.constexpr = J if (WHOLE or STEP % J == 0) else (STEP if J % STEP == 0 else 1)
    SUMS: tl.constexpr = J // FLUSH
    FLUSHED: tl.constexpr = CHUNKS * SUMS // COUNT if COUNT > 0 else 1
    N0: tl.constexpr = 16 // PLANES[0]
    N1: tl.constexpr = 16 // PLANES[1] if len(PLANES) > 1 else 1
    PER0: tl.constexpr = J // N0
    PER1: tl.constexpr = J // N1 if len(PLANES) > 1 else 0
    PER: tl.constexpr = PER0 + PER1 + (1 if len(PLANES) > 2 else 0)

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    chunk0 = across * S * CHUNKS
    begin = place * 16
    step = places * 16
    w = word_tiles(words, begin, rows, padded, chunk0, PLANES, SHIFTS, S, CHUNKS, EVEN)
    scales = ()
    if not WHOLE:
        scales = load_factors(scale, begin, rows, cols, chunk0, GROUP, GROUPS, SPAN, FLUSH, S, CHUNKS, COUNT)
    row = begin + tl.arange(0, 16)
    steps = steps_of(row_scale, row, rows, SCALES)
    if PDL:
        tl.extra.cuda.gdc_wait()

    xs = ()
    for c in tl.static_range(CHUNKS):
        for j in tl.static_range(J):
            some = activation_tile(x, batch, cols, (chunk0 + c) * SPAN + j * 32, CHUNKS * SPAN, S, N, EVEN)
            if WIDE:
                some = some.to(tl.float32)
            xs = xs + (some,)
    if CONVERT:
        xs, back = scaled(xs, CHUNKS * J, S, N)
    entries = ()
    if PAIRS and MODE == 2:
        entries = bytes_of(table, 0) + bytes_of(table, 1)
    starts = ()
    plains = ()
    if OFFSET != 0 or ZERO < 0:
        unit = tl.zeros([S, 16, 16], tl.int32) + ones
        if WIDE:
            unit = tl.reshape(tl.join(unit, unit), [S, 16, 32]).to(tl.float32, bitcast=True)
        else:
            unit = halves(unit, DTYPE)
        for i in tl.static_range(CHUNKS * SUMS):
            total = tl.zeros([S, 16, N], tl.float32)
            for j in tl.static_range(FLUSH):
                total = tl.dot(unit, xs[i * FLUSH + j], total, input_precision="ieee")
            starts = starts + (total * -OFFSET,)
            plains = plains + (total,)
    else:
        for _ in tl.static_range(CHUNKS * SUMS):
            starts = starts + (tl.zeros([S, 16, N], tl.float32),)

    for first in range(begin, rows, step):
        next_w = word_tiles(words, first + step, rows, padded, chunk0, PLANES, SHIFTS, S, CHUNKS, EVEN)
        next_scales = ()
        if not WHOLE:
            next_scales = load_factors(
                scale, first + step, rows, cols, chunk0, GROUP, GROUPS, SPAN, FLUSH, S, CHUNKS, COUNT
            )
        next_steps = steps_of(row_scale, row + step, rows, SCALES)
        zero = ()
        if ZERO < 0:
            zero = load_factors(
                zeros, first, rows, cols, chunk0, GROUP, GROUPS, SPAN, FLUSH, S, CHUNKS, COUNT
            )
        factors = scales
        if COUNT > 0:
            factors = columns_of(scales[0], COUNT)
            if ZERO < 0:
                zero = columns_of(zero[0], COUNT)
        acc = tl.zeros([S, 16, N], tl.float32)
        for c in tl.static_range(CHUNKS):
            for f in tl.static_range(SUMS):
                part = starts[c * SUMS + f]
                for i in tl.static_range(FLUSH):
                    w0 = w[c * PER + (f * FLUSH + i) // N0]
                    w1 = w0
                    w2 = w0
                    if len(PLANES) > 1:
                        w1 = w[c * PER + PER0 + (f * FLUSH + i) // N1]
                    if len(PLANES) > 2:
                        w2 = w[c * PER + PER0 + PER1]
                    if PAIRS and MODE == 2:
                        if (f * FLUSH + i) % N0 == 0:
                            values = looked_up(w0, entries)
                        numbers = halves(values[(f * FLUSH + i) % N0], DTYPE)
                    elif PAIRS and MODE == 1:
                        numbers = halves(float_pairs(w0, (f * FLUSH + i) % N0, DTYPE, BITS, EXPONENT), DTYPE)
                    else:
                        t = codes_at(w0, w1, w2, f * FLUSH + i, PLANES, SHIFTS)
                        if PAIRS:
                            numbers = halves(t | magic, DTYPE)
                        else:
                            numbers = plain_numbers(t, table, DTYPE, MODE, BITS, EXPONENT, BIAS, ZERO)
                    part = tl.dot(numbers, xs[c * J + f * FLUSH + i], part, input_precision="ieee")
                if ZERO < 0:
                    part -= plains[c * SUMS + f] * factor_of(zero, c * SUMS + f, FLUSHED, S, N, COUNT).to(
                        tl.float32
                    )
                if WHOLE:
                    acc += part
                else:
                    acc += part * scale_value(factor_of(factors, c * SUMS + f, FLUSHED, S, N, COUNT), SCALES)
        if CONVERT:
            acc *= back[:, None, :]
        out = over_warps(acc, S, 16, N) * AFTER
        if WHOLE:
            out *= scale_value(tl.load(scale + row, mask=row < rows, other=0), SCALES)[:, None]
        if SCALES == 1:
            out *= steps[:, None]
        line = tl.arange(0, N)
        at = (across * batch + line)[None, :] * rows + row[:, None]
        ok = (row < rows)[:, None] & (line < batch)[None, :]
        tl.store(y + at, out.to(y.dtype.element_ty), mask=ok)
        w = next_w
        scales = next_scales
        steps = next_steps
        row += step


@triton.jit(do_not_specialize=["batch", "ones", "magic"])
def skinny_kernel(
    x, words, scale, zeros, row_scale, table, y, batch, rows, cols, padded, ones, magic,
    PLANES: tl.constexpr, SHIFTS: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, SCALES: tl.constexpr, MODE: tl.constexpr, EXPONENT: tl.constexpr, BIAS: tl.constexpr,
    AFTER: tl.constexpr, OFFSET: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    CONVERT: tl.constexpr, PDL: tl.constexpr, N: tl.constexpr, S: tl.constexpr, CHUNKS: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """`skinny_product` by a grid of programs along rows and columns."""
    skinny_product(
        x, words, scale, zeros, row_scale, table, y, batch, rows, cols, padded, ones, magic, PLANES, SHIFTS, BITS,
        ZERO, GROUP, GROUPS, SCALES, MODE, EXPONENT, BIAS, AFTER, OFFSET, PAIRS, EVEN, WIDE, CONVERT, PDL, N, S,
        CHUNKS, COUNT, tl.program_id(0), tl.num_programs(0), tl.program_id(1),
    )  # fmt: skip


def possible(layout: Layout, batch: int, dtype: torch.dtype, arch: str) -> bool:
    """Whether this kernel does it: matrix instructions of NVIDIA, 16-bit activations, groups of whole runs."""
    if not arch.startswith("sm_") or dtype not in (torch.float16, torch.bfloat16):
        return False
    whole_runs = layout.whole or layout.group % RUN == 0
    return 1 <= batch <= LARGEST_BATCH and whole_runs and layout.cols % 8 == 0


def suits(layout: Layout, batch: int, dtype: torch.dtype, arch: str) -> bool:
    """Whether to take it for a product alone: not for a single row times 8-bit integers, where the bytes are the limit and
    gemv.py reads them a little faster."""
    single = batch == 1 and layout.bits == 8 and layout.mode == INTEGER
    return possible(layout, batch, dtype, arch) and not single


def skinny_specs(
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
    interpreted = triton.knobs.runtime.interpret
    chosen = _tile(layout, batch, arch) | (tile or {})
    n, s, each = chosen["N"], chosen["S"], chosen["CHUNKS"]
    span = RUN * (16 // min(b for b, _ in layout.planes))
    chunks = layout.padded // span
    split = triton.cdiv(chunks, s * each)
    # A bfloat16 holds 128 + 7 bits, and no float16 of a table.
    convert = dtype == torch.bfloat16 and (layout.mode == TABLE or layout.bits == 8)
    half = dtype == torch.float16 or convert
    # The interpreter multiplies no bfloat16: there codes become numbers one by one.
    pairs = half or not interpreted
    after, offset = 1.0, 0.0
    if pairs and layout.mode == FLOAT:
        # Floats made in pairs keep the exponent bias of their code.
        after = 2.0 ** ((15 if half else 127) - layout.bias)
    if pairs and layout.mode == INTEGER:
        offset = (1024.0 if half else 128.0) + max(0, layout.zero)
    count, left = divmod(each * span, layout.group)
    if (
        layout.whole
        or left
        or count & (count - 1)
        or not (2 if n == 8 and layout.bits == 4 else 1) < count <= 16
    ):
        # With so few groups of 4-bit codes loads of single scales are faster: they cost more instructions, but the
        # assembler then asks for the next codes early, not to save registers at the end.
        count = 0
    even = layout.cols == layout.padded and chunks % (split * s * each) == 0
    blocks = triton.cdiv(layout.rows, 16)
    product = KernelSpec(
        name=f"skinny_{layout_name(layout)}_{pointer_type(dtype)[1:]}_{layout.groups}x{layout.group}"
        f"_n{n}s{s}c{each}"
        + ("e" if even else "")
        + (f"_{pointer_type(out)[1:]}" if split == 1 and out != dtype else "")
        + ("p" if split > 1 else "")
        + (f"_r{chosen['REGISTERS']}" if "REGISTERS" in chosen else ""),
        fn=skinny_kernel,
        signature={
            "x": pointer_type(dtype),
            "words": "*i32",
            "scale": scale_type(layout),
            "zeros": "*u8",
            "row_scale": "*fp32",
            "table": "*fp16",
            "y": "*fp32" if split > 1 else pointer_type(out),
            **dict.fromkeys(("batch", "rows", "cols", "padded", "ones", "magic"), "i32"),
        },
        constants={
            **layout_constants(layout),
            "AFTER": after,
            "OFFSET": offset,
            "PAIRS": pairs,
            "EVEN": even,
            "WIDE": not pairs,
            "CONVERT": convert,
            "PDL": overlaps(arch),
            "N": n,
            "S": s,
            "CHUNKS": each,
            "COUNT": count,
        },
        divisible=("x", "words", "scale", "zeros", "row_scale", "table", "y", *even_sizes(layout)),
        num_warps=s,
        num_stages=1,
        options=overlap_options(arch) | ({"maxnreg": chosen["REGISTERS"]} if "REGISTERS" in chosen else {}),
        batch=batch,
        kind="skinny",
        grid=(min(blocks, max(1, chosen["PROGRAMS"] // split)), split, 1),
    )
    return [product] if split == 1 else [product, sum_spec(batch * layout.rows, split, out, arch)]


def skinny(x: Tensor, packed: Packed, specs: list[KernelSpec], out: torch.dtype | None = None) -> Tensor:
    """x [batch, cols] -> y [batch, rows] of `out` (x's dtype when None), as the specs were made for."""
    layout, batch = packed.layout, len(x)
    y = torch.empty(batch, layout.rows, dtype=out or x.dtype, device=x.device)
    if len(specs) == 1:
        skinny_into(y, x, packed, specs[0])
    else:
        parts = torch.empty(specs[1].constants["SPLIT"], *y.shape, dtype=torch.float32, device=x.device)
        skinny_into(parts, x, packed, specs[0])
        launch(specs[1], parts, y, y.numel())
    return y


def skinny_into(parts: Tensor, x: Tensor, packed: Packed, spec: KernelSpec) -> None:
    """The product alone, into Y or its parts, f32 [programs along the columns, batch, rows]."""
    layout = packed.layout
    sizes = (len(x), layout.rows, layout.cols, layout.padded)
    ones, magic = ones_and_magic(x.dtype, spec.constants)
    launch(spec, x, *leaf_arguments(packed), parts, *sizes, ones, magic)


def ones_and_magic(dtype: torch.dtype, known: Mapping[str, Any]) -> tuple[int, int]:
    """The arguments of those names for activations of `dtype`. known: the constants of the launch."""
    half = dtype == torch.float16 or known["CONVERT"]
    ones, magic = (0x3C003C00, 0x64006400) if half else (0x3F803F80, 0x43004300)
    return 0x3F800000 if known["WIDE"] else ones, magic


def _tile(layout: Layout, batch: int, arch: str) -> dict[str, int]:
    """Four warps of 256 columns each, and as many programs as registers leave room for: from sweeps on an H200.

    More warps would meet more often, wider ones keep fewer loads on their way.
    """
    span = RUN * (16 // min(b for b, _ in layout.planes))
    tile = {
        "N": 8 if batch <= 8 else 16,
        "S": 4,
        "CHUNKS": max(1, 256 // span),
        "PROGRAMS": processors_of(arch) * resident(layout, batch),
    }
    few = layout.bits == 3 or (layout.bits == 4 and layout.rows * layout.cols < _SMALL)
    steps = layout.mode == INTEGER and layout.group == 64 and layout.scales == STEPS
    if few and steps and batch <= 8 and overlaps(arch):
        # With registers for three of them alone the assembler asks for the next words before it multiplies.
        tile |= {"PROGRAMS": 3 * processors_of(arch), "REGISTERS": 168}
    return tile


def resident(layout: Layout, batch: int) -> int:
    """Programs of four warps that registers leave room for on a multiprocessor."""
    if batch <= 8:
        return 3 if layout.bits == 5 else 4
    if layout.mode != INTEGER:
        return 2 if layout.mode == TABLE or layout.bits == 8 else 3
    # Groups from which a third program's registers suffice; with fewer it waits until another has ended (measured, H200).
    least = {2: 64, 3: 64, 4: 64, 6: 128} if layout.symmetric else {4: 128}
    return 3 if layout.group >= least.get(layout.bits, layout.cols + 1) else 2
