# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The sum of a product's parts where its columns are split over programs: in a fixed order.

Either a launch of its own (`sum_spec`), or by the program that is the last of those with the same rows (`add_parts`): one
launch less, which one row of activations notices.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.arrival import arrive, generation
from nstf.kernels.triton.ending import MOST_SQUARES, Ending, Meeting, is_parted
from nstf.kernels.triton.launching import handed_on, multiples, overlap_options, overlaps
from nstf.kernels.triton.spec import KernelSpec, pointer_type

# Programs along the rows of a launch, at most: its counters.
MOST_PLACES = 1024


@triton.jit
def gated(g, u, GELU: tl.constexpr):
    """act(g) u, f32."""
    if GELU:
        # 0.5 (1 + tanh z) is the logistic function of 2 z; z = sqrt(2 / pi) (g + 0.044715 g^3).
        return g * tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g)) * u
    else:
        return g * tl.sigmoid(g) * u


@triton.jit
def _total(parts, at, ok, size, SPLIT: tl.constexpr, LINES: tl.constexpr, PER: tl.constexpr):
    total = tl.zeros([LINES, PER], tl.float32)
    for i in tl.static_range(SPLIT):
        # Past the first-level cache, which knows nothing of other multiprocessors.
        total += tl.load(parts + i * size + at, mask=ok, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def add_parts(
    parts,  # f32 [SPLIT, batch, rows]
    y,  # [batch, rows], or [batch, rows / 2] with a gate
    counters,  # i32 [places]: zero between launches
    squares,  # f32 [batch, known], of x (NORMED)
    h,  # f32 [batch, rows] (ADDS)
    gain,  # f32 [rows] (ADDS)
    new_squares,  # f32 [batch, places], of h (ADDS)
    batch,
    rows,
    cols,
    known,
    epsilon,
    place,
    places,
    SPLIT: tl.constexpr,
    GATE: tl.constexpr,
    NORMED: tl.constexpr,
    ADDS: tl.constexpr,
    LINES: tl.constexpr,
    PER: tl.constexpr,
    MOST: tl.constexpr,
    GENERATION: tl.constexpr,
):
    """y = the sum of the parts in the sixteens of rows place, place + places, ..., by the last program that has stored its own.

    With a gate those are the rows of both halves. What launches on a stream share is zero again when this one ends; the
    programs of the next one come here after that (`gdc_wait`).
    """
    if arrive(counters + place, GENERATION, "acq_rel") == SPLIT - 1:
        tl.debug_barrier()
        tl.store(counters + place, 0)
        line = tl.arange(0, LINES)[:, None]
        strength = tl.full([LINES, 1], 1.0, tl.float32)
        if NORMED:
            k = tl.arange(0, MOST)[None, :]
            some = tl.load(squares + line * known + k, mask=(line < batch) & (k < known), other=0.0)
            strength = tl.rsqrt(tl.sum(some, axis=1, keep_dims=True) / cols + epsilon)
        of_place = tl.zeros([LINES], tl.float32)
        height = rows // 2 if GATE else rows
        mine = ((height + 15) // 16 - place + places - 1) // places * 16
        for begin in range(0, mine, PER):
            i = begin + tl.arange(0, PER)
            row = ((place + i // 16 * places) * 16 + i % 16)[None, :]
            ok = (row < height) & (line < batch)
            out = _total(parts, line * rows + row, ok, batch * rows, SPLIT, LINES, PER) * strength
            if GATE:
                up = _total(parts, line * rows + height + row, ok, batch * rows, SPLIT, LINES, PER) * strength
                # Rounded as by a product of its own.
                out = out.to(y.dtype.element_ty).to(tl.float32)
                out = gated(out, up.to(y.dtype.element_ty).to(tl.float32), GATE == 2)
            if ADDS:
                out = out.to(y.dtype.element_ty).to(tl.float32)
                out += tl.load(h + line * rows + row, mask=ok, other=0.0)
                tl.store(h + line * rows + row, out, mask=ok)
                of_place += tl.sum(out * out, axis=1)
                out *= tl.load(gain + row, mask=row < rows, other=0.0)
            tl.store(y + line * height + row, out.to(y.dtype.element_ty), mask=ok)
        if ADDS:
            n = tl.arange(0, LINES)
            tl.store(new_squares + n * places + place, of_place, mask=n < batch)


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
        constants={"SPLIT": split, "BLOCK": 256, "PDL": overlaps(arch)},
        divisible=("parts", "y", *multiples({"size": size})),
        num_warps=4,
        num_stages=1,
        options=overlap_options(arch),
        kind="sum",
        grid=(triton.cdiv(size, 256), 1, 1),
    )


SIGNATURE = {"squares": "*fp32", "h": "*fp32", "gain": "*fp32", "new_squares": "*fp32"}


def ending_constants(split: int, ending: Ending, batch: int, lines: int, arch: str) -> dict[str, int | bool]:
    """The constants of `add_parts`. lines: the largest batch that the same kernel takes."""
    lines = 1 if batch == 1 else lines
    parted = is_parted(split, ending)
    return {
        "SPLIT": split,
        "GATE": 0 if ending.gelu is None else 2 if ending.gelu else 1,
        "NORMED": ending.normed,
        "ADDS": ending.adds,
        "LINES": lines if parted else 0,
        # Numbers at once: what a program has of one row of activations, as a rule.
        "PER": (256 if lines == 1 else 1024 // lines) if parted else 0,
        "MOST": MOST_SQUARES,
        "GENERATION": generation(arch),
    }


def ending_arguments(
    spec: KernelSpec, x: Tensor, rows: int, words: Tensor, out: torch.dtype, meeting: Meeting | None
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...], tuple[int, float]]:
    """(Y, the squares of its numbers, (y, parts, counters, squares, h, gain, new_squares), (known, epsilon)) of a launch.

    For what an ending does not need stand the matrix's words, of the type stated and never read.
    """
    made, batch, (places, split, _) = spec.constants, len(x), spec.grid
    y = torch.empty(batch, rows // 2 if made["GATE"] else rows, dtype=out, device=x.device)
    nothing = words.view(torch.float32)
    meeting = meeting or Meeting()
    squares, h, gain = (nothing if t is None else t for t in (meeting.squares, meeting.h, meeting.gain))
    known = 1 if meeting.squares is None else meeting.squares.shape[1]
    new_squares = torch.empty(batch, places, device=x.device) if made["ADDS"] else None
    parts, counters = y, words
    if made["PER"]:
        parts = torch.empty(split, batch, rows, dtype=torch.float32, device=x.device)
        counters = handed_on(x.device, MOST_PLACES, torch.int32, "sums")
    into = nothing if new_squares is None else new_squares
    return y, new_squares, (y, parts, counters, squares, h, gain, into), (known, meeting.epsilon)
