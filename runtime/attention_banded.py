"""Attention over sink + local window in O(T * (sink + window)) time and memory, without a T x T mask.

The pattern (StreamingLLM, Xiao et al. 2023): the query at position i sees key j when j <= i and (j < sink or
i - j < window). A block of queries [a, b) needs the keys [a - window + 1, b), which are one slice, and the
sinks before them, which are another; inside that slice the band is a [b - a, window + b - a] mask that is
equal for all blocks but the first and last, so it is built once.

Shapes: B batch, H heads (query and key heads already matched), N queries, T keys, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows of queries per block of dense attention with a mask: bounds the mask to [BLOCK, T].
BLOCK = 256


def causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of the last N positions; query: [B, H, N, D], key, value: [B, H, T, D], N <= T.

    A chunk (1 < N < T) runs in blocks of queries, each over the keys it may see, as torch's own causal flag
    aligns the mask to the first key.
    """
    count, total = query.shape[2], key.shape[2]
    if count == 1:
        return F.scaled_dot_product_attention(query, key, value, scale=scale)
    if count == total:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    parts = []
    for first in range(0, count, BLOCK):
        rows = min(BLOCK, count - first)
        seen = total - count + first + rows
        position = torch.arange(seen - rows, seen, device=query.device)
        mask = torch.arange(seen, device=query.device)[None, :] <= position[:, None]
        parts.append(
            _masked(query[:, :, first : first + rows], key[:, :, :seen], value[:, :, :seen], mask, scale)
        )
    return torch.cat(parts, dim=2)


def streaming(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    sink: int,
    window: int,
    min_length: int = 0,
    tail_start: int = 0,
) -> Tensor:
    """Banded attention of the last N positions; gives [B, H, N, D].

    key, value: [B, H, S, D]. Either the whole context (tail_start 0, S = T), or what an evicting cache
    holds: the `sink` first keys, followed by the consecutive positions from `tail_start` on (then
    tail_start >= sink, and the window of every query lies in the tail). Queries before `min_length` - 1
    attend densely, which needs tail_start 0.
    """
    gap = tail_start - sink if tail_start else 0
    total = key.shape[2] + gap
    count = query.shape[2]
    start = total - count
    parts = []
    dense = min(max(min_length - 1 - start, 0), count)
    if dense:
        if tail_start:
            raise ValueError(
                f"dense queries up to {min_length} need keys that were evicted before {tail_start}"
            )
        parts.append(
            causal(query[:, :, :dense], key[:, :, : start + dense], value[:, :, : start + dense], scale)
        )
    # Half a window of queries per block: 1.5 windows of keys are read per query, and the blocks stay large
    # enough.
    block = min(max(window // 2, 64), BLOCK)
    masks: dict[tuple[int, int, int, int], Tensor | None] = {}
    for first in range(dense, count, block):
        rows = min(block, count - first)
        low, high = start + first, start + first + rows
        near = max(low - window + 1, 0)
        if near <= sink:
            near = 0
        far = min(sink, near)
        form = (rows, far, low - near, min(near, sink))
        if form not in masks:
            masks[form] = _band(low, rows, near, far, sink, window, query.device)
        near_key, near_value = key[:, :, near - gap : high - gap], value[:, :, near - gap : high - gap]
        if far:
            near_key = torch.cat([key[:, :, :far], near_key], dim=2)
            near_value = torch.cat([value[:, :, :far], near_value], dim=2)
        parts.append(_masked(query[:, :, first : first + rows], near_key, near_value, masks[form], scale))
    return torch.cat(parts, dim=2) if len(parts) != 1 else parts[0]


def visible(query_position: Tensor, key_position: Tensor, sink: int, window: int) -> Tensor:
    """The pattern as a boolean mask [N, T] from positions [N] and [T]: the definition that the band
    must equal.
    """
    distance = query_position[:, None] - key_position[None, :]
    return (distance >= 0) & ((distance < window) | (key_position[None, :] < sink))


def _band(
    low: int, rows: int, near: int, far: int, sink: int, window: int, device: torch.device
) -> Tensor | None:
    """Mask [rows, far + low + rows - near] of one block; None when every key is visible to every query."""
    positions = torch.cat(
        [torch.arange(far, device=device), torch.arange(near, low + rows, device=device)],
    )
    mask = visible(torch.arange(low, low + rows, device=device), positions, sink, window)
    return None if rows == 1 and bool(mask.all()) else mask


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
