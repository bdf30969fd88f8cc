"""Which part of every tensor a rank holds when a model is split over devices (Shoeybi et al., Megatron-LM, 2019).

How a layer's tensors work together says transformers' own plan of the architecture (`base_model_tp_plan`): q, k, v, gate
and up by rows, o and down by columns. Tables and heads go by rows, that is by vocabulary, stacks of experts by experts;
every rank has the rest. Rows of attention are cut at whole heads, and ranks beyond the KV heads share them.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nstf.errors import UnsupportedError, UsageError
from nstf.kernels.formats import EncodedTensor, FormatError, Node
from nstf.kernels.formats.shards import Span, grain, shard, spans

if TYPE_CHECKING:
    from nstf.runtime.artifact import Artifact

MAX_RANKS = 1024
_AXES = {"colwise": 0, "colwise_rep": 0, "rowwise": 1, "rowwise_rep": 1}
_EXPERTS = (
    "packed_colwise",
    "packed_rowwise",
    "grouped_gemm",
    "local_packed_colwise",
    "local_rowwise",
    "local_colwise",
)


@dataclass(frozen=True)
class Heads:
    """The attention heads of a model: of queries, of keys and values, numbers of each."""

    query: int
    kv: int
    size: int


@dataclass(frozen=True)
class Parts:
    """A tensor's part for every rank; `spans` None: every rank holds all of it. problem: why it cannot be cut, or None."""

    spans: tuple[Span, ...] | None
    problem: str | None = None


def tensor_parts(artifact: Artifact, ranks: int) -> dict[str, Parts]:
    """The parts of every stored tensor for a number of ranks, from the header (and the row numbers of trellis sections).

    Raises UsageError for a senseless number, UnsupportedError for a model without a config or a plan.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise UsageError(f"{ranks} ranks: give 1 to {MAX_RANKS}")
    if "config.json" not in artifact.file_names():
        raise UnsupportedError(f"{artifact.path} has no config.json, which says how its layers work together")
    config = _config(artifact.config())
    plan = _plan(config)
    heads = _heads(config)
    return {name: _parts(artifact, name, plan, heads, ranks) for name in artifact.names()}


def _config(stated: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    settings = dict(stated)
    kind = settings.pop("model_type", None)
    try:
        return AutoConfig.for_model(kind, **settings).get_text_config()
    except (ValueError, TypeError, AttributeError) as error:
        raise UnsupportedError(f"model type {str(kind)[:40]!r} is not one that transformers knows") from error


def _plan(config: Any) -> dict[str, str]:
    plan = dict(getattr(config, "base_model_tp_plan", None) or {})
    if not plan:
        raise UnsupportedError(
            f"transformers has no tensor parallel plan for models of type {config.model_type!r}"
        )
    return plan


def _heads(config: Any) -> Heads:
    query = int(config.num_attention_heads)
    size = getattr(config, "head_dim", None) or config.hidden_size // query
    return Heads(query, int(getattr(config, "num_key_value_heads", None) or query), int(size))


def axis_of(name: str, plan: Mapping[str, str]) -> int | None:
    """The axis along which a tensor is cut, by its name; None: every rank holds all of it."""
    module, _, leaf = name.rpartition(".")
    if leaf not in ("weight", "bias"):
        module = name  # stacks of experts are parameters of their own
    if module.endswith(("embed_tokens", "lm_head")):
        return 0
    for pattern, style in plan.items():
        if fnmatch.fnmatchcase(module, f"*{pattern}"):
            if style in _EXPERTS or ".experts" in pattern:
                return 0
            axis = _AXES.get(style)
            # The bias of a product cut by columns is added once, after the sum over ranks.
            return None if axis is None or (leaf == "bias" and axis == 1) else axis
    return None


def _parts(artifact: Artifact, name: str, plan: Mapping[str, str], heads: Heads, ranks: int) -> Parts:
    record, axis = artifact.record(name), axis_of(name, plan)
    if axis is None or ranks == 1 or axis >= len(record.shape):
        return Parts(None)
    try:
        found = _spans(name, record.tree, record.shape, axis, heads, ranks)
        if _has_sections(record.tree):
            encoded: EncodedTensor = artifact.encoded(name)
            for span in found:
                shard(encoded, span)
    except FormatError as error:
        return Parts(None, str(error))
    return Parts(tuple(found))


def _spans(name: str, tree: Node, shape: tuple[int, ...], axis: int, heads: Heads, ranks: int) -> list[Span]:
    step = grain(tree, shape, axis)
    if step is None:
        raise FormatError(f"{tree.kind} of shape {list(shape)} cannot be cut along axis {axis}")
    owner = name.rpartition(".")[0].rpartition(".")[2]
    if owner in ("k_proj", "v_proj") and ranks > heads.kv:
        if ranks % heads.kv:
            raise FormatError(f"{heads.kv} KV heads cannot be shared by {ranks} ranks evenly")
        each = spans(shape[axis], axis, heads.kv, math.lcm(step, heads.size))
        return [each[rank * heads.kv // ranks] for rank in range(ranks)]
    if owner in ("q_proj", "k_proj", "v_proj", "o_proj"):
        if heads.query % ranks:
            raise FormatError(f"{heads.query} query heads cannot be divided by {ranks} ranks")
        own = heads.kv if owner in ("k_proj", "v_proj") else heads.query
        if own % ranks:
            raise FormatError(f"{own} KV heads cannot be divided by {ranks} ranks")
        size = own // ranks * heads.size
        if size % step:
            raise FormatError(f"{own // ranks} heads are {size} positions, which is no multiple of {step}")
        return [Span(axis, rank * size, (rank + 1) * size) for rank in range(ranks)]
    return spans(shape[axis], axis, ranks, step)


def _has_sections(tree: Node) -> bool:
    """Whether what can be cut depends on stored numbers."""
    own = tree.kind == "trellis" and bool(tree.params.rows)
    return own or any(_has_sections(child) for child in tree.children.values())


def part(artifact: Artifact, name: str, parts: Parts, rank: int) -> EncodedTensor:
    """What a rank holds of a tensor, from the mapped file. Raises UnsupportedError for one that cannot be cut."""
    if parts.problem is not None:
        raise UnsupportedError(f"{artifact.path}: {name} cannot be divided: {parts.problem}")
    encoded: EncodedTensor = artifact.encoded(name)
    return encoded if parts.spans is None else shard(encoded, parts.spans[rank])
