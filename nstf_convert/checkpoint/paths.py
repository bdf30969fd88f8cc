"""Opening the files that a checkpoint names: only regular files of its own folder."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from nstf.errors import CorruptError, NstfError, UnsupportedError, UsageError, no_place
from nstf.runtime.artifact.atomic_file import disk_fault
from nstf.runtime.side_by_side import side_by_side

# Tensors are read in parts of this size, so many side by side.
PART_BYTES = 16 << 20
READERS = 4


def allowed_root(folder: Path) -> Path:
    """The folder that the files of a checkpoint may resolve into.

    The Hugging Face cache links `models--x/snapshots/<revision>/file` to `models--x/blobs/<hash>`, so there
    the root is `models--x`.
    """
    real = folder.resolve()
    if real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--"):
        return real.parent.parent
    return real


def member(folder: Path, name: object, named_by: str) -> Path:
    """The path of file `name` of `folder`, when that is a bare file name that stays inside.

    Raises CorruptError; NstfError where it cannot be looked up.
    """
    if not isinstance(name, str) or not is_bare_name(name):
        raise CorruptError(
            f"{named_by} names the file {str(name)[:80]!r}: only plain file names of the same folder are "
            f"accepted; "
            f"download the checkpoint again or do not trust it"
        )
    path = folder / name
    if not exists(path):
        dangling = " (a dangling link)" if is_link(path) else ""
        raise CorruptError(
            f"{str(path)[:400]} is missing{dangling} although {named_by} names it; download the checkpoint again"
        )
    if not path.resolve().is_relative_to(allowed_root(folder)):
        raise CorruptError(
            f"{path} is a link that leaves the checkpoint's folder; copy the file into the folder if you "
            f"trust it"
        )
    return path


def check_name(path: Path) -> None:
    """Raises UsageError for a path that libraries in other languages than Python could not open."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{path}: the name is not UTF-8, as the library for such files needs it: choose another"
        ) from error


def check_path(path: str | Path) -> None:
    """Raises UsageError for a path at which nothing can lie: too long, of half characters, links in a circle; NstfError
    where the machine does not say what does: in a folder that may not be searched."""
    try:
        Path(path).stat()
    except FileNotFoundError:
        return
    except OSError as error:
        if no_place(error):
            raise UsageError(f"{path}: nothing can lie there ({error.strerror}); check the path") from error
        raise _not_looked_up(path, error) from error
    except ValueError as error:  # a NUL, or half of a pair of surrogates
        raise UsageError(f"{str(path)!a}: no file can have such a name") from error


def expanded(path: str | Path) -> Path:
    """The path with `~` as a home folder. Raises UsageError for a user who has none, and for no name, which would be the
    current folder: of a variable that is not set, say."""
    if path == "":
        raise UsageError("a path is empty: give the name of a file or a folder")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{path}: there is no such user's home folder; write the path out") from error


def exists(path: Path) -> bool:
    """Whether there is something at a path; not where no file can be called so (too long a name). Raises NstfError where the
    machine does not say: in a folder that may not be searched, or behind a link into one."""
    try:
        path.stat()
    except (FileNotFoundError, ValueError):
        return False
    except OSError as error:
        if no_place(error):
            return False
        raise _not_looked_up(path, error) from error
    return True


def _not_looked_up(path: str | Path, error: OSError) -> NstfError:
    return NstfError(f"{path}: cannot be looked up ({error.strerror}); check permissions and disk")


def is_listed(folder: Path, name: str) -> bool:
    """Whether a folder holds something of that name: a link to nothing, too, which `member` refuses."""
    with reading(str(folder / name)):
        try:
            (folder / name).lstat()
        except FileNotFoundError:
            return False
    return True


def names_in(folder: Path) -> list[str]:
    """What a folder holds, by name. Raises NstfError for one that may not be read."""
    with reading(str(folder)):
        return sorted(path.name for path in folder.iterdir())


def is_link(path: Path) -> bool:
    """Whether a path is a link."""
    try:
        return path.is_symlink()
    except (OSError, ValueError):
        return False


def is_bare_name(name: str) -> bool:
    """Whether `name` is one plain path component of printable characters."""
    return (
        0 < len(name) <= 255
        and name not in (".", "..")
        and not any(c in "/\\:" or ord(c) < 32 for c in name)
        and "\x00" not in name
    )


def open_regular(path: Path) -> BinaryIO:
    """`path` opened for reading when it is a regular file; a FIFO or device is refused without blocking."""
    try:
        # O_NONBLOCK: opening a FIFO that nobody writes to would otherwise wait for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist") from error
    except ValueError as error:  # a NUL, or half of a pair of surrogates
        raise UsageError(f"{str(path)!a}: no file can have such a name") from error
    except OSError as error:
        # A disk that fails is no mistake of whoever gave the path, nor are too many open files.
        kind = NstfError if disk_fault(error) else UsageError
        raise kind(f"{path} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UnsupportedError(f"{path} is not a regular file; give a model folder or a model file")
    return os.fdopen(fd, "rb", buffering=0)


def read_small(path: Path, limit_bytes: int) -> bytes:
    """The content of a side file (config, tokenizer).

    Raises CorruptError when it is larger than `limit_bytes`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit_bytes:
            raise CorruptError(f"{path} has {size} bytes, more than the {limit_bytes} such a file can need")
        return pread_all(file, 0, size, str(path))


def read_given(path: Path, limit_bytes: int, what: str) -> bytes:
    """The content of a file that the user named, `what` for messages. Raises UsageError; NstfError where the disk fails."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit_bytes:
                raise UsageError(f"{what} {path}: {size} bytes are too many, {limit_bytes} are read")
            return pread_all(file, 0, size, f"{what} {path}")
    except UnsupportedError as error:
        raise UsageError(f"{what} {path}: not a regular file; give another") from error
    except CorruptError as error:
        raise UsageError(f"{what} {path}: the file changed while it was read; try again") from error


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Names what the machine could not read."""
    try:
        yield
    except OSError as error:
        raise NstfError(f"{what}: cannot be read ({error.strerror}); check permissions and disk") from error


def pread_all(file: BinaryIO, start: int, length: int, what: str) -> bytes:
    """Exactly `length` bytes from `start`. Raises CorruptError when the file is shorter."""
    parts: list[bytes] = []
    while length > 0:
        # One call returns at most 2 GiB - 4 KiB on Linux.
        with reading(what):
            part = os.pread(file.fileno(), min(length, 1 << 30), start)
        if not part:
            raise CorruptError(f"{what} ends {length} bytes too early; it is truncated, download it again")
        parts.append(part)
        start, length = start + len(part), length - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_into(file: BinaryIO, start: int, buffer: memoryview, what: str) -> None:
    """Fill `buffer` from `start`, without a second copy. Raises CorruptError when the file is shorter."""
    parts = range(0, len(buffer), PART_BYTES)

    def read(at: int) -> int:
        with reading(what):
            return _read_part(file, start + at, buffer[at : at + PART_BYTES])

    if len(parts) < 2:
        done = read(0)
    else:
        # What is in the system's cache is copied from there: one thread does not reach the memory's bandwidth.
        done = sum(side_by_side(read, parts, READERS))
    if done < len(buffer):
        raise CorruptError(
            f"{what} ends {len(buffer) - done} bytes too early; it is truncated, download it again"
        )


def _read_part(file: BinaryIO, start: int, buffer: memoryview) -> int:
    """How many bytes there were to fill the buffer with."""
    done = 0
    while done < len(buffer):
        got = os.preadv(file.fileno(), [buffer[done:]], start + done)
        if not got:
            break
        done += got
    return done
