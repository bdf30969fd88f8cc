"""nstf: ahead-of-time optimisation of models under a byte budget."""

import importlib

__version__ = "0.1.0"
_PARTS = ("analyzers", "decomposers", "integrations", "kernels", "quantizers", "runtime")


def __getattr__(name: str) -> object:
    if name in _PARTS:
        return importlib.import_module(f"nstf.{name}")
    raise AttributeError(f"module 'nstf' has no attribute {name!r}")
