"""Attention of the heads of a layer that run in one call, in torch: bands, contexts, rings, rows of a padded batch.

Shapes: B batch, h query heads of a bucket, N queries, T positions, D head size.
"""

from functools import lru_cache

import torch
from torch import Tensor

from nstf.runtime.attention_banded import causal, streaming
from nstf.runtime.attention_layout import Bucket
from nstf.runtime.attention_stored import attend_stored
from nstf.runtime.ring_cache import Segment, SegmentStore


def attend(
    query: Tensor,
    store: SegmentStore,
    bucket: Bucket,
    per_group: int,
    scale: float,
    total: int,
    rows: list[tuple[int, int]] | None,
) -> Tensor:
    """One bucket: query [B, h, N, D] against its store, row by row when the rows are padded differently."""
    key, value = store.keys, store.values
    if key is None or value is None:
        raise ValueError("the KV cache is empty: update was not called before attention")
    if store.ring or store.tail_start:
        # Every row filled its ring, so no padding is left in it.
        return _attend_rows(query, key, value, bucket, per_group, scale, store.tail_start, store.ring)
    if rows is None:
        return _attend_rows(query, key, value, bucket, per_group, scale)
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    start = total - query.shape[2]
    for row, (low, high) in enumerate(rows):
        first, last = max(low - start, 0), high - start
        if last > first:
            one = slice(row, row + 1)
            out[one, :, first:last] = _attend_rows(
                query[one, :, first:last],
                key[one, :, low:high],
                value[one, :, low:high],
                bucket,
                per_group,
                scale,
            )
    return out


def by_rules(
    query: Tensor,
    store: SegmentStore,
    bucket: Bucket,
    scale: float,
    total: int,
    rows: list[tuple[int, int]] | None,
) -> Tensor:
    """One bucket of quantised groups or block-sparse heads: query [B, h, N, D], row by row."""
    out = query.new_zeros(query.shape)
    start = total - query.shape[2]
    for row, (low, high) in enumerate(rows or [(0, total)] * len(query)):
        first, last = max(low - start, 0), high - start
        if last > first:
            near, far = store.stored(row, low, high)
            out[row, :, first:last] = attend_stored(
                query[row, :, first:last], near, far, bucket.slots, bucket.plans, scale
            )
    return out


def _attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bucket: Bucket,
    per_group: int,
    scale: float,
    tail_start: int = 0,
    ring: bool = False,
) -> Tensor:
    count = query.shape[2]
    band = bucket.band
    if band is not None and not ring and not tail_start:
        # Drop what no query of the call sees before the heads are gathered: decoding touches sink + window
        # keys.
        start = key.shape[2] - count
        near = start - band[1] + 1
        if near > band[0] and start + 1 >= band[2]:
            key, value = (torch.cat([t[:, :, : band[0]], t[:, :, near:]], dim=2) for t in (key, value))
            tail_start = near
    if count == 1 and (band is None or ring or tail_start):
        return _one_token(query, key, value, bucket, per_group, scale)
    key, value = heads_of(key, bucket.slots), heads_of(value, bucket.slots)
    if band is None or ring:
        return causal(query, key, value, scale)
    sink, window, min_length = band
    if tail_start:
        min_length = 0
    return streaming(
        query, key, value, scale, sink=sink, window=window, min_length=min_length, tail_start=tail_start
    )


def _one_token(
    query: Tensor, key: Tensor, value: Tensor, bucket: Bucket, per_group: int, scale: float
) -> Tensor:
    """One new token that sees all of key, value: query heads of a KV head become the rows of one product.

    No key is copied for its query heads; that copy would cost more than the attention.
    """
    product = torch.nn.functional.scaled_dot_product_attention
    batch, heads, _, size = query.shape
    groups = bucket.whole_groups(per_group)
    if groups is not None:
        packed = query.reshape(batch, len(groups), per_group, size)
        out = product(packed, heads_of(key, groups), heads_of(value, groups), scale=scale)
        return out.reshape(batch, heads, 1, value.shape[-1])
    parts, first = [], 0
    while first < heads:
        slot, last = bucket.slots[first], first + 1
        while last < heads and bucket.slots[last] == slot:
            last += 1
        one = slice(slot, slot + 1)
        parts.append(product(query[:, first:last].transpose(1, 2), key[:, one], value[:, one], scale=scale))
        first = last
    return torch.cat(parts, dim=2).transpose(1, 2)


def heads_of(stored: Tensor, slots: tuple[int, ...]) -> Tensor:
    """The heads `slots` of [B, h, T, D]: the tensor itself or a view where that is possible."""
    low, count = slots[0], len(slots)
    if count == stored.shape[1] and slots == tuple(range(count)):
        return stored
    if slots == tuple(range(low, low + count)):
        return stored[:, low : low + count]
    return stored.index_select(1, _index(slots, stored.device))


@lru_cache(maxsize=4096)
def _index(slots: tuple[int, ...], device: torch.device) -> Tensor:
    """Made once: a small tensor costs as much as a small matrix product."""
    return torch.tensor(slots, device=device)


def plain_store(segment: Segment, key: Tensor, value: Tensor) -> SegmentStore:
    """The segment's heads of a whole context that no planned cache holds."""
    store = SegmentStore(segment)
    store.keys, store.values = heads_of(key, segment.kv_heads), heads_of(value, segment.kv_heads)
    return store
