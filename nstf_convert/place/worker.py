"""One process of `nstf place --measure`: `python -m nstf_convert.place.worker TASK`, started by measure.py for each device.

Of each call the slowest process counts, and of these times the one that a tenth are below: what other programs did to the
others says nothing of the machine.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nstf.runtime.messages import awake
from nstf.runtime.ranks import Ranks, use_own_cores

# Bytes of messages, by device.
SIZES = {
    "cpu": (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22),
    "cuda": (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26),
}
# Seconds that one size is measured for, and times at least.
SECONDS, TIMES = 0.03, 8
# Seconds of arithmetic before a message on a CPU, as a layer's products are: threads that wait for messages sleep meanwhile.
BETWEEN = 2e-4
# Of messages and sums the least counts: a process may wake twice as fast in one second as in another.
ROUNDS = {"cpu": 3, "cuda": 1}
# Sums in a row on a CPU.
IN_A_ROW = 8
# Calls in a row of a graph on GPUs.
CAPTURED = 20
_READ_BYTES = {"cpu": 1 << 26, "cuda": 1 << 31}
_SIDE = {"cpu": 512, "cuda": 8192}


def main(task: dict[str, Any]) -> None:
    """Measures in step with the other processes; the first one writes what was found."""
    rank, ranks, kind = int(task["rank"]), int(task["ranks"]), str(task["device"])
    torch.set_num_threads(int(task["threads"]))
    if kind == "cpu":
        use_own_cores(rank, ranks)
    place = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{task['store']}",
        rank=rank,
        world_size=ranks,
    )
    try:
        found = measured(rank, ranks, kind, place)
        found["threads"] = int(task["threads"])
        if rank == 0:
            Path(task["out"]).write_text(json.dumps(found), encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def measured(rank: int, ranks: int, kind: str, place: torch.device) -> dict[str, Any]:
    """Everything, the same in all processes."""
    alone = 0.0
    dist.barrier()
    if rank == 0:
        alone = read_rate(kind, place)
    dist.barrier()
    together = read_rate(kind, place)
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    flops = product_rate(kind, place, dtype)
    with awake() if kind == "cpu" else nullcontext():  # as while ranks decode
        links, curves = connections(rank, ranks, kind, place)
    return {
        "ranks": ranks, "device": kind, "kind": named(kind), "name": described(kind), "dtype": str(dtype).split(".")[1],
        "read_alone": agreed(alone, place, most=True), "read_together": agreed(together, place, most=False),
        "flops": agreed(flops, place, most=False), "memory_bytes": memory(kind, ranks), "links": links, "all_reduce": curves,
    }  # fmt: skip


def connections(rank: int, ranks: int, kind: str, place: torch.device) -> tuple[list[Any], dict[int, Any]]:
    """(of each two processes the seconds of messages, by number of processes the seconds of sums), by bytes."""
    rounds = range(ROUNDS[kind])
    links = [
        (a, b, best([[(size, exchange(rank, a, b, size, place)) for size in SIZES[kind]] for _ in rounds]))
        for a in range(ranks)
        for b in range(a + 1, ranks)
    ]
    curves = {}
    for count in sorted({n for n in (2, 4, 8, 16, ranks) if 1 < n <= ranks}):
        group = dist.new_group(list(range(count)))
        found = [[(size, reduced(rank, count, group, size, place)) for size in SIZES[kind]] for _ in rounds]
        curves[count] = best(found)
    return links, curves


def best(rounds: list[list[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Of each size the least seconds."""
    return [min(same, key=lambda point: point[1]) for same in zip(*rounds, strict=True)]


def read_rate(kind: str, place: torch.device) -> float:
    """Bytes a second of a sum over memory."""
    values = torch.zeros(_READ_BYTES[kind] // 4, device=place)
    return _READ_BYTES[kind] / least(values.sum, place)


def product_rate(kind: str, place: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a matrix product."""
    side = _SIDE[kind]
    a = torch.randn(side, side, device=place).to(dtype)
    out = torch.empty_like(a)
    return 2.0 * side**3 / least(lambda: torch.mm(a, a, out=out), place)


def least(call: Callable[[], object], place: torch.device) -> float:
    """The least seconds of a call; with one thread of its own processor time, to which other programs add nothing."""
    alone = place.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    call()
    times: list[float] = []
    end = time.perf_counter() + 3 * SECONDS
    while len(times) < 3 or time.perf_counter() < end:
        times.append(timed(call, place, clock))
    return min(times)


def timed(
    call: Callable[[], object], place: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    wait(place)
    start = clock()
    call()
    wait(place)
    return clock() - start


def wait(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def exchange(rank: int, a: int, b: int, size: int, place: torch.device) -> float:
    """Seconds that a message takes from rank a to rank b: half of there and back. Raises RuntimeError where what arrives is
    not what was sent.

    On a CPU who sends works before, as a stage of a pipeline does: the other one sleeps by then, and its waking is most of
    the time.
    """
    work = BETWEEN if place.type == "cpu" else 0.0
    sent = pattern(size, a, place)
    got = torch.zeros_like(sent)

    def there_and_back() -> None:
        if rank == a:
            busy(work)
            dist.send(sent, b)
            dist.recv(got, b)
        elif rank == b:
            dist.recv(got, a)
            busy(work)
            dist.send(got, a)

    dist.barrier()
    there_and_back()
    if rank in (a, b) and not torch.equal(got, sent):
        raise RuntimeError(f"a message of {size} bytes from rank {a} to {b} did not arrive as it was sent")
    return repeated(there_and_back, place) / 2 - work


def reduced(rank: int, count: int, group: Any, size: int, place: torch.device) -> float:
    """Seconds of the runtime's sum over the first `count` ranks. Raises RuntimeError for a wrong one.

    On a CPU those of one in a row with work between them: the next work begins when the sum is there, so that processes
    arrive at different moments and wait for each other, as after a layer's products.
    """
    values, ranks = torch.full((max(1, size // 4),), float(rank + 1), device=place), Ranks(rank, count, group)
    if rank < count:
        ranks.sum(values)
        if not torch.all(values == count * (count + 1) / 2):
            raise RuntimeError(f"a sum of {size} bytes over {count} ranks was wrong")
    work = torch.zeros_like(values)
    call = (lambda: ranks.sum(work)) if rank < count else (lambda: None)
    if place.type == "cuda":
        return repeated(call, place)

    def row() -> None:
        for _ in range(IN_A_ROW):
            busy(BETWEEN)
            call()

    return max(1e-7, repeated(row, place) / IN_A_ROW - BETWEEN)


def pattern(size: int, seed: int, place: torch.device) -> Tensor:
    """Bytes that both sides know."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(place)


def repeated(call: Callable[[], object], place: torch.device) -> float:
    """The typical seconds of a call that all processes make, those of the slowest. All make as many.

    On GPUs many calls in a row are captured in a graph, as models run there: their start on the host is no part of it.
    """
    dist.barrier()
    if place.type == "cuda":
        replay = captured(call, CAPTURED)
        return repeated_on_host(replay, place) / CAPTURED
    return repeated_on_host(call, place)


def captured(call: Callable[[], object], count: int) -> Callable[[], object]:
    """So many calls as a graph."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # The thread that watches NCCL asks for events meanwhile, which other modes forbid.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(count):
            call()
    replay: Callable[[], object] = graph.replay
    return replay


def repeated_on_host(call: Callable[[], object], place: torch.device) -> float:
    """The same of a call as it is."""
    once = agreed(timed(call, place), place, most=True)
    count = int(min(200, max(TIMES, SECONDS / max(once, 1e-6))))
    times = []
    for _ in range(count):
        if place.type == "cpu":
            busy(BETWEEN)
        times.append(timed(call, place))
    slowest = torch.tensor(times, dtype=torch.float64, device=place)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.sort().values[count // 10])


def busy(seconds: float) -> None:
    """Keeps this processor at work for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def agreed(value: float, place: torch.device, most: bool) -> float:
    """The largest or the least of all processes' values."""
    held = torch.tensor([value], dtype=torch.float64, device=place)
    dist.all_reduce(held, op=dist.ReduceOp.MAX if most else dist.ReduceOp.MIN)
    return float(held.item())


def named(kind: str) -> str:
    """The device's kind, as machine files have it."""
    if kind == "cpu":
        return "cpu"
    row = torch.cuda.get_device_properties(0)
    if torch.version.hip:
        return str(row.gcnArchName).partition(":")[0]
    return f"sm_{row.major}{row.minor}"


def described(kind: str) -> str:
    if kind == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"{platform.machine()} CPU"


def memory(kind: str, ranks: int) -> float:
    """Bytes of each device; of a CPU an equal share of what is free."""
    if kind == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    from nstf_convert.pipeline.machine import free_host_bytes

    return float(free_host_bytes()) / ranks


def _end_with_parent() -> None:
    """A parent that is killed ends nobody itself. It holds the other end of this process's input, and writes nothing."""
    os.read(0, 1)  # not by sys.stdin, whose lock Python wants when it ends
    os._exit(1)


if __name__ == "__main__":
    Thread(target=_end_with_parent, daemon=True).start()
    main(json.loads(sys.argv[1]))
