# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""One or two rows of activations times integers of 2 to 4 bits on NVIDIA: each group has a column of the matrix cores.

m16n8k16 multiplies 16 rows of weights by eight columns, and a row of activations needs one of them. Here the activations of
different groups are in different columns, with zeros elsewhere. So a column sums up one group, all products of a warp
accumulate in one fragment, and each lane ends with two rows of two groups. It loads and applies the scales of these alone;
in skinny.py every lane has all scales of a row, and there are as many sums as groups.

As in skinny.py a warp keeps the activations of its columns as operands and goes down the rows, sixteen at a time. A code
beside the bits of a power of two is a 16-bit float. Its excess over the weight, times the activations, is subtracted
beforehand: the sums start from there. In bfloat16 a code may be three bits higher in the float if its activations are
divided by eight, which saves shifts at 3 bits. Lane 4 g + t holds rows g and g + 8, and columns 8 t .. 8 t + 7 of every run
of 32.
"""

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.int_groups_operands import (
    block_scales,
    block_words,
    divided,
    from_lane,
    mma_pairs,
    places_of,
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
from nstf.kernels.triton.packed import EXPONENT, INTEGER, RUN, STEPS, Layout, Packed
from nstf.kernels.triton.spec import KernelSpec, pointer_type
from nstf.kernels.triton.sums import sum_spec

COLUMNS = 8  # of the matrix instruction
BLOCKS = tl.constexpr(2)  # of rows on their way


@triton.jit(do_not_specialize=["magic"])
def int_groups_kernel(
    x,  # [LINES, cols]
    words,  # i32 [rows, width]
    scale,  # f16, or u8 in steps [rows, GROUPS]
    row_scale,  # f32 [rows], of steps
    y,  # [LINES, rows], or f32 [programs along the columns, LINES, rows]
    rows,
    cols,
    width,
    magic,  # the bits of 128 or 1024 in both halves: an instruction has room for a single constant, the mask
    LINES: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    STEPS: tl.constexpr,
    HALF: tl.constexpr,  # float16, else bfloat16
    OFFSETS: tl.constexpr,  # for each code of half a word the bits, twice, of minus its excess
    PAIRED: tl.constexpr,  # two scales are one load
    EVEN: tl.constexpr,  # chunks fill the warps
    ROWS16: tl.constexpr,  # rows come in sixteens
    HARDWARE: tl.constexpr,
    PDL: tl.constexpr,
    S: tl.constexpr,  # warps, side by side along the columns
    CHUNKS: tl.constexpr,  # of each warp
):
    J: tl.constexpr = 16 // BITS
    RUNS: tl.constexpr = CHUNKS * J
    PLACES: tl.constexpr = places_of(BITS, HALF)
    PER: tl.constexpr = GROUP // 32  # runs of a group
    MOST: tl.constexpr = 8 // LINES  # columns of a row of activations
    MASK: tl.constexpr = ((1 << BITS) - 1) * 0x00010001
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.arange(0, 32 * S)
    warp = i // 32
    g = i // 4 % 8
    t = i % 4
    chunk = (tl.program_id(1) * S + warp) * CHUNKS
    run = chunk * J
    group0 = run // PER
    begin = tl.program_id(0) * 16
    step = tl.num_programs(0) * 16
    group = group0 + 2 * t % MOST
    own = (group <= (run + RUNS - 1) // PER) & (group < GROUPS)
    w = ()
    scales = ()
    for b in tl.static_range(BLOCKS):
        w = w + block_words(words, begin + b * step, rows, width, chunk, g, t, CHUNKS, EVEN, ROWS16)
        scales = scales + block_scales(
            scale, begin + b * step, rows, group, own, g, GROUPS, PAIRED, STEPS, ROWS16
        )
    if PDL:
        tl.extra.cuda.gdc_wait()

    xs = ()
    for r in tl.static_range(RUNS):
        k = (run + r) * 32 + t * 8
        mine = ((run + r) // PER - group0 == g % MOST) & (k < cols)
        at = x.to(tl.pointer_type(tl.uint32)) + ((g // MOST * cols + k) // 2)[:, None]
        at += tl.arange(0, 4)[None, :]
        some = columns_of(tl.load(at, mask=mine[:, None], other=0), 4)
        if PLACES[r % J][1] > 0:
            some = (
                divided(some[0], PLACES[r % J][1]),
                divided(some[1], PLACES[r % J][1]),
                divided(some[2], PLACES[r % J][1]),
                divided(some[3], PLACES[r % J][1]),
            )
        xs = xs + some
    nothing = tl.zeros([32 * S], tl.float32)
    zero = tl.zeros([32 * S], tl.uint32)
    # Two independent sums: an instruction waits for the one whose result it adds to.
    start = (nothing, nothing, nothing, nothing)
    other = start
    for r in tl.static_range(RUNS):
        much = zero + OFFSETS[r % J]
        start = mma_pairs(much, much, much, much, xs[4 * r], xs[4 * r + 1], start, S, HALF, HARDWARE)
        other = mma_pairs(much, much, much, much, xs[4 * r + 2], xs[4 * r + 3], other, S, HALF, HARDWARE)
    # All its rows are the same.
    start = (start[0] + other[0], start[1] + other[1], start[0] + other[0], start[1] + other[1])
    power = zero + magic.to(tl.uint32)

    for first in range(begin, rows, 2 * step):
        inside = tl.arange(0, 32)
        # Of lane 4 g + t: block t // 2, row g of it or g + 8.
        row = first + inside // 2 % 2 * step + inside % 2 * 8 + inside // 4
        if STEPS:
            steps = tl.load(row_scale + row, mask=row < rows, other=0.0)
        coming = ()
        next_scales = ()
        ends = ()
        for b in tl.static_range(BLOCKS):
            left = start
            right = (nothing, nothing, nothing, nothing)
            for c in tl.static_range(CHUNKS):
                v = ()
                for n in tl.static_range(8):
                    v = v + (w[(b * CHUNKS + c) * 8 + n],)
                for j in tl.static_range(J):
                    if PLACES[j][1] == 0 and PLACES[j][0] > 0:
                        # Once for all codes that this shift brings into place.
                        moved = ()
                        for n in tl.static_range(8):
                            moved = moved + (w[(b * CHUNKS + c) * 8 + n] >> PLACES[j][0],)
                        v = moved
                    left = mma_pairs(
                        v[0] & (MASK << PLACES[j][1]) | power, v[4] & (MASK << PLACES[j][1]) | power,
                        v[1] & (MASK << PLACES[j][1]) | power, v[5] & (MASK << PLACES[j][1]) | power,
                        xs[4 * (c * J + j)], xs[4 * (c * J + j) + 1], left, S, HALF, HARDWARE,
                    )  # fmt: skip
                    right = mma_pairs(
                        v[2] & (MASK << PLACES[j][1]) | power, v[6] & (MASK << PLACES[j][1]) | power,
                        v[3] & (MASK << PLACES[j][1]) | power, v[7] & (MASK << PLACES[j][1]) | power,
                        xs[4 * (c * J + j) + 2], xs[4 * (c * J + j) + 3], right, S, HALF, HARDWARE,
                    )  # fmt: skip
            stored = ()
            for e in tl.static_range(len(scales) // BLOCKS):
                stored = stored + (scales[len(scales) // BLOCKS * b + e],)
            upper = (left[0] + right[0]) * scale_at(stored, 0, 0, PAIRED, STEPS)
            upper += (left[1] + right[1]) * scale_at(stored, 0, 1, PAIRED, STEPS)
            lower = (left[2] + right[2]) * scale_at(stored, 1, 0, PAIRED, STEPS)
            lower += (left[3] + right[3]) * scale_at(stored, 1, 1, PAIRED, STEPS)
            ends = ends + (upper, lower)
            # Into the registers that have just become free.
            later = first + (BLOCKS + b) * step
            coming = coming + block_words(words, later, rows, width, chunk, g, t, CHUNKS, EVEN, ROWS16)
            next_scales = next_scales + block_scales(
                scale, later, rows, group, own, g, GROUPS, PAIRED, STEPS, ROWS16
            )
        w = coming
        scales = next_scales
        # Lanes that add up one row of activations (four, or two) end with a share of their sums each.
        DISTANCE: tl.constexpr = 2 // LINES
        second = t // DISTANCE % 2 == 1
        upper = tl.where(second, ends[2], ends[0])
        upper += from_lane(tl.where(second, ends[0], ends[2]), DISTANCE, S, HARDWARE)
        lower = tl.where(second, ends[3], ends[1])
        lower += from_lane(tl.where(second, ends[1], ends[3]), DISTANCE, S, HARDWARE)
        if LINES == 1:
            odd = t % 2 == 1
            total = tl.where(odd, lower, upper) + from_lane(tl.where(odd, upper, lower), 1, S, HARDWARE)
            total = tl.reshape(total, [S, 32, 1])
        else:
            total = tl.permute(tl.reshape(tl.join(upper, lower), [S, 8, 2, 2, 2]), (0, 1, 3, 4, 2))
            total = tl.reshape(total, [S, 32, 2])
        out = over_warps(total, S, 32, LINES)
        if STEPS:
            out *= steps[:, None]
        line = tl.arange(0, LINES)
        at_y = y + (tl.program_id(1) * LINES + line)[None, :] * rows + row[:, None]
        tl.store(at_y, out.to(y.dtype.element_ty), mask=(row < rows)[:, None])


def possible(layout: Layout, batch: int, dtype: torch.dtype, arch: str) -> bool:
    """Whether this kernel does it: symmetric integers of 2 to 4 bits in groups of whole runs, few rows of 16 bits each."""
    if not arch.startswith("sm_") or int(arch[3:]) < 80 or dtype not in (torch.float16, torch.bfloat16):
        return False
    known = layout.mode == INTEGER and layout.symmetric and layout.scales != EXPONENT and layout.bits <= 4
    in_runs = not layout.whole and layout.group % RUN == 0 and layout.cols % 8 == 0
    if not (known and in_runs and batch in (1, 2) and layout.bits > 1) or layout.wide_scales:
        return False
    return _touched(layout, _tile(layout, batch, arch)["CHUNKS"]) <= COLUMNS // batch


def suits(layout: Layout, batch: int, dtype: torch.dtype, arch: str) -> bool:
    """Whether to take it, by measurement: not for 4 bits in groups of 128, where skinny.py is faster."""
    return possible(layout, batch, dtype, arch) and (layout.bits < 4 or layout.group < 128)


def int_groups_specs(
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
    chosen = _tile(layout, batch, arch) | (tile or {})
    s, many, limit = chosen["S"], chosen["CHUNKS"], chosen["REGISTERS"]
    span = RUN * (16 // layout.bits)
    chunks = layout.padded // span
    split = triton.cdiv(chunks, s * many)
    count, left = divmod(many * span, layout.group)
    even = layout.cols == layout.padded and chunks % (s * many) == 0
    whole_blocks = layout.rows % 16 == 0
    sizes = {"rows": layout.rows, "cols": layout.cols, "width": layout.width(layout.bits)}
    half = dtype == torch.float16
    product = KernelSpec(
        name=f"int_groups_{layout_name(layout)}_{pointer_type(dtype)[1:]}_{layout.groups}x{layout.group}_n{batch}s{s}c{many}"
        + ("e" if even else "")
        + ("r" if whole_blocks else "")
        + (f"_{pointer_type(out)[1:]}" if split == 1 and out != dtype else "")
        + ("p" if split > 1 else ""),
        fn=int_groups_kernel,
        signature={
            "x": pointer_type(dtype),
            "words": "*i32",
            "scale": scale_type(layout),
            "row_scale": "*fp32",
            "y": "*fp32" if split > 1 else pointer_type(out),
            **dict.fromkeys(sizes, "i32"),
            "magic": "i32",
        },
        constants={
            "LINES": batch,
            "BITS": layout.bits,
            "GROUP": layout.group,
            "GROUPS": layout.groups,
            "STEPS": layout.scales == STEPS,
            "HALF": half,
            "OFFSETS": tuple(
                _offset_bits(layout.bits, place, half) for _, place in places_of.fn(layout.bits, half)
            ),
            "PAIRED": not left and count % 2 == 0 and layout.groups % 2 == 0,
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
        kind="int_groups",
        grid=(min(triton.cdiv(layout.rows, 16), max(1, chosen["PROGRAMS"] // split)), split, 1),
    )
    return [product] if split == 1 else [product, sum_spec(batch * layout.rows, split, out, arch)]


def int_groups(x: Tensor, packed: Packed, specs: list[KernelSpec], out: torch.dtype | None = None) -> Tensor:
    """x [batch, cols] -> y [batch, rows] of dtype `out` (x's when None). specs: of `int_groups_specs` for these."""
    y = torch.empty(len(x), packed.layout.rows, dtype=out or x.dtype, device=x.device)
    if len(specs) == 1:
        int_groups_into(y, x, packed, specs[0])
    else:
        parts = torch.empty(specs[0].grid[1], *y.shape, dtype=torch.float32, device=x.device)
        int_groups_into(parts, x, packed, specs[0])
        launch(specs[1], parts, y, y.numel())
    return y


def int_groups_into(parts: Tensor, x: Tensor, packed: Packed, spec: KernelSpec) -> None:
    """The product alone, into Y or its parts, f32 [programs along the columns, batch, rows]."""
    layout = packed.layout
    words, scale, _, row_scale, _ = leaf_arguments(packed)
    magic = 0x64006400 if spec.constants["HALF"] else 0x43004300
    launch(
        spec, x, words, scale, row_scale, parts, layout.rows, layout.cols, layout.width(layout.bits), magic
    )


def _offset_bits(bits: int, place: int, half: bool) -> int:
    """Minus the excess of a code at a place of a 16-bit float over its weight, twice in a word."""
    value = -float((1024 if half else 128) + (1 << (bits - 1 + place)))
    word = struct.pack("<e", value) if half else struct.pack("<f", value)[2:]
    return int(struct.unpack("<H", word)[0]) * 0x10001


def _touched(layout: Layout, chunks: int) -> int:
    """How many groups the columns of a warp overlap, at most."""
    runs, per = chunks * (16 // layout.bits), layout.group // RUN
    return -(-runs // per) + (0 if runs % per == 0 or per % runs == 0 else 1)


def _tile(layout: Layout, batch: int, arch: str) -> dict[str, int]:
    """Four warps of 256 columns each, 320 where ten codes make a word, or half of that where it has too many groups; three
    programs on a multiprocessor: whole tokens are 4 to 6 % faster than with four (docs/gpu_speed.md)."""
    many = 1 if layout.bits == 2 or _touched(layout, 2) > COLUMNS // batch else 2
    return {"S": 4, "CHUNKS": many, "PROGRAMS": processors_of(arch) * 3, "REGISTERS": 168}
