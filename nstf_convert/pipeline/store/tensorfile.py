"""Safetensors files written piece by piece and crash-safe, for the work directory and for calibration files.

`safetensors.save_file` wants every tensor in memory at once, does not fsync and ignores the umask. Here tensors are
appended as they come, and the file appears under its name only when it is complete. The header holds a SHA-256 of every
tensor and one of itself, so that a flipped bit is found.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch
from torch import Tensor

from nstf.errors import CorruptError, NstfError
from nstf.runtime.artifact.atomic_file import disk_errors
from nstf.runtime.artifact.header import MAX_HEADER_BYTES, check_nesting, check_values, strict_json
from nstf_convert.checkpoint.paths import check_name

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip

_NAMES = frozenset(_DTYPES.values())

_ENTRY = {"dtype", "shape", "data_offsets"}
RENEW_BYTES = 128 << 20


class TensorFileWriter:
    """Appends tensors to a temporary file and gives it its name on a clean exit; removes it on an exception."""

    def __init__(self, path: Path) -> None:
        check_name(path)
        self._path = path
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._data_path = path.with_name(f".{path.name}.data.{os.getpid()}")
        self._entries: dict[str, Any] = {}
        self._digests: dict[str, str] = {}
        self._offset = 0
        try:
            with disk_errors(path):
                self._data: IO[bytes] = self._data_path.open("wb")
        except BaseException:  # Ctrl-C just as it was made
            with contextlib.suppress(
                OSError
            ):  # where the disk fails it fails here, too: what it said first counts
                self._data_path.unlink(missing_ok=True)
            raise
        self.metadata: dict[str, Any] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Appends one tensor; its memory is no longer needed afterwards."""
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        with disk_errors(self._path):
            self._data.write(raw.data)
        self._digests[name] = hashlib.sha256(raw.data).hexdigest()
        end = self._offset + raw.nbytes
        self._entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._offset, end],
        }
        self._offset = end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        partial = self._path.with_name(f".{self._path.name}.part.{os.getpid()}")
        try:
            if kind is None:
                with disk_errors(self._path):
                    self._finish(partial)
        finally:
            with contextlib.suppress(OSError):  # what it held is not wanted then, or is reported above
                self._data.close()
            for left in (self._data_path, partial):
                with contextlib.suppress(OSError):
                    left.unlink(missing_ok=True)

    def _finish(self, partial: Path) -> None:
        """The header and the tensors into `partial`, which then gets the file's name."""
        self._data.close()
        kept = {"metadata": self.metadata, "digests": self._digests, "entries": self._entries}
        sealed = {"metadata": self.metadata, "digests": self._digests, "seal": _seal(kept)}
        meta = json.dumps(sealed, sort_keys=True, separators=(",", ":"))
        header = json.dumps({"__metadata__": {"nstf": meta}, **self._entries}, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 64)
        with partial.open("wb") as out, self._data_path.open("rb") as data:
            out.write(len(header).to_bytes(8, "little") + header)
            shutil.copyfileobj(data, out, 1 << 22)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(self._path)
        sync_folder(self._path.parent)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Writes a small set of tensors with its metadata, crash-safe."""
    with TensorFileWriter(path) as writer:
        writer.metadata = metadata
        for name, tensor in tensors.items():
            writer.add(name, tensor)


class TensorFile:
    """A file of `TensorFileWriter`, memory-mapped: tensors are read when asked for.

    A mapping keeps every page that was touched resident. It is renewed after RENEW_BYTES, and the old one goes with
    the last tensor that came from it, so that reading a whole model does not hold the whole model.
    """

    def __init__(self, path: Path) -> None:
        """Opens it. Raises CorruptError for what is none of ours, NstfError where the machine cannot read it."""
        from safetensors import SafetensorError

        check_name(path)
        self.path = path
        self._given = 0
        try:
            if not path.is_file():  # opening a pipe would wait for ever
                raise ValueError("it is no regular file")
            entries = _entries(path)  # first: the library does not say why a file cannot be opened
            self._file = self._open()
            said = (self._file.metadata() or {})["nstf"]
            check_nesting(said.encode(), "its metadata")
            check_values(said, "its metadata")
            sealed = json.loads(said, object_pairs_hook=_each_once)
            if sealed.keys() != {"metadata", "digests", "seal"}:
                raise ValueError("its metadata has a key that is not known")
            self.metadata: dict[str, Any] = sealed["metadata"]
            self._digests: dict[str, str] = sealed["digests"]
            if not isinstance(self.metadata, dict) or not isinstance(self._digests, dict):
                raise ValueError("its metadata is no object")
            kept = {"metadata": self.metadata, "digests": self._digests, "entries": entries}
            if not all(entry["dtype"] in _NAMES for entry in kept["entries"].values()):
                raise ValueError("its tensors are of other types")
            whole = sealed["seal"] == _seal(kept)
        except OSError as error:
            raise NstfError(
                f"{path}: cannot be read ({error.strerror or error}); check permissions and disk"
            ) from error
        except (SafetensorError, AttributeError, KeyError, ValueError, TypeError, RecursionError) as error:
            raise CorruptError(
                f"{path} is not a file nstf wrote ({error}): delete it and run again"
            ) from error
        if not whole:
            raise CorruptError(f"the header of {path} is damaged: delete it and run again")
        self._names = set(self._file.keys())

    def verify(self) -> None:
        """Reads everything once. Raises CorruptError when a tensor is not what was written."""
        for name in sorted(self._names):
            raw = self.get(name).contiguous().reshape(-1).view(torch.uint8).numpy()
            if hashlib.sha256(raw.data).hexdigest() != self._digests.get(name):
                raise CorruptError(
                    f"tensor {name!r} of {self.path} is damaged: delete the file and run again"
                )

    def _open(self) -> Any:
        from safetensors import safe_open

        opened: Any = safe_open
        while True:
            try:
                return opened(str(self.path), framework="pt")
            except RuntimeError as error:
                # torch maps the file, and does not call again where a signal interrupted its call, as Python does.
                before, _, reason = str(error).partition(f"unable to open file <{self.path}>")
                number = re.search(r" \((\d+)\)$", reason.split("\n")[0])
                if before or number is None:
                    raise
                if int(number[1]) != errno.EINTR:
                    raise OSError(int(number[1]), os.strerror(int(number[1])), str(self.path)) from error

    def names(self) -> set[str]:
        """The names of the tensors inside."""
        return self._names

    def get(self, name: str) -> Tensor:
        """A tensor whose memory is the file's; it keeps the mapping it came from alive."""
        tensor: Tensor = self._file.get_tensor(name)
        self._given += tensor.numel() * tensor.element_size()
        if self._given > RENEW_BYTES:
            self._given = 0
            self._file = self._open()
        return tensor

    def find(self, name: str) -> Tensor | None:
        """The tensor, or None when the file has none of that name."""
        return self.get(name) if name in self._names else None


def _seal(kept: dict[str, Any]) -> str:
    """The SHA-256 of a header's contents as canonical JSON."""
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _entries(path: Path) -> dict[str, Any]:
    """Names, dtypes, shapes and places of the tensors, as the header says."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > os.fstat(file.fileno()).st_size:
            raise ValueError("its header is longer than the file")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"its header has {length} bytes, more than {MAX_HEADER_BYTES}")
        raw = file.read(length)
    header = strict_json(raw, "its header")
    if header.get("__metadata__", {}).keys() - {"nstf", "format"}:
        raise ValueError("its metadata has a key that is not known")
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    if any(set(entry) != _ENTRY for entry in entries.values()):
        raise ValueError("an entry has a key that is not known")
    if any(math.prod(max(1, size) for size in entry["shape"]) >= 1 << 62 for entry in entries.values()):
        # An empty one, too: torch's strides would be beyond 2^63.
        raise ValueError("a tensor has more elements than can be counted")
    return entries


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its metadata has a key twice")
    return found


def sync_folder(folder: Path) -> None:
    """Makes a rename inside `folder` survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
