"""A byte budget in the units users think in."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from nstf.errors import UsageError

Kind = Literal["ratio", "bytes", "bpw", "max_kl"]


@dataclass(frozen=True)
class Budget:
    """How small, or how exact, the file must be.

    kind: `ratio` (fraction of the checkpoint's tensor bytes), `bytes` (of the file), `bpw` (bits per weight over
    every parameter, the whole file counted) or `max_kl` (mean KL divergence in nats on held-out text: the
    smallest file within the bound is wanted).
    """

    kind: Kind
    value: float

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UsageError(f"budget kind {self.kind!r} is not known: choose {', '.join(get_args(Kind))}")
        if not math.isfinite(self.value) or self.value <= 0:
            raise UsageError(f"budget {self.value!r} must be a positive number, for example 0.5 or 1.5GiB")

    def size_bytes(self, total_bytes: int, parameters: int) -> int | None:
        """The largest file allowed, in bytes; None for `max_kl`.

        total_bytes: bytes of the checkpoint's tensors; parameters: their elements.
        """
        if self.kind == "ratio":
            return math.floor(self.value * total_bytes)
        if self.kind == "bpw":
            return math.floor(self.value * parameters / 8)
        return math.floor(self.value) if self.kind == "bytes" else None
