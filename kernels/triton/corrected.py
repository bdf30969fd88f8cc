# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""y = (W + A B) x for a packed W and up to eight rows of activations, in one launch.

The base is what skinny.py, gemv.py or gemm.py computes, by their code, but into float32 parts. The programs that begin
first compute a piece of t = B x each (low_rank.py) before their share of the base. The last programs to begin, which take
the places of those that end, multiply their rows of A by t while the rest of the base runs, wait for its end, and add up
its parts.

Programs take numbers when they begin and wait for lower numbers only (arrival.py). Everything is added up in a fixed order,
so equal inputs give equal bits.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton import skinny
from nstf.kernels.triton.arrival import arrive, generation, wait_for
from nstf.kernels.triton.gemm import gemm_product, gemm_specs
from nstf.kernels.triton.gemv import (
    ONE,
    gemv_product,
    gemv_specs,
    launch,
    leaf_arguments,
    multiples,
    processors_of,
)
from nstf.kernels.triton.low_rank import (
    APART,
    inner_constants,
    inner_piece,
    meeting,
    outer_tile,
    rows_of,
    summed_inner,
    tall_for,
)
from nstf.kernels.triton.packed import INTEGER, Layout, Packed
from nstf.kernels.triton.skinny import skinny_product, skinny_specs
from nstf.kernels.triton.spec import KernelSpec, pointer_type, remembered

LARGEST_BATCH = 8
LARGEST_RANK = 128
LONGEST_ROW, LARGE_NUMEL, SMALL_RANK = 8192, 28672 * 8192, 32
AHEAD = 2  # tiles of words


@triton.jit
def _begun(counters, places, PDL: tl.constexpr, COLUMN_PROGRAMS: tl.constexpr):
    """(The number of this program in its launch, its places along rows and columns of the base, launches before.)

    The first have the last places, which have a tile of rows less than others where tiles do not go round.
    """
    ticket = tl.atomic_add(counters, 1, sem="relaxed")
    # Not before: the next launch's numbers are higher than all of this one's.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    before = ticket // tl.num_programs(0)
    mine = (ticket - before * tl.num_programs(0)).to(tl.int32)
    return mine, places - 1 - mine // COLUMN_PROGRAMS, mine % COLUMN_PROGRAMS, before


@triton.jit
def _inner(
    x, b, inner, counters, batch, cols, rank, mine, base,
    PIECES: tl.constexpr, R: tl.constexpr, B: tl.constexpr, N: tl.constexpr, S: tl.constexpr, STEPS: tl.constexpr,
    AT_ONCE: tl.constexpr, EIGHTS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    GENERATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """This program's pieces of t. base: how many programs there are for them."""
    if mine < PIECES:
        if PDL:
            tl.extra.cuda.gdc_wait()
        for piece in range(mine, PIECES, base):
            inner_piece(
                x, b, inner, batch, cols, rank, piece, R, B, N, S, STEPS, AT_ONCE, EIGHTS, WIDE, PRECISION
            )
        arrive(counters + APART, GENERATION, "release")


@triton.jit
def _outer(
    parts,  # f32 [COLUMN_PROGRAMS, batch, rows]
    a,  # [rows, rank]
    inner,
    counters,
    y,  # [batch, rows]
    batch,
    rows,
    rank,
    mine,  # from 0
    before,
    base,
    COLUMN_PROGRAMS: tl.constexpr,  # that have parts of the same rows
    PIECES: tl.constexpr,
    TALL: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    N: tl.constexpr,
    SLICES: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    GENERATION: tl.constexpr,
    PDL: tl.constexpr,
):
    row = mine * TALL + tl.arange(0, TALL)
    tile = rows_of(a, row, rows, rank, R)
    if PDL:
        tl.extra.cuda.gdc_wait()
    wait_for(counters + APART, (before + 1) * tl.minimum(base, PIECES), GENERATION)
    t = summed_inner(inner, batch, R, B, N, SLICES)
    out = outer_tile(tile, t, WIDE, PRECISION)
    wait_for(counters + 2 * APART, (before + 1) * base, GENERATION)
    n = tl.arange(0, N)
    ok = (row < rows)[:, None] & (n < batch)[None, :]
    for part in tl.static_range(COLUMN_PROGRAMS):
        at = parts + (part * batch + n)[None, :] * rows + row[:, None]
        out += tl.load(at, mask=ok, other=0.0, cache_modifier=".cg")
    tl.store(y + n[None, :] * rows + row[:, None], out.to(y.dtype.element_ty), mask=ok)


@triton.jit
def _ask_ahead(
    words, first, step, rows, padded, chunk0,
    PLANES: tl.constexpr, SHIFTS: tl.constexpr, CHUNKS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Brings the words of the first rows of `skinny_product` into the second-level cache: CHUNKS chunks, AHEAD tiles."""
    for p in tl.static_range(len(PLANES)):
        width = padded // (32 * (16 // PLANES[p])) * 16
        i = tl.arange(0, 16 * CHUNKS * (PLANES[p] // PLANES[len(PLANES) - 1]))
        each = CHUNKS * (PLANES[p] // PLANES[len(PLANES) - 1])
        # 16 words of a row, of 64 bytes, to a thread.
        at = chunk0 * (each // CHUNKS) * 16 + i % each * 16
        for tile in tl.static_range(AHEAD):
            row = tl.minimum(first + tile * step + i // each, rows - 1)
            place = words + SHIFTS[p] * (padded // 32) * rows + row * width + at
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place.to(tl.int64)], tl.int32, False, 1
            )


@triton.jit(do_not_specialize=["batch", "places", "ones", "magic"])
def corrected_skinny_kernel(
    x, words, scale, zeros, row_scale, table, parts, a, b, inner, counters, y,
    batch, places, rows, cols, padded, rank, ones, magic,
    PLANES: tl.constexpr, SHIFTS: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, SCALES: tl.constexpr, MODE: tl.constexpr, EXPONENT: tl.constexpr, BIAS: tl.constexpr,
    AFTER: tl.constexpr, OFFSET: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    CONVERT: tl.constexpr, PDL: tl.constexpr, N: tl.constexpr, S: tl.constexpr, CHUNKS: tl.constexpr,
    COUNT: tl.constexpr,
    GENERATION: tl.constexpr, COLUMN_PROGRAMS: tl.constexpr, PIECES: tl.constexpr, TALL: tl.constexpr, R: tl.constexpr,
    B: tl.constexpr, SLICES: tl.constexpr, STEPS: tl.constexpr, AT_ONCE: tl.constexpr, EIGHTS: tl.constexpr,
    WIDE_INNER: tl.constexpr, WIDE_OUTER: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    mine, place, across, before = _begun(counters, places, PDL, COLUMN_PROGRAMS)
    base = places * COLUMN_PROGRAMS
    if mine < base:
        if AHEAD > 0:
            if mine < PIECES:
                _ask_ahead(
                    words, place * 16, places * 16, rows, padded, across * S * CHUNKS,
                    PLANES, SHIFTS, S * CHUNKS, AHEAD,
                )  # fmt: skip
        _inner(
            x, b, inner, counters, batch, cols, rank, mine, base,
            PIECES, R, B, N, S, STEPS, AT_ONCE, EIGHTS, WIDE_INNER, EXACT, GENERATION, PDL,
        )  # fmt: skip
        skinny_product(
            x, words, scale, zeros, row_scale, table, parts, batch, rows, cols, padded, ones, magic,
            PLANES, SHIFTS, BITS, ZERO, GROUP, GROUPS, SCALES, MODE, EXPONENT, BIAS, AFTER, OFFSET, PAIRS, EVEN, WIDE,
            CONVERT, PDL, N, S, CHUNKS, COUNT, place, places, across,
        )  # fmt: skip
        arrive(counters + 2 * APART, GENERATION, "release")
    else:
        _outer(
            parts, a, inner, counters, y, batch, rows, rank, mine - base, before, base,
            COLUMN_PROGRAMS, PIECES, TALL, R, B, N, SLICES, WIDE_OUTER, PRECISION, GENERATION, PDL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "places"])
def corrected_gemm_kernel(
    x, words, scale, zeros, row_scale, table, parts, a, b, inner, counters, y,
    batch, places, rows, cols, padded, rank,
    PLANES: tl.constexpr, SHIFTS: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, SCALES: tl.constexpr, MODE: tl.constexpr, EXPONENT: tl.constexpr, BIAS: tl.constexpr,
    AFTER: tl.constexpr, PAIRS: tl.constexpr, SCALE_WEIGHTS: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, AMD: tl.constexpr, PDL: tl.constexpr, SPLIT: tl.constexpr, CHUNKS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, LANES: tl.constexpr,
    GENERATION: tl.constexpr, COLUMN_PROGRAMS: tl.constexpr, PIECES: tl.constexpr, TALL: tl.constexpr, R: tl.constexpr,
    B: tl.constexpr, N: tl.constexpr, S: tl.constexpr, SLICES: tl.constexpr, STEPS: tl.constexpr, AT_ONCE: tl.constexpr,
    EIGHTS: tl.constexpr, WIDE_INNER: tl.constexpr, WIDE_OUTER: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    mine, place, across, before = _begun(counters, places, PDL, COLUMN_PROGRAMS)
    base = places * COLUMN_PROGRAMS
    if mine < base:
        _inner(
            x, b, inner, counters, batch, cols, rank, mine, base,
            PIECES, R, B, N, S, STEPS, AT_ONCE, EIGHTS, WIDE_INNER, EXACT, GENERATION, PDL,
        )  # fmt: skip
        gemm_product(
            x, words, scale, zeros, row_scale, table, parts, batch, rows, cols, padded,
            PLANES, SHIFTS, BITS, ZERO, GROUP, GROUPS, SCALES, MODE, EXPONENT, BIAS, AFTER, PAIRS, SCALE_WEIGHTS, SWAP,
            EVEN, WIDE, AMD, PDL, SPLIT, CHUNKS, BM, BN, LANES, place, 0, across,
        )  # fmt: skip
        arrive(counters + 2 * APART, GENERATION, "release")
    else:
        _outer(
            parts, a, inner, counters, y, batch, rows, rank, mine - base, before, base,
            COLUMN_PROGRAMS, PIECES, TALL, R, B, N, SLICES, WIDE_OUTER, PRECISION, GENERATION, PDL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "places"])
def corrected_gemv_kernel(
    x, words, scale, zeros, row_scale, table, parts, a, b, inner, counters, y,
    batch, places, rows, cols, width, rank, one,
    BITS: tl.constexpr, WEIGHT: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    SCALES: tl.constexpr, MODE: tl.constexpr, EXPONENT: tl.constexpr, FACTOR: tl.constexpr, AFTER: tl.constexpr,
    PLACES: tl.constexpr, AMD: tl.constexpr, PDL: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    QUADS: tl.constexpr, LANES: tl.constexpr,
    GENERATION: tl.constexpr, COLUMN_PROGRAMS: tl.constexpr, PIECES: tl.constexpr, TALL: tl.constexpr, R: tl.constexpr,
    B: tl.constexpr, N: tl.constexpr, S: tl.constexpr, SLICES: tl.constexpr, STEPS: tl.constexpr, AT_ONCE: tl.constexpr,
    EIGHTS: tl.constexpr, WIDE_INNER: tl.constexpr, WIDE_OUTER: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    mine, place, across, before = _begun(counters, places, PDL, COLUMN_PROGRAMS)
    base = places * COLUMN_PROGRAMS
    if mine < base:
        _inner(
            x, b, inner, counters, batch, cols, rank, mine, base,
            PIECES, R, B, N, S, STEPS, AT_ONCE, EIGHTS, WIDE_INNER, EXACT, GENERATION, PDL,
        )  # fmt: skip
        gemv_product(
            x, words, scale, zeros, row_scale, table, parts, rows, cols, width, one,
            BITS, WEIGHT, ZERO, GROUP, GROUPS, SCALES, MODE, EXPONENT, FACTOR, AFTER, PLACES, AMD, PDL, EVEN, ROWS,
            QUADS, LANES, place, places, across,
        )  # fmt: skip
        arrive(counters + 2 * APART, GENERATION, "release")
    else:
        _outer(
            parts, a, inner, counters, y, batch, rows, rank, mine - base, before, base,
            COLUMN_PROGRAMS, PIECES, TALL, R, B, N, SLICES, WIDE_OUTER, PRECISION, GENERATION, PDL,
        )  # fmt: skip


def suits(layout: Layout | None, rank: int, batch: int, arch: str) -> bool:
    """Whether a packed base and a correction of this rank are one launch: by what an H200 was measured to do faster.

    Rows beyond 8192 columns are shared by so many programs that one launch took 1.2 times as long as several, and a small
    rank beside a large matrix 1.02 times.
    """
    if layout is None or batch > LARGEST_BATCH or rank > LARGEST_RANK:
        return False
    large = layout.rows * layout.cols >= LARGE_NUMEL
    return not arch.startswith("sm_") or (layout.cols <= LONGEST_ROW and not (large and rank <= SMALL_RANK))


@remembered
def corrected_specs(
    layout: Layout, rank: int, batch: int, dtype: torch.dtype, factors: torch.dtype, arch: str
) -> list[KernelSpec]:
    """The launch for X [batch, cols] of `dtype`, with A and B of `factors`."""
    # 8-bit codes fill the registers: with half the work at a time there is room for what the correction keeps in them.
    eight = layout.bits == 8 and layout.mode == INTEGER
    programs = _resident(layout, batch)
    if skinny.suits(layout, batch, dtype, arch):
        less = {"PROGRAMS": programs * processors_of(arch)} | ({"CHUNKS": 2} if eight else {})
        base = skinny_specs(layout, batch, dtype, arch, torch.float32, less)[0]
        fn, others = corrected_skinny_kernel, ("padded", "rank", "ones", "magic")
    elif batch == 1 and len(layout.planes) == 1:
        base = gemv_specs(layout, dtype, arch, torch.float32, {"ROWS": 2} if eight else None)[0]
        fn, others = corrected_gemv_kernel, ("width", "rank", "one")
    else:
        base = gemm_specs(layout, batch, dtype, arch, out=torch.float32)[0]
        fn, others = corrected_gemm_kernel, ("padded", "rank")
    options = dict(base.options)
    if fn is corrected_skinny_kernel and layout.mode == INTEGER and layout.bits != 7 and programs > 2:
        # Told how many registers it may take, the assembler asks for the next words early, not late to save some.
        options["maxnreg"] = 65536 // (32 * base.num_warps * programs) // 8 * 8
    column_programs = base.grid[1] * base.grid[2]
    made = inner_constants(layout.cols, rank, batch, dtype, factors, base.num_warps, arch)
    r = int(str(made["R"]))
    pieces = r // 16 * int(str(made["SLICES"]))
    tall = min(tall_for(layout.rows, r), 128 if layout.mode == INTEGER else 64)
    pointers = {
        **{name: base.signature[name] for name in ("x", "words", "scale", "zeros", "row_scale", "table")},
        "parts": "*fp32",
        "a": pointer_type(factors),
        "b": pointer_type(factors),
        "inner": "*fp32",
        "counters": "*i64",
        "y": pointer_type(dtype),
    }
    return [
        replace(
            base,
            name=f"corrected_{base.name}_{pointer_type(factors)[1:]}b{made['B']}r{r}s{made['SLICES']}x{made['STEPS']}c{column_programs}t{tall}",
            fn=fn,
            signature={**pointers, **dict.fromkeys(("batch", "places", "rows", "cols", *others), "i32")},
            constants={
                **made,
                **{name: value for name, value in base.constants.items() if name in fn.arg_names},
                "GENERATION": generation(arch),
                "COLUMN_PROGRAMS": column_programs,
                "PIECES": pieces,
                "TALL": tall,
                **({"AHEAD": AHEAD if base.constants["PDL"] else 0} if fn is corrected_skinny_kernel else {}),
            },
            divisible=(
                *pointers,
                *(name for name in base.divisible if name in ("rows", "cols", *others)),
                *multiples({"rank": rank}),
            ),
            options=options,
            batch=batch,
            kind=f"corrected_{base.kind}",
            grid=(base.grid[0] * column_programs + triton.cdiv(layout.rows, tall), 1, 1),
        )
    ]


def _resident(layout: Layout, batch: int) -> int:
    """Programs of corrected_skinny_kernel that find room on a multiprocessor: of some codes fewer than of the base's own."""
    if layout.bits == 5:
        return 2
    wide = layout.mode == INTEGER and not layout.symmetric and layout.bits in (4, 6)
    return 3 if wide else skinny.resident(layout, batch)


def corrected(x: Tensor, packed: Packed, a: Tensor, b: Tensor, specs: list[KernelSpec]) -> Tensor:
    """x [batch, cols] -> (W + A B) x [batch, rows] in x's dtype, by `corrected_specs`. a: [rows, rank], b: [rank, cols]."""
    (spec,) = specs
    layout, batch, made = packed.layout, len(x), spec.constants
    y = torch.empty(batch, layout.rows, dtype=x.dtype, device=x.device)
    column_programs = made["COLUMN_PROGRAMS"]
    parts = torch.empty(column_programs, batch, layout.rows, dtype=torch.float32, device=x.device)
    inner, counters = meeting(x, spec, made["SLICES"] * made["B"] * made["R"])
    others: tuple[int, ...] = (layout.padded, len(b))
    kind = spec.kind.removeprefix("corrected_")
    if kind == "skinny":
        others = (*others, *skinny.ones_and_magic(x.dtype, made))
    elif kind == "gemv":
        others = (layout.width(layout.bits), len(b), ONE)
    places = (spec.grid[0] - triton.cdiv(layout.rows, made["TALL"])) // column_programs
    sizes = (batch, places, layout.rows, layout.cols, *others)
    launch(spec, x, *leaf_arguments(packed), parts, a, b, inner, counters, y, *sizes)
    return y
