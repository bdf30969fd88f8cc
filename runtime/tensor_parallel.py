"""Which part of every tensor a rank holds when a model is split over devices (Shoeybi et al., Megatron-LM, 2019).

How a layer's tensors work together says transformers' own plan of the architecture (`base_model_tp_plan`): q, k, v, gate
and up by rows, o and down by columns. Tables and heads go by rows, that is by vocabulary, stacks of experts by experts;
every rank has the rest. Rows of attention are cut at whole heads, and ranks beyond the KV heads share them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nstf.errors import NstfError, UnsupportedError, UsageError
from nstf.kernels.formats import EncodedTensor, FormatError, Node
from nstf.kernels.formats.shards import Span as Span
from nstf.kernels.formats.shards import check_part, grain, shard
from nstf.runtime.artifact.atomic_file import raise_disk_fault
from nstf.runtime.attention_windows import check_alike
from nstf.runtime.memory_limit import memory_ended
from nstf.runtime.offline import without_hub

if TYPE_CHECKING:
    from nstf.runtime.artifact import Artifact

MAX_RANKS = 1024
PADDED_VOCABULARY = 64
_AXES = {
    "colwise": 0, "colwise_rep": 0, "colwise_gather_output": 0, "rowwise": 1, "rowwise_rep": 1, "rowwise_split_input": 1,
}  # fmt: skip
_TABLES = ("embed_tokens", "lm_head")
# Norms over the queries or keys of all heads, whose sums of squares ranks add up.
NORMS = ("q_norm", "k_norm")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# Of styles that gather the parts, attention alone is divided: what follows is by heads, but for these norms.
_GATHERED = ("colwise_rep", "colwise_gather_output", "rowwise_rep", "rowwise_split_input")
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


class Division:
    """What each of `ranks` ranks holds of a model. config: the content of its config.json.

    Raises UsageError for a senseless number of ranks, UnsupportedError for a model that transformers has no plan for.
    """

    def __init__(self, config: Mapping[str, Any], ranks: int) -> None:
        if not 1 <= ranks <= MAX_RANKS:
            raise UsageError(f"{ranks} ranks: give 1 to {MAX_RANKS}")
        read = text_config(config)
        self.ranks, self._plan, self._heads = ranks, _plan(read), _heads(read)

    def spans(self, name: str, tree: Node, shape: tuple[int, ...]) -> tuple[Span, ...] | None:
        """The part of every rank; None: each holds all of it. Raises FormatError where a tensor cannot be divided so."""
        if self.ranks == 1:
            return None
        axis = 0 if self._is_cut_norm(name, shape) else axis_of(name, self._plan)
        if axis is None or axis >= len(shape):
            return None
        if (style := self.style(name)) in _GATHERED and not _module(name)[0].endswith(
            (*_ATTENTION, *_TABLES)
        ):
            raise FormatError(f"{style} in transformers' plan, which is not divided yet")
        found = tuple(_spans(name, tree, shape, axis, self._heads, self.ranks))
        for span in dict.fromkeys(found):
            check_part(tree, shape, span)
        return found

    def _is_cut_norm(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor is the gain of a norm over all heads, of which ranks have some."""
        module = _module(name)[0]
        if not module.endswith(NORMS):
            return False
        heads = self._heads.query if module.endswith("q_norm") else self._heads.kv
        projection = module.removesuffix("_norm") + "_proj.weight"
        return heads > 1 and shape == (heads * self._heads.size,) and axis_of(projection, self._plan) == 0

    def style(self, name: str) -> str | None:
        """What transformers' plan says of a tensor's module; None where it does not name it."""
        return _style(name, self._plan)

    def holds(self, name: str, tree: Node, shape: tuple[int, ...]) -> bool:
        """Whether a tensor stored so can surely be divided: rows of trellis sections are any, so that they cannot."""
        try:
            found = self.spans(name, tree, shape)
        except FormatError:
            return False
        return found is None or found[0].axis == 1 or not _has_sections(tree)


def tensor_parts(artifact: Artifact, ranks: int) -> dict[str, Parts]:
    """The parts of every tensor of a file, from its header (and the row numbers of trellis sections).

    Raises what `Division` raises, and UnsupportedError for a file without a config.
    """
    if "config.json" not in artifact.file_names():
        raise UnsupportedError(f"{artifact.path} has no config.json, which says how its layers work together")
    division = Division(artifact.config(), ranks)
    return {name: _parts(artifact, name, division) for name in artifact.names()}


def text_config(stated: Mapping[str, Any]) -> Any:
    """transformers' object for a config.json; of a model that reads images too, the part of its text.

    Raises UnsupportedError for what transformers does not read.
    """
    from transformers import AutoConfig, PreTrainedConfig

    from nstf.runtime.skeleton import harmless

    settings = harmless(stated)
    kind = settings.pop("model_type", None)
    try:
        with without_hub():
            found = AutoConfig.for_model(str(kind), **settings).get_text_config()
        if not isinstance(found, PreTrainedConfig):
            raise TypeError("its config of the text is none")
        return found
    except Exception as error:  # a field of a wrong type has a class of huggingface_hub's own
        if memory_ended(error):
            raise NstfError(
                "not enough memory to read the model's config; free some, or raise its limit"
            ) from error
        raise_disk_fault(error, "read the model's config")
        raise UnsupportedError(
            f"transformers does not read the config of this model of type {str(kind)[:40]!r}: {str(error)[:200]}"
        ) from error


def _plan(config: Any) -> dict[str, str]:
    plan = dict(getattr(config, "base_model_tp_plan", None) or {})
    if not plan:
        raise UnsupportedError(
            f"transformers has no tensor parallel plan for models of type {config.model_type!r}"
        )
    return plan


def _heads(config: Any) -> Heads:
    check_alike(config)
    query = int(config.num_attention_heads)
    if query < 1 or int(getattr(config, "num_key_value_heads", None) or 1) < 1:
        raise UnsupportedError("the model's config has no attention heads")
    size = getattr(config, "head_dim", None) or config.hidden_size // query
    return Heads(query, int(getattr(config, "num_key_value_heads", None) or query), int(size))


def axis_of(name: str, plan: Mapping[str, str]) -> int | None:
    """The axis along which a tensor is cut, by its name; None: every rank holds all of it."""
    module, leaf = _module(name)
    if module.endswith(_TABLES):
        return 0
    style = _style(name, plan)
    if style is None:
        return None
    if style in _EXPERTS or ".experts" in name:
        return 0
    axis = _AXES.get(style)
    # The bias of a product cut by columns is added once, after the sum over ranks.
    return None if axis is None or (leaf == "bias" and axis == 1) else axis


def _module(name: str) -> tuple[str, str]:
    """(a tensor's module, which part of it the tensor is); stacks of experts are parameters of their own."""
    module, _, leaf = name.rpartition(".")
    return (module, leaf) if leaf in ("weight", "bias") else (name, leaf)


def _style(name: str, plan: Mapping[str, str]) -> str | None:
    module = _module(name)[0]
    return next(
        (style for pattern, style in plan.items() if fnmatch.fnmatchcase(module, f"*{pattern}")), None
    )


def _parts(artifact: Artifact, name: str, division: Division) -> Parts:
    record = artifact.record(name)
    try:
        found = division.spans(name, record.tree, record.shape)
        if found is not None and _has_sections(record.tree):
            encoded: EncodedTensor = artifact.encoded(name)
            for span in found:
                shard(encoded, span)
    except FormatError as error:
        return Parts(None, str(error))
    return Parts(found)


def _spans(name: str, tree: Node, shape: tuple[int, ...], axis: int, heads: Heads, ranks: int) -> list[Span]:
    step, size = grain(tree, shape, axis), shape[axis]
    if step is None:
        raise FormatError(f"{tree.kind} of shape {list(shape)} cannot be cut along axis {axis}")
    owner = name.rpartition(".")[0].rpartition(".")[2]
    if owner in _TABLES:
        part = vocabulary_part(size, ranks)
        if size <= part * (ranks - 1):
            raise FormatError(f"{size} rows, in parts of {part}, are not enough for {ranks} ranks")
        if part % step:
            raise FormatError(f"parts of {part} rows are no multiple of {step}")
        return [Span(axis, rank * part, min(size, (rank + 1) * part)) for rank in range(ranks)]
    if owner in ("qkv_proj", "gate_up_proj") and ".experts" not in name:
        raise FormatError("matrices that the checkpoint joins are not divided yet")
    if owner in (*_ATTENTION, *NORMS):
        own = heads.kv if owner in ("k_proj", "v_proj", "k_norm") else heads.query
        if heads.query % ranks:
            raise FormatError(f"{heads.query} query heads cannot be divided by {ranks} ranks")
        if own < ranks and ranks % own == 0:
            each = _even(heads.size * own, axis, own, step)
            return [each[rank * own // ranks] for rank in range(ranks)]  # ranks share KV heads
        if own % ranks:
            raise FormatError(f"{own} KV heads cannot be divided by {ranks} ranks")
    return _even(size, axis, ranks, step)


def vocabulary_part(size: int, ranks: int) -> int:
    """Rows of a table on each rank; only the last has fewer, since engines pad a vocabulary to multiples of 64.

    Raises FormatError where the padded rows are no multiple of the ranks: rounded down, the parts would miss the last ones.
    """
    padded = -(-size // PADDED_VOCABULARY) * PADDED_VOCABULARY
    if padded % ranks:
        raise FormatError(
            f"{size} rows, padded to {padded} in steps of {PADDED_VOCABULARY}, cannot be divided by {ranks} ranks evenly"
        )
    return padded // ranks


def _even(size: int, axis: int, ranks: int, step: int) -> list[Span]:
    """Parts of one size: what one layer gives is what the next one takes."""
    part = size // ranks
    if size % ranks:
        raise FormatError(f"{size} positions cannot be divided by {ranks} ranks evenly")
    if part % step:
        raise FormatError(f"parts of {part} positions are no multiple of {step}")
    return [Span(axis, rank * part, (rank + 1) * part) for rank in range(ranks)]


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
