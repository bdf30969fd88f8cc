"""The paged cache as transformers' models take it: `past_key_values` of a model with a plan on a GPU.

`update` hands the new keys back, tagged, and attention (nstf.runtime.attention) finds the pages by the tag. Rows of a batch
are equally long and without padding; padded batches take the cache of nstf.runtime.ring_cache.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from nstf.errors import UnsupportedError
from nstf.runtime.paged_cache import LayerCache, PagePool
from nstf.runtime.ring_cache import TAG

_NO_ROLLBACK = (
    "the paged KV cache cannot be rolled back or reordered: run the model without the attention plan"
)


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer: how many positions it has seen, and its pages."""

    is_sliding = False
    is_croppable = False

    def __init__(self, pool: PagePool, index: int) -> None:
        super().__init__()
        self.cache = LayerCache(pool, index)
        self.pool, self.seen = pool, 0
        self.is_initialized = True
        self._waiting = 0
        self._flat: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the pool was made before."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The same tensors, the keys tagged; `attend` puts them into the pages."""
        if self._waiting:
            raise UnsupportedError(
                "the paged KV cache was filled but not read: this architecture replaces the keys between cache and "
                "attention; run it without the plan"
            )
        if key_states.shape[0] != self.pool.batch:
            raise ValueError(f"{key_states.shape[0]} sequences, the cache is made for {self.pool.batch}")
        self._waiting = key_states.shape[2]
        tagged = key_states.view_as(key_states)
        setattr(tagged, TAG, self)
        return tagged, value_states

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [B, H, N, D], the N new keys and values [B, Hkv, N, D] -> [B, N, H, D]."""
        count = self._waiting
        self._waiting = 0
        self.pool.reserve(self.seen + count)
        if count > 1 or not self.seen:
            out = self.cache.prefill(query, key, value, self.seen, scale)
        else:
            parts = [x[:, :, 0].flatten(1) for x in (query, key, value)]
            position = torch.full((1,), self.seen, dtype=torch.int64, device=query.device)
            found = self.cache.decode(torch.cat(parts, 1), None, None, self._no_turn(), position, scale, 1e-6)
            out = found.view(len(query), 1, query.shape[1], -1)
        self.seen += count
        return out

    def _no_turn(self) -> tuple[Tensor, Tensor]:
        """(cos, sin) of no rotation at any position: transformers has turned queries and keys."""
        if self._flat is None:
            shape = 1, self.cache.plan.size // 2
            device = self.pool.device
            self._flat = torch.ones(shape, device=device), torch.zeros(shape, device=device)
        return self._flat

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` before transformers 5.10 or so."""
        return -1

    def reset(self) -> None:
        self.seen, self._waiting = 0, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise UnsupportedError(_NO_ROLLBACK)

    def batch_select_indices(self, indices: Tensor) -> None:
        raise UnsupportedError(_NO_ROLLBACK)

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise UnsupportedError(_NO_ROLLBACK)

    def crop(self, tokens_to_remove: int) -> None:
        raise UnsupportedError(_NO_ROLLBACK)

    def offload(self) -> None:
        raise UnsupportedError(_NO_ROLLBACK)


class PagedCache(Cache):  # type: ignore[misc]
    """The cache of a planned model on a GPU."""

    def __init__(self, pool: PagePool) -> None:
        super().__init__(layers=[PagedLayer(pool, i) for i in range(len(pool.layers))])
        self.pool = pool

    def size_bytes(self) -> int:
        """Bytes allocated for keys and values."""
        return self.pool.size_bytes
