"""Predicted against measured times of a model's layers, on one process and on several: what `nstf place` is worth.

    python benchmarks/placement.py [--shapes 512x1536 ...] [--layers 8] [--encoding int4] [--ranks 2] [--rounds 5]
        [--rows 1 16] [--json FILE]

On a CPU every process has one thread, and processes talk through gloo; on GPUs every process has one, with NCCL. Compared
for each shape (hidden x feed-forward) and number of rows:

    one device     all products of the layers on one process, the others wait
    tensor N       q, k, v, gate and up by rows, o and down by columns (formats/shards.py), all-reduces after o and down
    pipeline N     layers one part after the other, [rows, hidden] handed on; one microbatch

Predicted: the products' prices (on a CPU timed in turn through as many bytes as the model has, in the rounds of the plans;
on a GPU by the planner's model) and the machine that `nstf place --measure` finds. On a GPU a second prediction takes
products timed alone in a captured graph, so that errors of links and of the model can be told apart; on a CPU the first
process's time in all-reduces is shown beside the predicted one. Measured: the least of the rounds, in which the plans take
turns, from the start of the last process that has work at once to the last one's end. Norms, rotations and attention are
left out on both sides: these are products and links.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from placement_layers import (
    SUMMING,
    Engine,
    Layer,
    alone_seconds,
    captured,
    matrices,
    timed,
)
from torch import Tensor

from nstf.kernels.cpu import ext
from nstf.kernels.cpu.engine_matrix import panel_threads
from nstf.runtime.messages import awake
from nstf.runtime.ranks import Ranks, use_own_cores
from nstf_convert.place.costs import Matrix
from nstf_convert.place.fabric import Fabric
from nstf_convert.place.in_turn import MOST_ROWS, InTurn
from nstf_convert.place.machine import Machine
from nstf_convert.place.measure import first_failure, measure_machine, measured_products, part_of
from nstf_convert.place.products import Products
from nstf_convert.place.worker import agreed
from nstf_convert.speed import cache
from nstf_convert.speed.measure import Pool

# What the goal says.
WITHIN = 0.2
# That plans take turns for at least, and that prices are taken for in each round, on a CPU.
SECONDS, ROUND_SECONDS = 6.0, 0.15


@torch.no_grad()
def worker(task: dict[str, Any]) -> None:
    """Measures the plans in step with the other processes."""
    rank, ranks, kind = task["rank"], task["ranks"], task["device"]
    torch.set_num_threads(1)
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
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    count = task["layers"]
    found = matrices(*task["shape"], task["encoding"])
    size = count * sum(m.size_bytes for m in found)
    pool = Pool(size)
    summed = Ranks(rank, ranks)

    def layers(own_rank: int, own_ranks: int, own: int, rows: int) -> list[Callable[[Tensor], Tensor]]:
        made = [Layer(found, pool, own_rank, own_ranks, place, summed) for _ in range(own)]
        panels = panel_threads(size, 1) if own_ranks == 1 else 0
        return [Engine(m, rows, panels) for m in made] if kind == "cpu" else list(made)

    out = []
    for rows in task["rows"]:
        x = torch.randn(rows, task["shape"][0], generator=torch.Generator().manual_seed(0)).to(place, dtype)
        plans = {"one device": layers(0, 1, count, rows) if rank == 0 else []}
        if ranks > 1:
            plans[f"tensor {ranks}"] = layers(rank, ranks, count, rows)
            plans[f"pipeline {ranks}"] = layers(0, 1, count // ranks, rows)
        # On a CPU the prices are taken between the plans: cores of a shared host are fast and slow by turns of seconds.
        prices = {}
        if kind == "cpu" and rank == 0 and rows <= MOST_ROWS:
            prices = {n: prices_of(found, rows, n, size) for n in sorted({1, ranks})}
        with awake() if kind == "cpu" else nullcontext():
            best, summing = least(calls_of(plans, x, rank, ranks), task, place, summed, prices)
        alone = {}
        if rank == 0 and kind == "cuda":
            alone = {m.name: alone_seconds(m, ranks, rows, place, dtype, size) for m in found}
        priced = {n: timed_alone.seconds() for n, timed_alone in prices.items()}
        out.append({"plans": best, "summing": summing, "alone": alone, "prices": priced})
    if rank == 0:
        Path(task["out"]).write_text(json.dumps(out))
    dist.barrier()
    dist.destroy_process_group()


def calls_of(
    plans: dict[str, list[Callable[[Tensor], Tensor]]], x: Tensor, rank: int, ranks: int
) -> dict[str, Callable[[], object]]:
    """What this process does for each plan."""

    def run(own: list[Callable[[Tensor], Tensor]], y: Tensor) -> Tensor:
        for layer in own:
            y = layer(y)
        return y

    calls: dict[str, Callable[[], object]] = {}
    for name, own in plans.items():
        if name.startswith("pipeline"):
            received, sent = torch.empty_like(x), torch.empty_like(x)

            def stage(own: Any = own, received: Tensor = received, sent: Tensor = sent) -> None:
                sent.copy_(run(own, received if rank else x))

            whole = captured(stage, x.device)

            def piped(whole: Any = whole, received: Tensor = received, sent: Tensor = sent) -> None:
                if rank > 0:
                    dist.recv(received, rank - 1)
                whole()
                if rank + 1 < ranks:
                    dist.send(sent, rank + 1)

            calls[name] = piped
        else:
            calls[name] = captured(lambda own=own: run(own, x), x.device) if own else (lambda: None)  # type: ignore[misc]
    return calls


def prices_of(found: list[Matrix], rows: int, parts: int, size: int) -> InTurn:
    """The products of a layer, or of a rank's part, to be timed alone."""
    shapes = [part_of(m, parts)[0] for m in found]
    cases = [(m.tree, shape) for m, shape in zip(found, shapes, strict=True)]
    return InTurn(cases, rows, ext.isa(), 1, size, parts)


def least(
    calls: dict[str, Callable[[], object]],
    task: dict[str, Any],
    place: torch.device,
    summed: Ranks,
    prices: dict[int, InTurn],
) -> tuple[dict[str, float], dict[str, float]]:
    """The least seconds of each, in turn; and what of these this process was in all-reduces, on a CPU. prices: what is
    timed by itself in each round."""
    best, summing = dict.fromkeys(calls, float("inf")), dict.fromkeys(calls, 0.0)
    for call in calls.values():
        call()
    begun, round_ = time.perf_counter(), 0
    while round_ < task["rounds"] or (
        place.type == "cpu" and agreed(time.perf_counter() - begun, place, most=True) < SECONDS
    ):
        round_ += 1
        for timed_alone in prices.values():
            timed_alone.round(ROUND_SECONDS)
        for name, call in calls.items():
            for _ in range(task["times"]):
                SUMMING[0] = 0.0
                begins = dist.get_rank() == 0 or name.startswith("tensor")
                seconds = timed(call, place, begins, summed)
                if seconds < best[name]:
                    best[name], summing[name] = seconds, SUMMING[0]
    return best, summing


def start(ranks: int, task: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs the workers; what the first one wrote, for each number of rows."""
    with tempfile.TemporaryDirectory() as folder:
        task = task | {"ranks": ranks, "store": f"{folder}/store", "out": f"{folder}/out"}
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
        running = [
            subprocess.Popen([*command, json.dumps(task | {"rank": rank})], env=environment)
            for rank in range(ranks)
        ]
        if (bad := first_failure(running)) is not None:
            raise SystemExit(f"placement.py: process {bad} failed; its message is above")
        found: list[dict[str, Any]] = json.loads(Path(task["out"]).read_text())
        return found


def as_timed(prices: dict[str, list[float]]) -> Products:
    """Products at the prices of the first process, by the number of parts."""
    return Products(lambda device, matrices, parts, rows: prices[str(parts)])


def predicted(
    machine: Machine, products: Products, found: list[Matrix], rows: int, layers: int, alone: dict[str, Any]
) -> dict[str, Any]:
    """Seconds of the plans, and of the all-reduces. alone: products timed by themselves, in the place of the prices."""
    fabric, device, ranks = Fabric(machine), machine.devices[0], len(machine.devices)
    everyone = tuple(range(ranks))
    width = found[3].shape[0] * rows * (2 if device.kind != "cpu" else 4)

    def layer(parts: int) -> float:
        if alone:
            return sum(float(alone[m.name][str(parts)]) for m in found)
        if device.is_cpu:
            seconds = products.seconds(device, found, parts, rows)
            return products.beside_others(device, seconds, found, parts) if parts > 1 else seconds
        # Every matrix is a launch of its own here.
        return sum(products.seconds(device, [m], parts, rows) for m in found)

    out, summing = {"one device": layers * layer(1)}, 0.0
    if ranks > 1:
        summing = layers * 2 * fabric.all_reduce(everyone, width)
        out[f"tensor {ranks}"] = layers * layer(ranks) + summing
        handed = sum(fabric.handed_on((i,), (i + 1,), width) for i in range(ranks - 1))
        out[f"pipeline {ranks}"] = layers * layer(1) + handed
    return {"plans": out, "summing": summing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes", nargs="+", help="by default three for a CPU, or an 8B and a 70B model's for GPUs"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--encoding", default="int4")
    parser.add_argument("--ranks", type=int, default=2, help="processes on a CPU; on GPUs all of them")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--times", type=int, default=10, help="of each plan in a round")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(json.loads(options.worker))
        return
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast is not there on every host
    # Prices of another hour are no use on a shared machine.
    cache.folder = lambda: None
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks, kind = (gpus, "cuda") if gpus else (options.ranks, "cpu")
    lines, right = [], 0
    machine: Machine | None = None
    cpu, gpu = ["256x768", "1024x2816", "2048x5632"], ["4096x14336", "8192x28672"]
    for text in options.shapes or (gpu if gpus else cpu):
        hidden, wide = map(int, text.split("x"))
        found = matrices(hidden, wide, options.encoding)
        task = {
            "device": kind, "shape": [hidden, wide], "encoding": options.encoding, "rows": options.rows,
            "layers": options.layers, "rounds": options.rounds, "times": options.times,
        }  # fmt: skip
        # On a CPU links and products are measured beside the plans: a shared machine changes from minute to minute.
        if machine is None or kind == "cpu":
            machine = measure_machine(ranks)
        products = measured_products(machine, options.layers * sum(m.size_bytes for m in found))
        for rows, result in zip(options.rows, start(ranks, task), strict=True):
            if result["prices"]:
                products = as_timed(result["prices"])
            guess = predicted(machine, products, found, rows, options.layers, {})
            again = predicted(machine, products, found, rows, options.layers, result["alone"])["plans"]
            lines.append(
                show(text, rows, guess["plans"], again if result["alone"] else None, result["plans"])
            )
            if (tensor := f"tensor {ranks}") in guess["plans"] and kind == "cpu":
                real, said = result["summing"][tensor], guess["summing"]
                print(
                    f"{'':23}of which all-reduces: predicted {1e6 * said:9.1f} us  measured {1e6 * real:9.1f} us"
                )
                lines[-1] |= {"predicted_summing_s": said, "measured_summing_s": real}
            right += lines[-1]["best_is_right"]
    close = [abs(c - 1) <= WITHIN for line in lines for c in line["ratio"].values()]
    print(
        f"{sum(close)} of {len(close)} predictions within 20 %; the best plan named rightly in {right} of {len(lines)}"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(lines, indent=1) + "\n")


def show(
    shape: str, rows: int, guess: dict[str, float], again: dict[str, float] | None, real: dict[str, float]
) -> dict[str, Any]:
    """Prints a shape's lines; the figures for JSON."""
    order = {
        "predicted": sorted(guess, key=lambda n: guess[n]),
        "measured": sorted(real, key=lambda n: real[n]),
    }
    for name, seconds in real.items():
        more = (
            f"  with timed products {1e6 * again[name]:9.1f} us {again[name] / seconds:5.2f}" if again else ""
        )
        print(
            f"{shape:12} rows {rows:4}  {name:12} predicted {1e6 * guess[name]:9.1f} us  measured {1e6 * seconds:9.1f} us"
            f"  {guess[name] / seconds:5.2f}{more}",
            flush=True,
        )
    # Plans that measure within a tenth of each other have no order.
    first = real[order["predicted"][0]] <= 1.1 * real[order["measured"][0]]
    return {
        "shape": shape, "rows": rows, "predicted_s": guess, "with_timed_products_s": again, "measured_s": real,
        "ratio": {n: guess[n] / s for n, s in real.items()}, "best_is_right": first, **order,
    }  # fmt: skip


if __name__ == "__main__":
    main()
