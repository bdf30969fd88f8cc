# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Pages of 64 keys and values on a GPU: where they lie, how they are written, how they are read back for prefill.

A page of one head is a record: codes of the keys, their minimums and scales, codes of the values, theirs. Records of the
heads that are stored alike stand side by side; where such a block begins is in a table in device memory, by sequence and
page, in units of 16 bytes from the first block of memory. So the table alone changes when a cache grows: no page is moved,
and a captured graph stays right. A ring uses its table's places again: page p >= SINK stands at SINK + (p - SINK) % RING.

How codes stand in a record: attention_record.py. Numbers of 16 bits stand as they are, in the model's dtype.

Keys and values that are stored rotated are rotated from the start, in their 16-bit pages too: queries are turned once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.attention_record import load_numbers, store_codes
from nstf.kernels.triton.launching import launch
from nstf.kernels.triton.spec import KernelSpec, pointer_type

PAGE = 64
# Positions of a page, and of the one before it, that stand in 16 bits: place position % NEAR.
NEAR = 2 * PAGE
# A table's sink for caches that keep all pages.
ALL = 1 << 30


@dataclass(frozen=True)
class Form:
    """How keys or values are stored. bits: 16, 8, 4 or 2. channel: minimum and scale of each channel, else of each
    position and 64 channels. rotate: turned by a Hadamard matrix first."""

    bits: int
    channel: bool
    rotate: bool

    def code_bytes(self, size: int) -> int:
        return PAGE * size * self.bits // 8

    def pairs(self, size: int) -> int:
        """Minimums of a page."""
        return 0 if self.bits == 16 else size if self.channel else PAGE * (size // min(size, 64))

    def size_bytes(self, size: int) -> int:
        return self.code_bytes(size) + 4 * self.pairs(size)


@dataclass(frozen=True)
class Forms:
    """Of keys and values of heads of `size` channels (64, 128 or 256)."""

    keys: Form
    values: Form
    size: int

    @property
    def record_bytes(self) -> int:
        """Of a page of one head: a multiple of 16."""
        return self.keys.size_bytes(self.size) + self.values.size_bytes(self.size)

    @property
    def near(self) -> bool:
        """Whether the last two pages stand elsewhere in 16 bits."""
        return self.keys.bits < 16 or self.values.bits < 16


@dataclass(frozen=True)
class Pages:
    """The stored heads of one layer that are stored alike.

    pool: int32, the first block of memory. table: int64 [batch, places], in units of 16 bytes from it. offset: of this
    layer's heads in a page's block, in units of 16 bytes. near_keys, near_values: [batch, heads, NEAR, size] in the model's
    dtype, (1 position where pages are of 16 bits). members: int32 [heads], their numbers among the layer's KV heads.
    """

    forms: Forms
    pool: Tensor
    table: Tensor
    offset: int
    near_keys: Tensor
    near_values: Tensor
    members: Tensor
    sink: int = ALL
    ring: int = 1

    @property
    def heads(self) -> int:
        return len(self.members)

    @property
    def dtype(self) -> torch.dtype:
        return self.near_keys.dtype

    def words(self) -> tuple[Tensor, Tensor, Tensor]:
        """The pool as int32, float16 and the model's dtype: one address, three types."""
        return self.pool, self.pool.view(torch.float16), self.pool.view(self.dtype)


@triton.jit
def place_of(table, line, places, page, sink, ring, offset, head, RECORD: tl.constexpr):
    """Where a head's record of a page begins, in units of 16 bytes from the pool."""
    at = tl.where(page < sink, page, sink + (page - sink) % ring)
    return tl.load(table + line * places + at) + offset + head * (RECORD // 16)


@triton.jit
def turned_by_hadamard(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """x [ROWS, SIZE] times the orthonormal Hadamard matrix, f32."""
    BITS: tl.constexpr = (
        (SIZE > 1)
        + (SIZE > 2)
        + (SIZE > 4)
        + (SIZE > 8)
        + (SIZE > 16)
        + (SIZE > 32)
        + (SIZE > 64)
        + (SIZE > 128)
    )
    for _ in tl.static_range(BITS):
        # The highest bit of the channel is transformed and becomes the lowest; after BITS turns all are back.
        a, b = tl.split(tl.permute(tl.reshape(x, [ROWS, 2, SIZE // 2]), (0, 2, 1)))
        x = tl.reshape(tl.join(a + b, a - b), [ROWS, SIZE])
    return x * (1.0 / SIZE**0.5)


@triton.jit
def store_kernel(
    source,  # [batch, KV, count, SIZE]: keys or values of the positions from `start` on, turned
    near,  # [batch, heads, 128, SIZE]: those before
    words,
    halves,
    wide,
    table,
    members,
    places,
    offset,
    sink,
    ring,
    first,  # page of the first program
    start,
    count,
    line_stride,
    head_stride,
    row_stride,
    KEPT: tl.constexpr,  # heads
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    CHANNEL: tl.constexpr,
    VALUES: tl.constexpr,
    SKIP: tl.constexpr,
    RECORD: tl.constexpr,
):
    """Pages of a chunk into their stored form, one for each program and head."""
    page = first + tl.program_id(0)
    line = tl.program_id(1) // KEPT
    head = tl.program_id(1) % KEPT
    at = place_of(table, line, places, page, sink, ring, offset, head, RECORD)
    n = tl.arange(0, 64)
    c = tl.arange(0, SIZE)
    position = page * 64 + n
    row = position - start
    here = (row >= 0) & (row < count)
    number = tl.load(members + head)
    begin = source + line.to(tl.int64) * line_stride + number.to(tl.int64) * head_stride
    x = tl.load(begin + row.to(tl.int64)[:, None] * row_stride + c[None, :], mask=here[:, None], other=0.0)
    if BITS == 16:
        into = wide + at * 8 + SKIP // 2 + n[:, None] * SIZE + c[None, :]
        tl.store(into, x.to(wide.dtype.element_ty), mask=here[:, None])
    else:
        before = near + ((line * KEPT + head) * 128 + position % 128)[:, None] * SIZE + c[None, :]
        y = tl.load(before, mask=(row < 0)[:, None], other=0.0)
        x = tl.where(here[:, None], x.to(tl.float32), y.to(tl.float32))
        store_codes(x, words, halves, at, BITS, CHANNEL, VALUES, SIZE, SKIP)


@triton.jit
def fetch_kernel(
    out,  # [batch, heads, rows, SIZE]: row p is position p
    words,
    halves,
    wide,
    table,
    places,
    offset,
    sink,
    ring,
    sinks,  # pages that are fetched: the first ones,
    first,  # and those from here on
    rows,
    KEPT: tl.constexpr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    CHANNEL: tl.constexpr,
    VALUES: tl.constexpr,
    SKIP: tl.constexpr,
    RECORD: tl.constexpr,
):
    """Stored pages as numbers of 16 bits, in order of position."""
    i = tl.program_id(0)
    page = tl.where(i < sinks, i, first + i - sinks)
    line = tl.program_id(1) // KEPT
    head = tl.program_id(1) % KEPT
    at = place_of(table, line, places, page, sink, ring, offset, head, RECORD)
    n = tl.arange(0, 64)
    c = tl.arange(0, SIZE)
    if BITS == 16:
        x = tl.load(wide + at * 8 + SKIP // 2 + n[:, None] * SIZE + c[None, :]).to(tl.float32)
    else:
        x = load_numbers(words, halves, at, BITS, CHANNEL, VALUES, SIZE, SKIP)
    into = out + ((line * KEPT + head).to(tl.int64) * rows + page * 64 + n)[:, None] * SIZE + c[None, :]
    tl.store(into, x.to(out.dtype.element_ty))


def _forms_constants(pages: Pages, values: bool) -> dict[str, int | bool]:
    forms = pages.forms
    form = forms.values if values else forms.keys
    return {
        "KEPT": pages.heads,
        "SIZE": forms.size,
        "BITS": form.bits,
        "CHANNEL": form.channel,
        "VALUES": values,
        "SKIP": forms.keys.size_bytes(forms.size) if values else 0,
        "RECORD": forms.record_bytes,
    }


def _pool_types(dtype: torch.dtype) -> dict[str, str]:
    return {"words": "*i32", "halves": "*fp16", "wide": pointer_type(dtype), "table": "*i64"}


def store_spec(pages: Pages, values: bool, batch: int, count: int) -> KernelSpec:
    """count: pages of the launch."""
    dtype = pages.dtype
    numbers = ("places", "offset", "sink", "ring", "first", "start", "count")
    strides = ("line_stride", "head_stride", "row_stride")
    return KernelSpec(
        name=f"attention_store_{pointer_type(dtype)[1:]}",
        fn=store_kernel,
        signature={
            "source": pointer_type(dtype),
            "near": pointer_type(dtype),
            **_pool_types(dtype),
            "members": "*i32",
            **dict.fromkeys((*numbers, *strides), "i32"),
        },
        constants=_forms_constants(pages, values),
        divisible=("source", "near", "words", "halves", "wide", "table", "members", "row_stride"),
        num_warps=8 if pages.forms.size > 128 else 4,
        num_stages=1,
        batch=batch,
        kind="attention_store",
        grid=(count, batch * pages.heads, 1),
    )


def fetch_spec(pages: Pages, values: bool, batch: int, count: int) -> KernelSpec:
    dtype = pages.dtype
    numbers = ("places", "offset", "sink", "ring", "sinks", "first", "rows")
    return KernelSpec(
        name=f"attention_fetch_{pointer_type(dtype)[1:]}",
        fn=fetch_kernel,
        signature={"out": pointer_type(dtype), **_pool_types(dtype), **dict.fromkeys(numbers, "i32")},
        constants=_forms_constants(pages, values),
        divisible=("out", "words", "halves", "wide", "table"),
        num_warps=4,
        num_stages=1,
        batch=batch,
        kind="attention_fetch",
        grid=(count, batch * pages.heads, 1),
    )


def store(pages: Pages, keys: Tensor, values: Tensor, start: int, hold: bool = True) -> None:
    """Puts positions start, start + 1, ... into the cache. keys, values: [batch, KV heads, count, size] of the whole layer,
    turned as `pages.forms` says, a position's channels side by side.

    Positions before are there. Pages that no later query reads in 16 bits get their stored form: all but the last two.
    hold: False leaves what stands in 16 bits as it is.
    """
    batch, _, count, _ = keys.shape
    end = start + count
    for source, near, is_values in ((keys, pages.near_keys, False), (values, pages.near_values, True)):
        form = pages.forms.values if is_values else pages.forms.keys
        # Of the pages of codes, those before were complete before; those of 16 bits are written as positions come.
        first = start // PAGE if form.bits == 16 else max(start // PAGE - 1, 0)
        last = -(-end // PAGE) if form.bits == 16 else end // PAGE - 1
        # Of pages that share a place of a ring, the last one.
        for low, high in (
            (first, min(last, pages.sink)),
            (max(first, pages.sink, last - pages.ring), last),
        ):
            if high > low:
                spec = store_spec(pages, is_values, batch, high - low)
                launch(
                    spec, source, near, *pages.words(), pages.table, pages.members, pages.table.shape[1], pages.offset,
                    pages.sink, pages.ring, low, start, count, source.stride(0), source.stride(1), source.stride(2),
                )  # fmt: skip
        if form.bits < 16 and hold:
            held = max(start, max(end // PAGE - 1, 0) * PAGE)
            rows = torch.arange(held, end, device=keys.device)
            chosen = source.index_select(1, pages.members)[:, :, held - start :]
            near.index_copy_(2, rows % NEAR, chosen.to(near.dtype))


def fetch(pages: Pages, values: bool, out: Tensor, sinks: int, first: int, last: int) -> None:
    """Writes stored pages [0, sinks) and [first, last) as numbers into out [batch, heads, rows, size], row p position p."""
    sinks = min(sinks, first, last)
    number = sinks + max(last - first, 0)
    if number:
        launch(
            fetch_spec(pages, values, len(out), number), out, *pages.words(), pages.table, pages.table.shape[1],
            pages.offset, pages.sink, pages.ring, sinks, first, out.shape[2],
        )  # fmt: skip
