"""The header of a safetensors file: a strict parser and a canonical builder, without torch.

A safetensors file is `u64 little-endian N | N bytes of JSON | data`. The JSON maps a tensor's name to
`{"dtype", "shape", "data_offsets": [start, end)}`, offsets counted from the end of the JSON, and
`__metadata__` to an object of strings.

The library's own reader accepts duplicate keys, NUL characters in names, unknown fields and leading blanks;
this one refuses them, since an artifact is input from a stranger. Every limit is a constant below. Everything
wrong with a file is a `CorruptError` of one line.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping

from nstf.errors import CorruptError, NstfError, UnsupportedError, UsageError, no_place
from nstf.kernels.records import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

Shape = tuple[int, ...]

MAX_HEADER_BYTES = 100_000_000
MAX_NESTING = 64
MAX_DIMS = 64
MAX_NUMEL = (1 << 63) - 1
MAX_NAME_CHARS = 1024
# Of a JSON text: an object takes up to 250 bytes of memory, a name with its value as much, and three of a file.
ALWAYS_VALUES, BYTES_A_VALUE = 1 << 19, 16
ALIGNMENT = 64
METADATA_KEY = "__metadata__"

# Bits per element of every dtype a safetensors file can name, and torch's word for it where torch has one.
DTYPE_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32",
    "U32": "uint32", "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32",
    "F64": "float64", "C64": "complex64", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
SAFETENSORS_NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}

# Strings of a JSON text. `\Z` and `.?` make an unterminated string match too: without them a text of
# `\"\"\"...` would cost quadratic time.
STRING = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
_SPLIT_BYTES = 1 << 22
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


@frozen
class TensorEntry:
    """One array: `dtype` by its safetensors name, bytes [start, end) counted from the file's start."""

    dtype: str
    shape: Shape
    start: int
    end: int


class HeaderError(ValueError):
    """What is wrong with a header, without the file's name."""


def corrupt(where: object, what: object) -> CorruptError:
    """The error for a damaged file: which, what is wrong, what to do."""
    return CorruptError(
        f"{where}: {one_line(str(what))}; the file is damaged or incomplete, fetch or convert it again"
    )


def one_line(text: str, limit: int = 400) -> str:
    """`text` without line ends and terminal escapes, at most `limit` long: it may quote a stranger."""
    text = text if len(text) <= limit else text[: limit - 3] + "..."
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def short(value: object, limit: int = 80) -> str:
    """`repr(value)` in one line of at most `limit` characters, for messages."""
    if isinstance(value, (str, list, tuple)):
        value = value[:limit]
    if (
        isinstance(value, int) and value.bit_length() > 256
    ):  # repr of a huge int is slow, or refused by Python
        return f"an integer of {value.bit_length()} bits"
    try:
        text = ascii(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return f"a {type(value).__name__} that cannot be written"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def canonical_json(value: object) -> str:
    """The one JSON text of a value: sorted keys, no blanks, ASCII. Raises ValueError for NaN and the like."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not a JSON value: {error}") from error


def strict_json(raw: bytes, what: str) -> Any:
    """The value of a JSON text; HeaderError for bad UTF-8, duplicate keys, NaN, infinities, deep nesting."""
    check_nesting(raw, what)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise HeaderError(f"{what} is not UTF-8 (byte {error.start})") from error
    check_values(text, what)
    try:
        return json.loads(
            text,
            object_pairs_hook=unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except json.JSONDecodeError as error:
        raise HeaderError(f"{what} is not JSON ({error.msg} at character {error.pos})") from error
    except HeaderError as error:
        raise HeaderError(f"{what} {error}") from error
    except ValueError as error:  # Python's limit of 4300 digits
        raise HeaderError(f"{what} holds an integer of too many digits") from error


def check_nesting(raw: bytes, what: str) -> None:
    """Raises HeaderError for a JSON text nested so deeply that reading it, or walking through it, would fail."""
    if len(raw) <= _SPLIT_BYTES:
        # What lies outside of strings, found faster where the parts need little memory. In JSON a backslash is only inside.
        plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
        brackets = b"".join(plain.split(b'"')[::2]).translate(None, _NOT_BRACKETS)
    else:
        brackets = STRING.sub(b"", raw).translate(None, _NOT_BRACKETS)
    for _ in range(MAX_NESTING):  # each pass takes at least the innermost level away
        if not brackets:
            break
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    if brackets:
        raise HeaderError(f"{what} has unbalanced brackets or is nested deeper than {MAX_NESTING} levels")


def check_values(text: str | bytes, what: str, always: int = ALWAYS_VALUES, packed: bool = False) -> None:
    """Raises HeaderError for a JSON text of so many values that they take far more memory than it does; always: how many it
    may have in any case. packed: no more, since the text may be little where it is stored."""
    most = always + (0 if packed else len(text) // BYTES_A_VALUE)
    if len(text) <= most or marks(text) <= most:
        return
    # Marks in strings are none, which is looked at in texts alone: bytes may be UTF-16, whose strings end elsewhere.
    if isinstance(text, bytes) or marks(re.sub(STRING.pattern.decode(), "", text, flags=re.DOTALL)) > most:
        raise HeaderError(f"{what} holds more than {most} values, too many for its length")


def marks(text: str | bytes) -> int:
    """How many values a JSON text has at most: each but the first follows one of these."""
    if isinstance(text, str):
        return sum(text.count(mark) for mark in ",[{")
    return sum(text.count(mark) for mark in (b",", b"[", b"{"))


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a JSON reader. Raises HeaderError for a key that comes twice, of which others may take the other."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise HeaderError(f"has the key {short(key)} twice")
            seen.add(key)
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise HeaderError(f"holds {text}, which is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise HeaderError(f"holds a number out of range ({text[:20]})")
    return value


def read_header(path: str | os.PathLike[str]) -> tuple[bytes, int]:
    """The JSON text of a safetensors file, and the file's size in bytes. Raises CorruptError, UsageError."""
    try:
        # Stat first: opening a FIFO would wait for ever.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UsageError(f"{path}: not a regular file; give the path of a file")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise corrupt(path, f"{size} bytes are too few for a header")
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER_BYTES:
                if other := _other_kind(prefix):
                    raise UnsupportedError(f"{path}: not an .nstf or safetensors file: it looks like {other}")
                raise corrupt(path, f"the header's length {length} is above {MAX_HEADER_BYTES} bytes")
            if length > size - 8:
                raise corrupt(path, f"the header's length {length} is beyond the file's {size} bytes")
            raw = file.read(length)
    except (FileNotFoundError, ValueError) as error:  # or a path with a NUL
        if not isinstance(error, OSError) and "\0" not in os.fspath(path):
            raise
        raise UsageError(f"{path}: no such file; check the path") from error
    except OSError as error:
        if no_place(error):
            raise UsageError(f"{path}: no file can lie there ({error.strerror}); check the path") from error
        raise NstfError(f"{path}: cannot be read ({error.strerror}); check the file and the disk") from error
    if len(raw) != length:
        raise corrupt(path, "the header ends early")
    return raw, size


# The first bytes of files that people have beside an artifact. Each is far above MAX_HEADER_BYTES as a length.
_KINDS = (
    (b"GGUF", "a GGUF file"),
    (b"PK\x03\x04", "a zip archive, or a file of torch.save"),
    (b"%PDF", "a PDF"),
    # What a clone without Git LFS has in the place of large files.
    (b"version ", "a pointer of Git LFS, which `git lfs pull` replaces with the file"),
)
# What follows an ONNX file's version: its producer's name or version, or the graph at once.
_AFTER_ONNX_VERSION = (0x12, 0x1A, 0x3A)


def _other_kind(prefix: bytes) -> str:
    """What a file that begins so is, or "" when that is not known. prefix: its first 8 bytes."""
    for magic, kind in _KINDS:
        if prefix.startswith(magic):
            return kind
    # A length that damage made too large has zeros in its last four bytes, but for one.
    if prefix[0] == 8 and prefix[2] in _AFTER_ONNX_VERSION and prefix[4:].count(0) < 3:
        return "an ONNX file"
    if prefix.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"<"):
        return "an HTML or XML page"
    return "text" if all(32 <= byte < 127 or byte in b"\r\n\t" for byte in prefix) else ""


def parse_header(
    path: str | os.PathLike[str], *, artifact: bool = False
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The arrays and the metadata of a safetensors file, in the order of the names in the header.

    `artifact`: refuse dimensions of 0, which ordinary checkpoints may have. Raises CorruptError for anything
    that is not a valid safetensors file, UsageError when there is no such file.
    """
    raw, size = read_header(path)
    return parse_header_bytes(raw, size, path, artifact=artifact)


def parse_header_bytes(
    raw: bytes, file_size: int, where: object, *, artifact: bool = False
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """As `parse_header`, for the JSON `raw` of a file of `file_size` bytes; `where` names it in errors."""
    try:
        return _parse(raw, file_size, smallest=1 if artifact else 0)
    except HeaderError as error:
        raise corrupt(where, error) from error


def _parse(raw: bytes, file_size: int, smallest: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    if raw[:1] != b"{":
        raise HeaderError("the header does not begin with '{'")
    document = strict_json(raw, "the header")
    metadata = document.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise HeaderError("the header's metadata is not an object of strings")
    data_start = 8 + len(raw)
    entries = {name: _entry(name, value, data_start, smallest) for name, value in document.items()}
    at = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != at:
            kind = "a hole" if entry.start > at else "an overlap"
            raise HeaderError(
                f"array {short(name)} leaves {kind} in the data: it starts at {entry.start}, not {at}"
            )
        at = entry.end
    if at != file_size:
        raise HeaderError(f"the arrays end at byte {at}, the file at byte {file_size}")
    return entries, metadata


def _entry(name: str, value: object, data_start: int, smallest: int) -> TensorEntry:
    try:
        return _checked_entry(name, value, data_start, smallest)
    except HeaderError as error:
        raise HeaderError(f"array {short(name)}: {error}") from error


def _checked_entry(name: str, value: object, data_start: int, smallest: int) -> TensorEntry:
    """`_entry`, whose errors lack the name: making it readable takes longer than all the checks."""
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise HeaderError("the name is empty, too long or has control characters")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise HeaderError("expected exactly the keys dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise HeaderError(f"unknown dtype {short(dtype)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS:
        raise HeaderError(f"the shape is not a list of at most {MAX_DIMS} integers")
    numel, guarded = 1, 1  # guarded: without the zeros, so that [0, 2**62, 2**62] is refused too
    for size in shape:
        if type(size) is not int or size < smallest:
            raise HeaderError(f"the shape has the dimension {short(size)}, expected integers >= {smallest}")
        numel, guarded = numel * size, guarded * max(size, 1)
        if guarded > MAX_NUMEL:
            raise HeaderError("the shape has more than 2**63 elements")
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(v) is not int for v in offsets):
        raise HeaderError("data_offsets is not a pair of integers")
    start, end = offsets
    if not 0 <= start <= end <= MAX_NUMEL:
        raise HeaderError(f"data_offsets {short(offsets)} are out of order")
    if (end - start) * 8 != numel * DTYPE_BITS[dtype]:
        raise HeaderError(f"{end - start} bytes of data do not fit {dtype} {short(shape)}")
    return TensorEntry(dtype, tuple(shape), data_start + start, data_start + end)


def build_header(
    arrays: Mapping[str, tuple[str, Shape]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, TensorEntry]]:
    """The canonical first bytes of a file (length, JSON, padding) and where each array goes.

    arrays: name -> (safetensors dtype, shape). The data is ordered by the size of the dtype, largest first,
    then by name: every array is then aligned to its element size without holes. Spaces (which safetensors
    allows) pad the header to a multiple of 64 bytes. Equal input gives equal bytes, and metadata of equal
    length a header of equal length. Raises ValueError above the header limit.
    """
    offsets: dict[str, tuple[int, int]] = {}
    at = 0
    for name in sorted(arrays, key=lambda n: (-DTYPE_BITS[arrays[n][0]], n)):
        dtype, shape = arrays[name]
        bits = DTYPE_BITS[dtype]
        for size in shape:
            bits *= size
        offsets[name] = (at, at + bits // 8)
        at += bits // 8
    document: dict[str, object] = {
        name: {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets[name])}
        for name, (dtype, shape) in arrays.items()
    }
    text = canonical_json({METADATA_KEY: dict(metadata), **document}).encode("ascii")
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes is above the limit of {MAX_HEADER_BYTES}")
    data_start = 8 + len(text)
    entries = {
        name: TensorEntry(dtype, shape, data_start + offsets[name][0], data_start + offsets[name][1])
        for name, (dtype, shape) in arrays.items()
    }
    return len(text).to_bytes(8, "little") + text, entries
