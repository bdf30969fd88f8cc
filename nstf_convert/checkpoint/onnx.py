from pathlib import Path

from nstf.errors import UnsupportedError
from nstf_convert.checkpoint.base import Checkpoint


def open_file(path: Path) -> Checkpoint:
    raise UnsupportedError(f"{path}: onnx")
