"""A transformers model that attends as a plan says: the cache quantised and read back, in float32.

What is measured with it is what the runtimes compute, up to rounding: nstf.runtime.kv_formats has the rules, and tests
compare this pass with its reference. Memory is bounded by chunks of queries; no [T, T] matrix is kept for any head.

Shapes: H query heads, G KV heads, R = H / G, T tokens, D head size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nstf.errors import UnsupportedError
from nstf.runtime.attention_banded import streaming
from nstf.runtime.attention_plan import LayerPlan
from nstf.runtime.attention_windows import windows_of
from nstf.runtime.kv_formats import BLOCK, PAGE, PLAIN, chosen_blocks, in_16_bits, predicted_mass, stored

NAME = "nstf_simulated"
# Queries that are attended to at a time: whole pages, and whole blocks of block-sparse heads.
CHUNK = 512

# (layer, query [H, T, D], key [G, T, D], value, scale, window of the layer or 0) -> output [H, T, Dv]
Attend = Callable[[int, Tensor, Tensor, Tensor, float, int], Tensor]
# By the id of the config that the attention modules share. No context variable: on a GPU the way back computes checkpointed
# layers again in a thread of autograd's own.
_ACTIVE: dict[int, tuple[Attend, tuple[int, ...]]] = {}


def check(module: nn.Module) -> tuple[int, ...]:
    """The windows of a model's layers (nstf.runtime.attention_windows).

    Raises UnsupportedError for models that do not attend through transformers' interface in all layers, that have layers
    of other kinds than full and sliding, or scores that are capped.
    """
    config: Any = getattr(module, "config", None)
    name = type(module).__name__
    if config is None or not getattr(module, "_supports_attention_backend", False):
        raise UnsupportedError(f"{name} does not attend through transformers' attention interface")
    text = config.get_text_config(decoder=True)
    if getattr(text, "attn_logit_softcapping", None) is not None:
        raise UnsupportedError(f"{name}: attention with `softcap` cannot be planned")
    try:
        return windows_of(text)
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {error}") from error


@contextmanager
def attending(module: nn.Module, attend: Attend) -> Iterator[None]:
    """While the block runs, all layers of a transformers model attend by `attend`, on windows of one row.

    Raises UnsupportedError as `check`.
    """
    from transformers import AttentionInterface

    windows = check(module)
    config: Any = module.config
    text = config.get_text_config(decoder=True)
    AttentionInterface.register(NAME, _attention)
    before, outer = text._attn_implementation, _ACTIVE.get(id(text))
    _ACTIVE[id(text)] = attend, windows
    try:
        text._attn_implementation = NAME
        yield
    finally:
        text._attn_implementation = before
        if outer is None:
            del _ACTIVE[id(text)]
        else:
            _ACTIVE[id(text)] = outer


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, H, T, D], key, value [1, G, T, D] -> [1, T, H, D]."""
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"attention with `{name}` (layer {module.layer_idx}) cannot be planned")
    attend, windows = _ACTIVE[id(module.config)]
    window = windows[module.layer_idx]
    if (kwargs.get("sliding_window") or 0) != window:
        raise UnsupportedError(
            f"layer {module.layer_idx} slides over {kwargs.get('sliding_window')} positions, its config says {window}"
        )
    if attention_mask is not None or query.shape[2] != key.shape[2] or kwargs.get("is_causal") is False:
        raise UnsupportedError("attention is planned on whole windows of causal attention only")
    if query.shape[0] != 1:
        raise ValueError(f"windows are measured one at a time, not {query.shape[0]}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend(module.layer_idx, query[0], key[0], value[0], scale, window)
    return out.transpose(0, 1)[None].contiguous(), None


def dense(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
    """Causal attention over everything, or the layer's own window, in the model's own precision."""
    per_group = query.shape[0] // key.shape[0]
    key, value = (t.repeat_interleave(per_group, 0) for t in (key, value))
    if 0 < window < query.shape[1]:
        return streaming(query[None], key[None], value[None], scale, sink=0, window=window)[0]
    attend = nn.functional.scaled_dot_product_attention
    return attend(query[None], key[None], value[None], is_causal=True, scale=scale)[0]


def by_plan(layers: Sequence[LayerPlan]) -> Attend:
    """Attention as the plan's layers say, for windows of one text each."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
        return planned(query, key, value, layers[layer], scale)

    return attend


def planned(query: Tensor, key: Tensor, value: Tensor, layer: LayerPlan, scale: float) -> Tensor:
    """Output [H, T, Dv] of one layer of a plan for a whole prefill of query [H, T, D], key, value [G, T, D]."""
    per_group = query.shape[0] // key.shape[0]
    parts = []
    for index, group in enumerate(layer.groups):
        heads = range(index * per_group, (index + 1) * per_group)
        near = in_16_bits(key[index]).to(key.dtype), in_16_bits(value[index]).to(value.dtype)
        is_plain = group.keys == PLAIN and group.values == PLAIN
        far = (
            near
            if is_plain
            else (stored(near[0], group.keys).to(key.dtype), stored(near[1], group.values).to(value.dtype))
        )
        # Heads of a group that follow one rule run together; each other one alone.
        rules: dict[Any, list[int]] = {}
        for head in heads:
            rule = layer.heads[head]
            sparse = None if rule.block_sparse is None else (head, *rule.block_sparse)
            rules.setdefault((rule.streaming, sparse), []).append(head)
        out = query.new_empty(per_group, query.shape[1], value.shape[-1])
        for (band, sparse), members in rules.items():
            found = _heads(query[members], near, far, is_plain, band, sparse and sparse[1:], scale)
            out[[head - heads[0] for head in members]] = found
        parts.append(out)
    return torch.cat(parts)


def _heads(
    query: Tensor,
    near: tuple[Tensor, Tensor],
    far: tuple[Tensor, Tensor],
    is_plain: bool,
    band: tuple[int, int, int] | None,
    sparse: tuple[float, int, int] | None,
    scale: float,
) -> Tensor:
    """Output [R, T, Dv] of heads of one KV group with one rule. near, far: (keys, values) [T, D] in 16 bits and stored."""
    attend = nn.functional.scaled_dot_product_attention
    total = query.shape[1]
    if is_plain and band is None and sparse is None:
        keys, values = (t.expand(query.shape[0], -1, -1)[None] for t in near)
        return attend(query[None], keys, values, is_causal=True, scale=scale)[0]
    out = query.new_empty(*query.shape[:2], near[1].shape[-1])
    for start in range(0, total, CHUNK):
        end = min(start + CHUNK, total)
        columns = _columns(start, end, band).to(query.device)
        # Keys before `border` are read in their stored form by all queries of the chunk, those from there on in both.
        border = max(start // PAGE - 1, 0) * PAGE
        twice = columns[columns >= border]
        keys = torch.cat([far[0][columns], near[0][twice]])
        values = torch.cat([far[1][columns], near[1][twice]])
        position = torch.arange(start, end, device=query.device)[:, None]
        seen = _seen(position, columns, band)
        old = position // PAGE - columns // PAGE >= 2
        seen = torch.cat([seen & old, (_seen(position, twice, band) & ~old[:, columns >= border])], dim=1)
        if sparse is not None:
            kept = _kept(query[:, start:end], near[0], far[0], start, sparse, scale)
            positions = torch.cat([columns, twice])
            mask = seen[None] & kept.repeat_interleave(BLOCK, 1)[:, : end - start][..., positions // BLOCK]
            rows = [
                attend(q[None, None], keys[None, None], values[None, None], attn_mask=m, scale=scale)[0, 0]
                for q, m in zip(query[:, start:end], mask, strict=True)
            ]
            out[:, start:end] = torch.stack(rows)
            continue
        keys, values = (t.expand(query.shape[0], -1, -1)[None] for t in (keys, values))
        part = query[None, :, start:end]
        out[:, start:end] = attend(part, keys, values, attn_mask=seen, scale=scale)[0]
    return out


def _columns(start: int, end: int, band: tuple[int, int, int] | None) -> Tensor:
    """The keys that some query of the chunk may see."""
    if band is None or start + 1 < band[2]:
        return torch.arange(end)
    sink, window, _ = band
    first = max(start - window + 1, 0)
    return torch.cat([torch.arange(min(sink, first)), torch.arange(first, end)])


def _seen(position: Tensor, columns: Tensor, band: tuple[int, int, int] | None) -> Tensor:
    """[queries, columns] bool: causal, and banded from the rule's length on."""
    distance = position - columns
    seen = distance >= 0
    if band is not None:
        sink, window, min_length = band
        seen &= (columns < sink) | (distance < window) | (position + 1 < min_length)
    return seen


def _kept(
    query: Tensor, near: Tensor, far: Tensor, start: int, rule: tuple[float, int, int], scale: float
) -> Tensor:
    """[R, blocks of queries, blocks of keys] bool: what the whole blocks of queries of a chunk compute."""
    threshold, stride, min_length = rule
    count = -(-query.shape[1] // BLOCK)
    shape = query.shape[0], count, start // BLOCK + count
    kept = torch.ones(shape, dtype=torch.bool, device=query.device)
    for block in range(query.shape[1] // BLOCK):
        first = start + block * BLOCK
        if first + 1 < min_length:
            continue
        border = max(first - PAGE, 0)
        keys = torch.cat([far[:border], near[border : first + BLOCK]])
        rows = query[:, block * BLOCK : (block + 1) * BLOCK]
        mass = predicted_mass(rows, keys, scale=scale, stride=stride)
        kept[:, block, : mass.shape[1]] = chosen_blocks(mass, threshold)
    return kept
