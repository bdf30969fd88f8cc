# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""One to four rows of activations times trellis codes of up to 3 bits on NVIDIA: the matrix cores sum the bytes.

A weight is the sum of the four bytes of a product, less their middle. The product as it is makes four neighbours in a row of
m16n8k32 (unsigned bytes), all four times the same activation: nothing is left to do between the multiplication and the
matrix instruction. Activations are bytes there too: whole numbers, scaled by a power of two for each warp, whose digits to
the base of 256 (-128 to 127) take a column of the eight each: three digits for one or two rows (what is below 2^-22 of the
largest of 256 is lost), two for three or four (2^-14; the largest itself is rounded to 2^-9 as bfloat16, to 2^-12 as
float16). Sums are exact, in 32 bits.

As in trellis_gemm.py a warp keeps the activations of its columns as operands and goes down the rows. Lane 4 g + t holds rows
2 g and 2 g + 1 of sixteen, of every fourth tile.
"""

import torch
import triton
import triton.language as tl

from nstf.kernels.formats import trellis
from nstf.kernels.triton.byte_product import mma_bytes
from nstf.kernels.triton.gemv import multiples, overlap_options, overlaps, processors_of
from nstf.kernels.triton.launching import hardware_of
from nstf.kernels.triton.operands import columns_of, over_warps
from nstf.kernels.triton.spec import KernelSpec, pointer_type
from nstf.kernels.triton.trellis_rows import aligned, lane_words, pair_words, state

LARGEST_BATCH = 4
# Bytes 127 and 128 in turn: the middle of a sum, as a product.
MIDDLE = 0x7F807F80
# Tiles that a program takes across: four warps of sixteen.
PART_TILES = 64
_DEVIATION = 148.0


@triton.jit
def _digits(
    x,
    batch,
    cols,
    group,
    DIGITS: tl.constexpr,
    PLACES: tl.constexpr,
    S: tl.constexpr,
    GROUPS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """The activations of each lane's column of B, and what its sums are to be multiplied with.

    For the columns of the matrix that a lane has: [32 S] words, a digit four times; [S, 8] float32, by columns of B.
    """
    i = tl.arange(0, 32 * S)
    line = i // 4 % 8 // PLACES
    wide = ()
    most = tl.zeros([32 * S], tl.float32)
    for c in tl.static_range(GROUPS):
        for h in tl.static_range(2):
            k = (group + c + i // 32 * GROUPS) * 64 + i % 4 * 16 + 8 * h
            k = k[:, None] + tl.arange(0, 8)[None, :]
            some = tl.load(x + line[:, None] * cols + k, mask=(line < batch)[:, None] & (k < cols), other=0.0)
            wide = wide + columns_of(some.to(tl.float32), 8)
    for n in tl.static_range(16 * GROUPS):
        most = tl.maximum(most, tl.abs(wide[n]), propagate_nan=tl.PropagateNan.ALL)
    # As whole numbers, of which a NaN is the largest.
    exponent = tl.max(tl.reshape(most.to(tl.int32, bitcast=True) >> 23, [S, 8, 4]), axis=2)
    TOP: tl.constexpr = 22 if DIGITS == 3 else 14
    back = tl.where(exponent == 255, float("nan"), 1.0)
    exponent = tl.maximum(exponent, TOP)
    up = ((253 + TOP - exponent) << 23).to(tl.float32, bitcast=True)
    up = tl.reshape(tl.broadcast_to(up[:, :, None], [S, 8, 4]), [32 * S])
    place = (tl.arange(0, 8) % PLACES)[None, :]
    back *= ((exponent - (TOP - 1)) << 23).to(tl.float32, bitcast=True)
    back *= tl.where(place < DIGITS, (1 << (8 * place)).to(tl.float32), 0.0)
    # A sum with 1.5 * 2^23 has the number in its mantissa; carries make the digits below the highest signed.
    CARRIES: tl.constexpr = 0x8080 if DIGITS == 3 else 0x80
    which = (i // 4 % PLACES).to(tl.uint32)
    found = ()
    for n in tl.static_range(16 * GROUPS):
        number = (wide[n] * up + 12582912.0).to(tl.int32, bitcast=True) - (0x4B400000 - CARRIES)
        number = (number ^ CARRIES).to(tl.uint32, bitcast=True)
        if HARDWARE == 1:
            digit = tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [number, which * 0x1111], tl.uint32, True, 1
            )
        else:
            digit = ((number >> (which * 8)) & 0xFF) * 0x01010101
        found = found + (digit,)
    return found, back


@triton.jit
def _product(bits, P: tl.constexpr, QUARTER: tl.constexpr, DOT: tl.constexpr, HARDWARE: tl.constexpr):
    """The multiplied state of place P of two rows."""
    return state(bits, P, QUARTER, DOT, HARDWARE) * 0xA7491E23


@triton.jit(do_not_specialize=["batch", "middle"], do_not_specialize_on_alignment=["codes"])
def trellis_bytes_kernel(
    x,  # [batch, cols]
    codes,  # u32: the section
    scale,  # f32 [rows of the matrix]
    members,  # i32 [rows]: the matrix's row of each row of the section
    y,  # [batch, rows of the matrix], or f32 [programs along the columns, ...]
    rows,  # of the section
    out_rows,  # of the matrix
    cols,
    across,
    batch,
    middle,  # bytes 127, 128, 127, 128: an argument, so that nothing is folded
    QUARTER: tl.constexpr,
    UNIT: tl.constexpr,
    HARDWARE: tl.constexpr,
    SECTIONED: tl.constexpr,
    PDL: tl.constexpr,
    EVEN: tl.constexpr,
    DIGITS: tl.constexpr,
    PLACES: tl.constexpr,  # columns of B for a row of activations
    DOTS: tl.constexpr,  # of four states, how many the multiplier cuts out
    S: tl.constexpr,
    GROUPS: tl.constexpr,  # of four tiles for each warp
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    group0 = tl.program_id(1) * S * GROUPS
    begin = tl.program_id(0)
    step = tl.num_programs(0)
    last = (rows + 15) // 16 - 1
    size = across * (2 * QUARTER)
    lanes = lane_words(group0, QUARTER, S, GROUPS)
    words = ()
    for c in tl.static_range(GROUPS):
        words = words + (
            pair_words(codes + begin * size, lanes, group0, across, c, QUARTER, S, GROUPS, EVEN),
        )
    if PDL:
        tl.extra.cuda.gdc_wait()

    xs, back = _digits(x, batch, cols, group0, DIGITS, PLACES, S, GROUPS, HARDWARE)
    zero = tl.zeros([32 * S], tl.int32)
    half = (zero + middle).to(tl.uint32, bitcast=True)
    start = (zero, zero, zero, zero)
    for n in tl.static_range(8 * GROUPS):
        start = mma_bytes(half, half, half, half, xs[2 * n], xs[2 * n + 1], start, S, HARDWARE)
    # All its rows are the same.
    start = (-start[0], -start[1], -start[0], -start[1])
    # A lane has columns 2 t and 2 t + 1 of the sums.
    first, second = tl.split(tl.reshape(back, [S, 1, 4, 2]))
    first = tl.reshape(tl.broadcast_to(first, [S, 8, 4]), [32 * S])
    second = tl.reshape(tl.broadcast_to(second, [S, 8, 4]), [32 * S])

    for down in range(begin, last + 1, step):
        later = ()
        # The last one again where there is none after it.
        ahead = codes + tl.minimum(down + step, last) * size
        acc = start
        for c in tl.static_range(GROUPS):
            bits = aligned(words[c], QUARTER, S, HARDWARE)
            for e in tl.static_range(8):
                a0 = _product(bits, 2 * e, QUARTER, DOTS > 0, HARDWARE)
                a1 = _product(bits, 2 * e + 16, QUARTER, False, HARDWARE)
                a2 = _product(bits, 2 * e + 1, QUARTER, DOTS > 1, HARDWARE)
                a3 = _product(bits, 2 * e + 17, QUARTER, False, HARDWARE)
                acc = mma_bytes(a0, a1, a2, a3, xs[16 * c + 2 * e], xs[16 * c + 2 * e + 1], acc, S, HARDWARE)
            # Into the registers that have just become free.
            later = later + (pair_words(ahead, lanes, group0, across, c, QUARTER, S, GROUPS, EVEN),)
        upper = acc[0].to(tl.float32) * first + acc[1].to(tl.float32) * second
        lower = acc[2].to(tl.float32) * first + acc[3].to(tl.float32) * second
        both = tl.permute(tl.reshape(tl.join(upper, lower), [S, 8, 4, 2]), (0, 1, 3, 2))
        both = tl.reshape(both, [S, 16, 4])
        LINES: tl.constexpr = 8 // PLACES
        if LINES == 2:
            # Its two lanes as if they were warps.
            both = tl.reshape(tl.permute(tl.reshape(both, [S, 16, 2, 2]), (0, 3, 1, 2)), [2 * S, 16, 2])
            out = over_warps(both, 2 * S, 16, 2)
        else:
            out = over_warps(both, S, 16, 4)
        row = down * 16 + tl.arange(0, 16)
        ok = row < rows
        if SECTIONED:
            row = tl.load(members + row, mask=ok, other=0)
        factor = tl.load(scale + row, mask=ok, other=0.0) * UNIT
        line = tl.arange(0, LINES)
        at = (tl.program_id(1) * batch + line)[None, :] * out_rows + row[:, None]
        tl.store(
            y + at, (out * factor[:, None]).to(y.dtype.element_ty), mask=ok[:, None] & (line < batch)[None, :]
        )
        words = later


def suits(batch: int, quarter_bits: int) -> bool:
    """Whether this kernel does it, of what trellis_gemm.py may be asked for."""
    return batch <= LARGEST_BATCH and quarter_bits <= trellis.MOST_SUMMED


def trellis_bytes_spec(
    params: trellis.Params,
    section: int,
    out_rows: int,
    cols: int,
    batch: int,
    inside: torch.dtype,
    out: torch.dtype,
    arch: str,
) -> KernelSpec:
    """The launch for a section; it leaves the sums in parts, one for each `PART_TILES` tiles across."""
    rows, q = trellis.section_rows(params, out_rows)[section], params.quarter_bits[section]
    across = trellis.tiles(cols)
    split = triton.cdiv(across, PART_TILES)
    sizes = {"rows": rows, "out_rows": out_rows, "cols": cols, "across": across}
    return KernelSpec(
        name=f"trellis_bytes{q}_{pointer_type(inside)[1:]}_{pointer_type(out)[1:]}_d{3 if batch <= 2 else 2}"
        + ("p" if split > 1 else "")
        + ("s" if params.rows else ""),
        fn=trellis_bytes_kernel,
        signature={
            "x": pointer_type(inside),
            "codes": "*u32",
            "scale": "*fp32",
            "members": "*i32",
            "y": "*fp32" if split > 1 else pointer_type(out),
            **dict.fromkeys(sizes, "i32"),
            "batch": "i32",
            "middle": "i32",
        },
        constants={
            "QUARTER": q,
            "UNIT": 1 / _DEVIATION,
            "HARDWARE": hardware_of(arch),
            "SECTIONED": bool(params.rows),
            "PDL": overlaps(arch),
            "EVEN": across % PART_TILES == 0,
            "DIGITS": 3 if batch <= 2 else 2,
            "PLACES": 4 if batch <= 2 else 2,
            # At two bits shifts are shared by more states than at the other rates: less to take off the other unit.
            "DOTS": 1 if q == 8 else 2,
            "S": 4,
            "GROUPS": PART_TILES // 16,
        },
        divisible=("x", "scale", "members", "y", *multiples(sizes)),
        num_warps=4,
        num_stages=1,
        options=overlap_options(arch) | ({} if triton.knobs.runtime.interpret else {"maxnreg": 128}),
        batch=batch,
        kind="trellis_gemm",
        # What finds room with these registers.
        grid=(min(trellis.tiles(rows), max(1, processors_of(arch) * 4 // split)), split, 1),
    )
