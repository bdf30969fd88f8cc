"""An encoding in a few characters: `int4 g64 + low_rank r8(int8 row)`."""

from collections.abc import Callable
from typing import Any

from nstf.kernels.formats import Node, array_specs, leaf_code_bits
from nstf.kernels.formats.tree import Shape


def compact(tree: Node) -> str:
    """The tree on one line. Kinds without a rule of their own are shown with their name and parameters."""
    params, children = tree.params, tree.children
    if tree.kind == "add":
        return f"{compact(children['x'])} + {compact(children['y'])}"
    if tree.kind == "rotated":
        return f"{compact(children['x'])} rotated"
    if tree.kind == "permute":
        return f"{compact(children['x'])} transposed"
    if children:
        parts = list(dict.fromkeys(compact(child) for _, child in sorted(children.items())))
        return f"{tree.kind} {_rank(params)}({', '.join(parts)})"
    rule = _LEAVES.get(tree.kind)
    if rule is not None:
        return rule(params)
    return " ".join([tree.kind, *(f"{k}={v}" for k, v in sorted(vars(params).items()))])


def nominal_bits(tree: Node, shape: Shape) -> float:
    """Bits per weight of the codes alone, without scales, zero points and tables."""
    return leaf_code_bits(tree, shape) / _numel(shape)


def disk_bits(tree: Node, shape: Shape) -> float:
    """Bits per weight of everything that is stored for the tensor, without the file's header."""
    return 8 * sum(spec.size_bytes for spec in array_specs(tree, shape).values()) / _numel(shape)


def _numel(shape: Shape) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def _rank(params: object) -> str:
    ranks = getattr(params, "ranks", None)
    if ranks is not None:
        return "r" + "x".join(str(r) for r in ranks)
    return f"r{getattr(params, 'rank', '?')}"


def _group(group: int) -> str:
    return f"g{group}" if group else "row"


def _integer(params: Any) -> str:
    words = [f"int{params.bits}", _group(params.group)]
    if not params.symmetric:
        words.append("asym")
    if params.scale_bits == 8:
        words.append("s8")
    return " ".join(words)


def _grid(params: Any) -> str:
    words = [f"grid{params.levels}", _group(params.group)]
    return " ".join([*words, "s8"] if params.scale_bits == 8 else words)


def _trellis(params: Any) -> str:
    """The rate, or the range of rates where rows differ; sections are (quarter bits, rows)."""
    rates = sorted(q / 4 for q in params.quarter_bits)
    return f"trellis {rates[0]:g}" + (f" to {rates[-1]:g}" if len(rates) > 1 else "")


_LEAVES: dict[str, Callable[[Any], str]] = {
    "int": _integer,
    "grid": _grid,
    "fp8": lambda p: f"fp8 {p.variant} {_group(p.group)}",
    "trellis": _trellis,
    "shuffle": lambda p: f"shuffle {p.quarter_bits / 4:g}",
    "mxfp4": lambda p: "mxfp4",
    "dense": lambda p: str(p.dtype),
}
