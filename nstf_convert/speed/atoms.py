"""A stored tree as the leaves whose products with activations are timed.

A leaf's time depends on its format, on the columns of a row, and on how many weights there are. So trees are cut up: a
sum, and a product of two factors, into their parts; a trellis with several rates into one for each. Where products are
timed, matrices of more than LARGEST weights are on their first rows only.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from nstf.kernels.formats import Node, node_from_json, node_to_json, stored_bytes
from nstf.kernels.formats.tree import Shape, format_of

# Weights beyond which the time of a product grows with the rows, and its start is no part of it.
LARGEST = 1 << 22


@dataclass(frozen=True)
class Atom:
    """A leaf (or one in a rotated basis) of [rows, cols]. tree: its JSON."""

    tree: str
    rows: int
    cols: int

    @property
    def node(self) -> Node:
        return node_from_json(json.loads(self.tree))

    @cached_property
    def leaf(self) -> Node:
        """The format itself, without the basis around it."""
        node = self.node
        return node.children["x"] if node.kind == "rotated" else node

    @property
    def key(self) -> str:
        """As a key of a file."""
        return f"{self.tree} {self.rows}x{self.cols}"

    @property
    def sample(self) -> "Atom":
        """The first rows of a large matrix: the time of a product grows with the rows."""
        return replace(self, rows=min(self.rows, max(64, LARGEST // self.cols // 64 * 64)))

    @cached_property
    def size_bytes(self) -> int:
        return stored_bytes(self.node, (self.rows, self.cols))


def atoms_of(tree: Node, shape: Shape, lead: int) -> Iterator[tuple[Atom, float]]:
    """(leaf, how many times its seconds count) of a tensor whose first `lead` axes make the rows."""
    rows, cols = math.prod(shape[:lead]), math.prod(shape[lead:])
    if tree.kind == "permute":
        inner = [shape[tree.params.dims.index(i)] for i in range(len(shape))]
        yield from atoms_of(tree.children["x"], tuple(inner), lead)
    elif tree.kind == "add":
        for child in tree.children.values():
            yield from atoms_of(child, shape, lead)
    elif tree.kind == "rotated":
        for leaf, share in _rates(tree.children["x"], rows):
            params = replace(tree.params, lead=1)
            yield _atom(Node("rotated", params, {"x": leaf}), rows, cols), share
    elif tree.kind == "tucker" and lead == 2 and tree.params.ranks == (1, *shape[1:]):
        # One matrix for all experts, which each expert that a token is sent to multiplies with.
        for leaf, share in _rates(tree.children["core"], rows):
            yield _atom(leaf, rows, cols), share
    elif tree.children:
        # Factors differ from tensor to tensor in their sizes: each counts as its share of the matrix's own weights.
        for name, child_shape in format_of(tree.kind).children(tree.params, shape).items():
            share = math.prod(child_shape) / (rows * cols)
            if tree.kind == "low_rank" and name == "b" and lead == 2:
                share *= shape[0]  # what all experts share is multiplied with once for each
            for leaf, part in _rates(tree.children[name], rows):
                yield _atom(leaf, rows, cols), share * part
    else:
        for leaf, share in _rates(tree, rows):
            yield _atom(leaf, rows, cols), share


def _rates(leaf: Node, rows: int) -> Iterator[tuple[Node, float]]:
    """A leaf as (leaf with one rate for all rows, share of the rows)."""
    params = leaf.params
    if hasattr(params, "lead"):
        params = replace(params, lead=1)
    if leaf.kind != "trellis" or not params.rows:
        yield Node(leaf.kind, params, leaf.children), 1.0
        return
    for rate, count in zip(params.quarter_bits, params.rows, strict=True):
        yield Node(leaf.kind, replace(params, quarter_bits=(rate,), rows=())), count / rows


def _atom(tree: Node, rows: int, cols: int) -> Atom:
    text = json.dumps(node_to_json(tree), sort_keys=True, separators=(",", ":"))
    return Atom(text, rows, cols)
