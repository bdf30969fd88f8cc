"""safetensors checkpoints: one file, or shards with `model.safetensors.index.json`."""

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from nstf.errors import CorruptError, UnsupportedError
from nstf.runtime.artifact.header import TORCH_NAMES, parse_header
from nstf_convert.checkpoint.json_text import load_json
from nstf_convert.checkpoint.memory import empty
from nstf_convert.checkpoint.paths import (
    exists,
    is_bare_name,
    is_listed,
    member,
    open_regular,
    pread_all,
    read_into,
    read_small,
)
from nstf_convert.checkpoint.source import Source, TensorInfo

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Of shards: those of PyTorch have an index of the same form.
ENDINGS = (".safetensors", ".bin", ".pt", ".pth")
MAX_INDEX_BYTES = 256 << 20


@dataclass(frozen=True)
class Entry:
    """Where one tensor lives: an open file, its path, and the byte range."""

    file: BinaryIO
    path: Path
    start: int
    info: TensorInfo


def open_file(path: Path) -> Source:
    """The tensors of one .safetensors file."""
    return _source(_entries(path))


def open_folder(folder: Path) -> Source:
    """The tensors of a folder with `model.safetensors` or with an index and shards."""
    if is_listed(folder, INDEX):
        return _source(_sharded(folder))
    return open_file(member(folder, SINGLE, str(folder)))


def has_weights(folder: Path) -> bool:
    """Whether the folder holds safetensors weights under the standard names."""
    return is_listed(folder, INDEX) or is_listed(folder, SINGLE)


def _sharded(folder: Path) -> dict[str, Entry]:
    weight_map = read_index(member(folder, INDEX, str(folder)))
    found: dict[str, Entry] = {}
    for shard in sorted(set(weight_map.values())):
        entries = _entries(member(folder, shard, str(folder / INDEX)))
        double = sorted(found.keys() & entries.keys())
        if double:
            raise CorruptError(f"{folder}: tensor {double[0]!r} is in two shards, one of them {shard}")
        found |= entries
    for name, shard in weight_map.items():
        if name not in found or found[name].path.name != shard:
            raise CorruptError(
                f"{folder / shard} does not hold tensor {name!r} although {INDEX} says so; download it again"
            )
    if exists(folder / SINGLE) and SINGLE not in weight_map.values():
        raise UnsupportedError(
            f"{folder} holds two models: {SINGLE}, which transformers reads, and the shards of {INDEX}; "
            "move one of them elsewhere"
        )
    return found


def read_index(path: Path) -> dict[str, str]:
    """`weight_map` of an index file: tensor name -> shard file name. Raises CorruptError."""
    data = load_json(read_small(path, MAX_INDEX_BYTES), str(path))
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptError(f"{path} has no 'weight_map' object; download it again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CorruptError(f"{path}: the shard of tensor {name[:80]!r} is not a file name")
        # Files of other endings in a model's folder are taken for ours, and may be written over (inputs.py).
        if is_bare_name(shard) and not shard.endswith(ENDINGS):
            raise CorruptError(
                f"{path}: the shard {shard[:80]!r} does not end in {' or '.join(ENDINGS)}; download the checkpoint again"
            )
    return weight_map


def _entries(path: Path) -> dict[str, Entry]:
    header, _ = parse_header(path)
    infos = {}
    for name, spec in header.items():
        if spec.dtype not in TORCH_NAMES:
            raise UnsupportedError(
                f"{path}: tensor {name[:80]!r} has dtype {spec.dtype}, which torch does not have; give a 16- "
                f"or 32-bit model"
            )
        infos[name] = TensorInfo.of(spec.shape, TORCH_NAMES[spec.dtype])
    file = open_regular(path)
    return {name: Entry(file, path, header[name].start, info) for name, info in infos.items()}


def _source(entries: dict[str, Entry]) -> Source:
    def read(name: str) -> Tensor:
        entry = entries[name]
        dtype = getattr(torch, entry.info.dtype)
        if entry.info.size_bytes == 0:
            return torch.empty(entry.info.shape, dtype=dtype)
        raw = empty([entry.info.size_bytes], torch.uint8)
        read_into(entry.file, entry.start, raw.numpy().data, f"{entry.path}: tensor {name!r}")
        return raw.view(dtype).reshape(entry.info.shape)

    def read_bytes(name: str, start: int, length: int) -> bytes:
        entry = entries[name]
        return pread_all(entry.file, entry.start + start, length, f"{entry.path}: tensor {name!r}")

    def close() -> None:
        for entry in entries.values():
            entry.file.close()

    return Source(
        kind="safetensors",
        infos={name: entry.info for name, entry in entries.items()},
        stored_bytes={name: entry.info.size_bytes for name, entry in entries.items()},
        read=read,
        read_bytes=read_bytes,
        describe=lambda name: str(entries[name].path),
        close=close,
    )
