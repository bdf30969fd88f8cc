"""Weights of a folder as safetensors, one array in memory at a time, in files of a largest size."""

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nstf.runtime.artifact.header import SAFETENSORS_NAMES, build_header

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Array:
    """An array to write: its torch dtype and shape, and the function that makes it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Names in order, cut so that a shard stays within `shard_bytes` unless it is one tensor."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def write_weights(arrays: Mapping[str, Array], folder: Path, shard_bytes: int) -> None:
    """Writes `model.safetensors`, or shards with their index."""
    sizes = {name: array.size_bytes for name, array in arrays.items()}
    groups = shards(sizes, shard_bytes)
    where: dict[str, str] = {}
    for number, names in enumerate(groups, 1):
        single = len(groups) == 1
        file = "model.safetensors" if single else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_shard(folder / file, {name: arrays[name] for name in names})
        where |= dict.fromkeys(names, file)
        log.info("wrote %s, %d tensors", file, len(names))
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(where.items()))}
        (folder / "model.safetensors.index.json").write_bytes(json.dumps(index, indent=2).encode() + b"\n")


def write_shard(path: Path, arrays: Mapping[str, Array]) -> None:
    """Writes one safetensors file."""
    known = {n: (SAFETENSORS_NAMES[str(a.dtype).removeprefix("torch.")], a.shape) for n, a in arrays.items()}
    # transformers reads "format" to know which framework wrote the file.
    header, entries = build_header(known, {"format": "pt"})
    with path.open("wb") as out:
        out.write(header)
        for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
            out.seek(entry.start)
            out.write(_bytes(arrays[name].make()))


def _bytes(tensor: Tensor) -> memoryview:
    raw: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(raw)
