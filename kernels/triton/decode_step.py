# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated"
# Triton adds tuples; it does not unpack them into one.
# ruff: noqa: RUF005
"""What a decoder does between its matrices, in three kernels: norms, attention with one query, the gate of the MLP.

The definition is kernels/torch/decode_step.py. All of them read the position from device memory and have a grid that does
not depend on it, so that a captured graph is right for every token.

Attention (flash-decoding, Dao et al. 2023): the keys of a sequence and head are dealt, a tile at a time, to several
programs; each turns and norms the queries anew, which costs less than a launch. The one that arrives last adds up the parts,
in the order of the programs, so that results do not change from run to run. Ways to memory that wait for each other are what
a short context costs, so the first tile, angles and gains are on their way before the launch in front has ended.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.torch.decode_step import Cache, Heads
from nstf.kernels.triton.architecture import architecture
from nstf.kernels.triton.arrival import arrive, generation
from nstf.kernels.triton.gemv import launch, multiples, overlap_options, overlaps, processors_of
from nstf.kernels.triton.spec import KernelSpec, pointer_type, remembered
from nstf.kernels.triton.sums import gated
from nstf.kernels.triton.turning import angles_of, gains_of, halves_of, turn

MOST_SPLITS = 32


@triton.jit
def added(value, more, h, out_gain, at, k, ok, size, epsilon, OUT_GAIN: tl.constexpr):
    """A row of the residual stream, value f32 [BLOCK], and what a block gives, more f32 [BLOCK] (normed first by OUT_GAIN):
    their sum, which is stored at h + at."""
    if OUT_GAIN:
        more *= tl.rsqrt(tl.sum(more * more) / size + epsilon)
        more *= tl.load(out_gain + k, mask=ok, other=0.0)
    value += more
    tl.store(h + at, value, mask=ok)
    return value


@triton.jit
def norm_kernel(
    h,  # f32 [batch, size]
    y,  # [batch, size]
    gain,  # f32 [size]
    out_gain,  # f32 [size]
    x,  # [batch, size]
    size,
    epsilon,
    ADD: tl.constexpr,
    OUT_GAIN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    k = tl.arange(0, BLOCK)
    ok = k < size
    at = tl.program_id(0).to(tl.int64) * size + k
    strength = tl.load(gain + k, mask=ok, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    value = tl.load(h + at, mask=ok, other=0.0)
    if ADD:
        more = tl.load(y + at, mask=ok, other=0.0).to(tl.float32)
        value = added(value, more, h, out_gain, at, k, ok, size, epsilon, OUT_GAIN)
    value *= tl.rsqrt(tl.sum(value * value) / size + epsilon)
    value *= strength
    tl.store(x + at, value.to(x.dtype.element_ty), mask=ok)


@triton.jit
def gate_kernel(x, y, size, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """y [batch, size] = act(x[:, :size]) x[:, size:]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = k < size
    line = tl.program_id(0).to(tl.int64) * size  # long prompts have more than 2^31 numbers
    g = tl.load(x + 2 * line + k, mask=ok, other=0.0).to(tl.float32)
    u = tl.load(x + 2 * line + size + k, mask=ok, other=0.0).to(tl.float32)
    tl.store(y + line + k, gated(g, u, GELU).to(y.dtype.element_ty), mask=ok)


@triton.jit
def _tile_of(keys, values, lane, first, at, n, d, d_ok, SIZE: tl.constexpr):
    """Keys and values [TILE, WIDTH] of the positions first + n before `at`, zeros for others."""
    k = first + n
    place = (lane + k)[:, None] * SIZE + d[None, :]
    ok = (k < at)[:, None] & d_ok[None, :]
    return tl.load(keys + place, mask=ok, other=0.0), tl.load(values + place, mask=ok, other=0.0)


@triton.jit
def _seen(q, some, more, known, top, total, acc, WIDE: tl.constexpr):
    """Top, total and acc with the keys `some` and the values `more` of the positions that are `known`."""
    if WIDE:
        some = some.to(tl.float32)
        more = more.to(tl.float32)
    scores = tl.dot(q, tl.trans(some), input_precision="ieee")
    scores = tl.where(known[None, :], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp(scores - higher[:, None])
    fade = tl.exp(top - higher)
    total = total * fade + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(more.dtype), more, acc * fade[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def _part_of(block, g, d, wanted, there, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Top, total and acc of another program, if it is there: past the first-level cache, which knows nothing of other
    multiprocessors."""
    ends = block + ROWS * WIDTH + g
    top = tl.load(ends, mask=there, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(ends + ROWS, mask=there, other=0.0, cache_modifier=".cg")
    place = block + g[:, None] * WIDTH + d[None, :]
    return top, total, tl.load(place, mask=wanted & there, other=0.0, cache_modifier=".cg")


@triton.jit
def attend_kernel(
    qkv,  # [batch, (heads + 2 KV) SIZE]
    bias,  # f32 [(heads + 2 KV) SIZE]
    q_gain,  # f32 [SIZE]
    k_gain,
    cos,  # f32 [capacity, SIZE / 2]
    sin,
    position,  # i64 [1], or [batch, 2]: where each token goes, and which sequence of the cache it belongs to
    keys,  # [sequences, KV, capacity, SIZE]
    values,
    parts,  # f32 [batch KV, MOST, ROWS (WIDTH + 2)]
    counters,  # i32 [batch KV]: zero between launches
    out,  # [batch, heads SIZE]
    capacity,
    scale,
    epsilon,
    KV: tl.constexpr,
    GROUP: tl.constexpr,  # queries of a key
    SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    MOST: tl.constexpr,  # programs that share the keys of a head, at most
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    WIDE: tl.constexpr,  # multiply in float32: the interpreter has no bfloat16
    ROWS: tl.constexpr,  # GROUP, filled up for the matrix cores
    WIDTH: tl.constexpr,  # SIZE likewise
    TILE: tl.constexpr,
    EACH: tl.constexpr,  # tiles of a program before another one helps
    TOGETHER: tl.constexpr,  # parts that are read at a time
    EARLY: tl.constexpr,  # whether registers hold the first tile from the start
    GENERATION: tl.constexpr,
    SLOTS: tl.constexpr,  # each token has its own position and sequence
    PDL: tl.constexpr,
):
    DTYPE: tl.constexpr = keys.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0)
    split = tl.program_id(1)
    line = pair // KV
    head = pair % KV
    if SLOTS:
        at = tl.load(position + 2 * line)
        sequence = tl.load(position + 2 * line + 1)
    else:
        at = tl.load(position)
        sequence = line.to(tl.int64)
    start = tl.zeros([], tl.int64)
    if WINDOW > 0:
        start = tl.maximum(at - (WINDOW - 1), 0)
    active = tl.maximum(1, tl.minimum(tl.num_programs(1), (at - start + EACH * TILE - 1) // (EACH * TILE)))
    if split >= active:
        return
    d = tl.arange(0, WIDTH)
    d_ok = d < SIZE
    g = tl.arange(0, ROWS)
    n = tl.arange(0, TILE)
    one = tl.arange(0, 1)
    lane = (sequence * KV + head) * capacity
    tile = start + split * TILE
    # The position, and keys and values before it, were written before the last launch that overlaps no other: the first
    # tile is on its way while the launch in front ends.
    if EARLY:
        some, more = _tile_of(keys, values, lane, tile, at, n, d, d_ok, SIZE)
    c, s = angles_of(cos, sin, at, d, SIZE)
    q_mine, q_theirs = gains_of(q_gain, d, SIZE, NORM)
    k_mine, k_theirs = gains_of(k_gain, d, SIZE, NORM)
    if PDL:
        tl.extra.cuda.gdc_wait()
    here = qkv + line * ((GROUP + 2) * KV * SIZE)
    queries = head * GROUP + tl.minimum(g, GROUP - 1)
    # All that is read of the new token is asked for before any of it is used.
    a, b = halves_of(here, bias, 0, queries, d, (g >= 0)[:, None], SIZE, BIAS)
    # The first program has the new token: it need not come back from the cache.
    is_first = split == 0
    k_a, k_b = halves_of(here, bias, GROUP * KV * SIZE, head + one, d, is_first, SIZE, BIAS)
    v_at = (GROUP + 1) * KV * SIZE + head * SIZE + d
    v_new = tl.load(here + v_at, mask=d_ok & is_first, other=0.0).to(tl.float32)
    if BIAS:
        v_new += tl.load(bias + v_at, mask=d_ok & is_first, other=0.0)
    q = turn(a, b, c, s, q_mine, q_theirs, epsilon, SIZE, NORM) * scale
    k_new = turn(k_a, k_b, c, s, k_mine, k_theirs, epsilon, SIZE, NORM).to(DTYPE)
    v_new = v_new.to(DTYPE)
    tl.store(keys + (lane + at) * SIZE + d[None, :], k_new, mask=d_ok[None, :] & is_first)
    tl.store(values + (lane + at) * SIZE + d, v_new, mask=d_ok & is_first)
    q = q.to(DTYPE)
    top = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), axis=1)
    top = tl.where(is_first, top, float("-inf"))
    total = tl.where(is_first, 1.0, 0.0) + tl.zeros([ROWS], tl.float32)
    # Zeros where the new token is not this program's.
    acc = tl.zeros([ROWS, WIDTH], tl.float32) + v_new.to(tl.float32)[None, :]
    if WIDE:
        q = q.to(tl.float32)
    if EARLY:
        top, total, acc = _seen(q, some, more, tile + n < at, top, total, acc, WIDE)
        tile += active * TILE
    for following in range(tile, at, active * TILE):
        some, more = _tile_of(keys, values, lane, following, at, n, d, d_ok, SIZE)
        top, total, acc = _seen(q, some, more, following + n < at, top, total, acc, WIDE)

    into = out + line * (GROUP * KV * SIZE) + (head * GROUP + g)[:, None] * SIZE + d[None, :]
    wanted = (g < GROUP)[:, None] & d_ok[None, :]
    if active == 1:
        tl.store(into, (acc / total[:, None]).to(out.dtype.element_ty), mask=wanted)
    else:
        each = ROWS * (WIDTH + 2)
        lines = parts + pair * MOST * each
        block = lines + split * each
        tl.store(block + g[:, None] * WIDTH + d[None, :], acc, mask=wanted)
        tl.store(block + ROWS * WIDTH + g, top)
        tl.store(block + ROWS * (WIDTH + 1) + g, total)
        arrived = arrive(counters + pair, GENERATION, "acq_rel")
        if arrived == active - 1:
            tl.debug_barrier()
            acc = tl.zeros([ROWS, WIDTH], tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            top = tl.full([ROWS], float("-inf"), tl.float32)
            for i in range(0, active, TOGETHER):
                # All are asked for before the first is used.
                theirs = ()
                for j in tl.static_range(TOGETHER):
                    part = lines + (i + j) * each
                    theirs = theirs + (_part_of(part, g, d, wanted, i + j < active, ROWS, WIDTH),)
                for j in tl.static_range(TOGETHER):
                    their_top, their_total, their_acc = theirs[j]
                    higher = tl.maximum(top, their_top)
                    fade = tl.exp(top - higher)
                    weight = tl.exp(their_top - higher)
                    acc = acc * fade[:, None] + their_acc * weight[:, None]
                    total = total * fade + their_total * weight
                    top = higher
            tl.store(into, (acc / total[:, None]).to(out.dtype.element_ty), mask=wanted)
            tl.store(counters + pair, 0)


@dataclass(frozen=True)
class Scratch:
    """Where the programs of attention meet: for launches that follow one another."""

    parts: Tensor
    counters: Tensor


def scratch(batch: int, shape: Heads, device: torch.device) -> Scratch:
    rows, width = _padded(shape)
    pairs = batch * shape.kv_heads
    parts = torch.empty(pairs * MOST_SPLITS * rows * (width + 2), device=device)
    return Scratch(parts, torch.zeros(pairs, dtype=torch.int32, device=device))


@remembered
def norm_spec(
    batch: int, size: int, dtype: torch.dtype, arch: str, y: torch.dtype | None = None, out_gain: bool = False
) -> KernelSpec:
    """y: the dtype of what is added to the residual stream; None: nothing is."""
    sizes = {"size": size}
    return KernelSpec(
        name=f"norm_{size}_{pointer_type(dtype)[1:]}_{pointer_type(y)[1:] if y else 'none'}"
        + ("g" if out_gain else ""),
        fn=norm_kernel,
        signature={
            "h": "*fp32",
            "y": pointer_type(y or dtype),
            "gain": "*fp32",
            "out_gain": "*fp32",
            "x": pointer_type(dtype),
            "size": "i32",
            "epsilon": "fp32",
        },
        constants={
            "ADD": y is not None,
            "OUT_GAIN": out_gain,
            "BLOCK": triton.next_power_of_2(size),
            "PDL": overlaps(arch),
        },
        divisible=("h", "y", "gain", "out_gain", "x", *multiples(sizes)),
        num_warps=8 if size > 1024 else 4,
        num_stages=1,
        options=overlap_options(arch),
        batch=batch,
        kind="norm",
        grid=(batch, 1, 1),
    )


@remembered
def gate_spec(batch: int, size: int, dtype: torch.dtype, gelu: bool, arch: str) -> KernelSpec:
    # Few rows leave a GPU empty; many prompts' programs would be too small for what starting one takes.
    block, warps = (512, 4) if batch <= 16 else (2048, 8)
    return KernelSpec(
        name=f"gate_{pointer_type(dtype)[1:]}{'_gelu' if gelu else ''}_{block}",
        fn=gate_kernel,
        signature={"x": pointer_type(dtype), "y": pointer_type(dtype), "size": "i32"},
        constants={"GELU": gelu, "BLOCK": block, "PDL": overlaps(arch)},
        divisible=("x", "y", *multiples({"size": size})),
        num_warps=warps,
        num_stages=1,
        options=overlap_options(arch),
        batch=batch,
        kind="gate",
        grid=(batch, triton.cdiv(size, block), 1),
    )


@remembered
def attend_spec(
    batch: int,
    shape: Heads,
    capacity: int,
    dtype: torch.dtype,
    norm: bool,
    bias: bool,
    arch: str,
    tile: dict[str, int] | None = None,
    slots: bool = False,
) -> KernelSpec:
    """`tile` overrides the choice of keys at a time, warps and so on. slots: each token has its own position."""
    rows, width = _padded(shape)
    tile = _tile(width, dtype.itemsize, arch) | (tile or {})
    pairs = batch * shape.kv_heads
    keys = min(capacity, shape.window or capacity)
    # As many programs as run at once, and a tile of keys at least for each.
    fits = max(1, min(MOST_SPLITS, triton.cdiv(keys, tile["TILE"]), 2 * processors_of(arch) // pairs))
    splits = 1 << (fits.bit_length() - 1)
    return KernelSpec(
        name=f"attend_{pointer_type(dtype)[1:]}_{shape.heads}x{shape.kv_heads}x{shape.size}w{shape.window}t{tile['TILE']}"
        + ("n" if norm else "")
        + ("b" if bias else "")
        + ("s" if slots else ""),
        fn=attend_kernel,
        signature={
            "qkv": pointer_type(dtype),
            "bias": "*fp32",
            "q_gain": "*fp32",
            "k_gain": "*fp32",
            "cos": "*fp32",
            "sin": "*fp32",
            "position": "*i64",
            "keys": pointer_type(dtype),
            "values": pointer_type(dtype),
            "parts": "*fp32",
            "counters": "*i32",
            "out": pointer_type(dtype),
            "capacity": "i32",
            "scale": "fp32",
            "epsilon": "fp32",
        },
        constants={
            "KV": shape.kv_heads,
            "GROUP": shape.heads // shape.kv_heads,
            "SIZE": shape.size,
            "WINDOW": shape.window,
            "MOST": MOST_SPLITS,
            "NORM": norm,
            "BIAS": bias,
            "WIDE": dtype == torch.bfloat16 and triton.knobs.runtime.interpret,
            "ROWS": rows,
            "WIDTH": width,
            "TILE": tile["TILE"],
            "EACH": tile["EACH"],
            "TOGETHER": min(tile["TOGETHER"], splits),
            "EARLY": tile["EARLY"],
            "GENERATION": generation(arch),
            "SLOTS": slots,
            "PDL": overlaps(arch),
        },
        divisible=(
            "qkv",
            "bias",
            "q_gain",
            "k_gain",
            "cos",
            "sin",
            "position",
            "keys",
            "values",
            "parts",
            "counters",
            "out",
            *multiples({"capacity": capacity}),
        ),
        num_warps=tile["WARPS"],
        num_stages=tile["STAGES"],
        options=overlap_options(arch),
        batch=batch,
        kind="attend",
        grid=(pairs, splits, 1),
    )


def add_norm(
    h: Tensor,
    y: Tensor | None,
    gain: Tensor,
    epsilon: float,
    dtype: torch.dtype,
    arch: str,
    out_gain: Tensor | None = None,
) -> Tensor:
    """As the torch function of this name."""
    batch, size = h.shape
    x = torch.empty(batch, size, dtype=dtype, device=h.device)
    spec = norm_spec(batch, size, dtype, arch, None if y is None else y.dtype, out_gain is not None)
    launch(spec, h, x if y is None else y, gain, gain if out_gain is None else out_gain, x, size, epsilon)
    return x


def attend(
    qkv: Tensor,
    bias: Tensor | None,
    gains: tuple[Tensor, Tensor] | None,
    cache: Cache,
    position: Tensor,
    shape: Heads,
    room: Scratch,
    arch: str,
) -> Tensor:
    """As the torch function of this name; room: of `scratch`, for this batch and shape."""
    batch, capacity = len(qkv), cache.keys.shape[2]
    out = torch.empty(batch, shape.heads * shape.size, dtype=qkv.dtype, device=qkv.device)
    slots = position.dim() == 2
    spec = attend_spec(
        batch, shape, capacity, qkv.dtype, gains is not None, bias is not None, arch, slots=slots
    )
    q_gain, k_gain = gains or (cache.cos, cache.cos)
    launch(
        spec, qkv, cache.cos if bias is None else bias, q_gain, k_gain, cache.cos, cache.sin, position,
        cache.keys, cache.values, room.parts, room.counters, out, capacity, shape.scale, shape.epsilon,
    )  # fmt: skip
    return out


def gate(x: Tensor, gelu: bool, arch: str) -> Tensor:
    """As the torch function of this name."""
    batch, size = len(x), x.shape[1] // 2
    y = torch.empty(batch, size, dtype=x.dtype, device=x.device)
    launch(gate_spec(batch, size, x.dtype, gelu, arch), x, y, size)
    return y


def _tile(width: int, itemsize: int, arch: str) -> dict[str, int]:
    """Keys at a time, from sweeps on an H200.

    NVIDIA: above 48 KiB of local memory a launch asks for another division of it from the first-level cache, before which
    a multiprocessor empties: 8 us a layer in a captured step. RDNA has 256 registers for a wave of 32 lanes, which hold
    less of keys and values. Those of a tile fit a workgroup's local memory; of wide numbers or heads there are fewer, for
    the registers' sake.
    """
    nvidia, small = arch.startswith("sm_"), arch.startswith(("gfx11", "gfx12"))
    keys = (32 if width <= 128 else 16) if small else 32 if nvidia and width > 128 else 64
    if itemsize > 2 or width > 256:
        keys = min(keys, 16)
    elif not nvidia:
        while keys > 16 and 2 * keys * width * itemsize > architecture(arch).lds_bytes_per_group:
            keys //= 2
    wide = small or width > 256 or (nvidia and itemsize == 2)
    return {
        "TILE": keys,
        "WARPS": 8 if wide else 4,
        "STAGES": 1 if nvidia else 2,
        "EACH": 1,
        "EARLY": not small,
        "TOGETHER": 1 if small else 8 if nvidia else 4,
    }


def _padded(shape: Heads) -> tuple[int, int]:
    """Rows and columns that the matrix cores take for the queries of a key."""
    group = shape.heads // shape.kv_heads
    return max(16, triton.next_power_of_2(group)), max(16, triton.next_power_of_2(shape.size))
