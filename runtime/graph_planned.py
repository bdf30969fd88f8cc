"""Captured decoding by an attention plan: the step of graph_decoder.py over pages, rings and quantised caches.

The cache is a `PagePool`: its table of pages is read by the graph, so that a graph is right for any length, and growing
needs no capture. Prompts run in chunks of CHUNK tokens through transformers' modules with planned attention, over the same
pages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nstf.errors import UnsupportedError
from nstf.runtime.attention_plan import AttentionPlan
from nstf.runtime.attention_windows import check_windows
from nstf.runtime.graph_decoder import Decoder, State
from nstf.runtime.graphs import Step
from nstf.runtime.kv_formats import cache_bytes
from nstf.runtime.paged_cache import PagePool
from nstf.runtime.paged_model import PagedCache
from nstf.runtime.planned_heads import compiled_plan
from nstf.runtime.sampling import Sampling, choose

# Tokens of a prompt at a time, a multiple of 128: bounds what a chunk holds beside the cache.
CHUNK = 8192


@dataclass(frozen=True)
class PagedState(State):
    """As `State`; `cache` is empty, keys and values are in pages."""

    pages: PagedCache


class PlannedDecoder(Decoder):
    """A loaded model, with a plan applied, that decodes by it."""

    def __init__(
        self, model: Any, plan: AttentionPlan, capture: Callable[[Step], Step] | None = None
    ) -> None:
        """Raises UnsupportedError for a model, dtype or device it does not run, ValueError for another model's plan."""
        super().__init__(model, capture)
        # A plan that was applied reads no further back than the model's own windows.
        check_windows(plan, [layer.heads.window for layer in self._layers])
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise UnsupportedError(f"planned decoding runs in 16 bits, not in {self.dtype}")
        self.plan, self._planned = plan, compiled_plan(plan)

    @property
    def capacity(self) -> int:
        return self._paged().pages.pool.pages * 64 if self._state else 0

    def cache_bytes(self, position: int) -> int:
        return cache_bytes(self.plan, position)

    def prepare(self, batch: int, tokens: int, sampling: Sampling | None) -> None:
        if self._state is None or len(self._state.tokens) != batch:
            self._renew(batch, self.context)
        state = self._paged()
        state.pages.pool.reserve(min(tokens, self.context))
        # A capture runs the step: what it writes at the first position is written again.
        state.position.zero_()
        self._replay(sampling)

    def _paged(self) -> PagedState:
        assert isinstance(self._state, PagedState)
        return self._state

    def _renew(self, batch: int, capacity: int, keep: int = 0) -> None:
        self._steps.clear()
        self._state = None
        pages = PagedCache(PagePool(self._planned, batch, self.context, self.dtype, self.device))
        places = torch.arange(self.context, device=self.device).float()
        angles = tuple((torch.outer(places, r).cos(), torch.outer(places, r).sin()) for r in self._rotations)
        self._state = PagedState(
            self.context,
            torch.empty(0, device=self.device),
            angles,
            torch.zeros(batch, dtype=torch.int64, device=self.device),
            torch.zeros(1, dtype=torch.int64, device=self.device),
            pages,
        )
        if self.device.type == "cuda":
            self._pinned = [torch.empty(batch, dtype=torch.int64).pin_memory() for _ in range(2)]

    def _start(self, ids: Tensor, sampling: Sampling | None) -> None:
        state, count = self._paged(), ids.shape[1]
        state.pages.reset()
        for first in range(0, count, CHUNK):
            found = self.model(
                input_ids=ids[:, first : first + CHUNK],
                past_key_values=state.pages,
                use_cache=True,
                logits_to_keep=1,
            )
        state.tokens.copy_(choose(found.logits[:, -1], sampling))
        state.position.fill_(count)

    def _next(self, position: int, sampling: Sampling | None) -> None:
        self._paged().pages.pool.reserve(position + 1)
        self._replay(sampling)()

    def _attend(self, i: int, qkv: Tensor, state: State) -> Tensor:
        assert isinstance(state, PagedState)
        layer = self._layers[i]
        found: Tensor = state.pages.layers[i].cache.decode(
            qkv, layer.qkv_bias, layer.qk_norms, state.angles[layer.rotation], state.position,
            layer.heads.scale, layer.heads.epsilon,
        )  # fmt: skip
        return found
