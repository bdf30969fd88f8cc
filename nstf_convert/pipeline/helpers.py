"""Helpers: further processes, which make results and leave them in the work directory (nstf_convert.pipeline.helping).

The first process does the whole conversion. What a helper has put into the work directory it finds there, under the
address of its content, instead of making it: the file is the same bytes for any number of helpers, and one that fails
costs time and nothing else. Processes, since the precision of matrix products is a setting of the whole process.

A helper on each further GPU takes a part of the calibration (nstf_convert.pipeline.calibrate.share), and encodes and
measures the best single formats while the first process does so with the mix. Helpers beside the first process, on its own
GPU, take a part of the candidates alone, and of what methods propose once a plan gives few bits: of small matrices these
are Python and launches, which leave the GPU idle.
"""

import logging
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from nstf_convert import processes
from nstf_convert.options import ConvertOptions
from nstf_convert.pipeline.calibrate.share import Pieces, SharedStep
from nstf_convert.pipeline.machine import Machine, keep_within
from nstf_convert.pipeline.progress import Peaks
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.processes import (
    CORES_EACH,
    LARGEST_CHECKPOINT,
    MOST_BESIDE,
    SMALLEST_CHECKPOINT,
    Started,
)

log = logging.getLogger("nstf")

# What a helper beside the first process may take of the bound on the GPU's memory; below these bounds there are none.
GPU_SHARE = 1 / 8
LEAST_GPU_BYTES, LEAST_HOST_BYTES = 24 << 30, 16 << 30

GONE = "it ended"

Mix = Mapping[str, Recipe]


@dataclass(frozen=True)
class Job:
    """A mix to encode and measure: in the pass over the layers that the options ask for, or every tensor on its own."""

    mix: Mix
    in_pass: bool


@dataclass(frozen=True)
class Encoding:
    """Tensors to encode on their own, one mix after the other."""

    mixes: Sequence[Mix]


@dataclass(frozen=True)
class Answer:
    """To a job. failure: why it was not done, else empty; peaks: of the helper's memory so far."""

    failure: str
    peaks: Peaks


@dataclass(frozen=True)
class Rehearsal:
    """Asks a helper to prepare for candidates; there is no answer."""


@dataclass(frozen=True)
class Start:
    """What a helper is told first. bounds: the first process's, which decide about bytes; gpu_bytes: what the helper itself
    may take of its GPU; any_size: as in `Session`."""

    options: ConvertOptions
    bounds: Machine
    gpu_bytes: int
    any_size: bool


class Helpers:
    """Further processes. They open the model at once, and the work directory with their first job."""

    def __init__(
        self,
        options: ConvertOptions,
        folder: Path,
        machine: Machine,
        beside: int | None = None,
        any_size: bool = False,
    ) -> None:
        """machine: of the first process. beside: so many helpers on its own GPU, for candidates; None: one on each further
        GPU, which keeps to the same bounds. The host's memory is shared out. any_size: as in `Session`."""
        self._machine, self._beside = machine, beside is not None
        devices = machine.devices[1:] if beside is None else (machine.device,) * beside
        share = machine.host_bytes // (1 + len(devices))
        gpu_bytes = machine.gpu_bytes if beside is None else int(GPU_SHARE * machine.gpu_bytes)
        self._processes: list[Started] = []
        self._ending: list[subprocess.Popen[bytes]] = []
        self._busy: list[Connection] = []
        self._lowered = False
        self._gone: set[Connection] = set()
        self._late: set[Connection] = set()  # that had not begun when others had done their step
        self._peaks: dict[Connection, Peaks] = {}
        self._devices: dict[Connection, str] = {}
        for device in devices:
            alone = torch.device("cuda", 0) if device.type == "cuda" else device
            own = replace(options, device=str(alone), work_dir=folder)
            bounds = replace(machine, devices=(alone,), host_bytes=share)
            seen = {}
            if device.type == "cuda":
                seen = processes.seeing_only(device.index or 0, torch.version.hip is not None)
            found = processes.started(seen, self._beside)
            if found is None:
                self._failed("Python cannot be started")
                continue
            with suppress(OSError):  # it has ended: found out with the first job
                found[1].send(Start(own, bounds, gpu_bytes, any_size))
            self._processes.append(found)
            self._devices[found[1]] = str(device)
        if self._beside:
            processes.end_waiting()

    @property
    def count(self) -> int:
        """How many helpers there are."""
        return len(self._processes)

    @property
    def any(self) -> bool:
        """Whether there is a helper that is alive."""
        return bool(self._alive())

    @property
    def peaks(self) -> list[Peaks]:
        """What each helper had taken of memory when it last answered, or was ended."""
        return list(self._peaks.values())

    def _alive(self) -> list[Connection]:
        return [c for _, c in self._processes if c not in self._gone]

    def start(self, jobs: Sequence[Job]) -> None:
        """Begins with jobs, in turn on each GPU."""
        for connection, job in zip(cycle(self._alive()), jobs, strict=False):
            self._send(connection, job)

    def start_all(self, job: SharedStep) -> None:
        """Begins with a job that all helpers share. Those beside the first process may not be ready: each has a door."""
        for connection in self._alive():
            self._send(connection, replace(job, door=self._door(connection)))

    def encode_ahead(self, mixes: Sequence[Mix]) -> None:
        """One helper begins to encode tensors that the first process will want later."""
        if alive := self._alive():
            self._send(alive[0], Encoding(mixes))

    def rehearse(self) -> None:
        """All helpers prepare for candidates. Not before the machine was timed: they take from the GPU what they can get.
        What those on the first process's own GPU may take is not this one's until they are closed."""
        if self._beside and self.any and self._machine.on_gpu:
            torch.cuda.empty_cache()
            self._share_memory()
        for connection in self._alive():
            self._told(connection, Rehearsal())

    def _share_memory(self) -> None:
        left = self._machine.gpu_bytes * (1 - GPU_SHARE * len(self._alive()))
        keep_within(int(left), self._machine.devices)
        self._lowered = bool(self._alive())

    def _send(self, connection: Connection, job: Job | Encoding | SharedStep) -> None:
        if self._told(connection, job):
            self._busy.append(connection)

    def _told(self, connection: Connection, what: Job | Encoding | SharedStep | Rehearsal) -> bool:
        try:
            connection.send(what)
        except OSError:
            self._lost(connection)
            return False
        return True

    def _lost(self, connection: Connection) -> None:
        if connection not in self._gone:
            self._gone.add(connection)
            self._failed(GONE)

    def _failed(self, why: str) -> None:
        if self._beside:
            log.info("a process beside this one failed (%s): its work is done here", why)
        else:
            log.warning("another GPU's process failed (%s): its work is done on the first one", why)

    @property
    def busy(self) -> bool:
        """Whether jobs were begun that nobody has waited for."""
        return bool(self._busy)

    def shut_out(self, pieces: Pieces) -> None:
        """Nothing waits for helpers that have not begun with a step, and they will not: its pieces are all taken."""
        late = {c for c in self._busy if pieces.take(self._door(c))}
        self._busy = [c for c in self._busy if c not in late]
        self._late |= late

    def _door(self, connection: Connection) -> str:
        return f"door {connection.fileno()}" if self._beside else ""

    def wait(self) -> None:
        """Returns when all jobs are done, or have failed: then the caller finds nothing and does them itself."""
        while self._busy:
            connection = self._busy.pop(0)
            try:
                answer = connection.recv()
            except (EOFError, OSError):
                self._lost(connection)
                continue
            self._peaks[connection] = replace(answer.peaks, device=self._devices[connection])
            if answer.failure:
                self._failed(answer.failure)

    def keep_one(self) -> None:
        """Ends all processes but one that has done what it was asked for, if there is one."""
        self._keep(self._ready()[:1])

    def keep_ready(self) -> None:
        """Ends the processes that have not done what they were asked for."""
        self._keep(self._ready())

    def _ready(self) -> list[Connection]:
        return [c for c in self._alive() if c not in self._late and c not in self._busy]

    def _keep(self, kept: Sequence[Connection]) -> None:
        if len(kept) == self.count:
            return
        # Nobody waits for those: a process takes a while to give its GPU back.
        self._ending += self._end([(p, c) for p, c in self._processes if c not in kept])
        if self._lowered:
            self._share_memory()

    def close(self) -> None:
        """Ends the processes, whatever they are at."""
        for process in [*self._end(self._processes), *self._ending]:
            process.wait()
        self._ending = []
        if self._lowered:
            self._lowered = False
            keep_within(self._machine.gpu_bytes, self._machine.devices)

    def _end(self, ending: Sequence[Started]) -> "list[subprocess.Popen[bytes]]":
        """Kills processes, and gives them back to be waited for."""
        for process, connection in ending:
            if connection not in self._peaks and (taken := _host_peak(process.pid)):
                self._peaks[connection] = Peaks(self._devices[connection], taken, None)
            connection.close()
            process.kill()
        ended, processes = {c for _, c in ending}, [p for p, _ in ending]
        self._processes = [(p, c) for p, c in self._processes if c not in ended]
        self._busy = [c for c in self._busy if c not in ended]
        return processes


def count_beside(machine: Machine, checkpoint_bytes: int) -> int:
    """How many helpers work beside the first process, on its own GPU."""
    fits = SMALLEST_CHECKPOINT <= checkpoint_bytes <= LARGEST_CHECKPOINT
    roomy = machine.gpu_bytes >= LEAST_GPU_BYTES and machine.host_bytes >= LEAST_HOST_BYTES
    if not (machine.on_gpu and len(machine.devices) == 1 and fits and roomy):
        return 0
    return max(0, min(MOST_BESIDE, machine.threads // CORES_EACH - 1))


def _host_peak(process: int) -> int:
    """The largest resident set of a process, in bytes; 0 where the system does not say."""
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return 0 if found is None else 1024 * int(found[1])
