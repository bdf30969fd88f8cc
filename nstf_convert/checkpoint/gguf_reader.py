"""A checked header in the shape of gguf's reader, for transformers.

`gguf.GGUFReader` (0.19) makes several NumPy views of each token and merge: two seconds for a vocabulary of 49,000. All that
transformers asks it for here is in the header that `gguf_check` has parsed already.
"""

import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from nstf_convert.checkpoint.gguf_check import GgufHeader

# ggml's numbers of the types that values have: what transformers does depends on no more of it than this.
_TYPES = {bool: 7, int: 11, float: 12, str: 8}
_ARRAY = 9
# Of an array, whatever the vocabulary: more than layers.
ALWAYS_NUMBERS = 4096
# gguf's own name is changed for a while: one that put back what another had set would leave that for ever.
_ONE_HEADER = threading.Lock()


@dataclass(frozen=True)
class _Field:
    """A value as gguf gives it: `parts[i]` for i in `data` are its elements, each a sequence of one number or of bytes."""

    name: str
    parts: Any
    data: range
    types: list[int]


@dataclass(frozen=True)
class _Numbers:
    """The parts of an array of numbers, made one by one: as a list they take 80 bytes each."""

    length: Any
    values: "array[Any]"

    def __getitem__(self, at: int) -> Any:
        return (self.values[at - 1],) if at else self.length


@dataclass(frozen=True)
class _Tensor:
    name: str


class _Reader:
    """What transformers reads of a `gguf.GGUFReader` without its tensors' values."""

    def __init__(self, header: GgufHeader) -> None:
        # transformers makes lists of all that it is shown; of numbers it needs one for each token.
        most = max(ALWAYS_NUMBERS, len(header.metadata.get("tokenizer.ggml.tokens", ())))
        self.fields = {
            key: _field(key, value)
            for key, value in header.metadata.items()
            if not isinstance(value, array) or len(value) <= most
        }
        self.tensors = [_Tensor(name) for name in header.tensors]


def _field(key: str, value: Any) -> _Field:
    values = value if isinstance(value, list | array) else [value]
    types = [_ARRAY] if isinstance(value, list | array) else []
    types += [_TYPES[type(v)] for v in values[:1]]
    # gguf's own first part is the length of the key.
    length = np.array([len(key.encode())], dtype=np.uint64)
    if isinstance(value, array):
        parts: Any = _Numbers(length, value)
    else:
        parts = [length, *(v.encode() if isinstance(v, str) else (v,) for v in values)]
    return _Field(key, parts, range(1, 1 + len(values)), types)


@contextmanager
def header_for_transformers(header: GgufHeader) -> Iterator[None]:
    """Inside, what this thread opens with `gguf.GGUFReader` is this header. Threads take turns."""
    import gguf

    owner = threading.get_ident()

    def opened(*arguments: Any, **named: Any) -> Any:
        return _Reader(header) if threading.get_ident() == owner else own(*arguments, **named)

    with _ONE_HEADER:
        own = gguf.GGUFReader
        gguf.GGUFReader = opened
        try:
            yield
        finally:
            gguf.GGUFReader = own
