# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""Shuffle codes to dense rows, on any GPU."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.formats import shuffle
from nstf.kernels.triton.launching import launch, multiples
from nstf.kernels.triton.shuffle import Prepared
from nstf.kernels.triton.spec import KernelSpec, pointer_type, remembered


@triton.jit(do_not_specialize=["first", "count"], do_not_specialize_on_alignment=["ids"])
def shuffle_decode_kernel(
    ids,  # i64 [count]
    words,  # u32 [groups, chunks, 2 q, 8]
    scale,  # f32 [rows]: what a level is worth
    table,  # u8 [phases, 2, 16]
    y,  # [count, cols]
    first,
    count,
    rows,
    cols,
    Q: tl.constexpr,
    PHASES: tl.constexpr,
    INDEXED: tl.constexpr,
    BN: tl.constexpr,
    LANES: tl.constexpr,
):
    """Rows of W: y[i] = W[ids[i]], or W[first + i]. Ids out of range give rows of NaN."""
    at = (tl.program_id(0) * BN + tl.arange(0, BN))[:, None]
    unit = (tl.program_id(1) * LANES + tl.arange(0, LANES))[None, :]
    chunks = (cols + 63) // 64
    wanted = at < count
    if INDEXED:
        row = tl.load(ids + at, mask=wanted, other=0).to(tl.int32)
    else:
        row = first + at
    known = (row >= 0) & (row < rows)
    row = tl.where(known & wanted, row, 0)
    factor = tl.where(known, tl.load(scale + row), float("nan"))
    group = row // 32
    r = row % 32
    end = ((r + 1) * Q + 15) // 16 - 1
    second = (r > 0) & ((r * Q + 15) // 16 - 1 == end)
    inside = wanted & (unit < chunks * 8)
    symbols = ()
    for back in tl.static_range(3):
        t = end - back
        previous = (t < 0).to(tl.int32)
        g = group - previous
        place = ((g * chunks + unit // 8) * (2 * Q) + t + previous * (2 * Q)) * 8 + unit % 8
        there = inside & ((t >= 0) | (group % 8 != 0))
        symbols = symbols + (tl.load(words + place, mask=there, other=0),)
    a, b, c = symbols
    one = tl.where(second, a ^ b, a ^ c)
    other = tl.where(second, a ^ c, b)
    entries = table + (r % PHASES) * 32
    values = ()
    for j in tl.static_range(8):
        level = tl.load(entries + ((one >> (4 * j)) & 15)).to(tl.float32)
        level += tl.load(entries + 16 + ((other >> (4 * j)) & 15)).to(tl.float32)
        values = values + ((level - 31.5) * factor,)
    # Side by side: the first pairs differ in the highest bit of the column.
    for level in tl.static_range(3):
        joined = ()
        for j in tl.static_range(4 >> level):
            joined = joined + (tl.join(values[j], values[j + (4 >> level)]),)
        values = joined
    k = (tl.program_id(1) * LANES * 8 + tl.arange(0, LANES * 8))[None, :]
    out = tl.reshape(values[0], [BN, LANES * 8])
    tl.store(y + at.to(tl.int64) * cols + k, out.to(y.dtype.element_ty), mask=wanted & (k < cols))


def shuffle_rows(prepared: Prepared, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
    """decode(W)[rows] as `dtype`, [n, cols]. rows: a slice with start and stop, or int64 [n] on the device."""
    indexed = isinstance(rows, Tensor)
    first, count = (0, len(rows)) if isinstance(rows, Tensor) else (rows.start, rows.stop - rows.start)
    y = torch.empty(count, prepared.cols, dtype=dtype, device=prepared.scales.device)
    if count:
        spec = shuffle_decode_spec(prepared.params, prepared.rows, prepared.cols, count, dtype, indexed)
        ids = rows.contiguous() if isinstance(rows, Tensor) else prepared.words.view(torch.int64)
        arguments = (prepared.words.view(torch.uint32), prepared.scales, prepared.table, y)
        launch(spec, ids, *arguments, first, count, prepared.rows, prepared.cols)
    return y


@remembered
def shuffle_decode_spec(
    params: shuffle.Params, rows: int, cols: int, count: int, dtype: torch.dtype, indexed: bool
) -> KernelSpec:
    """The launch that decodes `count` rows."""
    q = params.quarter_bits
    phases = 16 // math.gcd(q, 16)
    bn = min(32, triton.next_power_of_2(count))
    units = -(-cols // shuffle.CHUNK) * 8
    sizes = {"rows": rows, "cols": cols}
    what = "embed" if indexed else "decode"
    return KernelSpec(
        name=f"shuffle{q}_{what}_{pointer_type(dtype)[1:]}_{bn}",
        fn=shuffle_decode_kernel,
        signature={
            "ids": "*i64",
            "words": "*u32",
            "scale": "*fp32",
            "table": "*u8",
            "y": pointer_type(dtype),
            "first": "i32",
            "count": "i32",
            **dict.fromkeys(sizes, "i32"),
        },
        constants={"Q": q, "PHASES": phases, "INDEXED": indexed, "BN": bn, "LANES": 16},
        divisible=("words", "scale", "table", "y", *multiples(sizes)),
        num_warps=4,
        num_stages=1,
        batch=count,
        kind=f"shuffle_{what}",
        grid=(triton.cdiv(count, bn), triton.cdiv(units, 16), 1),
    )
