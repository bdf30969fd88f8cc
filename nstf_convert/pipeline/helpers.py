"""Further GPUs: a process each, which makes results and leaves them in the work directory.

The process of the first GPU does the whole conversion. What a helper has put into the work directory it finds there, under
the address of its content, instead of making it: the file is the same bytes for any number of GPUs, and a helper that
fails costs time and nothing else. Processes, since the precision of matrix products is a setting of the whole process.

Helpers take a part of the calibration (nstf_convert.pipeline.calibrate.share), and encode and measure the best single
formats while the first process does so with the mix.
"""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nstf_convert.options import ConvertOptions
from nstf_convert.pipeline.calibrate.share import CANDIDATES, SharedStep
from nstf_convert.pipeline.machine import Machine, keep_within
from nstf_convert.pipeline.progress import Peaks, Stages, peaks
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import Unit

if TYPE_CHECKING:
    from nstf_convert.pipeline.session import Session

log = logging.getLogger("nstf")

# Which GPUs a process sees; on AMD's the first of these that is set.
VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
GONE = "it ended; a Python script that converts needs `if __name__ == '__main__':`"

Mix = Mapping[str, Recipe]


@dataclass(frozen=True)
class Job:
    """A mix to encode and measure: in the pass over the layers that the options ask for, or every tensor on its own."""

    mix: Mix
    in_pass: bool


@dataclass(frozen=True)
class Answer:
    """To a job. failure: why it was not done, else empty; peaks: of the helper's memory so far."""

    failure: str
    peaks: Peaks


class Helpers:
    """The processes of all GPUs but the first. They open the model at once, and the work directory with their first job."""

    def __init__(self, options: ConvertOptions, folder: Path, machine: Machine) -> None:
        """machine: of the first process; each helper takes one of the further devices and keeps to the same bounds, which
        decide about bytes. The host's memory is shared out."""
        share, devices = machine.host_bytes // len(machine.devices), machine.devices[1:]
        context = multiprocessing.get_context("spawn")
        self._processes = []
        self._busy: list[Connection] = []
        self._gone: set[Connection] = set()
        self._peaks: dict[Connection, Peaks] = {}
        self._devices: dict[Connection, str] = {}
        for device in devices:
            ours, theirs = context.Pipe()
            alone = torch.device("cuda", 0) if device.type == "cuda" else device
            own = replace(options, device=str(alone), work_dir=folder)
            bounds = replace(machine, devices=(alone,), host_bytes=share)
            process = context.Process(target=_serve, args=(theirs, own, bounds), daemon=True)
            with _seeing_only(device):
                process.start()
            theirs.close()
            self._processes.append((process, ours))
            self._devices[ours] = str(device)

    @property
    def any(self) -> bool:
        """Whether there is another GPU whose process is alive."""
        return bool(self._alive())

    @property
    def peaks(self) -> list[Peaks]:
        """What each helper had taken of memory when it last answered."""
        return list(self._peaks.values())

    def _alive(self) -> list[Connection]:
        return [c for _, c in self._processes if c not in self._gone]

    def start(self, jobs: Sequence[Job]) -> None:
        """Begins with jobs, in turn on each GPU."""
        for connection, job in zip(cycle(self._alive()), jobs, strict=False):
            self._send(connection, job)

    def start_all(self, job: SharedStep) -> None:
        """Begins with a job that all GPUs share."""
        for connection in self._alive():
            self._send(connection, job)

    def _send(self, connection: Connection, job: Job | SharedStep) -> None:
        try:
            connection.send(job)
            self._busy.append(connection)
        except OSError:
            self._lost(connection)

    def _lost(self, connection: Connection) -> None:
        if connection not in self._gone:
            self._gone.add(connection)
            _failed(GONE)

    @property
    def busy(self) -> bool:
        """Whether jobs were begun that nobody has waited for."""
        return bool(self._busy)

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
                _failed(answer.failure)

    def close(self) -> None:
        """Ends the processes, whatever they are at."""
        for process, connection in self._processes:
            connection.close()
            process.terminate()
            process.join()
        self._processes, self._busy = [], []


@contextmanager
def _seeing_only(device: torch.device) -> Iterator[None]:
    """A process that starts inside has this GPU for its first and only one: what asks for the current device, as graphs and
    compiled kernels do, gets that one in every thread."""
    if device.type != "cuda":
        yield
        return
    name = visible_name(torch.version.hip is not None, os.environ)
    before = os.environ.get(name)
    os.environ[name] = visible_as(device.index or 0, before)
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def visible_name(amd: bool, environment: Mapping[str, str]) -> str:
    """The variable that says which GPUs are seen."""
    return VISIBLE[0] if amd and VISIBLE[0] in environment else VISIBLE[1]


def visible_as(index: int, visible: str | None) -> str:
    """What CUDA calls the GPU that torch numbers `index` where `visible` (None: nothing) restricts what is seen."""
    return str(index) if visible is None else visible.split(",")[index].strip()


def _failed(why: str) -> None:
    log.warning("another GPU's process failed (%s): its work is done on the first one", why)


def _serve(connection: Connection, options: ConvertOptions, bounds: Machine) -> None:
    """What a helper does: jobs, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process decides what an interruption means
    threading.Thread(target=_end_with_parent, daemon=True).start()
    session: Session | None = None
    joined, failure = False, ""
    try:
        session = _session(options, bounds)
    except Exception as error:  # told with the first job
        failure = _told(error)
    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError):
            break
        if session is not None:
            try:
                if not joined:
                    session.join()
                joined, failure = True, ""
                _do(session, job)
            except Exception as error:
                failure = _told(error)
        try:
            connection.send(Answer(failure, peaks(bounds.device)))
        except OSError:
            break


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _end_with_parent() -> None:
    """A first process that is killed cannot end its helpers: these would go on for hours, and keep their GPU."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _session(options: ConvertOptions, bounds: Machine) -> "Session":
    from nstf_convert.pipeline.session import Session  # which starts the helpers

    if bounds.on_gpu:
        keep_within(bounds.gpu_bytes, bounds.devices)
    return Session(options, Stages(), given=bounds)


def _do(session: "Session", job: Job | SharedStep) -> None:
    from nstf_convert.pipeline.calibrate.batches import domains
    from nstf_convert.pipeline.calibrate.make import help_with
    from nstf_convert.pipeline.improve.passes import encode_in_pass
    from nstf_convert.pipeline.mix import REFERENCES, measure
    from nstf_convert.pipeline.propose.table import leave_candidates

    def silent(unit: Unit) -> None:
        """Progress is the first process's."""

    if isinstance(job, SharedStep) and job.step != CANDIDATES:
        help_with(session, job)
    else:
        session.share_calibration()
    if isinstance(job, SharedStep) and job.step == CANDIDATES:
        leave_candidates(session, job)
    if isinstance(job, SharedStep):
        return
    session.compile_for(job.mix)
    load = None
    if job.in_pass:
        load = encode_in_pass(session, job.mix, silent).loader()
    else:
        session.encoder.encode_all([(session.units[n], r) for n, r in job.mix.items()], silent)
    for split in REFERENCES:
        if session.calibration is not None and domains(session.calibration, split):
            measure(session, job.mix, split, load)
