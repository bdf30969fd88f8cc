"""What a constructor of transformers computes beside its parameters is no larger than the file's tensors bear out."""

import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nstf.runtime.artifact.config import Limits

# What of tensors that are alive together may be made, times what one may have; and elements of those that count.
TOGETHER, COUNTED = 4, 1 << 14


@contextmanager
def small_buffers(limits: Limits | None) -> Iterator[None]:
    """Inside, this thread fills no tensor and no table of numpy's beyond `limits`; ValueError where it tries to. The caller
    lets no other thread in: functions of numpy and scipy are replaced meanwhile."""
    if limits is None:
        yield
        return
    with _small_tables(limits.table_elements), _SmallBuffers(limits.buffer_elements):
        yield


def _refuse(size: int) -> None:
    raise ValueError(f"it makes a tensor of {size} elements, beyond the file's tensors")


# Elements of what functions of numpy make, from their arguments in numpy's order.
def _of_shape(shape: Any, *_: Any, **__: Any) -> int:
    return math.prod(map(int, shape)) if isinstance(shape, list | tuple) else int(shape)


def _of_range(start: Any, stop: Any = None, step: Any = 1, *_: Any, **__: Any) -> int:
    first, last = (0, start) if stop is None else (start, stop)
    return int(abs(float(last) - float(first)) / max(abs(float(step or 1)), 1e-9))


def _of_steps(start: Any, stop: Any, num: int = 50, *_: Any, **__: Any) -> int:
    return int(num)


def _of_product(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return math.prod(getattr(x, "size", None) or len(x) for x in (a, b))


def _of_transform(n: int, *_: Any, **__: Any) -> int:
    return n * n


_TABLES: dict[str, Callable[..., int]] = {
    "zeros": _of_shape, "ones": _of_shape, "empty": _of_shape, "full": _of_shape, "arange": _of_range,
    "linspace": _of_steps, "outer": _of_product,
}  # fmt: skip


@contextmanager
def _small_tables(most: int) -> Iterator[None]:
    """Of positions (VideoMAE, Marian, XLM and others) sinusoids are lists of Python, one call of `numpy.power` a number;
    BiT's rates are numpy's, FNet's matrix of the Fourier transform scipy's. torch sees none before it is complete."""
    import numpy

    try:
        linalg: Any = import_module("scipy.linalg")
    except ImportError:
        linalg = None
    owner, made, ended = threading.get_ident(), 0, False

    def watched() -> bool:
        # A module that is imported meanwhile may keep what it finds in numpy for ever.
        return threading.get_ident() == owner and not ended

    class Power:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal made
            if watched():
                made += 1
                if made > most:
                    _refuse(made)
            return power(*args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            return getattr(power, name)

    def small(function: Any, size_of: Callable[..., int]) -> Any:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if watched():
                try:
                    size = size_of(*args, **kwargs)
                except (TypeError, ValueError, OverflowError):  # the call itself says so
                    size = 0
                if size > most:
                    _refuse(size)
            return function(*args, **kwargs)

        return call

    power: Any = numpy.power
    before = {(numpy, name): getattr(numpy, name) for name in _TABLES}
    replaced = {(numpy, name): small(before[numpy, name], size_of) for name, size_of in _TABLES.items()}
    before[numpy, "power"], replaced[numpy, "power"] = power, Power()
    if linalg is not None:
        before[linalg, "dft"] = linalg.dft
        replaced[linalg, "dft"] = small(linalg.dft, _of_transform)
    try:
        for (module, name), function in replaced.items():
            setattr(module, name, function)
        yield
    finally:
        ended = True
        for (module, name), function in before.items():
            setattr(module, name, function)


class _SmallBuffers(TorchFunctionMode):
    """Refuses a tensor larger than all of the file together, also where only its memory is asked for, as of a parameter.
    So is a view as large (a grid), which takes none: whatever is called with it next makes one that does. And several times
    as much in tensors that are alive together: a table for each of a thousand layers."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._alive: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._together = 0  # elements of these, and of some that are gone

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__":  # a shape, a device: most calls
            return func(*args, **kwargs)
        size = _elements(func, args, kwargs)
        if size > self._most:
            _refuse(size)
        made = func(*args, **kwargs)
        for x in made if isinstance(made, list | tuple) else (made,):
            if isinstance(x, torch.Tensor) and x.device.type != "meta":
                if x.numel() > self._most:
                    _refuse(x.numel())
                if x.numel() >= COUNTED and not x._is_view():
                    self._count(x)
        return made

    def _count(self, x: torch.Tensor) -> None:
        known = self._alive.get(id(x))
        if known is not None and known[0]() is x:  # what works in place gives the same tensor again
            return
        self._together += x.numel() - (known[1] if known is not None else 0)
        self._alive[id(x)] = weakref.ref(x), x.numel()
        if self._together <= TOGETHER * self._most:
            return
        self._alive = {key: entry for key, entry in self._alive.items() if entry[0]() is not None}
        self._together = sum(size for _, size in self._alive.values())
        if self._together > TOGETHER * self._most:
            _refuse(self._together)


_FILLED = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.eye)
_ELEMENTWISE = frozenset(
    "mul rmul multiply div truediv rtruediv true_divide divide add radd sub rsub subtract pow rpow".split()
)
_JOINED = frozenset("stack hstack vstack dstack row_stack column_stack cat concat concatenate".split())
_REPEATED = ("repeat", "tile", "repeat_interleave")
_NEW = ("new_zeros", "new_ones", "new_full", "new_empty")


def _real(x: Any) -> bool:
    """Whether it is a tensor that takes memory."""
    return isinstance(x, torch.Tensor) and x.device.type != "meta"


def _broadcast(operands: Any) -> int:
    """Elements of what two tensors that are not of one shape make together; 0 where they, or what they make, are on meta."""
    shapes = [x.shape for x in operands if _real(x)]
    if len(shapes) < 2 or shapes[0] == shapes[1]:
        return 0
    try:
        return math.prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:  # the call itself says so
        return 0


def _numbers(given: Any) -> list[int]:
    """Sizes that are given one by one, or as a list."""
    return [int(n) for n in (given[0] if given and isinstance(given[0], list | tuple) else given)]


def _repeated(name: str, x: torch.Tensor, rest: Any, kwargs: Any) -> int:
    """Elements of what repeats a tensor."""
    if name == "repeat_interleave":
        times = rest[0] if rest else kwargs.get("repeats", 1)
        if isinstance(times, torch.Tensor):  # of each row, or of each element
            return x.numel() * int(times.sum()) // max(times.numel(), 1)
        return x.numel() * int(times)
    return x.numel() * math.prod(_numbers(rest or (kwargs.get("repeats") or kwargs.get("dims") or (),)))


def _elements(func: Any, args: Any, kwargs: Any) -> int:
    """How many elements a call asks for whose result can be larger than what it is given; 0 for any other call."""
    if func in (torch.arange, torch.linspace):
        first, last = (
            (*args[:2], kwargs.get("end"))[:2]
            if len(args) > 1
            else (0, args[0] if args else kwargs.get("end"))
        )
        step = args[2] if len(args) > 2 else kwargs.get("step", 1)
        if func is torch.linspace:
            return int(args[2]) if len(args) > 2 else int(kwargs.get("steps", 0))
        return int(abs(float(last) - float(first)) / max(abs(float(step)), 1e-9)) if last is not None else 0
    if func in (torch.outer, torch.kron, torch.einsum):
        return math.prod(x.numel() for x in args if isinstance(x, torch.Tensor))
    name = getattr(func, "__name__", "").strip("_")
    if name in _ELEMENTWISE:  # positions by frequencies, say
        return _broadcast(args[:2])
    if name in _JOINED:
        pieces = args[0] if args else kwargs.get("tensors", ())
        return sum(x.numel() for x in pieces if _real(x))
    if name in _REPEATED and args and _real(args[0]):
        return _repeated(name, args[0], args[1:], kwargs)
    if name in _NEW and _real(args[0]):
        return math.prod(_numbers(args[1:] or (kwargs.get("size", ()),)))
    if func in _FILLED:
        shape = args[0] if args and isinstance(args[0], list | tuple) else [a for a in args if type(a) is int]
        shape = [*shape, *shape] if func is torch.eye and len(shape) == 1 else shape
        return math.prod(int(n) for n in (shape or kwargs.get("size", ())))
    return 0
