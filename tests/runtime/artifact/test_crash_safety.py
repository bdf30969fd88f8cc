"""A fault at every call into the operating system: the old file or the new one, and no leftovers."""

import errno
import gc
import hashlib
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nstf.errors import NstfError
from nstf.runtime.artifact import open_artifact, write_artifact

CALLS = ("open", "write", "lseek", "fsync", "fstat", "replace", "statvfs", "stat")
OLD = b"the old file"


class Fault:
    """Counts the calls of functions of `os` and fails the one numbered `at`, before or after it is done."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException | None, after: bool
    ) -> None:
        self.count, self.at, self.error, self.after = 0, at, error, after
        self.replaced = False
        self.failed = ""
        for name in CALLS:
            monkeypatch.setattr(os, name, self.wrap(name, getattr(os, name)))

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            fails = self.count == self.at
            if fails and not self.after:
                self.failed = name
                raise self.error or AssertionError
            result = call(*args, **kwargs)
            self.replaced |= name == "replace"
            if fails:
                self.failed = name
                if name == "open":
                    os.close(result)
                raise self.error or AssertionError
            return result

        return wrapped


ERRORS = {
    "full": (lambda: OSError(errno.ENOSPC, "No space left on device"), False),
    "input/output error": (lambda: OSError(errno.EIO, "Input/output error"), False),
    "interrupt before": (KeyboardInterrupt, False),
    "interrupt after": (KeyboardInterrupt, True),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_fault_at_any_call_leaves_the_old_file_or_the_whole_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: dict[str, Any], kind: str
) -> None:
    make, after = ERRORS[kind]
    reference = tmp_path / "reference.nstf"
    write_artifact(reference, **sample)
    new = reference.read_bytes()
    folder = tmp_path / "out"
    folder.mkdir()
    path = folder / "m.nstf"
    faults: list[str] = []
    gc.collect()  # files of earlier tests close now, not in the middle
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    for at in range(1, 1000):
        path.write_bytes(OLD)
        with monkeypatch.context() as patch:
            fault = Fault(patch, at, make(), after)
            try:
                write_artifact(path, **sample)
            except (NstfError, KeyboardInterrupt) as error:
                caught: BaseException | None = error
            else:
                caught = None
        if not fault.failed:
            break
        faults.append(fault.failed)
        assert caught is not None, f"{fault.failed} at call {at} was not reported"
        assert [p.name for p in folder.iterdir()] == ["m.nstf"], f"{fault.failed} at call {at} left a file"
        assert path.read_bytes() == (new if fault.replaced else OLD), f"{fault.failed} at call {at}"
        if isinstance(caught, NstfError):
            assert "\n" not in str(caught) and str(caught).startswith(f"{path}: ")
            assert ("the disk is full" in str(caught)) == (kind == "full")
    assert path.read_bytes() == new
    assert set(faults) == set(CALLS)
    assert len(faults) > 60
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_disk_full_says_how_many_bytes_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: dict[str, Any]
) -> None:
    path = tmp_path / "m.nstf"
    size = write_artifact(path, **sample)
    path.write_bytes(OLD)
    real = os.statvfs(tmp_path)

    class Small:
        f_bavail, f_frsize = 1, 1000

    monkeypatch.setattr(os, "statvfs", lambda _: Small)
    with pytest.raises(NstfError) as caught:
        write_artifact(path, **sample)
    assert str(caught.value) == (
        f"{path}: {size} bytes to write, 1000 free on the disk, {size - 1000} missing; "
        "free some space or write to another disk"
    )
    assert real.f_bavail > 1
    assert path.read_bytes() == OLD
    assert list(tmp_path.iterdir()) == [path]


def test_disk_that_fills_up_in_the_middle_of_a_write_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: dict[str, Any]
) -> None:
    written, real = 0, os.write

    def write(descriptor: int, data: memoryview) -> int:
        """At most 100 bytes a call, 1500 in all: the way a disk really fills up."""
        nonlocal written
        if written >= 1500:
            raise OSError(errno.ENOSPC, "No space left on device")
        written += (done := real(descriptor, bytes(data[:100])))
        return done

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(
        NstfError, match=r"the disk is full, the file needs \d+ bytes; free space or use another"
    ):
        write_artifact(tmp_path / "m.nstf", **sample)
    assert list(tmp_path.iterdir()) == []


def test_short_writes_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: dict[str, Any]
) -> None:
    write_artifact(tmp_path / "a.nstf", **sample)
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, bytes(data[:7])))
    write_artifact(tmp_path / "b.nstf", **sample)
    assert (tmp_path / "a.nstf").read_bytes() == (tmp_path / "b.nstf").read_bytes()


def test_error_while_making_a_tensor_passes_through_and_leaves_no_file(
    tmp_path: Path, sample: dict[str, Any]
) -> None:
    from nstf.runtime.artifact import Source

    def load() -> Any:
        raise OSError(errno.EIO, "the checkpoint, not the artifact")

    first = sample["tensors"]["model.layers.1.weight"]
    tensors = {**sample["tensors"], "z": Source(first.tree, first.shape, "float32", load)}
    with pytest.raises(OSError, match="the checkpoint, not the artifact"):
        write_artifact(tmp_path / "m.nstf", tensors)
    assert list(tmp_path.iterdir()) == []


def test_killed_writer_leaves_the_old_file_and_the_next_one_cleans_up(
    tmp_path: Path, sample: dict[str, Any]
) -> None:
    path = tmp_path / "m.nstf"
    write_artifact(path, **sample)
    new = path.read_bytes()
    other = tmp_path / ".nstf-of-somebody-else.tmp"
    other.write_bytes(b"")
    leftovers = 0
    for at in range(1, 60, 3):
        path.write_bytes(OLD)
        child = os.fork()
        if child == 0:
            calls, real = 0, os.write

            def write(descriptor: int, data: Any, at: int = at, real: Any = real) -> int:
                nonlocal calls
                calls += 1
                if calls == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return int(real(descriptor, data))

            os.write = write  # type: ignore[assignment]
            try:
                write_artifact(path, **sample)
            finally:
                os._exit(0)
        status = os.waitpid(child, 0)[1]
        killed = os.WIFSIGNALED(status)
        assert path.read_bytes() == (OLD if killed else new)
        leftovers += len(list(tmp_path.iterdir())) - 2
        write_artifact(path, **sample)
        assert sorted(tmp_path.iterdir()) == [other, path]
        assert path.read_bytes() == new
        if not killed:
            break
    assert leftovers > 5


def test_temporary_file_of_a_living_writer_is_left_alone(tmp_path: Path, sample: dict[str, Any]) -> None:
    """Two writers of one name: each has its own file, and the last rename wins."""
    from nstf.runtime.artifact import Source

    path = tmp_path / "m.nstf"
    first = sample["tensors"]["model.layers.1.weight"]

    def load() -> Any:
        write_artifact(path, {"inner": first})
        return first

    write_artifact(path, {"outer": Source(first.tree, first.shape, "float32", load)})
    with open_artifact(path) as artifact:
        assert artifact.names() == ["outer"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002, 0])
def test_umask_decides_the_mode(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_artifact(tmp_path / "m.nstf", {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "m.nstf").stat().st_mode) == 0o666 & ~umask


def test_file_and_folder_are_synced_around_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: dict[str, Any]
) -> None:
    log: list[str] = []
    for name in ("write", "fsync", "replace"):
        real = getattr(os, name)

        def logged(first: Any, *rest: Any, name: str = name, real: Any = real) -> Any:
            folder = name == "fsync" and stat.S_ISDIR(os.fstat(first).st_mode)
            log.append("fsync folder" if folder else name)
            return real(first, *rest)

        monkeypatch.setattr(os, name, logged)
    write_artifact(tmp_path / "m.nstf", **sample)
    assert log == ["write"] * (len(log) - 3) + ["fsync", "replace", "fsync folder"]


def test_same_bytes_whatever_the_hash_seed_folder_and_time_zone(tmp_path: Path) -> None:
    """Sets of texts are ordered by PYTHONHASHSEED: the children build their mappings from sets."""
    import subprocess
    import sys

    script = """
import sys, torch
from nstf.kernels.formats import EncodedTensor, node_from_json
from nstf.runtime.artifact import Shared, write_artifact
node = node_from_json({"kind": "dense", "dtype": "float32"})
names = {f"layer{i}.weight" for i in range(30)}
tensors = {n: EncodedTensor(node, (2, 3), {"values": torch.full((2, 3), float(len(n)))}) for n in names}
tensors |= {n + ".alias": Shared(n) for n in names}
meta = {"plan": {n: {"b": 1.5, "a": [1]} for n in names}}
write_artifact(sys.argv[1], tensors, {n: n.encode() * 9 for n in names}, meta)
print(list(names))
"""
    digests, orders = set(), set()
    children = []
    for number, (seed, zone) in enumerate((("0", "UTC"), ("1", "Asia/Kathmandu"))):
        folder = tmp_path / f"folder {number}"
        folder.mkdir()
        path = folder / f"{number}.nstf"
        environment = {**os.environ, "PYTHONHASHSEED": seed, "TZ": zone, "OMP_NUM_THREADS": str(number + 1)}
        command = [sys.executable, "-c", script, str(path)]
        children.append(
            (path, subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE))
        )
    for path, child in children:
        orders.add(child.communicate()[0])
        assert child.returncode == 0
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(orders) == 2
    assert len(digests) == 1


def test_small_real_disk_full(tmp_path: Path, sample: dict[str, Any]) -> None:
    """A tmpfs of one page in a mount namespace of its own; where the kernel allows one."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    size = write_artifact(tmp_path / "reference.nstf", **sample)
    folder = tmp_path / "small"
    folder.mkdir()
    child = os.fork()
    if child == 0:
        outcome = 3
        try:
            new_namespace, private = 0x20000, 0x44000
            if libc.unshare(new_namespace) == 0:
                libc.mount(b"none", b"/", None, private, None)
                if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=4096") == 0:
                    try:
                        write_artifact(folder / "m.nstf", **sample)
                        outcome = 1
                    except NstfError as error:
                        wanted = f"{size} bytes to write, 4096 free on the disk, {size - 4096} missing"
                        outcome = 0 if wanted in str(error) and not list(folder.iterdir()) else 2
        finally:
            os._exit(outcome)
    outcome = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if outcome == 3:
        pytest.skip("no right to mount")
    assert outcome == 0
