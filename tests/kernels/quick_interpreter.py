"""Triton's interpreter in less than half the time: what it works out anew at each operation is remembered.

A kernel's interpretation spends its time on names of types, shapes and a search through `triton.language` for each call of a
device function, not on numbers. What is remembered depends on types and shapes alone, so the numbers are the same bit for
bit (test_quick_interpreter.py).
"""

import inspect
import math
from typing import Any

import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def install() -> None:
    """For this process, in which TRITON_INTERPRET was set before Triton was imported."""
    _device_functions()
    _types()
    _tensors()


def _device_functions() -> None:
    """`triton.language` is patched once a launch for those who see the same of it, not once a call."""
    plain = interpreter.GridExecutor.__call__
    patched: set[frozenset[str]] = set()
    seen: dict[int, frozenset[str]] = {}

    def launch(self: Any, *arguments: Any, **named: Any) -> Any:
        patched.clear()  # the end of a launch takes the patches back
        return plain(self, *arguments, **named)

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        known = self.fn.__globals__
        if id(known) not in seen:
            modules = (value for value in known.values() if inspect.ismodule(value))
            seen[id(known)] = frozenset(m.__name__ for m in modules if m in (tl, core))
        if seen[id(known)] not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(seen[id(known)])
        return self.rewrite()(*arguments, **named)

    interpreter.GridExecutor.__call__ = launch
    interpreter.InterpretedFunction.__call__ = call


def _types() -> None:
    """The dtype in NumPy, and the names and sizes of blocks."""
    plain, dtypes = interpreter._get_np_dtype, dict[Any, Any]()

    def dtype_of(kind: Any) -> Any:
        key = (type(kind), kind.name)
        if key not in dtypes:
            dtypes[key] = plain(kind)
        return dtypes[key]

    make, blocks = core.block_type.__init__, dict[Any, Any]()

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = (type(element_ty), element_ty.name, sizes)
        if key not in blocks:
            make(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    interpreter._get_np_dtype = dtype_of
    core.block_type.__init__ = block


def _tensors() -> None:
    """Shapes as constants, and the operands of a product or sum that have one shape."""
    shapes = dict[tuple[int, ...], Any]()

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        shape = tuple(type.shape.values) if type.is_block() else ()
        if shape not in shapes:
            constants = core.tuple([core.constexpr(size) for size in shape])
            shapes[shape] = core.constexpr(math.prod(shape)), constants
        self.numel, self.shape = shapes[shape]

    plain = TritonSemantic.broadcast_impl_value

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        return plain(self, lhs, rhs)

    core.tensor.__init__ = tensor
    TritonSemantic.broadcast_impl_value = broadcast
