"""Which reader opens what."""

import stat
from pathlib import Path
from typing import Any

from nstf.errors import CorruptError, NstfError, UnsupportedError, UsageError
from nstf_convert.checkpoint import gguf, hub, onnx, safetensors_dir, torch_bin
from nstf_convert.checkpoint.base import Checkpoint
from nstf_convert.checkpoint.config import CutLabels, filter_config
from nstf_convert.checkpoint.json_text import load_json
from nstf_convert.checkpoint.naming import plan_names
from nstf_convert.checkpoint.paths import (
    check_path,
    exists,
    expanded,
    is_link,
    is_listed,
    member,
    names_in,
    open_regular,
    pread_all,
    read_small,
)
from nstf_convert.checkpoint.side_files import read_side_files
from nstf_convert.checkpoint.source import Source

MAX_CONFIG_BYTES = 16 << 20
PICKLES = (".bin", ".pt", ".pth")
# Beside the weights of an adapter (PEFT).
# Of what is left out of a config.json, named in what is said about it.
NAMED = 50
ADAPTER = "adapter_config.json"


def open_any(path_or_name: object, allow_pickle: bool) -> Checkpoint:
    """The checkpoint at a path or of a hub name."""
    text = str(path_or_name)
    if not text or "\x00" in text:
        raise UsageError(
            "the model's path is empty; give a folder, a .gguf, .safetensors or .onnx file, or a hub name"
        )
    path = expanded(text)
    check_path(path)
    if not exists(path):
        if is_link(path):
            raise UsageError(f"{path} is a dangling link; give an existing model")
        if not hub.is_hub_name(text):
            raise UsageError(
                f"{path} does not exist; give a model folder, a model file or a hub name such as org/model"
            )
        path = hub.download(text)
    if path.is_dir():
        return open_folder(path, allow_pickle)
    if not stat.S_ISREG(path.stat().st_mode):
        raise UnsupportedError(f"{path} is not a regular file; give a model folder or a model file")
    return open_file(path, allow_pickle)


def open_folder(folder: Path, allow_pickle: bool) -> Checkpoint:
    """A Hugging Face folder: safetensors before .bin; a single .gguf or .onnx file in it is opened as itself."""
    if safetensors_dir.has_weights(folder):
        return _with_config(folder, folder, safetensors_dir.open_folder(folder))
    if torch_bin.has_weights(folder):
        _refuse_pickle(folder, allow_pickle)
        return _with_config(folder, folder, torch_bin.open_folder(folder))
    inside = names_in(folder)
    if ADAPTER in inside:
        raise _adapter(folder)
    for suffix in (".gguf", ".safetensors", ".onnx"):
        files = [name for name in inside if name.endswith(suffix)]
        if len(files) == 1:
            return open_file(member(folder, files[0], str(folder)), allow_pickle)
        if len(files) > 1:
            raise UsageError(
                f"{folder} holds {len(files)} {suffix} files ({', '.join(files[:3])}); give one of them"
            )
    names = ", ".join(inside[:5]) or "nothing"
    raise UsageError(
        f"{folder} holds no weights (model.safetensors, its index, pytorch_model.bin, .gguf or .onnx), but "
        f"{names}; "
        f"give the folder of a model"
    )


def open_file(path: Path, allow_pickle: bool) -> Checkpoint:
    """A single file, told apart by its first bytes and its name."""
    with open_regular(path) as file:
        size = path.stat().st_size
        head = pread_all(file, 0, min(16, size), str(path))
    if path.name.endswith(".nstf"):
        raise UsageError(
            f"{path} is an nstf artifact, not a model to convert; run `nstf inspect` on it or give the "
            f"original model"
        )
    if head[:4] == b"GGUF":
        return gguf.open_file(path)
    if path.suffix == ".gguf":
        raise CorruptError(
            f"{path} does not begin with the GGUF magic but with {head[:4]!r}; download it again"
        )
    if path.suffix == ".safetensors":
        return _with_config(path, path.parent, safetensors_dir.open_file(path))
    if path.suffix == ".onnx":
        return onnx.open_file(path)
    if path.suffix in PICKLES:
        _refuse_pickle(path, allow_pickle)
        return _with_config(path, path.parent, torch_bin.open_file(path))
    raise UnsupportedError(
        f"{path} is of an unknown kind; give a model folder or a .safetensors, .bin, .gguf or .onnx file"
    )


def _refuse_pickle(path: Path, allow_pickle: bool) -> None:
    if not allow_pickle:
        raise UnsupportedError(
            f"{path} holds pickled weights, which were not allowed; give a safetensors model or allow them"
        )


def _adapter(path: Path) -> UnsupportedError:
    """What is said of an adapter: its few matrices would become a model of their own."""
    return UnsupportedError(
        f"{path} is an adapter of PEFT, not a model: merge it into the model it was made for (merge_and_unload) and "
        "save that, or load it on the converted model"
    )


def _refuse_adapter(path: Path, source: Source) -> None:
    """Raises UnsupportedError for an adapter's file that is given alone, by its name or by those of its tensors; a model may
    have matrices of LoRA as a part of it."""
    named = path.stem == "adapter_model" and is_listed(path.parent, ADAPTER)
    lora = [name for name in source.infos if ".lora_" in name]
    if named or (lora and all(n in lora or n.startswith("base_model.model.") for n in source.infos)):
        raise _adapter(path)


def _with_config(path: Path, folder: Path, source: Source) -> Checkpoint:
    """The source with names and side files that follow from the folder's config.json, if it has one."""
    try:
        config: dict[str, Any] | None = None
        notes: tuple[str, ...] = ()
        _refuse_adapter(path, source)
        if is_listed(folder, ADAPTER):
            notes += (f"{ADAPTER}: the adapter beside the model is not part of what is converted",)
        if is_listed(folder, "config.json"):
            file = member(folder, "config.json", str(folder))
            raw = load_json(read_small(file, MAX_CONFIG_BYTES), str(file))
            config, dropped = filter_config(raw, str(file))
            if dropped:
                dropped.sort(key=lambda name: not isinstance(name, CutLabels))
                more = f" and {len(dropped) - NAMED} more" if len(dropped) > NAMED else ""
                notes += (f"config.json: left out {', '.join(dropped[:NAMED])}{more}",)
        plan = plan_names(source.infos, config, str(path))
        if config is not None and plan.architecture is not None:
            config["architectures"] = [plan.architecture]
        return Checkpoint(path, source, plan, config, lambda: read_side_files(folder), notes)
    except NstfError:
        source.close()
        raise
