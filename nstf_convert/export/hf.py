"""An artifact decoded into a plain Hugging Face folder: config, tokenizer, safetensors shards.

One tensor is in memory at a time. The folder is made under a temporary name beside the final one, every file
is fsynced, and one rename makes it appear: a reader sees the whole export or none.
"""

import json
import logging
import math
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nstf.errors import UnsupportedError
from nstf.kernels.formats import decode
from nstf.runtime.artifact import Artifact, open_artifact
from nstf.runtime.artifact.header import SAFETENSORS_NAMES, build_header

log = logging.getLogger(__name__)

Files = list[tuple[str, int]]


def export_folder(artifact: Path, output: Path, dtype: str | None, shard_bytes: int) -> Files:
    """Writes the folder `output` (new or empty); returns its files with their sizes in bytes.

    dtype: torch's name of the weights' dtype, None for that of the source model. shard_bytes: largest weight
    file; a tensor larger than that gets a file of its own. Raises what `open_artifact` raises, and OSError.
    """
    partial = output.absolute().with_name(f".{output.name}.part.{secrets.token_hex(4)}")
    partial.mkdir()
    try:
        with open_artifact(artifact, verify=True) as opened:
            _write_files(opened, partial, dtype)
            _write_weights(opened, partial, dtype, shard_bytes)
        written = sorted((p.name, p.stat().st_size) for p in partial.iterdir())
        _sync(partial)
        if output.exists():
            output.rmdir()
        partial.rename(output)
        _sync(output.absolute().parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return written


def exported_names(artifact: Artifact) -> list[str]:
    """The parameters to write: stored ones, and shared ones that transformers would not tie by itself.

    Leaving out more would make transformers fill the hole with random values.
    """
    tied = _tied_by_transformers(artifact)
    return [
        n for n in artifact.names() if artifact.stored_name(n) == n or tied.get(n) != artifact.stored_name(n)
    ]


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


def _write_weights(artifact: Artifact, folder: Path, dtype: str | None, shard_bytes: int) -> None:
    kinds = {name: _dtype_of(artifact, name, dtype) for name in exported_names(artifact)}
    sizes = {n: math.prod(artifact.record(n).shape) * kind.itemsize for n, kind in kinds.items()}
    groups = shards(sizes, shard_bytes)
    where: dict[str, str] = {}
    for number, names in enumerate(groups, 1):
        single = len(groups) == 1
        file = "model.safetensors" if single else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _write_shard(artifact, folder / file, {name: kinds[name] for name in names})
        where |= dict.fromkeys(names, file)
        log.info("wrote %s, %d tensors", file, len(names))
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(where.items()))}
        _write(folder / "model.safetensors.index.json", json.dumps(index, indent=2).encode() + b"\n")


def _write_shard(artifact: Artifact, path: Path, kinds: Mapping[str, torch.dtype]) -> None:
    arrays = {
        name: (SAFETENSORS_NAMES[str(kind).removeprefix("torch.")], artifact.record(name).shape)
        for name, kind in kinds.items()
    }
    # transformers reads "format" to know which framework wrote the file.
    header, entries = build_header(arrays, {"format": "pt"})
    with path.open("wb") as out:
        out.write(header)
        for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
            out.seek(entry.start)
            out.write(_bytes(decode(artifact.encoded(name), kinds[name])))
        out.flush()
        os.fsync(out.fileno())


def _write_files(artifact: Artifact, folder: Path, dtype: str | None) -> None:
    for name in artifact.file_names():
        content = artifact.file(name)
        if name == "config.json" and dtype is not None:
            config: dict[str, Any] = json.loads(content)
            config.pop("torch_dtype", None)
            config["dtype"] = dtype
            content = json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"
        _write(folder / name, content)


def _tied_by_transformers(artifact: Artifact) -> dict[str, str]:
    if "config.json" not in artifact.file_names():
        return {}
    from nstf.runtime.skeleton import build_skeleton, tied_aliases

    try:
        return tied_aliases(build_skeleton(json.loads(artifact.file("config.json"))))
    except UnsupportedError:
        return {}


def _dtype_of(artifact: Artifact, name: str, dtype: str | None) -> torch.dtype:
    """The dtype a tensor is written in; integers and booleans keep theirs."""
    source: torch.dtype = getattr(torch, artifact.record(name).dtype)
    return getattr(torch, dtype) if dtype is not None and source.is_floating_point else source


def _bytes(tensor: Tensor) -> memoryview:
    raw: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(raw)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
