"""Slices of encoded tensors for tensor parallelism: `shard` cuts the arrays themselves, so nothing is decoded or rounded.

A format says where it can be cut. Leaves have

    grain(params, shape, axis) -> int | None       cuts along the axis are at multiples of it; None: nowhere
    cut(params, shape, arrays, span) -> (params, arrays)    the part `span` of the tensor

and inner nodes

    places(params, shape, axis) -> Places | None   where a cut along the axis falls in the children
    narrowed(params, shape, span) -> params        the node's parameters in the part
    separated(encoded) -> encoded                  the same tensor in a form that can be cut (only where it needs one)

Arrays that are views of a mapped file stay views where a part lies in one piece: the rest of the file is not read.
"""

from __future__ import annotations

import itertools
import math

from nstf.kernels.formats.tree import (
    EncodedTensor,
    FormatError,
    Node,
    Shape,
    child_encoded,
    format_of,
)
from nstf.kernels.records import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@frozen
class Span:
    """The positions start to stop - 1 of an axis."""

    axis: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def of(self, shape: Shape) -> Shape:
        """The shape of the part."""
        return (*shape[: self.axis], self.size, *shape[self.axis + 1 :])


@frozen
class Place:
    """A cut at position p of a node is one at p * times / unit along an axis of a child."""

    axis: int
    times: int = 1
    unit: int = 1

    def span(self, of: Span) -> Span:
        """The child's part."""
        return Span(self.axis, of.start * self.times // self.unit, of.stop * self.times // self.unit)

    def grain(self, inner: int) -> int:
        """What p must be a multiple of so that the child is cut at multiples of `inner`."""
        whole = self.unit * inner
        return whole // math.gcd(self.times, whole)


@frozen
class Places:
    """Where a cut falls in the children; those that are not named stay whole. grain: what the node itself asks."""

    grain: int
    children: Mapping[str, Place]


def grain(tree: Node, shape: Shape, axis: int) -> int | None:
    """Cuts along `axis` are at multiples of this many positions; None: the tensor cannot be cut along it.

    For trellis codes in several sections it is necessary, not sufficient: which rows lie together is in the arrays.
    """
    module = format_of(tree.kind)
    if not tree.children:
        return module.grain(tree.params, shape, axis)  # type: ignore[no-any-return]
    places: Places | None = module.places(tree.params, shape, axis)
    if places is None:
        return None
    found, shapes = places.grain, module.children(tree.params, shape)
    for name, place in places.children.items():
        inner = grain(tree.children[name], shapes[name], place.axis)
        if inner is None:
            return None
        found = math.lcm(found, place.grain(inner))
    return found


def shard(encoded: EncodedTensor, span: Span) -> EncodedTensor:
    """The part of a tensor along an axis, encoded. Decoded parts put together are the decoded tensor.

    Raises FormatError with the granularity where the tensor cannot be cut there.
    """
    shape = encoded.shape
    if not 0 <= span.axis < len(shape) or not 0 <= span.start < span.stop <= shape[span.axis]:
        raise FormatError(
            f"positions {span.start} to {span.stop} of axis {span.axis} are not in shape {list(shape)}"
        )
    if span.size == shape[span.axis]:
        return encoded
    _check_aligned(encoded.tree, shape, span)
    module, part = format_of(encoded.tree.kind), span.of(shape)
    if hasattr(module, "separated"):
        encoded = module.separated(encoded)
    if not encoded.tree.children:
        params, arrays = module.cut(encoded.tree.params, shape, dict(encoded.arrays), span)
        return EncodedTensor(Node(encoded.tree.kind, params), part, arrays)
    shapes = _parts_of(encoded.tree, shape, span)
    params = module.narrowed(encoded.tree.params, shape, span)
    places: Places = module.places(encoded.tree.params, shape, span.axis)
    children, arrays = {}, {k: a for k, a in encoded.arrays.items() if "." not in k}
    for name in encoded.tree.children:
        child = child_encoded(encoded, name)
        if name in places.children:
            child = shard(child, places.children[name].span(span))
        _check_room(encoded.tree, shape, span, child.shape, shapes.get(name))
        children[name] = child.tree
        arrays |= {f"{name}.{key}": array for key, array in child.arrays.items()}
    return EncodedTensor(Node(encoded.tree.kind, params, children), part, arrays)


def check_part(tree: Node, shape: Shape, span: Span) -> None:
    """Raises FormatError where `shard` would, without the arrays: only sections of trellis rows are not looked at."""
    if span.size == shape[span.axis]:
        return
    _check_aligned(tree, shape, span)
    if not tree.children:
        return
    module = format_of(tree.kind)
    whole, parts = module.children(tree.params, shape), _parts_of(tree, shape, span)
    places: Places = module.places(tree.params, shape, span.axis)
    for name, child in tree.children.items():
        own = whole[name]
        if name in places.children:
            inner = places.children[name].span(span)
            check_part(child, own, inner)
            own = inner.of(own)
        _check_room(tree, shape, span, own, parts.get(name))


def _parts_of(tree: Node, shape: Shape, span: Span) -> dict[str, Shape]:
    """The shapes of a part's children. Raises FormatError where it is too small for a rank."""
    module = format_of(tree.kind)
    try:
        found: dict[str, Shape] = module.children(module.narrowed(tree.params, shape, span), span.of(shape))
    except FormatError:
        raise
    except ValueError as error:
        raise FormatError(f"{tree.kind}: a part of {span.size} of {shape[span.axis]}: {error}") from error
    return found


def _check_room(tree: Node, shape: Shape, span: Span, own: Shape, wanted: Shape | None) -> None:
    if own != wanted:
        raise FormatError(
            f"{tree.kind}: a part of {span.size} of {shape[span.axis]} is too small for its ranks"
        )


def spans(size: int, axis: int, ranks: int, grain: int = 1) -> list[Span]:
    """An axis in as many parts as there are ranks, cut at multiples of `grain`, as even as these are.

    Raises FormatError when there are fewer pieces than ranks.
    """
    pieces = -(-size // grain)
    if pieces < ranks:
        raise FormatError(f"{size} positions in pieces of {grain} do not give {ranks} ranks one each")
    at = [min(size, (pieces * rank // ranks) * grain) for rank in range(ranks + 1)]
    return [Span(axis, start, stop) for start, stop in itertools.pairwise(at)]


def _check_aligned(tree: Node, shape: Shape, span: Span) -> None:
    size, step = shape[span.axis], grain(tree, shape, span.axis)
    if step is None:
        raise FormatError(f"{tree.kind} of shape {list(shape)} cannot be cut along axis {span.axis}")
    if span.start % step or (span.stop % step and span.stop != size):
        raise FormatError(
            f"{tree.kind} of shape {list(shape)} is cut along axis {span.axis} at multiples of {step}, "
            f"not from {span.start} to {span.stop}"
        )


@frozen
class MatrixCut:
    """A span of an axis in the matrix view of a leaf: columns from `first` to `last`, or all columns of some rows."""

    shape: Shape
    lead: int
    span: Span

    @property
    def by_rows(self) -> bool:
        return self.span.axis < self.lead

    @property
    def columns(self) -> tuple[int, int]:
        """(first, last + 1) of the columns, where the cut is by columns."""
        inner = math.prod(self.shape[self.span.axis + 1 :])
        return self.span.start * inner, self.span.stop * inner

    def rows(self, array: Tensor) -> Tensor:
        """The rows of an array [rows, ...] that belong to the part; a view where they lie together."""
        split = array.view(*self.shape[: self.lead], *array.shape[1:])
        return split.narrow(self.span.axis, self.span.start, self.span.size).reshape(-1, *array.shape[1:])


def column_grain(shape: Shape, lead: int, axis: int, columns: int) -> int | None:
    """Positions of an axis of columns that make whole pieces of `columns` columns; None where they lie in several pieces."""
    if math.prod(shape[lead:axis]) > 1:
        return None
    inner = math.prod(shape[axis + 1 :])
    return columns // math.gcd(columns, inner)


def row_grain(shape: Shape, lead: int, axis: int, rows: int) -> int | None:
    """Positions of an axis of rows that make whole pieces of `rows` rows; None where no cut does."""
    inner = math.prod(shape[axis + 1 : lead])
    if math.prod(shape[:axis]) > 1 and (shape[axis] * inner) % rows:
        return None
    return rows // math.gcd(rows, inner)


def view_place(view: Shape, shape: Shape, axis: int) -> Place | None:
    """The axis of a view that starts where an axis of the shape does; None where there is none."""
    before, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    for at, size in enumerate(view):
        if math.prod(view[:at]) == before and size > 1:
            return Place(at, inner, math.prod(view[at + 1 :]))
    return None


def narrowed_view(view: Shape, shape: Shape, span: Span) -> Shape:
    """The view of the part."""
    place = view_place(view, shape, span.axis)
    if place is None:
        raise FormatError(
            f"view {list(view)} has no axis that starts where axis {span.axis} of {list(shape)} does"
        )
    return place.span(span).of(view)
