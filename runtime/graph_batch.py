"""Several sequences through the captured decoder together, each at its own position: what `nstf serve` runs on a GPU.

The keys and values of all sequences lie in one static cache, a slot each. A step decodes one token of some slots by a
replay of the graph for the next larger number of rows (1, 2, 4, 8 ...); rows that are left over work on a slot that belongs
to nobody. Which slots and positions the rows are of is read from device memory. Prompts go through the decoder's layers, a
piece a step, and their keys and values into the slot; beyond a window through transformers' modules. On a CPU the same steps
run without graphs, for tests and for models that the engine does not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from nstf.errors import UsageError
from nstf.runtime.engine_batch import Part
from nstf.runtime.graph_decoder import LARGEST_BATCH, SMALLEST_CAPACITY, Decoder, State
from nstf.runtime.graphs import Step

TOGETHER = 1024  # tokens of prompts in a step
BESIDE = 256  # the same while others decode: they wait for them


def captured_sizes(sequences: int) -> tuple[int, ...]:
    """Numbers of rows that steps are captured for: powers of two, and all sequences."""
    powers = [1 << i for i in range(sequences.bit_length()) if 1 << i < sequences]
    return (*powers, sequences)


class GraphBatch:
    """The caches of several sequences of one decoder, which nobody else may use. One thread at a time."""

    together, beside = TOGETHER, BESIDE
    sparse_from: int | None = None

    def __init__(self, decoder: Decoder, sequences: int) -> None:
        """Captures the steps. Raises UsageError for more sequences than a step takes, MemoryError."""
        if not 1 <= sequences <= LARGEST_BATCH:
            raise UsageError(
                f"{sequences} sequences; the captured decoder takes 1 to {LARGEST_BATCH} together"
            )
        self.decoder, self.device, self.sequences = decoder, decoder.device, sequences
        self._sizes = captured_sizes(sequences)
        self._on_gpu = self.device.type == "cuda"
        self._rows = {n: _Rows(n, self.vocab, self.device) for n in self._sizes}
        self._steps: dict[int, Step] = {}
        self._host = torch.zeros(sequences, self.vocab, pin_memory=self._on_gpu)
        decoder._glue.reserve(sequences, [layer.heads for layer in decoder._layers])
        self._cache: Tensor | None = None
        self._angles: tuple[tuple[Tensor, Tensor], ...] = ()
        with self._here():
            self._grow(min(SMALLEST_CAPACITY, self.context))
            for n in self._sizes:
                self._replay(n)

    @property
    def context(self) -> int:
        """Tokens a sequence may have."""
        return self.decoder.context

    @property
    def vocab(self) -> int:
        """Tokens there are."""
        return int(self.decoder.config.shape["vocab"])

    @property
    def capacity(self) -> int:
        """Tokens of a sequence for which there is room now."""
        return 0 if self._cache is None else int(self._cache.shape[4])

    @property
    def cache_bytes(self) -> int:
        """Memory of keys and values."""
        return 0 if self._cache is None else self._cache.numel() * self._cache.element_size()

    def reserve(self, sequence: int, positions: int) -> None:
        """Makes room for a sequence of some tokens; all sequences get as much. Nothing has changed where it raises
        MemoryError.
        """
        if positions > self.context:
            raise UsageError(f"a part of a step does not fit the context of {self.context}")
        if positions > self.capacity:
            with self._here():
                self._grow(self.decoder._rounded(positions))

    def step(self, parts: Sequence[Part]) -> list[int]:
        """Runs the parts; addresses of the logits, float32 [vocab], of those that want them, valid until the next step.

        Raises UsageError for tokens that do not exist and sequences longer than the context, MemoryError.
        """
        if not parts or len({p.sequence for p in parts}) < len(parts):
            raise UsageError("a step takes one or more parts, each of another sequence")
        for part in parts:
            if not 0 <= part.sequence < self.sequences:
                raise UsageError(f"no sequence {part.sequence}; there are {self.sequences}")
            if not part.ids or part.first < 0 or part.first + len(part.ids) > self.context:
                raise UsageError(f"a part of a step does not fit the context of {self.context}")
            if min(part.ids) < 0 or max(part.ids) >= self.vocab:
                raise UsageError(f"a token is outside the vocabulary of {self.vocab}")
        self.reserve(0, max(p.first + len(p.ids) for p in parts))
        row_of = {p.sequence: i for i, p in enumerate(q for q in parts if q.wanted)}
        singles = [p for p in parts if len(p.ids) == 1]
        with self._here():
            if singles:
                logits = self._decode(singles)
                for i, part in enumerate(singles):
                    if part.wanted:
                        self._host[row_of[part.sequence]].copy_(logits[i], non_blocking=True)
            for part in parts:
                if len(part.ids) > 1:
                    last = self._prompt(part)
                    if part.wanted:
                        self._host[row_of[part.sequence]].copy_(last, non_blocking=True)
            if self._on_gpu:
                # Before the caller reads logits, and before the next step writes over what this one's copies come from.
                torch.cuda.current_stream(self.device).synchronize()
        return [self._host[i].data_ptr() for i in range(len(row_of))]

    def resumable(self, sequence: int, positions: int) -> int:
        """How many of the first `positions` of a sequence another text may go on from: all."""
        return positions

    def copy(self, source: int, target: int, positions: int) -> None:
        """The first positions of a sequence's cache become another's: a shared beginning is computed once."""
        assert self._cache is not None
        with self._here():
            self._cache[:, :, target, :, :positions] = self._cache[:, :, source, :, :positions]

    def release(self, sequence: int) -> None:
        """Nothing: slots share one cache."""

    def _decode(self, parts: Sequence[Part]) -> Tensor:
        """Logits [rows, vocab] after one token of each part, on the device; rows beyond the parts hold anything."""
        size = next(n for n in self._sizes if n >= len(parts))
        rows, step = self._rows[size], self._replay(size)
        rows.send([(p.ids[0], p.first, p.sequence) for p in parts], self.sequences)
        step()
        return rows.logits

    def _prompt(self, part: Part) -> Tensor:
        """Logits [vocab] after a piece of a prompt; its keys and values are in the slot then."""
        assert self._cache is not None
        first, end, slot = part.first, part.first + len(part.ids), part.sequence
        ids = torch.tensor([list(part.ids)], device=self.device)
        if end > self.decoder.longest_prompt:
            return self._by_modules(ids, first, slot)
        last = torch.full((1,), len(part.ids) - 1, device=self.device)
        state = State(self.capacity, self._cache[:, :, slot : slot + 1], self._angles, ids, last)
        return self.decoder.prompt_logits(ids, last, first, state)[0].float()

    def _by_modules(self, ids: Tensor, first: int, slot: int) -> Tensor:
        """As `_prompt`, by transformers' modules."""
        from transformers import DynamicCache

        assert self._cache is not None
        end = first + ids.shape[1]
        held = DynamicCache()  # without a config: windows keep all keys
        layers = range(len(self.decoder._layers))
        if first:
            for i in layers:
                held.update(*self._cache[i, :, slot : slot + 1, :, :first], i)
        found = self.decoder.model(input_ids=ids, past_key_values=held, use_cache=True, logits_to_keep=1)
        for i in layers:
            stored: Any = held.layers[i]
            self._cache[i, 0, slot, :, first:end].copy_(stored.keys[0, :, first:])
            self._cache[i, 1, slot, :, first:end].copy_(stored.values[0, :, first:])
            stored.keys = stored.values = None
        logits: Tensor = found.logits[0, -1].float()
        return logits

    def _replay(self, size: int) -> Step:
        """The captured step for a number of rows, made at its first use."""
        if size not in self._steps:
            assert self._cache is not None
            rows = self._rows[size]
            state = State(self.capacity, self._cache, self._angles, rows.tokens, rows.places)

            def step() -> None:
                rows.logits.copy_(self.decoder.logits(state))

            rows.send([], self.sequences)  # a capture runs the step: it must write where nothing is
            self._steps[size] = self.decoder._capture(step)
        return self._steps[size]

    def _grow(self, capacity: int) -> None:
        """A larger cache with what the old one holds; graphs of the old one go. Nothing has changed where it raises
        MemoryError.
        """
        decoder, old = self.decoder, self._cache
        shape, kv_heads = decoder.config.shape, decoder._layers[0].heads.kv_heads
        size = (len(decoder._layers), 2, self.sequences + 1, kv_heads, capacity, shape["head_size"])
        try:
            cache = torch.empty(size, dtype=decoder.dtype, device=self.device)
            places = torch.arange(capacity, device=self.device).float()
            angles = [torch.outer(places, r) for r in decoder._rotations]
            turned = tuple((a.cos(), a.sin()) for a in angles)
        except RuntimeError as error:  # torch.OutOfMemoryError is one; a CPU's has no class of its own
            raise MemoryError(
                f"no memory for keys and values of {self.sequences} sequences of {capacity} tokens"
            ) from error
        if old is not None:
            cache[:, :, :, :, : old.shape[4]] = old
        self._steps.clear()
        self._cache, self._angles = cache, turned

    @contextmanager
    def _here(self) -> Iterator[None]:
        """The device, and no gradients: what is made outlives an inference mode that the caller is in."""
        device = torch.cuda.device(self.device) if self._on_gpu else nullcontext()
        with device, torch.inference_mode(False), torch.no_grad():
            yield


class _Rows:
    """What a step of so many rows reads and writes, on the device."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self._count = rows
        self._pinned = torch.zeros(3 * rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._all = torch.zeros(3 * rows, dtype=torch.int64, device=device)
        # Both begin at multiples of 16 bytes, as the kernels take for granted.
        self.places, self.tokens = self._all[: 2 * rows].view(rows, 2), self._all[2 * rows :]
        self.logits = torch.zeros(rows, vocab, device=device)

    def send(self, rows: Sequence[tuple[int, int, int]], idle: int) -> None:
        """(token, position, slot) of each row, by one copy; rows that are left over go to the beginning of slot `idle`."""
        filled = [*rows, *[(0, 0, idle)] * (self._count - len(rows))]
        places = [number for _, position, slot in filled for number in (position, slot)]
        self._pinned.copy_(torch.tensor(places + [token for token, _, _ in filled]))
        self._all.copy_(self._pinned, non_blocking=True)
