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
from nstf.kernels.triton.launching import handed_on, multiples, overlap_options, overlaps
from nstf.kernels.triton.spec import KernelSpec, pointer_type


# Programs along the rows of a launch, at most: its counters.
MOST_PLACES = 1024
# What is done with a sum (GATE): nothing; the gate of a block whose gate and up projections lie one above the other.
GATES = {None: 0, False: 1, True: 2}


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
        # Past the first-level cache, which knows nothing of other multiprocessors.
        total += tl.load(parts + i * size + at, mask=ok, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def add_parts(
    parts,  # f32 [SPLIT, batch, rows]
    y,  # [batch, rows], or [batch, rows / 2] with a gate
    counters,  # i32 [places]: zero between launches
    batch,
    rows,
    place,
    places,
    SPLIT: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    GENERATION: tl.constexpr,
):
    """y = the sum of the parts in the sixteens of rows place, place + places, ..., by the last program that has stored its own.

    With a gate those are the rows of both halves. What launches on a stream share is zero again when this one ends; the
    programs of the next one come here after that (`gdc_wait`).
    """
    if arrive(counters + place, GENERATION, "acq_rel") == SPLIT - 1:
        tl.debug_barrier()
        tl.store(counters + place, 0)
        height = rows // 2 if GATE else rows
        mine = ((height + 15) // 16 - place + places - 1) // places * 16
        for begin in range(0, mine * batch, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            line = i // mine
            i -= line * mine
            row = (place + i // 16 * places) * 16 + i % 16
            ok = (row < height) & (line < batch)
            out = _total(parts, line * rows + row, ok, batch * rows, SPLIT, BLOCK)
            if GATE:
                up = _total(parts, line * rows + height + row, ok, batch * rows, SPLIT, BLOCK)
                # Rounded as by a product of its own.
                out = out.to(y.dtype.element_ty).to(tl.float32)
                out = gated(out, up.to(y.dtype.element_ty).to(tl.float32), GATE == 2)
            tl.store(y + line * height + row, out.to(y.dtype.element_ty), mask=ok)


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


def summed(split: int, gelu: bool | None, batch: int, arch: str) -> dict[str, int]:
    """The constants of `add_parts`. gelu: of the gate; None: there is none."""
    return {
        "SPLIT": split,
        "GATE": GATES[gelu],
        # More at once than a program has would be idle; more rows of activations are less of a wait for each.
        "BLOCK": 0 if split == 1 and gelu is None else 256 if batch == 1 else 1024,
        "GENERATION": generation(arch),
    }


def summed_name(split: int, gelu: bool | None, batch: int, out: torch.dtype) -> str:
    """What of these is part of a kernel's name."""
    gate = {None: "", False: "_silu", True: "_gelu"}[gelu]
    return f"_p{split}{pointer_type(out)[1:]}{'' if batch == 1 else 'm'}{gate}"


def room_for_parts(
    y: Tensor, words: Tensor, split: int, batch: int, rows: int, summed: bool
) -> tuple[Tensor, Tensor]:
    """(f32 [split, batch, rows] for the parts, counters) of a launch; where it adds up nothing, what stands for them."""
    if not summed:
        return y, words
    parts = torch.empty(split, batch, rows, dtype=torch.float32, device=y.device)
    return parts, handed_on(y.device, MOST_PLACES, torch.int32, "sums")
