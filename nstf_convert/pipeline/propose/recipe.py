"""A recipe (nstf.proposals) priced and carried out: its tree, its bytes, its estimate, the encoded tensor."""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nstf import decomposers, quantizers
from nstf.decomposers.factors import assemble, lead_for
from nstf.decomposers.remembered import FORGETFUL, Remembered
from nstf.kernels.formats import EncodedTensor, Node, decode, dense, join, stored_bytes
from nstf.kernels.formats.tree import Shape, format_of
from nstf.proposals import Recipe
from nstf.quantizers import filled
from nstf.quantizers.stats import Stats

__all__ = [
    "Recipe",
    "across",
    "bytes_of",
    "decode",
    "decompose",
    "describe",
    "encode",
    "encode_many",
    "estimate",
    "estimate_many",
    "estimate_together",
    "has_forms",
    "on_device",
    "permuted",
    "remembered",
    "size_of",
    "tree_of",
    "trellis_rates",
]


# Of a tensor whose views, norms and roots take more, nothing is remembered: its time goes into products, and what is kept
# would be there beside the next decomposition's own.
REMEMBERED_BYTES = 1 << 28


def tree_of(recipe: Recipe, shape: Shape, lead: int) -> Node:
    """The tree `encode` will give for a tensor of `shape`: exact, and needs no weight."""
    if recipe.method == "dense":
        return Node(dense.KIND, dense.Params(recipe.params["dtype"]))
    if recipe.method in quantizers.METHODS:
        return quantizers.method(recipe.method).tree(filled(recipe, shape, lead))  # type: ignore[no-any-return]
    module = decomposers.method(recipe.method)
    if recipe.family == "hybrid":
        children = {n: tree_of(recipe.parts[p], shape, lead) for n, p in module.PARTS.items()}
        return Node(module.KIND, format_of(module.KIND).Params(**recipe.params), children)
    kind, params = module.KIND, _node_params(recipe, lead)
    children = {
        n: tree_of(recipe.parts["factor"], s, lead_for(s))
        for n, s in format_of(kind).children(params, shape).items()
    }
    return Node(kind, params, children)


def size_of(recipe: Recipe, shape: Shape, lead: int) -> int:
    """Bytes of the arrays `encode` will give."""
    return stored_bytes(tree_of(recipe, shape, lead), shape)


def encode(
    recipe: Recipe, weight: Tensor, stats: Stats, lead: int, remembered: Remembered = FORGETFUL
) -> EncodedTensor:
    """Carries a recipe out. weight: float32; stats as for the matrix view with `lead` leading axes; remembered: what other
    decompositions of both found."""
    shape = tuple(weight.shape)
    if recipe.method == "dense":
        params = dense.Params(recipe.params["dtype"])
        return EncodedTensor(
            Node(dense.KIND, params),
            shape,
            {"values": weight.to("cpu", dense.torch_dtype(params.dtype)).contiguous()},
        )
    if recipe.method in quantizers.METHODS:
        module = quantizers.method(recipe.method)
        return module.encode(weight, filled(recipe, shape, lead), stats)  # type: ignore[no-any-return]
    module = decomposers.method(recipe.method)
    if recipe.family == "hybrid":
        return _composed(recipe, weight, stats, lead)
    factor = recipe.parts["factor"]

    def leaf(name: str, value: Tensor, metric: Tensor | None) -> EncodedTensor:
        return encode(factor, value.contiguous(), Stats(metric), lead_for(tuple(value.shape)))

    decomposition = decompose(recipe, weight, stats, lead, remembered)
    return decomposition.encode(leaf)  # type: ignore[no-any-return]


def _composed(recipe: Recipe, weight: Tensor, stats: Stats, lead: int) -> EncodedTensor:
    """A recipe whose parts store the whole tensor each, made as its method says (`compose`)."""
    module, shape = decomposers.method(recipe.method), tuple(weight.shape)
    parts: dict[str, EncodedTensor] = {}

    def made(part: str, value: Tensor) -> Tensor:
        parts[part] = encode(recipe.parts[part], value, stats, lead)
        return decode(parts[part]).to(weight.device).reshape(shape)

    module.compose(recipe, weight, made)
    children = {n: parts[p] for n, p in module.PARTS.items()}
    params = format_of(module.KIND).Params(**recipe.params)
    return assemble(module.KIND, params, shape, children)


def encode_many(
    items: Sequence[tuple[Recipe, Tensor, Stats, int]], scratch: int, room: int | None = None
) -> list[EncodedTensor]:
    """`encode` of several (recipe, weight, stats, lead), those of one format together: what fills a GPU.

    scratch: bytes that encoding side by side may take. With less, rows are encoded in several parts, each of which goes
    through all columns: the same codes, more and smaller launches. room: what tensors of several Hessians may take, where
    that is another number: it changes no code.
    """
    out: list[EncodedTensor | None] = [None] * len(items)
    plain = [i for i, item in enumerate(items) if item[0].method in quantizers.METHODS]
    batch = []
    for i in plain:
        recipe, weight, stats, lead = items[i]
        batch.append((recipe.method, weight, filled(recipe, tuple(weight.shape), lead), stats))
    for i, encoded in zip(plain, quantizers.encode_many(batch, scratch, room), strict=True):
        out[i] = encoded
    return [encode(*items[i]) if found is None else found for i, found in enumerate(out)]


def across(recipe: Recipe) -> bool:
    """Whether tensors gain from being encoded with those of other Hessians, which changes nothing in them."""
    if recipe.method not in quantizers.METHODS:
        return False
    return bool(getattr(quantizers.method(recipe.method), "ACROSS", False))


def decompose(
    recipe: Recipe, weight: Tensor, stats: Stats, lead: int, remembered: Remembered = FORGETFUL
) -> Any:
    """The dense factors of a decomposition's recipe."""
    module = decomposers.method(recipe.method)
    params = _decomposer_params(recipe, lead)
    if getattr(module, "REMEMBERS", False):
        return module.decompose(weight, params, stats.hessian, stats.row_weight, remembered)
    return module.decompose(weight, params, stats.hessian, stats.row_weight)


def remembered(weight: Tensor, stats: Stats, lead: int) -> Remembered:
    """What decompositions of a tensor find out, for the next ones."""
    cols = math.prod(weight.shape[lead:])
    kept = 8 * (3 * weight.numel() + 4 * cols * cols)
    return Remembered(weight, stats.derived) if kept <= REMEMBERED_BYTES else FORGETFUL


def estimate(recipe: Recipe, weight: Tensor, stats: Stats, lead: int) -> float:
    """The expected loss of a quantiser's recipe without encoding (see each quantiser's `estimate`)."""
    return estimate_many([recipe], weight, stats, lead)[0]


def estimate_many(wanted: Sequence[Recipe], weight: Tensor, stats: Stats, lead: int) -> list[float]:
    """`estimate` for several recipes of one quantiser."""
    params = [filled(r, tuple(weight.shape), lead) for r in wanted]
    return quantizers.method(wanted[0].method).estimate_many(weight, params, stats)  # type: ignore[no-any-return]


def has_forms(recipe: Recipe) -> bool:
    """Whether a quantiser's recipe may be estimated together with those of others (`estimate_together`)."""
    return hasattr(quantizers.method(recipe.method), "forms")


def estimate_together(wanted: Sequence[Recipe], weight: Tensor, stats: Stats, lead: int) -> list[float]:
    """`estimate` for recipes of several quantisers that have forms."""
    shape = tuple(weight.shape)
    return quantizers.estimate_forms([(r.method, filled(r, shape, lead)) for r in wanted], weight, stats)


def trellis_rates(recipe: Recipe) -> set[int]:
    """The rates, in quarter bits, of trellis codes in a recipe and its parts."""
    found = set().union(*map(trellis_rates, recipe.parts.values()))
    if recipe.method == "trellis":
        sections = recipe.params.get("sections", ())
        found |= {q for q, _ in sections} or {recipe.params["quarter_bits"]}
    return found


def bytes_of(factor: Recipe) -> Callable[[Shape], int]:
    """Bytes of a factor of a given shape when stored by `factor`: what the rank searches ask for."""
    return cache(lambda shape: size_of(factor, shape, lead_for(shape)))


def permuted(encoded: EncodedTensor, dims: tuple[int, ...], shape: Shape) -> EncodedTensor:
    """The same arrays under a `permute` node: decodes to `shape` = the inner shape permuted by `dims`."""
    kind = format_of("permute")
    tree = Node("permute", kind.Params(dims), {"x": encoded.tree})
    return EncodedTensor(tree, shape, {join("x", k): a for k, a in encoded.arrays.items()})


def on_device(encoded: EncodedTensor, device: torch.device) -> EncodedTensor:
    """The same tensor with its arrays on a device."""
    return replace(encoded, arrays={k: a.to(device) for k, a in encoded.arrays.items()})


def describe(node: Node) -> str:
    """A tree in a few words: `int4 g64`, `add(int2 g64, svd r16 (int8 row))`."""
    p = node.params
    if node.kind == "int":
        sign = "" if p.symmetric else " asym"
        return f"int{p.bits} {'row' if p.group == 0 else f'g{p.group}'}{sign}{' s8' if p.scale_bits == 8 else ''}"
    if node.kind == "grid":
        return f"grid16 {'row' if p.group == 0 else f'g{p.group}'}{' s8' if p.scale_bits == 8 else ''}"
    if node.kind == "fp8":
        return f"fp8 {p.variant} {'row' if p.group == 0 else f'g{p.group}'}"
    if node.kind == "trellis":
        rates = sorted(q / 4 for q in p.quarter_bits)
        return f"trellis {rates[0]:g}" + (f" to {rates[-1]:g}" if len(rates) > 1 else "")
    if node.kind == "shuffle":
        return f"shuffle {p.quarter_bits / 4:g}"
    if node.kind == "rotated":
        return describe(node.children["x"])
    if node.kind == "dense":
        return str(p.dtype)
    if not node.children:
        return node.kind
    inner = list(dict.fromkeys(describe(c) for c in node.children.values()))
    rank = getattr(p, "rank", getattr(p, "ranks", None))
    detail = "" if rank is None else f" r{rank if isinstance(rank, int) else 'x'.join(map(str, rank))}"
    return f"{node.kind}{detail} ({', '.join(inner)})"


def _decomposer_params(recipe: Recipe, lead: int) -> Any:
    cls = decomposers.method(recipe.method).Params
    known = {f.name for f in fields(cls)}
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in recipe.params.items()}
    if "lead" in known:
        given["lead"] = lead
    return cls(**given)


def _node_params(recipe: Recipe, lead: int) -> Any:
    """The parameters of the node a decomposition gives: those of its own that the format has too."""
    given = _decomposer_params(recipe, lead)
    cls = format_of(decomposers.method(recipe.method).KIND).Params
    return cls(**{f.name: getattr(given, f.name) for f in fields(cls)})
