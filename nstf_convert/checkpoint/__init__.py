"""Reading models: Hugging Face folders, safetensors, .bin, GGUF and ONNX files, and names on the hub."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nstf_convert.checkpoint.base import Checkpoint as Checkpoint
    from nstf_convert.checkpoint.source import TensorInfo as TensorInfo

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]


def open_checkpoint(path_or_name: object, allow_pickle: bool = True) -> "Checkpoint":
    """The model at a path, or of that name on the hub (`org/model`).

    allow_pickle: whether `.bin` files may be read (through `torch.load(weights_only=True)`).
    Raises UsageError (no such thing), UnsupportedError (a kind that cannot be read) or CorruptError.
    """
    from nstf_convert.checkpoint.dispatch import open_any

    return open_any(path_or_name, allow_pickle)


def __getattr__(name: str) -> object:
    # torch must not be imported for `nstf --help`.
    if name == "Checkpoint":
        from nstf_convert.checkpoint.base import Checkpoint

        return Checkpoint
    if name == "TensorInfo":
        from nstf_convert.checkpoint.source import TensorInfo

        return TensorInfo
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
