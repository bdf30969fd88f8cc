"""Where files may not be written: what is there stays what it is."""

import ctypes
import errno
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nstf.errors import NstfError, UsageError
from nstf.runtime.artifact.atomic_file import replacing, write_whole
from nstf_convert.cli.convert import write_report
from nstf_convert.gates.junit import write_junit

WRITERS = {
    "bytes": lambda path: write_whole(path, b"x"),
    "junit": lambda path: write_junit(path, "<x/>"),
    "report": lambda path: write_report(path, {}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_pipe_is_not_replaced(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    os.mkfifo(path)
    with pytest.raises(UsageError, match="device or a pipe"):
        WRITERS[name](path)
    assert stat.S_ISFIFO(path.stat().st_mode) and [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("name", WRITERS)
def test_a_name_of_255_bytes_is_written_and_a_folder_is_not(name: str, tmp_path: Path) -> None:
    path = tmp_path / ("a" * 250 + ".json")
    WRITERS[name](path)
    assert path.is_file() and len(list(tmp_path.iterdir())) == 1
    folder = tmp_path / "b.json"
    folder.mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        WRITERS[name](folder)


def failing(number: int) -> Any:
    """A C library whose renameat2 fails."""

    def renameat2(*_: Any) -> int:
        ctypes.set_errno(number)
        return -1

    return SimpleNamespace(renameat2=renameat2)


LIBRARIES = {
    "this": None,
    "one without renameat2": SimpleNamespace(),
    "a disk without": failing(errno.EINVAL),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_what_appears_under_the_name_is_kept(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if LIBRARIES[name] is not None:
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: LIBRARIES[name])
    path = tmp_path / "m.nstf"
    with replacing(path, 1, keep=True) as output:
        output.write(0, memoryview(b"1"))
    assert path.read_bytes() == b"1" and len(list(tmp_path.iterdir())) == 1
    path.unlink()
    for make in (lambda: path.write_bytes(b"mine"), lambda: path.symlink_to("nowhere")):
        with (
            pytest.raises(NstfError, match=r"m\.nstf was written by something else meanwhile, and stays"),
            replacing(path, 1, keep=True) as output,
        ):
            output.write(0, memoryview(b"2"))
            make()
        assert path.is_symlink() or path.read_bytes() == b"mine"
        assert len(list(tmp_path.iterdir())) == 1
        path.unlink()


def test_a_disk_that_fails_at_the_new_name_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: failing(errno.EIO))
    with (
        pytest.raises(NstfError, match=r"m\.nstf: cannot be written \(Input/output error\)"),
        replacing(tmp_path / "m.nstf", 1, keep=True) as output,
    ):
        output.write(0, memoryview(b"1"))
    assert list(tmp_path.iterdir()) == []
