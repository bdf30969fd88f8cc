"""`nstf calibrate`: the calibration alone, as a file that several conversions can share."""

import os
from pathlib import Path

from nstf.errors import NstfError, UnsupportedError, UsageError
from nstf.runtime.artifact.atomic_file import CHUNK_BYTES, replacing
from nstf_convert.inputs import check_still_free, keep_inputs
from nstf_convert.options import ConvertOptions
from nstf_convert.pipeline.attention import possible
from nstf_convert.pipeline.attention.plan import write_with_profile
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.session import Session

# In the work directory: the calibration with the attention profile.
PROFILED = "profiled.safetensors"


def calibrate(options: ConvertOptions) -> Path:
    """Writes the calibration file at `options.output`. Raises UnsupportedError for a model that cannot be run."""
    if options.calibration is not None:
        raise UsageError("calibrate makes a calibration file, it does not take one: leave it out")
    keep_inputs(options.output, [options.model, *options.datasets])
    if os.path.lexists(options.output) and not options.force:
        raise UsageError(f"{options.output} exists: give another output, or force to replace it")
    check = possible.check if options.context is not None else None
    with Session(options, Stages(), only_calibrates=True, check=check) as session:
        if session.calibration is None:
            raise UnsupportedError(f"{options.model} cannot be calibrated: {session.model_reason}")
        made = session.calibration.path
        if options.context is not None:
            # There, so that what a kill leaves is found by the next run.
            profiled = session.work.path / PROFILED
            write_with_profile(session, session.calibration, profiled)
            made = profiled
        session.job.check_checkpoint()
        check_still_free(options.output, options.force)
        keep = not options.force
        try:
            with made.open("rb") as file, replacing(options.output, made.stat().st_size, keep) as out:
                at = 0
                while chunk := file.read(CHUNK_BYTES):
                    out.write(at, memoryview(chunk))
                    at += len(chunk)
        except OSError as error:
            raise NstfError(
                f"{made}: cannot be read ({error.strerror}); check the disk, and run again"
            ) from error
    return options.output
