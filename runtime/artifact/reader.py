"""Opens `.nstf` files: everything checked at open, nothing but the header read.

The file is memory-mapped; a tensor's arrays are views of the mapping until somebody copies them. The mapping
is private and copy-on-write: writing into a tensor by mistake neither crashes nor changes the file.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from contextlib import suppress

from nstf.errors import CorruptError, NstfError, UnsupportedError, UsageError
from nstf.kernels.formats import EncodedTensor
from nstf.kernels.lazy import torch
from nstf.runtime.artifact import manifest as mf
from nstf.runtime.artifact.config import check_config, limits_of, parse_object
from nstf.runtime.artifact.header import (
    TORCH_NAMES,
    TensorEntry,
    corrupt,
    parse_header_bytes,
    read_header,
)
from nstf.runtime.artifact.manifest import FILE_PREFIX, Manifest, TensorRecord
from nstf.runtime.artifact.sha256 import sha256
from nstf.runtime.artifact.side_names import HANDED_ON

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Any, BinaryIO

    from torch import Tensor

# What `memoryview` calls the elements; where it has no word, their bits.
_VIEWS = {
    "BOOL": "?", "U8": "B", "I8": "b", "I16": "h", "U16": "H", "I32": "i", "U32": "I", "I64": "q", "U64": "Q",
    "F16": "H", "BF16": "H", "F32": "f", "F64": "d",
}  # fmt: skip
# Without MAP_NORESERVE the kernel would refuse to map a file larger than memory and swap.
_MAP_FLAGS = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)


def parse_structure(raw: bytes, size: int, where: object) -> tuple[Manifest, dict[str, TensorEntry]]:
    """The manifest and the arrays' places, after every check that does not read the arrays.

    raw: the JSON text of the header; size: of its file, in bytes. Raises CorruptError, UnsupportedError (a newer version or
    encoding).
    """
    entries, metadata = parse_header_bytes(raw, size, where, artifact=True)
    if set(metadata) != {mf.KEY}:
        raise CorruptError(
            f"{where}: not an .nstf artifact: its metadata has not exactly the key {mf.KEY!r}; a model's own file becomes "
            "one by nstf convert"
        )
    manifest = mf.from_json(metadata[mf.KEY], where)
    mf.check_arrays(manifest, entries, where)
    # The digest covers the length, the JSON and its padding, with itself zeroed. It comes last, so that a
    # header that is wrong in itself gets the message that says how.
    zeroed = raw.replace(manifest.header_sha256.encode(), mf.NO_DIGEST.encode())
    if sha256([memoryview(len(raw).to_bytes(8, "little") + zeroed)])[0].hex() != manifest.header_sha256:
        raise corrupt(where, "the header's SHA-256 differs from the one it states")
    return manifest, entries


class Artifact:
    """An open `.nstf` file. Tensors taken from it stay valid after `close`."""

    def __init__(
        self, where: str, manifest: Manifest, entries: dict[str, TensorEntry], mapping: mmap.mmap
    ) -> None:
        self.where = where
        self._place = where  # wherever the process goes
        with suppress(OSError):  # it may be in a folder that was removed
            self._place = os.path.join(os.getcwd(), where)
        self.manifest = manifest
        self.entries = entries
        self.size_bytes = len(mapping)
        self._mapping: mmap.mmap | None = mapping
        self.state: tuple[int, int, int, int] | None = None
        self._keys: dict[str, list[str]] = {}
        for name in entries:
            tensor, colon, key = name.rpartition(":")
            if colon:
                self._keys.setdefault(tensor, []).append(key)

    @property
    def path(self) -> Path:
        """The file's, as it was given."""
        from pathlib import Path

        return Path(self.where)

    def names(self) -> list[str]:
        """The names of all tensors, shared ones included, sorted."""
        return sorted(self.manifest.tensors)

    def record(self, name: str) -> TensorRecord:
        """Shape, source dtype and tree of a tensor, through `shared`. Raises UsageError if unknown."""
        try:
            return self.manifest.record(name)
        except KeyError as error:
            raise UsageError(f"{self.where}: no tensor {name!r}; `nstf inspect` lists the names") from error

    def stored_name(self, name: str) -> str:
        """The name a tensor is stored under: its own, or that of the tensor it shares."""
        self.record(name)
        found = self.manifest.tensors[name]
        return name if isinstance(found, TensorRecord) else found.name

    def encoded(self, name: str) -> EncodedTensor:
        """A tensor as it is stored; its arrays are views of the file. A shared name gives its target."""
        record, stored = self.record(name), self.stored_name(name)
        arrays = {key: self._array(mf.array_name(stored, key)) for key in sorted(self._keys.get(stored, ()))}
        return EncodedTensor(record.tree, record.shape, arrays)

    def views(self, name: str) -> EncodedTensor:
        """As `encoded`, with memoryviews in the place of tensors, float16 and bfloat16 as uint16: needs no torch."""
        record, stored = self.record(name), self.stored_name(name)
        arrays = {key: self._view(mf.array_name(stored, key)) for key in self._keys.get(stored, ())}
        return EncodedTensor(record.tree, record.shape, arrays)  # type: ignore[arg-type]

    def file_names(self) -> list[str]:
        """The names of the files inside, sorted."""
        return sorted(self.manifest.files)

    def handed_on(self) -> list[str]:
        """Those of them that transformers and exports are given, by names that we know: config.json, and what makes a
        model's inputs."""
        return [name for name in self.file_names() if name in HANDED_ON]

    def file(self, name: str) -> bytes:
        """The content of a file inside. Raises UsageError (unknown name), CorruptError (does not unpack)."""
        record = self.manifest.files.get(name)
        if record is None:
            names = ", ".join(self.file_names()) or "none"
            raise UsageError(f"{self.where}: no file {name!r} inside; there are {names}")
        entry = self.entries[FILE_PREFIX + name]
        stored = self._open_mapping()[entry.start : entry.end]
        if record.encoding == "raw":
            return stored
        # At most one byte more than announced is ever unpacked, whatever the data would give.
        unpacker = zlib.decompressobj()
        try:
            content = unpacker.decompress(stored, record.size + 1)
        except zlib.error as error:
            raise corrupt(self.where, f"file {name!r} cannot be unpacked ({error})") from error
        except MemoryError as error:
            raise NstfError(
                f"{self.where}: not enough memory for its file {name!r}; free some, or raise its limit"
            ) from error
        if len(content) != record.size or not unpacker.eof or unpacker.unused_data:
            raise corrupt(self.where, f"file {name!r} does not unpack to the {record.size} bytes stated")
        return content

    def object(self, name: str) -> dict[str, Any]:
        """The object of a JSON file inside. Raises as `file`, and CorruptError for what is no object or nested deeply."""
        return parse_object(self.file(name), self.where, name)

    def config(self) -> dict[str, Any]:
        """config.json, its numbers checked against the tensors. Raises UnsupportedError when there is none, CorruptError."""
        if "config.json" not in self.manifest.files:
            raise UnsupportedError(
                f"{self.where}: no config.json inside, so no model can be built; use nstf.runtime.load_tensors"
            )
        found = self.object("config.json")
        check_config(found, limits_of(self.manifest), self.where)
        return found

    def close(self) -> None:
        """Lets go of the file. The mapping itself ends with the last tensor that uses it."""
        # Not mapping.close(): tensors hold the mapping object, not an export of it: it would be unmapped
        # under them.
        self._mapping = None

    def __enter__(self) -> Artifact:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check_unchanged(self) -> None:
        """Raises NstfError when the mapped file itself was changed since it was opened. One `stat`: cheap, and no guarantee.

        A file that was replaced or removed is no matter: the mapping keeps the old one.
        """
        if self.state is None:
            return
        try:
            now = file_state(os.stat(self._place))
        except OSError:
            return
        if now != self.state and now[:2] == self.state[:2]:
            raise NstfError(
                f"{self.where}: changed since it was opened; open it again, and replace files instead of writing into them "
                "(or open with mapped=False)"
            )

    def again(self) -> Artifact | None:
        """The same file in a mapping of its own, whose memory ends with the last array taken from it. None for a file that
        was read into memory, and where another one, or none, lies in its place now.
        """
        if self.state is None:
            return None
        try:
            with open(self._place, "rb") as file:
                if file_state(os.fstat(file.fileno())) != self.state:
                    return None
                mapping = _mapped(file)
        except OSError:
            return None
        opened = Artifact(self._place, self.manifest, self.entries, mapping)
        opened.where = self.where
        opened.state = self.state
        return opened

    def check_open(self) -> None:
        """Raises ValueError after `close`."""
        self._open_mapping()

    def _open_mapping(self) -> mmap.mmap:
        if self._mapping is None:
            raise ValueError(f"{self.where}: the artifact is closed")
        return self._mapping

    def _array(self, name: str) -> Tensor:
        entry, mapping = self.entries[name], self._open_mapping()
        dtype: torch.dtype = getattr(torch, TORCH_NAMES[entry.dtype])
        if entry.start % dtype.itemsize:  # never in a file of our writer
            copied = bytearray(mapping[entry.start : entry.end])
            return torch.frombuffer(copied, dtype=dtype).reshape(entry.shape)
        count = (entry.end - entry.start) // dtype.itemsize
        return torch.frombuffer(mapping, dtype=dtype, count=count, offset=entry.start).reshape(entry.shape)

    def place_of(self, array: Tensor) -> int | None:
        """Where in the file the bytes of an array lie that is a view of the mapping; None of others, and of a file that was
        read into memory."""
        if self.state is None or not array.is_contiguous() or array.device.type != "cpu":
            return None
        start = torch.frombuffer(self._open_mapping(), dtype=torch.uint8, count=1).data_ptr()
        place = array.data_ptr() - start
        return place if 0 <= place and place + array.nbytes <= self.size_bytes else None

    def reopened(self) -> int | None:
        """A descriptor of the mapped file; None where it was read into memory, or another one lies in its place now."""
        if self.state is None:
            return None
        try:
            descriptor = os.open(self._place, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        if file_state(os.fstat(descriptor)) == self.state:
            return descriptor
        os.close(descriptor)
        return None

    def stored_bytes(self, array: str) -> memoryview:
        """The bytes of an array, by its name in the file."""
        entry = self.entries[array]
        return memoryview(self._open_mapping())[entry.start : entry.end]

    def _view(self, name: str) -> memoryview:
        entry, whole = self.entries[name], self.stored_bytes(name)
        word = _VIEWS.get(entry.dtype, "B")
        if entry.start % struct.calcsize(word):  # never in a file of our writer
            whole = memoryview(bytes(whole))
        view: memoryview = whole.cast("B").cast(word, list(entry.shape))  # type: ignore[call-overload]
        return view


def open_artifact(path: str | os.PathLike[str], *, verify: bool = False, mapped: bool = True) -> Artifact:
    """An open artifact, its structure checked. `verify`: read all of it and check every SHA-256 as well.

    mapped: False reads the file into memory once, header included, instead of mapping it: what happens to the file
    afterwards has no effect. A mapped file that somebody truncates ends the process at the next use (SIGBUS), and one that
    is overwritten in place gives other values.
    Raises CorruptError, UnsupportedError (a newer version or encoding), UsageError (no such file).
    """
    path = os.fspath(path)
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:  # half of a pair of surrogates
        raise UsageError(f"{path!a}: no file can have such a name") from error
    raw, size = read_header(path)
    manifest, entries = parse_structure(raw, size, path)
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                raise corrupt(path, "the file changed while it was opened")
            if mapped:
                mapping = _mapped(file)
            else:
                mapping = _read_whole(file, size, path)
            opened = Artifact(path, manifest, entries, mapping)
            opened.state = file_state(os.fstat(file.fileno())) if mapped else None
    except OSError as error:
        raise NstfError(f"{path}: cannot be mapped ({error.strerror}); check file and disk") from error
    # What is used is what was checked: another file may have come to this name between the two.
    if mapping[8 : 8 + len(raw)] != raw:
        raise corrupt(path, "the file changed while it was opened")
    if verify:
        from nstf.runtime.artifact.digests import verify_opened

        try:
            verify_opened(opened)
        except BaseException:
            opened.close()
            raise
    return opened


def _mapped(file: BinaryIO) -> mmap.mmap:
    return mmap.mmap(file.fileno(), 0, flags=_MAP_FLAGS, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _read_whole(file: BinaryIO, size: int, path: str) -> mmap.mmap:
    """The content in memory of its own, which the rest of the code takes for a mapping."""
    memory = mmap.mmap(-1, size)
    file.seek(0)
    view, at = memoryview(memory), 0
    while at < size:
        count = file.readinto(view[at : at + (1 << 24)])  # type: ignore[attr-defined]
        if not count:
            raise corrupt(path, "the file changed while it was opened")
        at += count
    return memory


def file_state(found: os.stat_result) -> tuple[int, int, int, int]:
    """What tells whether a file is still the one that was opened, and as it was."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
