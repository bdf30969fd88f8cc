# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""Shuffle codes times one or two rows of activations on AMD.

A 32-bit word is a step of the paths of eight columns. A thread takes four of them down a group of 32 rows: the symbols of
a step, exclusive or those two steps before, look up both tables for four columns at once, since the entries of a
table are four words of bytes, and `v_perm` picks bytes of two words by four selectors. The levels stay bytes, and are
multiplied as such with activations of seven bits and, but for bfloat16, seven more, 32 columns under one scale.

The kernels read the stored order as it is. NVIDIA's products are in shuffle_mma.py, decoded rows in shuffle_decode.py.
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
    hardware_of,
    lanes_of,
    launch,
    multiples,
    overlap_options,
    overlaps,
    processors_of,
)
from nstf.kernels.triton.operands import columns_of
from nstf.kernels.triton.spec import KernelSpec, pointer_type
from nstf.kernels.triton.sums import sum_spec


@triton.jit
def _picked(high, low, selectors, HARDWARE: tl.constexpr):
    """`v_perm`: of the eight bytes of two words those that the selectors name. 8 to 11 name the sign of byte 1, 3, 5 or 7,
    as 0 or 255; 12 is 0, and what is above 255."""
    if HARDWARE > 0:
        return tl.inline_asm_elementwise(
            "v_perm_b32 $0, $1, $2, $3", "=v,v,v,v", [high, low, selectors], tl.uint32, True, 1
        )
    else:
        shift = (8 * tl.arange(0, 4))[None, :]
        s = (selectors[:, None] >> shift) & 0xFF
        at = tl.where(s < 8, s, (s * 2 + 1) % 8)
        byte = (tl.where(at < 4, low[:, None], high[:, None]) >> (at % 4 * 8)) & 0xFF
        sign = tl.where(s > 12, 0xFF, tl.where(s == 12, 0, (byte >> 7) * 0xFF))
        return tl.sum(tl.where(s < 8, byte, sign).to(tl.uint32) << shift, axis=1)


@triton.jit
def _symbols(w):
    """The eight symbols of a word, a byte each: even columns and odd ones, then both with the highest bit turned."""
    even = w & 0x0F0F0F0F
    odd = (w >> 4) & 0x0F0F0F0F
    return (even, odd, even ^ 0x08080808, odd ^ 0x08080808)


@triton.jit
def _joined(one, other):
    """The same of the exclusive or of two steps."""
    return (one[0] ^ other[0], one[1] ^ other[1], one[0] ^ other[2], one[1] ^ other[3])


@triton.jit
def _levels(one, other, own, E: tl.constexpr, ODD: tl.constexpr, HARDWARE: tl.constexpr):
    """Levels of the even (ODD = 0) or odd columns at these symbols of both tables, a byte each.

    A symbol of the upper half of a table asks for 0 or 255 of the lower half, and the other way: what it asks for is
    known, and entries that meet 255 are stored as their complement.
    """
    first = _picked(own[E + 1], own[E], one[ODD], HARDWARE) ^ _picked(
        own[E + 3], own[E + 2], one[ODD + 2], HARDWARE
    )
    second = _picked(own[E + 5], own[E + 4], other[ODD], HARDWARE)
    return (second ^ _picked(own[E + 7], own[E + 6], other[ODD + 2], HARDWARE)) + first


@triton.jit
def _dot(levels, digits, onto, HARDWARE: tl.constexpr):
    """onto + the products of four levels and four signed digits."""
    if HARDWARE == 2:
        return tl.inline_asm_elementwise(
            "v_dot4_i32_i8 $0, $1, $2, $3", "=v,v,v,v", [levels, digits, onto], tl.int32, True, 1
        )
    elif HARDWARE == 3:
        return tl.inline_asm_elementwise(
            "v_dot4_i32_iu8 $0, $1, $2, $3 neg_lo:[1,1,0]",
            "=v,v,v,v",
            [levels, digits, onto],
            tl.int32,
            True,
            1,
        )
    else:
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
    elif HARDWARE == 3:
        return tl.inline_asm_elementwise(
            "v_dot4_i32_iu8 $0, $1, $2, 0 neg_lo:[1,1,0]", "=v,v,v", [levels, digits], tl.int32, True, 1
        )
    else:
        return _dot(levels, digits, tl.zeros_like(digits), HARDWARE)


@triton.jit
def _packed(q0, q1, q2, q3):
    return (q0 & 255) | ((q1 & 255) << 8) | ((q2 & 255) << 16) | (q3 << 24)


@triton.jit
def _nearest(v):
    """The nearest integer, of numbers up to 2^22."""
    return (v + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _four(words, W: tl.constexpr):
    """Those of word W of four."""
    return (words[4 * W], words[4 * W + 1], words[4 * W + 2], words[4 * W + 3])


@triton.jit
def _row(
    one,
    other,
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
    levels = ()
    for w in tl.static_range(4):
        for i in tl.static_range(2):
            levels = levels + (_levels(_four(one, w), _four(other, w), own, E, i, HARDWARE),)
    grown = ()
    for line in tl.static_range(B):
        dot = _first_dot(levels[0], digits[8 * DIGITS * line], HARDWARE)
        for i in tl.static_range(1, 8):
            dot = _dot(levels[i], digits[8 * DIGITS * line + i], dot, HARDWARE)
        if DIGITS == 2:
            dot *= 254
            for i in tl.static_range(8):
                dot = _dot(levels[i], digits[8 * DIGITS * line + 8 + i], dot, HARDWARE)
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
def _step(at, ok, MASKED: tl.constexpr):
    """A step of the paths of 32 columns: four words in each lane, as symbols."""
    at = at[:, None] + tl.arange(0, 4)[None, :]
    if MASKED:
        words = columns_of(tl.load(at, mask=ok[:, None], other=0), 4)
    else:
        words = columns_of(tl.load(at), 4)
    return _symbols(words[0]) + _symbols(words[1]) + _symbols(words[2]) + _symbols(words[3])


@triton.jit
def _steps_joined(a, c):
    found = ()
    for w in tl.static_range(4):
        found = found + _joined(_four(a, w), _four(c, w))
    return found


@triton.jit
def shuffle_digits_kernel(
    x,  # [batch, cols]
    digits,  # i32 [batch, 8 * DIGITS, units]: four columns a word
    scales,  # f32 [batch, 2, units]: what a digit is worth, and the sum of the 32 activations
    cols,
    units,
    DIGITS: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """32 activations under one scale as signed digits, in the order in which look-ups give levels."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    line = tl.program_id(1)
    unit = tl.program_id(0) * LANES + tl.arange(0, LANES)
    v = ()
    most = tl.zeros([LANES], tl.float32)
    for j in tl.static_range(32):
        k = unit * 32 + j
        some = tl.load(x + line * cols + k, mask=k < cols, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(some), propagate_nan=tl.PropagateNan.ALL)
        v = v + (some,)
    inverse = 127.0 / tl.maximum(most, 1e-30, propagate_nan=tl.PropagateNan.ALL)
    q = ()
    rest = ()
    total = tl.zeros([LANES], tl.int32)
    for j in tl.static_range(32):
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
    at = digits + line * 8 * DIGITS * units + unit
    for kind in tl.static_range(DIGITS):
        d = q if kind == 0 else rest
        for w in tl.static_range(4):
            even = _packed(d[8 * w], d[8 * w + 2], d[8 * w + 4], d[8 * w + 6])
            odd = _packed(d[8 * w + 1], d[8 * w + 3], d[8 * w + 5], d[8 * w + 7])
            tl.store(at + (8 * kind + 2 * w) * units, even, mask=ok)
            tl.store(at + (8 * kind + 2 * w + 1) * units, odd, mask=ok)
    tl.store(scales + line * 2 * units + unit, one, mask=ok)
    tl.store(scales + (line * 2 + 1) * units + unit, total.to(tl.float32) * one, mask=ok)


@triton.jit(do_not_specialize=["batch"])
def shuffle_gemv_kernel(
    digits,  # i32 [batch, 8 * DIGITS, units]
    parts,  # f32 [batch, 2, units]: scales and sums of 32 activations
    words,  # u32 [groups, chunks, 2 q, 8]
    scale,  # f32 [rows]: what a level is worth
    table,  # u8 [phases, 2, 16], all but entries 4 and 12 as their complement
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
    LANES: tl.constexpr,  # threads along the columns, 32 of them each
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
    units = chunks * 2
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
            for i in tl.static_range(8 * DIGITS):
                found = found + (tl.load(digits + (line * 8 * DIGITS + i) * units + unit, mask=ok, other=0),)
            scales = scales + (tl.load(parts + line * 2 * units + unit, mask=ok, other=0.0),)
            sums = sums + (lost[line] + tl.load(parts + (line * 2 + 1) * units + unit, mask=ok, other=0.0),)
        lost = sums
        # The symbols of the group, and the two before.
        # Without a mask: beyond the last column digits are 0.
        unit = tl.minimum(unit, units - 1)
        at = words + ((group * chunks + unit // 2) * (2 * Q)) * 8 + unit % 2 * 4
        before = at - (chunks * (2 * Q) - (2 * Q - 2)) * 8
        c = _step(before, goes_on, True)
        b = _step(before + 8, goes_on, True)
        grown = ()
        for t in tl.static_range(2 * Q):
            a = _step(at + t * 8, goes_on, False)
            u = _steps_joined(a, c)
            if COUNT[t] > 0:
                grown = grown + _row(
                    u, b, table, zero, entries, found, scales, total, FIRST[t], PHASES, KEPT, HARDWARE, DIGITS, B
                )  # fmt: skip
            if COUNT[t] > 1:
                grown = grown + _row(
                    _steps_joined(a, b), u, table, zero, entries, found, scales, total,
                    FIRST[t] + 1, PHASES, KEPT, HARDWARE, DIGITS, B,
                )  # fmt: skip
            c = b
            b = a
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


@dataclass(frozen=True)
class Prepared:
    """words: u32; table: u8; complement: it as `v_perm` wants it (`_levels`); scales: what a level is worth, f32 [rows]."""

    params: shuffle.Params
    words: Tensor
    table: Tensor
    complement: Tensor
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
    tables = shuffle.tables(params.quarter_bits, codes.device)
    complement = tables ^ 0xFF
    complement[..., [4, 12]] ^= 0xFF
    scales = shuffle.unit_scales(params, arrays)
    return Prepared(
        params, flat.view(torch.int32), tables.reshape(-1), complement.reshape(-1), scales, rows, cols
    )


def _hardware_of(arch: str) -> int:
    """Whose instructions: 0 plain arithmetic (the interpreter), 2 AMD's CDNA, 3 its RDNA, which has another dot product."""
    found = hardware_of(arch)
    return 3 if found == 2 and arch.startswith("gfx1") else 2 if found == 2 else 0


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
    units = -(-cols // shuffle.CHUNK) * 2
    groups = -(-rows // shuffle.GROUP)
    # A warp to a program: sums over its threads need no barrier. Eight programs to a processor, of two turns at least.
    lanes = min(triton.next_power_of_2(units), lanes_of(arch))
    split = max(1, min(triton.cdiv(units, 2 * lanes), triton.cdiv(8 * processors_of(arch), groups)))
    sizes, end = {"rows": rows, "cols": cols}, shuffle.ends(q)[0]
    common = {
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
            "HARDWARE": _hardware_of(arch),
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
    units = -(-prepared.cols // shuffle.CHUNK) * 2
    y = torch.empty(batch, prepared.rows, dtype=dtype, device=device)
    words = 8 * specs[0].constants["DIGITS"]
    digits = torch.empty(batch, words, units, dtype=torch.int32, device=device)
    scales = torch.empty(batch, 2, units, device=device)
    launch(specs[0], x.contiguous(), digits, scales, prepared.cols, units)
    parts = y
    if len(specs) > 2:
        parts = torch.empty(specs[-1].constants["SPLIT"], *y.shape, dtype=torch.float32, device=device)
    arguments = (prepared.words.view(torch.uint32), prepared.scales, prepared.complement, parts)
    launch(specs[1], digits, scales, *arguments, prepared.rows, prepared.cols, batch)
    if len(specs) > 2:
        launch(specs[-1], parts, y, y.numel())
    return y
