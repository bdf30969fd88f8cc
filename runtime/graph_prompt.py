"""Prompts of a captured decoder: transformers' modules, as one graph from the second time that a length comes.

A host takes longer to start the kernels of a short prompt than a GPU takes to run them. Prompts of up to MOST_ROWS tokens
are padded to the next multiple of STEP, so that few lengths are captured. Attention is causal, so padding changes nothing in
the tokens before it. Prompts are padded before their length is captured too: so the same prompt takes the same kernels of
ours each time, and its results differ by the library's rounding at most.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nstf.kernels.triton import launch_errors
from nstf.runtime.graphs import Step

_log = logging.getLogger("nstf")

STEP = 64
# Of all sequences. Beyond, a GPU has as much to do as the host, and a graph keeps the activations' memory.
MOST_ROWS = 1024
# All lengths of a single sequence: with fewer, prompts whose lengths take turns would be captured again and again.
KEPT_GRAPHS = MOST_ROWS // STEP
# A capture takes as long as two prompts that are not captured: it is for lengths that come again.
CAPTURED_FROM = 2


class _Prompt:
    """What one graph reads and writes, besides the cache."""

    def __init__(self, batch: int, count: int, device: torch.device) -> None:
        self.ids = torch.zeros(batch, count, dtype=torch.int64, device=device)
        self.last = torch.zeros(1, dtype=torch.int64, device=device)  # place of the last token
        self.logits: Tensor | None = None


class Prompts:
    """The prompts of one model on one device. layers: their number; capture: None for prompts as they are; alone: whether
    no other rank runs the model too."""

    def __init__(
        self, model: Any, layers: int, capture: Callable[[Step], Step] | None, alone: bool = True
    ) -> None:
        self._model, self._layers, self._capture, self._alone = model, layers, capture, alone
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
        if self._capture is None or batch * filled > MOST_ROWS:
            return self._logits(ids, 1, cache)
        found = self._captured((batch, filled), cache)
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
        """The graph for (sequences, tokens), captured now if it is time; None while there is none.

        Raises what a capture raises on one of several ranks: it has made some of the sums, so running the prompt again
        would add to other sums of the others.
        """
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key]
        self._seen[key] += 1
        if self._seen[key] < CAPTURED_FROM or self._capture is None:
            return None
        while len(self._graphs) >= KEPT_GRAPHS:
            oldest, _ = self._graphs.popitem(last=False)
            del self._seen[oldest]  # it must come twice again
        prompt = _Prompt(*key, cache.device)

        def step() -> None:
            prompt.logits = self._logits(prompt.ids, prompt.last, cache)

        try:
            self._graphs[key] = prompt, self._capture(step)
        except launch_errors() as error:
            if not self._alone:
                raise
            _log.warning("prompts are not captured: %s", " ".join(str(error).split())[:300])
            self._capture = None
            return None
        return self._graphs[key]

    def _logits(self, ids: Tensor, kept: int | Tensor, cache: Tensor) -> Tensor:
        """kept: which logits, as transformers' `logits_to_keep`: one of each sequence."""
        from transformers import DynamicCache

        held = DynamicCache()  # without a config: windows keep all keys
        found = self._model(input_ids=ids, past_key_values=held, use_cache=True, logits_to_keep=kept)
        for i in range(self._layers):
            stored: Any = held.layers[i]
            cache[i, 0, :, :, : ids.shape[1]].copy_(stored.keys)
            cache[i, 1, :, :, : ids.shape[1]].copy_(stored.values)
            stored.keys = stored.values = None
        logits: Tensor = found.logits[:, -1]
        return logits
