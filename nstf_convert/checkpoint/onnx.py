"""ONNX files at the level of weight initialisers; external data only from plain files of the same folder.

Names are those in the file (exporters rename and transpose), so there is no config and no architecture.
"""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from nstf.errors import CorruptError, NstfError, UnsupportedError
from nstf_convert.checkpoint.base import Checkpoint
from nstf_convert.checkpoint.naming import plain_plan
from nstf_convert.checkpoint.onnx_wire import (
    Initialiser,
    Run,
    Span,
    WireError,
    check_messages,
    initialisers,
    joined,
    varints,
)
from nstf_convert.checkpoint.paths import member, open_regular, pread_all
from nstf_convert.checkpoint.source import Source, TensorInfo, torch_dtype
from nstf_convert.checkpoint.torch_bin import MOST_REPEATED

# TensorProto.DataType -> torch's name.
DTYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    16: "bfloat16",
    17: "float8_e4m3fn",
    18: "float8_e4m3fnuz",
    19: "float8_e5m2",
    20: "float8_e5m2fnuz",
}
FLOAT, INT32, INT64, RAW, DOUBLE, UINT64 = 4, 5, 7, 9, 10, 11
MAX_NUMEL = 1 << 40


@dataclass
class Held:
    """What was decoded last in a file: (name of the initialiser, its bytes), replaced as one."""

    last: tuple[str, bytes] | None = None


@dataclass(frozen=True)
class Entry:
    """Where one initialiser is; `load(start, length)` gives a part of its bytes in torch's layout."""

    info: TensorInfo
    path: Path
    load: Callable[[int, int], bytes]


def open_file(path: Path) -> Checkpoint:
    """The initialisers of an ONNX file. Raises CorruptError or UnsupportedError."""
    files: dict[Path, BinaryIO] = {}
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise CorruptError(f"{path} is empty; download it again")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    held = Held()
    try:
        entries: dict[str, Entry] = {}
        beside = 0
        for found in initialisers(data):
            if not found.name or found.name in entries:
                raise CorruptError(
                    f"{path}: an initialiser is without a name or twice there: {found.name[:80]!r}"
                )
            entries[found.name] = entry = _entry(data, found, path, files, held)
            beside += entry.info.size_bytes if found.external is not None else 0
        # One file may have many names.
        found_files = [os.fstat(f.fileno()) for f in files.values()]
        sizes = {(f.st_dev, f.st_ino): f.st_size for f in found_files}
        _check_repeated(beside, path, sum(sizes.values()))
        return Checkpoint(
            path,
            _source(entries, data, files, held),
            plain_plan({n: e.info for n, e in entries.items()}),
            None,
            dict,
        )
    except WireError as error:
        _close(data, files, held)
        raise CorruptError(f"{path} cannot be read as ONNX: {error}; download it again") from error
    except NstfError:
        _close(data, files, held)
        raise


def check_whole(path: Path) -> None:
    """Raises CorruptError for a file that one may not read as a whole, as exports do."""
    with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            check_messages(data)
        except WireError as error:
            raise CorruptError(f"{path} cannot be read as ONNX: {error}; download it again") from error


def _check_repeated(total: int, path: Path, held: int) -> None:
    """Raises CorruptError for initialisers that name the same bytes again and again: each gets its own. total: bytes that
    they take of files beside this one, which have `held`."""
    if total > held + MOST_REPEATED:
        raise CorruptError(
            f"{path}: its initialisers take {total} bytes of files that have {held}; the file is damaged or was made to do "
            "harm, do not use it"
        )


def _entry(data: mmap.mmap, found: Initialiser, path: Path, files: dict[Path, BinaryIO], held: Held) -> Entry:
    where = f"{path}: initialiser {found.name[:80]!r}"
    if found.data_type not in DTYPES:
        raise UnsupportedError(
            f"{where} has ONNX type {found.data_type}; give a model with float or 8-bit and wider weights"
        )
    numel = 1
    for size in found.dims:
        numel *= size
    if any(size >= 1 << 62 for size in found.dims) or numel > MAX_NUMEL:
        raise CorruptError(
            f"{where} has the shape {list(found.dims)[:8]}; the file is damaged, download it again"
        )
    info = TensorInfo.of(found.dims, DTYPES[found.data_type])
    if found.external is not None:
        return _external(found.external, info, path, where, files)
    return Entry(info, path, _embedded(data, found, info, where, held))


def _external(
    external: dict[str, str], info: TensorInfo, path: Path, where: str, files: dict[Path, BinaryIO]
) -> Entry:
    target = member(path.parent, external.get("location"), where)
    if target not in files:
        files[target] = open_regular(target)
    size = os.fstat(files[target].fileno()).st_size
    offset = _number(external.get("offset", "0"), where)
    length = _number(external.get("length", str(info.size_bytes)), where)
    if length != info.size_bytes:
        raise CorruptError(
            f"{where} takes {info.size_bytes} bytes but its external data has {length}; download it again"
        )
    if offset + length > size:
        raise CorruptError(
            f"{where} ends at byte {offset + length} of {target}, which has {size}; download it again"
        )
    return Entry(
        info, target, lambda start, count: pread_all(files[target], offset + start, count, str(target))
    )


def _number(value: str, where: str) -> int:
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise CorruptError(f"{where}: {value[:40]!r} is not an offset or a length; the file is damaged")
    return int(value)


def _embedded(
    data: mmap.mmap, found: Initialiser, info: TensorInfo, where: str, held: Held
) -> Callable[[int, int], bytes]:
    """A loader of the bytes stored in the file itself. held: what was decoded last in this file.

    Raises CorruptError when there are too few or too many.
    """
    present = [kind for kind, spans in found.data.items() if sum(len(s) for s in spans)]
    if not present and info.size_bytes == 0:
        return lambda start, count: b""
    if len(present) != 1:
        raise CorruptError(f"{where} has {len(present)} kinds of data, expected one; the file is damaged")
    kind, spans = present[0], found.data[present[0]]
    if kind in (RAW, FLOAT, DOUBLE):
        expected = {RAW: None, FLOAT: "float32", DOUBLE: "float64"}[kind]
        if sum(len(s) for s in spans) != info.size_bytes or expected not in (None, info.dtype):
            raise CorruptError(
                f"{where} has {sum(len(s) for s in spans)} bytes of data, expected {info.size_bytes} for "
                f"{info.dtype}"
            )
        if len(spans) == 1 and not isinstance(spans[0], Run):
            return partial(_slice, data, spans[0])
        return partial(_kept, held, found.name, lambda: joined(data, spans))
    # Only the count is known to be plausible here (a varint takes 1 to 10 bytes); the rest is checked when
    # it is read.
    if not info.size_bytes // torch_dtype(info.dtype).itemsize <= sum(len(s) for s in spans):
        raise CorruptError(
            f"{where} has too little data for its shape {list(info.shape)}; the file is damaged"
        )

    return partial(_kept, held, found.name, lambda: _decoded(data, spans, info, where))


def _kept(held: Held, name: str, decoded: Callable[[], bytes], start: int, count: int) -> bytes:
    """A part of an initialiser's bytes: asked for piece by piece, it is decoded once, and one at a time is kept."""
    last = held.last
    if last is None or last[0] != name:
        last = held.last = None  # before the next is decoded: both may be large
        held.last = last = (name, decoded())
    return last[1][start : start + count]


def _slice(data: mmap.mmap, span: Span, start: int, count: int) -> bytes:
    return data[span.start + start : span.start + start + count]


def _decoded(data: mmap.mmap, spans: list[Span], info: TensorInfo, where: str) -> bytes:
    """Values stored as varints (int32_data also holds the bits of 16- and 8-bit floats) in torch's layout."""
    try:
        width = torch_dtype(info.dtype).itemsize
        mask, count = (1 << 8 * width) - 1, info.size_bytes // width
        numbers = (v & mask for span in spans for v in varints(data, span))
        # As wide as they will be, and as many: each may take a byte of the file.
        values = np.fromiter(islice(numbers, count), dtype=f"<u{width}")
        more = sum(1 for _ in numbers)
    except WireError as error:
        raise CorruptError(f"{where}: {error}; the file is damaged, download it again") from error
    if len(values) + more != count:
        raise CorruptError(
            f"{where} has {len(values) + more} values for its shape {list(info.shape)}; the file is damaged"
        )
    return values.tobytes()


def _source(entries: dict[str, Entry], data: mmap.mmap, files: dict[Path, BinaryIO], held: Held) -> Source:
    def read(name: str) -> Tensor:
        info = entries[name].info
        if info.size_bytes == 0:
            return torch.empty(info.shape, dtype=torch_dtype(info.dtype))
        buffer = bytearray(entries[name].load(0, info.size_bytes))
        return torch.frombuffer(buffer, dtype=torch_dtype(info.dtype)).reshape(info.shape)

    infos = {name: entry.info for name, entry in entries.items()}
    return Source(
        kind="onnx",
        infos=infos,
        stored_bytes={name: info.size_bytes for name, info in infos.items()},
        read=read,
        read_bytes=lambda name, start, length: entries[name].load(start, length),
        describe=lambda name: str(entries[name].path),
        close=lambda: _close(data, files, held),
    )


def _close(data: mmap.mmap, files: dict[Path, BinaryIO], held: Held) -> None:
    held.last = None
    data.close()
    for file in files.values():
        file.close()
