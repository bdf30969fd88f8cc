"""The tree of an encoded tensor: nodes, the arrays they need, JSON both ways, and `decode`.

A format is a module of this package with these names:

    KIND: str                                   the word in the manifest
    Params: a `records.frozen` or frozen dataclass  `__post_init__` raises ValueError on a value out of range
    arrays(params, shape) -> {name: ArraySpec}  the arrays the node itself stores
    children(params, shape) -> {name: shape}    its children's names and dense shapes ({} for a leaf)
    decode(params, shape, arrays, children) -> Tensor   float32, of `shape`; `children` are decoded tensors
    code_bits(params, shape) -> int             nominal bits: the codes alone, without scales (leaves only)

Array names inside one encoded tensor are paths: `codes` at the root, `a.codes` in child `a`.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from functools import cache, lru_cache

from nstf.kernels.lazy import torch
from nstf.kernels.records import MISSING, NEW_DICT, defaults, frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType
    from typing import Any

    from torch import Tensor

Shape = tuple[int, ...]

MAX_DEPTH = 8
MAX_DIMS = 8
MAX_NUMEL = 1 << 40
MAX_CHILDREN = 64


class FormatError(ValueError):
    """A tree, its parameters or its arrays do not follow from each other."""


class UnknownKindError(FormatError):
    """A kind this version does not have: the file may come from a newer one."""


# Bytes of an element of a stored array, by torch's name of its dtype.
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@frozen
class ArraySpec:
    """The dtype, by torch's name, and the shape a stored array must have."""

    dtype_name: str
    shape: Shape

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype_name]

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype_name)
        return found


@frozen
class Node:
    """One node of a tree. `params` is an instance of the format's `Params`."""

    kind: str
    params: Any
    children: Mapping[str, Node] = NEW_DICT


@frozen
class EncodedTensor:
    """A tensor as it is stored: the tree, the dense shape, and the arrays by path."""

    tree: Node
    shape: Shape
    arrays: Mapping[str, Tensor]

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays, without the file's header."""
        return sum(a.numel() * a.element_size() for a in self.arrays.values())


# Formats whose file has another name than its kind: `int` would hide Python's own.
_FILES = {"int": "integer"}


def _files() -> frozenset[str]:
    """The modules of this package. Not by `pkgutil`, whose import takes longer than this."""
    folders = sys.modules["nstf.kernels.formats"].__path__
    names = (name.partition(".")[0] for folder in folders for name in os.listdir(folder))  # noqa: PTH208
    return frozenset(name for name in names if not name.startswith("_"))


@cache
def _formats() -> dict[str, ModuleType]:
    """The formats by kind: every module of this package that names a KIND."""
    found = {}
    for name in sorted(_files()):
        module = importlib.import_module(f"nstf.kernels.formats.{name}")
        if hasattr(module, "KIND"):
            found[module.KIND] = module
    return found


# Not all that was ever asked for: a stranger's file may make up any name.
@lru_cache(64)
def _format(kind: str) -> ModuleType | None:
    """The format of one kind. A file that is named as its kind is imported alone: all together take as long as reading a
    small model's header."""
    name = _FILES.get(kind, kind)
    module = importlib.import_module(f"nstf.kernels.formats.{name}") if name in _files() else None
    return module if getattr(module, "KIND", None) == kind else _formats().get(kind)


def kinds() -> list[str]:
    """The kinds this version can read, sorted."""
    return sorted(_formats())


def format_of(kind: object) -> ModuleType:
    """The module that defines `kind`. Raises FormatError for a kind this version does not know."""
    found = _format(kind) if isinstance(kind, str) else None
    if found is None:
        raise UnknownKindError(
            f"unknown encoding {str(kind)[:60]!r}; this version reads {', '.join(kinds())}"
        )
    return found


def join(path: str, name: str) -> str:
    """`path.name`, or `name` at the root."""
    return f"{path}.{name}" if path else name


def check_shape(shape: Shape) -> None:
    """Raises FormatError unless every dimension is a positive int and the product is within limits."""
    if len(shape) > MAX_DIMS:
        raise FormatError(f"shape {list(shape)[:9]} has more than {MAX_DIMS} dimensions")
    numel = 1
    for size in shape:
        if type(size) is not int or size < 1:
            raise FormatError(f"shape {list(shape)} has a dimension that is not a positive integer")
        numel *= size
        if numel > MAX_NUMEL:
            raise FormatError(f"shape {list(shape)} has more than 2**40 elements")


def array_specs(tree: Node, shape: Shape, path: str = "") -> dict[str, ArraySpec]:
    """Every array the tree needs for a dense tensor of `shape`, by path. Raises FormatError."""
    check_shape(shape)
    module = format_of(tree.kind)
    try:
        own = module.arrays(tree.params, shape)
        expected = module.children(tree.params, shape)
    except FormatError:
        raise
    except ValueError as error:
        raise FormatError(f"{tree.kind} at {path or 'root'}: {error}") from error
    if set(expected) != set(tree.children):
        raise FormatError(
            f"{tree.kind} at {path or 'root'}: children {sorted(tree.children)}, expected {sorted(expected)}"
        )
    specs = {join(path, name): spec for name, spec in own.items()}
    for name, child_shape in expected.items():
        specs |= array_specs(tree.children[name], child_shape, join(path, name))
    return specs


def stored_bytes(tree: Node, shape: Shape) -> int:
    """Bytes the arrays of a tree take on disk for a dense tensor of `shape`, without the file's header."""
    return sum(spec.size_bytes for spec in array_specs(tree, shape).values())


def leaf_code_bits(tree: Node, shape: Shape) -> int:
    """Nominal bits of the tree: its codes alone, without scales, zero points and tables."""
    module = format_of(tree.kind)
    if not tree.children:
        return int(module.code_bits(tree.params, shape))
    specs: dict[str, ArraySpec] = module.arrays(tree.params, shape)
    own = sum(spec.size_bytes * 8 for spec in specs.values())
    shapes = module.children(tree.params, shape)
    return own + sum(leaf_code_bits(child, shapes[name]) for name, child in tree.children.items())


def check(encoded: EncodedTensor) -> None:
    """Raises FormatError unless the arrays are exactly those that follow from tree and shape."""
    specs = array_specs(encoded.tree, encoded.shape)
    missing, extra = sorted(set(specs) - set(encoded.arrays)), sorted(set(encoded.arrays) - set(specs))
    if missing or extra:
        raise FormatError(f"arrays missing: {missing or 'none'}; arrays left over: {extra or 'none'}")
    for name, spec in specs.items():
        array = encoded.arrays[name]
        if array.dtype != spec.dtype or tuple(array.shape) != spec.shape:
            raise FormatError(
                f"array {name!r} is {array.dtype} {list(array.shape)}, expected {spec.dtype} {list(spec.shape)}"
            )


def check_values(encoded: EncodedTensor) -> None:
    """Raises FormatError where stored numbers contradict the tree, which shapes alone do not show.

    Formats whose numbers can do so have a `check_values(params, shape, arrays)`.
    """
    if not encoded.tree.children:
        own = getattr(format_of(encoded.tree.kind), "check_values", None)
        if own is not None:
            own(encoded.tree.params, encoded.shape, encoded.arrays)
    for name in encoded.tree.children:
        check_values(child_encoded(encoded, name))


def child_encoded(encoded: EncodedTensor, name: str) -> EncodedTensor:
    """The child `name` of an encoded tensor as an encoded tensor of its own (arrays shared)."""
    module = format_of(encoded.tree.kind)
    shape = module.children(encoded.tree.params, encoded.shape)[name]
    prefix = name + "."
    arrays = {key[len(prefix) :]: a for key, a in encoded.arrays.items() if key.startswith(prefix)}
    return EncodedTensor(encoded.tree.children[name], shape, arrays)


def decode(encoded: EncodedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """The dense tensor an encoding stands for, computed in float32 and returned as `dtype` (None: float32)."""
    module = format_of(encoded.tree.kind)
    children = {name: decode(child_encoded(encoded, name)) for name in encoded.tree.children}
    own = {key: a for key, a in encoded.arrays.items() if "." not in key}
    result: Tensor = module.decode(encoded.tree.params, encoded.shape, own, children)
    return result.reshape(encoded.shape).to(dtype or torch.float32)


def node_to_json(node: Node) -> dict[str, Any]:
    """The manifest's form of a node: `{"kind": ..., <params>..., "children": {...}}`."""
    own = {name: getattr(node.params, name) for name in defaults(type(node.params))}
    out: dict[str, Any] = {"kind": node.kind, **_plain(own)}
    if node.children:
        out["children"] = {name: node_to_json(child) for name, child in node.children.items()}
    return out


def node_from_json(data: object, depth: int = 0) -> Node:
    """A node from its JSON form. Unknown kinds, unknown keys and wrong types raise FormatError."""
    if depth > MAX_DEPTH:
        raise FormatError(f"a tree deeper than {MAX_DEPTH} levels")
    if not isinstance(data, dict):
        raise FormatError(f"a tree node must be an object, not {type(data).__name__}")
    module = format_of(data.get("kind"))
    given = {k: v for k, v in data.items() if k not in ("kind", "children")}
    params = params_from_json(module.Params, given, str(data["kind"]))
    children = data.get("children", {})
    if not isinstance(children, dict) or len(children) > MAX_CHILDREN:
        raise FormatError(f"{data['kind']}: 'children' must be an object of at most {MAX_CHILDREN} nodes")
    for name in children:
        if not name.isidentifier():
            raise FormatError(f"{data['kind']}: {name[:40]!r} is not a child's name")
    return Node(
        str(data["kind"]), params, {k: node_from_json(v, depth + 1) for k, v in sorted(children.items())}
    )


def params_from_json(cls: type, given: Mapping[str, Any], where: str) -> Any:
    """An instance of the dataclass `cls`; strict: no unknown key, no missing key, exact JSON types."""
    fields, types = defaults(cls), _types(cls)
    unknown = sorted(set(given) - set(fields))
    if unknown:
        raise FormatError(
            f"{where}: unknown key {unknown[0][:60]!r}; known are {', '.join(fields) or 'none'}"
        )
    values = {}
    for name, default in fields.items():
        if name not in given:
            if default is MISSING:
                raise FormatError(f"{where}: key {name!r} is missing")
            continue
        values[name] = _typed(given[name], types[name], f"{where}.{name}")
    try:
        return cls(**values)
    except FormatError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise FormatError(f"{where}: {error}") from error


# What parameters may be, as JSON has them.
_TYPES: dict[str, Any] = {kind.__name__: kind for kind in (int, str, bool, float)} | {
    "tuple[int, ...]": tuple[int, ...]
}


@cache
def _types(cls: type) -> dict[str, Any]:
    """The types of the fields of a record or a dataclass by name; annotations may be text."""
    return {
        name: _TYPES.get(kind, kind) if isinstance(kind, str) else kind
        for name, kind in cls.__annotations__.items()
    }


def _typed(value: Any, kind: Any, where: str) -> Any:
    if kind == _TYPES["tuple[int, ...]"]:
        if not isinstance(value, list) or len(value) > 64 or any(type(v) is not int for v in value):
            raise FormatError(f"{where} must be a list of integers")
        return tuple(value)
    if kind not in (int, str, bool, float) or type(value) is not kind:
        raise FormatError(f"{where} must be {getattr(kind, '__name__', kind)}, not {type(value).__name__}")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else value
