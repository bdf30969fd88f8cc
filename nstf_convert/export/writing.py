"""A folder, or a file with its card, that appears complete or not at all.

Everything is written into a hidden folder beside the destination, every file is synced, and renames make it appear. What a
killed export left is removed by the next one of the same name.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator
from glob import escape
from pathlib import Path

from nstf.errors import NstfError, UsageError
from nstf.runtime.artifact.atomic_file import disk_errors, disk_fault, place
from nstf.runtime.artifact.side_names import CONTENT, SETTINGS
from nstf_convert.inputs import holds, same_file

Files = list[tuple[str, int]]
# The tag by which a card is known as ours (card.py).
MARK = "- nstf"
# How a card beside a single file ends: it describes, and nothing reads it.
CARD = ".md"
# A file in every hidden folder while it is written, so that one of a like name that is not ours is never taken for it.
UNFINISHED = ".nstf-unfinished"
# What a single file was, in that folder, until its weights have been replaced.
OLDER = ".nstf-older"
# What exports write into folders: all that a newer one may remove.
WRITTEN = frozenset(("README.md", "config.json", *SETTINGS, *CONTENT))
WEIGHTS = re.compile(r"model(?:-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json")
# Weights of any name: the card says which, since other tools write such files into the folder that they read.
NAMED = re.compile(r"(.+\.(?:gguf|onnx))(?:\.data)?")


def check_destination(
    output: Path, overwrite: bool, single_file: bool = False, names: Iterable[str] = ()
) -> None:
    """Raises UsageError for a place where the export cannot go, before anything is read. single_file: it is a file, and
    names: of those that are written beside it."""
    if single_file:
        try:
            output.name.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{output}: the name is not UTF-8, as this format needs it: choose another"
            ) from error
    folder = output.resolve().parent  # where a link leads
    if not folder.is_dir():
        raise UsageError(f"the folder {folder} does not exist: create it, or give another output")
    if (
        output.is_symlink() and not output.exists()
    ):  # by the name of what it leads to it would be another kind of output
        raise UsageError(
            f"the output {output} is a link to {output.resolve()}, which is not there: give another name"
        )
    check_files([folder / name for name in names], overwrite)
    if output.is_dir() and (output.resolve() == Path.cwd() or os.path.ismount(output)):
        raise UsageError(
            f"the output {output} is the current folder or a file system of its own, which an export cannot replace: give a "
            "new folder in it"
        )
    if not output.exists() or (output.is_dir() and not single_file and not any(output.iterdir())):
        return
    if not overwrite:
        raise UsageError(f"the output {output} exists: give a new or empty folder, or `overwrite`")
    # A folder of something else, the original model's above all, is never removed for a slip of the keyboard.
    if output.is_dir() and not _is_export(output):
        raise UsageError(f"the output {output} is a folder that is no export of nstf: give another output")
    # Nor is what somebody keeps in an export: its .git where it is a repository, an adapter, notes.
    if output.is_dir() and (added := _added(output)):
        raise UsageError(
            f"the output {output} holds {added[0]}, which no export writes and replacing the folder would remove: move it, "
            "or give another output"
        )
    # Nor is a file for a folder; and a device or a pipe for nothing: root can put a folder in the place of /dev/null.
    if output.is_dir() == single_file or not (output.is_dir() or output.is_file()):
        raise UsageError(
            f"the output {output} is there and is no {'file' if single_file else 'folder'}: give another output"
        )


def check_files(files: Iterable[Path], overwrite: bool) -> None:
    """Raises UsageError where one of the files of an export is there already, without overwrite, or is no regular file."""
    for file in files:
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise UsageError(f"{file} is there and is no regular file: give another output")
        if file.exists() and not overwrite:
            raise UsageError(f"{file} exists: give another output, or `overwrite`")


def _is_export(folder: Path) -> bool:
    """Whether the folder has a model card of ours."""
    return MARK in _card(folder).splitlines()


def _card(folder: Path) -> str:
    """The text of a folder's card, "" where it has none."""
    card = folder / "README.md"
    try:
        return card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    except OSError as error:
        raise NstfError(f"{card}: cannot be read ({error.strerror}); check the disk") from error


def _added(folder: Path) -> list[str]:
    """The names in an older export's folder that are not of an export's files; links are not, whatever they are called."""
    card = _card(folder)

    def is_ours(name: str) -> bool:
        named = NAMED.fullmatch(name)
        if named is not None:
            return f'"{named[1]}"' in card
        return name in WRITTEN or WEIGHTS.fullmatch(name) is not None

    with disk_errors(folder):
        return sorted(
            e.name for e in os.scandir(folder) if not is_ours(e.name) or e.is_dir() or e.is_symlink()
        )


def check_space(output: Path, size_bytes: int) -> None:
    """Raises NstfError when the disk has too little room."""
    disk = os.statvfs(output.resolve().parent)
    free = disk.f_bavail * disk.f_frsize
    if free < size_bytes:
        raise NstfError(
            f"{output}: {size_bytes} bytes to write, {free} free on the disk, {size_bytes - free} missing; "
            "free some space or write to another disk"
        )


@contextlib.contextmanager
def staged(
    output: Path, single_file: bool = False, overwrite: bool = False, inputs: Iterable[Path] = ()
) -> Iterator[Path]:
    """A hidden folder that becomes `output` when the block ends well, and vanishes when it does not. inputs: what may lie in
    a hidden folder of such a name, which then stays.

    single_file: its files move beside `output`, that named `output.name` last: whoever sees it sees all. Raises UsageError
    where one of them is there already, without overwrite; an older `output` is never beside weights that are not its own.
    """
    # Where a link leads: the data stays on the disk that it points to, and the link stays.
    output = output.resolve()
    _remove_stale(output, [path.resolve() for path in inputs])
    with disk_errors(output):
        partial, lock = _hidden_folder(output)
    try:
        yield partial
        # What the umask leaves of 0666, as of every other file: safetensors' own writer makes files of mode 0600.
        mode = partial.stat().st_mode & 0o666
        for file in partial.rglob("*"):
            if file.is_file():
                file.chmod(mode)
                _sync(file)
        if single_file:
            files = [f for f in sorted(partial.iterdir()) if f.name != UNFINISHED]
            _sync(partial)
            check_files([output.with_name(f.name) for f in files], overwrite)
            if overwrite:
                _replace_files(files, output)
            else:
                _move_files(files, output)
            _remove(partial)
            # An older graph, now that there is this one.
            _remove_stale(output, [path.resolve() for path in inputs])
        else:
            _sync(partial)
            (partial / UNFINISHED).unlink(missing_ok=True)  # the card is its mark now
            _sync(partial)
            check_destination(output, overwrite)  # syncing may have taken minutes
            if output.is_dir():  # who may read it is its owner's to say
                partial.chmod(output.stat().st_mode & 0o7777)
            if overwrite:
                _replace_folder(partial, output)
            else:
                _move_folder(partial, output)
        _sync(output.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        # A failed write or fsync does not say of which file it was; safetensors' own writer not even in an OSError.
        fault = None if isinstance(error, NstfError) else disk_fault(error)
        if isinstance(error, OSError):
            fault = error if error.filename is None or str(partial) in str(error.filename) else None
        if fault is not None:
            with disk_errors(output):
                if fault is error:
                    raise
                raise fault from error
        raise
    finally:
        with contextlib.suppress(OSError):
            os.close(lock)


def _hidden_folder(output: Path) -> tuple[Path, int]:
    """A new hidden folder beside `output` and its descriptor, locked: a killed export's is known by the missing lock."""
    while True:
        folder = output.with_name(f".{output.name}.part.{secrets.token_hex(4)}")
        folder.mkdir()
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # taken for stale before it was locked: once more
            continue
        except OSError:
            with contextlib.suppress(OSError):
                folder.rmdir()
            raise
        with contextlib.suppress(OSError):  # a file system without locks: nothing is ever found stale
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists():
            try:
                _mark(folder)
            except OSError:
                os.close(descriptor)
                shutil.rmtree(folder, ignore_errors=True)
                raise
            return folder, descriptor
        os.close(descriptor)


def _remove_stale(output: Path, inputs: Collection[Path] = ()) -> None:
    """Removes hidden folders that killed exports of the same name left: unfinished ones, and what they had replaced.

    Folders of such a name that hold something but neither our mark nor our card are somebody else's. One that holds an input
    stays.
    """
    name = escape(output.name)
    left = list(output.parent.glob(f".{name}.part.????????"))
    if output.exists():  # else the only whole one may be among them
        left += output.parent.glob(f".{name}.old.????????")
    for leftover in left:
        if any(same_file(leftover, path) or holds(leftover, path) for path in inputs):
            continue
        with contextlib.suppress(OSError, NstfError):
            if (leftover / OLDER).exists() and not output.exists():
                continue  # the only graph of that name
            if any(leftover.iterdir()) and not (leftover / UNFINISHED).exists() and not _is_export(leftover):
                continue
            descriptor = os.open(leftover, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(leftover)
            finally:
                os.close(descriptor)


def _move_files(files: list[Path], output: Path) -> None:
    """Moves files beside `output`, that named `output.name` last, in the place of nothing. Where something has one of the
    names meanwhile, those that were moved go again."""
    moved: list[Path] = []
    try:
        for file in sorted(files, key=lambda f: f.name == output.name):
            if file.name == output.name:
                _sync(output.parent)
            target = output.with_name(file.name)
            try:
                place(file, target, keep=True)
            except NstfError as error:
                raise UsageError(f"{target} exists: give another output, or `overwrite`") from error
            moved.append(target)
    except BaseException:  # Ctrl-C too
        for file in moved:
            file.unlink(missing_ok=True)
        raise


def _replace_files(files: list[Path], output: Path) -> None:
    """Moves files beside `output`, that named `output.name` last. An older one goes first where others hold its weights: a
    kill in between leaves none of that name, and no graph with the weights of another."""
    # Weights last: until they are replaced the older graph can have its name back.
    parts = sorted((f for f in files if f.name != output.name), key=lambda f: f.suffix != CARD)
    older = None
    try:
        if any(f.suffix != CARD and output.with_name(f.name).exists() for f in parts) and output.exists():
            older = parts[0].with_name(OLDER)
            output.rename(older)
            _sync(output.parent)
        for file in parts:
            file.replace(output.with_name(file.name))
            older = older if file.suffix == CARD else None
    except BaseException:  # Ctrl-C too
        if older is not None and older.exists():
            older.rename(output)
        raise
    _sync(output.parent)
    for file in files:
        if file not in parts:
            file.replace(output)


def _move_folder(partial: Path, output: Path) -> None:
    """`partial` under the name `output`, in the place of nothing or of an empty folder."""
    try:
        partial.rename(output)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise UsageError(
                f"the output {output} exists: give a new or empty folder, or `overwrite`"
            ) from error
        raise


def _replace_folder(partial: Path, output: Path) -> None:
    """`partial` under the name `output`, which has the older export or the new one at every moment."""
    if not output.exists():
        partial.rename(output)
    elif output.is_dir() and not any(output.iterdir()):
        output.rmdir()
        partial.rename(output)
    elif _exchange(partial, output):  # the older one has the hidden name now
        _sync(output.parent)  # before anything of the older one goes: a loss of power may undo the exchange
        with disk_errors(partial):  # shutil says of a file below it alone that it failed
            _remove(partial)
    else:  # a system that cannot: the name is missing for a moment
        old = output.with_name(f".{output.name}.old.{secrets.token_hex(4)}")
        output.rename(old)
        try:
            partial.rename(output)
        except BaseException:
            old.rename(output)
            raise
        _sync(output.parent)
        _remove(old)


def _exchange(first: Path, second: Path) -> bool:
    """Exchanges two names in one step, which Linux can (renameat2); False where it did not."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0


def _remove(folder: Path) -> None:
    """Removes a folder of ours, its mark last: what a kill leaves of it is still known as ours."""
    mark = _mark(folder)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != mark:
            path.unlink()
    _sync(folder)
    mark.unlink()
    folder.rmdir()


def _mark(folder: Path) -> Path:
    """The mark of a folder that is not whole; synced: a loss of power leaves it with whatever else it leaves."""
    mark = folder / UNFINISHED
    mark.touch()
    _sync(mark)
    _sync(folder)
    return mark


def listed(folder: Path) -> Files:
    """(name, bytes) of the files of a folder, sorted."""
    files = [f for f in folder.rglob("*") if f.is_file() and f.name != UNFINISHED]
    return sorted((str(f.relative_to(folder)), f.stat().st_size) for f in files)


def write(path: Path, content: bytes) -> None:
    """Writes a small file. `staged` syncs it."""
    path.write_bytes(content)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
