"""Products of a mixture's experts from their codes (kernels/cpu/engine/grouped.cpp).

The tokens of a layer are sorted by expert; one parallel loop goes over pieces (expert, rows of its weight), so that experts
with few tokens keep all threads busy. No weight is decoded, and only experts that have tokens are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

from nstf.kernels.cpu import engine_matrix, ext
from nstf.kernels.formats.tree import EncodedTensor, Node
from nstf.kernels.lazy import torch
from nstf.kernels.memo import per_encoded
from nstf.kernels.torch.rows import children_of, expert

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from torch import Tensor


# Tokens of an expert, on average, up to which float32 products from codes are faster than decoding it for a library
# (docs/structure.md: one thread, AVX-512). With int8 activations they are at any number.
_MOST_EXACT = {"trellis": 16, "shuffle": 1 << 60}
_MOST_OTHERS = 64


def available() -> bool:
    """Whether the extension holds the products."""
    return hasattr(ext, "GroupedMatrices")


@dataclass(frozen=True)
class Routing:
    """Tokens' choices of experts, sorted. order: int64 [tokens x choices], places in the choices by expert; offsets: int64
    [experts + 1], where those of an expert begin; taken: choices of some expert, which are the first in `order`."""

    order: Tensor
    offsets: Tensor
    tokens: int
    choices: int
    taken: int

    @property
    def hit(self) -> int:
        """Experts that have tokens."""
        return int(torch.count_nonzero(self.offsets[1:] - self.offsets[:-1]))


def route(index: Tensor, experts: int) -> Routing:
    """index: [tokens, choices], integers; `experts` itself stands for none. Raises ValueError for others out of range."""
    index = index.to(torch.int64).contiguous()
    tokens, choices = index.shape
    order = torch.empty(tokens * choices, dtype=torch.int64, device="cpu")
    offsets = torch.empty(experts + 1, dtype=torch.int64, device="cpu")
    ext.group_at(index.data_ptr(), tokens * choices, experts, order.data_ptr(), offsets.data_ptr())
    return Routing(order, offsets, tokens, choices, int(offsets[-1]))


class Stack:
    """The experts of a stack [experts, rows, cols] as the engine's matrices, each made when it first has a token.

    turned: the stack's experts are [cols, rows]. exact: no int8 activations.
    """

    def __init__(self, encoded: EncodedTensor, turned: bool, exact: bool) -> None:
        self._stored, self._turned, self._exact = encoded, turned, exact
        self.experts, rows, cols = encoded.shape
        self.rows, self.cols = (cols, rows) if turned else (rows, cols)
        self._grouped = ext.GroupedMatrices(self.experts, self.rows, self.cols)
        self._most = min(_most_exact(encoded.tree)) if exact else 1 << 60

    def ready(self, routing: Routing) -> bool:
        """Makes the matrices of the experts that are hit. False where one cannot be read from its codes, or where so many
        float32 products are faster otherwise."""
        if routing.taken > self._most and routing.taken > self._most * routing.hit:
            return False
        for index in self._grouped.missing_at(routing.offsets.data_ptr()):
            matrix = _matrix(self._stored, index, self._turned)
            if matrix is None:
                return False
            self._grouped.set(index, engine_matrix.compile_matrix(matrix, self._exact))
        return True

    def multiply(self, x: Tensor, routing: Routing, gather: bool) -> Tensor:
        """Each row times its expert's matrix, after `ready`: float32 [taken, rows].

        x: float32, contiguous: [tokens, cols], gathered in the routing's order, or [taken, cols] in that order.
        """
        if x.shape != (routing.tokens if gather else routing.taken, self.cols):
            raise ValueError(f"activations {list(x.shape)} for experts of {self.cols} columns")
        y = torch.empty(routing.taken, self.rows, dtype=torch.float32, device="cpu")
        order = routing.order.data_ptr() if gather else 0
        at = routing.offsets.data_ptr()
        self._grouped.multiply_at(
            at, x.data_ptr(), order, routing.choices, y.data_ptr(), torch.get_num_threads()
        )
        return y


def combine(parts: Tensor, routing: Routing, weights: Tensor) -> Tensor:
    """The sum of each token's experts: float32 [tokens, cols].

    parts: float32 [taken, cols] in the routing's order. weights: float32 [tokens, choices].
    """
    y = torch.empty(routing.tokens, parts.shape[1], dtype=torch.float32, device="cpu")
    ext.combine_at(
        parts.data_ptr(),
        routing.order.data_ptr(),
        routing.taken,
        weights.data_ptr(),
        routing.tokens,
        routing.choices,
        parts.shape[1],
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y


def stack(encoded: EncodedTensor, turned: bool, exact: bool) -> Stack | None:
    """The stack [experts, out, in] (turned: [experts, in, out]), or None where its experts are not read from their codes.

    The same object each time, until the instruction set changes.
    """
    known = _stacks(encoded)
    key = (turned, exact, ext.isa())
    if key not in known:
        first = _matrix(encoded, 0, turned) if len(encoded.shape) == 3 else None
        known[key] = None if first is None else Stack(encoded, turned, exact)
    return known[key]


@per_encoded
def _stacks(encoded: EncodedTensor) -> dict[tuple[bool, bool, str], Stack | None]:
    return {}


def _most_exact(tree: Node) -> Iterator[int]:
    """Of each leaf."""
    if not tree.children:
        yield _MOST_EXACT.get(tree.kind, _MOST_OTHERS)
    for child in tree.children.values():
        yield from _most_exact(child)


def _matrix(encoded: EncodedTensor, index: int, turned: bool) -> Any:
    """An expert's matrix [rows, cols], encoded, or None."""
    found = expert(encoded, index)
    if found is not None and found.tree.kind == "permute":
        same = found.tree.params.dims == (0, 1)
        found = children_of(found)["x"] if same != turned else None
    elif turned:
        found = None  # its rows are the columns of the product, which no kernel for codes takes
    return found if found is not None and engine_matrix.reads_codes(found) else None
