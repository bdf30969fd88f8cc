"""Tensor -> fewer bits: one file per method, `int_grid`, `fp8`, `mxfp4`, `grid16`.

A method is a module of this folder with these names; a new file is found and tested without a line elsewhere:

    Params                                  frozen dataclass: defaults, limits
    tree(params) -> Node                    the stored form
    bits(shape, params) -> float            bits per weight on disk
    encode(weight, params, stats) -> EncodedTensor
    decode                                  `nstf.kernels.formats.decode`
    estimate(weight, params, stats) -> float    expected loss, without encoding
    estimate_many(weight, [params, ...], stats) -> list[float]    what recipes have in common is done once

and, where tensors gain from being encoded together,

    encode_many([(weight, params, stats), ...], scratch) -> list[EncodedTensor]

Work is done on the weight's device; statistics lie there too. Encoded arrays are on the CPU.
"""

import importlib
import pkgutil
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from nstf.kernels.formats import EncodedTensor
    from nstf.quantizers.stats import Stats

_NOT_METHODS = ("stats",)

METHODS = tuple(
    sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.ispkg and m.name not in _NOT_METHODS)
)


def method(name: str) -> ModuleType:
    """The module of a method in `METHODS`. Raises ValueError on any other name."""
    if name not in METHODS:
        raise ValueError(f"unknown quantiser {name[:40]!r}; known are {', '.join(METHODS)}")
    return importlib.import_module(f"nstf.quantizers.{name}")


def encode_many(
    items: "Sequence[tuple[str, Tensor, Any, Stats | None]]", scratch: int = 1 << 28
) -> "list[EncodedTensor]":
    """The tensors of (method, weight, params, stats), in order. `scratch`: bytes a method may use to encode side by side."""
    found: dict[int, EncodedTensor] = {}
    for name in dict.fromkeys(item[0] for item in items):
        module = method(name)
        at = [i for i, item in enumerate(items) if item[0] == name]
        own = [items[i][1:] for i in at]
        together = getattr(module, "encode_many", None)
        encoded = together(own, scratch) if together else [module.encode(*item) for item in own]
        found.update(zip(at, encoded, strict=True))
    return [found[i] for i in range(len(items))]
