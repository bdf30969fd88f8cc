# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""One to 32 rows of activations times trellis codes on NVIDIA's matrix cores, codes straight to operands.

As skinny.py: a warp keeps the activations of its columns as operands and goes down the rows, sixteen at a time. Here a lane
takes a row of a tile, whose sixteen columns are those that two instructions of depth 32 want of it, in another order, which
the activations are put into. Up to 3 bits a weight is 1024 plus a sum of four bytes, exact as float16 bits; the centre and
the 1024 are a multiple of the sum of the activations, from which the sums start.

Activations become float16 for this, each row of them scaled by a power of two for each warp so that the largest is in range:
nothing of a bfloat16 is lost but what is below 2^-38 of the largest.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.formats import trellis
from nstf.kernels.triton.gemv import launch, multiples, overlap_options, overlaps, processors_of, sum_spec
from nstf.kernels.triton.operands import halves, over_warps, scaled
from nstf.kernels.triton.spec import KernelSpec, pointer_type
from nstf.kernels.triton.trellis import Prepared, _quantile_value, hardware_of, words_of

LARGEST_BATCH = 32
# Of a sum of four bytes: what it is in the middle, and its standard deviation.
_CENTRE, _DEVIATION = 510.0, 148.0


@triton.jit
def _funnel(low, high, shift, HARDWARE: tl.constexpr):
    """Bits `shift` to `shift` + 31 of two words."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, shift], tl.uint32, True, 1
        )
    else:
        return (low >> shift) | ((high << 1) << (31 - shift))


@triton.jit
def _second_half(word, HARDWARE: tl.constexpr):
    """Bits 8 to 23."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x4421;", "=r,r", [word], tl.uint32, True, 1)
    else:
        return (word >> 8) & 0xFFFF


@triton.jit
def _state(words, C: tl.constexpr, QUARTER: tl.constexpr, HARDWARE: tl.constexpr):
    """The state of column C of a row. Shifts of less than a byte serve several columns; a byte more is a permutation."""
    AT: tl.constexpr = ((C + 1) * QUARTER) // 4 + (16 if (4 * QUARTER) % 32 == 0 else 0)
    S: tl.constexpr = AT % 32
    BYTE: tl.constexpr = S % 16 // 8
    DOWN: tl.constexpr = S - 8 * BYTE
    word = words[AT // 32]
    if DOWN > 0:
        if S > 16:
            word = _funnel(word, words[AT // 32 + 1], tl.full([1], DOWN, tl.uint32), HARDWARE)
        else:
            word = word >> DOWN
    if BYTE == 1:
        return _second_half(word, HARDWARE)
    elif S == 16:
        return word
    else:
        return word & 0xFFFF


@triton.jit
def _sum16(state, base, HARDWARE: tl.constexpr):
    """The float16 1024 + the sum of the four bytes of the multiplied state."""
    product = state * 0xA7491E23
    if HARDWARE == 1:
        bits = tl.inline_asm_elementwise(
            "dp4a.u32.u32 $0, $1, $2, $3;", "=r,r,r,r", [product, 0x01010101, base], tl.uint32, True, 1
        )
    else:
        two = (product & 0x00FF00FF) + ((product >> 8) & 0x00FF00FF)
        bits = ((two + (two >> 16)) & 0x7FF) + 0x6400
    return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _row_words(
    codes,
    down,
    across,
    rows,
    group,
    QUARTER: tl.constexpr,
    COUNT: tl.constexpr,
    S: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """[64 S] each: the words with a row of a tile and the 16 bits before it, sixteen rows by four tiles for each warp."""
    i = tl.arange(0, 64 * S)
    r = i // (32 * S) * 8 + i // 4 % 8
    ct = (group + i // 32 % S * GROUPS) * 4 + i % 4
    tile = codes + (down * across + ct) * (2 * QUARTER)
    first = (r * (4 * QUARTER) + (64 * QUARTER - 16)) // 32
    found = ()
    for k in tl.static_range(COUNT):
        # The stream is circular.
        found = found + (
            tl.load(tile + (first + k) % (2 * QUARTER), mask=(ct < across) & (down * 16 < rows), other=0),
        )
    return found


@triton.jit
def _aligned(words, QUARTER: tl.constexpr, COUNT: tl.constexpr, S: tl.constexpr, HARDWARE: tl.constexpr):
    """Those words from the first of the 16 bits on; as they are where all rows begin at bit 16."""
    if (4 * QUARTER) % 32 == 0:
        return words
    else:
        i = tl.arange(0, 64 * S)
        r = i // (32 * S) * 8 + i // 4 % 8
        shift = ((r * (4 * QUARTER) + (64 * QUARTER - 16)) % 32).to(tl.uint32)
        found = ()
        for k in tl.static_range(COUNT):
            if k + 1 < COUNT:
                found = found + (_funnel(words[k], words[k + 1], shift, HARDWARE),)
            else:
                found = found + (words[k] >> shift,)
        return found


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
    COUNT: tl.constexpr,
    UNIT: tl.constexpr,
    OFFSET: tl.constexpr,
    HARDWARE: tl.constexpr,
    SECTIONED: tl.constexpr,
    PDL: tl.constexpr,
    N: tl.constexpr,
    S: tl.constexpr,
    GROUPS: tl.constexpr,  # of four tiles for each warp
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    group0 = tl.program_id(1) * S * GROUPS
    begin = tl.program_id(0)
    step = tl.num_programs(0)
    words = ()
    for c in tl.static_range(GROUPS):
        words = words + _row_words(codes, begin, across, rows, group0 + c, QUARTER, COUNT, S, GROUPS)
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

    for down in range(begin, (rows + 15) // 16, step):
        later = ()
        for c in tl.static_range(GROUPS):
            later = later + _row_words(
                codes, down + step, across, rows, group0 + c, QUARTER, COUNT, S, GROUPS
            )
        acc = start
        for c in tl.static_range(GROUPS):
            own = ()
            for k in tl.static_range(COUNT):
                own = own + (words[c * COUNT + k],)
            bits = _aligned(own, QUARTER, COUNT, S, HARDWARE)
            for d in tl.static_range(2):
                values = ()
                for e in tl.static_range(8):
                    state = _state(bits, 8 * d + e, QUARTER, HARDWARE)
                    if QUARTER <= 12:
                        value = _sum16(state, base, HARDWARE)
                    else:
                        value = _quantile_value(state, HARDWARE).to(tl.float16)
                    values = values + (value,)
                # [64 S, the two of a pair, pairs, halves of a run].
                low = tl.join(tl.join(values[0], values[1]), tl.join(values[2], values[3]))
                high = tl.join(tl.join(values[4], values[5]), tl.join(values[6], values[7]))
                tile = tl.reshape(tl.join(low, high), [2, S, 8, 4, 2, 2, 2])
                tile = tl.reshape(tl.permute(tile, (1, 0, 2, 6, 3, 5, 4)), [S, 16, 32])
                acc = tl.dot(tile, xs[2 * c + d], acc)
        row = down * 16 + tl.arange(0, 16)
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
    n = 8 if batch <= 8 else 16 if batch <= 16 else 32
    processors = processors_of(arch)
    # From sweeps on an H200: warps of 256 columns, and the programs that find room with their registers.
    usual = {"N": n, "S": 4, "GROUPS": 4, "PROGRAMS": processors * 4, "REGISTERS": 128}
    if n == 16:
        usual |= {"PROGRAMS": processors * 3, "REGISTERS": 168}
    elif n == 32:
        usual |= {"S": 8, "GROUPS": 2, "PROGRAMS": processors, "REGISTERS": 255}
    chosen = usual | (tile or {})
    n, s, groups = chosen["N"], chosen["S"], chosen["GROUPS"]
    split = triton.cdiv(across, 4 * s * groups)
    registers = {} if triton.knobs.runtime.interpret else {"maxnreg": chosen["REGISTERS"]}
    made = []
    for rows, q in zip(trellis.section_rows(params, out_rows), params.quarter_bits, strict=True):
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
                    "COUNT": words_of(q),
                    "UNIT": 1 / _DEVIATION if computed else 1.0,
                    "OFFSET": 1024 + _CENTRE if computed else 0.0,
                    "HARDWARE": hardware_of(arch),
                    "SECTIONED": bool(params.rows),
                    "PDL": overlaps(arch),
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
    summed = len(specs) > len(prepared.sections)
    parts = y
    if summed:
        parts = torch.empty(specs[-1].constants["SPLIT"], *y.shape, dtype=torch.float32, device=x.device)
    for s, spec in zip(prepared.sections, specs, strict=False):
        members = s.codes if s.members is None else s.members
        sizes = (s.rows, prepared.rows, prepared.cols, prepared.across, batch, 0x6400, 0x3C003C00)
        launch(spec, x, s.codes.view(torch.uint32), prepared.scales, members, parts, *sizes)
    if summed:
        launch(specs[-1], parts, y, y.numel())
    return y
