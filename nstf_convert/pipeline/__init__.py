"""The stages of a conversion and what runs them. `convert`, `plan` and `calibrate` are the library's entry points."""

from nstf_convert.pipeline.budget import Budget
from nstf_convert.pipeline.calibration_file import calibrate
from nstf_convert.pipeline.convert import convert, plan
from nstf_convert.pipeline.options import ConvertOptions, ConvertResult

__all__ = ["Budget", "ConvertOptions", "ConvertResult", "calibrate", "convert", "plan"]
