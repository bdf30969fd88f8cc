"""Killed at any moment and run again, a conversion ends with the identical file; so do runs in other surroundings."""

import importlib
import logging
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from nstf_convert.options import ConvertOptions
from nstf_convert.pipeline import convert
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.improve import front_to_back
from nstf_convert.pipeline.machine import Machine
from nstf_convert.pipeline.store.tensorfile import TensorFileWriter

WRITE = TensorFileWriter, "__exit__"
ENCODE = front_to_back._Pass, "_encode"
MEASURE = mixes, "measure_splits"
FINAL = importlib.import_module("nstf_convert.pipeline.convert"), "write_artifact"
# What is called for how many times before the process dies, and whether it dies before or after that call. In a row
# these are spread over a whole conversion, the passes front to back and the file itself included.
KILLS = (
    (WRITE, 1, True),
    (WRITE, 2, False),
    (WRITE, 9, True),
    (ENCODE, 4, True),
    (WRITE, 3, True),
    (ENCODE, 6, False),
    (MEASURE, 1, True),
    (FINAL, 1, True),
)


def run_and_kill(chosen: ConvertOptions, place: tuple[Any, str], calls: int, before: bool) -> bool:
    """Runs a conversion in a forked child that kills itself at the n-th call of a function; True when it did."""
    child = os.fork()
    if child == 0:
        owner, name = place
        done, real = 0, getattr(owner, name)

        def counting(*args, **kwargs):
            nonlocal done
            done += 1
            if done == calls and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if done == calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, counting)
        try:
            convert(chosen)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_resume_after_many_kills_in_a_row_gives_same_bytes(default_options, converted, tmp_path) -> None:
    chosen = default_options(work_dir=tmp_path / "work")
    for place, calls, before in KILLS:
        assert run_and_kill(chosen, place, calls, before), (place, calls)
        assert not chosen.output.exists()
    resumed = convert(chosen)
    assert "calibration" not in {stage["name"] for stage in resumed.report["stages"]}
    assert chosen.output.read_bytes() == converted.content


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("writes", [1, 2, 3, 9, 20, 30, 40, 50])
def test_resume_after_kill_gives_same_bytes(default_options, converted, tmp_path, writes, before) -> None:
    chosen = default_options(work_dir=tmp_path / "work")
    assert run_and_kill(chosen, WRITE, writes, before)
    convert(replace(chosen, force=True))
    assert chosen.output.read_bytes() == converted.content


def test_same_bytes_in_another_process_folder_time_zone_and_hash_seed(converted, small, tmp_path) -> None:
    shutil.copytree(small.folder, tmp_path / "model")
    shutil.copy(small.text, tmp_path / "text.txt")
    command = [
        sys.executable, "-m", "nstf_convert", "convert", "model", "--budget", "0.5", "-o", "out.nstf",
        "--dataset", "text.txt", "--samples", "6", "--seq-len", "32", "--threads", "1", "--prefer", "size",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONHASHSEED": "77", "TZ": "Asia/Tokyo"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.nstf").read_bytes() == converted.content


def test_same_bytes_with_more_threads(options, quick) -> None:
    assert convert(options(threads=2)).output.read_bytes() == quick.content


def test_two_conversions_cannot_share_a_work_directory(options, tmp_path) -> None:
    from nstf.errors import UsageError
    from nstf_convert.pipeline.store.workdir import WorkDir

    (tmp_path / "work").mkdir()
    with WorkDir(tmp_path / "work", {}), pytest.raises(UsageError, match="in use by another conversion"):
        convert(options(work_dir=tmp_path / "work"))


def test_a_calibration_on_fewer_windows_is_made_again_where_there_is_room_for_all(
    default_options, converted, monkeypatch, tmp_path, caplog
) -> None:
    work = tmp_path / "work"
    with monkeypatch.context() as patched:
        patched.setattr(Machine, "activation_bytes", property(lambda machine: 90_000))
        with caplog.at_level(logging.WARNING, "nstf"):
            short = convert(default_options(work_dir=work, output=tmp_path / "short.nstf"))
    assert short.report["resources"]["windows"]["calibrated"] < short.report["resources"]["windows"]["asked"]
    assert "windows fit" in caplog.text
    again = convert(default_options(work_dir=work))
    assert again.output.read_bytes() == converted.content != short.output.read_bytes()
