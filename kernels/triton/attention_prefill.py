# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Causal attention of many queries over lists of key blocks: dense, sink and window, or block-sparse.

A program takes 128 queries of a head (of a narrow band 64, of several heads that see the same keys 64 of each), aligned in
the sequence, so that its blocks are those of the plan. Key blocks that all of its queries see entirely run without a mask;
masks are left to the block of the diagonal and the edges of sinks and windows (FlashAttention-2, Dao 2023, with exp2).
Block-sparse heads walk a list of blocks instead of a range.

Quantised caches: a query in page P reads pages up to P - 2 in their stored form, which `far` holds as numbers of 16 bits
(attention_pages.fetch made them, once for all queries of a chunk), and the last two from `near`, as they came. Of the two
pages of 128 queries, the second reads one page more from `far`; the loop over the last pages masks that by row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.architecture import architecture
from nstf.kernels.triton.launching import launch, processors_of
from nstf.kernels.triton.spec import KernelSpec, pointer_type, remembered

BLOCK = 128
# Windows for which fewer queries a program are faster: measured at 1024, not at 4096.
NARROW = 2048
LOG2E = 1.4426950408889634


@triton.jit
def _keys(base, first, d, N: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Rows first .. first + N of [.., SIZE]: none of them is beyond the end."""
    n = tl.arange(0, N)
    x = tl.load(base + (first + n).to(tl.int64)[:, None] * SIZE + d[None, :])
    if WIDE:
        x = x.to(tl.float32)
    return x


@triton.jit
def _whole_block(
    acc, total, top, q, far_k, far_v, first, scale, d,
    N: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds N keys that every query sees."""
    k = _keys(far_k, first, d, N, SIZE, WIDE)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    higher = tl.maximum(top, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - higher[:, None])
    fade = tl.exp2(top - higher)
    total = total * fade + tl.sum(weights, axis=1)
    v = _keys(far_v, first, d, N, SIZE, WIDE)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, total, higher


@triton.jit
def _masked_block(
    acc, total, top, q, base_k, base_v, row, inside, key, from_low, low, high, scale, d,
    N: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds N keys of which query m sees those with from_low >= low[m] and key <= high[m].

    inside [N]: rows that may be loaded, among them all that are seen. Two comparisons a pair: what else depends on the query
    alone is in those numbers.
    """
    at = row.to(tl.int64)[:, None] * SIZE + d[None, :]
    k = tl.load(base_k + at, mask=inside[:, None], other=0.0)
    v = tl.load(base_v + at, mask=inside[:, None], other=0.0)
    if WIDE:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    seen = (from_low[None, :] >= low[:, None]) & (key[None, :] <= high[:, None])
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1) * scale)
    level = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores * scale - level[:, None])
    fade = tl.exp2(top - level)
    total = total * fade + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, total, higher


@triton.jit
def prefill_kernel(
    q,  # [batch, heads, count, SIZE]: positions start ..
    far_keys,  # [batch, KV, far_rows, SIZE]: row p is position p
    far_values,
    near_keys,  # [batch, KV, near_rows, SIZE]: positions near_start ..
    near_values,
    out,  # [batch, count, heads, SIZE]
    members,  # i32 [programs' heads]: head and KV head of each, and KV head within far and near
    rules,  # i32 [heads, 3]: sink, window, min_length
    lists,  # i32 [programs' heads, tiles, most]: key blocks of each tile, in order; the tile's own is last
    counts,  # i32 [programs' heads, tiles]
    start,
    count,
    near_start,
    far_rows,
    near_rows,
    heads,
    kv_heads,
    far_heads,
    most,
    line_stride,
    head_stride,
    row_stride,
    near_line_stride,
    near_head_stride,
    scale,  # times log2(e)
    KEPT: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,  # keys of an unmasked step: 32, 64 or 128, no more than QUERIES
    LISTS: tl.constexpr,
    BANDS: tl.constexpr,
    SAME: tl.constexpr,  # near is far: pages of 16 bits
    EDGE: tl.constexpr,  # keys of a masked step: 64 or 32
    QUERIES: tl.constexpr,  # of a program and head: 128, or 64 without lists
    HEADS: tl.constexpr,  # of a program: neighbours among the members, of one KV head and of one rule
    WIDE: tl.constexpr,
):
    DTYPE: tl.constexpr = out.dtype.element_ty
    # Tiles with the most keys first; the heads of a KV head side by side.
    tiles = tl.num_programs(1)
    tile = start // QUERIES + tiles - 1 - tl.program_id(1)
    line = tl.program_id(0) // (KEPT // HEADS)
    which = tl.program_id(0) % (KEPT // HEADS) * HEADS
    head = tl.load(members + which * 2)
    kv = tl.load(members + which * 2 + 1)
    d = tl.arange(0, SIZE)
    m = tl.arange(0, QUERIES * HEADS)
    at = tile * QUERIES + m % QUERIES
    row = at - start
    here = (row >= 0) & (row < count)
    from_q = q + line.to(tl.int64) * line_stride
    if HEADS > 1:
        heads_of = tl.load(members + (which + m // QUERIES) * 2)
        from_rows = from_q + (heads_of.to(tl.int64) * head_stride + row.to(tl.int64) * row_stride)[:, None]
    else:
        from_rows = from_q + head.to(tl.int64) * head_stride + row.to(tl.int64)[:, None] * row_stride
    query = tl.load(from_rows + d[None, :], mask=here[:, None], other=0.0)
    if WIDE:
        query = query.to(tl.float32)
    far_lane = (line * far_heads + kv).to(tl.int64) * far_rows * SIZE
    far_k = far_keys + far_lane
    far_v = far_values + far_lane
    near_lane = line.to(tl.int64) * near_line_stride + kv.to(tl.int64) * near_head_stride
    near_k = near_keys + near_lane
    near_v = near_values + near_lane

    acc = tl.zeros([QUERIES * HEADS, SIZE], tl.float32)
    total = tl.zeros([QUERIES * HEADS], tl.float32)
    top = tl.full([QUERIES * HEADS], float("-inf"), tl.float32)
    n = tl.arange(0, EDGE)
    # The first page that the last loop takes: of pages of 16 bits, the blocks before the diagonal's need no mask.
    PAGES: tl.constexpr = QUERIES // 64
    last = tile * PAGES
    low = tl.zeros([QUERIES * HEADS], tl.int32)
    lowest = 0  # no query sees a key between the sinks and this
    lower = 0  # where the steps of a window's lower edge begin,
    begin = 0  # and the steps that all queries see
    sink = 0
    sink_blocks = 0  # steps that lie among the sinks as a whole
    sink_steps = 0  # masked steps of sinks
    edge_steps = 0

    if LISTS:
        place = which * tiles + tile - start // 128
        number = tl.load(counts + place)
        listed = lists + place.to(tl.int64) * most
        if not SAME:
            if number >= 2:
                # The block before the diagonal's has pages that are read in two ways.
                if tl.load(listed + number - 2) == tile - 1:
                    last = tile * 2 - 2
        steps = (number - 1 - (tile * 2 - last) // 2) * (128 // TILE)
    else:
        if not SAME:
            last = tl.maximum(tile * PAGES - PAGES, 0)
        if BANDS:
            sink = tl.load(rules + head * 3)
            window = tl.load(rules + head * 3 + 1)
            length = tl.load(rules + head * 3 + 2)
            low = tl.where(at + 1 < length, 0, tl.maximum(at - window + 1, 0))
            # Rows that are not there ask for nothing.
            lowest = tl.min(tl.where(here, low, 1 << 30), axis=0)
            highest = tl.max(tl.where(here, low, 0), axis=0)
            lower = tl.minimum(lowest // EDGE * EDGE, last * 64)
            begin = tl.minimum((highest + TILE - 1) // TILE * TILE, last * 64)
            sink_end = tl.minimum(sink, lower)
            sink_blocks = sink_end // TILE
            sink_steps = (sink_end - sink_blocks * TILE + EDGE - 1) // EDGE
            edge_steps = (begin - lower) // EDGE
        steps = sink_blocks + (last * 64 - begin) // TILE
    for i in range(steps):
        if LISTS:
            first = tl.load(listed + i // (128 // TILE)) * 128 + (i % (128 // TILE)) * TILE
        else:
            first = tl.where(i < sink_blocks, i * TILE, begin + (i - sink_blocks) * TILE)
        acc, total, top = _whole_block(
            acc, total, top, query, far_k, far_v, first, scale, d, TILE, SIZE, WIDE
        )

    # The rest of the sinks, the lower edge of a window, and pages from `last` on: of each row those of its own page and the
    # one before from `near`, others from `far`.
    mine = at // 64
    old_steps = sink_steps + edge_steps
    if SAME:
        far_steps = old_steps
        near_first = last * 64
    else:
        # Of one page of queries, all read the same pages from `far`.
        far_steps = old_steps + (tl.maximum(tile * PAGES - last, 0) * (64 // EDGE) if PAGES > 1 else 0)
        near_first = tl.maximum(tile * PAGES - 1, last) * 64
    # A number of steps that the compiler knew would unroll them, and NVIDIA's then lets one matrix instruction wait for the
    # other in all loops of the kernel: 10 % of the time of dense attention.
    end = tl.minimum(tile * QUERIES + QUERIES, start + count)
    for j in range(far_steps + (end - near_first + EDGE - 1) // EDGE):
        is_far = j < far_steps
        from_start = tl.where(
            j < sink_steps,
            sink_blocks * TILE + j * EDGE,
            tl.where(
                j < old_steps,
                lower + (j - sink_steps) * EDGE,
                tl.where(is_far, last * 64 + (j - old_steps) * EDGE, near_first + (j - far_steps) * EDGE),
            ),
        )
        this = from_start + n
        high = tl.where(here, at, -1)
        base_k = near_k
        base_v = near_v
        if not SAME:
            high = tl.where((mine - from_start // 64 >= 2) == is_far, high, -1)
            if is_far:
                base_k = far_k
                base_v = far_v
        inside = this - tl.where(is_far, 0, near_start)
        # Keys that no query sees may be of pages that were not fetched: anything, NaN too.
        ok = (inside >= 0) & (inside < tl.where(is_far, far_rows, near_rows))
        ok = ok & ((this >= lowest) | (this < sink))
        acc, total, top = _masked_block(
            acc,
            total,
            top,
            query,
            base_k,
            base_v,
            inside,
            ok,
            this,
            tl.where(this < sink, 1 << 30, this) if BANDS else this,
            low,
            high,
            scale,
            d,
            EDGE,
            SIZE,
            WIDE,
        )

    if HEADS > 1:
        head = heads_of
    into = out + ((line * count + row).to(tl.int64) * heads + head)[:, None] * SIZE + d[None, :]
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(into, acc.to(DTYPE), mask=here[:, None])


@remembered
def prefill_spec(
    dtype: torch.dtype,
    size: int,
    batch: int,
    kept: int,
    tiles: int,
    lists: bool,
    bands: bool,
    same: bool,
    arch: str,
    tile: dict[str, int] | None = None,
    narrow: bool = False,
    together: int = 1,
) -> KernelSpec:
    """kept: heads of the launch; tiles: of its queries. narrow, together: as in `prefill`. `tile` overrides the choice of
    keys at a time, warps and so on."""
    tile = _tile(size, lists, arch, narrow, together) | (tile or {})
    kind = pointer_type(dtype)
    pointers = ("q", "far_keys", "far_values", "near_keys", "near_values", "out")
    integers = ("members", "rules", "lists", "counts")
    types = dict.fromkeys(pointers, kind) | dict.fromkeys(integers, "*i32") | {"scale": "fp32"}
    constants = {
        "KEPT": kept,
        "SIZE": size,
        "TILE": tile["TILE"],
        "LISTS": lists,
        "BANDS": bands,
        "SAME": same,
        "EDGE": tile["EDGE"],
        "QUERIES": tile["QUERIES"],
        "HEADS": tile["HEADS"],
        "WIDE": dtype == torch.bfloat16 and triton.knobs.runtime.interpret,
    }
    names = [name for name in prefill_kernel.arg_names if name not in constants]
    strides = ("line_stride", "head_stride", "row_stride", "near_line_stride", "near_head_stride")
    return KernelSpec(
        name=f"attention_prefill_{kind[1:]}_{size}{'_lists' if lists else ''}{'_bands' if bands else ''}"
        + (f"_h{tile['HEADS']}" if tile["HEADS"] > 1 else ""),
        fn=prefill_kernel,
        signature={name: types.get(name, "i32") for name in names},
        constants=constants,
        divisible=(*pointers, *integers, *strides),
        num_warps=tile["WARPS"],
        num_stages=tile["STAGES"],
        batch=batch,
        kind="attention_prefill",
        options={"maxnreg": tile["REGS"]} if tile["REGS"] else {},
        grid=(batch * kept // constants["HEADS"], tiles, 1),
    )


def shares(size: int, arch: str) -> bool:
    """Whether programs may take several heads of a KV head."""
    return size == 128 and arch == "sm_90"


def _tile(size: int, lists: bool, arch: str, narrow: bool, together: int) -> dict[str, int]:
    """Queries and keys at a time, warps and stages: what compiles without spills and fits local memory.

    Timed on an H200 with heads of 128: 64 keys and three stages for ranges and bands, of lists only what stands here.
    Narrow bands: 64 queries have fewer masked steps, and the start and the end of one program overlaps the other of its
    multiprocessor. Several heads together read keys and values once (and spill a few registers: faster all the same).
    """
    one = {"HEADS": together, "REGS": 0}
    if arch.startswith("sm_"):
        if size == 128 and together > 1:
            four = together == 4
            return {"QUERIES": 64, "TILE": 64, "WARPS": 8, "STAGES": 3 if four else 2, "EDGE": 64,
                    "HEADS": together, "REGS": 0 if four else 128}  # fmt: skip
        if size == 128 and narrow:
            return {"QUERIES": 64, "TILE": 64, "WARPS": 4, "STAGES": 3, "EDGE": 64} | one
        if size == 128 and not lists:
            return {"QUERIES": BLOCK, "TILE": 64, "WARPS": 8, "STAGES": 3, "EDGE": 64} | one
        keys = 128 if size <= 128 else 64
        return {"QUERIES": BLOCK, "TILE": keys, "WARPS": 8, "STAGES": 2, "EDGE": 64} | one
    if arch.startswith(("gfx11", "gfx12")):
        keys = 16 if size > 64 else 32
        return {"QUERIES": BLOCK, "TILE": keys, "WARPS": 8, "STAGES": 1, "EDGE": keys} | one
    lds = architecture(arch).lds_bytes_per_group
    return one | {
        "QUERIES": BLOCK,
        "TILE": 64 if size <= 128 or lds > 65536 else 32,
        "WARPS": 4 if size <= 64 else 8,
        "STAGES": 1,
        "EDGE": 32,
    }


def prefill(
    q: Tensor,
    far: tuple[Tensor, Tensor],
    near: tuple[Tensor, Tensor],
    out: Tensor,
    members: Tensor,
    rules: Tensor,
    start: int,
    near_start: int,
    scale: float,
    arch: str,
    bands: bool = False,
    lists: tuple[Tensor, Tensor] | None = None,
    tile: dict[str, int] | None = None,
    narrow: bool = False,
    together: int = 1,
) -> None:
    """Attention of some heads, written into out [batch, count, heads, size].

    q: [batch, heads, count, size] (any strides, the last one 1), the positions from `start` on. far: keys and values
    [batch, KV, rows, size], row p is position p, of all pages that are read in their stored form; near: those from
    near_start on, a multiple of 64, as they came. For pages of 16 bits both may be the same. members: int32 [kept, 2],
    each head and its KV head in far and near. rules: int32 [heads, 3]; without `bands` they are not looked at.
    narrow: bands of at most NARROW positions. together: 2 or 4 where so many neighbours among the members have one KV head
    and one rule, and `shares` says so.
    lists: (blocks int32 [kept, tiles, most], counts int32 [kept, tiles]) of batch 1 (attention_predict.py).
    """
    batch, heads, count, size = q.shape
    if lists is not None and batch != 1:
        raise ValueError(f"lists of blocks are for one sequence, not {batch}")
    if near[0].stride() != near[1].stride() or near[0].stride(2) != size:
        raise ValueError("near keys and values must lie alike, each position's channels side by side")
    # Fewer programs would leave a part of the card idle at the end.
    if batch * len(members) // together * (count // 64) < 6 * processors_of(arch):
        together = 1
    each = _tile(size, lists is not None, arch, narrow, together)["QUERIES"]
    if tile is not None:
        each = tile.get("QUERIES", each)
    tiles = (start + count - 1) // each - start // each + 1
    spec = prefill_spec(
        q.dtype, size, batch, len(members), tiles, lists is not None, bands,
        far[0].data_ptr() == near[0].data_ptr(), arch, tile, narrow, together,
    )  # fmt: skip
    blocks, counts = lists or (members, members)
    launch(
        spec, q, *far, *near, out, members, rules, blocks, counts, start, count, near_start, far[0].shape[2],
        near[0].shape[2], heads, near[0].shape[1], far[0].shape[1], blocks.shape[-1], q.stride(0), q.stride(1),
        q.stride(2), near[0].stride(0), near[0].stride(1), scale * LOG2E,
    )  # fmt: skip
