"""The planned cache on a GPU: pages that are allocated as a sequence grows, and attention over them.

All layers and sequences grow alike. A page of 64 positions has one block of memory that holds its records of all layers
whose groups keep everything; a table in device memory says where it begins. Growing takes new memory for new pages and adds
to the table: nothing is copied, and graphs that were captured stay right. Groups that forget have rings of fixed memory.

`PagePool` owns memory and tables; `LayerCache` runs one layer: `prefill` for chunks, `decode` inside a captured graph.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nstf.errors import UnsupportedError
from nstf.runtime.kv_formats import PAGE, rotated
from nstf.runtime.planned_heads import PlannedHeads, Segment

# Pages are allocated so many at a time.
PAGES_AT_ONCE = 16
EVERYTHING = 1 << 30


class PagePool:
    """Memory of a planned cache for `batch` sequences of equal length, up to `context` positions."""

    def __init__(
        self,
        layers: Sequence[PlannedHeads],
        batch: int,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises UnsupportedError for dtypes that are not of 16 bits."""
        from nstf.kernels.triton.attention_append import scratch
        from nstf.kernels.triton.attention_pages import ALL, NEAR, Form, Forms, Pages

        if dtype not in (torch.float16, torch.bfloat16):
            raise UnsupportedError(f"planned attention on a GPU runs in 16 bits, not in {dtype}")
        self.layers, self.batch, self.context = tuple(layers), batch, context
        self.dtype, self.device = dtype, device
        self.base = torch.zeros(64, dtype=torch.int32, device=device)
        self.table = torch.zeros(batch, -(-context // PAGE), dtype=torch.int64, device=device)
        self.pages = 0
        self.slabs: list[Tensor] = []
        self._units = 0
        self.stores: list[list[Any]] = []
        self._fixed: list[Tensor] = []
        for layer in self.layers:
            found = []
            for segment in layer.segments:
                keys, values = segment.group.keys, segment.group.values
                forms = Forms(
                    Form(keys.bits, keys.by == "channel", keys.rotate),
                    Form(values.bits, values.by == "channel", values.rotate),
                    layer.size,
                )
                units = forms.record_bytes // 16 * len(segment.members)
                members = torch.tensor(segment.members, dtype=torch.int32, device=device)
                shape = (batch, len(members), NEAR if forms.near else 1, layer.size)
                near_keys, near_values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
                if segment.group.evict:
                    # The plan comes from a file: no more pages than the context has are ever in use.
                    most = self.table.shape[1] + 1
                    sinks, ring = (min(n, most) for n in segment.places)
                    memory = self._memory(batch * (sinks + ring) * units)
                    self._fixed.append(memory)
                    table = torch.arange(batch * (sinks + ring), device=device) * units + self._from_base(
                        memory
                    )
                    found.append(
                        Pages(
                            forms,
                            self.base,
                            table.view(batch, -1),
                            0,
                            near_keys,
                            near_values,
                            members,
                            sinks,
                            ring,
                        )
                    )
                else:
                    found.append(
                        Pages(
                            forms, self.base, self.table, self._units, near_keys, near_values, members, ALL, 1
                        )
                    )
                    self._units += units
            self.stores.append(found)
        first = self.layers[0]
        self.room = scratch(batch, first.heads, first.kv_heads, first.size, device)

    @property
    def page_bytes(self) -> int:
        """Of a page of one sequence, of all groups that keep everything."""
        return 16 * self._units

    @property
    def size_bytes(self) -> int:
        """What is allocated for keys and values."""
        near = {id(t): t for layer in self.stores for p in layer for t in (p.near_keys, p.near_values)}
        held = [*self.slabs, *self._fixed, *near.values()]
        return sum(t.numel() * t.element_size() for t in held)

    def reserve(self, tokens: int) -> None:
        """Makes room for sequences of `tokens`. What is stored stays where it is."""
        wanted = -(-tokens // PAGE)
        most = self.table.shape[1]
        if wanted > most:
            raise ValueError(f"{tokens} tokens, made for {self.context} at most")
        if wanted <= self.pages or not self._units:
            return
        count = min(-(-(wanted - self.pages) // PAGES_AT_ONCE) * PAGES_AT_ONCE, most - self.pages)
        slab = self._memory(self.batch * count * self._units)
        self.slabs.append(slab)
        places = torch.arange(self.batch * count, device=self.device) * self._units + self._from_base(slab)
        self.table[:, self.pages : self.pages + count] = places.view(self.batch, count)
        self.pages += count

    def _memory(self, units: int) -> Tensor:
        """`units` times 16 bytes. Zeros: places that were not written are read, though never used."""
        return torch.zeros(max(units, 1) * 4, dtype=torch.int32, device=self.device)

    def _from_base(self, memory: Tensor) -> int:
        return (memory.data_ptr() - self.base.data_ptr()) // 16


class LayerCache:
    """Attention of one layer over its pages."""

    def __init__(self, pool: PagePool, index: int) -> None:
        from nstf.kernels.triton.linear import arch_of

        self.pool, self.plan, self.stores = pool, pool.layers[index], pool.stores[index]
        self.arch = arch_of(pool.device)
        device, heads = pool.device, self.plan.layer.heads
        rules = [head.streaming or (0, EVERYTHING, 0) for head in heads]
        self.rules = torch.tensor(rules, dtype=torch.int32, device=device).clamp_(max=EVERYTHING)
        self._pairs: dict[tuple[tuple[int, int], ...], Tensor] = {}
        self._sparse: dict[tuple[tuple[int, int], ...], tuple[Tensor, Tensor]] = {}
        for segment in self.plan.segments:
            for pairs in (*self._of(segment), *(pairs for pairs, _, _ in segment.together)):
                if pairs:
                    self._pairs[pairs] = torch.tensor(pairs, dtype=torch.int32, device=device)
            for _, pairs in segment.sparse:
                found = [heads[head].block_sparse or (1.0, 16, 0) for head, _ in pairs]
                self._sparse[pairs] = (
                    torch.tensor([threshold for threshold, _, _ in found], device=device),
                    torch.tensor([length for _, _, length in found], device=device),
                )

    def decode(
        self,
        qkv: Tensor,
        bias: Tensor | None,
        gains: tuple[Tensor, Tensor] | None,
        angles: tuple[Tensor, Tensor],
        position: Tensor,
        scale: float,
        epsilon: float,
        tile: dict[str, int] | None = None,
    ) -> Tensor:
        """Attention of one token of each sequence, [batch, heads size]; its key and value go into the cache.

        qkv: [batch, (heads + 2 KV) size], as the projections give it. position: int64 [1] on the device. Room must be
        reserved. Can be captured, and replayed for any position.
        """
        from nstf.kernels.triton.attention_append import append
        from nstf.kernels.triton.attention_decode import decode

        plan, pool = self.plan, self.pool
        shape = plan.heads, plan.kv_heads
        out = torch.empty(len(qkv), plan.heads * plan.size, dtype=qkv.dtype, device=qkv.device)
        for pages in self.stores:
            append(pages, qkv, bias, gains, angles, position, pool.room, shape, scale, epsilon, self.arch)
        for pages, segment in zip(self.stores, plan.segments, strict=True):
            decode(
                pages,
                self.rules,
                segment.masked,
                position,
                pool.room,
                out,
                shape,
                self.arch,
                pool.context,
                tile,
            )
        return out

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> Tensor:
        """Attention of a chunk, [batch, count, heads, size]; its keys and values go into the cache.

        q: [batch, heads, count, size], k, v: [batch, KV heads, count, size], turned by position; start: its first position,
        as many as are in the cache. Block-sparse heads are sparse in whole blocks of 128 positions within the chunk.
        Room must be reserved. Memory beside the cache: keys and values of the layer in 16 bits, up to the chunk's end.
        """
        out = torch.empty_strided(
            (q.shape[0], q.shape[2], q.shape[1], q.shape[3]),
            (q.shape[1] * q.shape[2] * q.shape[3], q.shape[1] * q.shape[3], q.shape[3], 1),
            dtype=q.dtype,
            device=q.device,
        )
        for pages, segment in zip(self.stores, self.plan.segments, strict=True):
            self._prefill(pages, segment, q, k, v, out, start, scale)
        return out

    def _prefill(
        self,
        pages: Any,
        segment: Segment,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        start: int,
        scale: float,
    ) -> None:
        from nstf.kernels.triton import attention_predict
        from nstf.kernels.triton.attention_prefill import NARROW, prefill, shares

        forms = pages.forms
        if forms.keys.rotate:
            q, k = (rotated(x).to(x.dtype) for x in (q, k))
        if forms.values.rotate:
            v = rotated(v).to(v.dtype)
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        far, near, near_start = self._read(pages, segment, k, v, start)
        narrow = segment.widest <= NARROW
        for pairs, bands, together in segment.ranges(shares(forms.size, self.arch)):
            prefill(
                q, far, near, out, self._pairs[pairs], self.rules, start, near_start, scale, self.arch, bands,
                narrow=bands and narrow, together=together,
            )  # fmt: skip
        for stride, pairs in segment.sparse:
            members, (thresholds, lengths) = self._pairs[pairs], self._sparse[pairs]
            for row in range(len(q)):
                one = slice(row, row + 1)
                lists = attention_predict.predict(
                    q[row], far[0][row], near[0][row], members, thresholds, lengths, stride, start, near_start, scale,
                    self.arch,
                )  # fmt: skip
                prefill(
                    q[one], (far[0][one], far[1][one]), (near[0][one], near[1][one]), out[one], members, self.rules,
                    start, near_start, scale, self.arch, lists=lists,
                )  # fmt: skip
        if forms.values.rotate:
            heads = [head for pairs in self._of(segment) for head, _ in pairs]
            at = torch.tensor(heads, device=out.device)
            out[:, :, at] = rotated(out[:, :, at]).to(out.dtype)

    @staticmethod
    def _of(segment: Segment) -> list[tuple[tuple[int, int], ...]]:
        return [segment.dense, segment.banded, *(pairs for _, pairs in segment.sparse)]

    def _read(
        self, pages: Any, segment: Segment, k: Tensor, v: Tensor, start: int
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], int]:
        """(stored pages as numbers, keys and values in 16 bits, position of their first row) that the queries of a chunk
        read; puts the chunk into the cache."""
        from nstf.kernels.triton.attention_pages import NEAR, Pages, fetch, store

        forms, batch, kept = pages.forms, len(k), pages.heads
        end, group = start + k.shape[2], segment.group
        sinks, first = 0, 0
        if group.evict:
            sinks = -(-group.sink // PAGE)
            first = 0 if start + 1 < group.min_length else max(start - group.recent + 1, 0) // PAGE

        def room(rows: int) -> Tensor:
            return torch.empty(batch, kept, rows, forms.size, dtype=self.pool.dtype, device=k.device)

        def chosen(x: Tensor) -> Tensor:
            return x if kept == x.shape[1] else x.index_select(1, pages.members)

        if not forms.near:
            whole = (chosen(k).contiguous(), chosen(v).contiguous())
            if start:
                both = []
                for values, new in enumerate(whole):
                    old = room(-(-start // PAGE) * PAGE + k.shape[2])
                    fetch(pages, bool(values), old, sinks, first, -(-start // PAGE))
                    old[:, :, start:end] = new
                    both.append(old[:, :, :end] if batch * kept == 1 else old[:, :, :end].contiguous())
                whole = both[0], both[1]
            store(pages, k, v, start)
            return whole, whole, 0
        near_start = max(start // PAGE - 1, 0) * PAGE
        before = torch.arange(near_start, start, device=k.device)
        ends = []
        for values, (new, held) in enumerate(((k, pages.near_keys), (v, pages.near_values))):
            form = forms.values if values else forms.keys
            if form.bits < 16:
                old = held.index_select(2, before % NEAR)
            else:
                old = room(-(-start // PAGE) * PAGE)
                fetch(pages, bool(values), old, 0, near_start // PAGE, -(-start // PAGE))
                old = old[:, :, near_start:start]
            ends.append(torch.cat([old, chosen(new)], dim=2))
        # Pages up to the second last of the last query.
        count = max((end - 1) // PAGE - 1, 0)
        far = (room(max(count, 1) * PAGE), room(max(count, 1) * PAGE))
        ready = max(start // PAGE - 1, 0)
        source = pages
        if group.evict:
            # What falls out of the ring within the chunk is read by its queries: pages of their own for them.
            for values in (False, True):
                fetch(pages, values, far[values], sinks, first, min(ready, count))
            units = forms.record_bytes // 16 * kept
            memory = torch.zeros(
                batch * max(-(-end // PAGE) - ready, 1) * units * 4, dtype=torch.int32, device=k.device
            )
            places = torch.arange(batch, device=k.device)[:, None] * (-(-end // PAGE) - ready) - ready
            table = (places + torch.arange(-(-end // PAGE), device=k.device)) * units
            source = Pages(
                forms, memory, table.contiguous(), 0, pages.near_keys, pages.near_values, pages.members
            )
            store(source, k, v, start, hold=False)
            for values in (False, True):
                form = forms.values if values else forms.keys
                # Of 16 bits, the page in the middle of which the chunk begins was only half written there.
                begin = -(-start // PAGE) if form.bits == 16 else ready
                if form.bits == 16:
                    fetch(pages, values, far[values], 0, min(ready, count), min(begin, count))
                fetch(source, values, far[values], 0, min(begin, count), count)
                if form.bits == 16 and start % PAGE and start // PAGE < count:
                    at = start // PAGE * PAGE
                    far[values][:, :, at : at + PAGE] = ends[values][
                        :, :, at - near_start : at - near_start + PAGE
                    ]
            store(pages, k, v, start)
            return far, (ends[0], ends[1]), near_start
        store(pages, k, v, start)
        for values in (False, True):
            fetch(source, values, far[values], 0, 0, count)
        return far, (ends[0], ends[1]), near_start
