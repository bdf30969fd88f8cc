# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
# Triton adds tuples; it does not unpack them into one.
# ruff: noqa: RUF005
"""Attention of one query per sequence over pages of 16, 8, 4 or 2 bits: flash-decoding (Dao et al. 2023).

The pages of a sequence and head are dealt to several programs, whose parts a second launch adds up. (The last program to
arrive took longer for that than the pages took: more than half of 124 us for 128 parts.) The position comes from device
memory and the grid does not depend on it: a captured graph is right for any token. attention_append.py runs before, and
leaves the queries and the new keys and values.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.attention_append import MOST_SPLITS, POINTERS, Scratch, shared
from nstf.kernels.triton.attention_bytes import far_by_bytes
from nstf.kernels.triton.attention_codes import (
    add_far_values,
    far_scores,
    key_channel,
    position_in,
    value_channel,
)
from nstf.kernels.triton.attention_decode_tile import BY_BYTES, by_bytes, runs_of, tile_of
from nstf.kernels.triton.attention_merge import extent, merge_kernel, programs_apart, units_of
from nstf.kernels.triton.attention_pages import ALL, Pages, place_of
from nstf.kernels.triton.attention_record import unit_of
from nstf.kernels.triton.launching import hardware_of, launch, overlap_options, overlaps, processors_of
from nstf.kernels.triton.spec import KernelSpec, pointer_type


@triton.jit
def _short(x, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """x rounded to DTYPE, as it is multiplied."""
    if WIDE:
        return x.to(DTYPE).to(tl.float32)
    else:
        return x.to(DTYPE)


@triton.jit
def _visible(scores, place, sinks, floors):
    """Scores [n, ROWS] of positions that each row's rule lets it see, sinks and those beyond its floor; -inf for others."""
    return tl.where(
        (place[:, None] < sinks[None, :]) | (place[:, None] > floors[None, :]), scores, float("-inf")
    )


@triton.jit
def _floors(at, windows, lengths):
    """[ROWS]: the last position before each row's window, -1 where its rule does not hold yet."""
    return tl.where(at + 1 < lengths, -1, at - windows)


@triton.jit
def _place(
    table, line, places, page, sink, ring, offset, head, RECORD: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """`place_of`, without its division where no page stands in a ring."""
    if RING:
        return place_of(table, line, places, page, sink, ring, offset, head, RECORD)
    else:
        return tl.load(table + line * places + page) + offset + head * (RECORD // 16)


@triton.jit
def decode_kernel(
    q,  # f32 [batch, heads, SIZE], turned, times scale log2(e)
    near_keys,
    near_values,
    words,
    halves,
    wide,
    table,
    members,
    rules,  # i32 [heads, 3]: sink, window, min_length
    position,
    parts,  # f32 [batch KEPT, MOST, GROUP (SIZE + 2)]
    places,
    offset,
    sink,
    ring,
    LINES: tl.constexpr,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    SIZE: tl.constexpr,
    K_BITS: tl.constexpr,
    K_CHANNEL: tl.constexpr,
    K_RUNS: tl.constexpr,
    V_BITS: tl.constexpr,
    V_CHANNEL: tl.constexpr,
    V_RUNS: tl.constexpr,
    V_SKIP: tl.constexpr,
    RECORD: tl.constexpr,
    MASKED: tl.constexpr,  # whether a rule hides anything
    MOST: tl.constexpr,
    EACH: tl.constexpr,  # pages of a program before another one helps
    STEP: tl.constexpr,  # positions of a stored page at a time: 64 or less
    NEAR: tl.constexpr,  # of the last pages
    QUAD: tl.constexpr,  # order of sums, attention_codes.py
    WIDE: tl.constexpr,  # multiply in float32: the interpreter has no bfloat16
    ASSEMBLY: tl.constexpr,  # NVIDIA's, for packed numbers
    PDL: tl.constexpr,
    FOLD: tl.constexpr,  # multiply queries by the scales of keys by channel, instead of codes
    RING: tl.constexpr,  # whether pages stand in a ring
    BYTES: tl.constexpr,  # attention_bytes.py
    SLOTS: tl.constexpr,  # of it: pages on their way at once
    APART: tl.constexpr,  # programs of their own have the last pages, so many positions each; 0: none
    HARDWARE: tl.constexpr,
):
    DTYPE: tl.constexpr = wide.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0)
    split = tl.program_id(1)
    line = pair // KEPT
    head = pair % KEPT
    number = tl.load(members + head)
    at = tl.load(position + line * LINES).to(tl.int32)
    g = tl.arange(0, ROWS)
    steps = 64 // STEP
    rows = number * GROUP + tl.minimum(g, GROUP - 1)
    sinks = tl.load(rules + rows * 3)
    windows = tl.load(rules + rows * 3 + 1)
    lengths = tl.load(rules + rows * 3 + 2)
    front, first, pages, far, active = extent(
        sinks, windows, lengths, at, tl.num_programs(1) - programs_apart(APART), MASKED, EACH
    )
    floors = _floors(at, windows, lengths)
    units = units_of(pages, far, at, NEAR)
    if split >= active + (units if APART else 0):
        return
    # Pages are dealt by their steps: a program more or less is a step, not a page.
    count = (far * steps - split + active - 1) // active
    if APART:
        count = tl.where(split < active, count, 0)
    place = tl.zeros([], tl.int64)
    if count > 0:
        this = split // steps
        this = tl.where(this < front, this, first + this - front)
        place = _place(table, line, places, this, sink, ring, offset, head, RECORD, RING)
    mine = q + (line * (GROUP * KV) + rows)[None, :] * SIZE
    if BYTES:
        top, total, acc = far_by_bytes(
            q + (line * (GROUP * KV) + number * GROUP) * SIZE,
            words,
            table + line * places,
            offset + head * (RECORD // 16),
            split,
            active,
            count,
            GROUP,
            V_SKIP,
            RECORD,
            SLOTS,
            PDL,
            HARDWARE,
        )
    else:
        if PDL:
            # Queries and the newest positions are the work of the launch in front.
            tl.extra.cuda.gdc_wait()
        queries = ()
        for RUN in tl.static_range(K_RUNS):
            some = tl.load(mine + key_channel(RUN, SIZE, K_BITS, QUAD)[:, None])
            if not FOLD:
                some = some * unit_of(K_BITS)
            queries = queries + (_short(some, DTYPE if K_BITS == 16 else tl.float16, WIDE and K_BITS == 16),)

        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = ()
        for RUN in tl.static_range(V_RUNS):
            c = value_channel(RUN, SIZE, V_BITS)
            acc = acc + (tl.zeros([c.shape[0], ROWS], tl.float32),)
        for step in range(count):
            unit = split + step * active
            tile = unit // steps
            part = unit % steps
            n = position_in(part, STEP, QUAD)
            # Where the next step's page lies is known a step ahead.
            next_tile = tl.minimum((unit + active) // steps, far - 1)
            following = tl.where(next_tile < front, next_tile, first + next_tile - front)
            ahead = _place(table, line, places, following, sink, ring, offset, head, RECORD, RING)
            scores = far_scores(
                queries, words, halves, wide, place, n,
                ROWS, SIZE, K_BITS, K_CHANNEL, K_RUNS, QUAD, WIDE, ASSEMBLY, FOLD,
            )  # fmt: skip
            if MASKED:
                this = tl.where(tile < front, tile, first + tile - front)
                scores = _visible(scores, this * 64 + n, sinks, floors)
            higher = tl.maximum(top, tl.max(scores, axis=0))
            # A row may see nothing of its program's pages so far.
            level = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - level[None, :])
            fade = tl.exp2(top - level)
            total = total * fade + tl.sum(weights, axis=0)
            acc = add_far_values(
                acc, weights, fade, words, halves, wide, place, part, n,
                ROWS, SIZE, V_BITS, V_CHANNEL, V_RUNS, V_SKIP, QUAD, WIDE, ASSEMBLY,
            )  # fmt: skip
            top = higher
            place = ahead

    # The page of the query and the one before it, NEAR positions at a time, by programs that have no others, or the fewest.
    all_channels = tl.arange(0, SIZE)
    lane = (line * KEPT + head) * 128
    begin = (split + active - far * steps % active) % active
    if APART:
        begin = tl.where(split < active, units, split - active)
    if begin < units:
        if MASKED:
            # Read anew: what is held over the loop takes registers from it.
            sinks = tl.load(rules + rows * 3, volatile=True)
            windows = tl.load(rules + rows * 3 + 1, volatile=True)
            floors = _floors(at, windows, tl.load(rules + rows * 3 + 2, volatile=True))
        whole = _short(tl.load(mine + all_channels[:, None]), DTYPE, WIDE)
        # Mostly one step: nothing to load ahead, and the local memory is the other loop's.
        for unit in tl.range(begin, units, units if APART else active, num_stages=1):
            tile = far + unit // (64 // NEAR)
            n = unit % (64 // NEAR) * NEAR + tl.arange(0, NEAR)
            this = tl.where(tile < front, tile, first + tile - front)
            known = this * 64 + n <= at
            here = _place(table, line, places, this, sink, ring, offset, head, RECORD, RING)
            if K_BITS == 16:
                from_k = wide + here * 8 + n[:, None] * SIZE
            else:
                from_k = near_keys + (lane + (this % 2) * 64 + n)[:, None] * SIZE
            held = tl.load(from_k + all_channels[None, :], mask=known[:, None], other=0.0)
            if WIDE:
                held = held.to(tl.float32)
            scores = tl.dot(held, whole, input_precision="ieee")
            if MASKED:
                scores = _visible(scores, this * 64 + n, sinks, floors)
            scores = tl.where(known[:, None], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, axis=0))
            level = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - level[None, :])
            fade = tl.exp2(top - level)
            total = total * fade + tl.sum(weights, axis=0)
            # The sum is of what stored numbers were divided by.
            weights = weights * (1.0 / unit_of(V_BITS))
            if V_BITS == 16:
                from_v = wide + here * 8 + V_SKIP // 2 + n[None, :] * SIZE
            else:
                from_v = near_values + (lane + (this % 2) * 64 + n)[None, :] * SIZE
            found = ()
            for RUN in tl.static_range(V_RUNS):
                c = value_channel(RUN, SIZE, V_BITS)
                more = tl.load(from_v + c[:, None], mask=known[None, :], other=0.0)
                if WIDE:
                    more = more.to(tl.float32)
                found = found + (
                    tl.dot(more, weights.to(more.dtype), acc[RUN] * fade[None, :], input_precision="ieee"),
                )
            acc = found
            top = higher

    block = parts + (pair.to(tl.int64) * MOST + split) * (GROUP * (SIZE + 2))
    for RUN in tl.static_range(V_RUNS):
        c = value_channel(RUN, SIZE, V_BITS)
        tl.store(
            block + g[None, :] * SIZE + c[:, None], acc[RUN] * unit_of(V_BITS), mask=(g < GROUP)[None, :]
        )
    tl.store(block + GROUP * SIZE + g, top, mask=g < GROUP)
    tl.store(block + GROUP * (SIZE + 1) + g, total, mask=g < GROUP)


def decode_specs(
    pages: Pages,
    batch: int,
    heads: int,
    kv_heads: int,
    masked: bool,
    arch: str,
    context: int,
    tile: dict[str, int] | None = None,
    lines: bool = False,
) -> tuple[KernelSpec, KernelSpec]:
    """The launch over the pages and the one that adds up its parts.

    context: positions that may come, which bound the programs. `tile` overrides the choice of warps, stages and so on.
    """
    types, constants = shared(pages, batch, heads, kv_heads)
    dtype, size, forms = pointer_type(pages.dtype), pages.forms.size, pages.forms
    ring = pages.ring > 1 or pages.sink < ALL
    asked = tile or {}
    suits = by_bytes(forms, heads // kv_heads, masked, ring, arch)
    # Of whole pages, by one warp.
    suits = suits and asked.get("WARPS", 1) == 1 and asked.get("STEP", 64) == 64
    tile = tile_of(forms, masked, arch) | (BY_BYTES if suits else {}) | asked
    keys = min(context, (pages.ring + min(pages.sink, 1 << 20)) * 64)
    wanted = tile["RESIDENT"] * processors_of(arch) // (batch * pages.heads)
    near = min(tile["STEP"], 16 * tile["WARPS"])
    # They wait for memory twice: after other pages that took 2 to 4 us more.
    apart = near if tile["BYTES"] else 0
    extra = programs_apart(apart)
    fits = max(1, min(MOST_SPLITS - extra, triton.cdiv(keys, 64 * tile["EACH"]), asked.get("SPLITS", wanted)))
    # `position` and `table` are read before the wait: the launch in front has waited for all before it lets this one begin.
    pdl = overlaps(arch)
    common = {
        "ROWS": tile["ROWS"] if tile["ROWS"] >= heads // kv_heads else constants["ROWS"],
        "LINES": int(lines),
        "MASKED": masked,
        "MOST": MOST_SPLITS,
        "EACH": tile["EACH"],
        "APART": apart,
        "PDL": pdl,
    }
    nvidia = arch.startswith("sm_")
    signature = {**types, "rules": "*i32", "parts": "*fp32", "out": dtype, "splits": "i32"}

    def spec(fn: Any, given: dict[str, Any], **others: Any) -> KernelSpec:
        known = {name: value for name, value in (constants | common | given).items() if name in fn.arg_names}
        return KernelSpec(
            fn=fn,
            signature={name: signature[name] for name in fn.arg_names if name in signature},
            constants=known,
            divisible=(*POINTERS, "rules", "parts", "out"),
            batch=batch,
            **others,
        )

    keys_runs, values_runs = runs_of(forms)
    over_pages = {
        "K_RUNS": keys_runs,
        "V_RUNS": values_runs,
        "STEP": tile["STEP"],
        "NEAR": near,
        "QUAD": 4 if nvidia and forms.near else 1,
        "WIDE": pages.dtype == torch.bfloat16 and triton.knobs.runtime.interpret,
        "ASSEMBLY": nvidia and not triton.knobs.runtime.interpret,
        "RING": ring,
        # Eight words of a row at least: fewer hold two runs of channels side by side.
        "BYTES": bool(tile["BYTES"]),
        "SLOTS": tile["SLOTS"],
        "HARDWARE": hardware_of(arch),
        "FOLD": bool(tile["FOLD"]) and forms.keys.channel and 256 <= size * forms.keys.bits < size * 16,
    }
    # A rotated query is turned as a whole.
    whole = forms.values.rotate or not nvidia
    # All parts at once where registers hold them: one way to memory.
    span = max(16, triton.next_power_of_2(fits + extra))
    added = {
        "WIDTH": size if whole else 32,
        "TILE": min(span, 32 if not nvidia else 16384 // size if whole else MOST_SPLITS),
        "SPAN": span,
    }
    return (
        spec(
            decode_kernel,
            over_pages,
            name=f"attention_decode_{dtype[1:]}_{forms.keys.bits}_{forms.values.bits}",
            num_warps=tile["WARPS"],
            num_stages=tile["STAGES"],
            kind="attention_decode",
            options=overlap_options(arch) | ({"maxnreg": tile["REGS"]} if tile["REGS"] else {}),
            grid=(batch * pages.heads, fits + extra, 1),
        ),
        spec(
            merge_kernel,
            added,
            name=f"attention_merge_{dtype[1:]}_{span}",
            num_warps=8 if whole and nvidia else 4,
            num_stages=1,
            kind="attention_merge",
            options=overlap_options(arch),
            grid=(batch * pages.heads * (heads // kv_heads), size // added["WIDTH"], 1),
        ),
    )


def decode(
    pages: Pages,
    rules: Tensor,
    masked: bool,
    position: Tensor,
    room: Scratch,
    out: Tensor,
    shape: tuple[int, int],
    arch: str,
    context: int,
    tile: dict[str, int] | None = None,
) -> None:
    """Attention of the queries in `room` over the pages, into the columns of these heads of out [batch, heads size]."""
    over_pages, merge = decode_specs(
        pages, len(out), *shape, masked, arch, context, tile, lines=len(position) > 1
    )
    launch(
        over_pages, room.q, pages.near_keys, pages.near_values, *pages.words(), pages.table, pages.members, rules,
        position, room.parts, pages.table.shape[1], pages.offset, pages.sink, pages.ring,
    )  # fmt: skip
    splits = over_pages.grid[1] - programs_apart(over_pages.constants["APART"])
    launch(merge, room.parts, pages.members, rules, position, out, splits)
