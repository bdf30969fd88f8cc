"""What a model asks of a machine, from headers alone: matrices by layer, bytes, products, keys and values.

A model is an artifact, or the config.json of one that is not here with an encoding for all its matrices. How matrices are
cut among ranks says `runtime/tensor_parallel.py`, for both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nstf.analyzers.roles import role_of
from nstf.errors import CorruptError, UnsupportedError, UsageError
from nstf.kernels.formats import FormatError, Node, dense, integer, node_to_json, stored_bytes, trellis
from nstf.kernels.formats.shards import grain
from nstf.kernels.formats.tree import Shape
from nstf.runtime.artifact.atomic_file import raise_disk_fault
from nstf.runtime.artifact.config import Limits, check_config
from nstf.runtime.attention_windows import check_alike, windows_of
from nstf.runtime.tensor_parallel import Division, axis_of, tensor_parts, text_config

if TYPE_CHECKING:
    from nstf.runtime.artifact import Artifact

# What runs as one launch on a GPU where it is stored alike.
_FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
_NUMBER = re.compile(r"(?:(?<=\.)|^)(\d+)\.")
# Modules that give a logit for every token of the vocabulary; other matrices with as many rows are tables of the input.
_HEAD = re.compile(r"head$|(?:^|\.)(?:embed_out|proj_out|lm_loss|decoder|output|pred_layer\.proj)$")
_ENCODING = re.compile(r"bf16|int[2-8]|trellis([1-6](?:\.(?:25|5|75))?)")
# How DeepSeek's attention is cut by heads; transformers' plan leaves it whole.
_LATENT = {"q_b_proj": 0, "kv_b_proj": 0, "o_proj": 1}
# Layers whose keys and values grow with the context, and those that keep a window of it.
# What a config without tensors may ask for: far beyond any model, and made on the meta device at once.
_CONFIG_LIMITS = Limits(tensors=1 << 13, dimension=1 << 20, elements=1 << 24)
_FULL, _WINDOW = ("full_attention", "attention"), "sliding_attention"


@dataclass(frozen=True)
class Matrix:
    """A stored tensor. shape: [out, in], or [experts, out, in]. axis: the one that tensor parallelism cuts, None where each
    rank has all of it. kind: product, experts, head, table (rows are looked up), or kept (no product)."""

    name: str
    tree: Node
    shape: Shape
    kind: str
    axis: int | None
    group: str = ""

    @cached_property
    def size_bytes(self) -> int:
        return stored_bytes(self.tree, self.shape)

    @cached_property
    def key(self) -> str:
        """What makes two matrices cost the same."""
        text = json.dumps(node_to_json(self.tree), sort_keys=True, separators=(",", ":"))
        return f"{self.kind} {self.axis} {self.group} {list(self.shape)} {text}"

    @property
    def lead(self) -> int:
        """Leading axes that make the rows."""
        return 2 if self.kind == "experts" and len(self.shape) == 3 else 1


@dataclass(frozen=True)
class Facts:
    """Sizes of a model. kv_bytes: of a token in a layer; kv_ranks: among how many ranks they can be divided;
    pair_flops: of attention for a query and a key of a layer, in a prompt and in decoding; windows: by layer, 0 for none;
    experts, active: routed experts of a layer, and those that a token is sent to."""

    hidden: int
    heads: int
    vocab: int
    kv_bytes: float
    kv_ranks: int
    pair_flops: tuple[float, float]
    windows: tuple[int, ...]
    experts: int = 0
    active: int = 0
    activation_bytes: int = 2

    @property
    def layers(self) -> int:
        return len(self.windows)


@dataclass(frozen=True)
class Model:
    """A model's costs. kept_bytes: of small tensors that every rank has. problem: why so many ranks cannot share it by
    tensor parallelism, or None."""

    name: str
    facts: Facts
    layers: tuple[tuple[Matrix, ...], ...]
    table: Matrix | None
    head: Matrix | None
    tied: bool
    kept_bytes: int
    problem: Callable[[int], str | None]

    @property
    def size_bytes(self) -> int:
        """Bytes of all weights, each stored one once."""
        ends = [m for m in (self.table, None if self.tied else self.head) if m is not None]
        return self.kept_bytes + sum(
            m.size_bytes for m in [*ends, *(m for layer in self.layers for m in layer)]
        )

    def slices(self, ranks: int) -> str | None:
        """Why each expert cannot be cut into so many parts, or None."""
        for matrix in {m.key: m for layer in self.layers for m in layer if m.kind == "experts"}.values():
            axis = 1 if "gate_up" in matrix.name or "up_proj" in matrix.name else 2
            step, size = grain(matrix.tree, matrix.shape, axis), matrix.shape[axis]
            if step is None or size % ranks or size // ranks % step:
                return f"{matrix.name}: {size} positions of axis {axis} are not {ranks} parts of multiples of {step}"
        return None


def of_artifact(artifact: Artifact, kv_bits: float = 16.0) -> Model:
    """The costs of an artifact, from its header. kv_bits: of a stored key or value.

    Raises UnsupportedError for a file without a config, or a model whose parts are not known.
    """
    if "config.json" not in artifact.file_names():
        raise UnsupportedError(f"{artifact.path} has no config.json, which says how its layers work together")
    config = artifact.config()
    names = [n for n in artifact.names() if artifact.stored_name(n) == n]
    stored = {n: (artifact.record(n).tree, artifact.record(n).shape) for n in names}
    aliases = {n: artifact.stored_name(n) for n in artifact.names() if n not in stored}

    def first_problem(ranks: int) -> str | None:
        try:
            parts = tensor_parts(artifact, ranks)
        except (UnsupportedError, UsageError) as error:
            return str(error)
        return next((f"{n}: {p.problem}" for n, p in parts.items() if p.problem is not None), None)

    problem = cache(first_problem)
    return _model(artifact.path.name, config, stored, kv_bits, problem, latent=False, aliases=aliases)


def of_config(name: str, config: Mapping[str, Any], encoding: str, kv_bits: float = 16.0) -> Model:
    """The costs of a model that a config.json describes, with all its matrices encoded alike (`tree_of`).

    Raises UnsupportedError for an architecture that transformers does not know, UsageError for an unknown encoding.
    """
    shapes = _shapes(config)
    stored = {n: (tree_of(encoding, n, s), s) for n, s in shapes.items()}
    problem = cache(partial(_first_problem, config, stored))
    return _model(f"{name}, {encoding}", config, stored, kv_bits, problem, latent=True)


def tree_of(encoding: str, name: str, shape: Shape) -> Node:
    """How a matrix is stored in an encoding: `bf16`, `int2` to `int8` in groups of 128 with 16-bit scales, `trellis1` to
    `trellis6` in quarters with table and head in int4 (parts of a vocabulary are rarely whole tiles). Vectors, routers, and
    what a format does not take, in bfloat16.

    Raises UsageError for another word.
    """
    found = _ENCODING.fullmatch(encoding)
    if found is None:
        raise UsageError(
            f"the encoding {encoding[:40]!r} is none: write bf16, int2 to int8, or trellis1 to trellis6 in steps of 0.25"
        )
    plain = Node("dense", dense.Params("bfloat16"))
    router = name.endswith((".gate.weight", ".router.weight"))
    if encoding == "bf16" or len(shape) < 2 or router or "norm" in name:
        return plain
    try:
        lead = 2 if len(shape) == 3 else 1
        if found[1] is None or role_of(name, shape) in ("embedding", "head"):
            bits = int(encoding[3:]) if found[1] is None else 4
            tree = Node("int", integer.Params(bits=bits, group=128, lead=lead))
        else:
            tree = Node("trellis", trellis.Params(quarter_bits=(round(4 * float(found[1])),), lead=lead))
        stored_bytes(tree, shape)
    except ValueError:
        return plain
    return tree


def _model(
    name: str,
    config: Mapping[str, Any],
    stored: Mapping[str, tuple[Node, Shape]],
    kv_bits: float,
    problem: Callable[[int], str | None],
    latent: bool,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> Model:
    text = _text_of(config)
    plan = dict(getattr(text, "base_model_tp_plan", None) or {})
    try:
        facts = _facts(text, stored, kv_bits)
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"the config of this model of type {str(config.get('model_type'))[:40]!r} does not describe its layers: {error}"
        ) from error
    layers: list[list[Matrix]] = [[] for _ in range(facts.layers)]
    at = _layer_numbers(stored, facts.layers)
    ends = _ends({n: shape for n, (_, shape) in stored.items()}, facts.vocab)
    if ends[0] is None and ends[1] is not None:
        # A checkpoint may keep a tied table under the head's name.
        shared = {n: stored[ends[1]][1] for n, kept_as in aliases.items() if kept_as == ends[1]}
        if (named := _ends(shared, facts.vocab)[0]) is not None:
            stored = {named if n == ends[1] else n: value for n, value in stored.items()}
            ends = (named, None)
    table = head = None
    kept = 0
    for path, (tree, shape) in stored.items():
        owner = path.rpartition(".")[0].rpartition(".")[2]
        axis = axis_of(path, plan)
        if latent and hasattr(text, "kv_lora_rank") and owner in _LATENT:
            axis = _LATENT[owner]
        if path == ends[0]:
            table = Matrix(path, tree, shape, "table", axis)
        elif path == ends[1]:
            head = Matrix(path, tree, shape, "head", axis)
        elif path not in at or len(shape) < 2:
            kept += stored_bytes(tree, shape)
        else:
            stack = len(shape) == 3 and "expert" in path  # as `_facts` counts them
            kind = "experts" if stack else "product" if len(shape) == 2 else "kept"
            layers[at[path]].append(Matrix(path, tree, shape, kind, axis, _FUSED.get(owner, "")))
    tied = head is None and table is not None
    if table is not None and tied:
        head = Matrix(table.name, table.tree, table.shape, "head", table.axis)
    return Model(name, facts, tuple(tuple(layer) for layer in layers), table, head, tied, kept, problem)


def _text_of(config: Mapping[str, Any]) -> Any:
    """The config of a model's text (`text_config`). Raises UnsupportedError for an encoder with a decoder, too: tokens that
    are read go through the one, tokens that are written through the other, and a plan's layers are one stack."""
    text = text_config(config)
    if text.is_encoder_decoder or config.get("is_encoder_decoder") is True:
        kind = str(config.get("model_type"))[:40]
        raise UnsupportedError(
            f"a model of type {kind!r} has an encoder and a decoder; nstf place divides a single stack of layers"
        )
    return text


def _layer_numbers(stored: Mapping[str, tuple[Node, Shape]], count: int) -> dict[str, int]:
    """The layer that each tensor of a layer belongs to, by its name.

    Families call the list of layers by many names (`layers`, `h`, `blocks`, `encoder.layer`), and experts, heads and towers
    for images are numbered, too: it is the list with all of `count` numbers and the most bytes, with the lists beside it
    (XLM has one of attentions and one of feed-forward parts). A member of LongCat's list is two of its config's layers.
    """
    lists: dict[str, dict[str, dict[str, int]]] = {}
    for name in stored:
        for found in _NUMBER.finditer(name):
            path = name[: found.start()]
            parent = path[:-1].rpartition(".")[0]
            lists.setdefault(parent, {}).setdefault(path, {})[name] = int(found[1])
    for each in (1, 2):
        all_numbers = set(range(count // each))
        stacks = []
        for beside in lists.values():
            whole = [members for members in beside.values() if all_numbers <= set(members.values())]
            numbers = {n: i * each for members in whole for n, i in members.items() if i in all_numbers}
            stacks.append((sum(stored_bytes(*stored[n]) for n in numbers), numbers))
        most = max(stacks, key=lambda stack: stack[0], default=(0, {}))
        if most[0]:
            return most[1]
    raise UnsupportedError(f"no list of {count} layers is among the tensors of this model")


def _ends(shapes: Mapping[str, Shape], vocab: int | None) -> tuple[str | None, str | None]:
    """Names of the input's table and of the head, or None: matrices with a row for every token, outside of numbered lists;
    of several the one with a known name."""
    found: dict[str, list[str]] = {"embedding": [], "head": []}
    for name, shape in shapes.items():
        if len(shape) == 2 and shape[0] == vocab and not _NUMBER.search(name):
            found["head" if _HEAD.search(name.removesuffix(".weight")) else "embedding"].append(name)
    table, head = (
        min(names, key=lambda n: role_of(n, shapes[n]) != role, default=None) for role, names in found.items()
    )
    return table, head


def _facts(text: Any, stored: Mapping[str, tuple[Node, Shape]], kv_bits: float) -> Facts:
    check_alike(text)
    heads = int(getattr(text, "num_attention_heads", 0) or 0)
    count, hidden = getattr(text, "num_hidden_layers", None), getattr(text, "hidden_size", None)
    if heads < 1 or not count or not hidden:
        raise UnsupportedError(
            f"models of type {text.model_type!r} do not say how many layers and heads they have"
        )
    kinds = list(getattr(text, "layer_types", None) or [])
    other = next((k for k in kinds if k not in _FULL and k != _WINDOW), None)
    if other is not None:
        raise UnsupportedError(f"layers of type {other[:40]!r} are not known to nstf place")
    windows = windows_of({
        "layer_types": [_WINDOW if k == _WINDOW else _FULL[0] for k in kinds], "num_hidden_layers": count,
        "sliding_window": getattr(text, "sliding_window", None),
        "use_sliding_window": getattr(text, "use_sliding_window", None),
    })  # fmt: skip
    head_size = int(getattr(text, "head_dim", None) or hidden // heads)
    latent = getattr(text, "kv_lora_rank", None)
    if latent:
        rope = int(text.qk_rope_head_dim)
        kv_values, kv_ranks = latent + rope, 1
        prompt = 2.0 * heads * (int(text.qk_nope_head_dim) + rope + int(text.v_head_dim))
        flops = prompt, 2.0 * heads * (2 * latent + rope)
    else:
        kv_ranks = _kv_heads(text, heads)
        kv_values, flops = 2 * kv_ranks * head_size, (4.0 * heads * head_size,) * 2
    stacks = [shape for n, (_, shape) in stored.items() if len(shape) == 3 and "expert" in n]
    active = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None)
    experts = stacks[0][0] if stacks else 0
    return Facts(
        int(hidden), heads, int(text.vocab_size), kv_values * kv_bits / 8, kv_ranks, flops, windows, experts,
        min(experts, int(active or experts)),
    )  # fmt: skip


def _kv_heads(text: Any, heads: int) -> int:
    """Heads of keys and values. Falcon calls them otherwise, and means one where it does not state its newer layers."""
    if stated := getattr(text, "num_key_value_heads", None):
        return int(stated)
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return 1
    return int(getattr(text, "num_kv_heads", None) or heads)


def _first_problem(
    config: Mapping[str, Any], stored: Mapping[str, tuple[Node, Shape]], ranks: int
) -> str | None:
    """Why so many ranks cannot divide what is not here. Layers are alike: one of each shape is asked."""
    try:
        division = Division(config, ranks)
    except (UnsupportedError, UsageError) as error:
        return str(error)
    seen: set[tuple[str, Shape]] = set()
    for name, (tree, shape) in stored.items():
        inner = _NUMBER.sub("", name), shape
        if inner in seen:
            continue
        seen.add(inner)
        try:
            division.spans(name, tree, shape)
        except FormatError as error:
            if len(shape) < 3:  # experts are cut or dealt out: a plan asks for itself
                return f"{name}: {error}"
    return None


def _shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Names and shapes of the weights that a config asks for, tied ones once; nothing is allocated."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel, AutoModelForCausalLM

    from nstf.runtime.offline import without_hub
    from nstf.runtime.skeleton import parameter_names, parameters_on_meta

    try:
        check_config(config, _CONFIG_LIMITS, "the config")
    except CorruptError as error:  # it speaks of tensors, and there are none
        raise UsageError("the config's sizes are beyond any model, or no sizes") from error
    text = _text_of(config)
    try:
        with torch.device("meta"), torch.no_grad(), without_hub(), parameters_on_meta(_CONFIG_LIMITS):
            # The text of a model that reads images too may have no class with a head (Qwen2-VL).
            part = (
                text.model_type != config.get("model_type") and type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING
            )
            kind = AutoModel if part else AutoModelForCausalLM
            model = kind.from_config(text, trust_remote_code=False)
    except Exception as error:
        raise_disk_fault(error, "build the model")
        raise UnsupportedError(
            f"transformers cannot build a model of type {text.model_type!r}: {' '.join(str(error).split())[:200]}"
        ) from error
    shapes = {name: tuple(model.get_parameter(name).shape) for name in parameter_names(model)}
    if part:
        shapes = {f"model.{name}": shape for name, shape in shapes.items()}
        if not config.get("tie_word_embeddings", getattr(text, "tie_word_embeddings", False)):
            shapes["lm_head.weight"] = (int(text.vocab_size), int(text.hidden_size))
    if empty := next((name for name, shape in shapes.items() if 0 in shape), None):
        raise UsageError(f"the config's sizes make {empty} a tensor without elements: {list(shapes[empty])}")
    return shapes
