"""The encoded tensors of a folder of `nstf export --to transformers`, mapped: a rank reads the bytes of its part."""

import json
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nstf.errors import CorruptError
from nstf.kernels.formats import EncodedTensor, FormatError, array_specs
from nstf.kernels.formats.shards import Span, shard
from nstf.kernels.formats.tree import node_from_json
from nstf.runtime.modules import SUFFIX

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class RankFolder:
    """A folder of `nstf export --to transformers`. tensors: the `tensors` of its quantization_config.

    Raises CorruptError for files that are not what the config says, OSError for files that cannot be read.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Any]) -> None:
        self.path, self.tensors = path, tensors
        self._arrays: dict[str, Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
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


def _mapped(file: Path) -> dict[str, Tensor]:
    try:
        with file.open("rb") as opened:
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        header.pop("__metadata__", None)
        return {name: _array(data, 8 + size, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CorruptError(f"{file} is no safetensors file: {error}") from error


def _array(data: mmap.mmap, start: int, entry: Mapping[str, Any]) -> Tensor:
    first, last = entry["data_offsets"]
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    if first == last:
        return torch.empty(shape, dtype=dtype)
    count = (last - first) // dtype.itemsize
    return torch.frombuffer(data, dtype=dtype, count=count, offset=start + first).view(shape)
