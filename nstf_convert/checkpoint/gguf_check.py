"""The header of a GGUF file, parsed with every count checked against the file's size before it is used.

gguf 0.19's own reader hangs on a file of 49 bytes (llama.cpp#27188) and the C++ parsers have had overflows
in nearly every size
computation, so nothing of a file reaches another library before this module has accepted all of it.
"""

import math
import mmap
import os
import struct
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nstf.errors import CorruptError, UnsupportedError
from nstf_convert.checkpoint.paths import open_regular

MAX_HEADER_BYTES = 1 << 30
MAX_TENSORS = 1 << 18
MAX_KEYS = 1 << 16
MAX_ARRAY = 1 << 24
# Of texts in all arrays: tokens and merges, of which the largest known file has 800,000. An object of each is kept.
MAX_TEXTS = 1 << 21
MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 256
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 16
SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<B",
    10: "<Q",
    11: "<q",
    12: "<d",
}
# Of an array that becomes a list of true and false.
MAX_BOOLS = 4096
BOOL, STRING, ARRAY, UINT32 = 7, 8, 9, 4


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file; shape in torch's order (rows first), bytes [start, start + size_bytes)."""

    ggml_type: int
    shape: tuple[int, ...]
    start: int
    size_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata (arrays as lists, of numbers as `array`) and tensors of a file that passed every check."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads forward through the header; every step is checked against the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at, self.texts = data, path, 0, 0
        self.end = min(len(data), MAX_HEADER_BYTES)

    def fail(self, what: str) -> CorruptError:
        return CorruptError(
            f"{self.path}: {what} (near byte {self.at}); the file is damaged, download it again"
        )

    def need(self, size: int, what: str) -> None:
        if size > self.end - self.at:
            raise self.fail(f"{what} needs {size} bytes but the file has {self.end - self.at} left")

    def number(self, code: str, what: str) -> Any:
        size = struct.calcsize(code)
        self.need(size, what)
        (value,) = struct.unpack_from(code, self.data, self.at)
        self.at += size
        return value

    def text(self, what: str, limit: int = MAX_HEADER_BYTES) -> str:
        length = self.number("<Q", what)
        if length > limit:
            raise self.fail(f"{what} claims a length of {length} bytes")
        self.need(length, what)
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error


def read_header(path: Path) -> GgufHeader:
    """The checked header of a GGUF file.

    Raises CorruptError, or UnsupportedError for kinds that cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size < 24:
            raise CorruptError(f"{path} has {size} bytes: too short for a GGUF file; download it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, path)
            return _parse(cursor, size)


def _parse(cursor: _Cursor, size: int) -> GgufHeader:
    if cursor.data[:4] != b"GGUF":
        raise CorruptError(f"{cursor.path} does not begin with the GGUF magic; it is not a GGUF file")
    cursor.at = 4
    version = cursor.number("<I", "the version")
    if version not in (2, 3):
        kind = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
        raise UnsupportedError(
            f"{cursor.path} is a {kind} GGUF file; versions 2 and 3, little-endian, can be read"
        )
    tensor_count = cursor.number("<Q", "the tensor count")
    key_count = cursor.number("<Q", "the metadata count")
    # Smallest entries: a tensor takes 8 + 1 + 4 + 8 + 4 + 8 bytes, a key 8 + 1 + 4 + 1.
    if tensor_count > min(MAX_TENSORS, (size - 24) // 33):
        raise cursor.fail(f"it claims {tensor_count} tensors")
    if key_count > min(MAX_KEYS, (size - 24) // 14):
        raise cursor.fail(f"it claims {key_count} metadata keys")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.text("a metadata key", MAX_KEY_BYTES)
        if not key or not key.isprintable() or key in metadata:
            raise cursor.fail(
                f"the metadata key {key[:60]!r} is {'there twice' if key in metadata else 'not a name'}"
            )
        metadata[key] = _value(cursor, cursor.number("<I", f"the type of {key!r}"), key)
    alignment = _alignment(cursor, metadata)
    return GgufHeader(metadata, _tensors(cursor, tensor_count, alignment, size))


def _value(cursor: _Cursor, kind: int, key: str) -> Any:
    where = f"metadata {key[:60]!r}"
    if key == "general.alignment" and kind != UINT32:
        raise cursor.fail(f"{where} has type {kind}, expected a 32-bit unsigned integer")
    if kind == STRING:
        return cursor.text(where)
    if kind == ARRAY:
        return _array(cursor, where)
    if kind not in SCALARS:
        raise cursor.fail(f"{where} has the unknown type {kind}")
    value = cursor.number(SCALARS[kind], where)
    if kind == BOOL:
        if value > 1:
            raise cursor.fail(f"{where} is a boolean of value {value}")
        return bool(value)
    return value


def _array(cursor: _Cursor, where: str) -> "list[Any] | array[Any]":
    kind = cursor.number("<I", where)
    count = cursor.number("<Q", where)
    if kind != STRING and kind not in SCALARS:
        raise cursor.fail(f"{where} is an array of the unknown type {kind}")
    smallest = 8 if kind == STRING else struct.calcsize(SCALARS[kind])
    if count > min(MAX_ARRAY, (cursor.end - cursor.at) // smallest):
        raise cursor.fail(f"{where} claims {count} elements")
    if kind == STRING:
        cursor.texts += count
        if cursor.texts > MAX_TEXTS:
            raise cursor.fail(f"its arrays hold more than {MAX_TEXTS} texts")
        return [cursor.text(where) for _ in range(count)]
    # Objects of Python would take 40 times the file.
    values = array(SCALARS[kind][1], cursor.data[cursor.at : cursor.at + count * smallest])
    if sys.byteorder == "big":
        values.byteswap()
    cursor.at += count * smallest
    # What says something of each layer, say; a long one is nobody's, and lists take 8 times its bytes and more.
    return [bool(v) for v in values] if kind == BOOL and count <= MAX_BOOLS else values


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment}, expected a power of two up to {MAX_ALIGNMENT}")
    return int(alignment)


def _tensors(cursor: _Cursor, count: int, alignment: int, size: int) -> dict[str, GgufTensor]:
    entries = [_tensor_entry(cursor) for _ in range(count)]
    data_start = (cursor.at + alignment - 1) // alignment * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, ggml_type, offset in entries:
        length = _stored_bytes(cursor, name, shape, ggml_type)
        if name in tensors:
            raise cursor.fail(f"tensor {name!r} is there twice")
        if offset % alignment:
            raise cursor.fail(f"tensor {name!r} begins at {offset}, which is not a multiple of {alignment}")
        if offset > size or data_start + offset + length > size:
            raise CorruptError(
                f"{cursor.path}: tensor {name!r} ends at byte {data_start + offset + length}, but the file "
                f"has {size}; "
                f"it is truncated, download it again"
            )
        tensors[name] = GgufTensor(ggml_type, shape, data_start + offset, length)
    end, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start < end:
            raise cursor.fail(f"tensors {before!r} and {name!r} overlap")
        end, before = tensor.start + tensor.size_bytes, name
    return tensors


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text("a tensor name", MAX_NAME_BYTES)
    if not name or not name.isprintable():
        raise cursor.fail(f"the tensor name {name[:60]!r} is not a name")
    dims = cursor.number("<I", f"tensor {name!r}")
    if not 1 <= dims <= MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} has {dims} dimensions")
    shape = tuple(cursor.number("<Q", f"tensor {name!r}") for _ in range(dims))
    if 0 in shape:
        raise cursor.fail(f"tensor {name!r} has the shape {list(shape)}")
    ggml_type = cursor.number("<I", f"tensor {name!r}")
    offset = cursor.number("<Q", f"tensor {name!r}")
    # ggml counts the fastest dimension first.
    return name, shape[::-1], ggml_type, offset


def _stored_bytes(cursor: _Cursor, name: str, shape: tuple[int, ...], ggml_type: int) -> int:
    import gguf

    try:
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(ggml_type)]
    except (ValueError, KeyError) as error:
        raise UnsupportedError(
            f"{cursor.path}: tensor {name!r} has ggml type {ggml_type}, which gguf {_version()} does not "
            f"know; update gguf"
        ) from error
    if shape[-1] % block:
        raise cursor.fail(
            f"tensor {name!r} has rows of {shape[-1]} values, not a multiple of its block of {block}"
        )
    return math.prod(shape) // int(block) * int(block_bytes)


def _version() -> str:
    from importlib.metadata import version

    return version("gguf")
