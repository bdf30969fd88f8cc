# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""Shuffle codes times up to 64 rows of activations on NVIDIA's matrix cores, which take the looked-up bytes as they are.

A warp goes down the 256 rows of a segment for 64 columns at a time. Lane 4 g + t follows sixteen columns down the 32 rows
of group g: what it looks up at a row, four columns a word, is an operand of m16n8k32 whose rows are rows r and r + 1 of
the eight groups. So codes never change lanes, and all sums of the segment stay in registers.

    up to 4 rows     bytes: the four look-ups of two tables of two halves are four products, which the matrix cores
                     add up. Activations are whole numbers whose digits to the base of 256 take a column of B each (as in
                     trellis_bytes.py): three digits for one or two rows, two for three and four.
    5 to 64 rows     halves: levels are added, and become 16-bit floats beside a power of two (128 in bfloat16, 1024 in
                     float16) by a byte shuffle. Activations are operands as they lie; what the power of two and the
                     middle of the levels add is a multiple of their sum.

Error: bytes, of activations in digits (2^-22 and 2^-14 of the largest in a program's columns), and sums are exact; halves,
sums in float32.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.formats import shuffle
from nstf.kernels.triton.byte_product import mma_bytes
from nstf.kernels.triton.launching import (
    hardware_of,
    launch,
    multiples,
    overlap_options,
    overlaps,
    processors_of,
)
from nstf.kernels.triton.operands import columns_of, over_warps
from nstf.kernels.triton.shuffle import Prepared
from nstf.kernels.triton.shuffle_operands import (
    activations_of,
    ask_for,
    digit_of,
    grown_sums,
    joined_steps,
    number_of,
    row_levels,
    step_of,
    tables_of,
    words_at,
)
from nstf.kernels.triton.spec import KernelSpec, pointer_type
from nstf.kernels.triton.sums import sum_spec

LARGEST_BATCH = 64
# Rows of activations whose digits fit the eight columns of B.
LARGEST_BYTES = 4
GROUPS = shuffle.SEGMENT // shuffle.GROUP
# Programs of four warps that a multiprocessor holds at every rate, as the compiler deals out registers; the registers with
# which it holds one more; and the rates, in quarter bits, that would spill some thirty then (others up to ten).
_ROOM, _FOUR_A_UNIT, _SPILLING = 3, 128, (10, 14)


@triton.jit(do_not_specialize=["batch", "per"])
def shuffle_mma_kernel(
    x,  # [batch, cols]; not BYTES: in pairs, u32 [batch, 32 chunks]
    added,  # f32 [batch], the sums of the activations; BYTES: not read
    words,  # u32 [groups, chunks, 2 q, 8]
    scale,  # f32 [rows]: what a level is worth
    table,  # u8 [phases, 2, 16]
    y,  # [batch, rows], or f32 [programs along the columns, batch, rows]
    rows,
    cols,
    batch,
    per,  # chunks of a warp
    Q: tl.constexpr,
    FIRST: tl.constexpr,  # row of 32 that ends at each symbol
    COUNT: tl.constexpr,  # rows that do
    PHASES: tl.constexpr,
    HARDWARE: tl.constexpr,
    BYTES: tl.constexpr,
    HALF: tl.constexpr,  # float16, else bfloat16
    DIGITS: tl.constexpr,
    PLACES: tl.constexpr,  # columns of B for a row of activations
    NT: tl.constexpr,  # tiles of eight columns of B
    ROWS: tl.constexpr,  # of each group: 32, 16, or 8 where the bits are even
    W: tl.constexpr,  # words of a lane
    S: tl.constexpr,  # warps, side by side along the columns
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    PARTS: tl.constexpr = 32 // ROWS
    KEPT: tl.constexpr = PHASES <= 2
    STEPS: tl.constexpr = Q * ROWS // 16
    chunks = (cols + 63) // 64
    i = tl.arange(0, 32 * S)
    warp = i // 32
    g = i // 4 % 8
    t = i % 4
    part = tl.program_id(0) % PARTS
    segment = tl.program_id(0) // PARTS
    across = tl.program_id(1)
    groups = (rows + 31) // 32
    group = tl.minimum(segment * 8 + g, groups - 1)
    begin = part * STEPS
    # Lanes beyond the last group repeat it: with one group alone nothing lies before it.
    goes_on = ((g > 0) & (group > 0)) | (part > 0)
    zero = (i > chunks + (1 << 20)).to(tl.int32)
    own = tables_of(table, zero, 0)
    if KEPT and PHASES == 2:
        own = own + tables_of(table, zero, 8)
    magic = zero.to(tl.uint32, bitcast=True) + (0x64646464 if HALF else 0x43434343)
    chunk0 = (across * S + warp) * per
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Codes do not depend on the launch in front.
    ask_for(words, groups, chunk0, chunks, begin, Q, STEPS, group, t, HARDWARE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = ()
    for _ in tl.static_range(2 * ROWS * NT):
        total = total + (tl.zeros([32 * S], tl.int32 if BYTES else tl.float32),)
    # Twice the middle of the levels, 63, times the digits.
    middle = ()
    if BYTES:
        middle = (tl.zeros([32 * S], tl.int32), tl.zeros([32 * S], tl.int32))
        middle = middle + middle
        all63 = zero.to(tl.uint32, bitcast=True) + 0x3F3F3F3F
        WIDE: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
        line = g // PLACES
        which = (g % PLACES).to(tl.uint32)
        most = tl.zeros([32 * S], tl.float32)
        for turn in range(per):
            values = activations_of(x, line, (chunk0 + turn) * 64 + t * 16, batch, cols, 16, WIDE)
            for j in tl.static_range(16):
                most = tl.maximum(most, tl.abs(values[j]), propagate_nan=tl.PropagateNan.ALL)
        # As whole numbers, of which a NaN is the largest.
        exponent = tl.max(tl.reshape(most.to(tl.int32, bitcast=True) >> 23, [S, 8, 4]), axis=2)
        TOP: tl.constexpr = 22 if DIGITS == 3 else 14
        CARRIES: tl.constexpr = 0x8080 if DIGITS == 3 else 0x80
        back = tl.where(exponent == 255, float("nan"), 1.0)
        exponent = tl.maximum(exponent, TOP)
        up = ((253 + TOP - exponent) << 23).to(tl.float32, bitcast=True)
        up = tl.reshape(tl.broadcast_to(up[:, :, None], [S, 8, 4]), [32 * S])
        worth = (tl.arange(0, 8) % PLACES)[None, :]
        back *= ((exponent - (TOP - 1)) << 23).to(tl.float32, bitcast=True)
        back *= tl.where(worth < DIGITS, (1 << (8 * worth)).to(tl.float32), 0.0)

    for turn in range(per * (2 // W)):
        # With W = 2 a lane has two words of a chunk, with 1 one of either half.
        chunk = chunk0 + turn // (2 // W)
        place = t * W + (turn % (2 // W)) * 4
        if turn % (2 // W) == 0:
            ask_for(words, groups, chunk + 1, chunks, begin, Q, STEPS, group, t, HARDWARE)
        xs = ()
        if BYTES:
            values = activations_of(x, line, chunk * 64 + place * 8, batch, cols, 8 * W, WIDE)
            numbers = ()
            for j in tl.static_range(8 * W):
                numbers = numbers + (number_of(values[j], up, CARRIES),)
            for j in tl.static_range(2 * W):
                xs = xs + (
                    digit_of(
                        numbers[4 * j], numbers[4 * j + 1], numbers[4 * j + 2], numbers[4 * j + 3], which, HARDWARE
                    ),
                )  # fmt: skip
            for w in tl.static_range(W):
                middle = mma_bytes(all63, all63, all63, all63, xs[2 * w], xs[2 * w + 1], middle, S, HARDWARE)
        else:
            for n in tl.static_range(NT):
                own_line = (tl.program_id(2) * NT + n) * 8 + g
                ok = (chunk < chunks) & (own_line < batch)
                for w in tl.static_range(W):
                    at_x = (own_line * chunks + chunk) * 32 + (place + w) * 4
                    some = tl.load(x + at_x[:, None] + tl.arange(0, 4)[None, :], mask=ok[:, None], other=0)
                    xs = xs + columns_of(some, 4)
        # Beyond the last column the activations are 0.
        safe = tl.minimum(chunk, chunks - 1)
        at = words + ((group * chunks + safe) * (2 * Q) + begin) * 8 + place
        # Two steps before: of this group, or the last ones of the group above.
        before = at - tl.where(part > 0, 16, (chunks * (2 * Q) - (2 * Q - 2)) * 8)
        c = step_of(words_at(before, W, goes_on, True), W, DOT, HARDWARE)
        b = step_of(words_at(before + 8, W, goes_on, True), W, DOT, HARDWARE)
        grown = ()
        even = ()
        for s in tl.static_range(STEPS):
            a = step_of(words_at(at + s * 8, W, goes_on, False), W, DOT, HARDWARE)
            u = joined_steps(a, c, W, DOT, HARDWARE)
            if COUNT[s] > 0:
                level = row_levels(u, b, own, table, zero, FIRST[s], PHASES, KEPT, W, BYTES, HARDWARE)
                if FIRST[s] % 2 == 0:
                    even = level
                else:
                    grown = grown + grown_sums(
                        total, even, level, xs, FIRST[s] // 2, W, NT, S, BYTES, HALF, HARDWARE, magic
                    )
            if COUNT[s] > 1:
                v = joined_steps(a, b, W, DOT, HARDWARE)
                level = row_levels(v, u, own, table, zero, FIRST[s] + 1, PHASES, KEPT, W, BYTES, HARDWARE)
                if FIRST[s] % 2 == 1:
                    even = level
                else:
                    grown = grown + grown_sums(
                        total, even, level, xs, FIRST[s] // 2, W, NT, S, BYTES, HALF, HARDWARE, magic
                    )
            c = b
            b = a
        total = grown

    LINES: tl.constexpr = 8 // PLACES
    LEVELS: tl.constexpr = 5 if ROWS == 32 else 4 if ROWS == 16 else 3
    for n in tl.static_range(NT):
        if BYTES:
            # A lane has columns 2 t and 2 t + 1 of the sums.
            first, second = tl.split(tl.reshape(back, [S, 1, 4, 2]))
            first = tl.reshape(tl.broadcast_to(first, [S, 8, 4]), [32 * S])
            second = tl.reshape(tl.broadcast_to(second, [S, 8, 4]), [32 * S])
        for side in tl.static_range(1 if BYTES else 2):
            values = ()
            for r in tl.static_range(ROWS):
                if BYTES:
                    # Halves of whole numbers: exact below 2^24, and rounded once above.
                    one = (total[(r // 2 * NT + n) * 4 + r % 2 * 2] * 2 - middle[0]).to(tl.float32) * 0.5
                    two = (total[(r // 2 * NT + n) * 4 + r % 2 * 2 + 1] * 2 - middle[1]).to(tl.float32) * 0.5
                    values = values + (one * first + two * second,)
                else:
                    values = values + (total[(r // 2 * NT + n) * 4 + r % 2 * 2 + side],)
            # Side by side: the first pairs differ in the highest bit of the row.
            for level in tl.static_range(LEVELS):
                pairs = ()
                for j in tl.static_range(ROWS >> (level + 1)):
                    pairs = pairs + (tl.join(values[j], values[j + (ROWS >> (level + 1))]),)
                values = pairs
            both = tl.permute(tl.reshape(values[0], [S, 8, 4, ROWS]), (0, 1, 3, 2))
            if BYTES and LINES == 2:
                # Its two lanes as if they were warps.
                both = tl.permute(tl.reshape(both, [S, 8 * ROWS, 2, 2]), (0, 3, 1, 2))
                out = over_warps(tl.reshape(both, [2 * S, 8 * ROWS, 2]), 2 * S, 8 * ROWS, 2)
                line = tl.arange(0, 2)
            else:
                out = over_warps(tl.reshape(both, [S, 8 * ROWS, 4]), S, 8 * ROWS, 4)
                line = tl.arange(0, 4)
            inside = tl.arange(0, 8 * ROWS)
            row = segment * 256 + inside // ROWS * 32 + part * ROWS + inside % ROWS
            if not BYTES:
                line = (tl.program_id(2) * NT + n) * 8 + line * 2 + side
                # Once for all programs along the columns.
                sums = tl.load(added + line, mask=(line < batch) & (across == 0), other=0.0)
                out -= (sums * (31.5 + (1024 if HALF else 128)))[None, :]
            factor = tl.load(scale + row, mask=row < rows, other=0.0)
            ok = (row < rows)[:, None] & (line < batch)[None, :]
            where = (across * batch + line)[None, :] * rows + row[:, None]
            tl.store(y + where, (out * factor[:, None]).to(y.dtype.element_ty), mask=ok)


@dataclass(frozen=True)
class Tile:
    """What a program does: rows of each group, tiles of eight columns of B, words of a lane, warps, chunks of a warp."""

    rows: int = 16
    lines: int = 1
    words: int = 2
    warps: int = 4
    per: int = 1
    dot: bool = True
    registers: int = 0


def suits(batch: int, dtype: torch.dtype, arch: str) -> bool:
    """Whether this kernel does so many rows of activations, which are `dtype`."""
    if not arch.startswith("sm_") or batch > LARGEST_BATCH:
        return False
    return batch <= LARGEST_BYTES or dtype in (torch.float16, torch.bfloat16)


def tile_for(quarter_bits: int, rows: int, cols: int, batch: int, arch: str) -> Tile:
    """The tile of sweeps over four shapes on an H200 (docs/gpu_speed.md): one row within 10 % of the best of each, but for
    two small matrices at 3.5 and 4 bits (21 and 15 %)."""
    if batch <= LARGEST_BYTES:
        tile = Tile()
        per, programs = _along(tile, 4, 1, rows, cols, arch)
        if programs <= _ROOM * processors_of(arch):
            return replace(tile, per=per)
        # A last round of a few programs takes as long as the first.
        if quarter_bits in _SPILLING:
            return replace(tile, per=_along(tile, 8, 1, rows, cols, arch)[0])
        return replace(tile, per=per, registers=_FOUR_A_UNIT)
    lines = min(8 if quarter_bits % 2 == 0 else 4, triton.next_power_of_2(triton.cdiv(batch, 8)))
    # Sums of so many tiles take 128 registers.
    # 8 rows are a whole number of steps at even rates only.
    few_rows = lines >= 4 and quarter_bits % 2 == 0
    tile = Tile(8, lines, 1) if few_rows else Tile(16, lines, 2)
    return replace(tile, per=_along(tile, 2 if lines > 4 else 8, 2, rows, cols, arch)[0])


def _along(tile: Tile, each: int, least: int, rows: int, cols: int, arch: str) -> tuple[int, int]:
    """(chunks of a warp, programs): as many programs along the columns as make `each` for a multiprocessor at most."""
    chunks = triton.cdiv(cols, shuffle.CHUNK)
    down = triton.cdiv(rows, shuffle.SEGMENT) * (32 // tile.rows)
    across = max(1, each * processors_of(arch) // down)
    per = max(least, triton.cdiv(chunks, across * tile.warps))
    return per, down * triton.cdiv(chunks, per * tile.warps)


def shuffle_mma_specs(
    params: shuffle.Params,
    rows: int,
    cols: int,
    batch: int,
    inside: torch.dtype,
    outside: torch.dtype,
    arch: str,
    tile: Tile | None = None,
) -> list[KernelSpec]:
    """The launches: the product, and the sum of its parts where programs share the columns.

    inside: of the activations as they come, turned; outside: of the result.
    """
    q, count = params.quarter_bits, 16 // math.gcd(params.quarter_bits, 16)
    tile = tile or tile_for(q, rows, cols, batch, arch)
    few = batch <= LARGEST_BYTES
    chunks = triton.cdiv(cols, shuffle.CHUNK)
    split = triton.cdiv(chunks, tile.warps * tile.per)
    end = shuffle.ends(q)[0]
    limited = tile.registers > 0 and not triton.knobs.runtime.interpret
    digits, places = (3, 4) if batch <= 2 else (2, 2)
    sizes = {"rows": rows, "cols": cols if few else chunks * shuffle.CHUNK}
    product = KernelSpec(
        name=f"shuffle_mma{q}_{pointer_type(outside)[1:]}_{pointer_type(inside)[1:]}_{digits if few else 0}"
        f"_{tile.rows}x{tile.lines}w{tile.words}s{tile.warps}"
        + ("d" if tile.dot else "")
        + (f"r{tile.registers}" if limited else "")
        + ("_parts" if split > 1 else ""),
        fn=shuffle_mma_kernel,
        signature={
            "x": pointer_type(inside) if few else "*u32",
            "added": "*fp32",
            "words": "*u32",
            "scale": "*fp32",
            "table": "*u8",
            "y": "*fp32" if split > 1 else pointer_type(outside),
            **dict.fromkeys(sizes, "i32"),
            "batch": "i32",
            "per": "i32",
        },
        constants={
            "Q": q,
            "FIRST": tuple(next((r for r in range(32) if end[r] >= t), 0) for t in range(2 * q)),
            "COUNT": tuple(end.count(t) for t in range(2 * q)),
            "PHASES": count,
            "HARDWARE": hardware_of(arch),
            "BYTES": few,
            "HALF": inside == torch.float16,
            "DIGITS": digits,
            "PLACES": places,
            "NT": tile.lines,
            "ROWS": tile.rows,
            "W": tile.words,
            "S": tile.warps,
            "DOT": tile.dot,
            "PDL": overlaps(arch),
        },
        divisible=("x", "added", "words", "scale", "table", "y", *multiples(sizes)),
        num_warps=tile.warps,
        num_stages=1,
        options=overlap_options(arch) | ({"maxnreg": tile.registers} if limited else {}),
        batch=batch,
        kind="shuffle_gemm",
        grid=(
            triton.cdiv(rows, shuffle.SEGMENT) * (32 // tile.rows),
            split,
            1 if few else triton.cdiv(batch, 8 * tile.lines),
        ),
    )
    return [product] if split == 1 else [product, sum_spec(batch * rows, split, outside, arch)]


def shuffle_mma(x: Tensor, prepared: Prepared, specs: list[KernelSpec], dtype: torch.dtype) -> Tensor:
    """x [batch, cols] -> y [batch, rows] of `dtype`, as the specs were made for."""
    y = torch.empty(len(x), prepared.rows, dtype=dtype, device=x.device)
    if len(specs) == 1:
        shuffle_mma_into(y, x, prepared, specs[0])
    else:
        parts = torch.empty(specs[0].grid[1], *y.shape, dtype=torch.float32, device=x.device)
        shuffle_mma_into(parts, x, prepared, specs[0])
        launch(specs[1], parts, y, y.numel())
    return y


def shuffle_mma_into(parts: Tensor, x: Tensor, prepared: Prepared, spec: KernelSpec) -> None:
    """The product alone, into Y or its parts, f32 [programs along the columns, batch, rows]."""
    batch, cols = len(x), prepared.cols
    per = triton.cdiv(triton.cdiv(cols, shuffle.CHUNK), spec.grid[1] * spec.num_warps)
    x = x.contiguous()
    sums = prepared.scales  # stands for what is not read
    if not spec.constants["BYTES"]:
        sums = x.sum(dim=1, dtype=torch.float32)
        cols += -cols % shuffle.CHUNK
        x = F.pad(x, (0, cols - prepared.cols)) if cols > prepared.cols else x
        x = (x.clone() if x.data_ptr() % 16 else x).view(torch.uint32)
    words = prepared.words.view(torch.uint32)
    launch(spec, x, sums, words, prepared.scales, prepared.table, parts, prepared.rows, cols, batch, per)
