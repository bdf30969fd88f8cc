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
from nstf.kernels.triton.trellis import Prepared, _quantile_value, hardware_of

LARGEST_BATCH = 32
# Of a sum of four bytes: what it is in the middle, and its standard deviation.
_CENTRE, _DEVIATION = 510.0, 148.0


@triton.jit
def _funnel(low, high, SHIFT: tl.constexpr, HARDWARE: tl.constexpr):
    """Bits SHIFT to SHIFT + 31 of two words."""
    if HARDWARE == 1:
        # Written out, so that a shift of one word is shared by the states in it, not merged into a mask for each.
        shift = tl.full([1], SHIFT, tl.uint32)
        return tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, shift], tl.uint32, True, 1
        )
    else:
        return (low >> SHIFT) | (high << (32 - SHIFT))


@triton.jit
def _half(word, BYTE: tl.constexpr, HARDWARE: tl.constexpr):
    """Bits 8 BYTE to 8 BYTE + 15."""
    if BYTE == 1:
        if HARDWARE == 1:
            return tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, 0, 0x4421;", "=r,r", [word], tl.uint32, True, 1
            )
        else:
            return (word >> 8) & 0xFFFF
    elif BYTE == 2:
        return word >> 16
    else:
        return word & 0xFFFF


@triton.jit
def _state(words, P: tl.constexpr, QUARTER: tl.constexpr, HARDWARE: tl.constexpr):
    """The state of place P of two rows. A shift serves the states at its bit and one and two bytes above."""
    OFF: tl.constexpr = 16 if QUARTER % 4 == 0 else 0
    AT: tl.constexpr = ((P + 1) * QUARTER) // 4
    S: tl.constexpr = (AT + OFF) % 32
    if S % 8 == 0 and S < 24:
        return _half(words[(AT + OFF) // 32], S // 8, HARDWARE)
    else:
        FROM: tl.constexpr = AT // 24 * 24 + AT % 8 + OFF
        LAST: tl.constexpr = FROM // 32 + 1 == len(words)
        low = words[FROM // 32]
        high = low if LAST else words[FROM // 32 + (0 if LAST else 1)]
        return _half(_funnel(low, high, FROM % 32, HARDWARE), (AT + OFF - FROM) // 8, HARDWARE)


@triton.jit
def _sum(state, base, SAD: tl.constexpr, HARDWARE: tl.constexpr):
    """base + the sum of the four bytes of the multiplied state."""
    product = state * 0xA7491E23
    if HARDWARE == 1:
        # The two ways to sum bytes are done by different parts of a multiprocessor.
        if SAD:
            return tl.inline_asm_elementwise(
                "vabsdiff4.u32.u32.u32.add $0, $1, $2, $3;", "=r,r,r,r", [product, 0, base], tl.uint32, True, 1
            )
        else:
            return tl.inline_asm_elementwise(
                "dp4a.u32.u32 $0, $1, $2, $3;", "=r,r,r,r", [product, 0x01010101, base], tl.uint32, True, 1
            )
    else:
        two = (product & 0x00FF00FF) + ((product >> 8) & 0x00FF00FF)
        return ((two + (two >> 16)) & 0x7FF) + base


@triton.jit
def _pair(low, high, PACK: tl.constexpr, HARDWARE: tl.constexpr):
    """Two float16 in the low halves of words, as one word."""
    if HARDWARE == 1:
        if PACK:
            # low + (0, high), exact.
            return tl.inline_asm_elementwise(
                """{
                .reg .f16 l, h;
                .reg .b32 both, c;
                mov.b32 {l, h}, $2;
                mov.b32 both, {l, l};
                mov.b32 c, 0x3C000000;
                fma.rn.f16x2 $0, both, c, $1;
                }""",
                "=r,r,r",
                [low, high],
                tl.uint32,
                True,
                1,
            )
        else:
            return tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [low, high], tl.uint32, True, 1
            )
    else:
        return low | (high << 16)


@triton.jit
def _lane_words(codes, group, across, QUARTER: tl.constexpr, S: tl.constexpr, GROUPS: tl.constexpr):
    """[32 S] where the words of two neighbouring rows of a tile begin for each lane: the first, the others, the last."""
    i = tl.arange(0, 32 * S)
    tile = ((group + i // 32 * GROUPS) * 4 + i % 4) * (2 * QUARTER)
    first = (i // 4 % 8 * (8 * QUARTER) + (64 * QUARTER - 16)) // 32
    COUNT: tl.constexpr = (8 * QUARTER + 16 + 31 + (16 if QUARTER % 4 == 0 else 16 if QUARTER % 2 == 0 else 24)) // 32
    # The stream is circular.
    return tile + first % (2 * QUARTER), tile + (first + 1) % (2 * QUARTER), tile + (first + COUNT - 1) % (2 * QUARTER)


@triton.jit
def _load(at, ct, across, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=ct < across, other=0)


@triton.jit
def _pair_words(
    codes, lanes, group, across, C: tl.constexpr, QUARTER: tl.constexpr, S: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr,
):
    """[32 S] each: the words with two rows of a tile and the 16 bits before them, sixteen rows by four tiles for each warp."""
    i = tl.arange(0, 32 * S)
    ct = (group + C + i // 32 * GROUPS) * 4 + i % 4
    ON: tl.constexpr = C * 8 * QUARTER
    found = (_load(codes + lanes[0] + ON, ct, across, EVEN),)
    if QUARTER % 8 == 0:
        wide = (codes + lanes[1]).to(tl.pointer_type(tl.uint64)) + ON // 2
        for k in tl.static_range(QUARTER // 8):
            two = _load(wide + k, ct, across, EVEN)
            found = found + (two.to(tl.uint32), (two >> 32).to(tl.uint32))
    elif QUARTER % 4 == 0:
        for k in tl.static_range(QUARTER // 4):
            found = found + (_load(codes + lanes[1] + (ON + k), ct, across, EVEN),)
    else:
        COUNT: tl.constexpr = (8 * QUARTER + 16 + 31 + (16 if QUARTER % 2 == 0 else 24)) // 32
        for k in tl.static_range(COUNT - 2):
            found = found + (_load(codes + lanes[1] + (ON + k), ct, across, EVEN),)
        found = found + (_load(codes + lanes[2] + ON, ct, across, EVEN),)
    return found


@triton.jit
def _aligned(words, QUARTER: tl.constexpr, S: tl.constexpr, HARDWARE: tl.constexpr):
    """Those words from the first of the 16 bits on; as they are where all pairs of rows begin at bit 16."""
    if QUARTER % 4 == 0:
        return words
    else:
        shift = ((tl.arange(0, 32 * S) // 4 % 8 * (8 * QUARTER) + (64 * QUARTER - 16)) % 32).to(tl.uint32)
        found = ()
        for k in tl.static_range((8 * QUARTER + 16 + 31) // 32):
            if k + 1 < len(words):
                if HARDWARE == 1:
                    word = tl.inline_asm_elementwise(
                        "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [words[k], words[k + 1], shift], tl.uint32, True, 1
                    )
                else:
                    word = (words[k] >> shift) | ((words[k + 1] << 1) << (31 - shift))
                found = found + (word,)
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
    UNIT: tl.constexpr,
    OFFSET: tl.constexpr,
    HARDWARE: tl.constexpr,
    SECTIONED: tl.constexpr,
    PDL: tl.constexpr,
    EVEN: tl.constexpr,
    SADS: tl.constexpr,
    PACKS: tl.constexpr,
    N: tl.constexpr,
    S: tl.constexpr,
    GROUPS: tl.constexpr,  # of four tiles for each warp
    DOWN: tl.constexpr,  # tiles
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    group0 = tl.program_id(1) * S * GROUPS
    begin = tl.program_id(0) * DOWN
    step = tl.num_programs(0) * DOWN
    last = (rows + 15) // 16 - 1
    size = across * (2 * QUARTER)
    lanes = _lane_words(codes, group0, across, QUARTER, S, GROUPS)
    words = ()
    for d in tl.static_range(DOWN):
        base_d = codes + tl.minimum(begin + d, last) * size
        for c in tl.static_range(GROUPS):
            words = words + (_pair_words(base_d, lanes, group0, across, c, QUARTER, S, GROUPS, EVEN),)
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
    if DOWN == 2:
        start = tl.reshape(tl.permute(tl.join(start, start), (0, 3, 1, 2)), [S, 32, N])

    for down in range(begin, last + 1, step):
        later = ()
        for d in tl.static_range(DOWN):
            # The last ones come again where there are none after them.
            base_d = codes + tl.minimum(down + step + d, last) * size
            for c in tl.static_range(GROUPS):
                later = later + (_pair_words(base_d, lanes, group0, across, c, QUARTER, S, GROUPS, EVEN),)
        acc = start
        for c in tl.static_range(GROUPS):
            for h in tl.static_range(2):
                rows_of = ()
                for d in tl.static_range(DOWN):
                    bits = _aligned(words[d * GROUPS + c], QUARTER, S, HARDWARE)
                    for r in tl.static_range(2):
                        pairs = ()
                        for e in tl.static_range(4):
                            low = _state(bits, 16 * r + 8 * h + 2 * e, QUARTER, HARDWARE)
                            high = _state(bits, 16 * r + 8 * h + 2 * e + 1, QUARTER, HARDWARE)
                            if QUARTER <= 12:
                                low = _sum(low, base, ((SADS >> (8 * h + 2 * e)) & 1) == 1, HARDWARE)
                                high = _sum(high, base, ((SADS >> (8 * h + 2 * e + 1)) & 1) == 1, HARDWARE)
                                both = _pair(low, high, ((PACKS >> e) & 1) == 1, HARDWARE)
                            else:
                                low = _quantile_value(low, HARDWARE).to(tl.float16).to(tl.uint16, bitcast=True)
                                high = _quantile_value(high, HARDWARE).to(tl.float16).to(tl.uint16, bitcast=True)
                                both = low.to(tl.uint32) | (high.to(tl.uint32) << 16)
                            pairs = pairs + (both,)
                        # [32 S, pairs of a half, halves of a run].
                        rows_of = rows_of + (tl.join(tl.join(pairs[0], pairs[1]), tl.join(pairs[2], pairs[3])),)
                tile = tl.join(rows_of[0], rows_of[1])
                if DOWN == 2:
                    tile = tl.join(tile, tl.join(rows_of[2], rows_of[3]))
                tile = tl.reshape(tile, [S, 8, 4, 2, 2, 2, DOWN])
                tile = tl.reshape(tl.permute(tile, (0, 6, 5, 1, 4, 2, 3)), [S, 16 * DOWN, 16])
                acc = tl.dot(halves(tile.to(tl.int32, bitcast=True), tl.float16), xs[2 * c + h], acc)
        # A lane's rows are neighbours, which the operand has eight apart.
        m = tl.arange(0, 16 * DOWN)
        row = (down + m // 16) * 16 + m % 8 * 2 + m // 8 % 2
        ok = row < rows
        if SECTIONED:
            row = tl.load(members + row, mask=ok, other=0)
        factor = tl.load(scale + row, mask=ok, other=0.0) * UNIT
        out = over_warps(acc * back[:, None, :], S, 16 * DOWN, N) * factor[:, None]
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
                    "UNIT": 1 / _DEVIATION if computed else 1.0,
                    "OFFSET": 1024 + _CENTRE if computed else 0.0,
                    "HARDWARE": hardware_of(arch),
                    "SECTIONED": bool(params.rows),
                    "PDL": overlaps(arch),
                    "EVEN": across % (4 * s * groups) == 0,
                    "SADS": chosen.get("SADS", 0),
                    "PACKS": chosen.get("PACKS", 0),
                    "N": n,
                    "S": s,
                    "GROUPS": groups,
                    "DOWN": chosen.get("DOWN", 1),
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
