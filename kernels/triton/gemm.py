# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""A few to some hundred rows of activations times a packed matrix, on matrix cores: Y = X W^T.

A program takes `BN` rows of W and `BM` of X. Codes go from their word to pairs of 16-bit numbers in registers (two at a
time: low and high half of a word are neighbouring columns), without a conversion for integers: with the bits of a power of
two around it, a code is that power plus the code. Sums over a group stay exact integers times activations and are scaled as
sums, so that nothing is rounded but the activations and the result; for large batches, where the sums outnumber the
weights, the weights are scaled instead (`SCALE_WEIGHTS`). Where decoding is dear, a program multiplies several tiles of
activations with what it decodes (`WALK`: weight-stationary).

Where the matrix gives too few programs, the columns are split over programs (`SPLIT`) whose float32 sums a second small
kernel adds up: in a fixed order, so results do not change from run to run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.gemm_tile import MOST_BESIDE, tile_for
from nstf.kernels.triton.launching import (
    dies_of,
    even_sizes,
    launch,
    layout_constants,
    layout_name,
    leaf_arguments,
    overlap_options,
    overlaps,
    scale_type,
)
from nstf.kernels.triton.numbers import codes_at, numbers32, pair16, scale_value
from nstf.kernels.triton.packed import FLOAT, INTEGER, LANES, RUN, Layout, Packed
from nstf.kernels.triton.spec import KernelSpec, pointer_type
from nstf.kernels.triton.sums import sum_spec


@triton.jit
def placed(BESIDE: tl.constexpr, DIES: tl.constexpr):
    """This program's tile of W's rows, of X's rows, and part of the columns.

    As launched, neighbours differ in their rows of W. With BESIDE above 1 that many tiles of X run side by side and share
    rows of W; with DIES above 1, too, each die gets a stretch of that order, and not every DIES-th program: the hardware
    deals programs to its dies in turn, and each die has a cache of its own.
    """
    n = tl.program_id(0)
    m = tl.program_id(1)
    part = tl.program_id(2)
    if DIES > 1 or BESIDE > 1:
        tall = tl.num_programs(0)
        wide = tl.num_programs(1)
        at = n + tall * (m + wide * part)
        if DIES > 1:
            # The first `longer` dies have a program more than the others.
            count = tall * wide * tl.num_programs(2)
            longer = count % DIES
            at = at % DIES * (count // DIES) + tl.minimum(at % DIES, longer) + at // DIES
        part = at // (tall * wide)
        at = at % (tall * wide)
        first = at // (BESIDE * tall) * BESIDE
        several = tl.minimum(wide - first, BESIDE)
        at = at - first * tall
        m = first + at % several
        n = at // several
    return n, m, part


@triton.jit
def gemm_product(
    x,  # [batch, cols]
    words,  # i32: all planes
    scale,  # [rows, GROUPS]
    zeros,  # u8 [rows, GROUPS]
    row_scale,  # f32 [rows]
    table,  # f16 [16]
    y,  # [batch, rows], or f32 [SPLIT, batch, rows]
    batch,
    rows,
    cols,
    padded,
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
    PAIRS: tl.constexpr,  # numbers of 16 bits made from pairs of codes, else through float32
    SCALE_WEIGHTS: tl.constexpr,
    SWAP: tl.constexpr,  # W is the left operand: it stays in registers
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,  # multiply in float32: the interpreter has no bfloat16
    AMD: tl.constexpr,
    PDL: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNKS: tl.constexpr,  # of an iteration
    BM: tl.constexpr,
    BN: tl.constexpr,
    LANES: tl.constexpr,
    place,  # of this program among those along the rows
    lines,  # its first row of activations
    across,  # likewise along the columns
    WALK: tl.constexpr = 1,  # tiles of activations that a program multiplies with what it decodes
):
    DTYPE: tl.constexpr = x.dtype.element_ty
    RUN: tl.constexpr = 2 * LANES
    LAST: tl.constexpr = PLANES[len(PLANES) - 1]
    J: tl.constexpr = 16 // LAST  # runs of an iteration: a chunk of the narrowest plane
    SPAN: tl.constexpr = RUN * J
    WHOLE: tl.constexpr = GROUPS == 1
    UNIFORM: tl.constexpr = WHOLE or GROUP % RUN == 0
    STEP: tl.constexpr = 1 if (WHOLE or not UNIFORM) else GROUP // RUN  # runs of a group
    # Sums can wait for the end of a group only where its ends are known at compile time.
    FLUSH: tl.constexpr = J if (WHOLE or STEP % J == 0) else (STEP if J % STEP == 0 else 1)
    LATE: tl.constexpr = UNIFORM and not SCALE_WEIGHTS  # sums are scaled, not weights
    N0: tl.constexpr = 16 // PLANES[0]
    N1: tl.constexpr = 16 // PLANES[1] if len(PLANES) > 1 else 1
    N2: tl.constexpr = 16 // PLANES[2] if len(PLANES) > 2 else 1

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = place * BN + tl.arange(0, BN)
    word = tl.arange(0, LANES)
    run = tl.arange(0, RUN)
    row_ok = row < rows
    # Rows that do not exist read row 0: in bounds, and never stored.
    safe = tl.where(row_ok, row, 0)
    at0 = safe[:, None] * (padded // (RUN * N0) * LANES) + word[None, :]
    at1 = at0
    at2 = at0
    if len(PLANES) > 1:
        at1 = (safe[:, None] * PLANES[1] + rows * SHIFTS[1]) * (padded // 32) + word[None, :]
    if len(PLANES) > 2:
        at2 = (safe[:, None] * PLANES[2] + rows * SHIFTS[2]) * (padded // 32) + word[None, :]
    at_x = ()
    accs = ()
    for i in tl.static_range(WALK):
        col = lines + i * BM + tl.arange(0, BM)
        at_x = at_x + (tl.where(col < batch, col, 0)[:, None] * cols + run[None, :],)
        accs = accs + (tl.zeros([BN, BM] if SWAP else [BM, BN], tl.float32),)
    chunks = padded // SPAN
    each = (chunks + SPLIT - 1) // SPLIT
    first = across * each
    for several in range(first, tl.minimum(first + each, chunks), CHUNKS):
        for one in tl.static_range(CHUNKS):
            chunk = several + one
            parts = ()
            if LATE and not WHOLE:
                for i in tl.static_range(WALK):
                    parts = parts + (tl.zeros_like(accs[i]),)
            for j in tl.static_range(J):
                if j % N0 == 0:
                    w0 = tl.load(words + at0 + (chunk * (J // N0) + j // N0) * LANES)
                    if j == 0:
                        w1 = w0
                        w2 = w0
                if len(PLANES) > 1:
                    if j % N1 == 0:
                        w1 = tl.load(words + at1 + (chunk * (J // N1) + j // N1) * LANES)
                if len(PLANES) > 2:
                    if j % N2 == 0:
                        w2 = tl.load(words + at2 + (chunk * (J // N2) + j // N2) * LANES)
                k = chunk * SPAN + j * RUN
                some = ()
                for i in tl.static_range(WALK):
                    if EVEN:
                        tile = tl.load(x + at_x[i] + k)
                    else:
                        tile = tl.load(x + at_x[i] + k, mask=(run + k < cols)[None, :], other=0.0)
                    some = some + (tile.to(tl.float32) if WIDE else tile,)

                group = k // GROUP
                if not EVEN:
                    group = tl.minimum(group, GROUPS - 1)
                if ZERO >= 0:
                    zero = tl.full([1, 1], ZERO, tl.float32)
                elif UNIFORM:
                    zero = tl.load(zeros + safe * GROUPS + group).to(tl.float32)[:, None]
                else:
                    zero = tl.full([1, 1], 0, tl.float32)
                t = codes_at(w0, w1, w2, j, PLANES, SHIFTS)
                if PAIRS and UNIFORM:
                    numbers = pair16(t, zero, DTYPE, MODE, BITS, EXPONENT, AMD)
                    if not LATE:
                        factor = scale_value(tl.load(scale + safe * GROUPS + group), SCALES)
                        numbers *= factor.to(DTYPE)[:, None]
                else:
                    low = numbers32(t & 0xFFFF, table, zero, MODE, BITS, EXPONENT, BIAS)
                    high = numbers32((t >> 16) & 0xFFFF, table, zero, MODE, BITS, EXPONENT, BIAS)
                    numbers = tl.reshape(tl.join(low, high), [BN, RUN])
                    if not LATE:
                        if UNIFORM:
                            at_scale = tl.broadcast_to((safe * GROUPS + group)[:, None], [BN, RUN])
                        else:
                            within = tl.minimum((run + k) // GROUP, GROUPS - 1)
                            at_scale = safe[:, None] * GROUPS + within[None, :]
                            if ZERO < 0:
                                numbers -= tl.load(zeros + at_scale).to(tl.float32)
                        numbers *= scale_value(tl.load(scale + at_scale), SCALES)
                    if not WIDE:
                        numbers = numbers.to(DTYPE)
                # A second set of sums would not find room in registers for the largest tiles.
                sums = parts if LATE and not WHOLE else accs
                grown = ()
                for i in tl.static_range(WALK):
                    if SWAP:
                        one_sum = tl.dot(numbers, tl.trans(some[i]), sums[i], input_precision="ieee")
                    else:
                        one_sum = tl.dot(some[i], tl.trans(numbers), sums[i], input_precision="ieee")
                    grown = grown + (one_sum,)
                if LATE and not WHOLE:
                    parts = grown
                    if (j + 1) % FLUSH == 0:
                        factor = scale_value(tl.load(scale + safe * GROUPS + group), SCALES)
                        factor = factor[:, None] if SWAP else factor[None, :]
                        scaled = ()
                        parts = ()
                        for i in tl.static_range(WALK):
                            scaled = scaled + (accs[i] + grown[i] * factor,)
                            parts = parts + (tl.zeros_like(grown[i]),)
                        accs = scaled
                else:
                    accs = grown

    factor = tl.full([BN], AFTER, tl.float32)
    if LATE and WHOLE:
        factor *= scale_value(tl.load(scale + safe), SCALES)
    if SCALES == 1:
        factor *= tl.load(row_scale + safe)
    for i in tl.static_range(WALK):
        col = lines + i * BM + tl.arange(0, BM)
        if SWAP:
            acc = tl.trans(accs[i] * factor[:, None])
        else:
            acc = accs[i] * factor[None, :]
        at = (across * batch + col)[:, None] * rows + row[None, :]
        tl.store(y + at, acc.to(y.dtype.element_ty), mask=(col < batch)[:, None] & row_ok[None, :])


@triton.jit(do_not_specialize=["batch"])
def gemm_kernel(
    x, words, scale, zeros, row_scale, table, y, batch, rows, cols, padded,
    PLANES: tl.constexpr, SHIFTS: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, SCALES: tl.constexpr, MODE: tl.constexpr, EXPONENT: tl.constexpr, BIAS: tl.constexpr,
    AFTER: tl.constexpr, PAIRS: tl.constexpr, SCALE_WEIGHTS: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, AMD: tl.constexpr, PDL: tl.constexpr, SPLIT: tl.constexpr, CHUNKS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, LANES: tl.constexpr,
    WALK: tl.constexpr = 1, BESIDE: tl.constexpr = 1, DIES: tl.constexpr = 1,
):  # fmt: skip
    """`gemm_product` by a grid of programs along rows, batch and columns, in the order of `placed`."""
    place, line, across = placed(BESIDE, DIES)
    gemm_product(
        x, words, scale, zeros, row_scale, table, y, batch, rows, cols, padded, PLANES, SHIFTS, BITS, ZERO, GROUP,
        GROUPS, SCALES, MODE, EXPONENT, BIAS, AFTER, PAIRS, SCALE_WEIGHTS, SWAP, EVEN, WIDE, AMD, PDL, SPLIT, CHUNKS,
        BM, BN, LANES, place, line * (WALK * BM), across, WALK,
    )  # fmt: skip


def gemm_specs(
    layout: Layout,
    batch: int,
    dtype: torch.dtype,
    arch: str,
    tile: dict[str, int] | None = None,
    out: torch.dtype | None = None,
) -> list[KernelSpec]:
    """The launches for X [batch, cols]: the product and, when the columns are split, the sum.

    `tile` overrides the choice; `out`: Y's dtype (X's when None).
    """
    out = out or dtype
    chosen = tile_for(layout, batch, dtype, arch) | (tile or {})
    bm, bn, split, walk = chosen["BM"], chosen["BN"], chosen["SPLIT"], chosen["WALK"]
    narrow = min(b for b, _ in layout.planes)
    span = RUN * (16 // narrow)
    chunks = layout.padded // span
    split = min(split, chunks)
    several = chosen["CHUNKS"] if chunks % (split * chosen["CHUNKS"]) == 0 else 1
    uniform = layout.whole or layout.group % RUN == 0
    half = dtype in (torch.float16, torch.bfloat16)
    exact = layout.bits <= (7 if dtype == torch.bfloat16 else 8)
    scaled_first = bool(chosen["SCALE_WEIGHTS"]) and not layout.whole and uniform
    wide = dtype == torch.bfloat16 and triton.knobs.runtime.interpret
    pairs = (
        half
        and not wide
        and uniform
        and ((layout.mode == INTEGER and exact) or (layout.mode == FLOAT and not scaled_first))
    )
    # Floats made in pairs keep the exponent bias of their code.
    after = (
        2.0 ** ((15 if dtype == torch.float16 else 127) - layout.bias)
        if pairs and layout.mode == FLOAT
        else 1.0
    )
    even = layout.cols == layout.padded
    tiles_m = triton.cdiv(batch, bm * walk)
    # What programs can share: rows of W those of several tiles of X, columns of X those of one part of the columns.
    shared = tiles_m > 1 or split > 1
    dies = (chosen["DIES"] or dies_of(arch)) if shared else 1
    beside = min(tiles_m, chosen["BESIDE"] or (MOST_BESIDE if dies > 1 else 1))
    constants = {
        **layout_constants(layout),
        "AFTER": after,
        "PAIRS": pairs,
        "SCALE_WEIGHTS": scaled_first,
        "SWAP": bool(chosen["SWAP"]),
        "EVEN": even,
        "WIDE": wide,
        "AMD": arch.startswith("gfx"),
        "PDL": overlaps(arch),
        "SPLIT": split,
        "CHUNKS": several,
        "BM": bm,
        "BN": bn,
        "LANES": LANES,
        "WALK": walk,
        "BESIDE": beside,
        "DIES": dies,
    }
    name = f"{layout_name(layout)}_{pointer_type(dtype)[1:]}_{layout.groups}x{layout.group}"
    flags = ("e" if even else "") + ("s" if scaled_first else "") + ("l" if chosen["SWAP"] else "")
    flags += (f"a{walk}" if walk > 1 else "") + (f"b{beside}" if beside > 1 else "")
    flags += f"d{dies}" if dies > 1 else ""
    product = KernelSpec(
        name=f"gemm_{name}_{bm}x{bn}x{split}w{chosen['WARPS']}p{chosen['STAGES']}k{several}{flags}"
        + (f"_{pointer_type(out)[1:]}" if out != dtype else ""),
        fn=gemm_kernel,
        signature={
            "x": pointer_type(dtype),
            "words": "*i32",
            "scale": scale_type(layout),
            "zeros": "*u8",
            "row_scale": "*fp32",
            "table": "*fp16",
            "y": "*fp32" if split > 1 else pointer_type(out),
            "batch": "i32",
            "rows": "i32",
            "cols": "i32",
            "padded": "i32",
        },
        constants=constants,
        divisible=("x", "words", "scale", "zeros", "row_scale", "table", "y", *even_sizes(layout)),
        num_warps=chosen["WARPS"],
        num_stages=chosen["STAGES"],
        options=overlap_options(arch),
        batch=batch,
        kind="gemm",
        grid=(triton.cdiv(layout.rows, bn), tiles_m, split),
    )
    return [product] if split == 1 else [product, sum_spec(batch * layout.rows, split, out, arch)]


def gemm(x: Tensor, packed: Packed, specs: list[KernelSpec], out: torch.dtype | None = None) -> Tensor:
    """x [batch, cols] -> y [batch, rows] of `out` (x's dtype when None), as the specs were made for."""
    layout, batch = packed.layout, len(x)
    y = torch.empty(batch, layout.rows, dtype=out or x.dtype, device=x.device)
    parts = y
    if len(specs) > 1:
        parts = torch.empty(specs[0].constants["SPLIT"], *y.shape, dtype=torch.float32, device=x.device)
    launch(
        specs[0],
        x,
        *leaf_arguments(packed),
        parts,
        batch,
        layout.rows,
        layout.cols,
        layout.padded,
    )
    if len(specs) > 1:
        launch(specs[1], parts, y, y.numel())
    return y
