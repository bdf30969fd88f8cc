"""Some rows of an encoded tensor, without decoding the others: embedding look-ups, experts, blocks of a
matrix.

A row is an index of the first axis. Leaves are packed row by row, so taking rows of a leaf is taking rows
of its arrays (a view when the rows are a range). Which arrays follow the rows is asked of the format
itself, by comparing the arrays of a tensor with those of one that has many times the rows; so a new leaf works
here unchanged; one whose arrays do not follow its rows (tiles) may have a `decode_rows` of its own.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nstf.kernels.formats import rotated
from nstf.kernels.formats.tree import EncodedTensor, Node, Shape, child_encoded, decode, format_of
from nstf.kernels.memo import per_encoded

Rows = slice | Tensor

# Nodes over a reshape of the tensor whose leading axes may make up the first axis of the tensor.
_VIEWED = ("cp", "tucker", "tensor_train")


def decode_rows(encoded: EncodedTensor, rows: Rows, dtype: torch.dtype = torch.float32) -> Tensor:
    """decode(encoded)[rows]: [n, *shape[1:]].

    rows: a slice with start and stop, or int64 indices [n] within range. Only those rows are decoded when
    `row_wise(encoded)`; otherwise the whole tensor is decoded for a moment.
    """
    return _decode_rows(encoded, rows).to(dtype)


def row_wise(encoded: EncodedTensor) -> bool:
    """True when `decode_rows` works on the rows asked for alone."""
    kind, shape = encoded.tree.kind, encoded.shape
    if not encoded.tree.children:
        own = _own_rows(encoded)
        return own is not None or _row_factors(kind, encoded.tree.params, shape) is not None
    children = children_of(encoded)
    if kind == "low_rank":
        return row_wise(children["a"])
    if kind == "add":
        return row_wise(children["x"]) and row_wise(children["y"])
    if kind == "rotated":
        return (
            encoded.tree.params.block_out == 0 and encoded.tree.params.lead == 1 and row_wise(children["x"])
        )
    if kind == "permute":
        return encoded.tree.params.dims[0] == 0 and row_wise(children["x"])
    return kind in _VIEWED and leading_axes(encoded.tree.params.view, shape[:1]) is not None


def take(encoded: EncodedTensor, index: int) -> EncodedTensor | None:
    """decode(encoded)[index] as an encoded tensor that shares its arrays: one expert of a stack [E, out, in].

    None when the encoding has no such part (rows of a leaf that cross experts, a factorisation over all of
    them).
    """
    tree, shape = encoded.tree, encoded.shape
    if not 0 <= index < shape[0] or len(shape) < 2:
        return None
    lead: int = getattr(tree.params, "lead", 0)
    if not tree.children:
        if tree.kind == "dense":
            return EncodedTensor(tree, shape[1:], {"values": encoded.arrays["values"][index]})
        part = _rows_of_leaf(encoded, slice(index, index + 1)) if lead >= 2 else None
        if part is None:
            return None
        node = Node(tree.kind, dataclasses.replace(tree.params, lead=lead - 1))
        return EncodedTensor(node, shape[1:], part.arrays)
    parts: dict[str, EncodedTensor | None] = {}
    children = children_of(encoded)
    params: Any = tree.params
    if tree.kind == "tucker":
        return _of_one_matrix(encoded, index)
    if tree.kind == "add":
        parts = {name: take(child, index) for name, child in children.items()}
    elif tree.kind == "permute" and params.dims[0] == 0:
        params = dataclasses.replace(params, dims=tuple(d - 1 for d in params.dims[1:]))
        parts = {"x": take(children["x"], index)}
    elif tree.kind == "rotated" and lead >= 2 and params.block_out == 0:
        params = dataclasses.replace(params, lead=lead - 1)
        parts = {"x": take(children["x"], index)}
    elif tree.kind == "low_rank" and lead >= 2:
        size = math.prod(shape[1:lead])
        if params.rank > min(size, math.prod(shape[lead:])) or children["a"].tree.children:
            return None
        params = dataclasses.replace(params, lead=lead - 1)
        parts = {
            "a": _rows_of_leaf(children["a"], slice(index * size, (index + 1) * size)),
            "b": children["b"],
        }
    if not parts:
        return None
    nodes: dict[str, Node] = {}
    arrays: dict[str, Tensor] = {}
    for name, child in parts.items():
        if child is None:
            return None
        nodes[name] = child.tree
        arrays |= {f"{name}.{key}": array for key, array in child.arrays.items()}
    return EncodedTensor(Node(tree.kind, params, nodes), shape[1:], arrays)


def _of_one_matrix(encoded: EncodedTensor, index: int) -> EncodedTensor | None:
    """An expert where all of a stack are one matrix times a number each: that matrix with its scales times the number, as
    float16 has it. None where that says less than the file: scales beyond float16's end, or all of them below its normal
    numbers."""
    params, core = encoded.tree.params, children_of(encoded)["core"]
    if params.view != encoded.shape or params.ranks != (1, *encoded.shape[1:]) or core.tree.kind != "int":
        return None
    matrix = take(core, 0)
    if matrix is None:
        return None
    number = decode_rows(children_of(encoded)["factor0"], slice(index, index + 1)).reshape(()).float()
    name = "scale_super" if "scale_super" in matrix.arrays else "scale"
    exact = matrix.arrays[name].float() * number
    scale = exact.to(matrix.arrays[name].dtype)
    # Small rows beside large ones may lose digits.
    if bool(((scale.float() - exact).abs() > exact.abs().max() * 2.0**-11).any()):
        return None
    return EncodedTensor(matrix.tree, matrix.shape, {**matrix.arrays, name: scale})


def expert(encoded: EncodedTensor, index: int) -> EncodedTensor | None:
    """`take`, with the same object each time: kernels remember what they derive per object."""
    known = _experts(encoded)
    if index not in known:
        known[index] = take(encoded, index)
    return known[index]


@per_encoded
def _experts(encoded: EncodedTensor) -> dict[int, EncodedTensor | None]:
    return {}


@per_encoded
def children_of(encoded: EncodedTensor) -> dict[str, EncodedTensor]:
    """The children as encoded tensors, made once per tensor."""
    return {name: child_encoded(encoded, name) for name in encoded.tree.children}


def leading_axes(view: Shape, lead_shape: Shape) -> int | None:
    """How many leading axes of `view` have the product of `lead_shape`; None when none have."""
    target, product = math.prod(lead_shape), 1
    for axis, size in enumerate(view):
        product *= size
        if product == target and axis + 1 < len(view):
            return axis + 1
    return None


def _decode_rows(encoded: EncodedTensor, rows: Rows) -> Tensor:
    tree, shape = encoded.tree, encoded.shape
    if not tree.children:
        own = _own_rows(encoded)
        if own is not None:
            result: Tensor = own(tree.params, shape, dict(encoded.arrays), _indices(rows, encoded))
            return result
        part = _rows_of_leaf(encoded, rows)
        return decode(encoded)[rows] if part is None else decode(part)
    count = _count(rows)
    if tree.kind == "low_rank":
        children = children_of(encoded)
        size = math.prod(shape[1 : tree.params.lead])
        left = _decode_rows(children["a"], _repeat(rows, size))
        return (left @ decode(children["b"])).reshape(count, *shape[1:])
    if tree.kind == "add":
        children = children_of(encoded)
        return _decode_rows(children["x"], rows) + _decode_rows(children["y"], rows)
    if tree.kind == "rotated" and row_wise(encoded):
        stored = _decode_rows(children_of(encoded)["x"], rows).reshape(count, -1)
        return rotated.from_basis(tree.params, stored).reshape(count, *shape[1:])
    if tree.kind == "permute" and tree.params.dims[0] == 0:
        return _decode_rows(children_of(encoded)["x"], rows).permute(tree.params.dims)
    if tree.kind in _VIEWED:
        split = leading_axes(tree.params.view, shape[:1])
        # A product over all rows at once is cheaper than row by row when all or most rows are wanted.
        if split is not None and 2 * count < shape[0]:
            return _rows_of_view(encoded, _indices(rows, encoded), split).reshape(count, *shape[1:])
    return decode(encoded)[rows]


def _rows_of_view(encoded: EncodedTensor, rows: Tensor, split: int) -> Tensor:
    """Rows [n, cols] of a cp, tucker or tensor_train node; its first `split` view axes are the rows."""
    params, factors = encoded.tree.params, {k: decode(c) for k, c in children_of(encoded).items()}
    at = torch.unravel_index(rows, params.view[:split])
    axes = range(split, len(params.view))
    if encoded.tree.kind == "cp":
        left = factors["factor0"][at[0]]
        for i in range(1, split):
            left = left * factors[f"factor{i}"][at[i]]
        right = factors[f"factor{split}"].T
        for i in axes[1:]:
            right = torch.einsum("rn,mr->rnm", right, factors[f"factor{i}"]).reshape(params.rank, -1)
        return left @ right
    if encoded.tree.kind == "tucker":
        right = factors["core"]
        for i in axes:
            if f"factor{i}" in factors:
                right = torch.tensordot(right, factors[f"factor{i}"], ([i], [1])).movedim(-1, i)
        for i in range(split):
            left_i = factors.get(f"factor{i}")
            picked = left_i[at[i]] if left_i is not None else None
            right = _pick(right, picked, at[i], first=i == 0)
        return right.reshape(len(rows), -1)
    left = factors["core0"][0, at[0]]
    for i in range(1, split):
        left = torch.einsum("nr,rns->ns", left, factors[f"core{i}"][:, at[i]])
    right = factors[f"core{split}"]
    for i in axes[1:]:
        right = torch.tensordot(right, factors[f"core{i}"], 1)
    return left @ right.reshape(left.shape[1], -1)


def _pick(core: Tensor, factor_rows: Tensor | None, index: Tensor, first: bool) -> Tensor:
    """One leading core axis contracted with each row's factor row (or indexed, where the axis has no factor).

    core: [r, ...] for the first axis, then [n, r, ...]. Returns [n, ...].
    """
    if first:
        return core[index] if factor_rows is None else torch.tensordot(factor_rows, core, 1)
    if factor_rows is None:
        return core[torch.arange(len(index), device=index.device), index]
    return torch.einsum("nr,nrm->nm", factor_rows, core.flatten(2)).reshape(len(index), *core.shape[2:])


def _own_rows(encoded: EncodedTensor) -> Callable[..., Tensor] | None:
    """The format's own way to decode rows (`decode_rows` in its module), for leaves not packed row by row."""
    if getattr(encoded.tree.params, "lead", 1) != 1:
        return None
    return getattr(format_of(encoded.tree.kind), "decode_rows", None)


def _rows_of_leaf(encoded: EncodedTensor, rows: Rows) -> EncodedTensor | None:
    """Those rows of a leaf as a leaf of its own, or None when its arrays do not follow its rows."""
    factors = _row_factors(encoded.tree.kind, encoded.tree.params, encoded.shape)
    if factors is None:
        return None
    arrays = {}
    for name, array in encoded.arrays.items():
        factor = factors[name]
        arrays[name] = array if factor == 0 else array[_repeat(rows, factor)]
    return EncodedTensor(encoded.tree, (_count(rows), *encoded.shape[1:]), arrays)


# Rows and columns are padded to at most 64, so an array that depends on them grows when there are so many times as many.
_MANY = 4096


@lru_cache(maxsize=1024)
def _row_factors(kind: str, params: Any, shape: Shape) -> dict[str, int] | None:
    """How many rows of each array of a leaf belong to one row of the tensor; 0 for arrays of the whole.

    None when an array does not follow the rows: all rows in one (`lead` 0), tiles of rows, padding, paths through them.
    """
    module = format_of(kind)
    # Codes that go on from the rows before begin anew at segments only.
    if math.prod(shape[1 : getattr(params, "lead", 1)]) % getattr(module, "SEGMENT", 1):
        return None
    try:
        now, one_more, many = (
            module.arrays(params, (size, *shape[1:])) for size in (shape[0], shape[0] + 1, shape[0] * _MANY)
        )
    except ValueError:  # sections that name their rows
        return None
    factors = {}
    for name, spec in now.items():
        if many[name].shape == spec.shape:
            factors[name] = 0
            continue
        size, *rest = spec.shape
        factor = size // shape[0]
        if one_more[name].shape != (size + factor, *rest) or many[name].shape != (size * _MANY, *rest):
            return None
        factors[name] = factor
    return factors


def _repeat(rows: Rows, size: int) -> Rows:
    """The rows of a matrix in which every row asked for is `size` rows."""
    if size == 1:
        return rows
    if isinstance(rows, slice):
        return slice(rows.start * size, rows.stop * size)
    return (rows[:, None] * size + torch.arange(size, device=rows.device)).flatten()


def _count(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def _indices(rows: Rows, encoded: EncodedTensor) -> Tensor:
    if isinstance(rows, Tensor):
        return rows
    device = next(iter(encoded.arrays.values())).device
    return torch.arange(rows.start, rows.stop, device=device)
