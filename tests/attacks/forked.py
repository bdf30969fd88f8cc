"""Batches of cases in forked processes, which notice signals, hangs and growth: a case is known by its seed and number.

The child writes the number of the case that it begins into memory that it shares with its parent. A case that uses more than
`hang_s` of processor time is ended by the kernel (ITIMER_PROF: a busy machine is no hang, and a loop in C is one); one that
waits without using any is ended by the parent.
"""

import json
import mmap
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

WAITS_S = 180.0
Counts = dict[str, int]


class Watch:
    """What a batch calls as it begins each case."""

    def __init__(self, shared: mmap.mmap, hang_s: float) -> None:
        self._shared, self._hang_s = shared, hang_s

    def begin(self, number: int) -> None:
        """Case `number` begins: it has `hang_s` of processor time."""
        self._shared[:8] = number.to_bytes(8, "little")
        signal.setitimer(signal.ITIMER_PROF, self._hang_s)

    def rest(self) -> None:
        """No case is under way."""
        signal.setitimer(signal.ITIMER_PROF, 0)


# A batch: (seed, watch) -> counts. What it raises is a finding.
Batch = Callable[[int, Watch], Counts]


@dataclass
class Total:
    """The counts of all batches added up (`peak_` ones: the largest), and what went wrong."""

    counts: Counts = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def add(self, counts: Counts) -> None:
        for key, value in counts.items():
            before = self.counts.get(key, 0)
            self.counts[key] = max(before, value) if key.startswith("peak_") else before + value


@dataclass
class _Running:
    seed: int
    shared: mmap.mmap
    answers: int
    # What it wrote on stderr: a sanitizer's report, above all.
    said: IO[bytes]
    seen: int = -1
    # How long it has been at the same case, and when that was looked at.
    waited: float = 0.0
    looked: float = field(default_factory=time.monotonic)

    def number(self) -> int:
        return int.from_bytes(self.shared[:8], "little")


def run_batches(
    batch: Batch,
    seeds: Iterable[int],
    *,
    hang_s: float = 2.0,
    workers: int = 1,
    until: float = float("inf"),
    report: Callable[[Total], None] = lambda total: None,
) -> Total:
    """Every seed's batch in a child of its own, `workers` at a time; no new one begins after `until` (time.monotonic)."""
    total, running = Total(), dict[int, _Running]()
    waiting: Iterator[int] = iter(seeds)
    more = True
    while more or running:
        while more and len(running) < workers:
            seed = next(waiting, None) if time.monotonic() < until else None
            if seed is None:
                more = False
                break
            running.update([_start(batch, seed, hang_s)])
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _collect(running.pop(pid), status, total)
                report(total)
            elif _stuck(running[pid]):
                os.kill(pid, signal.SIGABRT)
        time.sleep(0.01)
    return total


def _start(batch: Batch, seed: int, hang_s: float) -> tuple[int, _Running]:
    shared = mmap.mmap(-1, 8)
    out, into = os.pipe()
    said = tempfile.TemporaryFile()
    pid = os.fork()
    if pid:
        os.close(into)
        return pid, _Running(seed, shared, out, said)
    try:
        os.close(out)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1), os.dup2(said.fileno(), 2)
        sys.stdout = sys.stderr = Path(os.devnull).open("w")
        for number in (signal.SIGPROF, signal.SIGABRT):
            signal.signal(number, signal.SIG_DFL)
        watch = Watch(shared, hang_s)
        try:
            answer: dict[str, object] = {"counts": batch(seed, watch)}
        except BaseException as error:
            answer = {"wrong": f"{type(error).__name__}: {error}"[:600]}
        watch.rest()
        os.write(into, json.dumps(answer).encode())
    finally:
        os._exit(0)


def _stuck(child: _Running) -> bool:
    """Whether it waits. Where both were stopped for a while, that while is none of it."""
    now = time.monotonic()
    step, child.looked = min(now - child.looked, 1.0), now
    child.seen, child.waited = child.number(), child.waited + step if child.number() == child.seen else 0.0
    return child.waited > WAITS_S


def _collect(child: _Running, status: int, total: Total) -> None:
    with os.fdopen(child.answers, "rb") as answers:
        text = answers.read()
    where = f"case {child.number()} of seed {child.seed}"
    with child.said as said:
        said.seek(0)
        last = said.read().decode(errors="replace")
    report = last[at : at + 300] if (at := last.find("rror")) >= 0 else ""
    if os.WIFSIGNALED(status):
        kind = {signal.SIGPROF: "used too much time", signal.SIGABRT: "aborted, or waited too long"}
        number = os.WTERMSIG(status)
        total.wrong.append(f"{where}: {kind.get(signal.Signals(number), f'ended by signal {number}')}")
        return
    answer = json.loads(text) if text else {"wrong": f"ended with status {status} {report}".rstrip()}
    if "wrong" in answer:
        total.wrong.append(f"{where}: {answer['wrong']}")
    else:
        total.add(answer["counts"])


def peak_bytes() -> int:
    """The most memory that this process had resident so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
