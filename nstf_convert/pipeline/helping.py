"""What a helper's process does (nstf_convert.pipeline.helpers): jobs, until the first process ends it."""

import logging
import os
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

from nstf.runtime.imports import uncollected
from nstf_convert.pipeline.calibrate.batches import domains
from nstf_convert.pipeline.calibrate.make import help_with
from nstf_convert.pipeline.calibrate.share import CANDIDATES, FEW_BITS, SharedStep
from nstf_convert.pipeline.helpers import Answer, Encoding, Job, Rehearsal, Start
from nstf_convert.pipeline.improve.passes import encode_in_pass
from nstf_convert.pipeline.machine import keep_within
from nstf_convert.pipeline.mix import REFERENCES, measure
from nstf_convert.pipeline.progress import Stages, peaks
from nstf_convert.pipeline.propose.rehearsal import rehearse
from nstf_convert.pipeline.propose.table import leave_at_few_bits, leave_candidates
from nstf_convert.pipeline.propose.units import Unit
from nstf_convert.pipeline.session import Session

log = logging.getLogger("nstf")


def main(descriptor: int) -> None:
    """The whole of a helper. descriptor: of its end of the connection to the first process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    connection = Connection(descriptor)
    with suppress(Exception), uncollected():  # what is wrong with it is told with the first job
        import transformers.modeling_utils  # noqa: F401  # what every model of transformers' needs, while there is time
    with suppress(EOFError, OSError):
        serve(connection, connection.recv())


def serve(connection: Connection, start: Start) -> None:
    """Does jobs until the other end is closed."""
    session: Session | None = None
    joined, failure = False, ""
    try:
        session = _session(start)
    except Exception as error:  # told with the first job
        failure = _told(error)
    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError):
            break
        if isinstance(job, Rehearsal):
            _prepare(session)
            continue
        if session is not None:
            try:
                if not joined:
                    session.join()
                joined, failure = True, ""
                _do(session, job)
            except Exception as error:
                failure = _told(error)
        try:
            connection.send(Answer(failure, peaks(start.bounds.device)))
        except OSError:
            break


def _prepare(session: Session | None) -> None:
    try:
        if session is not None:
            rehearse(session)
    except Exception as error:  # the work itself will say what is wrong
        log.debug("rehearsing: %s", error)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _end_with_parent() -> None:
    """A first process that is killed cannot end its helpers: these would go on for hours, and keep their GPU."""
    while os.read(0, 1):
        pass
    os._exit(1)


def _session(start: Start) -> Session:
    if start.bounds.on_gpu:
        keep_within(start.gpu_bytes, start.bounds.devices)
    return Session(start.options, Stages(), given=start.bounds, any_size=start.any_size)


def _do(session: Session, job: Job | Encoding | SharedStep) -> None:
    def silent(unit: Unit) -> None:
        """Progress is the first process's."""

    if isinstance(job, SharedStep) and job.step not in (CANDIDATES, FEW_BITS):
        help_with(session, job)
    else:
        session.share_calibration()
    if isinstance(job, SharedStep) and job.step == CANDIDATES:
        leave_candidates(session, job)
    if isinstance(job, SharedStep) and job.step == FEW_BITS:
        leave_at_few_bits(session, job)
    if isinstance(job, SharedStep):
        return
    if isinstance(job, Encoding):
        for mix in job.mixes:
            session.compile_for(mix)
            session.encoder.encode_all([(session.units[n], r) for n, r in mix.items()], silent)
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
