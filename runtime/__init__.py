"""Loading and running artifacts. Imports nothing of the conversion side.

model = nstf.runtime.load("model.nstf")              a transformers model whose layers run encoded
tokenizer = nstf.runtime.load_tokenizer("model.nstf")
tensors = nstf.runtime.load_tensors("model.nstf")    name -> dense tensor, for any architecture
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nstf.runtime.generate import stream
    from nstf.runtime.loading import load
    from nstf.runtime.tensors import load_tensors
    from nstf.runtime.tokenizer_files import load_tokenizer

# The file is not called load.py: importing it would put the module in the place of the function `load`.
# torch and transformers take seconds to import, and the command line imports this package for its help text.
_WHERE = {
    "load": "loading",
    "load_tensors": "tensors",
    "load_tokenizer": "tokenizer_files",
    "stream": "generate",
}

__all__ = ["load", "load_tensors", "load_tokenizer", "stream"]


def __getattr__(name: str) -> object:
    import importlib

    if name in _WHERE:
        found = getattr(importlib.import_module(f"nstf.runtime.{_WHERE[name]}"), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module 'nstf.runtime' has no attribute {name!r}")
