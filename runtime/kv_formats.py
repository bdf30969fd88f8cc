"""The quantised KV cache in plain torch: formats, the rule of pages, bytes, and a masked reference for kernels.

Positions are stored in pages of 64, aligned. A query in page P (position // 64) reads pages P and P - 1 in 16 bits
and pages up to P - 2 in their stored form. So at most 128 positions of a group are held in 16 bits, and what a query
sees depends on its position alone, not on how a prompt is cut into calls.

Asymmetric integers: x ~ minimum + scale * code with code in 0 .. 2^bits - 1, rounded to nearest even; minimum and
scale are float16. `by` channel: a pair for each channel of a page (KIVI, Liu et al. 2024: outliers of keys sit in
channels); `by` token: a pair for each position and up to 64 channels. `rotate`: heads are multiplied by an orthonormal
Hadamard matrix first (QuaRot, Ashkboos et al. 2024); queries are rotated alike, outputs are rotated back.

Shapes: H query heads, G KV heads, N queries (the last ones), T positions, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nstf.kernels.formats.rotated import hadamard
from nstf.kernels.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from nstf.runtime.attention_plan import AttentionPlan, GroupPlan, LayerPlan

PAGE = 64
BLOCK = 128
GROUP = 64
BITS = (16, 8, 4, 2)
BY = ("channel", "token")
_HALF_MAX = 65504.0


@dataclass(frozen=True)
class KVFormat:
    """How the keys or the values of a KV group are stored: 16 bits as they are, or integers of fewer."""

    bits: int
    by: str
    rotate: bool

    def __str__(self) -> str:
        return "16" if self.bits == 16 else f"{self.bits}{self.by[0]}{'r' if self.rotate else ''}"


PLAIN = KVFormat(16, "token", False)


@dataclass(frozen=True)
class Page:
    """A stored page: codes [.., 64, D] uint8, one code a byte here; minimum and scale float16 of
    [.., 1, D] (by channel) or [.., 64, D / group] (by token).
    """

    codes: Tensor
    minimum: Tensor
    scale: Tensor


def token_group(head_dim: int) -> int:
    """Channels that share a pair of scale and minimum in formats by token."""
    return GROUP if head_dim % GROUP == 0 else head_dim


def rotation_block(head_dim: int) -> int:
    """The largest power of two that divides the head size: what `rotate` works on."""
    return head_dim & -head_dim


def rotated(x: Tensor) -> Tensor:
    """x [.., D] times the block-diagonal orthonormal Hadamard matrix, float32; its own inverse."""
    flat = x.float().reshape(-1, x.shape[-1])
    return hadamard(flat, rotation_block(x.shape[-1])).reshape(x.shape)


def quantise_page(x: Tensor, fmt: KVFormat) -> Page:
    """The stored form of x [.., 64, D] (already finite), for bits below 16. Raises ValueError for other shapes."""
    if fmt.bits == 16:
        raise ValueError("pages of 16 bits are stored as they are")
    if x.ndim < 2 or x.shape[-2] != PAGE:
        raise ValueError(f"a page has {PAGE} positions, not the {tuple(x.shape)} of this tensor")
    x = rotated(x) if fmt.rotate else x.float()
    grouped = _grouped(x, fmt)
    low, high = grouped.amin(-1), grouped.amax(-1)
    minimum = low.clamp(-_HALF_MAX, _HALF_MAX).half()
    # Of the rounded minimum: the largest number of the group stays within reach.
    scale = ((high - minimum.float()) / (2**fmt.bits - 1)).clamp(0, _HALF_MAX).half()
    step = scale.float()[..., None]
    codes = ((grouped - minimum.float()[..., None]) / step).round().clamp(0, 2**fmt.bits - 1)
    codes = torch.where(step > 0, codes, 0.0).to(torch.uint8)
    return Page(_ungrouped(codes, fmt, x.shape), minimum, scale)


def dequantise_page(page: Page, fmt: KVFormat) -> Tensor:
    """[.., 64, D] float32 as a kernel computes with it, rotated back to the channels of the model."""
    codes = _grouped(page.codes.float(), fmt)
    x = page.minimum.float()[..., None] + page.scale.float()[..., None] * codes
    x = _ungrouped(x, fmt, page.codes.shape)
    return rotated(x) if fmt.rotate else x


def _grouped(x: Tensor, fmt: KVFormat) -> Tensor:
    """[.., 64, D] so that the last axis holds what shares a scale: [.., 1, D, 64] or [.., 64, D / group, group]."""
    if fmt.by == "channel":
        return x.transpose(-1, -2)[..., None, :, :]
    return x.reshape(*x.shape[:-1], -1, token_group(x.shape[-1]))


def _ungrouped(x: Tensor, fmt: KVFormat, shape: torch.Size) -> Tensor:
    if fmt.by == "channel":
        return x[..., 0, :, :].transpose(-1, -2)
    return x.reshape(shape)


def in_16_bits(x: Tensor) -> Tensor:
    """x as float16 holds it, float32; what is beyond its range becomes its largest number."""
    return x.float().clamp(-_HALF_MAX, _HALF_MAX).half().float()


def stored(x: Tensor, fmt: KVFormat) -> Tensor:
    """x [.., T, D] as pages read back, float32: whole pages in their stored form, the rest in 16 bits."""
    plain = in_16_bits(x)
    whole = x.shape[-2] // PAGE * PAGE
    if fmt.bits == 16 or not whole:
        return plain
    pages = plain[..., :whole, :].reshape(*x.shape[:-2], -1, PAGE, x.shape[-1])
    back = dequantise_page(quantise_page(pages, fmt), fmt).flatten(-3, -2)
    return torch.cat([back, plain[..., whole:, :]], dim=-2)


def page_bytes(fmt: KVFormat, head_dim: int) -> int:
    """Bytes of a page of keys or values of one KV head: codes, scales and minimums."""
    if fmt.bits == 16:
        return PAGE * head_dim * 2
    pairs = head_dim if fmt.by == "channel" else PAGE * (head_dim // token_group(head_dim))
    # Codes are packed per position, so an odd head size is rounded up.
    return PAGE * math.ceil(head_dim * fmt.bits / 8) + 4 * pairs


def group_bytes(group: GroupPlan, head_dim: int, context: int) -> int:
    """Bytes that one KV head holds once `context` tokens were read, by whole pages where it is quantised or a ring.

    The last two pages are in 16 bits. A ring keeps the pages that the query of the last token sees a position of.
    """
    pages = -(-context // PAGE)
    sinks, first = 0, 0
    if group.recent and context >= group.min_length:
        sinks, first = min(-(-group.sink // PAGE), pages), max(context - group.recent, 0) // PAGE

    def held_of(end: int) -> int:
        """Pages before `end` that are held: the sinks, and those from `first` on."""
        return min(sinks, end) + max(0, end - max(first, sinks))

    # The last page, which may not be full, is always held: no walk over pages, a file may state any context.
    positions = held_of(pages) * PAGE - (pages * PAGE - context)
    old = held_of(max(pages - 2, 0))
    plain = (positions - old * PAGE) * head_dim * 2
    return sum(old * page_bytes(fmt, head_dim) + plain for fmt in (group.keys, group.values))


def layer_bytes(layer: LayerPlan, head_dim: int, context: int) -> int:
    """Bytes of the cache of one layer at `context` tokens."""
    return sum(group_bytes(group, head_dim, context) for group in layer.groups)


def cache_bytes(plan: AttentionPlan, context: int) -> int:
    """Bytes of the planned cache of one sequence of `context` tokens."""
    return sum(layer_bytes(layer, plan.head_dim, context) for layer in plan.layers)


def dense_group_bytes(head_dim: int, context: int, window: int = 0) -> int:
    """Bytes of one KV head without a plan, in 16 bits; of a layer with a window what its last query sees, by whole pages."""
    first = max(context - window, 0) // PAGE * PAGE if window else 0
    return (context - first) * head_dim * 4


def dense_bytes(plan: AttentionPlan, context: int, windows: Sequence[int] | None = None) -> int:
    """Bytes of the same cache without a plan, in 16 bits. windows: of the model's layers (nstf.runtime.attention_windows),
    None where all see everything."""
    return sum(
        len(layer.groups) * dense_group_bytes(plan.head_dim, context, window)
        for layer, window in zip(plan.layers, windows or [0] * len(plan.layers), strict=True)
    )


def predicted_blocks(
    query: Tensor, key: Tensor, *, block: int, scale: float, threshold: float, stride: int
) -> Tensor:
    """Key blocks [block + 1] (bool) that the 128 queries of `block` of one head compute.

    query: [128, D], rotated by position already. key: [T, D] with T >= 128 (block + 1), as the first query of the
    block reads it. Antidiagonal sums (XAttention, Xu et al. 2025): of each group of `stride` queries and `stride` keys
    the products along an antidiagonal are added, and a softmax over the groups of keys estimates their mass.
    """
    mass = predicted_mass(query[None], key[: (block + 1) * BLOCK], scale=scale, stride=stride)[0]
    return chosen_blocks(mass, threshold)


def predicted_mass(query: Tensor, key: Tensor, *, scale: float, stride: int) -> Tensor:
    """[R, T / 128] estimated share of the mass of each key block for queries [R, 128, D] of the last block of key."""
    heads, count, size = query.shape
    turned = query.float().view(heads, count // stride, stride, size).flip(2).flatten(2)
    groups = key.float().reshape(-1, stride * size)
    scores = turned @ groups.T * (scale / stride)
    shares = scores.softmax(-1).reshape(*scores.shape[:-1], -1, BLOCK // stride)
    mass: Tensor = shares.sum(-1).mean(1)
    return mass / mass.sum(-1, keepdim=True)


def chosen_blocks(mass: Tensor, threshold: float) -> Tensor:
    """[.., blocks] bool: the fewest blocks whose mass reaches the threshold, always the first and the last."""
    order = mass.argsort(dim=-1, descending=True, stable=True)
    ranked = mass.gather(-1, order)
    before = ranked.cumsum(-1) - ranked
    keep = torch.zeros_like(mass, dtype=torch.bool).scatter(-1, order, before < threshold)
    keep[..., 0] = True
    keep[..., -1] = True
    return keep


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: LayerPlan,
    *,
    scale: float | None = None,
    prefill: bool = True,
) -> Tensor:
    """Attention of one sequence by all rules of a plan, [H, N, Dv] float32, slowly and with one mask per head.

    query: [H, N, D], the last N of the T positions of key [G, T, D] and value [G, T, Dv], as the model makes them
    (keys after RoPE). The result of a position does not depend on N, but for block-sparse heads: their whole aligned
    blocks of 128 queries within the N are sparse, everything else is dense; `prefill` False makes all dense.
    """
    heads, count, size = query.shape
    total = key.shape[1]
    scale = size**-0.5 if scale is None else scale
    position = torch.arange(total - count, total)
    column = torch.arange(total)
    # Page of each key counted back from the page of each query: 2 and more are read as they are stored.
    old = position[:, None] // PAGE - column // PAGE >= 2
    per_group = heads // len(layer.groups)
    out = query.new_zeros(heads, count, value.shape[-1], dtype=torch.float32)
    for index, group in enumerate(layer.groups):
        plain_key, plain_value = in_16_bits(key[index]), in_16_bits(value[index])
        far_key, far_value = stored(key[index], group.keys), stored(value[index], group.values)
        for head in range(index * per_group, (index + 1) * per_group):
            q = query[head].float()
            seen = _seen(layer, head, position, column)
            blocks = layer.heads[head].block_sparse
            if blocks and prefill:
                _mask_blocks(seen, q, plain_key, far_key, blocks, total - count, scale)
            scores = torch.where(old, q @ far_key.T, q @ plain_key.T) * scale
            weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
            out[head] = (weights * old) @ far_value + (weights * ~old) @ plain_value
    return out


def _seen(layer: LayerPlan, head: int, position: Tensor, column: Tensor) -> Tensor:
    """[N, T] bool: causal, and banded where the head's rule says so."""
    distance = position[:, None] - column
    seen = distance >= 0
    band = layer.heads[head].streaming
    if band is not None:
        sink, window, min_length = band
        near = (column < sink) | (distance < window)
        seen &= near | (position[:, None] + 1 < min_length)
    return seen


def _mask_blocks(
    seen: Tensor,
    query: Tensor,
    key: Tensor,
    far_key: Tensor,
    rule: tuple[float, int, int],
    start: int,
    scale: float,
) -> None:
    """Clear the keys of blocks that are not computed in `seen` [N, T], for the whole blocks of queries."""
    threshold, stride, min_length = rule
    for block in range(-(-start // BLOCK), (start + query.shape[0]) // BLOCK):
        first = block * BLOCK
        if first + 1 < min_length:
            continue
        # What the first query of the block reads: the page before it is still in 16 bits.
        border = max(first - PAGE, 0)
        read = torch.cat([far_key[:border], key[border : first + BLOCK]])
        rows = slice(first - start, first - start + BLOCK)
        keep = predicted_blocks(
            query[rows], read, block=block, scale=scale, threshold=threshold, stride=stride
        )
        seen[rows, : first + BLOCK] &= keep.repeat_interleave(BLOCK)
