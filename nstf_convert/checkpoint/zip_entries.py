"""Where the entries of a zip archive lie, from one reading that leaves nothing to interpretation.

Readers of zip differ: Python's takes the directory before the archive's end and torch's the one at the stated place, torch's
finds DATA.PKL under data.pkl and Python's does not, and neither minds entries that lie over each other. A file that one of
them checks could so be another one to the other. What torch.save writes leaves no such choice; all else is refused.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from nstf_convert.checkpoint.paths import open_regular, pread_all

# Of 2^18 tensors, and what torch puts beside them.
MOST_ENTRIES = (1 << 18) + 64
_END, _END64, _LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_LISTED, _LOCAL = b"PK\x01\x02", b"PK\x03\x04"
_LARGE = 0xFFFFFFFF


class ZipError(ValueError):
    """The file is no zip archive of stored entries that every reader understands alike."""


@dataclass(frozen=True)
class ZipEntry:
    """One entry: its content is the bytes [start, start + size) of the file, its header begins at `header`."""

    name: bytes
    header: int
    start: int
    size: int


def read_entries(path: Path) -> list[ZipEntry]:
    """The entries of an archive, in the order of the file. Raises ZipError, CorruptError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        start, length, count = _directory(file, size, str(path))
        if count > min(MOST_ENTRIES, length // 46):
            raise ZipError(f"it claims {count} entries")
        listed = _listed(pread_all(file, start, length, str(path)), count)
        found = sorted((_placed(file, entry, start, str(path)) for entry in listed), key=lambda e: e.header)
    names, end = set[bytes](), 0
    for entry in found:
        if entry.header < end:
            raise ZipError(f"its entry {entry.name[:80]!r} lies over another one")
        if entry.name.lower() in names:  # torch's reader does not tell letters by their case
            raise ZipError(f"its entry {entry.name[:80]!r} is there twice")
        names.add(entry.name.lower())
        end = entry.start + entry.size
    return found


def _directory(file: BinaryIO, size: int, path: str) -> tuple[int, int, int]:
    """(first byte, bytes, entries) of the list of entries, which must reach to the records at the file's end."""
    if size < 22:
        raise ZipError("it is too short")
    tail = pread_all(file, max(0, size - 98), min(size, 98), path)
    magic, disk, first_disk, here, count, length, start, comment = struct.unpack("<4s4H2IH", tail[-22:])
    if magic != _END or comment:
        raise ZipError("it does not end as an archive does")
    end = size - 22
    if tail[-42:-38] == _LOCATOR:  # above 4 GiB or 65,535 entries
        _, _, at, disks = struct.unpack("<4sIQI", tail[-42:-22])
        end = size - 98
        if disks > 1 or at != end or len(tail) < 98 or tail[:4] != _END64:
            raise ZipError("the records at its end contradict each other")
        short = (disk, first_disk, here, count, length, start)
        disk, first_disk, here, count, length, start = wide = struct.unpack("<2I4Q", tail[16:56])
        if any(a not in (b, 0xFFFF, _LARGE) for a, b in zip(short[2:], wide[2:], strict=True)):
            raise ZipError("the records at its end contradict each other")
    if disk or first_disk or here != count or start + length != end:
        raise ZipError("its list of entries is not where its end says")
    return start, length, count


def _listed(data: bytes, count: int) -> list[tuple[bytes, int, int]]:
    """(name, first byte of its header, bytes) of each entry of the list."""
    found, at = [], 0
    for _ in range(count):
        if data[at : at + 4] != _LISTED or at + 46 > len(data):
            raise ZipError("its list of entries ends early")
        flags, method = struct.unpack_from("<2H", data, at + 8)
        stored, size, name_length, extra, comment = struct.unpack_from("<2I3H", data, at + 20)
        (header,) = struct.unpack_from("<I", data, at + 42)
        name = data[at + 46 : at + 46 + name_length]
        wide = data[at + 46 + name_length : at + 46 + name_length + extra]
        at += 46 + name_length + extra + comment
        if at > len(data):
            raise ZipError("its list of entries ends early")
        size, stored, header = _widened(wide, [size, stored, header])
        if not name or b"\x00" in name or b"\\" in name:
            raise ZipError(f"{name[:80]!r} is no name of an entry")
        if method or flags & 1 or stored != size:
            raise ZipError(f"its entry {name[:80]!r} is compressed or encrypted")
        found.append((name, header, size))
    if at != len(data):
        raise ZipError("its list of entries goes on after the last")
    return found


def _widened(extra: bytes, values: list[int]) -> list[int]:
    """`values` with those that do not fit 32 bits from the field that holds them."""
    if _LARGE not in values:
        return values
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            wide = extra[at + 4 : at + 4 + length]
            if len(wide) < 8 * values.count(_LARGE):
                break
            numbers = iter(struct.unpack_from(f"<{len(wide) // 8}Q", wide))
            return [next(numbers) if v == _LARGE else v for v in values]
        at += 4 + length
    raise ZipError("an entry of 4 GiB does not say how large it is")


def _placed(file: BinaryIO, entry: tuple[bytes, int, int], end: int, path: str) -> ZipEntry:
    """An entry with the place of its content, before the list of entries at `end`."""
    name, header, size = entry
    if header + 30 > end:
        raise ZipError(f"its entry {name[:80]!r} lies outside")
    head = pread_all(file, header, 30, path)
    flags, method = struct.unpack_from("<2H", head, 6)
    name_length, extra = struct.unpack_from("<2H", head, 26)
    start = header + 30 + name_length + extra
    if start + size > end:
        raise ZipError(f"its entry {name[:80]!r} lies outside")
    if head[:4] != _LOCAL or method or flags & 1 or pread_all(file, header + 30, name_length, path) != name:
        raise ZipError(f"its entry {name[:80]!r} is another one where it lies")
    return ZipEntry(name, header, start, size)
