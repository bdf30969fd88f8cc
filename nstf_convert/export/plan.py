"""What an export keeps: for every tensor whether the target holds its values exactly, in more bytes, or not.

exact    the target decodes the same float32 values, in about the bytes they take here
widened  the same values in a wider type (int3 as 4 bits, mxfp4 as bfloat16)
rounded  decoded and rounded to a floating type that was asked for: only `--to hf`, whose purpose that is
lossy    other values: a scale or a decoded weight that the target's types round. Refused without --allow-loss
"""

import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nstf.errors import UnsupportedError
from nstf.kernels.formats import EncodedTensor, decode
from nstf.runtime.artifact import Artifact

# What reading a stranger's JSON key by key raises.
_MISREAD = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)

KINDS = ("exact", "widened", "rounded", "lossy")


@dataclass(frozen=True)
class Item:
    """One tensor of the target. name: in the target; sources: ours; here, there: how each stores it; bytes of both."""

    name: str
    sources: tuple[str, ...]
    here: str
    there: str
    kind: str
    bytes_here: int
    bytes_there: int


@dataclass(frozen=True)
class ExportPlan:
    """What `nstf export` is about to write. other_bytes: everything but tensors, as far as it is known before."""

    target: str
    items: tuple[Item, ...]
    other_bytes: int = 0
    notes: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of the target, to be free on the disk."""
        return sum(item.bytes_there for item in self.items) + self.other_bytes

    def totals(self) -> dict[str, dict[str, int]]:
        """{kind: {tensors, bytes here, bytes there}} of the kinds that occur."""
        found: dict[str, dict[str, int]] = {}
        for kind in KINDS:
            own = [item for item in self.items if item.kind == kind]
            if own:
                found[kind] = {
                    "tensors": len(own),
                    "bytes_here": sum(item.bytes_here for item in own),
                    "bytes_there": sum(item.bytes_there for item in own),
                }
        return found

    def types(self) -> dict[str, int]:
        """Bytes by the target's types, largest first."""
        found: dict[str, int] = {}
        for item in self.items:
            found[item.there] = found.get(item.there, 0) + item.bytes_there
        return dict(sorted(found.items(), key=lambda entry: -entry[1]))

    def check_loss(self, allowed: bool) -> None:
        """Raises UnsupportedError when values would change and that is not `allowed`."""
        lossy = [item for item in self.items if item.kind == "lossy"]
        if not lossy or allowed:
            return
        first = lossy[0]
        size = sum(item.bytes_here for item in lossy)
        raise UnsupportedError(
            f"{self.target} holds no exact form of {len(lossy)} tensors, {size} bytes (first {first.name}: {first.here}, "
            f"would be rounded to {first.there}): `allow_loss` writes them so, `dtype` float32 keeps their values in more "
            f"bytes, and a file that was converted for it (`engine` {self.target}) has no such tensors"
        )


@contextmanager
def as_stated(artifact: Artifact, target: str) -> Iterator[None]:
    """Around what reads config.json and the tokenizer, and nothing else: they are a stranger's, and an error there is one
    of theirs. Raises UnsupportedError."""
    try:
        yield
    except _MISREAD as error:
        raise UnsupportedError(
            f"{artifact.path}: target {target!r} cannot be written of what its config.json and tokenizer say "
            f"({type(error).__name__}: {str(error)[:200]}); fetch or convert it again"
        ) from error


def decoded(encoded: EncodedTensor, kind: torch.dtype, name: str) -> Tensor:
    """The dense tensor in a dtype. Raises UnsupportedError where rounding would make infinities of numbers: that is no loss
    that anybody allows, but another model. Stored scales are float16 themselves, so they fit."""
    value = decode(encoded, kind)
    if value.is_floating_point() and bool(value.isinf().any()):
        exact = decode(encoded)
        beyond = value.isinf() & exact.isfinite()
        if bool(beyond.any()):
            word = str(kind).removeprefix("torch.")
            raise UnsupportedError(
                f"tensor {name!r} has values up to {exact[beyond].abs().max():.3g}, which {word} does not hold: they would "
                "be infinities; give a `dtype` that holds them, bfloat16 or float32"
            )
    return value


def without_attention_plan(artifact: Artifact, target: str) -> tuple[str, ...]:
    """A note for an artifact whose heads attend sparsely, which no other engine does."""
    if not artifact.manifest.attention:
        return ()
    return (f"the attention plan stays behind: {target} attends densely, slower and closer to the original",)


def tensor_bytes(artifact: Artifact, names: Iterable[str]) -> int:
    """Bytes of the stored arrays of some tensors, each once."""
    from nstf.kernels.formats import stored_bytes

    stored = {artifact.stored_name(name) for name in names}
    return sum(stored_bytes(artifact.record(n).tree, artifact.record(n).shape) for n in stored)
