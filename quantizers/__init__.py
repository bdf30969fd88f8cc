"""Tensor -> fewer bits: one file per method, `int_grid`, `fp8`, `mxfp4`, `grid16`.

A method is a module of this folder with these names; a new file is found and tested without a line elsewhere:

    Params                                  frozen dataclass: defaults, limits
    tree(params) -> Node                    the stored form
    bits(shape, params) -> float            bits per weight on disk
    encode(weight, params, stats) -> EncodedTensor
    decode                                  `nstf.kernels.formats.decode`
    estimate(weight, params, stats) -> float    expected loss, without encoding
"""

import importlib
import pkgutil
from types import ModuleType

_NOT_METHODS = ("stats",)

METHODS = tuple(
    sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.ispkg and m.name not in _NOT_METHODS)
)


def method(name: str) -> ModuleType:
    """The module of a method in `METHODS`. Raises ValueError on any other name."""
    if name not in METHODS:
        raise ValueError(f"unknown quantiser {name[:40]!r}; known are {', '.join(METHODS)}")
    return importlib.import_module(f"nstf.quantizers.{name}")
