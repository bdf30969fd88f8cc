"""Where files may not be written: what is there stays what it is."""

import os
import stat
from pathlib import Path

import pytest

from nstf.errors import UsageError
from nstf.runtime.artifact.atomic_file import write_whole
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
