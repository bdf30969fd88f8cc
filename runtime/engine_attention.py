"""Attention plans and caches in few bits as the CPU engine takes them."""

from __future__ import annotations

from typing import Any

from nstf.errors import CorruptError, UsageError
from nstf.runtime.artifact import Artifact
from nstf.runtime.attention_plan import AttentionPlan, GroupPlan, HeadPlan, LayerPlan, parse_plan
from nstf.runtime.attention_windows import check_windows
from nstf.runtime.engine_config import EngineConfig
from nstf.runtime.kv_formats import PAGE, KVFormat, page_bytes

# What `kv_cache="int8"` stores where there is no plan: a minimum and a scale per position and head.
INT8 = GroupPlan(0, 0, 0, KVFormat(8, "token", True), KVFormat(8, "token", False))


def layer_plan(layer: LayerPlan) -> dict[str, Any]:
    """A layer's plan as `_ext` takes it (kernels/cpu/engine/layer_plan.h)."""
    return {
        "heads": [_head(head) for head in layer.heads],
        "groups": [_group(group) for group in layer.groups],
    }


def int8_plan(kv_heads: int) -> dict[str, Any]:
    """The same for a layer with full attention whose keys and values are kept in 8 bits, each position from the start:
    what a query reads does not depend on how much of the text is there, as with the newest pages of a plan, so that another
    text can go on from any position of this one.
    """
    return {"heads": [], "groups": [_group(INT8, at_once=True)] * kv_heads}


def int8_bytes(head_size: int, positions: int) -> int:
    """Bytes of one KV head of such a layer, by whole pages."""
    return -(-positions // PAGE) * (page_bytes(INT8.keys, head_size) + page_bytes(INT8.values, head_size))


def read_plan(artifact: Artifact, config: EngineConfig, stated: str | AttentionPlan) -> AttentionPlan:
    """The plan to run a model of this config by: `stated`, or the artifact's where it is "planned".

    Raises UsageError where there is none, CorruptError for one that cannot be read or belongs to another model.
    """
    stored, shape = artifact.manifest.attention, config.shape
    if isinstance(stated, str) and not stored:
        raise UsageError(f"{artifact.path}: no attention plan inside; run it with full attention")
    try:
        plan = parse_plan(dict(stored or {})) if isinstance(stated, str) else stated
        sizes = {(len(layer.heads), len(layer.groups)) for layer in plan.layers}
        if (len(plan.layers), plan.head_dim) != (shape["layers"], shape["head_size"]) or sizes != {
            (shape["heads"], shape["kv_heads"])
        }:
            raise ValueError("attention plan: made for other layers or heads than the model has")
        check_windows(plan, config.windows)
    except ValueError as error:
        raise CorruptError(f"{artifact.path}: {error}; run it with full attention") from error
    return plan


def _head(head: HeadPlan) -> tuple[str, int, int, float, int, int]:
    sink, window, _ = head.streaming or (0, 0, 0)
    threshold, stride, _ = head.block_sparse or (1.0, 16, 0)
    return head.pattern, sink, window, threshold, stride, head.min_length


def _group(
    group: GroupPlan, at_once: bool = False
) -> tuple[int, int, int, tuple[int, bool, bool], tuple[int, bool, bool], bool]:
    return group.sink, group.recent, group.min_length, _format(group.keys), _format(group.values), at_once


def _format(fmt: KVFormat) -> tuple[int, bool, bool]:
    return fmt.bits, fmt.by == "channel", fmt.rotate
