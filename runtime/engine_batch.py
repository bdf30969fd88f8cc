"""Several sequences through the CPU engine together: one pass over the weights serves them all."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nstf.errors import UsageError
from nstf.runtime.engine import Engine, usual_threads

TOGETHER = 128  # tokens of a step
BESIDE = 32  # tokens of prompts in a step that also decodes: the others wait for them
LEAST_ROWS = 4  # rows from which every product is done by the kernels for several rows


class Steps(Protocol):
    """What decodes several sequences together: `Batch` here, `GraphBatch` (runtime/graph_batch.py) on GPUs.

    together: tokens of a step; beside: those of prompts in a step that also decodes; sparse_from: the position from which
    blocks of `together` tokens of a prompt are worked on as a whole, in one step, by sparse attention, if it has any.
    """

    together: int
    beside: int
    sparse_from: int | None

    @property
    def context(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def cache_bytes(self) -> int: ...
    def reserve(self, sequence: int, positions: int) -> None: ...
    def step(self, parts: Sequence[Part]) -> list[int]: ...
    def resumable(self, sequence: int, positions: int) -> int: ...
    def copy(self, source: int, target: int, positions: int) -> None: ...
    def release(self, sequence: int) -> None: ...


@dataclass(frozen=True)
class Part:
    """Tokens of one sequence in a step, at positions first..

    prompt: they belong to a prompt that may be cut anywhere. wanted: logits of the last token are.
    """

    sequence: int
    first: int
    ids: Sequence[int]
    prompt: bool = False
    wanted: bool = True


class Batch:
    """The caches of several sequences of one engine. The engine's own sequence is number 0: use one or the other."""

    together, beside = TOGETHER, BESIDE

    def __init__(self, engine: Engine, sequences: int, reproducible: bool = False) -> None:
        """reproducible: numbers of a sequence never depend on what runs beside it, to the last bit; the kernels for one to
        three rows of activations, which are faster there and round differently, are not used then.
        """
        self.engine = engine
        self.sequences = sequences
        layers = () if engine.plan is None else engine.plan.layers
        rules = [head.block_sparse for layer in layers for head in layer.heads if head.block_sparse]
        self.sparse_from = min((max(least - 1, 0) for _, _, least in rules), default=None)
        self._least = LEAST_ROWS if reproducible else 1
        self._logits = array("f", bytes(4 * engine.vocab * sequences))
        engine._engine.set_sequences(sequences)

    @property
    def context(self) -> int:
        """Tokens a sequence may have."""
        return self.engine.context

    @property
    def vocab(self) -> int:
        """Tokens there are."""
        return self.engine.vocab

    @property
    def cache_bytes(self) -> int:
        """Memory taken for keys and values."""
        return self.engine.held_bytes

    def reserve(self, sequence: int, positions: int) -> None:
        """Nothing: a step takes what it needs, and says so where there is no more."""

    def step(self, parts: Sequence[Part]) -> list[int]:
        """Runs the parts; addresses of the logits, float32 [vocab], of those that want them, valid until the next step.

        Raises UsageError for tokens and sequences that do not exist, sequences longer than the context and too many tokens,
        NstfError where a text begins when the mapped file was changed, and in a process forked while another thread ran it.
        """
        if any(part.prompt or part.first == 0 for part in parts):
            self.engine._check_unchanged()
        ids = array("q")
        for part in parts:
            ids.extend(part.ids)
            if not part.ids or part.first < 0 or part.first + len(part.ids) > self.engine.context:
                raise UsageError(f"a part of a step does not fit the context of {self.engine.context}")
            if not 0 <= part.sequence < self.sequences:
                raise UsageError(f"there is no sequence {part.sequence}; there are {self.sequences}")
        if not ids or len(ids) > TOGETHER:
            raise UsageError(f"{len(ids)} tokens in one step; it takes 1 to {TOGETHER}")
        if min(ids) < 0 or max(ids) >= self.engine.vocab:
            raise UsageError(f"a token is outside the vocabulary of {self.engine.vocab}")
        stated = [(p.sequence, p.first, len(p.ids), p.prompt, p.wanted) for p in parts]
        start = self._logits.buffer_info()[0]
        self.engine._engine.step(
            ids.buffer_info()[0], stated, start, self._least, self.engine.threads or usual_threads()
        )
        return [start + 4 * self.engine.vocab * i for i in range(sum(p.wanted for p in parts))]

    def resumable(self, sequence: int, positions: int) -> int:
        """How many of the first `positions` of a sequence another text may go on from: all, or none where the cache has
        freed pages since or brought them into few bits.
        """
        return int(self.engine._engine.resumable(sequence, positions))

    def copy(self, source: int, target: int, positions: int) -> None:
        """The first positions of a sequence's cache become another's: a shared beginning is computed once."""
        self.engine._engine.copy(source, target, positions)

    def release(self, sequence: int) -> None:
        """Frees the memory of a sequence's cache."""
        self.engine._engine.release(sequence)
