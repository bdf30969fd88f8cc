# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Dense rows from a packed matrix: embedding look-ups, and blocks of weights for products of thousands of rows.

A prompt's product is bound by arithmetic: a library's dense kernel on decoded blocks of rows loses less to the decoding
than a kernel that unpacks the codes once per tile of the batch.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.launching import (
    even_sizes,
    launch,
    layout_constants,
    layout_name,
    leaf_arguments,
    scale_type,
)
from nstf.kernels.triton.numbers import codes_at, numbers32, scale_value
from nstf.kernels.triton.packed import LANES, Layout, Packed
from nstf.kernels.triton.spec import KernelSpec, pointer_type

_ROWS = 64


@triton.jit(do_not_specialize=["first", "count"], do_not_specialize_on_alignment=["ids"])
def decode_kernel(
    ids,  # i64 [count]: the rows wanted
    words,
    scale,
    zeros,
    row_scale,
    table,
    y,  # [count, cols]
    first,  # without ids: the first row wanted
    count,
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
    INDEXED: tl.constexpr,
    BN: tl.constexpr,
    LANES: tl.constexpr,
):
    """A program decodes one chunk (of the narrowest plane) of BN rows. Ids out of range give rows of NaN."""
    RUN: tl.constexpr = 2 * LANES
    J: tl.constexpr = 16 // PLANES[len(PLANES) - 1]
    N0: tl.constexpr = 16 // PLANES[0]
    N1: tl.constexpr = 16 // PLANES[1] if len(PLANES) > 1 else 1
    N2: tl.constexpr = 16 // PLANES[2] if len(PLANES) > 2 else 1
    at = tl.program_id(1) * BN + tl.arange(0, BN)
    wanted = at < count
    if INDEXED:
        row = tl.load(ids + at, mask=wanted, other=0).to(tl.int32)
    else:
        row = first + at
    known = (row >= 0) & (row < rows)
    row = tl.where(known & wanted, row, 0)
    word = tl.arange(0, LANES)
    run = tl.arange(0, RUN)
    line = padded // 32
    at0 = row[:, None] * (padded // (RUN * N0) * LANES) + word[None, :]
    chunk = tl.program_id(0)
    factor = tl.where(known, 1.0, float("nan"))
    if SCALES == 1:
        factor *= tl.load(row_scale + row)
    for j in tl.static_range(J):
        if j % N0 == 0:
            w0 = tl.load(words + at0 + (chunk * (J // N0) + j // N0) * LANES)
            if j == 0:
                w1 = w0
                w2 = w0
        if len(PLANES) > 1:
            if j % N1 == 0:
                at1 = (row[:, None] * PLANES[1] + rows * SHIFTS[1]) * line + word[None, :]
                w1 = tl.load(words + at1 + (chunk * (J // N1) + j // N1) * LANES)
        if len(PLANES) > 2:
            if j % N2 == 0:
                at2 = (row[:, None] * PLANES[2] + rows * SHIFTS[2]) * line + word[None, :]
                w2 = tl.load(words + at2 + (chunk * (J // N2) + j // N2) * LANES)
        t = codes_at(w0, w1, w2, j, PLANES, SHIFTS)
        zero = 0.0
        if ZERO > 0:
            zero += ZERO
        low = numbers32(t & 0xFFFF, table, zero, MODE, BITS, EXPONENT, BIAS)
        high = numbers32((t >> 16) & 0xFFFF, table, zero, MODE, BITS, EXPONENT, BIAS)
        numbers = tl.reshape(tl.join(low, high), [BN, RUN])
        k = (chunk * J + j) * RUN + run
        at_scale = row[:, None] * GROUPS + tl.minimum(k // GROUP, GROUPS - 1)[None, :]
        if ZERO < 0:
            numbers -= tl.load(zeros + at_scale).to(tl.float32)
        numbers *= scale_value(tl.load(scale + at_scale), SCALES) * factor[:, None]
        out = y + at.to(tl.int64)[:, None] * cols + k[None, :]
        tl.store(out, numbers.to(y.dtype.element_ty), mask=wanted[:, None] & (k < cols)[None, :])


@lru_cache(maxsize=1024)
def decode_spec(layout: Layout, count: int, dtype: torch.dtype, indexed: bool) -> KernelSpec:
    """The launch that decodes `count` rows."""
    span = 2 * LANES * (16 // min(b for b, _ in layout.planes))
    rows = min(_ROWS, triton.next_power_of_2(count))
    constants = {
        **layout_constants(layout),
        "INDEXED": indexed,
        "BN": rows,
        "LANES": LANES,
    }
    integers = {"rows": layout.rows, "cols": layout.cols, "padded": layout.padded}
    name = f"{layout_name(layout)}_{pointer_type(dtype)[1:]}_{layout.groups}x{layout.group}_{rows}"
    return KernelSpec(
        name=f"{'embed' if indexed else 'decode'}_{name}",
        fn=decode_kernel,
        signature={
            "ids": "*i64",
            "words": "*i32",
            "scale": scale_type(layout),
            "zeros": "*u8",
            "row_scale": "*fp32",
            "table": "*fp16",
            "y": pointer_type(dtype),
            "first": "i32",
            "count": "i32",
            **dict.fromkeys(integers, "i32"),
        },
        constants=constants,
        divisible=("words", "scale", "zeros", "row_scale", "table", "y", *even_sizes(layout)),
        num_warps=4,
        num_stages=1,
        batch=count,
        kind="embed" if indexed else "decode",
        grid=(layout.padded // span, triton.cdiv(count, rows), 1),
    )


def decode_rows(packed: Packed, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
    """decode(W)[rows] as `dtype`, [n, cols]. rows: a slice with start and stop, or int64 [n] on the device.

    Makes no round trip to the host: an index out of range gives a row of NaN.
    """
    layout = packed.layout
    indexed = isinstance(rows, Tensor)
    first, count = (0, len(rows)) if isinstance(rows, Tensor) else (rows.start, rows.stop - rows.start)
    y = torch.empty(count, layout.cols, dtype=dtype, device=packed.words.device)
    if count:
        spec = decode_spec(layout, count, dtype, indexed)
        ids = rows.contiguous() if isinstance(rows, Tensor) else packed.words.view(torch.int64)
        arguments = (*leaf_arguments(packed), y, first, count, layout.rows, layout.cols, layout.padded)
        launch(spec, ids, *arguments)
    return y
