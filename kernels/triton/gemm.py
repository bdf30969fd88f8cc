# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""A few to some hundred rows of activations times a packed matrix, on matrix cores: Y = X W^T.

A program takes `BN` rows of W and `BM` of X. Codes go from their word to pairs of 16-bit numbers in registers (two at a
time: low and high half of a word are neighbouring columns), without a conversion for integers: with the bits of a power of
two around it, a code is that power plus the code. Sums over a group stay exact integers times activations and are scaled as
sums, so that nothing is rounded but the activations and the result; for large batches, where the sums outnumber the
weights, the weights are scaled instead (`SCALE_WEIGHTS`).

Where the matrix gives too few programs, the columns are split over programs (`SPLIT`) whose float32 sums a second small
kernel adds up: in a fixed order, so results do not change from run to run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.gemv import (
    even_sizes,
    launch,
    layout_name,
    leaf_arguments,
    overlap_options,
    overlaps,
    processors_of,
    scale_type,
    scale_value,
    sum_spec,
)
from nstf.kernels.triton.packed import FLOAT, INTEGER, LANES, RUN, TABLE, Layout, Packed
from nstf.kernels.triton.spec import KernelSpec, pointer_type

# The widest tile of activations, beyond which the batch is split over programs.
WIDEST = 128


@triton.jit
def codes_at(w0, w1, w2, J: tl.constexpr, PLANES: tl.constexpr, SHIFTS: tl.constexpr):
    """The two codes of run J in each word: one in either half of an int32. J counts from the chunk of each plane."""
    N0: tl.constexpr = 16 // PLANES[0]
    M0: tl.constexpr = ((1 << PLANES[0]) - 1) * 0x00010001
    t = (w0 >> ((J % N0) * PLANES[0])) & M0
    if len(PLANES) > 1:
        N1: tl.constexpr = 16 // PLANES[1]
        M1: tl.constexpr = ((1 << PLANES[1]) - 1) * 0x00010001
        t |= ((w1 >> ((J % N1) * PLANES[1])) & M1) << SHIFTS[1]
    if len(PLANES) > 2:
        N2: tl.constexpr = 16 // PLANES[2]
        M2: tl.constexpr = ((1 << PLANES[2]) - 1) * 0x00010001
        t |= ((w2 >> ((J % N2) * PLANES[2])) & M2) << SHIFTS[2]
    return t


@triton.jit
def numbers32(
    code, table, zero, MODE: tl.constexpr, BITS: tl.constexpr, EXPONENT: tl.constexpr, BIAS: tl.constexpr
):
    """Codes as the float32 they stand for, without their scale."""
    if MODE == 0:
        # Bits of 2^23 around a small integer: no conversion instruction, and exact.
        return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)
    elif MODE == 1:
        LOW: tl.constexpr = 23 - (BITS - 1 - EXPONENT)
        sign = code >> (BITS - 1)
        rest = (code & ((1 << (BITS - 1)) - 1)) << LOW
        return ((sign << 31) | rest).to(tl.float32, bitcast=True) * (2.0 ** (127 - BIAS))
    else:
        return tl.load(table + code).to(tl.float32)


@triton.jit
def _pair16(
    t,
    zero,
    DTYPE: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    EXPONENT: tl.constexpr,
    AMD: tl.constexpr,
):
    """[BN, LANES] pairs of codes -> [BN, 2 LANES] numbers of 16 bits; floats times a power of two (`after_of`)."""
    if AMD and MODE == 0 and DTYPE == tl.bfloat16:
        # No vector ALU of theirs subtracts bfloat16. In float32, whose upper half small integers do not exceed.
        low = ((t & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)
        high = ((t >> 16) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)
        low = (low.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        high = (high.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        return tl.reshape(tl.join(low, high), [t.shape[0], 2 * t.shape[1]])
    MANTISSA: tl.constexpr = 10 if DTYPE == tl.float16 else 7
    if MODE == 0:
        # Constants, not an argument: only then does Triton move the change of layout from the numbers to the words.
        if DTYPE == tl.float16:
            t = t | 0x64006400  # 1024 + code
        else:
            t = t | 0x43004300  # 128 + code
    else:
        REST: tl.constexpr = ((1 << (BITS - 1)) - 1) * 0x00010001
        SIGN: tl.constexpr = (1 << (BITS - 1)) * 0x00010001
        LOW: tl.constexpr = MANTISSA - (BITS - 1 - EXPONENT)
        t = ((t & SIGN) << (16 - BITS)) | ((t & REST) << LOW)
    low = t.to(tl.int16).to(DTYPE, bitcast=True)
    high = (t >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    pairs = tl.reshape(tl.join(low, high), [t.shape[0], 2 * t.shape[1]])
    if MODE == 0:
        pairs -= ((1 << MANTISSA) + zero).to(DTYPE)
    return pairs


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
    col = lines + tl.arange(0, BM)
    word = tl.arange(0, LANES)
    run = tl.arange(0, RUN)
    row_ok = row < rows
    batch_ok = col < batch
    # Rows that do not exist read row 0: in bounds, and never stored.
    safe = tl.where(row_ok, row, 0)
    at0 = safe[:, None] * (padded // (RUN * N0) * LANES) + word[None, :]
    at1 = at0
    at2 = at0
    if len(PLANES) > 1:
        at1 = (safe[:, None] * PLANES[1] + rows * SHIFTS[1]) * (padded // 32) + word[None, :]
    if len(PLANES) > 2:
        at2 = (safe[:, None] * PLANES[2] + rows * SHIFTS[2]) * (padded // 32) + word[None, :]
    at_x = tl.where(batch_ok, col, 0)[:, None] * cols + run[None, :]

    if SWAP:
        acc = tl.zeros([BN, BM], tl.float32)
    else:
        acc = tl.zeros([BM, BN], tl.float32)
    chunks = padded // SPAN
    each = (chunks + SPLIT - 1) // SPLIT
    first = across * each
    for several in range(first, tl.minimum(first + each, chunks), CHUNKS):
        for one in tl.static_range(CHUNKS):
            chunk = several + one
            if LATE and not WHOLE:
                part = tl.zeros_like(acc)
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
                if EVEN:
                    some = tl.load(x + at_x + k)
                else:
                    some = tl.load(x + at_x + k, mask=(run + k < cols)[None, :], other=0.0)

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
                    numbers = _pair16(t, zero, DTYPE, MODE, BITS, EXPONENT, AMD)
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
                if WIDE:
                    some = some.to(tl.float32)
                if LATE and not WHOLE:
                    if SWAP:
                        part = tl.dot(numbers, tl.trans(some), part, input_precision="ieee")
                    else:
                        part = tl.dot(some, tl.trans(numbers), part, input_precision="ieee")
                    if (j + 1) % FLUSH == 0:
                        factor = scale_value(tl.load(scale + safe * GROUPS + group), SCALES)
                        if SWAP:
                            acc += part * factor[:, None]
                        else:
                            acc += part * factor[None, :]
                        part = tl.zeros_like(part)
                else:
                    # A second set of sums would not find room in registers for the largest tiles.
                    if SWAP:
                        acc = tl.dot(numbers, tl.trans(some), acc, input_precision="ieee")
                    else:
                        acc = tl.dot(some, tl.trans(numbers), acc, input_precision="ieee")

    factor = tl.full([BN], AFTER, tl.float32)
    if LATE and WHOLE:
        factor *= scale_value(tl.load(scale + safe), SCALES)
    if SCALES == 1:
        factor *= tl.load(row_scale + safe)
    if SWAP:
        acc = tl.trans(acc * factor[:, None])
    else:
        acc = acc * factor[None, :]
    at = (across * batch + col)[:, None] * rows + row[None, :]
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=batch_ok[:, None] & row_ok[None, :])


@triton.jit(do_not_specialize=["batch"])
def gemm_kernel(
    x, words, scale, zeros, row_scale, table, y, batch, rows, cols, padded,
    PLANES: tl.constexpr, SHIFTS: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, SCALES: tl.constexpr, MODE: tl.constexpr, EXPONENT: tl.constexpr, BIAS: tl.constexpr,
    AFTER: tl.constexpr, PAIRS: tl.constexpr, SCALE_WEIGHTS: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, AMD: tl.constexpr, PDL: tl.constexpr, SPLIT: tl.constexpr, CHUNKS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """`gemm_product` by a grid of programs along rows, batch and columns."""
    gemm_product(
        x, words, scale, zeros, row_scale, table, y, batch, rows, cols, padded, PLANES, SHIFTS, BITS, ZERO, GROUP,
        GROUPS, SCALES, MODE, EXPONENT, BIAS, AFTER, PAIRS, SCALE_WEIGHTS, SWAP, EVEN, WIDE, AMD, PDL, SPLIT, CHUNKS,
        BM, BN, LANES, tl.program_id(0), tl.program_id(1) * BM, tl.program_id(2),
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
    chosen = _tile(layout, batch, dtype, arch) | (tile or {})
    bm, bn, split = chosen["BM"], chosen["BN"], chosen["SPLIT"]
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
    constants = {
        "PLANES": tuple(b for b, _ in layout.planes),
        "SHIFTS": tuple(s for _, s in layout.planes),
        "BITS": layout.bits,
        "ZERO": layout.zero,
        "GROUP": layout.group,
        "GROUPS": layout.groups,
        "SCALES": layout.scales,
        "MODE": layout.mode,
        "EXPONENT": layout.exponent,
        "BIAS": layout.bias,
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
    }
    name = f"{layout_name(layout)}_{pointer_type(dtype)[1:]}_{layout.groups}x{layout.group}"
    flags = ("e" if even else "") + ("s" if scaled_first else "") + ("l" if chosen["SWAP"] else "")
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
        grid=(triton.cdiv(layout.rows, bn), triton.cdiv(batch, bm), split),
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


def _tile(layout: Layout, batch: int, dtype: torch.dtype, arch: str) -> dict[str, int]:
    """Tile sizes, warps and stages for a batch."""
    amd = not arch.startswith("sm_")
    span = RUN * (16 // min(b for b, _ in layout.planes))
    bm = max(16, min(WIDEST, triton.next_power_of_2(batch)))
    # RDNA's registers hold no wider tile: 128 columns on four waves spilled hundreds of them.
    rdna = arch.startswith("gfx1")
    bn = 64 if bm <= 16 or (rdna and bm >= 64) else 128

    def stage_bytes() -> int:
        return int(bm * span * dtype.itemsize + bn * span * layout.bits // 8)

    # The shared memory of a program: 64 KiB on CDNA and RDNA, 227 KiB on Hopper, where two stages at least should fit.
    while stage_bytes() > (60_000 if amd else 100_000) and bm > 16:
        bm //= 2
    while stage_bytes() > (60_000 if amd else 100_000) and bn > 32:
        bn //= 2
    programs = triton.cdiv(layout.rows, bn) * triton.cdiv(batch, bm)
    processors, split = processors_of(arch), 1
    if bm <= 32:
        # Some five small programs for each multiprocessor.
        while programs * split < processors * (5 if bm == 16 else 1.5) and split < 8:
            split *= 2
    else:
        # As many as run at once: two on a multiprocessor, one of the largest.
        split = max(1, min(8, processors * (2 if bm == 64 else 1) // programs))
    stages = max(2, min(3 if bm <= 16 else 4, int(220_000 / stage_bytes() + 0.4)))
    if amd:
        # Look-ups keep more in registers.
        stages = 1 if rdna and bm >= 128 and layout.mode == TABLE else 2
    return {
        "BM": bm,
        "BN": bn,
        "SPLIT": split,
        "WARPS": 8 if bm >= 128 and (rdna or not amd) else 4,
        "STAGES": stages,
        "SWAP": 1,
        "CHUNKS": 1,
        "SCALE_WEIGHTS": 0,
    }
