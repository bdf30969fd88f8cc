# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""y = A (B x) for up to eight rows of activations in one launch, and the same added to what another product left in y.

The programs that begin first compute t = B x, a slice of the columns for 16 of the ranks each, and store its sums; the
others have asked for their rows of A meanwhile, wait, add up the slices (in order, so equal inputs give equal bits), and
multiply. Both products are made by matrix instructions. t is kept as the sum of two numbers of A's type, scaled so that
they neither overflow nor lose digits: 16 bits of it for bfloat16, 22 for float16. corrected.py takes the same steps.

t, its slices and the counters stay in the second-level cache: rank x rows of activations x 4 bytes x at most 16 slices.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.arrival import arrive, generation, wait_for
from nstf.kernels.triton.gemv import launch, multiples, overlap_options, overlaps
from nstf.kernels.triton.launching import handed_on
from nstf.kernels.triton.operands import over_warps
from nstf.kernels.triton.spec import KernelSpec, pointer_type, remembered

LARGEST_BATCH = 8
LARGEST_RANK = 256
_SLICES = 16
_WARPS = 4
APART = tl.constexpr(16)  # numbers from one counter to the next: a line of the cache each


@triton.jit
def _by_eight(
    p, first, rows, cols, begin, STRIDE: tl.constexpr, S: tl.constexpr, H: tl.constexpr, EIGHTS: tl.constexpr
):
    """[32 S H, 8] numbers of 8 H rows from `first` on and 32 columns of each warp, STRIDE apart: a lane's in a row."""
    i = tl.arange(0, 32 * S * H)
    row = first + i // (32 * S) * 8 + i // 4 % 8
    k = begin + i // 32 % S * STRIDE + i % 4 * 8
    at = (row * cols + k)[:, None] + tl.arange(0, 8)[None, :]
    if EIGHTS:
        ok = ((row < rows) & (k < cols))[:, None]
    else:
        ok = (row < rows)[:, None] & (k[:, None] + tl.arange(0, 8)[None, :] < cols)
    return tl.load(p + at, mask=ok, other=0.0)


@triton.jit
def inner_piece(
    x,  # [batch, cols]
    b,  # [rank, cols]
    inner,  # f32 [SLICES, B, R]
    batch,
    cols,
    rank,
    piece,
    R: tl.constexpr,
    B: tl.constexpr,
    N: tl.constexpr,
    S: tl.constexpr,
    STEPS: tl.constexpr,  # of 32 columns for each warp in a slice
    AT_ONCE: tl.constexpr,  # steps whose loads are under way together
    EIGHTS: tl.constexpr,  # columns come in eights
    WIDE: tl.constexpr,  # multiply in float32
    PRECISION: tl.constexpr,
):
    """A piece of t: 16 of the ranks, one slice of the columns."""
    first = piece % (R // 16) * 16
    part = piece // (R // 16)
    begin = part * (S * STEPS * 32)
    acc = tl.zeros([S, 16, N], tl.float32)
    for step in range(0, STEPS, AT_ONCE):
        left = ()
        right = ()
        for i in tl.static_range(AT_ONCE):
            at = begin + (step + i) * 32
            # In the order of operands.py: a lane's columns are those that it loads, for either side alike.
            some = _by_eight(b, first, rank, cols, at, STEPS * 32, S, 2, EIGHTS)
            more = _by_eight(x, 0, batch, cols, at, STEPS * 32, S, N // 8, EIGHTS)
            if WIDE:
                some = some.to(tl.float32)
                more = more.to(tl.float32)
            some = tl.permute(tl.reshape(some, [2, S, 8, 4, 2, 2, 2]), (1, 0, 2, 4, 3, 5, 6))
            more = tl.permute(tl.reshape(more, [N // 8, S, 8, 4, 2, 2, 2]), (1, 4, 3, 5, 6, 0, 2))
            left = left + (tl.reshape(some, [S, 16, 32]),)  # noqa: RUF005 (Triton adds tuples)
            right = right + (tl.reshape(more, [S, 32, N]),)  # noqa: RUF005
        for i in tl.static_range(AT_ONCE):
            acc = tl.dot(left[i], right[i], acc, input_precision=PRECISION)
    total = over_warps(acc, S, 16, N)
    n = tl.arange(0, N)
    at = (part * B + n)[None, :] * R + (first + tl.arange(0, 16))[:, None]
    tl.store(inner + at, total, mask=(n < batch)[None, :])


@triton.jit
def summed_inner(inner, batch, R: tl.constexpr, B: tl.constexpr, N: tl.constexpr, SLICES: tl.constexpr):
    """t [N, R], f32."""
    n = tl.arange(0, N)[:, None]
    r = tl.arange(0, R)[None, :]
    t = tl.zeros([N, R], tl.float32)
    for part in tl.static_range(SLICES):
        # Past the first-level cache, which knows nothing of other multiprocessors.
        t += tl.load(inner + (part * B + n) * R + r, mask=n < batch, other=0.0, cache_modifier=".cg")
    return t


@triton.jit
def outer_tile(tile, t, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """A's rows [TALL, R] times t [N, R] -> f32 [TALL, N]."""
    if WIDE:
        return tl.dot(tile.to(tl.float32), tl.trans(t), input_precision=PRECISION)
    else:
        exponent = tl.maximum(tl.max(tl.abs(t), axis=1).to(tl.int32, bitcast=True) >> 23, 15)
        t *= ((268 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
        high = t.to(tile.dtype)
        low = (t - high.to(tl.float32)).to(tile.dtype)
        acc = tl.dot(tile, tl.trans(low), input_precision=PRECISION)
        acc = tl.dot(tile, tl.trans(high), acc, input_precision=PRECISION)
        return acc * ((exponent - 14) << 23).to(tl.float32, bitcast=True)[None, :]


@triton.jit
def rows_of(a, row, rows, rank, R: tl.constexpr):
    """[TALL, R] of A [rows, rank]."""
    r = tl.arange(0, R)
    inside = (row < rows)[:, None] & (r < rank)[None, :]
    return tl.load(a + row[:, None] * rank + r[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["batch"])
def low_rank_kernel(
    x,  # [batch, cols]
    a,  # [rows, rank]
    b,  # [rank, cols]
    inner,  # f32 [SLICES, B, R]
    counters,  # i64: programs that began, and those that computed their pieces of t, over all launches
    y,  # [batch, rows]
    batch,
    rows,
    cols,
    rank,
    ADD: tl.constexpr,  # to what is in y
    GENERATION: tl.constexpr,
    PDL: tl.constexpr,
    FIRST: tl.constexpr,  # programs that compute t
    TALL: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    N: tl.constexpr,
    S: tl.constexpr,
    SLICES: tl.constexpr,
    STEPS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EIGHTS: tl.constexpr,
    WIDE_INNER: tl.constexpr,
    WIDE_OUTER: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    ticket = tl.atomic_add(counters, 1, sem="relaxed")
    # Not before: the next launch's numbers are higher than all of this one's.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    before = ticket // tl.num_programs(0)
    mine = (ticket - before * tl.num_programs(0)).to(tl.int32)
    if mine < FIRST:
        if PDL:
            tl.extra.cuda.gdc_wait()
        inner_piece(
            x, b, inner, batch, cols, rank, mine, R, B, N, S, STEPS, AT_ONCE, EIGHTS, WIDE_INNER, EXACT
        )
        arrive(counters + APART, GENERATION, "release")
    else:
        row = (mine - FIRST) * TALL + tl.arange(0, TALL)
        tile = rows_of(a, row, rows, rank, R)
        if PDL:
            tl.extra.cuda.gdc_wait()
        wait_for(counters + APART, (before + 1) * FIRST, GENERATION)
        t = summed_inner(inner, batch, R, B, N, SLICES)
        out = outer_tile(tile, t, WIDE_OUTER, PRECISION)
        n = tl.arange(0, N)
        at = y + n[None, :] * rows + row[:, None]
        ok = (row < rows)[:, None] & (n < batch)[None, :]
        if ADD:
            out += tl.load(at, mask=ok, other=0.0).to(tl.float32)
        tl.store(at, out.to(y.dtype.element_ty), mask=ok)


def inner_constants(
    cols: int, rank: int, batch: int, dtype: torch.dtype, factors: torch.dtype, warps: int, arch: str
) -> dict[str, object]:
    """What `inner_piece` and `outer_tile` have to know, by the names of their arguments."""
    interpreted = triton.knobs.runtime.interpret
    nvidia = arch.startswith("sm_")
    wide = interpreted or torch.float32 in (dtype, factors)
    r = max(16, triton.next_power_of_2(rank))
    # Whoever multiplies by t adds up the slices: fewer for more ranks.
    steps = triton.cdiv(cols, (_SLICES if r < 128 else _SLICES // 2) * warps * 32)
    at_once = min(steps, 4)
    steps = triton.cdiv(steps, at_once) * at_once
    return {
        "R": r,
        "B": triton.next_power_of_2(batch),
        "N": 8 if nvidia else 16,
        "S": warps,
        "SLICES": triton.cdiv(cols, warps * 32 * steps),
        "STEPS": steps,
        "AT_ONCE": at_once,
        "EIGHTS": cols % 8 == 0,
        "WIDE_INNER": wide or dtype != factors,
        "WIDE_OUTER": wide,
        # Of B x and of A t. Two kinds of 16-bit numbers are exact in TF32.
        "EXACT": "ieee" if interpreted or not nvidia else "tf32x3" if wide else "tf32",
        "PRECISION": "tf32x3" if nvidia and not interpreted else "ieee",
    }


@remembered
def low_rank_specs(
    rows: int,
    cols: int,
    rank: int,
    batch: int,
    dtype: torch.dtype,
    factors: torch.dtype,
    add: bool,
    arch: str,
) -> list[KernelSpec]:
    """The launch for X [batch, cols] of `dtype`, with A and B of `factors`."""
    made = inner_constants(cols, rank, batch, dtype, factors, _WARPS, arch)
    r, slices = int(str(made["R"])), int(str(made["SLICES"]))
    tall = tall_for(rows, r)
    first = r // 16 * slices
    sizes = {"rows": rows, "cols": cols, "rank": rank}
    return [
        KernelSpec(
            name=f"low_rank_{pointer_type(dtype)[1:]}_{pointer_type(factors)[1:]}_b{made['B']}r{r}s{slices}x{made['STEPS']}"
            f"t{tall}" + ("a" if add else ""),
            fn=low_rank_kernel,
            signature={
                "x": pointer_type(dtype),
                "a": pointer_type(factors),
                "b": pointer_type(factors),
                "inner": "*fp32",
                "counters": "*i64",
                "y": pointer_type(dtype),
                "batch": "i32",
                **dict.fromkeys(sizes, "i32"),
            },
            constants={
                "ADD": add,
                "GENERATION": generation(arch),
                "PDL": overlaps(arch),
                "FIRST": first,
                "TALL": tall,
                **made,
            },
            divisible=("x", "a", "b", "inner", "counters", "y", *multiples(sizes)),
            num_warps=_WARPS,
            num_stages=1,
            options=overlap_options(arch),
            batch=batch,
            kind="low_rank",
            grid=(first + triton.cdiv(rows, tall), 1, 1),
        )
    ]


def tall_for(rows: int, r: int) -> int:
    """Rows of A for a program: as many as registers hold beside the rest, where there are enough for all multiprocessors."""
    return max(16, min(128 if rows >= 8192 else 64, 8192 // r))


def low_rank(x: Tensor, a: Tensor, b: Tensor, arch: str, into: Tensor | None = None) -> Tensor:
    """x [batch, cols] -> A (B x) [batch, rows] in x's dtype; added to `into`, in place, when that is given.

    a: [rows, rank], b: [rank, cols], both of one floating dtype; rank at most LARGEST_RANK, batch LARGEST_BATCH.
    """
    batch, cols = x.shape
    rows, rank = a.shape
    (spec,) = low_rank_specs(rows, cols, rank, batch, x.dtype, a.dtype, into is not None, arch)
    y = torch.empty(batch, rows, dtype=x.dtype, device=x.device) if into is None else into
    made = spec.constants
    inner, counters = meeting(x, spec, made["SLICES"] * made["B"] * made["R"])
    launch(spec, x, a, b, inner, counters, y, batch, rows, cols, rank)
    return y


def meeting(x: Tensor, spec: KernelSpec, size: int) -> tuple[Tensor, Tensor]:
    """Room for the slices of t, and the counters, which launches of one grid alone may share."""
    inner = torch.empty(size, dtype=torch.float32, device=x.device)
    kernel = f"{spec.name} {spec.grid}"
    return inner, handed_on(x.device, 3 * APART.value, torch.int64, kernel)
