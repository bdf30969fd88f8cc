"""The stages of a conversion and what runs them. `convert`, `plan` and `calibrate` are the library's entry points."""

from nstf_convert.budget import Budget
from nstf_convert.options import ConvertOptions, ConvertResult
from nstf_convert.pipeline.calibrate.command import calibrate
from nstf_convert.pipeline.convert import convert, frontier, plan

__all__ = ["Budget", "ConvertOptions", "ConvertResult", "calibrate", "convert", "frontier", "plan"]
