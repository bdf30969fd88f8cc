"""Checks every byte of an `.nstf` file against the SHA-256 digests it carries."""

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nstf.errors import NstfError
from nstf.runtime.artifact.header import corrupt, short
from nstf.runtime.artifact.manifest import TensorRecord
from nstf.runtime.artifact.reader import Artifact, open_artifact, read_structure

CHUNK_BYTES = 1 << 20
LARGE_BYTES = 1 << 17


@dataclass(frozen=True)
class Verified:
    """What was checked: tensors (`shared_tensors` of them are other names), arrays, files; bytes read."""

    tensors: int
    shared_tensors: int
    arrays: int
    files: int
    size_bytes: int


def verify(path: str | os.PathLike[str]) -> Verified:
    """Reads the whole file and gives back what was found good.

    Raises CorruptError that names the first array whose SHA-256 differs, and whatever `open_artifact` raises.
    Memory: the header and 1 MiB.
    """
    manifest, entries = read_structure(path)
    digests = dict(zip(sorted(entries), manifest.sha256, strict=True))
    size_bytes = 0
    try:
        with Path(path).open("rb") as file:
            for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
                digest, at = hashlib.sha256(), entry.start
                file.seek(at)
                while at < entry.end:
                    chunk = file.read(min(CHUNK_BYTES, entry.end - at))
                    if not chunk:
                        raise corrupt(path, f"array {short(name)} ends early")
                    digest.update(chunk)
                    at += len(chunk)
                if digest.hexdigest() != digests[name]:
                    raise corrupt(path, f"array {short(name)} differs from its SHA-256")
                size_bytes = max(size_bytes, entry.end)
    except OSError as error:
        raise NstfError(f"{path}: cannot be read ({error.strerror}); check the file and the disk") from error
    with open_artifact(path) as artifact:
        for name in artifact.file_names():
            artifact.file(name)
    shared = sum(not isinstance(record, TensorRecord) for record in manifest.tensors.values())
    return Verified(len(manifest.tensors), shared, len(entries), len(manifest.files), size_bytes)


def start_verifying(artifact: Artifact) -> Callable[[], None]:
    """Checks every SHA-256 of an open artifact in a thread, over its mapping: the pages are in memory afterwards.

    The function given back waits for the end and raises CorruptError that names the first array that differs.
    """
    digests = dict(zip(sorted(artifact.entries), artifact.manifest.sha256, strict=True))
    wrong: list[str] = []

    def check(names: list[str]) -> None:
        wrong.extend(n for n in names if hashlib.sha256(artifact.stored_bytes(n)).hexdigest() != digests[n])

    # hashlib lets other threads run while it reads, but gets its turn back between arrays only when they let it: the thread
    # takes the large ones, largest first, and leaves the small ones to who waits.
    sizes = {name: entry.end - entry.start for name, entry in artifact.entries.items()}
    large = sorted((n for n, size in sizes.items() if size >= LARGE_BYTES), key=lambda n: -sizes[n])
    thread = threading.Thread(target=check, args=(large,), daemon=True)
    thread.start()

    def wait() -> None:
        check(sorted(set(sizes) - set(large)))
        thread.join()
        if wrong:
            raise corrupt(artifact.path, f"array {short(wrong[0])} differs from its SHA-256")

    return wait
