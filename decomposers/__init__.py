"""Weights as products of smaller tensors: one file per method, all with the same names.

    PARAMS (Params)                     ranks and options, a frozen dataclass
    decompose(weight, params, stats_hessian=None) -> Decomposition
    rank_for_bytes(...), rank_for_error(...)   ranks from a byte budget, or from a relative error bound
    proposals(signature, target, room) -> recipes    what a conversion tries (nstf.proposals)
    NAME                                what users call it, where that is not the file's name

`add` is made of other methods: it has `KIND`, `PARTS`, `compose` and `proposals`, and `losses`, which says what its recipes
are expected to lose without working all of each out. A method may have `faster(recipe, signature)`: the recipe in codes
whose products take less time, or None. With `REMEMBERS = True` its `decompose` takes a `Remembered` after the row weights:
what other ranks of the same tensor have found (remembered.py). `METHODS` lists the files of this folder that
are methods; `method(name)` imports one of them, nothing else.
"""

import importlib
import pkgutil
from types import ModuleType

_HELPERS = {
    "__init__", "bounds", "chains", "factors", "modes", "norms", "ranks", "remembered", "tensorly_backend", "views",
}  # fmt: skip


def listed() -> tuple[str, ...]:
    """The methods among the files of the folder."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _HELPERS))


METHODS = listed()


def method(name: str) -> ModuleType:
    """The module of a decomposition method. Raises ValueError for a name that is not in METHODS."""
    if name not in METHODS:
        raise ValueError(f"unknown decomposition {str(name)[:40]!r}; known are {', '.join(METHODS)}")
    return importlib.import_module(f"nstf.decomposers.{name}")
