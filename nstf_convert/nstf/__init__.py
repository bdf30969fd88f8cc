"""nstf: ahead-of-time optimisation of models under a byte budget.

result = nstf.convert("./model", budget=0.5, output="model.nstf")     convert
file = nstf.open("model.nstf")                                        look inside
model = nstf.runtime.load("model.nstf")                               run: a transformers model

docs/api.md describes these and the rest. Importing nstf is quick: torch and transformers are imported when they are needed.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nstf import errors as errors
    from nstf import runtime as runtime
    from nstf.opened import File as File
    from nstf.opened import StoredTensor as StoredTensor
    from nstf.opened import open_file as open
    from nstf_convert import convert as convert
    from nstf_convert.options import ConvertResult as ConvertResult

__version__ = "0.1.0"
_PARTS = (
    "analyzers",
    "decomposers",
    "errors",
    "integrations",
    "kernels",
    "proposals",
    "quantizers",
    "runtime",
)
# Name here -> (module, name there).
_NAMES = {
    "convert": ("nstf_convert", "convert"),
    "ConvertResult": ("nstf_convert.options", "ConvertResult"),
    "File": ("nstf.opened", "File"),
    "StoredTensor": ("nstf.opened", "StoredTensor"),
    "open": ("nstf.opened", "open_file"),
}

__all__ = ["ConvertResult", "File", "StoredTensor", "convert", "errors", "open", "runtime"]


def __getattr__(name: str) -> object:
    import importlib

    if name in _PARTS:
        return importlib.import_module(f"nstf.{name}")
    if name in _NAMES:
        module, there = _NAMES[name]
        found: object = getattr(importlib.import_module(module), there)
        globals()[name] = found
        return found
    raise AttributeError(f"module 'nstf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PARTS, *_NAMES})
