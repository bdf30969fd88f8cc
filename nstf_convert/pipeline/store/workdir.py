"""The work directory: results by content address, so that a killed conversion resumes and a second budget is cheap.

    job.json          what the results belong to; a run that differs is refused with the difference
    calibration...    Hessians, sensitivities, held-out reference
    store/ab/<key>    one encoded tensor, or one table of estimates, by the SHA-256 of everything it depends on
    claims/<key>      empty: which process of a run with several makes what
    pieces/<key>      what these processes leave for each other while they share a calibration; gone when it is complete

Every file appears by rename after fsync, so what exists is complete; digests tell when it was changed since. The budget is
not part of the job: encoded tensors and decompositions are shared by all budgets.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from torch import Tensor

from nstf.errors import CorruptError, NstfError, UsageError
from nstf.runtime.artifact.atomic_file import disk_errors, disk_fault
from nstf_convert.checkpoint.paths import check_name
from nstf_convert.inputs import RESULTS
from nstf_convert.pipeline.store.tensorfile import TensorFile, sync_folder, write_tensors

log = logging.getLogger("nstf")

# Folders of results: those that stay, and those that are of no use once the calibration is complete.
STORE, PIECES = "store", "pieces"
# Empty files, by which processes of a run divide the work.
CLAIMS = "claims"
# The entry of job.json that is not part of the job: what people call its digests.
NAMES = "names"
# Of a job.json; ours has a few kilobytes, and names of datasets.
MOST_JOB_BYTES = 64 << 20
# Entries that every job.json of ours has: one without them is the user's.
_ALWAYS = {"tool", "checkpoint", NAMES}


def content_key(**parts: Any) -> str:
    """The SHA-256 of canonical JSON: equal inputs give equal keys in every process."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def write_json(path: Path, data: Any) -> None:
    """Writes JSON crash-safe."""
    partial = path.with_name(f".{path.name}.part.{os.getpid()}")
    try:
        with disk_errors(path):
            with partial.open("w", encoding="utf-8") as out:
                json.dump(data, out, sort_keys=True, indent=1)
                out.flush()
                os.fsync(out.fileno())
            partial.replace(path)
            sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


# The folder may be one of the user's, so nothing is removed but what has such a name, or one of RESULTS.
_RESULT = re.compile(r"[0-9a-f]{64}(?:\.safetensors)?")
_SHORT = re.compile("[0-9a-f]{2}")
_PARTIAL = re.compile(rf"\.(?:{RESULTS.pattern}|{_RESULT.pattern})\.(?:data|part)\.[0-9]+")


class Store(Protocol):
    """Where results are kept by key: a work directory, or what stands in for one."""

    def find(self, key: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The stored (tensors, metadata), or None."""

    def find_metadata(self, key: str) -> dict[str, Any] | None:
        """The metadata alone, or None."""

    def put(self, key: str, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
        """Stores a result."""


class WorkDir:
    """An opened and locked work directory. Use as a context manager."""

    def __init__(
        self,
        path: Path,
        job: Mapping[str, Any],
        shared: bool = False,
        names: Mapping[str, Any] | None = None,
        restart: bool = False,
    ) -> None:
        """Opens or makes the directory for `job`. Raises UsageError when it belongs to another job or is in use.

        shared: a process that holds the lock has started this one, and knows what it does. names: what people call the
        parts of the job that are digests (files), for messages alone. restart: an earlier run's results are removed.
        """
        check_name(path)
        self.path = path
        self._names = dict(names or {})
        # Whether it goes when it is closed.
        self.useless = False
        self._lock: IO[str] = self._opened()
        if shared:
            self._check_job(dict(job))
            return
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self._lock.close()
                raise UsageError(
                    f"work directory {path} is in use by another conversion: wait, or choose another work directory"
                ) from error
            except OSError as error:  # a file system without locks
                self._lock.close()
                raise NstfError(
                    f"work directory {path} cannot be locked ({error.strerror}): choose one on another disk"
                ) from error
            if os.fstat(self._lock.fileno()).st_nlink:
                break
            self._lock.close()  # of a run that ended between our two calls, and took the directory with it: once more
            self._lock = self._opened()
        try:
            with disk_errors(path / "lock"):
                os.utime(self._lock.fileno())
                # By the clock of the disk, as the results have it.
                self._begun_ns = os.fstat(self._lock.fileno()).st_mtime_ns
            for folder in (path / name for name in (STORE, PIECES, CLAIMS)):
                if not folder.is_dir() and os.path.lexists(folder):  # a file, or a link to nothing; whose?
                    raise UsageError(
                        f"{folder} is no folder, where results are kept: remove it, or choose another work directory"
                    )
            self._check_job(dict(job), restart)
            with disk_errors(path):
                for folder in (path, *_result_folders(path / STORE), *_result_folders(path / PIECES)):
                    _remove_named(folder, _PARTIAL)  # half-written when an earlier run was killed
            _drop(path / CLAIMS)
        except BaseException:
            # Without a job.json the next run would take it for the user's.
            if self._own_lock and not os.path.lexists(path / "job.json"):
                with contextlib.suppress(OSError):
                    (path / "lock").unlink()
            self.close()
            raise

    def _opened(self) -> IO[str]:
        """The file of the lock, in a directory that is made if need be."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if disk_fault(error):
                with disk_errors(self.path):
                    raise
            raise UsageError(
                f"work directory {self.path} cannot be made ({error.strerror}): choose another one"
            ) from error
        with disk_errors(self.path / "lock"):
            file, self._own_lock = _lock_file(self.path / "lock")
        return file

    def __enter__(self) -> "WorkDir":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases the lock; results stay unless they are useless, temporary files of this process do not."""
        # Ctrl-C can come between the making of one and what removes it, and while that runs.
        own = re.compile(rf"\.(?:{RESULTS.pattern}|{_RESULT.pattern})\.(?:data|part)\.{os.getpid()}")
        with contextlib.suppress(OSError):
            for folder in (
                self.path,
                *_result_folders(self.path / STORE),
                *_result_folders(self.path / PIECES),
            ):
                for left in [path for path in folder.iterdir() if own.fullmatch(path.name)]:
                    with contextlib.suppress(OSError):  # one that stays must not keep the others
                        left.unlink(missing_ok=True)
        if self.useless:  # while the lock is held: the next run's results are not ours to remove
            with contextlib.suppress(OSError):
                self._clear()
                if self._own_lock:
                    (self.path / "lock").unlink()
                self.path.rmdir()
        self._lock.close()

    def discard_new(self) -> None:
        """Removes the results that were made since it was opened: what they were made of has changed meanwhile. Only when no
        other process is at work."""
        self.drop_pieces()  # before job.json: without it they would be taken for the user's
        with contextlib.suppress(OSError):
            for folder in _result_folders(self.path / STORE):
                _remove_named(folder, _RESULT, self._begun_ns)
            _remove_named(self.path, RESULTS, self._begun_ns)

    def _clear(self) -> None:
        """Removes what a run writes here, and nothing else that may lie in the folder."""
        for name in (STORE, PIECES, CLAIMS):
            _drop(self.path / name)
        _remove_named(self.path, RESULTS)  # by name: the checkpoint itself may lie here

    def _check_job(self, job: dict[str, Any], restart: bool = False) -> None:
        """Raises UsageError unless the folder holds this job's results, or none. restart: those of any job are removed."""
        file = self.path / "job.json"
        found = self._found_job(file)
        if found is None:
            self._check_foreign()
        else:
            self._own_lock = True
            if restart:
                self._clear()
        if found is None or restart:
            write_json(file, {**job, NAMES: self._names})
            return
        called = found.pop(NAMES)
        called = called if isinstance(called, dict) else {}
        differing = sorted(k for k in set(found) | set(job) if found.get(k) != job.get(k))
        if differing:
            details = "; ".join(self._difference(k, found, job, called) for k in differing)
            raise UsageError(
                f"work directory {self.path} holds results of another job ({details}): use the same settings to go "
                "on with it, `restart` to discard it, or another `work_dir`"
            )

    @staticmethod
    def _found_job(file: Path) -> dict[str, Any] | None:
        """What job.json says, or None where there is none. Raises UsageError for one that is not ours."""
        if not file.exists():
            return None
        try:
            if not file.is_file():
                raise ValueError("it is no file")
            if file.stat().st_size > MOST_JOB_BYTES:
                raise ValueError("it is too large")
            found = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(found, dict):
                raise ValueError("it is no object")
        except OSError as error:
            raise NstfError(
                f"{file} cannot be read ({error.strerror or error}): check permissions and disk"
            ) from error
        except (ValueError, RecursionError) as error:
            raise CorruptError(
                f"{file} cannot be read ({error}): where it is a conversion's, remove the work directory and run again; "
                "else choose another one"
            ) from error
        if not found.keys() >= _ALWAYS:
            raise UsageError(f"{file} is not of a conversion: move it, or choose another work directory")
        return found

    def _check_foreign(self) -> None:
        """Raises UsageError in a folder of no job where something has the name of a result: it is the user's."""
        with disk_errors(self.path):
            found = sorted(p for p in self.path.iterdir() if RESULTS.fullmatch(p.name))
            for name in (STORE, PIECES, CLAIMS):
                found += _named_as_results(self.path / name)
        if found:
            raise UsageError(
                f"{found[0]} has the name of a result, but there is no job.json beside it: move it, or choose "
                "another work directory"
            )

    def _difference(
        self, key: str, found: dict[str, Any], job: dict[str, Any], called: dict[str, Any]
    ) -> str:
        """`seed was 0, now 1`; files by their names where those are known, never by digests."""
        if key not in self._names:
            return f"{key} was {_short(found.get(key))}, now {_short(job.get(key))}"
        before = called.get(key, "another") if key in found else None
        now = self._names[key] if key in job else None
        return (
            f"{key}: {_said(now)} has changed"
            if before == now
            else f"{key}: {_said(before)}, now {_said(now)}"
        )

    def _file(self, key: str, folder: str) -> Path:
        return self.path / folder / key[:2] / f"{key}.safetensors"

    def find(self, key: str, folder: str = STORE) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The stored (tensors, metadata) of a key, or None. A damaged one is dropped with a warning and made again."""
        file = self._open(key, whole=True, folder=folder)
        return None if file is None else ({n: file.get(n) for n in sorted(file.names())}, file.metadata["of"])

    def find_metadata(self, key: str) -> dict[str, Any] | None:
        """The metadata of a stored result, or None. Its tensors are checked when they are read."""
        file = self._open(key, whole=False)
        return None if file is None else file.metadata["of"]

    def has(self, key: str, folder: str = STORE) -> bool:
        """Whether a result is there and undamaged, its tensors too."""
        return self._open(key, whole=True, folder=folder) is not None

    def put(
        self, key: str, tensors: dict[str, Tensor], metadata: dict[str, Any], folder: str = STORE
    ) -> None:
        """Stores a result under its key."""
        file = self._file(key, folder)
        if not file.parent.is_dir():
            # A file or a link in the place of a folder of results; a folder is one that another thread has made meanwhile.
            with contextlib.suppress(OSError):
                file.parent.unlink()
        if file.is_dir():  # in the place of a result that was made again without being looked for
            remove(file)
        write_tensors(file, tensors, {"key": key, "of": metadata})

    def drop_pieces(self) -> None:
        """Removes what processes have left for each other. Only when no other process is at work."""
        for name in (PIECES, CLAIMS):
            _drop(self.path / name)

    def claim(self, key: str) -> bool:
        """Whether this process is the first of this run that asks to make what belongs to a key."""
        file = self.path / CLAIMS / key
        with disk_errors(file):
            file.parent.mkdir(exist_ok=True)
            try:
                file.open("x").close()
            except FileExistsError:
                return False
        return True

    def claimed(self, key: str) -> bool:
        """Whether a process of this run has claimed a key."""
        return (self.path / CLAIMS / key).exists()

    def _open(self, key: str, whole: bool, folder: str = STORE) -> TensorFile | None:
        """The file of a key when it is there and undamaged. whole: its tensors are checked too."""
        return undamaged(self._file(key, folder), whole, key)


def undamaged(path: Path, whole: bool = True, key: str | None = None) -> TensorFile | None:
    """A file of an earlier run, or None: a damaged one is removed with a warning. whole: its tensors are checked too;
    key: what it must be the result of."""
    if not path.exists() and not path.is_symlink():
        return None
    try:
        file = TensorFile(path)
        if key is not None and file.metadata.get("key") != key:
            raise CorruptError(f"{path} is the result of something else")
        if whole:
            file.verify()
    except CorruptError as error:
        log.debug("%s", error)
        log.warning("a stored result is damaged and is made again: %s", path)
        remove(path)
        return None
    return file


def _result_folders(folder: Path) -> list[Path]:
    """The folders of results in a folder of them, each named after how its keys begin."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(p for p in folder.iterdir() if _SHORT.fullmatch(p.name) and p.is_dir())
    return []


def _named_as_results(folder: Path) -> list[Path]:
    """What has the name of a result in a folder of them, and what is no folder where `put` makes one."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if _SHORT.fullmatch(p.name) and not p.is_dir()]
    for each in (folder, *_result_folders(folder)):
        found += [p for p in each.iterdir() if _RESULT.fullmatch(p.name)]
    return sorted(found)


def _remove_named(folder: Path, pattern: re.Pattern[str], since_ns: int = 0) -> None:
    """Removes what lies in a folder under a name of that pattern, and was written since."""
    for file in sorted(folder.iterdir()):  # job.json after what belongs to it
        if pattern.fullmatch(file.name) and file.lstat().st_mtime_ns >= since_ns:
            remove(file)


def _drop(folder: Path) -> None:
    """Removes results or claims, and the folder where nothing else lies there. What cannot be removed stays, and does no
    harm."""
    with contextlib.suppress(OSError):
        for each in (*_result_folders(folder), folder):
            _remove_named(each, _RESULT)
            _remove_named(each, _PARTIAL)
            with contextlib.suppress(OSError):
                each.rmdir()


def _lock_file(path: Path) -> tuple[IO[str], bool]:
    """The open file of a lock, and whether it was made just now. Raises UsageError where something else has its name:
    opening a pipe would wait for ever, and ours are empty."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder, so nothing can be locked by it: choose another work directory")
    how, made = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, True
    try:
        descriptor = os.open(path, how | os.O_EXCL, 0o666)
    except FileExistsError:
        descriptor, made = os.open(path, how, 0o666), False
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size:
        os.close(descriptor)
        what = "holds something" if stat.S_ISREG(found.st_mode) else "is no file"
        raise UsageError(
            f"{path} {what}, so it is no lock of ours: move it, or choose another work directory"
        )
    return os.fdopen(descriptor, "w"), made


def remove(path: Path) -> None:
    """Takes away what is at a path, whatever it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)  # another process may have found it damaged too


def _said(names: Any) -> str:
    """The names of files as text; `none` for no file."""
    return ", ".join(map(str, names)) if isinstance(names, list) and names else str(names or "none")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
