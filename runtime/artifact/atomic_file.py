"""A file that appears under its name complete, or not at all.

A temporary file in the destination folder, fsync, rename, fsync of the folder: open, write and rename alone
may leave an empty file after a power cut. Whatever goes wrong before the rename, an older file under the
final name is untouched and the temporary file is removed; one that a killed process left is removed by the
next.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from nstf.errors import NstfError, UsageError, no_place

CHUNK_BYTES = 1 << 24


class Output:
    """The open temporary file."""

    def __init__(self, path: Path, descriptor: int, size_bytes: int) -> None:
        self.path, self.descriptor, self.size_bytes = path, descriptor, size_bytes

    def put(self, at: int, data: memoryview) -> str:
        """Writes `data` at byte `at` and gives back its SHA-256 in hexadecimal."""
        digest = hashlib.sha256()
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            digest.update(chunk)
            self.write(at + start, chunk)
        return digest.hexdigest()

    def write(self, at: int, data: memoryview) -> None:
        """Writes all of `data` at byte `at`."""
        with disk_errors(self.path, self.size_bytes):
            os.lseek(self.descriptor, at, os.SEEK_SET)
            while data:
                data = data[os.write(self.descriptor, data) :]


@contextlib.contextmanager
def replacing(path: Path, size_bytes: int, keep: bool = False) -> Iterator[Output]:
    """A temporary file that becomes `path` when the block ends well, and vanishes when it does not.

    keep: raises NstfError where something has that name by then, which stays.
    """
    _check_destination(path, size_bytes)
    temporary, descriptor = _temporary_name(path), -1
    try:
        with disk_errors(path, size_bytes):
            descriptor = _create(temporary)
        yield Output(path, descriptor, size_bytes)
        with disk_errors(path, size_bytes):
            os.fsync(descriptor)
            place(temporary, path, keep)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    finally:
        # Not before the rename: closing drops the lock. After the fsync, close has nothing left to report.
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    _sync_folder(path, size_bytes)


def write_whole(path: Path, content: bytes) -> None:
    """`content` under the name `path`, whole or not at all. Raises UsageError and NstfError as `replacing` does."""
    with replacing(path, len(content)) as output:
        output.write(0, memoryview(content))


def place(temporary: Path, path: Path, keep: bool) -> None:
    """Gives a file its name. keep: raises NstfError where something else has it."""
    if not keep:
        temporary.replace(path)
    elif not _rename_to_new(temporary, path):
        raise appeared(path)


class AppearedError(NstfError):
    """An output was not there when the work for it began. No UsageError: with those a work directory goes, and this one is
    worth hours."""


def appeared(path: Path) -> AppearedError:
    """What is said of such an output."""
    return AppearedError(
        f"{path} was written by something else meanwhile, and stays: move it and run the same again, which goes on from "
        "here, or `force`"
    )


def _rename_to_new(first: Path, second: Path) -> bool:
    """Renames where nothing has the new name; else False. In one step where the system and its disk can (renameat2)."""
    import ctypes  # here: loading an artifact needs none of it

    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, new = -100, 1  # AT_FDCWD, RENAME_NOREPLACE
    if rename is not None:
        if rename(here, os.fsencode(first), here, os.fsencode(second), new) == 0:
            return True
        number = ctypes.get_errno()
        if number not in (errno.EEXIST, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            raise OSError(number, os.strerror(number), str(second))
    if os.path.lexists(second):
        return False
    first.rename(second)
    return True


def _sync_folder(path: Path, size_bytes: int) -> None:
    """Makes the rename survive a power cut. The new file is complete under its name already."""
    with disk_errors(path, size_bytes):
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _check_destination(path: Path, size_bytes: int) -> None:
    """Raises UsageError or NstfError, before anything is written, for a place where the file cannot go."""
    with disk_errors(path, size_bytes):
        if path.is_dir():
            raise UsageError(f"{path}: is a folder; give the path of a file")
        if path.exists() and not path.is_file():
            raise UsageError(f"{path}: is a device or a pipe, which a file would replace; give another path")
        if not path.parent.is_dir():
            raise UsageError(f"{path}: the folder {path.parent} does not exist; create it first")
        _remove_stale(path)
        disk = os.statvfs(path.parent)
    free = disk.f_bavail * disk.f_frsize
    if free < size_bytes:
        raise NstfError(
            f"{path}: {size_bytes} bytes to write, {free} free on the disk, {size_bytes - free} missing; "
            "free some space or write to another disk"
        )


def _temporary_name(path: Path) -> Path:
    """A new hidden name in the folder of `path`: a mark of the final name, then 64 random bits."""
    return path.with_name(f"{_mark(path)}{secrets.token_hex(8)}.tmp")


def _mark(path: Path) -> str:
    return f".nstf-{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:8]}-"


def _create(temporary: Path) -> int:
    """A descriptor of the new file, locked as long as it is open: so a killed writer's file is known by its
    missing lock. Mode 0666 as open(2) has it: the kernel takes the umask away.
    """
    while True:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: nothing is ever found stale
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # taken for stale between its creation and the lock: once more


def is_unfinished(file: Path, path: Path) -> bool:
    """Whether a file has the name of what a killed writer of `path` left, which the next one removes."""
    return file.name.startswith(_mark(path)) and file.name.endswith(".tmp")


def _remove_stale(path: Path) -> None:
    """Removes temporary files that killed writers of the same final name left behind."""
    for leftover in sorted(path.parent.glob(f"{_mark(path)}*.tmp")):
        with contextlib.suppress(OSError):
            descriptor = os.open(leftover, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink()
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def disk_errors(path: Path, size_bytes: int | None = None) -> Iterator[None]:
    """Turns an OSError of our own input and output into a NstfError of one line, with the path."""
    try:
        yield
    except OSError as error:
        if no_place(error):
            raise UsageError(f"{path}: nothing can lie there ({error.strerror}); check the path") from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needs = "" if not size_bytes else f", the file needs {size_bytes} bytes"
            hint = f"the disk is full{needs}; free space or use another disk"
        else:
            hint = f"cannot be written ({error.strerror or error}); check permissions and disk"
        raise NstfError(f"{path}: {hint}") from error


def disk_fault(error: BaseException) -> OSError | None:
    """The fault of the machine behind an exception of another library: of its disk, or too many open files.

    Not every library raises OSError: tokenizers (Rust) only writes "(os error 5)" into its message, torch "Input/output
    error (5)".
    """
    seen: BaseException | None = error
    for _ in range(20):
        if seen is None:
            return None
        number = seen.errno if isinstance(seen, OSError) else _said_number(str(seen))
        if number in _FAULTS:
            return OSError(number, os.strerror(number))
        if number == errno.ENOENT and "usable temporary directory" in str(
            seen
        ):  # Python's word for a full disk
            return OSError(number, "no folder for temporary files can be written")
        seen = seen.__cause__ or seen.__context__
    return None


def _said_number(message: str) -> int | None:
    """The number of an error of the system in a library's words."""
    for said, number in re.findall(r"([^:()]{1,100}?) ?\((?:os error )?(\d{1,3})\)", message[:10_000]):
        if f"(os error {number})" in message or said.strip() == os.strerror(int(number)):
            return int(number)
    return None


def raise_disk_fault(error: BaseException, doing: str) -> None:
    """Raises NstfError where the disk failed another library. doing: what it did, for the message."""
    if fault := disk_fault(error):
        raise NstfError(f"cannot {doing}: {fault.strerror}; check the disk") from error


_FAULTS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
