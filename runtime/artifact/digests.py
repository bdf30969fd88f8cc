"""Checks every byte of an `.nstf` file against the SHA-256 digests it carries."""

from __future__ import annotations

import _thread
import os
from collections import deque
from contextlib import nullcontext, suppress

from nstf.errors import NstfError
from nstf.kernels.records import frozen
from nstf.runtime.artifact.header import TensorEntry, corrupt, short
from nstf.runtime.artifact.manifest import TensorRecord
from nstf.runtime.artifact.reader import Artifact, open_artifact
from nstf.runtime.artifact.sha256 import sha256, together

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import BinaryIO

CHUNK_BYTES = 1 << 20
LARGE_BYTES = 1 << 17
# Bytes after which a group of arrays that are checked together ends; one of more than this part of all bytes stays alone.
GROUP_BYTES, ALONE = 12 << 20, 32


@frozen
class Verified:
    """What was checked: tensors (`shared_tensors` of them are other names), arrays, files; bytes read."""

    tensors: int
    shared_tensors: int
    arrays: int
    files: int
    size_bytes: int


def verify(path: str | os.PathLike[str], part: int = 0, parts: int = 1) -> Verified:
    """Reads the whole file and gives back what was found good. With parts, only the arrays of the one of that number.

    Raises CorruptError that names the first array whose SHA-256 differs, and whatever `open_artifact` raises.
    Memory: the header and 1 MiB.
    """
    with open_artifact(path) as artifact:
        return verify_opened(artifact, part, parts)


def verify_opened(artifact: Artifact, part: int = 0, parts: int = 1) -> Verified:
    """As `verify`, for a file that is open. A mapped file is read, so that what was checked need not stay in memory; of
    one in memory, that memory is checked, and of one in whose place another file lies now, the mapping."""
    artifact.check_open()
    path, manifest, entries = artifact.where, artifact.manifest, artifact.entries
    digests = dict(zip(sorted(entries), manifest.sha256, strict=True))
    ordered = sorted(entries.items(), key=lambda item: item[1].start)
    end = max((entry.end for entry in entries.values()), default=1)
    mine = [(n, entry) for n, entry in ordered if entry.start * parts // end == part]
    try:
        artifact.check_unchanged()  # of a file that was cut short the mapping ends the process
        descriptor = artifact.reopened()
        with open(descriptor, "rb") if descriptor is not None else nullcontext() as file:
            for name, entry in mine:
                if file is None:
                    found = sha256([artifact.stored_bytes(name)])[0].hex()
                else:
                    found = _read_digest(file, entry, path, name)
                if found != digests[name]:
                    raise corrupt(path, f"array {short(name)} differs from its SHA-256")
    except OSError as error:
        raise NstfError(f"{path}: cannot be read ({error.strerror}); check the file and the disk") from error
    for name in artifact.file_names():
        artifact.file(name)
    shared = sum(not isinstance(record, TensorRecord) for record in manifest.tensors.values())
    size_bytes = max((entry.end for _, entry in mine), default=0)
    return Verified(len(manifest.tensors), shared, len(mine), len(manifest.files), size_bytes)


def _read_digest(file: BinaryIO, entry: TensorEntry, path: str, name: str) -> str:
    """The SHA-256 of an array, read in pieces."""
    import hashlib

    digest, at = hashlib.sha256(), entry.start
    file.seek(at)
    while at < entry.end:
        chunk = file.read(min(CHUNK_BYTES, entry.end - at))
        if not chunk:
            raise corrupt(path, f"array {short(name)} ends early")
        digest.update(chunk)
        at += len(chunk)
    return digest.hexdigest()


class Verifying:
    """Checks every SHA-256 of an open artifact in a thread, over its mapping: the pages are in memory afterwards.

    own_mapping: over another one that is dropped at the end, for who reads little of the file where it is mapped.
    `with Verifying(artifact) as check:` ends the thread on the way out, whatever happens inside; `check.wait()` checks what
    the thread has not come to and raises CorruptError that names an array that differs.
    """

    def __init__(self, artifact: Artifact, own_mapping: bool = False) -> None:
        self._path = artifact.where
        self._digests = dict(zip(sorted(artifact.entries), artifact.manifest.sha256, strict=True))
        source = (artifact.again() if own_mapping else None) or artifact
        # Views taken now: the artifact may be closed while the thread still reads.
        self._views = {name: source.stored_bytes(name) for name in artifact.entries}
        self._wrong: list[str] = []
        self._failure: BaseException | None = None
        self._stopped = False
        sizes = {name: view.nbytes for name, view in self._views.items()}
        self._large, self._small = _groups(sizes, together())
        # Held while the thread checks a group.
        self._busy = _thread.allocate_lock()
        if self._large:
            # Not threading.Thread, whose start waits for a sign of life: a thread that finds no memory gives none. Without
            # a thread all is checked where one waits.
            with suppress(RuntimeError, MemoryError):
                _thread.start_new_thread(self._work, ())

    def wait(self) -> None:
        """Raises CorruptError for an array that differs, and what reading raised."""
        self._check(self._small)
        with suppress(IndexError):
            while True:
                self._check(self._large.popleft())
        self._end()
        if self._failure is not None:
            raise self._failure
        if self._wrong:
            raise corrupt(self._path, f"array {short(min(self._wrong))} differs from its SHA-256")

    def __enter__(self) -> Verifying:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._end()
        self._views.clear()  # whoever keeps this object must not keep the mapping

    def _end(self) -> None:
        """Waits for what the thread has in hand."""
        with self._busy:
            pass

    def _work(self) -> None:
        while True:
            # What is found is noted before the lock goes: who waits for the lock reads it next.
            with self._busy:
                if self._stopped:
                    return
                try:
                    self._check(self._large.popleft())
                except IndexError:
                    return
                except BaseException as error:  # raised again where somebody waits
                    self._failure = error
                    return

    def _check(self, names: list[str]) -> None:
        for name, digest in zip(names, sha256([self._views[n] for n in names]), strict=True):
            if digest.hex() != self._digests[name]:
                self._wrong.append(name)


def _groups(sizes: Mapping[str, int], side_by_side: bool) -> tuple[deque[list[str]], list[str]]:
    """The arrays that a thread checks, by what it checks at a time, the largest first; and those left to who waits for it.

    sizes: bytes by name. side_by_side: whether sixteen arrays at a time are faster (sha256.py); one that would be the last
    of its group by far stays alone. hashlib lets other threads run while it reads, but gets its turn back between arrays
    only when they let it: with it small arrays are left to who waits.
    """
    ordered = sorted(sizes, key=lambda name: -sizes[name])
    if not side_by_side:
        large = [name for name in ordered if sizes[name] >= LARGE_BYTES]
        return deque([name] for name in large), ordered[len(large) :]
    total = sum(sizes.values())
    groups = deque([name] for name in ordered if sizes[name] > total / ALONE)
    held = GROUP_BYTES
    for name in ordered[len(groups) :]:
        if held >= GROUP_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += sizes[name]
    return groups, []
