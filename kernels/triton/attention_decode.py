# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
# Triton adds tuples; it does not unpack them into one.
# ruff: noqa: RUF005
"""Attention of one query per sequence over pages of 16, 8, 4 or 2 bits: flash-decoding (Dao et al. 2023) in one kernel.

The pages of a sequence and head are dealt to several programs; the last to arrive adds up their parts in the order of the
programs. The position comes from device memory and the grid does not depend on it: a captured graph is right for any token.
attention_append.py runs before, and leaves the queries and the new keys and values.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.arrival import arrive, generation
from nstf.kernels.triton.attention_append import MOST_SPLITS, POINTERS, Scratch, shared
from nstf.kernels.triton.attention_codes import add_far_values, far_scores, key_channel, value_channel
from nstf.kernels.triton.attention_pages import Forms, Pages, place_of, turned_by_hadamard
from nstf.kernels.triton.launching import launch, processors_of
from nstf.kernels.triton.spec import KernelSpec, pointer_type


@triton.jit
def _short(x, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """x rounded to DTYPE, as it is multiplied."""
    if WIDE:
        return x.to(DTYPE).to(tl.float32)
    else:
        return x.to(DTYPE)


@triton.jit
def _visible(scores, place, at, sinks, windows, lengths):
    """Scores of the positions that each row's rule lets it see; -inf for others."""
    seen = (place[None, :] < sinks[:, None]) | (place[None, :] > at - windows[:, None])
    seen = (seen | (at + 1 < lengths)[:, None]) & (place <= at)[None, :]
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def decode_kernel(
    q,  # f32 [batch, heads, SIZE], turned, times scale log2(e)
    near_keys,
    near_values,
    near_words,  # near_values as i32
    words,
    halves,
    wide,
    table,
    members,
    rules,  # i32 [heads, 3]: sink, window, min_length
    position,
    parts,  # f32 [batch KEPT, MOST, ROWS (SIZE + 2)]
    counters,  # i32 [batch KEPT]: zero between launches
    out,  # [batch, heads SIZE]
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
    V_ROTATE: tl.constexpr,
    V_RUNS: tl.constexpr,
    V_SKIP: tl.constexpr,
    RECORD: tl.constexpr,
    MASKED: tl.constexpr,  # whether a rule hides anything
    MOST: tl.constexpr,
    EACH: tl.constexpr,  # pages of a program before another one helps
    STEP: tl.constexpr,  # positions at a time: 64 or 32
    WIDE: tl.constexpr,  # multiply in float32: the interpreter has no bfloat16
    GENERATION: tl.constexpr,
):
    DTYPE: tl.constexpr = wide.dtype.element_ty
    pair = tl.program_id(0)
    split = tl.program_id(1)
    line = pair // KEPT
    head = pair % KEPT
    number = tl.load(members + head)
    at = tl.load(position + line * LINES).to(tl.int32)
    page = at // 64
    g = tl.arange(0, ROWS)
    steps = 64 // STEP
    rows = number * GROUP + tl.minimum(g, GROUP - 1)
    sinks = tl.load(rules + rows * 3)
    windows = tl.load(rules + rows * 3 + 1)
    lengths = tl.load(rules + rows * 3 + 2)
    first = tl.zeros([], tl.int32)
    front = tl.zeros([], tl.int32)
    if MASKED:
        lows = tl.where(at + 1 < lengths, 0, tl.maximum(at - windows + 1, 0))
        first = tl.min(lows, axis=0) // 64
        front = tl.minimum((tl.max(sinks, axis=0) + 63) // 64, first)
    pages = front + page - first + 1
    # Pages that are read in their stored form.
    far = tl.minimum(front, tl.maximum(page - 1, 0)) + tl.maximum(page - 1 - first, 0)
    active = tl.maximum(1, tl.minimum(tl.num_programs(1), (pages + EACH - 1) // EACH))
    if split >= active:
        return
    mine = q + (line * (GROUP * KV) + rows)[:, None] * SIZE
    queries = ()
    for RUN in tl.static_range(K_RUNS):
        some = tl.load(mine + key_channel(RUN, SIZE, K_BITS)[None, :])
        queries = queries + (_short(some, DTYPE if K_BITS == 16 else tl.float16, WIDE and K_BITS == 16),)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = ()
    for RUN in tl.static_range(V_RUNS):
        c = value_channel(RUN, SIZE, V_BITS)
        acc = acc + (tl.zeros([ROWS, c.shape[0]], tl.float32),)
    for step in range((far - split + active - 1) // active * steps):
        tile = split + step // steps * active
        n = step % steps * STEP + tl.arange(0, STEP)
        this = tl.where(tile < front, tile, first + tile - front)
        place = place_of(table, line, places, this, sink, ring, offset, head, RECORD)
        scores = far_scores(
            queries, words, halves, wide, place, n, ROWS, SIZE, K_BITS, K_CHANNEL, K_RUNS, WIDE
        )
        if MASKED:
            scores = _visible(scores, this * 64 + n, at, sinks, windows, lengths)
        higher = tl.maximum(top, tl.max(scores, axis=1))
        # A row may see nothing of its program's pages so far.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - level[:, None])
        fade = tl.exp2(top - level)
        total = total * fade + tl.sum(weights, axis=1)
        acc = add_far_values(
            acc, weights, fade, words, halves, wide, place, n,
            ROWS, SIZE, V_BITS, V_CHANNEL, V_RUNS, V_SKIP, WIDE,
        )  # fmt: skip
        top = higher

    # The page of the query and the one before it, by the programs that have the fewest others.
    all_channels = tl.arange(0, SIZE)
    lane = (line * KEPT + head) * 128
    whole = _short(tl.load(mine + all_channels[None, :]), DTYPE, WIDE)
    # One or two pages: nothing to load ahead, and the local memory is the other loop's.
    begin = far + (split + active - far % active) % active
    for step in tl.range(0, (pages - begin + active - 1) // active * steps, num_stages=1):
        tile = begin + step // steps * active
        n = step % steps * STEP + tl.arange(0, STEP)
        this = tl.where(tile < front, tile, first + tile - front)
        known = this * 64 + n <= at
        place = place_of(table, line, places, this, sink, ring, offset, head, RECORD)
        if K_BITS == 16:
            from_k = wide + place * 8 + n[:, None] * SIZE
        else:
            from_k = near_keys + (lane + (this % 2) * 64 + n)[:, None] * SIZE
        held = tl.load(from_k + all_channels[None, :], mask=known[:, None], other=0.0)
        if WIDE:
            held = held.to(tl.float32)
        scores = tl.dot(whole, tl.trans(held), input_precision="ieee")
        scores = _visible(scores, this * 64 + n, at, sinks, windows, lengths)
        higher = tl.maximum(top, tl.max(scores, axis=1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - level[:, None])
        fade = tl.exp2(top - level)
        total = total * fade + tl.sum(weights, axis=1)
        if V_BITS == 16:
            from_v = wide + place * 8 + V_SKIP // 2 + n[:, None] * SIZE
        else:
            from_v = near_values + (lane + (this % 2) * 64 + n)[:, None] * SIZE
        found = ()
        for RUN in tl.static_range(V_RUNS):
            if V_BITS == 16 or SIZE * V_BITS // 32 < 16:
                more = tl.load(
                    from_v + value_channel(RUN, SIZE, V_BITS)[None, :], mask=known[:, None], other=0.0
                )
            else:
                # Every other channel of a run: of whole words, as neighbours lie.
                column = (value_channel(RUN, SIZE, V_BITS) // 2)[None, :]
                two = tl.load(near_words + (lane + (this % 2) * 64 + n)[:, None] * (SIZE // 2) + column)
                more = (two >> (16 * (RUN % 2))).to(tl.int16).to(DTYPE, bitcast=True)
                more = tl.where(known[:, None], more, tl.zeros([1, 1], DTYPE))
            if WIDE:
                more = more.to(tl.float32)
            found = found + (
                tl.dot(weights.to(more.dtype), more, acc[RUN] * fade[:, None], input_precision="ieee"),
            )
        acc = found
        top = higher

    each = ROWS * (SIZE + 2)
    lines = parts + pair.to(tl.int64) * (MOST * each)
    block = lines + split * each
    for RUN in tl.static_range(V_RUNS):
        c = value_channel(RUN, SIZE, V_BITS)
        tl.store(block + g[:, None] * SIZE + c[None, :], acc[RUN])
    tl.store(block + ROWS * SIZE + g, top)
    tl.store(block + ROWS * (SIZE + 1) + g, total)
    if arrive(counters + pair, GENERATION, "acq_rel") == active - 1:
        tl.debug_barrier()
        sum_of = tl.zeros([ROWS, SIZE], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        for i in range(active):
            block = lines + i * each
            # Past the first-level cache, which knows nothing of other multiprocessors.
            theirs = tl.load(block + g[:, None] * SIZE + all_channels[None, :], cache_modifier=".cg")
            their_top = tl.load(block + ROWS * SIZE + g, cache_modifier=".cg")
            their_total = tl.load(block + ROWS * (SIZE + 1) + g, cache_modifier=".cg")
            higher = tl.maximum(top, their_top)
            level = tl.where(higher == float("-inf"), 0.0, higher)
            fade = tl.exp2(top - level)
            weight = tl.exp2(their_top - level)
            sum_of = sum_of * fade[:, None] + theirs * weight[:, None]
            total = total * fade + their_total * weight
            top = higher
        sum_of = sum_of / total[:, None]
        if V_ROTATE:
            sum_of = turned_by_hadamard(sum_of, ROWS, SIZE)
        into = out + (line * (GROUP * KV) + number * GROUP + g)[:, None] * SIZE + all_channels[None, :]
        tl.store(into, sum_of.to(out.dtype.element_ty), mask=(g < GROUP)[:, None])
        tl.store(counters + pair, 0)


def _runs(forms: Forms) -> tuple[int, int]:
    """Runs of channels of keys and of values."""

    def keys(bits: int) -> int:
        words = forms.size * bits // 32
        return 1 if bits == 16 else 16 // bits // 2 if words < 8 else (16 // bits) * max(1, words // 32)

    values = forms.values.bits
    split = 2 if values < 16 and forms.size * values // 32 >= 16 else 1
    return keys(forms.keys.bits), keys(values) * split


def decode_spec(
    pages: Pages,
    batch: int,
    heads: int,
    kv_heads: int,
    masked: bool,
    arch: str,
    context: int,
    tile: dict[str, int] | None = None,
    lines: bool = False,
) -> KernelSpec:
    """context: positions that may come, which bound the programs. `tile` overrides the choice of warps, stages and so on."""
    types, constants = shared(pages, batch, heads, kv_heads)
    dtype = pointer_type(pages.dtype)
    runs = _runs(pages.forms)
    tile = _tile(pages.forms, masked, arch) | (tile or {})
    keys = min(context, (pages.ring + min(pages.sink, 1 << 20)) * 64)
    wanted = tile["RESIDENT"] * processors_of(arch) // (batch * pages.heads)
    fits = max(1, min(MOST_SPLITS, triton.cdiv(keys, 64 * tile["EACH"]), wanted))
    signature = {**types, "rules": "*i32", "parts": "*fp32", "counters": "*i32", "out": dtype}
    constants |= {
        "K_RUNS": runs[0],
        "V_RUNS": runs[1],
        "LINES": int(lines),
        "MASKED": masked,
        "MOST": MOST_SPLITS,
        "EACH": tile["EACH"],
        "STEP": tile["STEP"],
        "WIDE": pages.dtype == torch.bfloat16 and triton.knobs.runtime.interpret,
        "GENERATION": generation(arch),
    }
    return KernelSpec(
        name=f"attention_decode_{dtype[1:]}_{pages.forms.keys.bits}_{pages.forms.values.bits}",
        fn=decode_kernel,
        signature={name: signature[name] for name in decode_kernel.arg_names if name in signature},
        constants=constants,
        divisible=(*POINTERS, "rules", "parts", "counters", "out"),
        num_warps=tile["WARPS"],
        num_stages=tile["STAGES"],
        batch=batch,
        kind="attention_decode",
        grid=(batch * pages.heads, fits, 1),
    )


def _tile(forms: Forms, masked: bool, arch: str) -> dict[str, int]:
    """RESIDENT: programs for each multiprocessor; STEP: positions at a time.

    Not tuned on a card yet: registers and spills of the compiled code chose. A run of 16 channels is work for one warp; more
    would unpack the same words again (the compiled loop has as many instructions a warp with two).
    """
    bits = forms.keys.bits, forms.values.bits
    small = arch.startswith(("gfx11", "gfx12"))
    warps, step = (
        (4, 64) if bits[1] == 16 else (1, 64 if bits == (4, 4) and forms.keys.channel and not masked else 32)
    )
    if not arch.startswith("sm_") or forms.size > 128:
        step = 32
    if small and min(bits) < 16:
        # Even so it spills: the operands of their matrix cores are held twice.
        warps, step = 1, 16
    elif small or forms.size > 128:
        warps *= 2
    return {"WARPS": warps, "STAGES": 2, "EACH": 2, "STEP": step, "RESIDENT": max(2, 8 // warps)}


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
    spec = decode_spec(pages, len(out), *shape, masked, arch, context, tile, lines=len(position) > 1)
    launch(
        spec, room.q, pages.near_keys, pages.near_values, pages.near_values.view(torch.int32), *pages.words(),
        pages.table, pages.members, rules, position, room.parts, room.counters, out, pages.table.shape[1],
        pages.offset, pages.sink, pages.ring,
    )  # fmt: skip
