"""Predicted against measured times of a model's layers, on one process and on several: what `nstf place` is worth.

    python benchmarks/placement.py [--shapes 512x1536 ...] [--layers 8] [--encoding int4] [--ranks 2] [--rounds 5]
        [--rows 1 16] [--json FILE]

On a CPU every process has one thread, and processes talk through gloo; on GPUs every process has one, with NCCL. Compared
for each shape (hidden x feed-forward) and number of rows:

    one device     all products of the layers on one process, the others wait
    tensor N       q, k, v, gate and up by rows, o and down by columns (formats/shards.py), all-reduces after o and down
    pipeline N     layers one part after the other, [rows, hidden] handed on; one microbatch

Predicted: the products' prices by the planner (timed alone on a CPU, by its model on a GPU) and the machine that
`nstf place --measure` finds. On a GPU a second prediction takes products timed alone in a captured graph, so that errors of
links and of the model can be told apart; on a CPU the first process's time in all-reduces is shown beside the predicted one.
Measured: the least of the rounds, in which the plans take turns, from the first process's start to
the last one's end. Norms, rotations and attention are left out on both sides: these are products and links.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nstf.kernels.cpu.engine_matrix import panel_threads
from nstf.kernels.formats import EncodedTensor
from nstf.kernels.formats.shards import Span, shard
from nstf.kernels.linear import linear
from nstf.runtime.ranks import Ranks
from nstf_convert.place.costs import Matrix, tree_of
from nstf_convert.place.fabric import Fabric
from nstf_convert.place.machine import Machine
from nstf_convert.place.measure import first_failure, measure_machine, measured_products
from nstf_convert.place.products import Products
from nstf_convert.place.worker import captured as captured_calls
from nstf_convert.speed import cache
from nstf_convert.speed.measure import Pool

AXES = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1}
GROUPS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
# What the goal says.
WITHIN = 0.2
# Seconds of this process in all-reduces since the last call began, on a CPU.
SUMMING = [0.0]


def shapes_of(hidden: int, wide: int) -> dict[str, tuple[int, int]]:
    """[out, in] of a layer's matrices; keys and values have a quarter of the heads."""
    return {
        "q_proj": (hidden, hidden), "k_proj": (hidden // 4, hidden), "v_proj": (hidden // 4, hidden),
        "o_proj": (hidden, hidden), "gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide),
    }  # fmt: skip


def matrices(hidden: int, wide: int, encoding: str) -> list[Matrix]:
    return [
        Matrix(
            f"layers.0.{n}.weight",
            tree_of(encoding, f"{n}.weight", s),
            s,
            "product",
            AXES[n],
            GROUPS.get(n, ""),
        )
        for n, s in shapes_of(hidden, wide).items()
    ]


def timed_sum(ranks: Ranks) -> Callable[[Tensor], Tensor]:
    """The sum over ranks, its time added to SUMMING: that of the link and that of waiting for the others."""

    def call(y: Tensor) -> Tensor:
        start = time.perf_counter()
        y = ranks.sum(y)
        SUMMING[0] += time.perf_counter() - start
        return y

    return call


class Layer:
    """A layer's products: on one process, or the part of a rank."""

    def __init__(
        self, found: list[Matrix], pool: Pool, rank: int, ranks: int, place: torch.device, summed: Ranks
    ) -> None:
        self.parts: dict[str, EncodedTensor] = {}
        for matrix in found:
            whole = pool.filled(matrix.tree, matrix.shape)
            # Small weights, so that activations stay finite through the layers.
            for name in ("scale_super", "scale"):
                if name in whole.arrays:
                    whole.arrays[name].mul_(1e-4)
                    break
            size = matrix.shape[matrix.axis or 0] // ranks
            part = (
                shard(whole, Span(matrix.axis or 0, rank * size, (rank + 1) * size)) if ranks > 1 else whole
            )
            arrays = {k: a.to(place) for k, a in part.arrays.items()}
            self.parts[matrix.name.split(".")[2]] = EncodedTensor(part.tree, part.shape, arrays)
        whole = summed.sum if place.type == "cuda" else timed_sum(summed)
        self.sum: Callable[[Tensor], Tensor] = whole if ranks > 1 else lambda y: y

    def __call__(self, x: Tensor) -> Tensor:
        p = self.parts
        q, _, _ = (linear(x, p[n], None) for n in ("q_proj", "k_proj", "v_proj"))
        y = self.sum(linear(q, p["o_proj"], None))
        h = F.silu(linear(y, p["gate_proj"], None)) * linear(y, p["up_proj"], None)
        return self.sum(linear(h, p["down_proj"], None))


class Engine:
    """The same on a CPU through compiled matrices, as the C++ engine runs them: no dispatch by type and device. panels:
    threads that repack them, as when a file is opened; 0: as they are stored, which ranks read."""

    def __init__(self, layer: Layer, rows: int, panels: int) -> None:
        from nstf.kernels.cpu.engine_matrix import compile_matrix

        self.made = {n: compile_matrix(e, panels=panels) for n, e in layer.parts.items()}
        self.outs = {n: torch.zeros(rows, e.shape[0]) for n, e in layer.parts.items()}
        self.sum, self.rows = layer.sum, rows

    def _times(self, name: str, x: Tensor) -> Tensor:
        out = self.outs[name]
        self.made[name].multiply_at(x.data_ptr(), self.rows, out.data_ptr(), 1)
        return out

    def __call__(self, x: Tensor) -> Tensor:
        q = self._times("q_proj", x)
        self._times("k_proj", x)
        self._times("v_proj", x)
        y = self.sum(self._times("o_proj", q))
        h = self._times("gate_proj", y)
        self._times("up_proj", y)
        return self.sum(self._times("down_proj", h))


def captured(call: Callable[[], object], place: torch.device) -> Callable[[], object]:
    """On a GPU the call as a graph with its collectives inside; on a CPU as it is."""
    if place.type != "cuda":
        return call
    return captured_calls(call, 1)


def timed(call: Callable[[], object], place: torch.device) -> float:
    """Seconds from the first process's start to the last one's end, by the clock that all on a host share.

    Of each process's own seconds the longest would leave out what others did before it began: of a pipeline, half.
    """
    if place.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if place.type == "cuda":
        torch.cuda.synchronize()
    # The latest end, and the earliest start.
    held = torch.tensor([time.perf_counter(), -start], dtype=torch.float64, device=place)
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return float(held.sum().item())


def own_seconds(call: Callable[[], object]) -> float:
    """Seconds of a call of this process, on a GPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.no_grad()
def worker(task: dict[str, Any]) -> None:
    """Measures the plans in step with the other processes."""
    rank, ranks, kind = task["rank"], task["ranks"], task["device"]
    torch.set_num_threads(1)
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
        best, summing = least(calls_of(plans, x, rank, ranks), task, place)
        alone = {}
        if rank == 0 and kind == "cuda":
            alone = {m.name: alone_seconds(m, ranks, rows, place, dtype, size) for m in found}
        out.append({"plans": best, "summing": summing, "alone": alone})
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


def least(
    calls: dict[str, Callable[[], object]], task: dict[str, Any], place: torch.device
) -> tuple[dict[str, float], dict[str, float]]:
    """The least seconds of each, in turn; and what of these this process was in all-reduces, on a CPU."""
    best, summing = dict.fromkeys(calls, float("inf")), dict.fromkeys(calls, 0.0)
    for call in calls.values():
        call()
    for _ in range(task["rounds"]):
        for name, call in calls.items():
            for _ in range(task["times"]):
                dist.barrier()
                SUMMING[0] = 0.0
                seconds = timed(call, place)
                if seconds < best[name]:
                    best[name], summing[name] = seconds, SUMMING[0]
    return best, summing


def alone_seconds(
    matrix: Matrix, ranks: int, rows: int, place: torch.device, dtype: torch.dtype, model_bytes: int
) -> dict[int, float]:
    """On a GPU: a product of the whole matrix and of a part, in a captured graph through copies as large as the model
    together, or larger than any cache."""
    found = {}
    pool = Pool(matrix.size_bytes)
    for parts in sorted({1, ranks}):
        size = matrix.shape[matrix.axis or 0] // parts
        whole = pool.filled(matrix.tree, matrix.shape)
        part = shard(whole, Span(matrix.axis or 0, 0, size)) if parts > 1 else whole
        copies = [
            EncodedTensor(part.tree, part.shape, {k: a.to(place, copy=True) for k, a in part.arrays.items()})
            for _ in range(max(2, min(model_bytes // parts, 200 << 20) // max(1, part.size_bytes) + 1))
        ]
        x = torch.randn(rows, part.shape[1], device=place).to(dtype)
        replay = captured(lambda x=x, copies=copies: [linear(x, c, None) for c in copies], place)
        found[parts] = min(own_seconds(replay) for _ in range(5)) / len(copies)
    return found


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
            return products.seconds(device, found, parts, rows)
        # Every matrix is a launch of its own here.
        return sum(products.seconds(device, [m], parts, rows) for m in found)

    out, summing = {"one device": layers * layer(1)}, 0.0
    if ranks > 1:
        summing = layers * 2 * fabric.all_reduce(everyone, width)
        out[f"tensor {ranks}"] = layers * layer(ranks) / device.together + summing
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
        guesses = [predicted(machine, products, found, rows, options.layers, {}) for rows in options.rows]
        for rows, guess, result in zip(options.rows, guesses, start(ranks, task), strict=True):
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
