# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""Trellis codes times up to eight rows of activations, and trellis codes to dense rows, on a GPU.

A thread keeps the activations of 16 or 32 columns and goes down the rows; a row of a tile is 16 weights, 4 q bits (q: four
times the bits per weight) and the 16 bits before them, from as many 32-bit words as they touch, shifted into place once.
Each state is then at a place known at compile time.
Up to 3 bits per weight its value is computed: one multiplication, one sum of four bytes (an instruction of its own on NVIDIA
and AMD alike) onto the bits of 1.0, so that the sum already is a float32 near 1; what that adds is the same for all rows, a
multiple of the sum of the activations. Above, a
quantile of the normal distribution, by a polynomial.

The kernels read the stored order as it is. Activations come as float32 [batch, 16, tiles across] (`rotate.py`).
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.formats import trellis
from nstf.kernels.formats.scales import matrix_shape
from nstf.kernels.formats.tree import EncodedTensor
from nstf.kernels.memo import per_encoded
from nstf.kernels.triton.gemv import (
    ONE,
    lanes_of,
    launch,
    multiples,
    overlap_options,
    overlaps,
    processors_of,
    sum_spec,
)
from nstf.kernels.triton.launching import hardware_of
from nstf.kernels.triton.spec import KernelSpec, pointer_type, remembered

# Bytes are summed with this weight into the mantissa of 1.0: the largest, for the finest steps.
_WEIGHT = 255
_UNIT = 2.0**23 / (_WEIGHT * 148)
_CENTRE = 1 + 510 * _WEIGHT / 2.0**23
LARGEST_BATCH = 8


@triton.jit
def _words(codes, at, r, QUARTER: tl.constexpr, COUNT: tl.constexpr, mask):
    """The words that hold a row of a tile and the 16 bits before it. at: the tile's first word; r: row of the tile."""
    first = (r * (4 * QUARTER) + (64 * QUARTER - 16)) // 32
    found = ()
    for i in tl.static_range(COUNT):
        # The stream is circular. The hint keeps one layout for all loads: a row of a tile to a thread.
        here = at + tl.max_contiguous((first + i) % (2 * QUARTER), [1, 1, 1])
        found = found + (tl.load(codes + here, mask=mask, other=0),)
    return found


@triton.jit
def _aligned(words, r, QUARTER: tl.constexpr, COUNT: tl.constexpr):
    """Those words from the first of the 16 bits on; as they are where all rows begin at bit 16."""
    if (4 * QUARTER) % 32 == 0:
        return words
    else:
        shift = ((r * (4 * QUARTER) + (64 * QUARTER - 16)) % 32).to(tl.uint32)
        found = ()
        for i in tl.static_range(COUNT):
            if i + 1 < COUNT:
                # Two shifts: by 32 at once would be undefined when the shift is 0.
                found = found + ((words[i] >> shift) | ((words[i + 1] << 1) << (31 - shift)),)
            else:
                found = found + (words[i] >> shift,)
        return found


@triton.jit
def _state(words, C: tl.constexpr, QUARTER: tl.constexpr):
    """The state of column C of a row."""
    AT: tl.constexpr = ((C + 1) * QUARTER) // 4 + (16 if (4 * QUARTER) % 32 == 0 else 0)
    S: tl.constexpr = AT % 32
    state = words[AT // 32] >> S
    if S > 16:
        state = state | (words[AT // 32 + 1] << (32 - S))
    if S != 16:
        state = state & 0xFFFF
    return state


@triton.jit
def _sum_value(state, one, HARDWARE: tl.constexpr):
    """1 + 255 / 2^23 times the sum of the four bytes of the multiplied state."""
    product = state * 0xA7491E23
    if HARDWARE == 1:
        bits = tl.inline_asm_elementwise(
            "dp4a.u32.u32 $0, $1, $2, $3;", "=r,r,r,r", [product, 0xFFFFFFFF, one], tl.uint32, True, 1
        )
    elif HARDWARE == 2:
        bits = tl.inline_asm_elementwise(
            "v_dot4_u32_u8 $0, $1, $2, $3", "=v,v,v,v", [product, 0xFFFFFFFF, one], tl.uint32, True, 1
        )
    else:
        two = (product & 0x00FF00FF) + ((product >> 8) & 0x00FF00FF)
        bits = ((two + (two >> 16)) & 0x7FF) * 255 + 0x3F800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _quantile_value(state, HARDWARE: tl.constexpr):
    """The Gaussian quantile of the multiplied state, by a polynomial in log2 of 4 u (1 - u).

    Fitted to the 4096 levels: 6e-5 of the value, a tenth of what storing them as float16 changes.
    """
    near = ((((state * 25115) << 7) & 0x7FF800) | 0x3F800000).to(tl.float32, bitcast=True)  # 1 + level / 4096
    u = near * 2.0 + (1 / 4096 - 3.0)
    rest = 1.0 - u * u
    # tl.log2 is a subroutine of twenty instructions; there is one.
    if HARDWARE == 1:
        w = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [rest], tl.float32, True, 1)
    elif HARDWARE == 2:
        w = tl.inline_asm_elementwise("v_log_f32 $0, $1", "=v,v", [rest], tl.float32, True, 1)
    else:
        w = tl.log2(rest)
    w = -w
    p = w * -1.9235076251788996e-06 + 9.515388228464872e-05
    p = p * w - 0.0016848844243213534
    p = p * w + 0.008936945348978043
    p = p * w + 0.22671492397785187
    p = p * w + 1.2533867359161377
    return p * u


# Sections begin at any multiple of 8 bytes.
@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["codes"])
def trellis_gemv_kernel(
    x,  # f32 [batch, 16, across]
    codes,  # u32: the section
    scale,  # f32 [rows of the matrix]
    members,  # i32 [rows]: the matrix's row of each row of the section
    y,  # [batch, rows of the matrix], or f32 [programs along the columns, ...]
    rows,  # of the section
    out_rows,  # of the matrix
    across,
    batch,
    one,  # the bits of 1.0: an argument, so that it lies in a register, where the sum of bytes wants it
    QUARTER: tl.constexpr,
    COUNT: tl.constexpr,  # words of a row and what is before it
    UNIT: tl.constexpr,
    CENTRE: tl.constexpr,
    HARDWARE: tl.constexpr,
    SECTIONED: tl.constexpr,
    PDL: tl.constexpr,
    RT: tl.constexpr,
    CT: tl.constexpr,
    B: tl.constexpr,
):
    """CT tiles across, down all rows, RT rows of tiles at a time: a thread keeps the activations of its columns."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    r = tl.arange(0, 16)[:, None, None]
    # The zeros make every load one of [16, CT, ...]: in the layout of the codes, without exchange between threads.
    ct = tl.program_id(1) * CT + tl.arange(0, CT)[None, :, None] + tl.zeros([16, 1, 1], tl.int32)
    below = tl.arange(0, RT)[None, None, :]
    xs = ()
    ones = ()
    for line in tl.static_range(B):
        total = tl.zeros([16, CT, 1], tl.float32)
        for c in tl.static_range(16):
            at_x = tl.max_contiguous((line * 16 + c) * across + ct, [1, 1, 1])
            some = tl.load(x + at_x, mask=(ct < across) & (line < batch), other=0.0)
            total += some
            xs = xs + (some,)
        ones = ones + (total * CENTRE,)

    step = tl.num_programs(0) * RT
    first = tl.program_id(0) * RT
    down = first + below
    words = _words(
        codes, (down * across + ct) * (2 * QUARTER), r, QUARTER, COUNT, (ct < across) & (down * 16 < rows)
    )
    for start in range(first, (rows + 15) // 16, step):
        down = start + step + below
        later = _words(
            codes, (down * across + ct) * (2 * QUARTER), r, QUARTER, COUNT, (ct < across) & (down * 16 < rows)
        )
        bits = _aligned(words, r, QUARTER, COUNT)
        accs = ()
        for _ in tl.static_range(B):
            accs = accs + (tl.zeros([16, CT, RT], tl.float32),)
        for c in tl.static_range(16):
            state = _state(bits, c, QUARTER)
            if QUARTER <= 12:
                value = _sum_value(state, one, HARDWARE)
            else:
                value = _quantile_value(state, HARDWARE)
            grown = ()
            for line in tl.static_range(B):
                grown = grown + (accs[line] + value * xs[line * 16 + c],)
            accs = grown
        row = (start + tl.arange(0, RT))[None, :] * 16 + tl.arange(0, 16)[:, None]
        ok = row < rows
        if SECTIONED:
            row = tl.load(members + row, mask=ok, other=0)
        factor = tl.load(scale + row, mask=ok, other=0.0) * UNIT
        for line in tl.static_range(B):
            acc = accs[line]
            if QUARTER <= 12:
                acc -= ones[line]
            out = tl.sum(acc, axis=1) * factor
            place = (tl.program_id(1) * batch + line) * out_rows + row
            tl.store(y + place, out.to(y.dtype.element_ty), mask=ok & (line < batch))
        words = later


@triton.jit(do_not_specialize=["first", "count"], do_not_specialize_on_alignment=["codes", "ids"])
def trellis_decode_kernel(
    ids,  # i64 [count]
    codes,  # u32: the section
    scale,  # f32 [rows]
    place,  # i32 [rows]: the row of the section, -1 for rows of another one
    table,  # f16 [4096]
    y,  # [count, cols]
    first,
    count,
    rows,
    cols,
    across,
    QUARTER: tl.constexpr,
    COUNT: tl.constexpr,
    UNIT: tl.constexpr,
    CENTRE: tl.constexpr,
    HARDWARE: tl.constexpr,
    SECTIONED: tl.constexpr,
    INDEXED: tl.constexpr,
    BN: tl.constexpr,
    CT: tl.constexpr,
):
    """Rows of W: y[i] = W[ids[i]], or W[first + i]. Ids out of range give rows of NaN."""
    at = (tl.program_id(0) * BN + tl.arange(0, BN))[:, None, None]
    ct = (tl.program_id(1) * CT + tl.arange(0, CT))[None, :, None]
    wanted = at < count
    if INDEXED:
        row = tl.load(ids + at, mask=wanted, other=0).to(tl.int32)
    else:
        row = first + at
    known = (row >= 0) & (row < rows)
    row = tl.where(known & wanted, row, 0)
    factor = tl.load(scale + row) * UNIT
    if not SECTIONED:
        factor = tl.where(known, factor, float("nan"))
    local = row
    if SECTIONED:
        local = tl.load(place + row)
        wanted = wanted & known & (local >= 0)
    local = tl.maximum(local, 0)
    inside = (ct < across) & wanted
    tile = ((local // 16) * across + ct) * (2 * QUARTER)
    bits = _aligned(_words(codes, tile, local % 16, QUARTER, COUNT, inside), local % 16, QUARTER, COUNT)
    values = ()
    for c in tl.static_range(16):
        state = _state(bits, c, QUARTER)
        if QUARTER <= 12:
            value = _sum_value(state, 0x3F800000, HARDWARE) - CENTRE
        else:
            value = tl.load(table + (((state * 25115) & 0xFFFF) >> 4)).to(tl.float32)
        values = values + (tl.reshape(value * factor, [BN, CT]),)
    # Side by side: the first pairs differ in the highest bit of the column.
    for level in tl.static_range(4):
        joined = ()
        for c in tl.static_range(8 >> level):
            joined = joined + (tl.join(values[c], values[c + (8 >> level)]),)
        values = joined
    k = (tl.program_id(1) * CT * 16 + tl.arange(0, CT * 16))[None, :]
    line = (tl.program_id(0) * BN + tl.arange(0, BN))[:, None]
    out = tl.reshape(values[0], [BN, CT * 16])
    ok = tl.reshape(wanted, [BN, 1]) & (k < cols)
    tl.store(y + line.to(tl.int64) * cols + k, out.to(y.dtype.element_ty), mask=ok)


@dataclass(frozen=True)
class Section:
    """codes: i32 words; members: i32 [rows] of the matrix; place: i32 [rows of the matrix], -1 where it is another's."""

    codes: Tensor
    quarter_bits: int
    rows: int
    members: Tensor | None
    place: Tensor | None


@dataclass(frozen=True)
class Prepared:
    params: trellis.Params
    sections: tuple[Section, ...]
    scales: Tensor
    table: Tensor
    rows: int
    cols: int

    @property
    def across(self) -> int:
        return trellis.tiles(self.cols)


@per_encoded
def prepare(encoded: EncodedTensor) -> Prepared:
    """What the kernels need of a trellis leaf [out, in]; the codes stay where they are."""
    params, arrays = encoded.tree.params, dict(encoded.arrays)
    rows, cols = matrix_shape(encoded.shape, params.lead)
    sections = []
    for codes, quarter_bits, members in trellis.sections(params, arrays, rows, cols):
        place = None
        if params.rows:
            place = torch.full((rows,), -1, dtype=torch.int32, device=codes.device)
            place[members] = torch.arange(len(members), dtype=torch.int32, device=codes.device)
        words = (
            codes.reshape(-1).view(torch.int32)
            if codes.data_ptr() % 8 == 0
            else codes.clone().view(torch.int32)
        )
        sections.append(
            Section(
                words, quarter_bits, len(members), members.to(torch.int32) if params.rows else None, place
            )
        )
    scales = trellis.read_scales(params, arrays)
    return Prepared(params, tuple(sections), scales, _table().to(scales.device), rows, cols)


def words_of(quarter_bits: int) -> int:
    """The most 32-bit words that 4 q bits and the 16 before them touch, wherever a row begins."""
    latest = 32 - math.gcd(4 * quarter_bits, 32) if quarter_bits % 8 else 16
    return -(-(latest + 16 + 4 * quarter_bits) // 32)


@remembered
def trellis_specs(
    params: trellis.Params,
    out_rows: int,
    cols: int,
    batch: int,
    dtype: torch.dtype,
    arch: str,
    tile: dict[str, int] | None = None,
) -> list[KernelSpec]:
    """The launches: one for each section and, when the columns take several programs, the sum of their parts.

    `tile` overrides the choice.
    """
    across = trellis.tiles(cols)
    b = triton.next_power_of_2(batch)
    lanes = lanes_of(arch)
    # Four tiles a thread for one row of activations: their 64 numbers stay in registers. Programs of one warp for several
    # rows: a program's warps meet once for each of them.
    chosen = {
        "RT": 2 if b == 2 else 1,
        "CT": 0,
        "WARPS": 64 // lanes if b == 1 else 1,
        "PROGRAMS": 0,
    } | (tile or {})
    rt, warps = chosen["RT"], chosen["WARPS"]
    ct = chosen["CT"] or min(triton.next_power_of_2(across), warps * lanes // 16 * max(1, 4 // b))
    split = triton.cdiv(across, ct)
    room = chosen["PROGRAMS"] or processors_of(arch) * max(1, 512 // (warps * lanes))
    made = []
    for rows, q in zip(trellis.section_rows(params, out_rows), params.quarter_bits, strict=True):
        sizes = {"rows": rows, "out_rows": out_rows, "across": across, "batch": batch}
        computed = q <= 12
        spec = KernelSpec(
            name=f"trellis{q}_{pointer_type(dtype)[1:]}_b{b}r{rt}c{ct}w{warps}"
            + ("p" if split > 1 else "")
            + ("s" if params.rows else ""),
            fn=trellis_gemv_kernel,
            signature={
                "x": "*fp32",
                "codes": "*u32",
                "scale": "*fp32",
                "members": "*i32",
                "y": "*fp32" if split > 1 else pointer_type(dtype),
                **dict.fromkeys(sizes, "i32"),
                "one": "i32",
            },
            constants={
                "QUARTER": q,
                "COUNT": words_of(q),
                "UNIT": _UNIT if computed else 1.0,
                "CENTRE": _CENTRE,
                "HARDWARE": hardware_of(arch),
                "SECTIONED": bool(params.rows),
                "PDL": overlaps(arch),
                "RT": rt,
                "CT": ct,
                "B": b,
            },
            divisible=("x", "scale", "members", "y", *multiples(sizes), "one"),
            num_warps=warps,
            num_stages=1,
            options=overlap_options(arch),
            batch=batch,
            kind="trellis_gemv",
            grid=(min(triton.cdiv(trellis.tiles(rows), rt), triton.cdiv(room, split)), split, 1),
        )
        made.append(spec)
    return made if split == 1 else [*made, sum_spec(batch * out_rows, split, dtype, arch)]


def trellis_gemv(
    x: Tensor, prepared: Prepared, dtype: torch.dtype, arch: str, tile: dict[str, int] | None = None
) -> Tensor:
    """x f32 [batch, 16, across] -> y [batch, rows] of `dtype`. batch: at most LARGEST_BATCH."""
    batch = len(x)
    y = torch.empty(batch, prepared.rows, dtype=dtype, device=x.device)
    specs = trellis_specs(prepared.params, prepared.rows, prepared.cols, batch, dtype, arch, tile)
    summed = len(specs) > len(prepared.sections)
    parts = y
    if summed:
        parts = torch.empty(specs[-1].constants["SPLIT"], *y.shape, dtype=torch.float32, device=x.device)
    for s, spec in zip(prepared.sections, specs, strict=False):
        members = s.codes if s.members is None else s.members
        sizes = (s.rows, prepared.rows, prepared.across, batch)
        launch(spec, x, s.codes.view(torch.uint32), prepared.scales, members, parts, *sizes, ONE)
    if summed:
        launch(specs[-1], parts, y, y.numel())
    return y


def trellis_rows(prepared: Prepared, rows: slice | Tensor, dtype: torch.dtype, arch: str) -> Tensor:
    """decode(W)[rows] as `dtype`, [n, cols]. rows: a slice with start and stop, or int64 [n] on the device."""
    indexed = isinstance(rows, Tensor)
    first, count = (0, len(rows)) if isinstance(rows, Tensor) else (rows.start, rows.stop - rows.start)
    y = torch.empty(count, prepared.cols, dtype=dtype, device=prepared.scales.device)
    if indexed and len(prepared.sections) > 1:
        y.fill_(float("nan"))
    if count == 0:
        return y
    specs = trellis_decode_specs(prepared.params, prepared.rows, prepared.cols, count, dtype, indexed, arch)
    ids = rows.contiguous() if isinstance(rows, Tensor) else prepared.sections[0].codes.view(torch.int64)
    for s, spec in zip(prepared.sections, specs, strict=True):
        place = s.codes if s.place is None else s.place
        sizes = (first, count, prepared.rows, prepared.cols, prepared.across)
        launch(spec, ids, s.codes.view(torch.uint32), prepared.scales, place, prepared.table, y, *sizes)
    return y


@lru_cache(maxsize=1024)
def trellis_decode_specs(
    params: trellis.Params, rows: int, cols: int, count: int, dtype: torch.dtype, indexed: bool, arch: str
) -> list[KernelSpec]:
    """The launches that decode `count` rows: one for each section, which writes those that lie in it."""
    bn, ct = min(16, triton.next_power_of_2(count)), 8
    across = trellis.tiles(cols)
    integers = {"count": count, "rows": rows, "cols": cols, "across": across}
    sectioned = bool(params.rows)
    what = "embed" if indexed else "decode"
    return [
        KernelSpec(
            name=f"trellis{q}_{what}_{pointer_type(dtype)[1:]}_{bn}" + ("s" if sectioned else ""),
            fn=trellis_decode_kernel,
            signature={
                "ids": "*i64",
                "codes": "*u32",
                "scale": "*fp32",
                "place": "*i32",
                "table": "*fp16",
                "y": pointer_type(dtype),
                "first": "i32",
                **dict.fromkeys(integers, "i32"),
            },
            constants={
                "QUARTER": q,
                "COUNT": words_of(q),
                "UNIT": _UNIT if q <= 12 else 1.0,
                "CENTRE": _CENTRE,
                "HARDWARE": hardware_of(arch),
                "SECTIONED": sectioned,
                "INDEXED": indexed,
                "BN": bn,
                "CT": ct,
            },
            divisible=(
                "scale",
                "place",
                "table",
                "y",
                *multiples({n: integers[n] for n in ("rows", "cols", "across")}),
            ),
            num_warps=4,
            num_stages=1,
            batch=count,
            kind=f"trellis_{what}",
            grid=(triton.cdiv(count, bn), triton.cdiv(across, ct), 1),
        )
        for q in params.quarter_bits
    ]


def _table() -> Tensor:
    """f16 [4096]: the levels above 3 bits by the top bits of the multiplied state."""
    states = torch.arange(1 << trellis.STATE_BITS)
    place = ((states * 25115) & 0xFFFF) >> 4
    table = torch.empty(4096)
    table[place] = trellis.codebook(13)
    return table.half()
