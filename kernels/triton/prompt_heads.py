# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Queries, keys and values of prompts in one launch: bias, norm and rotary position embedding, and into the cache.

The definition is `place` of kernels/torch/decode_step.py. transformers' modules make some twelve launches of it, each of
which reads and writes all of the numbers.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.torch.decode_step import Cache, Heads
from nstf.kernels.triton.launching import launch, multiples, overlap_options, overlaps
from nstf.kernels.triton.spec import KernelSpec, pointer_type
from nstf.kernels.triton.turning import angles_of, gains_of, halves_of, turn

# Numbers of a program, of whole heads.
_NUMBERS = 1024


@triton.jit
def _place_turned(
    here, bias, gain, cos, sin, into, first, head, at, step, epsilon,
    COUNT: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Heads `head`, of COUNT that begin at `first` of a token's numbers, turned by the angles of row `at`, into places of
    `into` that are `step` numbers apart."""
    d = tl.arange(0, WIDTH)
    c, s = angles_of(cos, sin, at, d, SIZE)
    mine, theirs = gains_of(gain, d, SIZE, NORM)
    if PDL:
        tl.extra.cuda.gdc_wait()
    ok = (head < COUNT)[:, None]
    a, b = halves_of(here, bias, first, head, d, ok, SIZE, BIAS)
    y = turn(a, b, c, s, mine, theirs, epsilon, SIZE, NORM)
    place = head.to(tl.int64)[:, None] * step + d[None, :]
    tl.store(into + place, y.to(into.dtype.element_ty), mask=ok & (d < SIZE)[None, :])


@triton.jit
def _place_values(
    here, bias, into, first, head, step,
    COUNT: tl.constexpr, SIZE: tl.constexpr, BIAS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Heads `head` of values, with bias, into places of `into` that are `step` numbers apart."""
    d = tl.arange(0, WIDTH)
    if PDL:
        tl.extra.cuda.gdc_wait()
    ok = (head < COUNT)[:, None] & (d < SIZE)[None, :]
    at = first + head[:, None] * SIZE + d[None, :]
    v = tl.load(here + at, mask=ok, other=0.0).to(tl.float32)
    if BIAS:
        v += tl.load(bias + at, mask=ok, other=0.0)
    place = head.to(tl.int64)[:, None] * step + d[None, :]
    tl.store(into + place, v.to(into.dtype.element_ty), mask=ok)


@triton.jit
def place_kernel(
    qkv,  # [batch tokens, (heads + 2 KV) SIZE]
    bias,  # f32 [(heads + 2 KV) SIZE]
    q_gain,  # f32 [SIZE]
    k_gain,
    cos,  # f32 [capacity, SIZE / 2]
    sin,
    keys,  # [batch, KV, capacity, SIZE]
    values,
    out,  # [batch tokens, heads, SIZE]
    tokens,
    first_at,  # position of the first token
    capacity,
    epsilon,
    KV: tl.constexpr,
    GROUP: tl.constexpr,  # queries of a key
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,  # SIZE, filled up to a power of two
    HEADS: tl.constexpr,  # of a program
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    COUNT: tl.constexpr = KV * GROUP
    # Programs of a token that have queries, and keys, and as many values.
    OF_Q: tl.constexpr = (COUNT + HEADS - 1) // HEADS
    OF_KV: tl.constexpr = (KV + HEADS - 1) // HEADS
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = row % tokens + first_at
    j = tl.arange(0, HEADS)
    here = qkv + row * ((COUNT + 2 * KV) * SIZE)
    # Where this token's key of the first head goes; those of the next lie a sequence further.
    lane = ((row // tokens) * KV * capacity + at) * SIZE
    step = capacity * SIZE
    if part < OF_Q:
        head = part * HEADS + j
        into = out + row * COUNT * SIZE
        _place_turned(
            here,
            bias,
            q_gain,
            cos,
            sin,
            into,
            0,
            head,
            at,
            SIZE,
            epsilon,
            COUNT,
            SIZE,
            NORM,
            BIAS,
            WIDTH,
            PDL,
        )
    elif part < OF_Q + OF_KV:
        head = (part - OF_Q) * HEADS + j
        first: tl.constexpr = COUNT * SIZE
        into = keys + lane
        _place_turned(
            here,
            bias,
            k_gain,
            cos,
            sin,
            into,
            first,
            head,
            at,
            step,
            epsilon,
            KV,
            SIZE,
            NORM,
            BIAS,
            WIDTH,
            PDL,
        )
    else:
        head = (part - OF_Q - OF_KV) * HEADS + j
        after: tl.constexpr = (COUNT + KV) * SIZE
        into = values + lane
        _place_values(here, bias, into, after, head, step, KV, SIZE, BIAS, WIDTH, PDL)


@lru_cache(maxsize=1024)
def place_spec(
    rows: int, shape: Heads, even: tuple[str, ...], dtype: torch.dtype, norm: bool, bias: bool, arch: str
) -> KernelSpec:
    """The launch for `rows` tokens of all prompts. even: the sizes that are multiples of 16."""
    width = triton.next_power_of_2(shape.size)
    heads = max(1, min(_NUMBERS // width, triton.next_power_of_2(shape.heads)))
    programs = triton.cdiv(shape.heads, heads) + 2 * triton.cdiv(shape.kv_heads, heads)
    floats = ("bias", "q_gain", "k_gain", "cos", "sin")
    kept = ("keys", "values", "out")
    return KernelSpec(
        name=f"place_{pointer_type(dtype)[1:]}_{shape.heads}x{shape.kv_heads}x{shape.size}"
        + ("n" if norm else "")
        + ("b" if bias else ""),
        fn=place_kernel,
        signature={
            "qkv": pointer_type(dtype),
            **dict.fromkeys(floats, "*fp32"),
            **dict.fromkeys(kept, pointer_type(dtype)),
            **dict.fromkeys(("tokens", "first_at", "capacity"), "i32"),
            "epsilon": "fp32",
        },
        constants={
            "KV": shape.kv_heads,
            "GROUP": shape.heads // shape.kv_heads,
            "SIZE": shape.size,
            "NORM": norm,
            "BIAS": bias,
            "WIDTH": width,
            "HEADS": heads,
            "PDL": overlaps(arch),
        },
        divisible=("qkv", *floats, *kept, *even),
        num_warps=4,
        num_stages=1,
        options=overlap_options(arch),
        batch=rows,
        kind="place",
        grid=(rows, programs, 1),
    )


def place(
    qkv: Tensor,
    bias: Tensor | None,
    gains: tuple[Tensor, Tensor] | None,
    cache: Cache,
    tokens: int,
    shape: Heads,
    first: int,
    arch: str,
) -> Tensor:
    """As the torch function of this name."""
    rows, capacity = len(qkv), cache.keys.shape[2]
    out = torch.empty(rows, shape.heads, shape.size, dtype=qkv.dtype, device=qkv.device)
    even = multiples({"tokens": tokens, "first_at": first, "capacity": capacity})
    spec = place_spec(rows, shape, even, qkv.dtype, gains is not None, bias is not None, arch)
    q_gain, k_gain = gains or (cache.cos, cache.cos)
    launch(
        spec, qkv, cache.cos if bias is None else bias, q_gain, k_gain, cache.cos, cache.sin,
        cache.keys, cache.values, out, tokens, first, capacity, shape.epsilon,
    )  # fmt: skip
    return out
