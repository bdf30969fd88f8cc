"""A KV cache that honours an attention plan: groups that may forget keep `sink` + `recent` keys, others
keep all.

Keys are stored as attention gives them, after RoPE at their original positions. Softmax over a set of keys
does not depend on their order, so an evicting group is a ring of `sink + recent` slots that decoding
overwrites in place.

The heads of one layer then differ in length and no single [B, heads, T, D] tensor can be returned by
`update`, as transformers expects. `update` therefore gives back the new keys only, tagged with the layer's
cache, and the planned attention function (nstf.runtime.attention) takes the stored keys from the tag. An
architecture that replaces the tensor on the way would lose the tag; the next `update` notices that nobody
claimed the last one and refuses.

Shapes: B batch, h heads of a segment, S stored positions, D head size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from nstf.errors import UnsupportedError
from nstf.runtime.attention_stored import StoredRows
from nstf.runtime.kv_formats import PLAIN, KVFormat

TAG = "_nstf_cache_layer"


@dataclass(frozen=True)
class Segment:
    """KV heads of one layer that are stored alike; `recent` 0 means that everything is kept."""

    kv_heads: tuple[int, ...]
    sink: int = 0
    recent: int = 0
    min_length: int = 0
    key_format: KVFormat = PLAIN
    value_format: KVFormat = PLAIN

    @property
    def quantised(self) -> bool:
        return self.key_format.bits < 16 or self.value_format.bits < 16


class SegmentStore:
    """Keys and values of one segment.

    `ring` False: [B, h, S, D] in order of position: all of them, or (only between `append` of several
    tokens to a ring and the next `compact`) the sinks and then the positions from `tail_start` on.
    `ring` True: [B, h, sink + recent, D], column c >= sink in slot sink + c % recent.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.ring = False
        self.tail_start = 0
        self._index: Tensor | None = None
        self._rows: dict[int, tuple[StoredRows, StoredRows]] = {}

    def stored(self, row: int, low: int, high: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """((keys, values) [h, high - low, D] of a sequence, the same as their whole pages are read back)."""
        if self.keys is None or self.values is None:
            raise ValueError("the KV cache is empty: update was not called before attention")
        near = self.keys[row, :, low:high], self.values[row, :, low:high]
        if row not in self._rows:
            self._rows[row] = StoredRows(self.segment.key_format), StoredRows(self.segment.value_format)
        keys, values = self._rows[row]
        return near, (keys.read(near[0]), values.read(near[1]))

    def append(self, key: Tensor, value: Tensor, seen: int) -> None:
        """Add the columns seen, seen + 1, ... of all KV heads (key: [B, all heads, N, D])."""
        if self._index is None:
            self._index = torch.tensor(self.segment.kv_heads, device=key.device)
        if len(self.segment.kv_heads) != key.shape[1]:
            key, value = key.index_select(1, self._index), value.index_select(1, self._index)
        if self.keys is None or self.values is None:
            # A copy: the caller's projection buffer would otherwise live as long as the cache.
            self.keys, self.values = key.clone(), value.clone()
        elif self.ring and key.shape[2] == 1:
            slot = self.segment.sink + seen % self.segment.recent
            self.keys[:, :, slot : slot + 1] = key
            self.values[:, :, slot : slot + 1] = value
        else:
            if self.ring:
                self.keys, self.values = self._in_order(self.keys, seen), self._in_order(self.values, seen)
                self.ring, self.tail_start = False, seen - self.segment.recent
            self.keys = torch.cat([self.keys, key], dim=2)
            self.values = torch.cat([self.values, value], dim=2)

    def compact(self, seen: int, first_column: Tensor | None) -> None:
        """Turn into a ring when every row of the batch is long enough; first_column: [B], tokens of
        left padding.
        """
        segment = self.segment
        if not segment.recent or self.ring or self.keys is None or self.values is None:
            return
        if not self.tail_start:
            shortest = seen - (0 if first_column is None else int(first_column.max()))
            if shortest < max(segment.sink + segment.recent, segment.min_length - 1):
                return
        self.keys = self._to_ring(self.keys, seen, first_column)
        self.values = self._to_ring(self.values, seen, first_column)
        self.ring, self.tail_start = True, 0

    def _in_order(self, buffer: Tensor, seen: int) -> Tensor:
        oldest = self.segment.sink + seen % self.segment.recent
        return torch.cat(
            [
                buffer[:, :, : self.segment.sink],
                buffer[:, :, oldest:],
                buffer[:, :, self.segment.sink : oldest],
            ],
            2,
        )

    def _to_ring(self, stored: Tensor, seen: int, first_column: Tensor | None) -> Tensor:
        sink, recent = self.segment.sink, self.segment.recent
        sinks = stored[:, :, :sink]
        if first_column is not None and not self.tail_start:
            columns = first_column[:, None] + torch.arange(sink, device=stored.device)
            sinks = stored.gather(
                2, columns[:, None, :, None].expand(-1, stored.shape[1], -1, stored.shape[3])
            )
        # Column seen - recent + i goes to slot (seen - recent + i) % recent = (seen + i) % recent.
        return torch.cat([sinks, stored[:, :, -recent:].roll(seen % recent, dims=2)], dim=2)

    def select(self, rows: Tensor) -> None:
        self._rows.clear()  # made again when they are read
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)

    def size_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values) if t is not None)


class PlannedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of the cache: its segments, and how many columns (padding included) were seen."""

    is_sliding = False
    is_croppable = False

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        super().__init__()
        self.segments = segments
        self.stores = [SegmentStore(segment) for segment in segments]
        self.seen = 0
        self._claimed = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store [B, all KV heads, N, D]; returns the same tensors, the keys tagged with this layer."""
        if not self._claimed:
            raise UnsupportedError(
                "the planned KV cache was filled but not read: this architecture replaces the keys between "
                "cache and attention, or the model was switched away from the planned attention; "
                "run it without the plan"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for store in self.stores:
            store.append(key_states, value_states, self.seen)
        self.seen += key_states.shape[2]
        tagged = key_states.view_as(key_states)
        setattr(tagged, TAG, self)
        self._claimed = False
        return tagged, value_states

    def claim(self) -> None:
        """Called by the attention function that found the tag."""
        self._claimed = True

    def compact(self, first_column: Tensor | None) -> None:
        """Forget what the plan allows; called after the attention of the step, which still needed it."""
        for store in self.stores:
            store.compact(self.seen, first_column)

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
        self.stores = [SegmentStore(segment) for segment in self.segments]
        self.seen, self._claimed, self.is_initialized = 0, True, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        for store in self.stores:
            store.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for store in self.stores:
            if store.keys is not None:
                rows = torch.arange(store.keys.shape[0], device=store.keys.device)
                store.select(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        raise UnsupportedError(
            "the planned KV cache cannot be rolled back (evicted keys are gone): assisted generation needs "
            "the model without the attention plan"
        )

    def offload(self) -> None:
        raise UnsupportedError(
            "the planned KV cache cannot be offloaded; load the model without the attention plan"
        )


class PlannedCache(Cache):  # type: ignore[misc]
    """The cache of a planned model: one `PlannedLayer` for each layer's segments."""

    def __init__(self, layers: list[tuple[Segment, ...]]) -> None:
        super().__init__(layers=[PlannedLayer(segments) for segments in layers])

    def size_bytes(self) -> int:
        """Bytes of all stored keys and values."""
        return sum(store.size_bytes() for layer in self.layers for store in layer.stores)
