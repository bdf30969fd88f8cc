"""Prompts of a captured decoder: by its own layers, up to MOST_ROWS tokens as one graph from the second time that a length
comes, more in pieces; by transformers' modules where a window is shorter than the prompt, and from LONG_ROWS on on ranks
that do not run in pieces.

A host takes longer to start the kernels of a short prompt than a GPU takes to run them. Prompts are padded to the next
multiple of STEP, so that few lengths are captured and tiles are full. Attention is causal, so padding changes nothing in the
tokens before it. Prompts are padded before their length is captured too: so a prompt takes the same kernels each time.

The decoder's layers (graph_decoder.py) do in a launch what the modules do in several, keep the residual stream in float32
and write keys and values where they stay. A replayed prompt gives the logits of one that is not captured up to the rounding
of 16-bit numbers: which kernel the library takes for a product is its own choice, and a number that rounds otherwise moves
those after it; the modules' logits differ as much. Where torch is told to be deterministic
(`torch.use_deterministic_algorithms`), prompts are neither padded nor captured, and run by the modules.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from nstf.kernels.triton import launch_errors
from nstf.runtime.divided_modules import LONG_ROWS
from nstf.runtime.graphs import Step
from nstf.runtime.ranks import Ranks

_log = logging.getLogger("nstf")

STEP = 64
# Of all sequences. Beyond, a GPU has as much to do as the host, and a graph keeps the activations' memory.
MOST_ROWS = 1024
# Pieces of MOST_ROWS took 0.95 to 0.96 of the time of whole prompts of 2048, 8000 and 16 x 512 tokens (16 layers of the 70B
# shape, int4, H200). The host took 0.9 ms to start a layer of a piece (0.5 to 0.6 since launches keep their specs), which a
# GPU is busy with for 2.3: of a layer of 8B, 0.6. So pieces pay from so many weights of a layer on.
PIECES_FROM = 1 << 29
# The same on each of two ranks (70B's, 1.13 times as fast as by modules).
PIECES_FROM_ON_RANKS = 3 << 27
# Times MOST_ROWS that a prompt may have to stay whole: a small rest is all starting.
_WHOLE = 1.5
# All lengths of a single sequence: with fewer, prompts whose lengths take turns would be captured again and again.
KEPT_GRAPHS = MOST_ROWS // STEP
# A capture takes as long as two prompts that are not captured, on several ranks as four: it is for lengths that come again.
CAPTURED_FROM = 2


class _Prompt:
    """What one graph reads and writes, besides the cache."""

    def __init__(self, batch: int, count: int, device: torch.device) -> None:
        self.ids = torch.zeros(batch, count, dtype=torch.int64, device=device)
        self.last = torch.zeros(1, dtype=torch.int64, device=device)  # place of the last token
        self.logits: Tensor | None = None


class Prompts:
    """The prompts of one model on one device.

    layers: their number. capture: makes a replay, None for no graphs. ranks: those that run the model together, None for
    this process alone. own: the decoder's method that gives the logits of prompts of up to `longest` tokens, of (ids, the
    place of the last token, the position of the first, which sequences of the cache). in_pieces: whether long prompts run
    in pieces.
    """

    def __init__(
        self,
        model: Any,
        layers: int,
        capture: Callable[[Step], Step] | None,
        ranks: Ranks | None,
        own: Callable[[Tensor, Tensor, int, slice], Tensor],
        longest: int,
        in_pieces: bool,
    ) -> None:
        self._model, self._layers, self._capture, self._ranks = model, layers, capture, ranks
        # Weakly: in a cycle a decoder's graphs and caches would stay until the collector comes, and NCCL, which waits for
        # graphs that hold its sums, would not end.
        self._own, self._longest = WeakMethod(own), longest
        self._pieces = in_pieces
        self._seen: Counter[tuple[int, int]] = Counter()
        self._graphs: OrderedDict[tuple[int, int], tuple[_Prompt, Step]] = OrderedDict()

    def forget(self) -> None:
        """Drops the graphs: the cache that they write into is another one now."""
        self._graphs.clear()

    def run(self, ids: Tensor, cache: Tensor) -> Tensor:
        """Logits [batch, vocab] after the prompts ids [batch, tokens]; their keys and values are in the cache [layers, 2,
        batch, kv_heads, capacity, size] then, and anything behind them. The logits are valid until the next call."""
        batch, count = ids.shape
        filled = min(-(-count // STEP) * STEP, cache.shape[4])
        if torch.are_deterministic_algorithms_enabled():
            return self._by_modules(ids, 1, cache)
        # Of so many rows the modules of ranks sum a part while they multiply the next (divided_modules.py).
        if self._ranks is not None and not self._pieces and batch * count >= LONG_ROWS:
            return self._by_modules(ids, 1, cache)
        found = self._captured((batch, filled), cache) if batch * filled <= MOST_ROWS else None
        if found is None:
            last = torch.full((1,), count - 1, device=ids.device)
            return self._logits(torch.nn.functional.pad(ids, (0, filled - count)), last, cache)
        prompt, replay = found
        prompt.ids[:, :count].copy_(ids)
        prompt.last.fill_(count - 1)
        replay()
        assert prompt.logits is not None
        return prompt.logits

    def _captured(self, key: tuple[int, int], cache: Tensor) -> tuple[_Prompt, Step] | None:
        """The graph for (sequences, tokens), captured now if it is time; None while there is none."""
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key]
        self._seen[key] += 1
        if self._capture is None or self._seen[key] < CAPTURED_FROM:
            return None
        while len(self._graphs) >= KEPT_GRAPHS:
            oldest, _ = self._graphs.popitem(last=False)
            del self._seen[oldest]  # it must come twice again
        prompt = _Prompt(*key, cache.device)

        def step() -> None:
            prompt.logits = self._logits(prompt.ids, prompt.last, cache)

        replay = self._replay_of(step)
        if replay is None:
            self._capture = None
            return None
        self._graphs[key] = prompt, replay
        return self._graphs[key]

    def _replay_of(self, step: Step) -> Step | None:
        """The captured step; None where this rank or another one cannot capture it.

        Ranks capture twice: sums inside a capture need all of them, and a rank that failed in the middle would leave the
        others waiting. So each tries it without the others first. Raises what the second capture raises: memory that ended
        since, say. Its sums so far have met those of the others, so running the prompt again would add to other ones.
        """
        if self._ranks is None:
            return self._tried(step)
        with self._ranks.alone():
            ready = self._tried(step) is not None  # this graph goes at once, and its memory to the next one
        if not self._ranks.all_can(ready):
            if ready:
                _log.warning("prompts are not captured: another rank cannot do it")
            return None
        assert self._capture is not None
        return self._capture(step)

    def _tried(self, step: Step) -> Step | None:
        """The captured step; None, and a warning, where it cannot be captured."""
        assert self._capture is not None
        try:
            return self._capture(step)
        except launch_errors() as error:
            _log.warning("prompts are not captured: %s", " ".join(str(error).split())[:300])
            return None

    def _logits(self, ids: Tensor, last: Tensor, cache: Tensor) -> Tensor:
        """After the token at the place `last` of each sequence."""
        if ids.shape[1] > self._longest:
            return self._by_modules(ids, last, cache)
        try:
            return self._in_pieces(ids, last)
        except launch_errors() as error:
            if self._ranks is not None:  # the others wait for this one's sums
                raise
            _log.warning("prompts go through transformers' modules: %s", " ".join(str(error).split())[:300])
            self._longest = 0
            return self._by_modules(ids, last, cache)

    def _in_pieces(self, ids: Tensor, last: Tensor) -> Tensor:
        """By the decoder's layers: in even pieces of about MOST_ROWS tokens, of several sequences or of a long one."""
        own, (batch, count) = self._own(), ids.shape
        assert own is not None, "a decoder's prompts live as long as the decoder"
        # Ranks have room for MOST_ROWS rows to add while they multiply.
        whole = MOST_ROWS if self._ranks is not None else _WHOLE * MOST_ROWS
        if batch * count <= whole or not self._pieces:
            return own(ids, last, 0, slice(None))
        together = _even(batch, max(1, MOST_ROWS // count), 1)
        tokens = count if count <= whole else _even(count, MOST_ROWS, STEP)
        found = []
        for at in range(0, batch, together):
            some = slice(at, at + together)
            for first in range(0, count, tokens):
                piece = ids[some, first : first + tokens]
                # Of pieces before the last one the logits are of no use, and of few rows.
                logits = own(piece, (last - first).clamp_max(piece.shape[1] - 1), first, some)
            found.append(logits)
        return torch.cat(found)

    def _by_modules(self, ids: Tensor, kept: int | Tensor, cache: Tensor) -> Tensor:
        """kept: which logits, as transformers' `logits_to_keep`: one of each sequence."""
        from transformers import DynamicCache

        from nstf.runtime.prompt_attention import prompt_attention

        held = DynamicCache()  # without a config: windows keep all keys
        with prompt_attention(self._model.config):
            found = self._model(input_ids=ids, past_key_values=held, use_cache=True, logits_to_keep=kept)
        for i in range(self._layers):
            stored: Any = held.layers[i]
            cache[i, 0, :, :, : ids.shape[1]].copy_(stored.keys)
            cache[i, 1, :, :, : ids.shape[1]].copy_(stored.values)
            stored.keys = stored.values = None
        logits: Tensor = found.logits[:, -1]
        return logits


def _even(total: int, most: int, step: int) -> int:
    """The size of even pieces of about `most`, whole steps."""
    each = -(-total // -(-total // most))
    return -(-each // step) * step
