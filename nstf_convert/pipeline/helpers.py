"""Further GPUs: a process each, which makes results ahead and leaves them in the work directory.

The process of the first GPU does the whole conversion. What a helper has put into the work directory it finds there, under
the address of its content, instead of making it: the file is the same bytes for any number of GPUs, and a helper that
fails costs time and nothing else. Processes, since the precision of matrix products is a setting of the whole process.
"""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

from nstf_convert.options import ConvertOptions
from nstf_convert.pipeline.machine import Machine, keep_within
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import Unit

if TYPE_CHECKING:
    from nstf_convert.pipeline.session import Session

log = logging.getLogger("nstf")

GONE = "it ended; a Python script that converts needs `if __name__ == '__main__':`"

Mix = Mapping[str, Recipe]


@dataclass(frozen=True)
class Job:
    """A mix to encode: front to back or every tensor on its own; `corrected` as in `encode_in_prefix`."""

    mix: Mix
    front_to_back: bool
    corrected: bool


class Helpers:
    """The processes of all GPUs but the first. They start at once, and open the model with their first job."""

    def __init__(self, options: ConvertOptions, folder: Path, machine: Machine) -> None:
        """machine: of the first process; each helper takes one of the further devices and keeps to the same bounds, which
        decide about bytes. The host's memory is shared out."""
        share, devices = machine.host_bytes // len(machine.devices), machine.devices[1:]
        context = multiprocessing.get_context("spawn")
        self._processes = []
        self._busy: list[Connection] = []
        for device in devices:
            ours, theirs = context.Pipe()
            own = replace(options, device=str(device), work_dir=folder)
            bounds = replace(machine, devices=(device,), host_bytes=share)
            process = context.Process(target=_serve, args=(theirs, own, bounds), daemon=True)
            process.start()
            theirs.close()
            self._processes.append((process, ours))

    def start(self, jobs: Sequence[Job]) -> None:
        """Begins with jobs, in turn on each GPU. Those of earlier calls must be done."""
        for i, job in enumerate(jobs if self._processes else ()):
            connection = self._processes[i % len(self._processes)][1]
            try:
                connection.send(job)
                self._busy.append(connection)
            except OSError:
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
                failure = connection.recv()
            except (EOFError, OSError):
                failure = GONE
            if failure:
                _failed(failure)

    def close(self) -> None:
        """Ends the processes, whatever they are at."""
        for process, connection in self._processes:
            connection.close()
            process.terminate()
            process.join()
        self._processes, self._busy = [], []


def _failed(why: str) -> None:
    log.warning("another GPU's process failed (%s): its work is done on the first one", why)


def _serve(connection: Connection, options: ConvertOptions, bounds: Machine) -> None:
    """What a helper does: jobs, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process decides what an interruption means
    threading.Thread(target=_end_with_parent, daemon=True).start()
    session: Session | None = None
    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError):
            break
        try:
            if session is None:
                session = _session(options, bounds)
            _encode(session, job)
            failure = ""
        except Exception as error:
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
        try:
            connection.send(failure)
        except OSError:
            break


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


def _encode(session: "Session", job: Job) -> None:
    from nstf_convert.pipeline.improve.front_to_back import encode_in_prefix

    def silent(unit: Unit) -> None:
        """Progress is the first process's."""

    session.wait_for_kernels()
    if job.front_to_back:
        encode_in_prefix(session, job.mix, silent, job.corrected)
    else:
        session.encoder.encode_all([(session.units[n], r) for n, r in job.mix.items()], silent)
