"""Weights as products of smaller tensors: one file per method, all with the same names.

    PARAMS (Params)                     ranks and options, a frozen dataclass
    decompose(weight, params, stats_hessian=None) -> Decomposition
    rank_for_bytes(...), rank_for_error(...)   ranks from a byte budget, or from a relative error bound

`METHODS` lists the files of this folder that are methods; `method(name)` imports one of them, nothing else.
"""

import importlib
from pathlib import Path
from types import ModuleType

_HELPERS = {"__init__", "factors", "modes", "norms", "ranks", "tensorly_backend", "views"}

METHODS: tuple[str, ...] = tuple(
    sorted(file.stem for file in Path(__file__).parent.glob("*.py") if file.stem not in _HELPERS)
)


def method(name: str) -> ModuleType:
    """The module of a decomposition method. Raises ValueError for a name that is not in METHODS."""
    if name not in METHODS:
        raise ValueError(f"unknown decomposition {str(name)[:40]!r}; known are {', '.join(METHODS)}")
    return importlib.import_module(f"nstf.decomposers.{name}")
