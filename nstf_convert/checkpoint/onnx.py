from pathlib import Path
from nstf_convert.checkpoint.base import Checkpoint
from nstf.errors import UnsupportedError
def open_file(path: Path) -> Checkpoint:
    raise UnsupportedError(f"{path}: onnx")
