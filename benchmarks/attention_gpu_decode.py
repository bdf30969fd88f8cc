"""What benchmarks/attention_gpu.py has in common, and its part that decodes, for heads of an 8B model."""

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nstf.runtime.attention_plan import GroupPlan, HeadPlan, LayerPlan
from nstf.runtime.kv_formats import PLAIN, KVFormat
from nstf.runtime.paged_cache import LayerCache, PagePool
from nstf.runtime.planned_heads import compiled

HEADS, KV_HEADS, SIZE = 32, 8, 128
SCALE = SIZE**-0.5
# Several layers' caches, so that none of them is still in the second-level cache when its turn comes.
STEP_BYTES = 1 << 29


def seconds(call: Callable[[], object], most_s: float = 1.5) -> float:
    """Median of launches that follow one another; fewer of long ones."""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    count = max(3, min(15, int(most_s / max(time.perf_counter() - begin, 1e-5))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(events)) / 1e3


def graph_seconds(calls: list[Callable[[], object]]) -> float:
    """Median time of one of the calls, in a graph of all of them."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return seconds(graph.replay) / len(calls)


def caches(
    count: int, keys: KVFormat, values: KVFormat, tile: dict[str, int] | None, sequences: int = 1
) -> tuple[list[Any], int]:
    """(steps of decoding over caches of random codes of so many sequences, bytes each must read)."""
    layer = LayerPlan(
        (HeadPlan("full", {}, 0, 0.0, 1.0),) * HEADS, (GroupPlan(0, 0, 0, keys, values),) * KV_HEADS
    )
    form = compiled(layer, SIZE)
    generator = torch.Generator(device="cuda").manual_seed(1)
    steps: list[Any] = []
    bytes_each = 0
    while not steps or len(steps) * bytes_each < STEP_BYTES:
        pool = PagePool([form], sequences, count, torch.bfloat16, torch.device("cuda"))
        pool.reserve(count)
        for slab in pool.slabs:
            # Any codes; scales and numbers of 16 bits that are small and finite.
            slab.view(torch.uint8).random_(0, 60, generator=generator)
        cache = LayerCache(pool, 0)
        qkv = torch.randn(sequences, (HEADS + 2 * KV_HEADS) * SIZE, device="cuda", dtype=torch.bfloat16)
        angles = (torch.ones(count, SIZE // 2, device="cuda"), torch.zeros(count, SIZE // 2, device="cuda"))
        # Not the last of a page: once in 64 tokens its codes are made too.
        position = torch.tensor([count - 2], device="cuda")
        pages = count // 64
        bytes_each = sequences * (pool.page_bytes * max(pages - 2, 0) + 2 * 64 * KV_HEADS * SIZE * 4)

        def step(
            cache: LayerCache = cache, qkv: Tensor = qkv, angles: Any = angles, at: Tensor = position
        ) -> Tensor:
            return cache.decode(qkv, None, None, angles, at, SCALE, 1e-6, tile)

        steps.append(step)
    return steps, bytes_each


def decode_row(
    count: int,
    name: str,
    keys: KVFormat,
    values: KVFormat,
    sdpa_s: float,
    read: float,
    tile: Any,
    sequences: int,
) -> Any:
    steps, size = caches(count, keys, values, tile, sequences)
    time_s = graph_seconds(steps)
    print(
        f"decode {sequences} x {count}, {name}: {time_s * 1e6:.1f} us, {size / time_s / read:.2f} of the bandwidth of "
        f"{read / 1e12:.2f} TB/s, {sdpa_s / time_s:.2f} times 16-bit SDPA ({sdpa_s * 1e6:.1f} us)",
        flush=True,
    )
    return {"sequences": sequences, "tokens": count, "format": name, "time_s": time_s, "bytes": size,
            "of_bandwidth": size / time_s / read, "over_sdpa": sdpa_s / time_s}  # fmt: skip


def sdpa_decode(count: int, sequences: int) -> float:
    """16-bit SDPA of one query of each sequence, the fastest backend, over caches that exceed the second-level cache."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    each = 4 * sequences * KV_HEADS * count * SIZE
    held = [
        tuple(
            torch.randn(sequences, KV_HEADS, count, SIZE, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        )
        for _ in range(max(2, STEP_BYTES // each))
    ]
    q = torch.randn(sequences, HEADS, 1, SIZE, device="cuda", dtype=torch.bfloat16)
    times = []
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        # Heads as they are, and the queries of a KV head as rows, where no key is read twice.
        for rows in (False, True):
            query = q.view(sequences, KV_HEADS, HEADS // KV_HEADS, SIZE) if rows else q

            def call(pair: Any, query: Tensor = query, backend: Any = backend, rows: bool = rows) -> object:
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(query, *pair, scale=SCALE, enable_gqa=not rows)

            try:
                times.append(graph_seconds([lambda pair=pair, call=call: call(pair) for pair in held]))  # type: ignore[misc]
            except RuntimeError:
                continue
    return min(times)


FORMATS = {
    "16 bits": (PLAIN, PLAIN),
    "8 bits": (KVFormat(8, "channel", False), KVFormat(8, "token", False)),
    "4 bits": (KVFormat(4, "channel", False), KVFormat(4, "token", False)),
    "4 bits, rotated": (KVFormat(4, "token", True), KVFormat(4, "token", True)),
    "2 bits": (KVFormat(2, "channel", False), KVFormat(2, "token", False)),
}
