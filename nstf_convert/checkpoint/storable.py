"""Whether an artifact can hold a checkpoint's tensors: asked before the work, not when the file is written."""

from typing import Any

from nstf.errors import UnsupportedError
from nstf.kernels.formats import dense
from nstf.kernels.formats.tree import MAX_DIMS
from nstf.runtime.artifact.header import short
from nstf.runtime.artifact.manifest import check_tensor_name


def check_storable(checkpoint: Any) -> None:
    """Raises UnsupportedError for a tensor of a type, shape or name that an artifact cannot hold."""
    for name in checkpoint.names():
        if reason := _reason(name, checkpoint.info(name)):
            raise UnsupportedError(f"{checkpoint.path}: tensor {short(name)} {reason}, or leave it out")


def _reason(name: str, info: Any) -> str:
    """Why a tensor cannot be held and what to do, or ""."""
    if info.dtype not in dense.DTYPES:
        return f"has the type {info.dtype}, which is not supported; save it as another"
    if len(info.shape) > MAX_DIMS or any(size < 1 for size in info.shape):
        return (
            f"has the shape {short(list(info.shape), 60)}; up to {MAX_DIMS} dimensions of at least 1 are supported; "
            "save it in another"
        )
    try:
        check_tensor_name(name)
    except ValueError as error:
        return f"has a name that no artifact can hold ({error}); rename it"
    return ""
