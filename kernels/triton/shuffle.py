# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""Shuffle codes times one or two rows of activations, and shuffle codes to dense rows, on a GPU.

A 32-bit word is a step of the paths of eight columns. A thread takes such columns down a group of 32 rows: the
symbols of a step, exclusive or those two steps before, look up both tables for four columns at once, since the
entries of a table are four words of bytes, and NVIDIA (prmt) and AMD (v_perm) have an instruction that picks bytes of
two words by four selectors. The levels stay bytes, and are multiplied as such with activations of seven bits and, but
for bfloat16, seven more, eight columns under one scale.

The kernels read the stored order as it is.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.formats import shuffle
from nstf.kernels.formats.scales import matrix_shape
from nstf.kernels.formats.tree import EncodedTensor
from nstf.kernels.memo import per_encoded
from nstf.kernels.triton.launching import (
    lanes_of,
    launch,
    multiples,
    overlap_options,
    overlaps,
    processors_of,
)
from nstf.kernels.triton.spec import KernelSpec, pointer_type
from nstf.kernels.triton.sums import sum_spec
from nstf.kernels.triton.trellis import hardware_of


@triton.jit
def _picked(high, low, selectors):
    """AMD: of the eight bytes of two words those that the selectors name."""
    return tl.inline_asm_elementwise(
        "v_perm_b32 $0, $1, $2, $3", "=v,v,v,v", [high, low, selectors], tl.uint32, True, 1
    )


@triton.jit
def _halves(w, HARDWARE: tl.constexpr):
    """The eight symbols of a word as look-ups take them, four and four: on NVIDIA the lower 16 bits and the others,
    elsewhere bytes, the even columns and the odd ones."""
    if HARDWARE == 1:
        return w, w >> 16
    return w & 0x0F0F0F0F, (w >> 4) & 0x0F0F0F0F


@triton.jit
def _looked_up(symbols, table, t0, t1, t2, t3, AT: tl.constexpr, HARDWARE: tl.constexpr):
    """The entries at four symbols, a byte each. t0..t3: the 16 entries, which lie at 4 AT of `table`."""
    if HARDWARE == 1:
        # A symbol's highest bit asks for the sign of an entry of the other half. Entries are below 128, so that is 0.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 x, p, t;
            xor.b32 x, $1, 0x8888;
            prmt.b32 p, $2, $3, $1;
            prmt.b32 t, $4, $5, x;
            add.u32 $0, p, t;
            }""",
            "=r,r,r,r,r,r",
            [symbols, t0, t1, t2, t3],
            tl.uint32,
            True,
            1,
        )
    if HARDWARE == 0:
        out = tl.zeros_like(symbols)
        for i in tl.static_range(4):
            out |= tl.load(table + 4 * AT + ((symbols >> (8 * i)) & 15)).to(tl.uint32) << (8 * i)
        return out
    place = symbols & 0x07070707
    low = _picked(t1, t0, place)
    high = _picked(t3, t2, place)
    # Of no bytes at all: 12 gives 0 and 13 gives 255.
    upper = tl.inline_asm_elementwise(
        "v_perm_b32 $0, 0, 0, $1", "=v,v", [((symbols >> 3) & 0x01010101) | 0x0C0C0C0C], tl.uint32, True, 1
    )
    return (high & upper) | (low & (upper ^ 0xFFFFFFFF))


@triton.jit
def _dot(levels, digits, onto, HARDWARE: tl.constexpr):
    """onto + the products of four levels and four signed digits."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [levels, digits, onto], tl.int32, True, 1
        )
    if HARDWARE == 2:
        return tl.inline_asm_elementwise(
            "v_dot4_i32_i8 $0, $1, $2, $3", "=v,v,v,v", [levels, digits, onto], tl.int32, True, 1
        )
    if HARDWARE == 3:
        return tl.inline_asm_elementwise(
            "v_dot4_i32_iu8 $0, $1, $2, $3 neg_lo:[1,1,0]",
            "=v,v,v,v",
            [levels, digits, onto],
            tl.int32,
            True,
            1,
        )
    for i in tl.static_range(4):
        digit = (digits << (24 - 8 * i)) >> 24
        onto += ((levels >> (8 * i)) & 0xFF).to(tl.int32) * digit
    return onto


@triton.jit
def _first_dot(levels, digits, HARDWARE: tl.constexpr):
    """The sum of the products of four levels and four signed digits."""
    if HARDWARE == 2:
        return tl.inline_asm_elementwise(
            "v_dot4_i32_i8 $0, $1, $2, 0", "=v,v,v", [levels, digits], tl.int32, True, 1
        )
    if HARDWARE == 3:
        return tl.inline_asm_elementwise(
            "v_dot4_i32_iu8 $0, $1, $2, 0 neg_lo:[1,1,0]", "=v,v,v", [levels, digits], tl.int32, True, 1
        )
    return _dot(levels, digits, tl.zeros_like(digits), HARDWARE)


@triton.jit
def _packed(q0, q1, q2, q3):
    return (q0 & 255) | ((q1 & 255) << 8) | ((q2 & 255) << 16) | (q3 << 24)


@triton.jit
def _nearest(v):
    """The nearest integer, of numbers up to 2^22."""
    return (v + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _row(
    one0,
    one1,
    other0,
    other1,
    table,
    zero,
    entries,
    digits,
    scales,
    total,
    R: tl.constexpr,
    PHASES: tl.constexpr,
    KEPT: tl.constexpr,
    HARDWARE: tl.constexpr,
    DIGITS: tl.constexpr,
    B: tl.constexpr,
):
    """The totals of row R with the products of the levels at these symbols of both tables added."""
    AT: tl.constexpr = (R % PHASES) * 8
    # Tables of many phases do not fit the registers.
    own = entries if KEPT else _entries(table, zero, AT, 8)
    E: tl.constexpr = AT if KEPT else 0
    levels0 = _looked_up(one0, table, own[E], own[E + 1], own[E + 2], own[E + 3], AT, HARDWARE)
    levels1 = _looked_up(one1, table, own[E], own[E + 1], own[E + 2], own[E + 3], AT, HARDWARE)
    levels0 += _looked_up(other0, table, own[E + 4], own[E + 5], own[E + 6], own[E + 7], AT + 4, HARDWARE)
    levels1 += _looked_up(other1, table, own[E + 4], own[E + 5], own[E + 6], own[E + 7], AT + 4, HARDWARE)
    grown = ()
    for line in tl.static_range(B):
        dot = _first_dot(levels0, digits[2 * DIGITS * line], HARDWARE)
        dot = _dot(levels1, digits[2 * DIGITS * line + 1], dot, HARDWARE)
        if DIGITS == 2:
            dot = _dot(levels0, digits[2 * DIGITS * line + 2], dot * 254, HARDWARE)
            dot = _dot(levels1, digits[2 * DIGITS * line + 3], dot, HARDWARE)
        grown = grown + (total[R * B + line] + dot.to(tl.float32) * scales[line],)
    return grown


@triton.jit
def _entries(table, zero, AT: tl.constexpr, COUNT: tl.constexpr):
    """Words of the tables, four entries each, in every thread: constants and uniform registers are moved at every use."""
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (tl.load(table.to(tl.pointer_type(tl.uint32)) + AT + i + zero),)
    return found


@triton.jit
def shuffle_digits_kernel(
    x,  # [batch, cols]
    digits,  # i32 [batch, 2 * DIGITS, units]: four columns a word
    scales,  # f32 [batch, 2, units]: what a digit is worth, and the sum of the eight activations
    cols,
    units,
    HARDWARE: tl.constexpr,
    DIGITS: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Eight activations under one scale as signed digits, in the order in which look-ups give eight levels."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    line = tl.program_id(1)
    unit = tl.program_id(0) * LANES + tl.arange(0, LANES)
    v = ()
    most = tl.zeros([LANES], tl.float32)
    for j in tl.static_range(8):
        k = unit * 8 + j
        some = tl.load(x + line * cols + k, mask=k < cols, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(some), propagate_nan=tl.PropagateNan.ALL)
        v = v + (some,)
    inverse = 127.0 / tl.maximum(most, 1e-30, propagate_nan=tl.PropagateNan.ALL)
    q = ()
    rest = ()
    total = tl.zeros([LANES], tl.int32)
    for j in tl.static_range(8):
        scaled = v[j] * inverse
        digit = _nearest(scaled)
        fine = digit
        if DIGITS == 2:
            fine = _nearest((scaled - digit.to(tl.float32)) * 254.0)
            total += digit * 254 + fine
        else:
            total += digit
        q = q + (digit,)
        rest = rest + (fine,)
    one = most * (1.0 / 127.0 if DIGITS == 1 else 1.0 / 127.0 / 254.0)
    ok = unit < units
    at = digits + line * 2 * DIGITS * units + unit
    for kind in tl.static_range(DIGITS):
        d = q if kind == 0 else rest
        if HARDWARE == 1:
            tl.store(at + (2 * kind) * units, _packed(d[0], d[1], d[2], d[3]), mask=ok)
            tl.store(at + (2 * kind + 1) * units, _packed(d[4], d[5], d[6], d[7]), mask=ok)
        else:
            tl.store(at + (2 * kind) * units, _packed(d[0], d[2], d[4], d[6]), mask=ok)
            tl.store(at + (2 * kind + 1) * units, _packed(d[1], d[3], d[5], d[7]), mask=ok)
    tl.store(scales + line * 2 * units + unit, one, mask=ok)
    tl.store(scales + (line * 2 + 1) * units + unit, total.to(tl.float32) * one, mask=ok)


@triton.jit(do_not_specialize=["batch"])
def shuffle_gemv_kernel(
    digits,  # i32 [batch, 2 * DIGITS, units]
    parts,  # f32 [batch, 2, units]: scales and sums of eight activations
    words,  # u32 [groups, chunks, 2 q, 8]
    scale,  # f32 [rows]: what a level is worth
    table,  # u8 [phases, 2, 16]
    y,  # [batch, rows], or f32 [programs along the columns, batch, rows]
    rows,
    cols,
    batch,
    Q: tl.constexpr,
    FIRST: tl.constexpr,  # row of 32 that ends at each symbol
    COUNT: tl.constexpr,  # rows that do
    PHASES: tl.constexpr,
    HARDWARE: tl.constexpr,
    DIGITS: tl.constexpr,
    B: tl.constexpr,
    LANES: tl.constexpr,  # threads along the columns, eight of them each
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program multiplies a group of rows with every SPLIT-th block of columns."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    KEPT: tl.constexpr = PHASES <= 4
    group = tl.program_id(0)
    lane = tl.arange(0, LANES)
    chunks = (cols + 63) // 64
    units = chunks * 8
    zero = (lane > cols + 4096).to(tl.int32)  # in every thread, which the compiler does not know
    entries = _entries(table, zero, 0, 8 * PHASES if KEPT else 8)
    goes_on = (group % 8 != 0) & (lane >= 0)
    total = ()
    for _ in tl.static_range(32 * B):
        total = total + (tl.zeros([LANES], tl.float32),)
    lost = ()
    for _ in tl.static_range(B):
        lost = lost + (tl.zeros([LANES], tl.float32),)
    for start in range(tl.program_id(1) * LANES, units, SPLIT * LANES):
        unit = start + lane
        there = unit < units
        found = ()
        scales = ()
        sums = ()
        for line in tl.static_range(B):
            ok = there & (line < batch)
            for i in tl.static_range(2 * DIGITS):
                found = found + (tl.load(digits + (line * 2 * DIGITS + i) * units + unit, mask=ok, other=0),)
            scales = scales + (tl.load(parts + line * 2 * units + unit, mask=ok, other=0.0),)
            sums = sums + (lost[line] + tl.load(parts + (line * 2 + 1) * units + unit, mask=ok, other=0.0),)
        lost = sums
        # The symbols of the group, and the two before.
        # Without a mask: beyond the last column digits are 0.
        unit = tl.minimum(unit, units - 1)
        at = words + ((group * chunks + unit // 8) * (2 * Q)) * 8 + unit % 8
        before = at - (chunks * (2 * Q) - (2 * Q - 2)) * 8
        c0, c1 = _halves(tl.load(before, mask=goes_on, other=0), HARDWARE)
        b0, b1 = _halves(tl.load(before + 8, mask=goes_on, other=0), HARDWARE)
        grown = ()
        for t in tl.static_range(2 * Q):
            a0, a1 = _halves(tl.load(at + t * 8), HARDWARE)
            u0 = a0 ^ c0
            u1 = a1 ^ c1
            if COUNT[t] > 0:
                grown = grown + _row(
                    u0, u1, b0, b1, table, zero, entries, found, scales, total,
                    FIRST[t], PHASES, KEPT, HARDWARE, DIGITS, B,
                )  # fmt: skip
            if COUNT[t] > 1:
                v0 = a0 ^ b0
                v1 = a1 ^ b1
                grown = grown + _row(
                    v0, v1, u0, u1, table, zero, entries, found, scales, total,
                    FIRST[t] + 1, PHASES, KEPT, HARDWARE, DIGITS, B,
                )  # fmt: skip
            c0 = b0
            c1 = b1
            b0 = a0
            b1 = a1
        total = grown
    own = tl.arange(0, 32)
    row = group * 32 + own
    factor = tl.load(scale + row, mask=row < rows, other=0.0)
    for line in tl.static_range(B):
        out = tl.zeros([32], tl.float32)
        for r in tl.static_range(32):
            out = tl.where(own == r, tl.sum(total[r * B + line], axis=0), out)
        out = (out - tl.sum(lost[line], axis=0) * 31.5) * factor
        place = (tl.program_id(1) * batch + line) * rows + row
        tl.store(y + place, out.to(y.dtype.element_ty), mask=(row < rows) & (line < batch))


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


@dataclass(frozen=True)
class Prepared:
    """words: u32; table: u8; scales: what a level is worth, f32 [rows]."""

    params: shuffle.Params
    words: Tensor
    table: Tensor
    scales: Tensor
    rows: int
    cols: int


@per_encoded
def prepare(encoded: EncodedTensor) -> Prepared:
    """What the kernels need of a shuffle leaf [out, in]; the codes stay where they are."""
    params, arrays = encoded.tree.params, dict(encoded.arrays)
    rows, cols = matrix_shape(encoded.shape, params.lead)
    codes = arrays["codes"]
    flat = codes.reshape(-1) if codes.data_ptr() % 16 == 0 else codes.clone().reshape(-1)
    table = shuffle.tables(params.quarter_bits, codes.device).reshape(-1)
    return Prepared(params, flat.view(torch.int32), table, shuffle.unit_scales(params, arrays), rows, cols)


def _hardware_of(arch: str) -> int:
    """Whose instructions: 0 the interpreter, 1 NVIDIA, 2 AMD's CDNA, 3 its RDNA, which has another dot product."""
    found = hardware_of(arch)
    return 3 if found == 2 and arch.startswith("gfx1") else found


def _sizes(params: shuffle.Params) -> tuple[int, int]:
    """(quarter bits, phases)."""
    return params.quarter_bits, 16 // math.gcd(params.quarter_bits, 16)


def shuffle_specs(
    params: shuffle.Params,
    rows: int,
    cols: int,
    batch: int,
    inside: torch.dtype,
    outside: torch.dtype,
    dtype: torch.dtype,
    arch: str,
) -> list[KernelSpec]:
    """The launches: the activations' digits, the product, and the sum of its parts when the columns take several programs.

    inside: of the activations as they come, turned; outside: of the result; dtype: of the activations as they were.
    """
    q, phases = _sizes(params)
    b = triton.next_power_of_2(batch)
    units = -(-cols // shuffle.CHUNK) * 8
    groups = -(-rows // shuffle.GROUP)
    # A warp to a program: sums over its threads need no barrier. Eight programs to a processor, of two turns at least.
    lanes = min(triton.next_power_of_2(units), lanes_of(arch))
    split = max(1, min(triton.cdiv(units, 2 * lanes), triton.cdiv(8 * processors_of(arch), groups)))
    sizes, end = {"rows": rows, "cols": cols}, shuffle.ends(q)[0]
    common = {
        "HARDWARE": _hardware_of(arch),
        "DIGITS": 1 if dtype == torch.bfloat16 else 2,
        "PDL": overlaps(arch),
    }
    first = KernelSpec(
        name=f"shuffle_digits{common['DIGITS']}_{pointer_type(inside)[1:]}",
        fn=shuffle_digits_kernel,
        signature={
            "x": pointer_type(inside),
            "digits": "*i32",
            "scales": "*fp32",
            "cols": "i32",
            "units": "i32",
        },
        constants={**common, "LANES": 64},
        divisible=("x", "digits", "scales", *multiples({"cols": cols, "units": units})),
        num_warps=2,
        num_stages=1,
        options=overlap_options(arch),
        batch=batch,
        kind="shuffle_digits",
        grid=(triton.cdiv(units, 64), batch, 1),
    )
    product = KernelSpec(
        name=f"shuffle{q}_{pointer_type(outside)[1:]}_b{b}l{lanes}s{split}d{common['DIGITS']}",
        fn=shuffle_gemv_kernel,
        signature={
            "digits": "*i32",
            "parts": "*fp32",
            "words": "*u32",
            "scale": "*fp32",
            "table": "*u8",
            "y": "*fp32" if split > 1 else pointer_type(outside),
            **dict.fromkeys(sizes, "i32"),
            "batch": "i32",
        },
        constants={
            **common,
            "Q": q,
            "FIRST": tuple(next((r for r in range(32) if end[r] >= t), 0) for t in range(2 * q)),
            "COUNT": tuple(end.count(t) for t in range(2 * q)),
            "PHASES": phases,
            "B": b,
            "LANES": lanes,
            "SPLIT": split,
        },
        divisible=("digits", "parts", "words", "scale", "table", "y", *multiples(sizes)),
        num_warps=1,
        num_stages=1,
        options=overlap_options(arch),
        batch=batch,
        kind="shuffle_gemv",
        grid=(groups, split, 1),
    )
    made = [first, product]
    return made if split == 1 else [*made, sum_spec(batch * rows, split, outside, arch)]


def shuffle_gemv(x: Tensor, prepared: Prepared, specs: list[KernelSpec], dtype: torch.dtype) -> Tensor:
    """x [batch, cols] -> y [batch, rows] of `dtype`. batch: 1 or 2; specs: of `shuffle_specs`."""
    batch, device = len(x), x.device
    units = -(-prepared.cols // shuffle.CHUNK) * 8
    y = torch.empty(batch, prepared.rows, dtype=dtype, device=device)
    words = 2 * specs[0].constants["DIGITS"]
    digits = torch.empty(batch, words, units, dtype=torch.int32, device=device)
    scales = torch.empty(batch, 2, units, device=device)
    launch(specs[0], x.contiguous(), digits, scales, prepared.cols, units)
    parts = y
    if len(specs) > 2:
        parts = torch.empty(specs[-1].constants["SPLIT"], *y.shape, dtype=torch.float32, device=device)
    arguments = (prepared.words.view(torch.uint32), prepared.scales, prepared.table, parts)
    launch(specs[1], digits, scales, *arguments, prepared.rows, prepared.cols, batch)
    if len(specs) > 2:
        launch(specs[-1], parts, y, y.numel())
    return y


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


def shuffle_decode_spec(
    params: shuffle.Params, rows: int, cols: int, count: int, dtype: torch.dtype, indexed: bool
) -> KernelSpec:
    """The launch that decodes `count` rows."""
    q, phases = _sizes(params)
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
