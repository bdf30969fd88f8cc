"""Run a transformers model by its attention plan: `apply_plan(model, plan_json)`.

On a GPU, in 16 bits, everything runs by kernels over a paged cache (nstf.runtime.paged_model). Elsewhere *streaming* heads
run as a band (nstf.runtime.attention_banded), KV groups that the plan lets forget are held in rings
(nstf.runtime.ring_cache), and *block_sparse* heads and quantised groups run by nstf.runtime.attention_stored, which applies
the rules exactly and saves nothing.

How it hooks in, and why this is the least that works:
- the attention function goes through transformers' own registry, under the name "nstf_planned", selected by
  `config._attn_implementation` of this model only; the plan of a layer is an attribute of its modules;
- the mask function of that name hands the 2-D padding mask through, so no [T, T] mask is ever made;
- `generate` makes its cache in `_prepare_cache_for_generation`. That method is wrapped on the instance, and
  a plain DynamicCache that it would have made is replaced. A cache given by the caller is kept: with an
  ordinary cache, or none, the result is the same and only the memory is not saved (`new_cache(model)` gives
  a planned one).

Batches: rows padded on the left are exact (positions and sinks count from the first real token of each
row). Without a cache, padding on the right is exact too. Holes inside a row are refused.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sliding_window_causal_mask_function,
)

from nstf.errors import UnsupportedError
from nstf.runtime.attention_buckets import attend, by_rules, heads_of, plain_store
from nstf.runtime.attention_layout import CompiledLayer, compile_layer, dense_layer
from nstf.runtime.attention_plan import AttentionPlan, LayerPlan, parse_plan
from nstf.runtime.attention_windows import check_windows, windows_of
from nstf.runtime.paged_cache import PagePool
from nstf.runtime.paged_model import PagedCache, PagedLayer
from nstf.runtime.planned_heads import SIZES, compiled_plan
from nstf.runtime.ring_cache import TAG, PlannedCache, PlannedLayer

NAME = "nstf_planned"
_SLIDING = sliding_window_causal_mask_function(1)
_LAYER = "_nstf_attention"
_STATE = "_nstf_attention_state"


def apply_plan(model: nn.Module, plan: str | bytes | dict[str, object] | AttentionPlan) -> AttentionPlan:
    """Make `model` attend by the plan, in `forward` and in `generate`; gives the parsed plan.

    Raises ValueError when the plan is malformed or does not fit the model's layers and heads,
    UnsupportedError when the architecture does not attend through transformers' attention interface or has
    layers of other kinds than full and sliding.
    """
    parsed = plan if isinstance(plan, AttentionPlan) else parse_plan(plan)
    config = _text_config(model)
    windows = _check_fit(model, config, parsed)
    remove_plan(model)
    compiled = [compile_layer(layer, own) for layer, own in zip(parsed.layers, windows, strict=True)]
    found = set()
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and 0 <= index < len(compiled):
            setattr(module, _LAYER, compiled[index])
            module.extra_repr = partial(str, _described(parsed.layers[index]))  # type: ignore[method-assign]
            found.add(index)
    if len(found) != len(compiled):
        raise UnsupportedError(
            f"{type(model).__name__}: layer_idx found on {len(found)} of {len(compiled)} layers"
        )
    setattr(model, _STATE, (parsed, compiled, config._attn_implementation))
    AttentionInterface.register(NAME, planned_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, planned_mask)
    config._attn_implementation = NAME
    if hasattr(model, "_prepare_cache_for_generation"):
        _wrap_cache_factory(model)
    return parsed


def remove_plan(model: nn.Module) -> None:
    """Give the model its former attention back; nothing happens when it has no plan."""
    state = model.__dict__.pop(_STATE, None)
    if state is None:
        return
    _text_config(model)._attn_implementation = state[2]
    model.__dict__.pop("_prepare_cache_for_generation", None)
    for module in model.modules():
        if module.__dict__.pop(_LAYER, None) is not None:
            module.__dict__.pop("extra_repr", None)


def _described(layer: LayerPlan) -> str:
    """What `print(model)` says: `planned attention, heads: 3 full, 1 streaming`."""
    counts = Counter(head.pattern for head in layer.heads)
    return "planned attention, heads: " + ", ".join(f"{n} {pattern}" for pattern, n in sorted(counts.items()))


def plan_of(model: nn.Module) -> AttentionPlan | None:
    """The plan that was applied to a model."""
    state = model.__dict__.get(_STATE)
    return None if state is None else state[0]


def new_cache(model: nn.Module, batch: int = 1, padded: bool = False) -> PlannedCache | PagedCache:
    """An empty cache for the plan that was applied, to pass as `past_key_values`.

    On a GPU it is for `batch` sequences without padding, unless `padded`.
    """
    state = getattr(model, _STATE, None)
    if state is None:
        raise ValueError("this model has no attention plan: call apply_plan first")
    device, dtype = next(
        ((p.device, p.dtype) for p in model.parameters() if p.is_floating_point()), (None, None)
    )
    if device is not None and dtype is not None and _runs_kernels(state[0], device, dtype) and not padded:
        context = int(_text_config(model).max_position_embeddings)
        return PagedCache(PagePool(compiled_plan(state[0]), batch, context, dtype, device))
    return PlannedCache([layer.segments for layer in state[1]])


def planned_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers: query [B, H, N, D], key, value [B, Hkv, T, D] -> [B, N, H, D].

    attention_mask: None or the 2-D mask [B, T] from `planned_mask` (True is a token, False padding).
    """
    for name in ("softcap", "s_aux", "position_bias", "cache"):
        if kwargs.get(name) is not None:
            raise UnsupportedError(
                f"planned attention does not know `{name}`; run the model without the plan"
            )
    if dropout or is_causal is False:
        raise UnsupportedError(
            "planned attention is for causal inference: no dropout, no bidirectional layers"
        )
    if attention_mask is not None and attention_mask.ndim != 2:
        raise UnsupportedError(
            f"planned attention takes a 2-D padding mask, not {tuple(attention_mask.shape)}"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    plan: CompiledLayer = getattr(module, _LAYER, None) or dense_layer(query.shape[1], key.shape[1])
    if (kwargs.get("sliding_window") or 0) != plan.window:
        raise UnsupportedError(
            f"a layer that slides over {kwargs.get('sliding_window')} positions has a plan for {plan.window or 'all'}"
        )
    layer: PlannedLayer | PagedLayer | None = getattr(key, TAG, None)
    if isinstance(layer, PagedLayer):
        if attention_mask is not None:
            raise UnsupportedError(
                "the paged KV cache takes no padding; make it with new_cache(model, padded=True)"
            )
        return layer.attend(query, key, value, scale), None
    total = key.shape[2] if layer is None else layer.seen
    rows = _rows(attention_mask, total, cached=layer is not None)
    if layer is None:
        stores = [plain_store(segment, key, value) for segment in plan.segments]
    else:
        layer.claim()
        stores = layer.stores
    parts = []
    for bucket in plan.buckets:
        part = heads_of(query, bucket.heads)
        if bucket.plans:
            parts.append(by_rules(part, stores[bucket.segment], bucket, scale, total, rows))
            continue
        parts.append(attend(part, stores[bucket.segment], bucket, plan.per_group, scale, total, rows))
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    out = heads_of(out, plan.inverse)
    if layer is not None:
        layer.compact(None if rows is None else torch.tensor([low for low, _ in rows], device=key.device))
    return out.transpose(1, 2).contiguous(), None


def planned_mask(
    *,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """Mask function of transformers: the 2-D mask [B, kv_length] itself, or None when nothing is padded."""
    # What slides is checked where attention runs, by the layer's plan.
    if mask_function is not causal_mask_function and not _alike(mask_function, _SLIDING):
        raise UnsupportedError("planned attention is causal only: no packed sequences, no custom masks")
    if q_length is not None and int(q_offset) + q_length != kv_length:
        raise UnsupportedError(
            "planned attention needs a cache that grows (a static cache has unfilled keys, a sliding one forgets): "
            "make it with new_cache(model)"
        )
    if attention_mask is None:
        return None
    mask = attention_mask[:, :kv_length].bool()
    if mask.shape[1] != kv_length:
        raise UnsupportedError(
            f"attention_mask has {mask.shape[1]} columns, the context has {kv_length} tokens"
        )
    return None if bool(mask.all()) else mask


def _alike(a: Any, b: Any) -> bool:
    """Whether two mask functions are of the same code: transformers makes new ones for each call. Numbers may differ."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    if not isinstance(a, FunctionType) or not isinstance(b, FunctionType):
        return type(a) is type(b) is int
    cells = [tuple(cell.cell_contents for cell in f.__closure__ or ()) for f in (a, b)]
    return a.__code__ is b.__code__ and _alike(*cells)


def _rows(mask: Tensor | None, total: int, cached: bool) -> list[tuple[int, int]] | None:
    """(first, last + 1) column of the tokens of each row; None when no row is padded."""
    if mask is None:
        return None
    count = mask.sum(dim=1)
    first = mask.int().argmax(dim=1)
    column = torch.arange(total, device=mask.device)[None, :]
    inside = (column >= first[:, None]) & (column < (first + count)[:, None])
    if not torch.equal(mask, inside):
        raise UnsupportedError(
            "attention_mask has holes; planned attention takes padding at the ends of a row only"
        )
    if cached and bool((first + count != total).any()):
        raise UnsupportedError("with a cache, pad on the left (tokenizer.padding_side = 'left')")
    return [(int(low), int(low + n)) for low, n in zip(first, count, strict=True)]


def _runs_kernels(plan: AttentionPlan, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels of nstf.kernels.triton run a plan there."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or plan.head_dim not in SIZES:
        return False
    from nstf.kernels.triton.linear import unsuitable

    return not unsuitable(device.index or 0)


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise UnsupportedError(f"{type(model).__name__} is not a transformers model: it has no config")
    return config.get_text_config(decoder=True)


def _check_fit(model: nn.Module, config: Any, plan: AttentionPlan) -> tuple[int, ...]:
    """The windows of the model's layers."""
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False) or not getattr(
        model, "_supports_attention_backend", False
    ):
        raise UnsupportedError(
            f"{name} does not attend through transformers' attention interface as a decoder"
        )
    windows = windows_of(config)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if len(plan.layers) != config.num_hidden_layers:
        raise ValueError(
            f"attention plan: {len(plan.layers)} layers, the model has {config.num_hidden_layers}"
        )
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if plan.head_dim != size:
        raise ValueError(
            f"attention plan: made for heads of {plan.head_dim} channels, the model's have {size}"
        )
    for index, layer in enumerate(plan.layers):
        if (len(layer.heads), len(layer.groups)) != (heads, kv_heads):
            raise ValueError(
                f"attention plan: layers[{index}] has {len(layer.heads)} heads in {len(layer.groups)} "
                f"groups, the model has {heads} in {kv_heads}"
            )
    check_windows(plan, windows)
    return windows


def _wrap_cache_factory(model: Any) -> None:
    make = model._prepare_cache_for_generation

    def prepare(generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        given = model_kwargs.get("past_key_values") is not None
        result = make(generation_config, model_kwargs, *args, **kwargs)
        if not given and type(model_kwargs.get("past_key_values")) is DynamicCache:
            if generation_config.cache_implementation not in (None, "dynamic"):
                return result
            mask = model_kwargs.get("attention_mask")
            batch = args[1] if len(args) > 1 else kwargs.get("batch_size")
            # Beams change places, which pages cannot.
            other = batch is None or (mask is not None and not bool(mask.bool().all()))
            other = other or (generation_config.num_beams or 1) > 1
            # Every prompt is repeated for its answers after this.
            answers = generation_config.num_return_sequences or 1
            model_kwargs["past_key_values"] = new_cache(model, (batch or 1) * answers, padded=other)
        return result

    model._prepare_cache_for_generation = prepare
