# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The new token of each sequence before attention: queries, keys and values turned, keys and values into their pages.

Page P - 1 becomes codes when page P is full: the first query that reads it so is the next one. The position comes from
device memory, as in attention_decode.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.attention_pages import Pages, place_of, turned_by_hadamard
from nstf.kernels.triton.attention_record import store_codes
from nstf.kernels.triton.launching import launch, overlap_options, overlaps
from nstf.kernels.triton.spec import KernelSpec, pointer_type
from nstf.kernels.triton.turning import turned

# Programs that share the pages of a head in attention_decode.py, at most.
MOST_SPLITS = 256
LOG2E = 1.4426950408889634


@triton.jit
def append_kernel(
    qkv,  # [batch, (heads + 2 KV) SIZE]
    bias,  # f32 [(heads + 2 KV) SIZE]
    q_gain,  # f32 [SIZE]
    k_gain,
    cos,  # f32 [capacity, SIZE / 2], or [1, SIZE / 2] for all positions where TURN is 0
    sin,
    position,  # i64 [1], or [batch] where LINES
    q,  # f32 [batch, heads, SIZE]
    near_keys,
    near_values,
    words,
    halves,
    wide,
    table,
    members,
    places,
    offset,
    sink,
    ring,
    scale,  # of q, for powers of two
    epsilon,
    LINES: tl.constexpr,
    TURN: tl.constexpr,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    K_BITS: tl.constexpr,
    K_CHANNEL: tl.constexpr,
    K_ROTATE: tl.constexpr,
    V_BITS: tl.constexpr,
    V_CHANNEL: tl.constexpr,
    V_ROTATE: tl.constexpr,
    V_SKIP: tl.constexpr,
    RECORD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # In this order: attention_decode.py reads pages, positions and the table before this launch has ended.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    line = tl.program_id(0) // KEPT
    head = tl.program_id(0) % KEPT
    number = tl.load(members + head)
    at = tl.load(position + line * LINES)
    page = at // 64
    d = tl.arange(0, SIZE)
    g = tl.arange(0, ROWS)
    two = tl.arange(0, 2)
    here = qkv + line.to(tl.int64) * ((GROUP + 2) * KV * SIZE)
    queries = number * GROUP + tl.minimum(g, GROUP - 1)
    angle = at * TURN
    query = turned(here, 0, queries, d, cos, sin, angle, q_gain, bias, epsilon, SIZE, NORM, BIAS) * scale
    # Two equal rows: a tensor of one row has no layout to turn in.
    key = turned(
        here, GROUP * KV * SIZE, number + two * 0, d, cos, sin, angle, k_gain, bias, epsilon, SIZE, NORM, BIAS
    )
    if K_ROTATE:
        query = turned_by_hadamard(query, ROWS, SIZE)
        key = turned_by_hadamard(key, 2, SIZE)
    into = q + (line * (GROUP * KV) + number * GROUP + g)[:, None] * SIZE + d[None, :]
    tl.store(into, query, mask=(g < GROUP)[:, None])
    from_v = (GROUP + 1) * KV * SIZE + number * SIZE + (two * 0)[:, None] + d[None, :]
    value = tl.load(here + from_v).to(tl.float32)
    if BIAS:
        value += tl.load(bias + from_v)
    if V_ROTATE:
        value = turned_by_hadamard(value, 2, SIZE)
    first = (two == 0)[:, None] & (d >= 0)[None, :]
    place = place_of(table, line, places, page, sink, ring, offset, head, RECORD)
    lane = (line * KEPT + head) * 128
    row = (two * 0)[:, None] + d[None, :]
    if K_BITS == 16:
        tl.store(wide + place * 8 + (at % 64) * SIZE + row, key.to(wide.dtype.element_ty), mask=first)
    else:
        tl.store(near_keys + (lane + at % 128) * SIZE + row, key.to(near_keys.dtype.element_ty), mask=first)
    if V_BITS == 16:
        tl.store(
            wide + place * 8 + V_SKIP // 2 + (at % 64) * SIZE + row,
            value.to(wide.dtype.element_ty),
            mask=first,
        )
    else:
        tl.store(
            near_values + (lane + at % 128) * SIZE + row, value.to(near_values.dtype.element_ty), mask=first
        )
    if K_BITS < 16 or V_BITS < 16:
        # The other half of what stands in 16 bits: nothing of it was written here.
        if (at % 64 == 63) & (page > 0):
            old = place_of(table, line, places, page - 1, sink, ring, offset, head, RECORD)
            n = tl.arange(0, 64)
            from_near = (lane + ((page - 1) % 2) * 64 + n)[:, None] * SIZE + d[None, :]
            if K_BITS < 16:
                x = tl.load(near_keys + from_near).to(tl.float32)
                store_codes(x, words, halves, old, K_BITS, K_CHANNEL, False, SIZE, 0)
            if V_BITS < 16:
                y = tl.load(near_values + from_near).to(tl.float32)
                store_codes(y, words, halves, old, V_BITS, V_CHANNEL, True, SIZE, V_SKIP)


@dataclass(frozen=True)
class Scratch:
    """Where the queries of a layer and the parts of their results lie: for launches that follow one another."""

    q: Tensor
    parts: Tensor


def rows_of(group: int) -> int:
    """Rows that the matrix cores take for the queries of a key."""
    return max(16, int(triton.next_power_of_2(group)))


def scratch(batch: int, heads: int, kv_heads: int, size: int, device: torch.device) -> Scratch:
    return Scratch(
        torch.empty(batch * heads * size, device=device),
        torch.empty(batch * heads * MOST_SPLITS * (size + 2), device=device),
    )


def shared(pages: Pages, batch: int, heads: int, kv_heads: int) -> tuple[dict[str, str], dict[str, Any]]:
    """The types of the arguments and the constants that both kernels have."""
    forms, dtype = pages.forms, pointer_type(pages.dtype)
    types = {
        "position": "*i64",
        "q": "*fp32",
        "near_keys": dtype,
        "near_values": dtype,
        "words": "*i32",
        "halves": "*fp16",
        "wide": dtype,
        "table": "*i64",
        "members": "*i32",
        **dict.fromkeys(("places", "offset", "sink", "ring"), "i32"),
    }
    constants = {
        "KV": kv_heads,
        "GROUP": heads // kv_heads,
        "ROWS": rows_of(heads // kv_heads),
        "KEPT": pages.heads,
        "SIZE": forms.size,
        "K_BITS": forms.keys.bits,
        "K_CHANNEL": forms.keys.channel,
        "V_BITS": forms.values.bits,
        "V_CHANNEL": forms.values.channel,
        "V_ROTATE": forms.values.rotate,
        "V_SKIP": forms.keys.size_bytes(forms.size),
        "RECORD": forms.record_bytes,
    }
    return types, constants


POINTERS = (
    "q",
    "near_keys",
    "near_values",
    "words",
    "halves",
    "wide",
    "table",
    "members",
    "position",
)


def append_spec(
    pages: Pages,
    batch: int,
    heads: int,
    kv_heads: int,
    norm: bool,
    bias: bool,
    arch: str,
    lines: bool = False,
    turn: bool = True,
) -> KernelSpec:
    """lines: positions [batch], one for each sequence, instead of one for all. turn: by an angle for each position."""
    types, constants = shared(pages, batch, heads, kv_heads)
    dtype = pointer_type(pages.dtype)
    signature = {
        "qkv": dtype,
        **dict.fromkeys(("bias", "q_gain", "k_gain", "cos", "sin"), "*fp32"),
        **types,
        "scale": "fp32",
        "epsilon": "fp32",
    }
    return KernelSpec(
        name=f"attention_append_{dtype[1:]}",
        fn=append_kernel,
        signature={name: signature[name] for name in append_kernel.arg_names if name in signature},
        constants={
            **constants,
            "K_ROTATE": pages.forms.keys.rotate,
            "LINES": int(lines),
            "TURN": int(turn),
            "NORM": norm,
            "BIAS": bias,
            "PDL": overlaps(arch),
        },
        divisible=("qkv", "bias", "q_gain", "k_gain", "cos", "sin", *POINTERS),
        num_warps=8 if pages.forms.size > 128 else 4,
        num_stages=1,
        batch=batch,
        kind="attention_append",
        options=overlap_options(arch),
        grid=(batch * pages.heads, 1, 1),
    )


def append(
    pages: Pages,
    qkv: Tensor,
    bias: Tensor | None,
    gains: tuple[Tensor, Tensor] | None,
    angles: tuple[Tensor, Tensor],
    position: Tensor,
    room: Scratch,
    shape: tuple[int, int],
    scale: float,
    epsilon: float,
    arch: str,
) -> None:
    """Puts the keys and values of one token into the pages, and its queries into `room`, for these heads of a layer.

    qkv: [batch, (heads + 2 KV) size]. shape: query and KV heads of the layer. position: int64 [1], or [batch]. angles:
    (cos, sin) [positions, size / 2], or [1, size / 2] for all positions.
    """
    cos, sin = angles
    given = gains is not None, bias is not None
    spec = append_spec(pages, len(qkv), *shape, *given, arch, lines=len(position) > 1, turn=len(cos) > 1)
    q_gain, k_gain = gains or (cos, cos)
    launch(
        spec, qkv, cos if bias is None else bias, q_gain, k_gain, cos, sin, position, room.q,
        pages.near_keys, pages.near_values, *pages.words(), pages.table, pages.members, pages.table.shape[1],
        pages.offset, pages.sink, pages.ring, scale * LOG2E, epsilon,
    )  # fmt: skip
