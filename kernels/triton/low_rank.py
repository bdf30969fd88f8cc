# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""y = A (B x) for a few rows of activations in one launch, and the same added to what another product left in y.

Every program takes a slice of the columns for t = B x, and all add up the slices' sums once they are there: a few hundred
bytes a program that stay in the second-level cache. They wait for each other in between, so there may be no more programs
than multiprocessors; their part of A is on its way meanwhile. A launch of its own for A would cost more than the wait.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.gemv import launch, multiples, processors_of
from nstf.kernels.triton.spec import KernelSpec, pointer_type

LARGEST_BATCH = 8
LARGEST_RANK = 256
_COLUMNS = 32
_ROWS = 32


@triton.jit(do_not_specialize=["batch"])
def low_rank_kernel(
    x,  # [batch, cols]
    a,  # [rows, rank]
    b,  # [rank, cols]
    parts,  # f32 [programs, B, R]
    counter,  # i64 [1]: programs that arrived, over all launches
    y,  # [batch, rows]
    batch,
    rows,
    cols,
    rank,
    ADD: tl.constexpr,  # to what is in y
    PHASE: tl.constexpr,  # 0: both; 1, 2: the interpreter runs programs one after the other, so in two launches
    PROGRAMS: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    LINES: tl.constexpr,  # rows of activations at a time: their sums are in registers
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    program = tl.program_id(0)
    r = tl.arange(0, R)
    if PHASE != 2:
        for several in tl.static_range(0, B, LINES):
            accs = ()
            for _ in tl.static_range(LINES):
                accs = accs + (tl.zeros([R, COLUMNS], tl.float32),)
            for first in range(program * COLUMNS, cols, PROGRAMS * COLUMNS):
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
                tl.store(parts + (program * B + several + i) * R + r, tl.sum(accs[i], axis=1))
    if PHASE != 1:
        row = program * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (r < rank)[None, :]
        tile = tl.load(a + row[:, None] * rank + r[None, :], mask=inside, other=0.0)
        if PHASE == 0:
            tl.debug_barrier()
            arrived = tl.atomic_add(counter, 1, sem="acq_rel")
            wanted = (arrived // PROGRAMS + 1) * PROGRAMS
            while tl.atomic_add(counter, 0, sem="acquire") < wanted:
                pass
            tl.debug_barrier()
        p = tl.arange(0, PROGRAMS)
        for first in range(program * ROWS, rows, PROGRAMS * ROWS):
            if first > program * ROWS:
                row = first + tl.arange(0, ROWS)
                inside = (row < rows)[:, None] & (r < rank)[None, :]
                tile = tl.load(a + row[:, None] * rank + r[None, :], mask=inside, other=0.0)
            for line in tl.static_range(B):
                # Past the first-level cache, which knows nothing of other multiprocessors.
                t = tl.sum(
                    tl.load(parts + (p[:, None] * B + line) * R + r[None, :], cache_modifier=".cg"), axis=0
                )
                out = tl.sum(tile.to(tl.float32) * t[None, :], axis=1)
                at = y + line * rows + row
                ok = (row < rows) & (line < batch)
                if ADD:
                    out += tl.load(at, mask=ok, other=0.0).to(tl.float32)
                tl.store(at, out.to(y.dtype.element_ty), mask=ok)


def low_rank_specs(
    rows: int,
    cols: int,
    rank: int,
    batch: int,
    dtype: torch.dtype,
    factors: torch.dtype,
    add: bool,
    arch: str,
    processors: int = 0,
) -> list[KernelSpec]:
    """The launch (two under the interpreter). processors: of the card, when it is known."""
    most = processors or processors_of(arch)
    programs = min(
        128, 1 << (most.bit_length() - 1), triton.next_power_of_2(triton.cdiv(max(rows, cols), _ROWS))
    )
    r, b = max(16, triton.next_power_of_2(rank)), triton.next_power_of_2(batch)
    sizes = {"batch": batch, "rows": rows, "cols": cols, "rank": rank}
    phases = (1, 2) if triton.knobs.runtime.interpret else (0,)
    return [
        KernelSpec(
            name=f"low_rank_{pointer_type(dtype)[1:]}_{pointer_type(factors)[1:]}_b{b}r{r}p{programs}"
            + ("a" if add else "")
            + (f"_phase{phase}" if phase else ""),
            fn=low_rank_kernel,
            signature={
                "x": pointer_type(dtype),
                "a": pointer_type(factors),
                "b": pointer_type(factors),
                "parts": "*fp32",
                "counter": "*i64",
                "y": pointer_type(dtype),
                **dict.fromkeys(sizes, "i32"),
            },
            constants={
                "ADD": add,
                "PHASE": phase,
                "PROGRAMS": programs,
                "R": r,
                "B": b,
                "LINES": min(b, 4 if r <= 128 else 2),
                "COLUMNS": _COLUMNS,
                "ROWS": _ROWS,
            },
            divisible=("x", "a", "b", "parts", "counter", "y", *multiples(sizes)),
            num_warps=4,
            num_stages=1,
            batch=batch,
            kind="low_rank",
            grid=(programs, 1, 1),
        )
        for phase in phases
    ]


def low_rank(x: Tensor, a: Tensor, b: Tensor, arch: str, into: Tensor | None = None) -> Tensor:
    """x [batch, cols] -> A (B x) [batch, rows] in x's dtype; added to `into`, in place, when that is given.

    a: [rows, rank], b: [rank, cols], both of one floating dtype; rank at most LARGEST_RANK, batch LARGEST_BATCH.
    """
    batch, cols = x.shape
    rows, rank = a.shape
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 0
    specs = low_rank_specs(rows, cols, rank, batch, x.dtype, a.dtype, into is not None, arch, processors)
    y = torch.empty(batch, rows, dtype=x.dtype, device=x.device) if into is None else into
    made = specs[0].constants
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    parts, counter = _scratch(x.device, stream, made["PROGRAMS"], made["B"] * made["R"])
    for spec in specs:
        launch(spec, x, a, b, parts, counter, y, batch, rows, cols, rank)
    return y


@cache
def _scratch(device: torch.device, stream: int, programs: int, size: int) -> tuple[Tensor, Tensor]:
    """Room for the parts and the counter, for launches that follow one another on a stream."""
    parts = torch.empty(programs, size, device=device)
    return parts, torch.zeros(1, dtype=torch.int64, device=device)
