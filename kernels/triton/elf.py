"""The containers of compiled kernels: AMD's code objects and NVIDIA's cubins, both ELF files.

AMD states registers, spills and scratch in the NT_AMDGPU_METADATA note, a MessagePack map (LLVM, AMDGPUUsage.rst, code
object V5). Cubins state registers and stack frames in their `.nv.info` section.
"""

import struct
from collections.abc import Iterator
from typing import Any

from nstf.errors import CorruptError

NT_AMDGPU_METADATA = 32
_PT_NOTE = 4
_EI_REGCOUNT, _EI_FRAME_SIZE = 0x2F, 0x11
_EI_SIZED = 4  # an entry of .nv.info with a payload


def _take(data: bytes, at: int, size: int) -> bytes:
    if at < 0 or size < 0 or at + size > len(data):
        raise CorruptError(
            f"code object: {size} bytes at {at} lie outside of its {len(data)}; compile it again"
        )
    return data[at : at + size]


def _check_elf(data: bytes) -> None:
    if data[:6] != b"\x7fELF\x02\x01":
        raise CorruptError("code object: not a 64-bit little-endian ELF file; compile it again")


def _table(data: bytes, offset_at: int, count_at: int) -> Iterator[bytes]:
    """The rows of the program headers (32, 54) or the section headers (40, 58)."""
    (start,) = struct.unpack("<Q", _take(data, offset_at, 8))
    size, count = struct.unpack("<HH", _take(data, count_at, 4))
    for i in range(count):
        yield _take(data, start + i * size, size)


def amd_metadata(hsaco: bytes) -> dict[str, Any]:
    """The NT_AMDGPU_METADATA map of a code object. Raises CorruptError when there is none."""
    _check_elf(hsaco)
    for row in _table(hsaco, 32, 54):
        kind, _, offset, _, _, size = struct.unpack("<IIQQQQ", row[:40])
        if kind == _PT_NOTE:
            for name, note_type, content in _notes(_take(hsaco, offset, size)):
                if name == b"AMDGPU\0" and note_type == NT_AMDGPU_METADATA:
                    found, _ = _unpack(content, 0, 0)
                    if isinstance(found, dict):
                        return found
    raise CorruptError("code object: no AMDGPU metadata note; compile it again")


def _notes(segment: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    at = 0
    while at + 12 <= len(segment):
        name_size, size, kind = struct.unpack_from("<III", segment, at)
        name = _take(segment, at + 12, name_size)
        at += 12 + -(-name_size // 4) * 4
        yield name, kind, _take(segment, at, size)
        at += -(-size // 4) * 4


def _unpack(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    """(value, end) of the MessagePack value at `at`: the types that the metadata uses, and no extensions."""
    if depth > 16:
        raise CorruptError("code object: metadata nested more than 16 deep; compile it again")
    tag = _take(data, at, 1)[0]
    at += 1
    if tag < 0x80:
        return tag, at
    if tag >= 0xE0:
        return tag - 256, at
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
    scalars = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
    scalars |= {0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
    if tag in scalars:
        size = struct.calcsize(scalars[tag])
        return struct.unpack(scalars[tag], _take(data, at, size))[0], at + size
    wide = {0xC4: "b1", 0xC5: "b2", 0xC6: "b4", 0xD9: "s1", 0xDA: "s2", 0xDB: "s4"}
    wide |= {0xDC: "a2", 0xDD: "a4", 0xDE: "m2", 0xDF: "m4"}
    if tag in wide:
        kind, width = wide[tag][0], int(wide[tag][1])
        count = int.from_bytes(_take(data, at, width), "big")
        at += width
    elif tag >= 0xA0:
        kind, count = "s", tag & 0x1F
    else:
        kind, count = ("a", tag & 0x0F) if tag >= 0x90 else ("m", tag & 0x0F)
        if 0xC0 <= tag < 0xE0:
            raise CorruptError(f"code object: metadata of type {tag:#x}; compile it again")
    if kind in "sb":
        raw = _take(data, at, count)
        return (raw.decode("utf-8", "replace") if kind == "s" else raw), at + count
    items = []
    for _ in range(count * (2 if kind == "m" else 1)):
        value, at = _unpack(data, at, depth + 1)
        items.append(value)
    return (items if kind == "a" else dict(zip(items[::2], items[1::2], strict=True))), at


def cuda_resources(cubin: bytes) -> tuple[int, int]:
    """(registers of a thread, bytes of its stack frame: spilled registers) of the largest function of a cubin."""
    _check_elf(cubin)
    sections = list(_table(cubin, 40, 58))
    (names_at,) = struct.unpack("<H", _take(cubin, 62, 2))
    if names_at >= len(sections):
        raise CorruptError("code object: no section names; compile it again")
    names_start, names_size = struct.unpack("<QQ", sections[names_at][24:40])
    names = _take(cubin, names_start, names_size)
    registers = frame = 0
    found = False
    for row in sections:
        (name,) = struct.unpack("<I", row[:4])
        if names[name : names.find(b"\0", name)] != b".nv.info":
            continue
        start, size = struct.unpack("<QQ", row[24:40])
        info, at = _take(cubin, start, size), 0
        while at + 4 <= len(info):
            kind, attribute, length = struct.unpack_from("<BBH", info, at)
            at += 4
            payload = _take(info, at, length) if kind == _EI_SIZED else b""
            at += len(payload)
            if attribute == _EI_REGCOUNT and len(payload) == 8:
                registers, found = max(registers, struct.unpack("<II", payload)[1]), True
            elif attribute == _EI_FRAME_SIZE and len(payload) == 8:
                frame = max(frame, struct.unpack("<II", payload)[1])
    if not found:
        raise CorruptError("code object: no register count in its .nv.info; compile it again")
    return registers, frame
