"""The manifest of an `.nstf` file: frozen dataclasses, canonical JSON, and a strict parser.

    {"version": 1,
     "tensors": {name: {"shape": [...], "dtype": "bfloat16", "tree": {...}} | {"shared": name}},
     "files": {name: {"size": bytes, "encoding": "raw" | "zlib"}},
     "plan": {...}, "provenance": {...}, "attention": {...}, "report": {...},
     "sha256": base64 of the arrays' digests, 32 bytes each, in the sorted order of the arrays' names,
     "header_sha256": hex digest of the file's first bytes, up to the data, with this digest itself zeroed}

The arrays of a tensor are named `<tensor>:<path in its tree>`, the files `nstf.file/<name>`. Names come from
a stranger's file and may end up as paths of an export, so a name that could leave a folder is refused.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping
from functools import cached_property

from nstf.errors import CorruptError, UnsupportedError
from nstf.kernels.formats import ArraySpec, FormatError, Node, array_specs, node_from_json, node_to_json
from nstf.kernels.formats.tree import UnknownKindError, check_shape
from nstf.kernels.records import NEW_DICT, frozen
from nstf.runtime.artifact.header import (
    SAFETENSORS_NAMES,
    HeaderError,
    Shape,
    TensorEntry,
    canonical_json,
    corrupt,
    one_line,
    short,
    strict_json,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERSION = 1
KEY = "nstf"
FILE_PREFIX = "nstf.file/"
ENCODINGS = ("raw", "zlib")
META_KEYS = ("attention", "plan", "provenance", "report")
MAX_FILE_BYTES = 1 << 28
MAX_NAME_CHARS = 512
DIGEST_BYTES = 32
NO_DIGEST = "0" * 64

_KEYS = {"version", "tensors", "files", *META_KEYS, "sha256", "header_sha256"}
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@=-]{0,199}")
_BAD_PERCENT = re.compile(r"%(?![0-9A-F]{2})")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@frozen
class TensorRecord:
    """One tensor: its dense shape, its dtype in the source (torch's name), its tree."""

    shape: Shape
    dtype: str
    tree: Node

    def arrays(self) -> dict[str, ArraySpec]:
        """The arrays by path. Raises FormatError."""
        return self._arrays

    @cached_property
    def _arrays(self) -> dict[str, ArraySpec]:
        return array_specs(self.tree, self.shape)


@frozen
class Shared:
    """The tensor stored under another name (tied weights)."""

    name: str


@frozen
class FileRecord:
    """A file kept in the artifact: `size` bytes once read; `encoding` is `raw` or `zlib`."""

    size: int
    encoding: str


@frozen
class Manifest:
    """Everything an artifact says about itself; see the module's docstring."""

    tensors: Mapping[str, TensorRecord | Shared]
    files: Mapping[str, FileRecord] = NEW_DICT
    plan: Mapping[str, Any] = NEW_DICT
    provenance: Mapping[str, Any] = NEW_DICT
    attention: Mapping[str, Any] = NEW_DICT
    report: Mapping[str, Any] = NEW_DICT
    sha256: tuple[str, ...] = ()
    header_sha256: str = NO_DIGEST
    version: int = VERSION

    def record(self, name: str) -> TensorRecord:
        """The record of a tensor, through `shared`. Raises KeyError for an unknown name."""
        found = self.tensors[name]
        target = self.tensors[found.name] if isinstance(found, Shared) else found
        if not isinstance(target, TensorRecord):
            raise KeyError(name)
        return target


def check_tensor_name(name: str) -> None:
    """Raises ValueError for a tensor's name that is a path, or that cannot be part of an array's name."""
    if not name or len(name) > MAX_NAME_CHARS:
        raise ValueError(f"tensor name {short(name)} is empty or longer than {MAX_NAME_CHARS} characters")
    if not name.isprintable():
        raise ValueError(f"tensor name {short(name)} has control characters")
    if "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"tensor name {short(name)} is a path")
    if ":" in name or _BAD_PERCENT.search(name):
        raise ValueError(f"tensor name {short(name)} has ':' or '%' that is not percent-encoded")


def check_file_name(name: str) -> None:
    """Raises ValueError unless `name` is a bare file name of plain characters."""
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"file name {short(name)} is not a bare file name")


def array_name(tensor: str, path: str) -> str:
    """The name in the file of the array `path` of a tensor."""
    return f"{tensor}:{path}"


def expected_arrays(manifest: Manifest, file_bytes: Mapping[str, int]) -> dict[str, tuple[str, Shape]]:
    """Every array the file must hold: name -> (safetensors dtype, shape). Raises FormatError.

    file_bytes: stored bytes of each file (the manifest knows only the size after decompression).
    """
    arrays: dict[str, tuple[str, Shape]] = {}
    for name, record in manifest.tensors.items():
        if isinstance(record, TensorRecord):
            try:
                specs = record.arrays()
            except FormatError as error:
                raise FormatError(f"tensor {short(name)}: {error}") from error
            for path, spec in specs.items():
                dtype = SAFETENSORS_NAMES[spec.dtype_name]
                arrays[array_name(name, path)] = (dtype, spec.shape)
    for name in manifest.files:
        arrays[FILE_PREFIX + name] = ("U8", (file_bytes[name],))
    return arrays


def to_json(manifest: Manifest) -> str:
    """The canonical JSON of a manifest. Raises ValueError for values JSON does not have (NaN, sets, ...)."""
    tensors: dict[str, object] = {}
    for name, record in manifest.tensors.items():
        if isinstance(record, Shared):
            tensors[name] = {"shared": record.name}
        else:
            tree = node_to_json(record.tree)
            tensors[name] = {"shape": list(record.shape), "dtype": record.dtype, "tree": tree}
    return canonical_json(
        {
            "version": manifest.version,
            "tensors": tensors,
            "files": {n: {"size": f.size, "encoding": f.encoding} for n, f in manifest.files.items()},
            **{key: dict(getattr(manifest, key)) for key in META_KEYS},
            "sha256": _base64(bytes.fromhex("".join(manifest.sha256))),
            "header_sha256": manifest.header_sha256,
        }
    )


# What `nstf calibrate` and work directories store under the same name (nstf_convert/pipeline/store).
_OF_STATISTICS = {"digests", "metadata", "seal"}


def from_json(text: str, where: object) -> Manifest:
    """The manifest of a JSON text. Raises CorruptError; UnsupportedError for a newer version or encoding."""
    try:
        return _manifest(strict_json(text.encode("utf-8"), "the manifest"), text)
    except UnicodeEncodeError as error:
        raise corrupt(where, "the manifest is not UTF-8") from error
    except UnknownKindError as error:
        raise UnsupportedError(f"{where}: {one_line(str(error))}; update nstf") from error
    except UnsupportedError as error:
        raise UnsupportedError(f"{where}: {error}") from error
    except (HeaderError, FormatError) as error:
        raise corrupt(where, error) from error


def _manifest(data: object, text: str) -> Manifest:
    if not isinstance(data, dict):
        raise HeaderError("the manifest is not an object")
    if data.keys() == _OF_STATISTICS:
        raise UnsupportedError(
            "a calibration or a stored result of a conversion, not an artifact: `nstf convert` takes it by --calibration or "
            "--work-dir"
        )
    version = data.get("version")
    if type(version) is not int or version < 1:
        raise HeaderError(f"the manifest's version is {short(version)}, expected a positive integer")
    if version != VERSION:
        raise UnsupportedError(
            f"format version {short(version)}; this nstf reads version {VERSION}, update nstf"
        )
    if set(data) != _KEYS:
        unknown, missing = sorted(set(data) - _KEYS), sorted(_KEYS - set(data))
        wrong = f"unknown key {short(unknown[0])}" if unknown else f"key {missing[0]!r} is missing"
        raise HeaderError(f"the manifest: {wrong}")
    for key in ("tensors", "files", *META_KEYS):
        if not isinstance(data[key], dict):
            raise HeaderError(f"the manifest's {key!r} is not an object")
    digests = _digests(data["sha256"])
    if not _is_digest(data["header_sha256"]):
        raise HeaderError("the manifest's 'header_sha256' is not a SHA-256 digest in hexadecimal")
    if canonical_json(data) != text:
        raise HeaderError("the manifest is not canonical JSON")
    _check_text(data)
    tensors = {name: _tensor(name, value) for name, value in data["tensors"].items()}
    _check_shared(tensors)
    files = {name: _file(name, value) for name, value in data["files"].items()}
    meta = {key: data[key] for key in META_KEYS}
    return Manifest(tensors, files, sha256=digests, header_sha256=data["header_sha256"], **meta)


def _digests(value: object) -> tuple[str, ...]:
    """The hexadecimal digests in a base64 text (a third shorter than hexadecimal: 2 % of a small file's bytes)."""
    try:
        raw = binascii.a2b_base64(value.encode("ascii"), strict_mode=True) if isinstance(value, str) else b"x"
    except ValueError:
        raw = b"x"
    if len(raw) % DIGEST_BYTES or _base64(raw) != value:
        raise HeaderError("the manifest's 'sha256' is not base64 of SHA-256 digests")
    return tuple(raw[i : i + DIGEST_BYTES].hex() for i in range(0, len(raw), DIGEST_BYTES))


def _base64(raw: bytes) -> str:
    return binascii.b2a_base64(raw, newline=False).decode()


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _check_text(data: dict[str, Any]) -> None:
    """Refuses strings that cannot be printed or written anywhere: lone surrogates."""
    for key in META_KEYS:
        _check_strings(data[key])


def _check_strings(value: object) -> None:
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise HeaderError("the manifest holds a text that is not Unicode") from error
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_strings(key)
            _check_strings(item)
    elif isinstance(value, list):
        for item in value:
            _check_strings(item)


def _tensor(name: str, value: object) -> TensorRecord | Shared:
    where = f"tensor {short(name)}"
    try:
        check_tensor_name(name)
    except ValueError as error:
        raise HeaderError(str(error)) from error
    if isinstance(value, dict) and set(value) == {"shared"} and isinstance(value["shared"], str):
        return Shared(value["shared"])
    if not isinstance(value, dict) or set(value) != {"shape", "dtype", "tree"}:
        raise HeaderError(f"{where}: expected the keys shape, dtype and tree, or 'shared' alone")
    shape, dtype = value["shape"], value["dtype"]
    if not isinstance(shape, list):
        raise HeaderError(f"{where}: the shape is not a list")
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_NAMES:
        raise HeaderError(f"{where}: unknown dtype {short(dtype)}")
    try:
        check_shape(tuple(shape))
        record = TensorRecord(tuple(shape), dtype, node_from_json(value["tree"]))
        record.arrays()
    except UnknownKindError as error:
        raise UnknownKindError(f"{where}: {error}") from error
    except FormatError as error:
        raise HeaderError(f"{where}: {error}") from error
    return record


def _check_shared(tensors: Mapping[str, TensorRecord | Shared]) -> None:
    for name, record in tensors.items():
        if isinstance(record, Shared) and not isinstance(tensors.get(record.name), TensorRecord):
            what = "is itself shared" if record.name in tensors else "does not exist"
            raise HeaderError(f"tensor {short(name)} shares {short(record.name)}, which {what}")


def _file(name: str, value: object) -> FileRecord:
    try:
        check_file_name(name)
    except ValueError as error:
        raise HeaderError(str(error)) from error
    if not isinstance(value, dict) or set(value) != {"size", "encoding"}:
        raise HeaderError(f"file {name!r}: expected the keys size and encoding")
    size, encoding = value["size"], value["encoding"]
    if type(size) is not int or not 0 <= size <= MAX_FILE_BYTES:
        raise HeaderError(f"file {name!r}: size {short(size)} is not between 0 and {MAX_FILE_BYTES} bytes")
    if encoding not in ENCODINGS:
        raise HeaderError(f"file {name!r}: unknown encoding {short(encoding)}")
    return FileRecord(size, encoding)


def check_arrays(manifest: Manifest, entries: Mapping[str, TensorEntry], where: object) -> None:
    """Raises CorruptError unless the file's arrays are exactly those that follow from the manifest."""
    found = {name: entry for name, entry in entries.items() if name.startswith(FILE_PREFIX)}
    stored = {}
    for name, record in manifest.files.items():
        entry = found.get(FILE_PREFIX + name)
        stored[name] = entry.end - entry.start if entry else 1
        if entry and record.encoding == "raw" and stored[name] != record.size:
            raise corrupt(where, f"file {name!r} has {stored[name]} bytes, the manifest says {record.size}")
    expected = expected_arrays(manifest, stored)
    missing, extra = sorted(set(expected) - set(entries)), sorted(set(entries) - set(expected))
    if missing:
        raise corrupt(where, f"array {short(missing[0])} is missing ({len(missing)} missing in all)")
    if extra:
        raise corrupt(where, f"array {short(extra[0])} is left over ({len(extra)} left over in all)")
    for name, (dtype, shape) in expected.items():
        entry = entries[name]
        if (entry.dtype, entry.shape) != (dtype, shape):
            got, want = f"{entry.dtype} {short(list(entry.shape))}", f"{dtype} {short(list(shape))}"
            raise corrupt(where, f"array {short(name)} is {got}, expected {want}")
    if len(manifest.sha256) != len(expected):
        raise corrupt(where, f"{len(manifest.sha256)} SHA-256 digests for {len(expected)} arrays")


__all__ = ["CorruptError", "FileRecord", "Manifest", "Shared", "TensorRecord", "from_json", "to_json"]
