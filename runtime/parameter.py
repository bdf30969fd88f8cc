"""A stored weight inside a module: its arrays as buffers, and a tensor that is decoded only where it is used.

`EncodedParameter` owns the arrays, so `.to(device)`, `state_dict` and memory accounting work. `LazyWeight`
is what a module's code sees when it reads `self.weight`: it has shape, dtype and device, and every
operation on it decodes for the time of that operation; the common ones (linear, embedding, one expert of a
stack) do not decode the rest.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from nstf.errors import UnsupportedError
from nstf.kernels.formats import EncodedTensor, Node, decode
from nstf.kernels.torch.rows import children_of, decode_rows, expert
from nstf.kernels.triton.linear import resident
from nstf.kernels.triton.linear import rows as rows_on_gpu
from nstf.runtime.gradient import linear
from nstf.runtime.operators import number_of


class EncodedParameter(nn.Module):
    """The arrays of one encoded tensor. `dtype` and `device` are those its decoded values are computed in."""

    def __init__(self, encoded: EncodedTensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.tree, self.shape = encoded.tree, encoded.shape
        self.paths = sorted(encoded.arrays)
        for path in self.paths:
            self.register_buffer(_buffer_name(path), encoded.arrays[path])
        device = encoded.arrays[self.paths[0]].device
        self.stand_for(torch.empty(0, dtype=dtype, device=device))
        # On a GPU what is kept is made at the first use, on the device.
        self._encoded: EncodedTensor | None = None if device.type == "cuda" else encoded
        self._turned: tuple[EncodedTensor, EncodedTensor] | None = None
        self.number = number_of(self)

    def stand_for(self, like: Tensor) -> None:
        """Takes dtype and device from a tensor of no elements.

        It follows .to(dtype), .half() and so on, which the arrays themselves must not. A parameter of no elements, with its
        true number as DeepSpeed states it, is what PEFT and transformers' Trainer count.
        """
        self.like = nn.Parameter(like, requires_grad=False)
        self.like.ds_numel = self.numel  # type: ignore[attr-defined]

    @property
    def encoded(self) -> EncodedTensor:
        """The tensor as it is stored, on the module's device; the same object until the module moves."""
        if self._encoded is None:
            arrays = {path: self._buffers[_buffer_name(path)] for path in self.paths}
            self._encoded = resident(EncodedTensor(self.tree, self.shape, arrays))  # type: ignore[arg-type]
            for path in self.paths:
                self._buffers[_buffer_name(path)] = self._encoded.arrays[path]
        return self._encoded

    def matrix(self, turned: bool = False) -> EncodedTensor:
        """The tensor, or its transpose: the same object each time, since kernels remember what they derive per object."""
        encoded = self.encoded
        if not turned:
            return encoded
        if self._turned is None or self._turned[0] is not encoded:
            self._turned = (encoded, transposed(encoded))
        return self._turned[1]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.number = number_of(self)  # a copy is another weight

    def settle(self) -> None:
        """After the buffers were filled from elsewhere: the tensor is read anew, on their device."""
        device = self._buffers[_buffer_name(self.paths[0])].device  # type: ignore[union-attr]
        self.stand_for(torch.empty(0, dtype=self.dtype, device=device))
        self._encoded = None

    def share(self, encoded: EncodedTensor) -> None:
        """Takes the same tensor in other arrays (views of a larger one) in the place of its own."""
        self._encoded = encoded
        for path in self.paths:
            self._buffers[_buffer_name(path)] = encoded.arrays[path]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of decoded values where no activation says it (embeddings)."""
        return self.like.dtype

    def lazy(self) -> "LazyWeight":
        """A tensor that stands for the decoded values."""
        return LazyWeight(self.encoded, self.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "EncodedParameter":
        """Arrays follow the device and keep their dtype: float16 scales are part of the format."""
        like = fn(self.like.data)
        if torch._has_compatible_shallow_copy_type(self.like, like):
            self.like.data = (
                like  # the same object, as torch itself does: what was cast and cast back is unchanged
            )
        else:
            self.stand_for(like)
        for path in self.paths:
            name = _buffer_name(path)
            self._buffers[name] = self._buffers[name].to(like.device)  # type: ignore[union-attr]
        self._encoded = None
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """The arrays alone."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(f"{prefix}like", None)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict({**state_dict, f"{prefix}like": self.like.data}, prefix, *args)

    @property
    def numel(self) -> int:
        """Elements of the decoded tensor."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Of the stored arrays."""
        return sum(
            a.numel() * a.element_size()
            for p in self.paths
            if (a := self._buffers[_buffer_name(p)]) is not None
        )

    def extra_repr(self) -> str:
        bits = 8 * self.size_bytes / max(1, self.numel)
        return (
            f"{_kinds(self.tree)}, shape={list(self.shape)}, {bits:.2f} bits per weight, dtype={self.dtype}"
        )


def _kinds(tree: Node) -> str:
    """`add(int, low_rank(dense, dense))`: what the tensor is made of."""
    inside = ", ".join(_kinds(child) for _, child in sorted(tree.children.items()))
    return f"{tree.kind}({inside})" if inside else tree.kind


def _buffer_name(path: str) -> str:
    """The array's path as a buffer name, in which torch allows no dot."""
    return path.replace(".", "/")


class _ReadOnly(Tensor):
    """A tensor that operations read as what `decoded` gives. Writing to it raises UnsupportedError: it would be lost."""

    def decoded(self) -> Tensor:
        """The values."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        shortcut = _SHORTCUTS.get(func)
        if shortcut is not None:
            result = shortcut(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        # A method wrapper is made anew at each access: equal, not the same.
        if func in (_SET_DATA, Tensor.__setitem__) and isinstance(args[0], _ReadOnly):
            raise UnsupportedError(READ_ONLY)
        if func in _OF_STORAGE:
            args = tuple(a.decoded() if isinstance(a, _ReadOnly) else a for a in args)
        # Not super(): that would turn the dense result into a LazyWeight again.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable and _writes_to_lazy(func, args, kwargs or {}):
            raise UnsupportedError(READ_ONLY)

        def dense(value: Any) -> Any:
            return value.decoded() if isinstance(value, _ReadOnly) else value

        found = func(*tree_map(dense, args), **tree_map(dense, kwargs or {}))
        if not any(returned.alias_info is not None for returned in func._schema.returns):
            return found
        return tree_map(lambda value: _View(value) if isinstance(value, Tensor) else value, found)


class LazyWeight(_ReadOnly):
    """The decoded value of an encoded tensor, as far as anyone asks; never stored.

    Gradients go through it to activations, not into it.
    """

    source: EncodedTensor
    # transformers draws no random numbers for a weight that says so.
    _is_hf_initialized = True

    @staticmethod
    def __new__(cls, source: EncodedTensor, dtype: torch.dtype) -> "LazyWeight":
        device = next(iter(source.arrays.values())).device
        lazy: LazyWeight = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, source.shape, dtype=dtype, device=device, requires_grad=False
        )
        lazy.source = source
        return lazy

    def decoded(self) -> Tensor:
        """The dense tensor, in this tensor's dtype."""
        with torch._C.DisableTorchFunctionSubclass():
            return decode(self.source, self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyWeight({self.source.tree.kind}, shape={list(self.shape)}, dtype={self.dtype})"


class _View(_ReadOnly):
    """What stands for a part of a LazyWeight (`w.data`, `w[0]`, `w.t()`): a write to it would be lost, too."""

    part: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "_View":
        view: _View = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=values.device,
            requires_grad=False,
        )  # fmt: skip
        view.part = values
        return view

    def decoded(self) -> Tensor:
        return self.part

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.part)


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
# Methods that read the storage, which only what is decoded has.
_OF_STORAGE = (
    Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.data_ptr, Tensor.untyped_storage, Tensor.__deepcopy__,
    Tensor.__reduce_ex__, Tensor.__dlpack__,
)  # fmt: skip
READ_ONLY = (
    "an encoded weight cannot be written to: it stays as the file holds it. To merge an adapter or to train the "
    "weights themselves, decode the model first: nstf export model.nstf -o folder"
)


def _writes_to_lazy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation changes one of its arguments that stands for encoded values, or one of a list of them."""
    given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
    return any(
        argument.alias_info is not None
        and argument.alias_info.is_write
        and any(isinstance(value, _ReadOnly) for value in tree_leaves(given.get(argument.name)))
        for argument in func._schema.arguments
    )


def transposed(encoded: EncodedTensor) -> EncodedTensor:
    """The transpose of an encoded matrix, sharing its arrays."""
    if encoded.tree.kind == "permute":
        return children_of(encoded)["x"]
    from nstf.kernels.formats.permute import Params

    node = Node("permute", Params((1, 0)), {"x": encoded.tree})
    arrays = {f"x.{path}": array for path, array in encoded.arrays.items()}
    return EncodedTensor(node, encoded.shape[::-1], arrays)


def _linear(x: Tensor, weight: Any, bias: Tensor | None = None) -> Any:
    if not isinstance(weight, LazyWeight) or isinstance(x, LazyWeight) or len(weight.source.shape) != 2:
        return NotImplemented
    return linear(x, weight.source, bias)


def _matmul(x: Any, weight: Any) -> Any:
    """x @ W for a lazy W [in, out]."""
    if not isinstance(weight, LazyWeight) or isinstance(x, LazyWeight) or len(weight.source.shape) != 2:
        return NotImplemented
    return linear(x, transposed(weight.source))


def _embedding(ids: Tensor, weight: Any, *args: Any, **kwargs: Any) -> Any:
    max_norm = kwargs.get("max_norm", args[1] if len(args) > 1 else None)
    if not isinstance(weight, LazyWeight) or max_norm is not None:
        return NotImplemented
    return embedding(ids, weight.source, weight.dtype)


def _getitem(weight: Any, index: Any) -> Any:
    """One entry of the first axis (an expert), still encoded when the format allows it, or a few of them."""
    if not isinstance(weight, LazyWeight):
        return NotImplemented
    size = weight.source.shape[0]
    if isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32):
        if index.dim() == 1:
            return embedding(torch.where(index < 0, index + size, index), weight.source, weight.dtype)
        index = int(index) if index.dim() == 0 else index
    if type(index) is int and -size <= index < size:
        part = expert(weight.source, index % size)
        return NotImplemented if part is None else LazyWeight(part, weight.dtype)
    return NotImplemented


def embedding(ids: Tensor, encoded: EncodedTensor, dtype: torch.dtype) -> Tensor:
    """decode(encoded)[ids]: [*ids.shape, *shape[1:]], decoding each row asked for once.

    An id out of range raises IndexError; where a GPU's kernel looks the rows up, it gives NaN: to raise, the host would
    have to wait for the device.
    """
    size = encoded.shape[0]
    flat = ids.reshape(-1).to(torch.int64)
    found = rows_on_gpu(encoded, flat, dtype)
    if found is not None:
        return found.reshape(*ids.shape, *encoded.shape[1:])
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < size:
        raise IndexError(f"index {int(flat.min())} or {int(flat.max())} is outside the {size} rows")
    if flat.numel() < 2:
        return decode_rows(encoded, flat, dtype).reshape(*ids.shape, *encoded.shape[1:])
    unique, where = torch.unique(flat, return_inverse=True)
    return decode_rows(encoded, unique, dtype)[where].reshape(*ids.shape, *encoded.shape[1:])


_SHORTCUTS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.__getitem__: _getitem,
}
