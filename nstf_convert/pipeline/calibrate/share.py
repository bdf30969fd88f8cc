"""Pieces of one step's work that several processes do between them, through the work directory.

A process takes the next piece that nobody has taken yet, so that a faster one, or one that started earlier, does more. It
leaves its result under a content key. The first process waits for the others once no piece is left to take, and does
itself what it does not find then: a process that dies costs time and nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nstf import __version__
from nstf_convert.pipeline.store.workdir import WorkDir, content_key

# The name under which the first process leaves what a step needs.
NEEDED = "needed"


@dataclass(frozen=True)
class Part:
    """A step of a calibration that is shared: `gradients` or `hessians`. identity, tokens_per_batch: of the calibration."""

    step: str
    identity: str
    tokens_per_batch: int


class Pieces:
    """The pieces of a step, by name."""

    def __init__(
        self, work: WorkDir, wait: Callable[[], None], step: str, identity: str, tokens_per_batch: int
    ) -> None:
        """wait: returns when all other processes have done their pieces or failed. identity: of the calibration;
        tokens_per_batch: how work is put together decides how sums are rounded."""
        self._work, self.wait = work, wait
        self._what = {
            "kind": "piece", "version": __version__, "step": step, "identity": identity, "tokens": tokens_per_batch
        }  # fmt: skip

    def _key(self, name: str) -> str:
        return content_key(**self._what, name=name)

    def take(self, name: str) -> bool:
        """Whether the piece is this process's to do: nobody has taken it, and no earlier run has left it."""
        key = self._key(name)
        return self._work.claim(key) and not self._work.has(key)

    def put(self, name: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Leaves the result of a piece."""
        self._work.put(self._key(name), tensors, facts)

    def find(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The result of a piece that another process has left."""
        return self._work.find(self._key(name))


class Sharing:
    """The first process's side of a calibration that others share."""

    def __init__(
        self,
        work: WorkDir,
        identity: str,
        tokens_per_batch: int,
        start: Callable[[str], None],
        wait: Callable[[], None],
    ) -> None:
        """start: sets the other processes to work on a step; wait: returns when all have done it, or failed."""
        self._work, self._identity, self._tokens = work, identity, tokens_per_batch
        self._start, self._wait = start, wait

    def begin(self, step: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> Pieces:
        """Begins a step, for which the others need these tensors and facts."""
        pieces = Pieces(self._work, self._wait, step, self._identity, self._tokens)
        pieces.put(NEEDED, tensors, facts)
        self._start(step)
        return pieces
