# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""The sum of a product's parts where its columns are split over programs: in a fixed order. What follows may come with it.

A norm divides by a root mean square, which is known when all of the sums are. So the launch that adds a product onto the
residual stream leaves sums of squares, the next product is of numbers that were not divided, and the launch that adds up
the parts of that one divides. Where the next product is of a rotated matrix, activations are turned here too: a program
has whole blocks of the transform.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.ending import Ending, Meeting
from nstf.kernels.triton.launching import hardware_of, launch, multiples, overlap_options, overlaps
from nstf.kernels.triton.rotate import place_of, turned
from nstf.kernels.triton.spec import KernelSpec, pointer_type

# Rows of a program.
_ROWS = 256


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
def _total(parts, at, ok, size, SPLIT: tl.constexpr, N: tl.constexpr):
    total = tl.zeros([N], tl.float32)
    for i in tl.static_range(SPLIT):
        total += tl.load(parts + i * size + at, mask=ok, other=0.0)
    return total


@triton.jit(do_not_specialize=["seed"])
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
    seed,  # of the signs (TURN)
    SPLIT: tl.constexpr,
    GATE: tl.constexpr,  # 1: SiLU, 2: GELU
    NORMED: tl.constexpr,
    ADDS: tl.constexpr,
    KNOWN: tl.constexpr,
    MOST: tl.constexpr,
    TURN: tl.constexpr,  # the block of the transform; 0: none
    SCALE: tl.constexpr,  # 1 / its root
    BLOCK: tl.constexpr,
    HARDWARE: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = what `Ending` says of the sum of the parts."""
    # What is turned lies as rotate.py wants it: four numbers of a lane, 32 apart.
    R: tl.constexpr = 4 if TURN > 0 else 1
    N: tl.constexpr = BLOCK // R
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    height = rows // 2 if GATE else rows
    first = tl.program_id(0) * BLOCK
    if TURN > 0:
        first += place_of(N)
    else:
        first += tl.arange(0, N)
    line = tl.program_id(1)
    factors = ()
    if ADDS:
        for r in tl.static_range(R):
            factors = factors + (tl.load(gain + first + 32 * r, mask=first + 32 * r < height, other=0.0),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    size = tl.num_programs(1) * rows
    if NORMED:
        k = tl.arange(0, MOST)
        some = tl.load(squares + line * KNOWN + k, mask=k < KNOWN, other=0.0)
    outs = ()
    ups = ()
    for r in tl.static_range(R):
        at = line * rows + first + 32 * r
        ok = first + 32 * r < height
        outs = outs + (_total(parts, at, ok, size, SPLIT, N),)
        if GATE:
            ups = ups + (_total(parts, at + height, ok, size, SPLIT, N),)
    if NORMED:
        strength = tl.rsqrt(tl.sum(some) / cols + epsilon)
    of_squares = tl.zeros([N], tl.float32)
    ends = ()
    for r in tl.static_range(R):
        row = first + 32 * r
        ok = row < height
        out = outs[r]
        if NORMED:
            out *= strength
        if GATE:
            up = ups[r]
            if NORMED:
                up *= strength
            # Rounded as by a product of its own.
            out = out.to(y.dtype.element_ty).to(tl.float32)
            out = gated(out, up.to(y.dtype.element_ty).to(tl.float32), GATE == 2)
        if ADDS:
            at = line * rows + row
            out = out.to(y.dtype.element_ty).to(tl.float32) + tl.load(h + at, mask=ok, other=0.0)
            tl.store(h + at, out, mask=ok)
            of_squares += out * out
            out *= factors[r]
        ends = ends + (out,)
    if ADDS:
        tl.store(new_squares + line * tl.num_programs(0) + tl.program_id(0), tl.sum(of_squares))
    if TURN > 0:
        ends = turned(ends, first, seed, TURN, 0, SCALE, N, HARDWARE)
    for r in tl.static_range(R):
        row = first + 32 * r
        tl.store(y + line * height + row, ends[r].to(y.dtype.element_ty), mask=row < height)


@lru_cache(maxsize=1024)
def ending_spec(
    batch: int, rows: int, cols: int, split: int, dtype: torch.dtype, ending: Ending, arch: str
) -> KernelSpec:
    """The launch that adds up `split` float32 parts [batch, rows] of a product with X [batch, cols] of `dtype`, and ends
    it."""
    height = rows if ending.gelu is None else rows // 2
    # The launch that added onto X's stream had as many programs.
    known = triton.cdiv(cols, _ROWS) if ending.normed else 0
    pointers = ("parts", "squares", "h", "gain", "new_squares")
    sizes = {"rows": rows, "cols": cols}
    basis = ending.turned
    dtype = dtype if basis is None else basis.dtype
    return KernelSpec(
        name=f"end_{split}_{pointer_type(dtype)[1:]}{ending.name}" + (f"_{known}" if known else ""),
        fn=ending_kernel,
        signature={
            "parts": "*fp32",
            "y": pointer_type(dtype),
            **dict.fromkeys(pointers[1:], "*fp32"),
            **dict.fromkeys(sizes, "i32"),
            "epsilon": "fp32",
            "seed": "i32",
        },
        constants={
            "SPLIT": split,
            "GATE": 0 if ending.gelu is None else 2 if ending.gelu else 1,
            "NORMED": ending.normed,
            "ADDS": ending.adds,
            "KNOWN": known,
            "MOST": triton.next_power_of_2(max(known, 1)),
            "TURN": basis.block if basis else 0,
            "SCALE": basis.block**-0.5 if basis else 1.0,
            "BLOCK": _ROWS,
            "HARDWARE": hardware_of(arch),
            "PDL": overlaps(arch),
        },
        divisible=("y", *pointers, *multiples(sizes)),
        num_warps=_ROWS // 128 if basis else 4,
        num_stages=1,
        options=overlap_options(arch),
        batch=batch,
        kind="end",
        grid=(triton.cdiv(height, _ROWS), batch, 1),
    )


def ended(
    parts: Tensor, cols: int, dtype: torch.dtype, spec: KernelSpec, ending: Ending, meeting: Meeting
) -> tuple[Tensor, Tensor | None]:
    """(Y, and where the ending adds the sums of the squares of h, f32 [batch, programs]), as the spec was made for `ending`.

    parts: f32 [split, batch, rows]; cols, dtype: of X.
    """
    _, batch, rows = parts.shape
    basis = ending.turned
    height = rows if ending.gelu is None else rows // 2
    y = torch.empty(batch, height, dtype=dtype if basis is None else basis.dtype, device=parts.device)
    new = torch.empty(batch, spec.grid[0], device=parts.device) if ending.adds else None
    # For what an ending does not need stand the parts, of the same type and never read.
    needs = (parts if t is None else t for t in (meeting.squares, meeting.h, meeting.gain, new))
    launch(spec, parts, y, *needs, rows, cols, meeting.epsilon, basis.seed if basis else 0)
    return y, new
