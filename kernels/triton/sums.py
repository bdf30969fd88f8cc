# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The sum of a product's parts where its columns are split over programs: in a fixed order. What follows may come with it.

A norm divides by a root mean square, which is known when all of the sums are. So the launch that adds a product onto the
residual stream leaves sums of squares, the next product is of numbers that were not divided, and the launch that adds up
the parts of that one divides.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.ending import Ending, Meeting
from nstf.kernels.triton.launching import hardware_of, launch, multiples, overlap_options, overlaps
from nstf.kernels.triton.peers import BLOCK, MOST_VALUES, WARPS, call_of, exchanged, rooms_of
from nstf.kernels.triton.spec import KernelSpec, pointer_type

# Rows of a program: as many as ranks exchange at a time.
_ROWS = BLOCK


@triton.jit
def sum_kernel(parts, y, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """y [size] = the sum of parts f32 [SPLIT, size]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(SPLIT):
        total += tl.load(parts + i * size + at, mask=at < size, other=0.0)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=at < size)


def sum_spec(size: int, split: int, dtype: torch.dtype, arch: str) -> KernelSpec:
    """The launch that adds up `split` float32 parts of `size` numbers."""
    return KernelSpec(
        name=f"sum_{split}_{pointer_type(dtype)[1:]}",
        fn=sum_kernel,
        signature={"parts": "*fp32", "y": pointer_type(dtype), "size": "i32"},
        constants={"SPLIT": split, "BLOCK": _ROWS, "PDL": overlaps(arch)},
        divisible=("parts", "y", *multiples({"size": size})),
        num_warps=4,
        num_stages=1,
        options=overlap_options(arch),
        kind="sum",
        grid=(triton.cdiv(size, _ROWS), 1, 1),
    )


@triton.jit
def gated(g, u, GELU: tl.constexpr):
    """act(g) u, f32."""
    if GELU:
        # 0.5 (1 + tanh z) is the logistic function of 2 z; z = sqrt(2 / pi) (g + 0.044715 g^3).
        return g * tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g)) * u
    else:
        return g * tl.sigmoid(g) * u


@triton.jit
def _total(parts, at, ok, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(SPLIT):
        total += tl.load(parts + i * size + at, mask=ok, other=0.0)
    return total


@triton.jit
def ending_kernel(
    parts,  # f32 [SPLIT, batch, rows]
    y,  # [batch, rows], or [batch, rows / 2] with a gate
    squares,  # f32 [batch, KNOWN] (NORMED)
    h,  # f32 [batch, rows] (ADDS)
    gain,  # f32 [rows] (ADDS)
    new_squares,  # f32 [batch, programs along the rows] (ADDS)
    rows,
    cols,
    epsilon,
    rooms,  # i64 [RANKS] (RANKS > 1)
    calls,  # i32 [programs] (RANKS > 1)
    SPLIT: tl.constexpr,
    GATE: tl.constexpr,  # 1: SiLU, 2: GELU
    NORMED: tl.constexpr,
    ADDS: tl.constexpr,
    KNOWN: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SLOTS: tl.constexpr,
    NVIDIA: tl.constexpr,
):
    """y = what `Ending` says of the sum of the parts."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    height = rows // 2 if GATE else rows
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    line = tl.program_id(1)
    ok = row < height
    if ADDS:
        factor = tl.load(gain + row, mask=ok, other=0.0)
    if RANKS > 1:
        addresses = rooms_of(rooms, RANKS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    size = tl.num_programs(1) * rows
    at = line * rows + row
    # All that is read is asked for before any of it is used.
    if RANKS > 1:
        block = line * tl.num_programs(0) + tl.program_id(0)
        call = call_of(calls, block)
    if ADDS:
        before = tl.load(h + at, mask=ok, other=0.0)
    if NORMED:
        k = tl.arange(0, MOST)
        some = tl.load(squares + line * KNOWN + k, mask=k < KNOWN, other=0.0)
    out = _total(parts, at, ok, size, SPLIT, BLOCK)
    if GATE:
        up = _total(parts, at + height, ok, size, SPLIT, BLOCK)
    if RANKS > 1:
        out = exchanged(out, block, addresses, call, calls, RANK, RANKS, SLOTS, BLOCK, NVIDIA)
    if NORMED:
        strength = tl.rsqrt(tl.sum(some) / cols + epsilon)
        out *= strength
        if GATE:
            up *= strength
    if GATE:
        # Rounded as by a product of its own.
        out = out.to(y.dtype.element_ty).to(tl.float32)
        out = gated(out, up.to(y.dtype.element_ty).to(tl.float32), GATE == 2)
    if ADDS:
        out = out.to(y.dtype.element_ty).to(tl.float32) + before
        tl.store(h + at, out, mask=ok)
        tl.store(new_squares + line * tl.num_programs(0) + tl.program_id(0), tl.sum(out * out))
        out *= factor
    tl.store(y + line * height + row, out.to(y.dtype.element_ty), mask=ok)


@lru_cache(maxsize=1024)
def ending_spec(
    batch: int, rows: int, cols: int, split: int, dtype: torch.dtype, ending: Ending, arch: str
) -> KernelSpec:
    """The launch that adds up `split` float32 parts [batch, rows] of a product with X [batch, cols], and ends it."""
    height = rows if ending.gelu is None else rows // 2
    # The launch that added onto X's stream had as many programs.
    known = triton.cdiv(cols, _ROWS) if ending.normed else 0
    pointers = ("parts", "squares", "h", "gain", "new_squares")
    sizes = {"rows": rows, "cols": cols}
    met = {"rooms": "*i64", "calls": "*i32"} if ending.ranks > 1 else {}
    return KernelSpec(
        name=f"end_{split}_{pointer_type(dtype)[1:]}{ending.name}" + (f"_{known}" if known else ""),
        fn=ending_kernel,
        signature={
            "parts": "*fp32",
            "y": pointer_type(dtype),
            **dict.fromkeys(pointers[1:], "*fp32"),
            **dict.fromkeys(sizes, "i32"),
            "epsilon": "fp32",
            **met,
        },
        constants={
            "SPLIT": split,
            "GATE": 0 if ending.gelu is None else 2 if ending.gelu else 1,
            "NORMED": ending.normed,
            "ADDS": ending.adds,
            "KNOWN": known,
            "MOST": triton.next_power_of_2(max(known, 1)),
            "BLOCK": _ROWS,
            "PDL": overlaps(arch),
            "RANK": ending.rank,
            "RANKS": ending.ranks,
            "SLOTS": MOST_VALUES,
            "NVIDIA": hardware_of(arch) == 1,
            **({} if met else {"rooms": None, "calls": None}),
        },
        divisible=("y", *pointers, *met, *multiples(sizes)),
        num_warps=WARPS if met else 4,
        num_stages=1,
        options=overlap_options(arch),
        batch=batch,
        kind="end",
        grid=(triton.cdiv(height, _ROWS), batch, 1),
    )


def ended(
    parts: Tensor, cols: int, dtype: torch.dtype, spec: KernelSpec, meeting: Meeting
) -> tuple[Tensor, Tensor | None]:
    """(Y of `dtype`, and where the ending adds the sums of the squares of h, f32 [batch, programs]).

    parts: f32 [split, batch, rows].
    """
    _, batch, rows = parts.shape
    gate, adds = spec.constants["GATE"], spec.constants["ADDS"]
    y = torch.empty(batch, rows // 2 if gate else rows, dtype=dtype, device=parts.device)
    new = torch.empty(batch, spec.grid[0], device=parts.device) if adds else None
    # For what an ending does not need stand the parts, of the same type and never read.
    needs = (parts if t is None else t for t in (meeting.squares, meeting.h, meeting.gain, new))
    peers = meeting.peers
    met = () if peers is None else (peers.rooms, peers.calls)
    launch(spec, parts, y, *needs, rows, cols, meeting.epsilon, *met)
    return y, new
