# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""One to 32 rows of activations times trellis codes on NVIDIA's matrix cores, codes straight to operands.

As skinny.py: a warp keeps the activations of its columns as operands and goes down the rows, sixteen at a time. Here a lane
takes two rows of a tile (trellis_rows.py), whose sixteen columns are those that two instructions of depth 32 want of it, in
another order, which the activations are put into. Up to 3 bits a weight is 1024 plus a sum of four bytes, exact as float16
bits; the centre and the 1024 are a multiple of the sum of the activations, from which the sums start. For up to four rows of
activations at such rates the matrix cores do that sum too (trellis_bytes.py).

Activations become float16 for this, each row of them scaled by a power of two for each warp so that the largest is in range:
nothing of a bfloat16 is lost but what is below 2^-38 of the largest.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.formats import trellis
from nstf.kernels.triton import trellis_bytes
from nstf.kernels.triton.gemv import launch, multiples, overlap_options, overlaps, processors_of, sum_spec
from nstf.kernels.triton.launching import hardware_of
from nstf.kernels.triton.operands import halves, over_warps, scaled
from nstf.kernels.triton.spec import KernelSpec, pointer_type, remembered
from nstf.kernels.triton.trellis import Prepared, _quantile_value
from nstf.kernels.triton.trellis_rows import aligned, lane_words, pair_words, state

LARGEST_BATCH = 32
# Of a sum of four bytes: what it is in the middle, and its standard deviation.
_CENTRE, _DEVIATION = 510.0, 148.0


@triton.jit
def _pair(low, high, base, HARDWARE: tl.constexpr):
    """Two float16 in a word: 1024 + the sum of the four bytes of each multiplied state."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            dp4a.u32.u32 a, $1, $3, $4;
            dp4a.u32.u32 b, $2, $3, $4;
            prmt.b32 $0, a, b, 0x5410;
            }""",
            "=r,r,r,r,r",
            [low * 0xA7491E23, high * 0xA7491E23, 0x01010101, base],
            tl.uint32,
            True,
            1,
        )
    else:
        return _sum(low * 0xA7491E23) | (_sum(high * 0xA7491E23) << 16)


@triton.jit
def _sum(product):
    two = (product & 0x00FF00FF) + ((product >> 8) & 0x00FF00FF)
    return ((two + (two >> 16)) & 0x7FF) + 0x6400


@triton.jit
def _bits(value):
    return value.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def _activations(x, batch, cols, begin, APART: tl.constexpr, S: tl.constexpr, N: tl.constexpr):
    """[S, 32, N] float32: eight columns of each of four tiles for each warp, in the order of the weights."""
    i = tl.arange(0, 4 * S * N)
    line = i // (32 * S) * 8 + i // 4 % 8
    k = (begin + i // 32 % S * APART + i % 4 * 16)[:, None] + tl.arange(0, 8)[None, :]
    some = tl.load(x + line[:, None] * cols + k, mask=(line < batch)[:, None] & (k < cols), other=0.0)
    some = tl.reshape(some.to(tl.float32), [N // 8, S, 8, 4, 2, 2, 2])
    return tl.reshape(tl.permute(some, (1, 4, 3, 5, 6, 0, 2)), [S, 32, N])


@triton.jit(do_not_specialize=["batch", "base", "ones"], do_not_specialize_on_alignment=["codes"])
def trellis_gemm_kernel(
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
    base,  # the bits of the float16 1024: an argument, to lie in a register
    ones,  # two of the float16 1: an argument, so that nothing is folded and all operands are made the same way
    QUARTER: tl.constexpr,
    UNIT: tl.constexpr,
    OFFSET: tl.constexpr,
    HARDWARE: tl.constexpr,
    SECTIONED: tl.constexpr,
    PDL: tl.constexpr,
    EVEN: tl.constexpr,
    N: tl.constexpr,
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

    wide = ()
    for c in tl.static_range(GROUPS):
        for d in tl.static_range(2):
            begin_x = (group0 + c) * 64 + 8 * d
            wide = wide + (_activations(x, batch, cols, begin_x, GROUPS * 64, S, N),)
    xs, back = scaled(wide, 2 * GROUPS, S, N)
    start = tl.zeros([S, 16, N], tl.float32)
    if OFFSET != 0:
        unit = halves(tl.zeros([S, 16, 16], tl.int32) + ones, tl.float16)
        for i in tl.static_range(2 * GROUPS):
            start = tl.dot(unit, xs[i], start)
    start = start * -OFFSET

    for down in range(begin, last + 1, step):
        # The last ones come again where there are none after them.
        ahead = codes + tl.minimum(down + step, last) * size
        later = ()
        acc = start
        for c in tl.static_range(GROUPS):
            bits = aligned(words[c], QUARTER, S, HARDWARE)
            for h in tl.static_range(2):
                pairs = ()
                for p in tl.static_range(8):
                    # The four pairs of eight columns of a row, then of the other row.
                    low = state(bits, p // 4 * 16 + 8 * h + p % 4 * 2, QUARTER, False, HARDWARE)
                    high = state(bits, p // 4 * 16 + 8 * h + p % 4 * 2 + 1, QUARTER, False, HARDWARE)
                    if QUARTER <= 12:
                        pair = _pair(low, high, base, HARDWARE)
                    else:
                        pair = _bits(_quantile_value(low, HARDWARE)) | (
                            _bits(_quantile_value(high, HARDWARE)) << 16
                        )
                    pairs = pairs + (pair,)
                # [32 S, pairs of a half, halves of a run, rows].
                upper = tl.join(tl.join(pairs[0], pairs[1]), tl.join(pairs[2], pairs[3]))
                lower = tl.join(tl.join(pairs[4], pairs[5]), tl.join(pairs[6], pairs[7]))
                tile = tl.reshape(tl.join(upper, lower), [S, 8, 4, 2, 2, 2])
                tile = tl.reshape(tl.permute(tile, (0, 5, 1, 4, 2, 3)), [S, 16, 16])
                acc = tl.dot(halves(tile.to(tl.int32, bitcast=True), tl.float16), xs[2 * c + h], acc)
            # Into the registers that have just become free: asked for before, they would be loaded at the end.
            later = later + (pair_words(ahead, lanes, group0, across, c, QUARTER, S, GROUPS, EVEN),)
        # A lane's rows are neighbours, which the operand has eight apart.
        m = tl.arange(0, 16)
        row = down * 16 + m % 8 * 2 + m // 8
        ok = row < rows
        if SECTIONED:
            row = tl.load(members + row, mask=ok, other=0)
        factor = tl.load(scale + row, mask=ok, other=0.0) * UNIT
        out = over_warps(acc * back[:, None, :], S, 16, N) * factor[:, None]
        line = tl.arange(0, N)
        at = (tl.program_id(1) * batch + line)[None, :] * out_rows + row[:, None]
        tl.store(y + at, out.to(y.dtype.element_ty), mask=ok[:, None] & (line < batch)[None, :])
        words = later


def suits(batch: int, dtype: torch.dtype, arch: str) -> bool:
    """Whether this kernel does it: NVIDIA's matrix instructions, and activations that float16 holds."""
    return arch.startswith("sm_") and dtype in (torch.float16, torch.bfloat16) and 1 <= batch <= LARGEST_BATCH


def _usual(batch: int, quarter_bits: int, processors: int) -> dict[str, int]:
    """From sweeps on an H200: warps of 256 columns, and the programs that find room with their registers. A program takes
    as many columns as one of trellis_bytes.py, so that all sections leave as many parts of sums."""
    if batch > 16:
        return {"N": 32, "S": 8, "GROUPS": 2, "PROGRAMS": processors, "REGISTERS": 255}
    usual = {"N": 8 if batch <= 8 else 16, "S": 4, "GROUPS": 4}
    # As many warps as have registers, which more rows of activations take, and more codes.
    held, registers = ((4, 128), (3, 168), (2, 255))[(batch > 8) + (quarter_bits > 16)]
    return usual | {"PROGRAMS": processors * held, "REGISTERS": registers}


@remembered
def trellis_gemm_specs(
    params: trellis.Params,
    out_rows: int,
    cols: int,
    batch: int,
    inside: torch.dtype,
    out: torch.dtype,
    arch: str,
    tile: dict[str, int] | None = None,
) -> list[KernelSpec]:
    """The launches for X [batch, cols] of dtype `inside`: one for each section and, when the columns take several
    programs, the sum of their parts. `tile` overrides the choice."""
    across = trellis.tiles(cols)
    split = triton.cdiv(across, trellis_bytes.PART_TILES)
    made = []
    for section, rows in enumerate(trellis.section_rows(params, out_rows)):
        q = params.quarter_bits[section]
        if tile is None and trellis_bytes.suits(batch, q):
            made.append(
                trellis_bytes.trellis_bytes_spec(params, section, out_rows, cols, batch, inside, out, arch)
            )
            continue
        chosen = _usual(batch, q, processors_of(arch)) | (tile or {})
        n, s, groups = chosen["N"], chosen["S"], chosen["GROUPS"]
        split = triton.cdiv(across, 4 * s * groups)
        registers = {} if triton.knobs.runtime.interpret else {"maxnreg": chosen["REGISTERS"]}
        sizes = {"rows": rows, "out_rows": out_rows, "cols": cols, "across": across}
        computed = q <= 12
        made.append(
            KernelSpec(
                name=f"trellis_gemm{q}_{pointer_type(inside)[1:]}_{pointer_type(out)[1:]}_n{n}s{s}g{groups}"
                + ("p" if split > 1 else "")
                + ("s" if params.rows else ""),
                fn=trellis_gemm_kernel,
                signature={
                    "x": pointer_type(inside),
                    "codes": "*u32",
                    "scale": "*fp32",
                    "members": "*i32",
                    "y": "*fp32" if split > 1 else pointer_type(out),
                    **dict.fromkeys(sizes, "i32"),
                    "batch": "i32",
                    "base": "i32",
                    "ones": "i32",
                },
                constants={
                    "QUARTER": q,
                    "UNIT": 1 / _DEVIATION if computed else 1.0,
                    "OFFSET": 1024 + _CENTRE if computed else 0.0,
                    "HARDWARE": hardware_of(arch),
                    "SECTIONED": bool(params.rows),
                    "PDL": overlaps(arch),
                    "EVEN": across % (4 * s * groups) == 0,
                    "N": n,
                    "S": s,
                    "GROUPS": groups,
                },
                divisible=("x", "scale", "members", "y", *multiples(sizes)),
                num_warps=s,
                num_stages=1,
                options=overlap_options(arch) | registers,
                batch=batch,
                kind="trellis_gemm",
                grid=(min(trellis.tiles(rows), max(1, chosen["PROGRAMS"] // split)), split, 1),
            )
        )
    return made if split == 1 else [*made, sum_spec(batch * out_rows, split, out, arch)]


def trellis_gemm(
    x: Tensor, prepared: Prepared, out: torch.dtype, arch: str, tile: dict[str, int] | None = None
) -> Tensor:
    """x [batch, cols] -> y [batch, rows] of `out`. batch: at most LARGEST_BATCH."""
    batch = len(x)
    y = torch.empty(batch, prepared.rows, dtype=out, device=x.device)
    specs = trellis_gemm_specs(prepared.params, prepared.rows, prepared.cols, batch, x.dtype, out, arch, tile)
    if len(specs) == len(prepared.sections):
        trellis_gemm_into(y, x, prepared, specs)
    else:
        parts = torch.empty(specs[-1].constants["SPLIT"], *y.shape, dtype=torch.float32, device=x.device)
        trellis_gemm_into(parts, x, prepared, specs[:-1])
        launch(specs[-1], parts, y, y.numel())
    return y


def trellis_gemm_into(parts: Tensor, x: Tensor, prepared: Prepared, specs: list[KernelSpec]) -> None:
    """The products of all sections alone, into Y or its parts, f32 [programs along the columns, batch, rows]."""
    for s, spec in zip(prepared.sections, specs, strict=True):
        members = s.codes if s.members is None else s.members
        sizes = (s.rows, prepared.rows, prepared.cols, prepared.across, len(x))
        numbers = (trellis_bytes.MIDDLE,) if "middle" in spec.signature else (0x6400, 0x3C003C00)
        launch(spec, x, s.codes.view(torch.uint32), prepared.scales, members, parts, *sizes, *numbers)
