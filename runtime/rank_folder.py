"""The encoded tensors of a folder of `nstf export --to transformers`, mapped: a rank reads the bytes of its part."""

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nstf.errors import CorruptError, NstfError, UnsupportedError
from nstf.kernels.formats import EncodedTensor, FormatError, array_specs
from nstf.kernels.formats.shards import Span, shard
from nstf.kernels.formats.tree import node_from_json
from nstf.runtime.artifact.header import (
    TORCH_NAMES,
    TensorEntry,
    check_values,
    parse_header,
    short,
    strict_json,
)
from nstf.runtime.modules import SUFFIX

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_INDEX_BYTES = 256 << 20


class RankFolder:
    """A folder of `nstf export --to transformers`. tensors: the `tensors` of its quantization_config.

    Raises CorruptError for files that are not what the config says, UsageError for what is no regular file, and NstfError
    for files that cannot be read.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Any]) -> None:
        if wrong := next((name for name, entry in tensors.items() if not isinstance(entry, Mapping)), None):
            raise CorruptError(f"{path}: its config describes no tensor under {short(wrong)}")
        self.path, self.tensors = path, tensors
        self._arrays: dict[str, Tensor] = {}
        for file in _files(path):
            self._arrays |= _mapped(file)

    def stored(self, name: str) -> str:
        """The name that a parameter is stored under: its own, or that of the one it shares."""
        return str(self.tensors[name].get("shared", name))

    def part(self, name: str, span: Span | None) -> EncodedTensor:
        """An encoded parameter, or a part of it. Raises CorruptError, and FormatError where it cannot be cut so."""
        try:
            entry = self.tensors[self.stored(name)]
            tree, shape = node_from_json(entry["tree"]), tuple(entry["shape"])
            specs = array_specs(tree, shape)
            arrays = {p: self._arrays[f"{self.stored(name)}{SUFFIX}.{p.replace('.', '/')}"] for p in specs}
        except (FormatError, KeyError, TypeError) as error:
            raise CorruptError(f"{self.path}: {name} is not stored as its config says ({error})") from error
        for path, spec in specs.items():
            if arrays[path].dtype != spec.dtype or tuple(arrays[path].shape) != spec.shape:
                raise CorruptError(
                    f"{self.path}: the array {path} of {name} has another shape than its config says"
                )
        whole = EncodedTensor(tree, shape, arrays)
        try:
            return whole if span is None else shard(whole, span)
        except FormatError as error:
            raise FormatError(
                f"{name} cannot be divided among these ranks: {error} (`nstf inspect FILE --tp N` says what can)"
            ) from error

    def dense(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values of what is not encoded: norms, biases."""
        for name, array in self._arrays.items():
            if f"{SUFFIX}." not in name:
                yield name, array


def _files(path: Path) -> list[Path]:
    """What transformers reads of a folder: the files of its index, or its one file. Another one is of something else."""
    index = path / INDEX
    if not index.exists():
        return [path / SINGLE]
    try:
        if not index.is_file() or index.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError("it is no file of an index's size")
        content = index.read_bytes()
        check_values(content, "it")
        stated = strict_json(content, "it")
        names = stated.get("weight_map") if isinstance(stated, dict) else None
        if not isinstance(names, dict) or not all(
            isinstance(name, str) and name.isprintable() and name == Path(name).name
            for name in names.values()
        ):
            raise ValueError("it names no files of its folder")
    except OSError as error:
        raise NstfError(f"{index}: cannot be read ({error.strerror}); check the disk") from error
    except ValueError as error:
        raise CorruptError(f"{index} is no index of weights ({error}): export the folder again") from error
    return [path / name for name in sorted(set(names.values()))]


def _mapped(file: Path) -> dict[str, Tensor]:
    found, _ = parse_header(file)
    if unknown := next((e.dtype for e in found.values() if e.dtype not in TORCH_NAMES), None):
        raise UnsupportedError(f"{file} holds values of type {unknown}, which torch does not have")
    with file.open("rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    if len(data) < max((e.end for e in found.values()), default=0):
        raise CorruptError(f"{file} changed while it was opened")
    return {name: _array(data, entry) for name, entry in found.items()}


def _array(data: mmap.mmap, entry: TensorEntry) -> Tensor:
    dtype: torch.dtype = getattr(torch, TORCH_NAMES[entry.dtype])
    if entry.start == entry.end:
        return torch.empty(entry.shape, dtype=dtype)
    if entry.start % dtype.itemsize:
        copied = bytearray(data[entry.start : entry.end])
        return torch.frombuffer(copied, dtype=dtype).view(entry.shape)
    count = (entry.end - entry.start) // dtype.itemsize
    return torch.frombuffer(data, dtype=dtype, count=count, offset=entry.start).view(entry.shape)
