"""Attention plans and caches in few bits as the CPU engine takes them."""

from __future__ import annotations

from typing import Any

from nstf.errors import UsageError
from nstf.runtime.attention_plan import AttentionPlan, HeadPlan, LayerPlan
from nstf.runtime.kv_formats import KVFormat

# What `kv_cache="int8"` stores where there is no plan: a minimum and a scale per position and head.
_INT8 = ((8, False, True), (8, False, False))


def layer_plan(layer: LayerPlan) -> dict[str, Any]:
    """A layer's plan as `_ext` takes it (kernels/cpu/engine/layer_plan.h)."""
    return {
        "heads": [_head(head) for head in layer.heads],
        "groups": [
            (g.sink, g.recent, g.min_length, _format(g.keys), _format(g.values)) for g in layer.groups
        ],
    }


def int8_plan(kv_heads: int) -> dict[str, Any]:
    """The same for a layer with full attention whose keys and values are kept in 8 bits."""
    return {"heads": [], "groups": [(0, 0, 0, *_INT8)] * kv_heads}


def check_plan(plan: AttentionPlan, shape: dict[str, Any]) -> None:
    """Raises UsageError where a plan is one of another model."""
    stated = (len(plan.layers), plan.head_dim)
    if stated != (shape["layers"], shape["head_size"]) or any(
        (len(layer.heads), len(layer.groups)) != (shape["heads"], shape["kv_heads"]) for layer in plan.layers
    ):
        raise UsageError("the attention plan is one of another model: its layers or heads differ")


def _head(head: HeadPlan) -> tuple[str, int, int, float, int, int]:
    sink, window, _ = head.streaming or (0, 0, 0)
    threshold, stride, _ = head.block_sparse or (1.0, 16, 0)
    return head.pattern, sink, window, threshold, stride, head.min_length


def _format(fmt: KVFormat) -> tuple[int, bool, bool]:
    return fmt.bits, fmt.by == "channel", fmt.rotate
