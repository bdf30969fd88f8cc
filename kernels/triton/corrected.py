# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""y = (W + A B) x for a packed W and up to eight rows of activations, in one launch.

The base is what skinny.py, gemv.py or gemm.py computes, by their code, but into float32 parts. Of the correction, t = B x
is computed by the programs that begin first, a slice of the columns each, before their share of the base, and the last of
them adds up the slices; both go through the second-level cache (rank x rows of activations x 4 bytes for each slice). Of the
programs that have parts of the same rows the last to end adds up the parts, and A t to them.

Only t is waited for, and only after the base. The programs that owe it took the first numbers from a counter, so they
run already and wait for nothing themselves: no number of programs can stop each other, resident all at once or not.
Everything is added up in a fixed order, so results do not change from run to run.
"""

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton import skinny
from nstf.kernels.triton.gemm import gemm_kernel, gemm_specs
from nstf.kernels.triton.gemv import ONE, gemv_kernel, gemv_specs, launch, leaf_arguments, multiples
from nstf.kernels.triton.packed import INTEGER, Layout, Packed
from nstf.kernels.triton.skinny import skinny_kernel, skinny_specs
from nstf.kernels.triton.spec import KernelSpec, pointer_type

LARGEST_BATCH = 8
LARGEST_RANK = 128
_PARTS = 64  # slices of t at most
_TILE = tl.constexpr(4096)  # numbers of B at a time


@triton.jit
def begin(
    x,
    b,  # [rank, cols]
    inner,  # f32 [PARTS + 1, B, R]: the slices' sums, then t
    counters,  # i64: programs that began, slices that are there, whole ts, and programs that ended for each share of rows
    batch,
    cols,
    rank,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    LINES: tl.constexpr,  # rows of activations at a time: their sums are in registers
):
    """Takes a number, and with one of the first a slice of t. Returns the number of the launch, counted from 1."""
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    ticket = tl.atomic_add(counters, 1, sem="relaxed")
    part = (ticket % programs).to(tl.int32)
    if part < PARTS:
        COLUMNS: tl.constexpr = _TILE // R
        r = tl.arange(0, R)
        for several in range(0, batch, LINES):
            accs = ()
            for _ in tl.static_range(LINES):
                accs = accs + (tl.zeros([R, COLUMNS], tl.float32),)
            for first in range(part * COLUMNS, cols, PARTS * COLUMNS):
                k = first + tl.arange(0, COLUMNS)
                inside = (r < rank)[:, None] & (k < cols)[None, :]
                tile = tl.load(b + r[:, None] * cols + k[None, :], mask=inside, other=0.0).to(tl.float32)
                grown = ()
                for i in tl.static_range(LINES):
                    ok = (k < cols) & (several + i < batch)
                    some = tl.load(x + (several + i) * cols + k, mask=ok, other=0.0).to(tl.float32)
                    grown = grown + (accs[i] + tile * some[None, :],)
                accs = grown
            for i in tl.static_range(LINES):
                tl.store(inner + (part * B + several + i) * R + r, tl.sum(accs[i], axis=1))
        tl.debug_barrier()
        if tl.atomic_add(counters + 1, 1, sem="acq_rel") % PARTS == PARTS - 1:
            tl.debug_barrier()
            p = tl.arange(0, PARTS)
            for line in range(batch):
                # Past the first-level cache, which knows nothing of other multiprocessors.
                slices = tl.load(inner + (p[:, None] * B + line) * R + r[None, :], cache_modifier=".cg")
                tl.store(inner + (PARTS * B + line) * R + r, tl.sum(slices, axis=0))
            tl.debug_barrier()
            tl.atomic_add(counters + 2, 1, sem="acq_rel")
    return ticket // programs + 1


@triton.jit
def settle(
    parts,  # f32 [COLUMN_PROGRAMS, batch, rows]
    a,  # [rows, rank]
    inner,
    counters,
    y,  # [batch, rows]
    wanted,
    column_program,
    batch,
    rows,
    rank,
    PHASE: tl.constexpr,  # 0: all; 1, 2: where the interpreter would wait for a later program, in two launches
    COLUMN_PROGRAMS: tl.constexpr,  # programs that have parts of the same rows
    TALL: tl.constexpr,  # rows of a program at a time, as the base deals them
    AT_ONCE: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """The last program for its rows adds up what they are made of."""
    mine = tl.program_id(0)
    if PHASE == 0:
        tl.debug_barrier()
        ended = tl.atomic_add(counters + 3 + mine, 1, sem="acq_rel")
        last = ended % COLUMN_PROGRAMS == COLUMN_PROGRAMS - 1
    else:
        last = (column_program == 0) & (PHASE == 2)
    if last:
        if PHASE == 0:
            while tl.atomic_add(counters + 2, 0, sem="acquire") < wanted:
                pass
            tl.debug_barrier()
        r = tl.arange(0, R)
        for block in range(mine * TALL, rows, tl.num_programs(0) * TALL):
            for some in range(block, block + TALL, AT_ONCE):
                row = some + tl.arange(0, AT_ONCE)
                inside = (row < rows)[:, None] & (r < rank)[None, :]
                tile = tl.load(a + row[:, None] * rank + r[None, :], mask=inside, other=0.0).to(tl.float32)
                for line in range(batch):
                    t = tl.load(inner + (PARTS * B + line) * R + r, cache_modifier=".cg")
                    out = tl.sum(tile * t[None, :], axis=1)
                    for part in tl.static_range(COLUMN_PROGRAMS):
                        at = parts + (part * batch + line) * rows + row
                        out += tl.load(at, mask=row < rows, other=0.0, cache_modifier=".cg")
                    tl.store(y + line * rows + row, out.to(y.dtype.element_ty), mask=row < rows)


@triton.jit(do_not_specialize=["batch", "ones", "magic"])
def corrected_skinny_kernel(
    x,
    words,
    scale,
    zeros,
    row_scale,
    table,
    parts,
    a,
    b,
    inner,
    counters,
    y,
    batch,
    rows,
    cols,
    padded,
    rank,
    ones,
    magic,
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
    OFFSET: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    CONVERT: tl.constexpr,
    PDL: tl.constexpr,
    N: tl.constexpr,
    S: tl.constexpr,
    CHUNKS: tl.constexpr,
    COUNT: tl.constexpr,
    PHASE: tl.constexpr,
    COLUMN_PROGRAMS: tl.constexpr,
    TALL: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    LINES: tl.constexpr,
):
    wanted = tl.zeros([], tl.int64)
    if PHASE != 2:
        wanted = begin(x, b, inner, counters, batch, cols, rank, PARTS, R, B, LINES)
        skinny_kernel(
            x,
            words,
            scale,
            zeros,
            row_scale,
            table,
            parts,
            batch,
            rows,
            cols,
            padded,
            ones,
            magic,
            PLANES,
            SHIFTS,
            BITS,
            ZERO,
            GROUP,
            GROUPS,
            SCALES,
            MODE,
            EXPONENT,
            BIAS,
            AFTER,
            OFFSET,
            PAIRS,
            EVEN,
            WIDE,
            CONVERT,
            PDL,
            N,
            S,
            CHUNKS,
            COUNT,
        )
    settle(
        parts,
        a,
        inner,
        counters,
        y,
        wanted,
        tl.program_id(1),
        batch,
        rows,
        rank,
        PHASE,
        COLUMN_PROGRAMS,
        TALL,
        AT_ONCE,
        PARTS,
        R,
        B,
    )


@triton.jit(do_not_specialize=["batch"])
def corrected_gemm_kernel(
    x,
    words,
    scale,
    zeros,
    row_scale,
    table,
    parts,
    a,
    b,
    inner,
    counters,
    y,
    batch,
    rows,
    cols,
    padded,
    rank,
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
    PAIRS: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    AMD: tl.constexpr,
    PDL: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNKS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    LANES: tl.constexpr,
    PHASE: tl.constexpr,
    COLUMN_PROGRAMS: tl.constexpr,
    TALL: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    LINES: tl.constexpr,
):
    wanted = tl.zeros([], tl.int64)
    if PHASE != 2:
        wanted = begin(x, b, inner, counters, batch, cols, rank, PARTS, R, B, LINES)
        gemm_kernel(
            x,
            words,
            scale,
            zeros,
            row_scale,
            table,
            parts,
            batch,
            rows,
            cols,
            padded,
            PLANES,
            SHIFTS,
            BITS,
            ZERO,
            GROUP,
            GROUPS,
            SCALES,
            MODE,
            EXPONENT,
            BIAS,
            AFTER,
            PAIRS,
            SCALE_WEIGHTS,
            SWAP,
            EVEN,
            WIDE,
            AMD,
            PDL,
            SPLIT,
            CHUNKS,
            BM,
            BN,
            LANES,
        )
    settle(
        parts,
        a,
        inner,
        counters,
        y,
        wanted,
        tl.program_id(2),
        batch,
        rows,
        rank,
        PHASE,
        COLUMN_PROGRAMS,
        TALL,
        AT_ONCE,
        PARTS,
        R,
        B,
    )


@triton.jit(do_not_specialize=["batch"])
def corrected_gemv_kernel(
    x,
    words,
    scale,
    zeros,
    row_scale,
    table,
    parts,
    a,
    b,
    inner,
    counters,
    y,
    batch,
    rows,
    cols,
    width,
    rank,
    one,
    BITS: tl.constexpr,
    WEIGHT: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALES: tl.constexpr,
    MODE: tl.constexpr,
    EXPONENT: tl.constexpr,
    FACTOR: tl.constexpr,
    AFTER: tl.constexpr,
    PLACES: tl.constexpr,
    AMD: tl.constexpr,
    PDL: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    QUADS: tl.constexpr,
    LANES: tl.constexpr,
    PHASE: tl.constexpr,
    COLUMN_PROGRAMS: tl.constexpr,
    TALL: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    LINES: tl.constexpr,
):
    wanted = tl.zeros([], tl.int64)
    if PHASE != 2:
        wanted = begin(x, b, inner, counters, batch, cols, rank, PARTS, R, B, LINES)
        gemv_kernel(
            x,
            words,
            scale,
            zeros,
            row_scale,
            table,
            parts,
            rows,
            cols,
            width,
            one,
            BITS,
            WEIGHT,
            ZERO,
            GROUP,
            GROUPS,
            SCALES,
            MODE,
            EXPONENT,
            FACTOR,
            AFTER,
            PLACES,
            AMD,
            PDL,
            EVEN,
            ROWS,
            QUADS,
            LANES,
        )
    settle(
        parts,
        a,
        inner,
        counters,
        y,
        wanted,
        tl.program_id(1),
        batch,
        rows,
        rank,
        PHASE,
        COLUMN_PROGRAMS,
        TALL,
        AT_ONCE,
        PARTS,
        R,
        B,
    )


def suits(layout: Layout | None, rank: int, batch: int) -> bool:
    """Whether a packed base and a correction of this rank are one launch."""
    return layout is not None and batch <= LARGEST_BATCH and rank <= LARGEST_RANK


def corrected_specs(
    layout: Layout, rank: int, batch: int, dtype: torch.dtype, factors: torch.dtype, arch: str
) -> list[KernelSpec]:
    """The launch (two under the interpreter) for X [batch, cols] of `dtype`, with A and B of `factors`."""
    # 8-bit integers fill the registers: with half the work at a time there is room for what the correction keeps in them.
    eight = layout.bits == 8 and layout.mode == INTEGER
    if skinny.suits(layout, batch, dtype, arch):
        base = skinny_specs(layout, batch, dtype, arch, torch.float32, {"CHUNKS": 2} if eight else None)[0]
        fn, tall, others = corrected_skinny_kernel, 16, ("padded", "rank", "ones", "magic")
    elif batch == 1 and len(layout.planes) == 1:
        base = gemv_specs(layout, dtype, arch, torch.float32, {"ROWS": 2} if eight else None)[0]
        fn, tall, others = corrected_gemv_kernel, base.constants["ROWS"], ("width", "rank", "one")
    else:
        base = gemm_specs(layout, batch, dtype, arch, out=torch.float32)[0]
        fn, tall, others = corrected_gemm_kernel, base.constants["BN"], ("padded", "rank")
    # CDNA: a few registers more than the base has would leave one wave where it has two. Other codes would spill.
    plain4 = layout.bits == 4 and layout.mode == INTEGER and layout.symmetric and layout.group >= 128
    two_waves = fn is corrected_gemv_kernel and plain4 and arch.startswith("gfx9")
    r, b = max(16, triton.next_power_of_2(rank)), triton.next_power_of_2(batch)
    programs = base.grid[0] * base.grid[1] * base.grid[2]
    most = min(_PARTS, programs, triton.cdiv(layout.cols, _TILE.value // r))
    parts = 1 << (most.bit_length() - 1)
    pointers = {
        **{name: base.signature[name] for name in ("x", "words", "scale", "zeros", "row_scale", "table")},
        "parts": "*fp32",
        "a": pointer_type(factors),
        "b": pointer_type(factors),
        "inner": "*fp32",
        "counters": "*i64",
        "y": pointer_type(dtype),
    }
    even = multiples({"rank": rank})
    column_programs = base.grid[1] * base.grid[2]
    # One after the other, programs must not wait for later ones.
    phases = (1, 2) if parts > column_programs and triton.knobs.runtime.interpret else (0,)
    return [
        replace(
            base,
            name=f"corrected_{base.name}_{pointer_type(factors)[1:]}b{b}r{r}p{parts}"
            + (f"_phase{phase}" if phase else ""),
            fn=fn,
            signature={**pointers, **dict.fromkeys(("batch", "rows", "cols", *others), "i32")},
            constants={
                **{name: value for name, value in base.constants.items() if name in fn.arg_names},
                "PDL": False,
                "PHASE": phase,
                "COLUMN_PROGRAMS": column_programs,
                "TALL": tall,
                "AT_ONCE": min(tall, 32),
                "PARTS": parts,
                "R": r,
                "B": b,
                "LINES": min(b, 2 if r <= 64 else 1),
            },
            divisible=(
                *pointers,
                *(name for name in base.divisible if name in ("rows", "cols", *others)),
                *even,
            ),
            options={"waves_per_eu": 2} if two_waves else {},
            batch=batch,
            kind=f"corrected_{base.kind}",
        )
        for phase in phases
    ]


def corrected(x: Tensor, packed: Packed, a: Tensor, b: Tensor, specs: list[KernelSpec]) -> Tensor:
    """x [batch, cols] -> (W + A B) x [batch, rows] in x's dtype, by `corrected_specs`. a: [rows, rank], b: [rank, cols]."""
    layout, batch, rank, made = packed.layout, len(x), len(b), specs[0].constants
    y = torch.empty(batch, layout.rows, dtype=x.dtype, device=x.device)
    column_programs, grid = made["COLUMN_PROGRAMS"], specs[0].grid
    parts = torch.empty(column_programs, batch, layout.rows, dtype=torch.float32, device=x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    size = (made["PARTS"] + 1) * made["B"] * made["R"]
    inner, counters = _scratch(x.device, stream, grid, made["PARTS"], size)
    kind = specs[0].kind.removeprefix("corrected_")
    others: tuple[int, ...] = (layout.padded, rank)
    if kind == "skinny":
        others = (*others, *skinny.ones_and_magic(x.dtype, made))
    elif kind == "gemv":
        others = (layout.width(layout.bits), rank, ONE)
    for spec in specs:
        sizes = (batch, layout.rows, layout.cols, *others)
        launch(spec, x, *leaf_arguments(packed), parts, a, b, inner, counters, y, *sizes)
    return y


@cache
def _scratch(
    device: torch.device, stream: int, grid: tuple[int, int, int], parts: int, size: int
) -> tuple[Tensor, Tensor]:
    """Room for t and the counters, for launches of a grid that follow one another on a stream."""
    inner = torch.empty(size, dtype=torch.float32, device=device)
    return inner, torch.zeros(3 + grid[0], dtype=torch.int64, device=device)
