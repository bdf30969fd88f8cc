"""transformers' `from_pretrained` and `save_pretrained` for encoded models, once this module is imported.

`save_pretrained` of a loaded model writes a folder that keeps the encoded form, and `from_pretrained` of that folder
gives the encoded model: its config says `"quant_method": "nstf"`, and the quantiser registered here prepares the modules.

transformers takes a path that is no folder for a repository's name and asks the network for it, for half a minute.
It has no hook for other kinds of files and no entry point, so the few methods that take a path are wrapped here: an
`.nstf` path is refused at once with the call that loads it. Anything else goes to transformers unchanged.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from nstf.errors import CorruptError, NstfError, UnsupportedError, UsageError
from nstf.runtime import citizen, folder
from nstf.runtime.artifact import Artifact
from nstf.runtime.artifact.atomic_file import disk_fault
from nstf.runtime.handed_on import files_for_others
from nstf.runtime.memory_limit import memory_ended

VERSION = 1

_LOADERS = {
    "AutoTokenizer": "load_tokenizer",
    "AutoProcessor": "load_tokenizer",
    "AutoConfig": "load",
    "PreTrainedModel": "load",
}


@register_quantization_config("nstf")
class NstfConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """tensors: parameter's name -> its tree and shape, or the name of the parameter that it shares (nstf.runtime.folder)."""

    def __init__(self, version: int = VERSION, tensors: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if version != VERSION:
            raise UnsupportedError(
                f"the folder's quantization_config is of version {version}, this nstf knows {VERSION}: update nstf"
            )
        if not isinstance(tensors, dict) or not all(isinstance(entry, dict) for entry in tensors.values()):
            raise CorruptError("the folder's quantization_config names no encoded tensors: export it again")
        self.quant_method, self.version, self.tensors = "nstf", version, tensors


@register_quantizer("nstf")
class NstfQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts encoded parameters into the skeleton before transformers fills it with what the folder holds."""

    requires_calibration = True

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        where = model.config.name_or_path or "the folder"
        device_map = kwargs.get("device_map")
        if isinstance(device_map, dict) and "disk" in device_map.values():
            # accelerate moves parameters between disk and device as layers run; encoded weights are buffers.
            raise UnsupportedError(
                f"{where}: encoded weights are not offloaded to disk: give a device_map or max_memory without it, or use "
                "nstf.runtime.load on the .nstf file, which the system reads from disk as layers run"
            )
        folder.prepare(model, self.quantization_config.tensors, where, torch.get_default_dtype())

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        folder.finish(model)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        return folder.state_dict(model), {}

    def is_serializable(self, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters train on it; its own weights do not."""
        return True


def save(model: Any, plain: Any, directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
    """save_pretrained of a loaded model. plain: that of its class in transformers."""
    config = NstfConfig(tensors=folder.describe(model))
    generation = getattr(model, "generation_config", None)
    before = model.__dict__.get("hf_quantizer")
    model.hf_quantizer = NstfQuantizer(config)
    model.config.quantization_config = config
    try:
        with _settings_as_they_are(generation):
            # The arrays go by the modules' names: there is no older format of them to write.
            plain(directory, *args, **{"save_original_format": False, **kwargs})
    finally:
        if before is None:
            del model.hf_quantizer
            del model.config.quantization_config
        else:
            model.hf_quantizer = before


@contextmanager
def _settings_as_they_are(generation: Any) -> Iterator[None]:
    """Inside, generation settings are written that transformers only warns of when it reads them: a temperature beside
    `do_sample: false`, which many models of the hub have. It refuses to write those."""
    own = type(generation)
    if generation is None:
        yield
        return

    def validate(self: Any, strict: bool = False, *args: Any, **kwargs: Any) -> None:
        own.validate(self, False, *args, **kwargs)

    generation.__class__ = type(own.__name__, (own,), {"validate": validate})
    try:
        yield
    finally:
        generation.__class__ = own


citizen.save_with = save


def write_encoded(artifact: Artifact, folder: Path, shard_bytes: int) -> None:
    """Writes the encoded form of an open artifact into `folder`, which exists.

    shard_bytes: largest weight file. Raises what `nstf.runtime.load` raises, UnsupportedError for a model that is none of
    transformers' own classes, and OSError.
    """
    from nstf.runtime import load

    model: Any = load(artifact.path, engine="off")
    if artifact.again() is None:  # what is open is the older one, and its tokenizer is not the model's
        raise NstfError(f"{artifact.path}: another file took its place while it was exported; export again")
    if not isinstance(model, citizen.EncodedModel):
        raise UnsupportedError(f"{artifact.path}: transformers saves no {type(model).__name__}")
    for name, content in files_for_others(artifact):
        (folder / name).write_bytes(content)
    try:
        with _no_bar():
            model.save_pretrained(folder, max_shard_size=shard_bytes)
    except (OSError, NstfError):
        raise
    except Exception as error:  # of many classes, from settings that transformers takes when it opens a model
        if memory_ended(error) or disk_fault(error) is not None:
            raise
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedError(
            f"{artifact.path}: transformers does not save a model with this config ({reason}): export to another target"
        ) from error


@contextmanager
def _no_bar() -> Iterator[None]:
    """transformers draws a bar of its own while it writes, beside ours and with `--quiet`."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def refuse_artifact(source: object, loader: str) -> None:
    """Raises UsageError when `source` is the path of an .nstf file. loader: the function of nstf.runtime that reads it."""
    if not isinstance(source, str | os.PathLike):
        return
    path = os.fspath(source)
    if not isinstance(path, str) or not path.lower().endswith(".nstf") or Path(path).is_dir():
        return
    missing = not Path(path).is_file()
    # A repository may be called so, and is left to transformers.
    if not missing or path.count("/") != 1 or path.startswith((".", "~", "/")):
        said = " (and there is no such file)" if missing else ""
        raise UsageError(
            f"{path} is an .nstf file{said}, which from_pretrained does not read: use nstf.runtime.{loader}({path!r}), "
            f"or write a folder for from_pretrained with: nstf export {path} -o folder"
        )


def _guard(owner: Any, loader: str) -> None:
    original = owner.from_pretrained.__func__
    if getattr(original, "nstf_guarded", False):
        return

    @wraps(original)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_artifact(kwargs.get("pretrained_model_name_or_path", args[0] if args else None), loader)
        return original(cls, *args, **kwargs)

    from_pretrained.nstf_guarded = True  # type: ignore[attr-defined]
    owner.from_pretrained = classmethod(from_pretrained)


def _install() -> None:
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    # Auto classes that were imported before have copies of the base's method.
    for owner in (_BaseAutoModelClass, *_BaseAutoModelClass.__subclasses__()):
        if "from_pretrained" in vars(owner):
            _guard(owner, "load")
    for name, loader in _LOADERS.items():
        _guard(getattr(transformers, name), loader)


_install()
