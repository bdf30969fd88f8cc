"""What a constructor of transformers computes beside its parameters is no larger than the file's tensors bear out."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nstf.runtime.artifact.config import Limits


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


@contextmanager
def _small_tables(most: int) -> Iterator[None]:
    """Of positions (VideoMAE, Marian, XLM and others) sinusoids are lists of Python, one call of `numpy.power` a number;
    FNet's matrix of the Fourier transform is scipy's. torch sees neither before it is complete."""
    import numpy

    try:
        linalg: Any = import_module("scipy.linalg")
    except ImportError:
        linalg = None
    owner, made = threading.get_ident(), 0

    class Power:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal made
            if threading.get_ident() == owner:
                made += 1
                if made > most:
                    _refuse(made)
            return power(*args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            return getattr(power, name)

    def small_dft(n: int, *args: Any, **kwargs: Any) -> Any:
        if n * n > most and threading.get_ident() == owner:
            _refuse(n * n)
        return dft(n, *args, **kwargs)

    power: Any = numpy.power
    dft: Any = getattr(linalg, "dft", None)
    setattr(numpy, "power", Power())  # noqa: B010
    if dft is not None:
        linalg.dft = small_dft
    try:
        yield
    finally:
        setattr(numpy, "power", power)  # noqa: B010
        if dft is not None:
            linalg.dft = dft


class _SmallBuffers(TorchFunctionMode):
    """Refuses a tensor larger than all of the file together, also where only its memory is asked for, as of a parameter."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        size = _elements(func, args, kwargs)
        if size > self._most:
            _refuse(size)
        return func(*args, **kwargs)


_FILLED = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.eye)
_ELEMENTWISE = frozenset(
    "mul rmul multiply div truediv rtruediv true_divide divide add radd sub rsub subtract pow rpow".split()
)

_COPIES = ("flatten", "reshape", "contiguous", "clone")


def _broadcast(operands: Any) -> int:
    """Elements of what two tensors that are not of one shape make together; 0 where they, or what they make, are on meta."""
    shapes = [x.shape for x in operands if isinstance(x, torch.Tensor) and x.device.type != "meta"]
    if len(shapes) < 2 or shapes[0] == shapes[1]:
        return 0
    try:
        return math.prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:  # the call itself says so
        return 0


def _elements(func: Any, args: Any, kwargs: Any) -> int:
    """How many elements a call that fills a new tensor asks for; 0 for any other call."""
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
    if name in _COPIES and isinstance(args[0], torch.Tensor) and args[0].device.type != "meta":
        return args[0].numel()  # of a grid, which takes no memory before
    if func in _FILLED:
        shape = args[0] if args and isinstance(args[0], list | tuple) else [a for a in args if type(a) is int]
        shape = [*shape, *shape] if func is torch.eye and len(shape) == 1 else shape
        return math.prod(int(n) for n in (shape or kwargs.get("size", ())))
    return 0
