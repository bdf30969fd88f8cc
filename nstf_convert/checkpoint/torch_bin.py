"""PyTorch .bin checkpoints, only through `torch.load(weights_only=True)`, mapped so that tensors stay lazy.

weights_only is no security boundary by itself (CVE-2025-32434, CVE-2026-24747, both fixed in torch 2.10,
which we require).
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nstf.errors import CorruptError, NstfError, UnsupportedError, out_of_memory
from nstf.runtime.artifact.atomic_file import raise_disk_fault
from nstf.runtime.artifact.header import SAFETENSORS_NAMES
from nstf_convert.checkpoint.paths import check_name, is_listed, member, open_regular, reading
from nstf_convert.checkpoint.pickled import check_pickle
from nstf_convert.checkpoint.safetensors_dir import read_index
from nstf_convert.checkpoint.source import Source, TensorInfo

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
# Bytes that tensors of a checkpoint, all its shards together, may take beyond what it stores.
MOST_REPEATED = 64 << 20


def has_weights(folder: Path) -> bool:
    """Whether the folder holds .bin weights under the standard names."""
    return is_listed(folder, INDEX) or is_listed(folder, SINGLE)


def open_folder(folder: Path) -> Source:
    """The tensors of a folder with `pytorch_model.bin` or with an index and shards."""
    if not is_listed(folder, INDEX):
        return open_file(member(folder, SINGLE, str(folder)))
    weight_map = read_index(member(folder, INDEX, str(folder)))
    if is_listed(folder, SINGLE) and SINGLE not in weight_map.values():
        raise UnsupportedError(
            f"{folder} holds two models: {SINGLE}, which transformers reads, and the shards of {INDEX}; "
            "move one of them elsewhere"
        )
    tensors: dict[str, tuple[Tensor, Path]] = {}
    for shard in sorted(set(weight_map.values())):
        path = member(folder, shard, str(folder / INDEX))
        for name, tensor in _load(path).items():
            if name in tensors:
                raise CorruptError(f"{folder}: tensor {name!r} is in two shards, one of them {shard}")
            tensors[name] = (tensor, path)
    for name, shard in weight_map.items():
        if name not in tensors:
            raise CorruptError(
                f"{folder / shard} does not hold tensor {name!r} although {INDEX} says so; download it again"
            )
    return _source(tensors)


def open_file(path: Path) -> Source:
    """The tensors of one pickled file."""
    return _source({name: (tensor, path) for name, tensor in _load(path).items()})


def _load(path: Path) -> dict[str, Tensor]:
    check_name(path)
    with open_regular(path) as file, reading(str(path)):
        head = os.pread(file.fileno(), 4, 0)
    if head[:1] == b"\x80":
        # A bare pickle cannot be mapped, so it would have to be unpickled as a whole.
        raise UnsupportedError(
            f"{path} is a plain pickle or was saved by torch before 1.6; load and save it again as safetensors"
        )
    if head != b"PK\x03\x04":
        raise CorruptError(f"{path} is not a PyTorch file (it begins with {head!r}); download it again")
    with reading(str(path)):
        check_pickle(path)
    try:
        data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        if out_of_memory(error):
            raise NstfError(f"{path}: not enough memory to map it; free some, or raise its limit") from error
        raise_disk_fault(error, f"read {path}")
        # torch raises pickle, zip, EOF, runtime and key errors here, according to where the file is broken.
        text = " ".join(str(error).split())
        if "Unsupported global" in text or "weights_only" in text or "WeightsUnpickler" in text:
            raise UnsupportedError(
                f"{path} holds Python objects besides tensors, which are never loaded; convert it to "
                f"safetensors where you trust it"
            ) from error
        raise CorruptError(
            f"{path} cannot be read as PyTorch weights ({text[:120]}); download it again"
        ) from error
    return _tensors(data, path)


def _tensors(data: Any, path: Path) -> dict[str, Tensor]:
    # By dict's own methods: a pickle may give an OrderedDict attributes that are called like them.
    if isinstance(data, dict) and isinstance(inner := dict.get(data, "state_dict"), dict):
        data = inner
    if not isinstance(data, dict) or not data:
        raise UnsupportedError(f"{path} does not hold a state dict; save the model's `state_dict()`")
    found = dict(dict.items(data))
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or not _is_plain(tensor):
            what = (
                repr(name[:80]) if isinstance(name, str) else f"what has a {type(name).__name__} as its name"
            )
            raise UnsupportedError(f"{path}: {what} is not a dense tensor; save the model's `state_dict()`")
        if (dtype := str(tensor.dtype).removeprefix("torch.")) not in SAFETENSORS_NAMES:
            raise UnsupportedError(
                f"{path}: {name[:80]!r} has the type {dtype}, which is not supported; save it as another, or leave it out"
            )
    return found


def _check_repeats(tensors: dict[str, tuple[Tensor, Path]]) -> None:
    """Strides of 0, and views that overlap, make any size of a few bytes: a mask or a scalar may, a
    checkpoint of nothing else may not."""
    repeated = 0
    views: set[tuple[Any, ...]] = set()
    left: dict[int, int] = {}  # bytes of each storage that no view stands for yet
    for name, (tensor, path) in tensors.items():
        if (view := _view(tensor)) in views:
            continue
        views.add(view)
        size, storage = tensor.numel() * tensor.itemsize, tensor.untyped_storage()
        room = left.get(storage.data_ptr(), storage.nbytes())
        repeated += max(0, size - room)
        left[storage.data_ptr()] = max(0, room - size)
        if repeated > MOST_REPEATED:
            raise UnsupportedError(
                f"{path}: {name[:80]!r} and others repeat values, {repeated} bytes more than are stored; save its tensors "
                "contiguous"
            )


def _view(tensor: Tensor) -> tuple[Any, ...]:
    """What is alike of tensors that are the same view of the same storage."""
    place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    return *place, tuple(tensor.shape), tensor.stride(), tensor.dtype


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is values in memory and nothing else. torch reads bytes of quantised tensors beyond their end (2.13)."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


def _source(tensors: dict[str, tuple[Tensor, Path]]) -> Source:
    _check_repeats(tensors)
    infos = {
        name: TensorInfo.of(tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for name, (t, _) in tensors.items()
    }

    def read(name: str) -> Tensor:
        # A copy: the mapped pages can be given back, and a change by the caller stays out of the mapping.
        return tensors[name][0].detach().clone(memory_format=torch.contiguous_format)

    def read_bytes(name: str, start: int, length: int) -> bytes:
        flat = tensors[name][0].detach()
        flat = (flat if flat.is_contiguous() else flat.contiguous()).reshape(-1).view(torch.uint8)
        return bytes(flat[start : start + length].numpy().tobytes())

    return Source(
        kind="bin",
        infos=infos,
        stored_bytes={name: info.size_bytes for name, info in infos.items()},
        read=read,
        read_bytes=read_bytes,
        describe=lambda name: str(tensors[name][1]),
        close=tensors.clear,
        aliases=_aliases(tensors),
    )


def _aliases(tensors: dict[str, tuple[Tensor, Path]]) -> dict[str, str]:
    """Names whose tensors are the same view of the same storage -> the first of them."""
    first: dict[tuple[Any, ...], str] = {}
    aliases = {}
    for name in sorted(tensors):
        tensor = tensors[name][0]
        key = _view(tensor)
        if tensor.numel() and key in first:
            aliases[name] = first[key]
        first.setdefault(key, name)
    return aliases
