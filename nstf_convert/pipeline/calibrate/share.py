"""Pieces of one step's work that several processes do between them, through the work directory.

A process takes the next piece that nobody has taken yet, so that a faster one, or one that started earlier, does more. It
leaves its result under a content key. The first process waits for the others once no piece is left to take, and does
itself what it does not find then: a process that dies costs time and nothing else.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nstf import __version__
from nstf_convert.pipeline.propose.encoder import ALGORITHMS
from nstf_convert.pipeline.store.workdir import PIECES, WorkDir, content_key

# What is shared: the backward pass of a calibration; Hessians that are not kept, with the proposals that need them; the
# proposals where all Hessians are kept, and what methods propose once more where a plan gives few bits.
GRADIENTS, HESSIANS, CANDIDATES, FEW_BITS = "gradients", "hessians", "candidates", "few bits"
# The name under which the first process leaves what a step needs.
NEEDED = "needed"


@dataclass(frozen=True)
class SharedStep:
    """A step that is shared, one of those above. identity, tokens_per_batch: of the calibration. door: a
    piece that the helper must take before any other; where the first process has, it came too late. Empty: there is none."""

    step: str
    identity: str
    tokens_per_batch: int
    door: str = ""


class Pieces:
    """The pieces of a step, by name."""

    def __init__(
        self,
        work: WorkDir,
        shared: SharedStep,
        formats: Iterable[str],
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        """formats: that proposals are made for: others are other work. wait: returns when all other processes have done
        their pieces or failed; only the first process waits."""
        self._work, self.wait = work, wait
        self._what = {
            "kind": "piece", "version": [__version__, ALGORITHMS], "step": shared.step,
            "calibration": shared.identity,
            # How work is put together decides how sums are rounded.
            "tokens": shared.tokens_per_batch, "formats": sorted(formats),
        }  # fmt: skip

    def _key(self, name: str) -> str:
        return content_key(**self._what, name=name)

    def take(self, name: str) -> bool:
        """Whether the piece is this process's to do: nobody has taken it, and no earlier run has left it."""
        key = self._key(name)
        return self._work.claim(key) and not self._work.has(key, PIECES)

    def left(self, names: Iterable[str]) -> bool:
        """Whether any of these pieces has not been taken yet."""
        return any(not self._work.claimed(self._key(name)) for name in names)

    def put(self, name: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Leaves the result of a piece."""
        self._work.put(self._key(name), tensors, facts, PIECES)

    def find(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The result of a piece that another process has left."""
        return self._work.find(self._key(name), PIECES)


class Sharer:
    """The first process's side of work on a calibration that others share."""

    def __init__(
        self,
        work: WorkDir,
        identity: str,
        tokens_per_batch: int,
        formats: Iterable[str],
        start: Callable[[SharedStep], None],
        wait: Callable[[], None],
    ) -> None:
        """start: sets the other processes to work on a step; wait: returns when all have done it, or failed."""
        self._work, self._formats = work, sorted(formats)
        self._identity, self._tokens = identity, tokens_per_batch
        self._start, self._wait = start, wait

    def begin(self, step: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> Pieces:
        """Begins a step, for which the others need these tensors and facts."""
        shared = SharedStep(step, self._identity, self._tokens)
        pieces = Pieces(self._work, shared, self._formats, self._wait)
        pieces.put(NEEDED, tensors, facts)
        self._start(shared)
        return pieces
