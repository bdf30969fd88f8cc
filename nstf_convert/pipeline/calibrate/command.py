"""`nstf calibrate`: the calibration alone, as a file that several conversions can share."""

import shutil
from pathlib import Path

from nstf.errors import UnsupportedError, UsageError
from nstf_convert.options import ConvertOptions
from nstf_convert.pipeline.attention.plan import write_with_profile
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.session import Session
from nstf_convert.pipeline.store.tensorfile import sync_folder


def calibrate(options: ConvertOptions) -> Path:
    """Writes the calibration file at `options.output`. Raises UnsupportedError for a model that cannot be run."""
    if options.calibration is not None:
        raise UsageError("calibrate makes a calibration file, it does not take one: leave it out")
    if options.output.exists() and not options.force:
        raise UsageError(f"{options.output} exists: give another output, or force to replace it")
    with Session(options, Stages(), may_drop=False) as session:
        if session.calibration is None:
            raise UnsupportedError(f"{options.model} cannot be calibrated: {session.model_reason}")
        partial = options.output.with_name(f".{options.output.name}.part")
        try:
            if options.context is None:
                shutil.copyfile(session.calibration.path, partial)
            else:
                write_with_profile(session, session.calibration, partial)
            partial.replace(options.output)
            sync_folder(options.output.parent)
        finally:
            partial.unlink(missing_ok=True)
    return options.output
