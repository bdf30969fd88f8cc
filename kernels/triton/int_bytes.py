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

from nstf.kernels.triton.byte_product import mma_bytes
from nstf.kernels.triton.int_bytes_operands import (
    BLOCKS,
    block_scales,
    block_words,
    digit_pair,
    eight_activations,
    has_place,
    inverse_power,
    is_upper,
    joined,
    masked,
    meets,
    places_of,
    prefetch,
    row_scales,
    runs_of,
    scale_at,
)
from nstf.kernels.triton.launching import (
    hardware_of,
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

LARGEST_BATCH = 2
# Below, skinny.py begins and ends faster (docs/gpu_speed.md); at 4 bits in groups of 64 in whole tokens of larger ones too.
LEAST_WEIGHTS, LEAST_WEIGHTS_64 = 50_000_000, 200_000_000
LEAST_COLUMNS_64 = 8192
# Runs of a sum: more would leave the bits of a float32's mantissa.
MOST_RUNS = 4
AHEAD = tl.constexpr(2)  # blocks more that go to the second-level cache before activations are there


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
    PLACES: tl.constexpr = places_of(BITS)
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
    for b in tl.static_range(BLOCKS):
        if STEPS:
            factors = factors + row_scales(row_scale, begin + b * step, rows, g)
        w = w + block_words(words, begin + b * step, rows, width, chunk, g, t, CHUNKS, EVEN, ROWS16)
        scales = scales + block_scales(
            scale, begin + b * step, rows, run, g, GROUP, GROUPS, RUNS, FLUSH, WIDE, ROWS16
        )
    if PDL:
        for d in tl.static_range(AHEAD):
            prefetch(words, begin + (BLOCKS + d) * step, rows, width, chunk, i % 32, CHUNKS)
        tl.extra.cuda.gdc_wait()

    # The largest number of a warp's columns: sixteen lanes for each of two rows of activations.
    line = g // 4
    most = tl.zeros([32 * S], tl.float32)
    # All loads before what waits for them.
    slices = ()
    for q in tl.static_range((RUNS + 3) // 4):
        own = (g % 4 * 4 + t + 16 * q) * 8
        slices = slices + (
            eight_activations(x, line, tl.where(own < RUNS * 32, run * 32 + own, end), batch, cols, end),
        )
    some = ()
    for r in tl.static_range(RUNS):
        some = some + (eight_activations(x, line, (run + r) * 32 + t * 8, batch, cols, end),)
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
            pairs = pairs + (digit_pair(n0, n1, which, HARDWARE),)
    # What the codes of each run meet: with the run that has the other bytes, where both end in one sum.
    met = ()
    for r in tl.static_range(RUNS):
        for m in tl.static_range(4):
            if joined(BITS, FLUSH):
                if is_upper(BITS, r):
                    met = met + (pairs[4 * r + m],)
                else:
                    other = pairs[4 * (r + runs_of(BITS) // 2) + m]
                    met = met + ((pairs[4 * r + m] & 0x00FF00FF) | (other & 0xFF00FF00),)
            elif is_upper(BITS, r):
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
                if meets(BITS, r, FLUSH, PLACES[e]):
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
        for b in tl.static_range(BLOCKS):
            total = (zero.to(tl.float32), zero.to(tl.float32), zero.to(tl.float32), zero.to(tl.float32))
            for f in tl.static_range(SUMS):
                part = (zero.to(tl.float32), zero.to(tl.float32), zero.to(tl.float32), zero.to(tl.float32))
                for e in tl.static_range(len(PLACES)):
                    if has_place(BITS, f * FLUSH, FLUSH, PLACES[e]):
                        acc = (magic, magic, magic, magic)
                        for r in tl.static_range(f * FLUSH, (f + 1) * FLUSH):
                            if meets(BITS, r, FLUSH, PLACES[e]):
                                for m in tl.static_range(2):
                                    acc = mma_bytes(
                                        masked(w[(b * CHUNKS + r // J) * 8 + 2 * m], BITS, r % J),
                                        masked(w[(b * CHUNKS + r // J) * 8 + 2 * m + 4], BITS, r % J),
                                        masked(w[(b * CHUNKS + r // J) * 8 + 2 * m + 1], BITS, r % J),
                                        masked(w[(b * CHUNKS + r // J) * 8 + 2 * m + 5], BITS, r % J),
                                        met[4 * r + 2 * m], met[4 * r + 2 * m + 1], acc, S, HARDWARE,
                                    )  # fmt: skip
                        left = offsets[2 * (f * len(PLACES) + e)]
                        right = offsets[2 * (f * len(PLACES) + e) + 1]
                        part = (
                            part[0] + (acc[0].to(tl.float32, bitcast=True) - left) * inverse_power(PLACES[e]),
                            part[1]
                            + (acc[1].to(tl.float32, bitcast=True) - right) * inverse_power(PLACES[e]),
                            part[2] + (acc[2].to(tl.float32, bitcast=True) - left) * inverse_power(PLACES[e]),
                            part[3]
                            + (acc[3].to(tl.float32, bitcast=True) - right) * inverse_power(PLACES[e]),
                        )
                upper_scale = scale_at(scales, b, f, 0, SUMS, BYTES, WIDE)
                lower_scale = scale_at(scales, b, f, 1, SUMS, BYTES, WIDE)
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
            later = first + (BLOCKS + b) * step
            if STEPS:
                next_factors = next_factors + row_scales(row_scale, later, rows, g)
            coming = coming + block_words(words, later, rows, width, chunk, g, t, CHUNKS, EVEN, ROWS16)
            next_scales = next_scales + block_scales(
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
    if layout.bits < 4 or layout.group < 64:
        return True
    large = layout.rows * layout.cols >= LEAST_WEIGHTS_64 and layout.cols >= LEAST_COLUMNS_64
    return large and layout.group < 128


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
    y = torch.empty(len(x), packed.layout.rows, dtype=out or x.dtype, device=x.device)
    if len(specs) == 1:
        int_bytes_into(y, x, packed, specs[0])
    else:
        parts = torch.empty(specs[0].grid[1], *y.shape, dtype=torch.float32, device=x.device)
        int_bytes_into(parts, x, packed, specs[0])
        launch(specs[1], parts, y, y.numel())
    return y


def int_bytes_into(parts: Tensor, x: Tensor, packed: Packed, spec: KernelSpec) -> None:
    """The product alone, into Y or its parts, f32 [programs along the columns, batch, rows]."""
    layout, many = packed.layout, spec.constants["CHUNKS"]
    width = layout.width(layout.bits)
    # As many for each program, in whole warps.
    each = triton.cdiv(triton.cdiv(width // LANES, spec.grid[1]), many) * many
    words, scale, _, row_scale, _ = leaf_arguments(packed)
    launch(spec, x, words, scale, row_scale, parts, len(x), layout.rows, layout.cols, width, each)


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
