"""This machine as a machine file: memory, arithmetic and links as measured, by one process a device.

The processes (worker.py) talk through gloo on a CPU and NCCL or RCCL on GPUs. Every message's content is compared after it
arrived, and on GPUs a copy between each two devices as well: drivers have said that devices reach one another while copies
brought zeros.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nstf.errors import NstfError
from nstf_convert.place.costs import Matrix
from nstf_convert.place.machine import Collectives, Device, Link, Machine, from_json
from nstf_convert.place.products import Products

log = logging.getLogger("nstf_convert")

# What the processes may take together before they are given up.
TIMEOUT_S = 300
# Of what a sum over memory reads our GPU kernels read 0.92: 4.08 of 4.43 TB/s on an H200 (docs/gpu_speed.md).
_GPU_SHARE = 0.92
# Cycles a second that are assumed of a core where kernels cannot be timed.
_CLOCK_HZ = 2.5e9
# Leaves whose part is stored as the whole is, with fewer rows or columns.
_PLAIN = ("int", "grid", "dense", "fp8", "mxfp4")


def measure_machine(processes: int = 2) -> Machine:
    """This machine: its GPUs, or so many processes on its CPU with an equal share of the cores each.

    Raises NstfError where a process fails, or where messages do not arrive as they were sent.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        return machine_of(run_workers(gpus, "cuda", 1), check_copies(gpus))
    threads = max(1, (os.cpu_count() or 1) // processes)
    return machine_of(run_workers(processes, "cpu", threads), [])


def run_workers(ranks: int, device: str, threads: int) -> dict[str, Any]:
    """What worker.py finds in so many processes."""
    with tempfile.TemporaryDirectory(prefix="nstf-place-") as folder:
        out = Path(folder) / "result.json"
        task = {
            "ranks": ranks,
            "device": device,
            "threads": threads,
            "store": f"{folder}/store",
            "out": str(out),
        }
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        running, logs = [], []
        for rank in range(ranks):
            logs.append((Path(folder) / f"{rank}.log").open("w+", encoding="utf-8"))
            command = [sys.executable, "-m", "nstf_convert.place.worker", json.dumps(task | {"rank": rank})]
            running.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=logs[-1],
                    stderr=subprocess.STDOUT,
                    env=environment,
                )
            )
        try:
            bad = first_failure(running, TIMEOUT_S)
        except TimeoutError as error:
            raise NstfError(f"measuring {ranks} processes took longer than {TIMEOUT_S} s") from error
        finally:
            texts = []
            for file in logs:
                file.seek(0)
                texts.append(file.read())
                file.close()
        if bad is not None:
            lines = [line for line in texts[bad].splitlines() if line.strip()] or ["no message"]
            raise NstfError(f"measuring failed in process {bad} of {ranks}: {lines[-1][:200]}")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


def first_failure(running: Sequence[subprocess.Popen[Any]], timeout_s: float = math.inf) -> int | None:
    """The number of the process that fails first, None once all ended well. Whatever happens, none is left running.

    The others wait for one that is gone, or fail since it is: so they are killed at once. Raises TimeoutError.
    """
    end = time.monotonic() + timeout_s
    try:
        while True:
            codes = [process.poll() for process in running]
            bad = next((number for number, code in enumerate(codes) if code), None)
            if bad is not None or None not in codes:
                return bad
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.01)
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()


def machine_of(found: dict[str, Any], false_pairs: Sequence[tuple[int, int]]) -> Machine:
    """The machine that measurements tell of. false_pairs: devices between which copies did not bring what was sent."""
    ranks, cpu = int(found["ranks"]), found["device"] == "cpu"
    together = min(1.0, found["read_together"] / found["read_alone"])
    devices = tuple(
        Device(
            f"{'process' if cpu else 'gpu'}{i}", found["kind"], found["memory_bytes"], found["read_alone"],
            {found["dtype"]: found["flops"]}, bandwidth_share=1.0 if cpu else _GPU_SHARE,
            vector_rate=_CLOCK_HZ * found["threads"] if cpu else 0.0, together=together if cpu else 1.0,
            reserved_bytes=0.0 if cpu else 2e9, source="measured",
        )
        for i in range(ranks)
    )  # fmt: skip
    links = []
    for a, b, points in found["links"]:
        latency, bandwidth = fit(points)
        links.append(Link(f"{devices[a].name}", f"{devices[b].name}", bandwidth, latency, source="measured"))
    curves = {
        int(n): tuple((float(b), float(s)) for b, s in points) for n, points in found["all_reduce"].items()
    }
    # What a call takes beyond the two steps of two ranks.
    start = max(0.0, curves[2][0][1] - 2 * min(link.latency_s for link in links)) if 2 in curves else 0.0
    note = f"measured here by {ranks} {'processes on the CPU' if cpu else 'GPUs'}"
    if false_pairs:
        names = ", ".join(f"{devices[a].name} to {devices[b].name}" for a, b in false_pairs)
        note += f"; direct copies {names} do not bring what is sent"
        log.warning("direct copies %s do not bring what is sent: turn peer access off", names)
    machine = Machine(
        f"this machine, {found['name']}", devices, tuple(links), Collectives(start, ("ring",), curves), note
    )
    # What is written is what a file may hold.
    return from_json(machine.to_json(), "measured")


def fit(points: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(latency in seconds, bytes a second) of the line through (bytes, seconds) with the least squared relative errors.

    A latency below zero is taken as zero, and times that do not grow with bytes as an endless bandwidth.
    """
    weights = [1 / s**2 for _, s in points]
    total = sum(weights)
    x = sum(w * b for w, (b, _) in zip(weights, points, strict=True)) / total
    y = sum(w * s for w, (_, s) in zip(weights, points, strict=True)) / total
    spread = sum(w * (b - x) ** 2 for w, (b, _) in zip(weights, points, strict=True))
    slope = sum(w * (b - x) * (s - y) for w, (b, s) in zip(weights, points, strict=True))
    slope = slope / spread if spread else 0.0
    if y - slope * x < 0:
        square = sum(w * b * b for w, (b, _) in zip(weights, points, strict=True))
        slope = sum(w * b * s for w, (b, s) in zip(weights, points, strict=True)) / square
        return 0.0, 1 / max(slope, 1e-15)
    return y - slope * x, 1 / max(slope, 1e-15)


def check_copies(gpus: int) -> list[tuple[int, int]]:
    """Pairs of GPUs between which a copy does not bring what was sent, whatever the driver says of peer access."""
    import torch

    wrong = []
    for a in range(gpus):
        sent = torch.randint(0, 256, (1 << 22,), dtype=torch.uint8)
        source = sent.to(f"cuda:{a}")
        for b in range(gpus):
            if a == b:
                continue
            target = torch.zeros_like(source, device=f"cuda:{b}")
            target.copy_(source)
            torch.cuda.synchronize(b)
            if not torch.equal(target.cpu(), sent):
                wrong.append((a, b))
    return wrong


def part_of(matrix: Matrix, parts: int) -> tuple[tuple[int, ...], float]:
    """(shape to time, share of its time) of a part."""
    if parts == 1 or matrix.axis is None:
        return matrix.shape, 1.0
    if matrix.tree.kind in _PLAIN:
        return tuple(-(-n // parts) if i == matrix.axis else n for i, n in enumerate(matrix.shape)), 1.0
    return matrix.shape, 1.0 / parts


def measured_products(machine: Machine, size_bytes: int) -> Products:
    """Prices of products: on a CPU with compiled kernels their own times, with the threads of one process; else the model.

    size_bytes: of the whole model, which decides what caches hold.
    """
    from nstf_convert.place.in_turn import MOST_ROWS, seconds_in_turn
    from nstf_convert.speed.prices import Prices
    from nstf_convert.speed.targets import parse

    if not machine.devices[0].is_cpu:
        return Products()
    (target,) = parse(["cpu"], False)
    if not target.here:
        return Products()
    threads = max(1, (os.cpu_count() or 1) // len(machine.devices))
    prices = Prices([target], threads, size_bytes)

    def seconds(device: Device, matrices: Sequence[Matrix], parts: int, rows: int) -> list[float] | None:
        if not device.is_cpu or any(len(m.shape) != 2 for m in matrices):
            return None
        shapes = [part_of(m, parts) for m in matrices]
        cases = [(m.tree, shape) for m, (shape, _) in zip(matrices, shapes, strict=True)]
        if rows > MOST_ROWS:
            found = [prices.seconds((tree, shape, 1), rows)[0] for tree, shape in cases]
        else:
            found = seconds_in_turn(cases, rows, target.isa, threads, size_bytes, parts)
        return [share * s for s, (_, share) in zip(found, shapes, strict=True)]

    return Products(seconds)
