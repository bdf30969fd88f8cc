"""Killed at any moment and run again, a conversion ends with the identical file; so do runs in other surroundings."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from nstf_convert.pipeline import convert
from nstf_convert.pipeline.store.tensorfile import TensorFileWriter


@pytest.fixture
def straight(options, tmp_path):
    """The file of an uninterrupted run."""
    output = tmp_path / "straight.nstf"
    convert(options(output=output, work_dir=tmp_path / "straight.work"))
    return output.read_bytes()


def run_and_kill(chosen, writes: int, before: bool) -> bool:
    """Runs a conversion in a forked child that kills itself at its n-th result; True when it was killed."""
    child = os.fork()
    if child == 0:
        done = 0
        leave = TensorFileWriter.__exit__

        def counting(self, *args):
            nonlocal done
            done += 1
            if done == writes and before:
                os.kill(os.getpid(), signal.SIGKILL)
            leave(self, *args)
            if done == writes:
                os.kill(os.getpid(), signal.SIGKILL)

        TensorFileWriter.__exit__ = counting  # type: ignore[method-assign]
        try:
            convert(chosen)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("before", [True, False])
def test_resume_after_kill_gives_same_bytes(options, straight, tmp_path, before) -> None:
    killed = 0
    for writes in (1, 2, 3, 9, 20, 45, 80):
        output = tmp_path / f"out{writes}.nstf"
        chosen = options(output=output, work_dir=tmp_path / f"work{writes}")
        killed += run_and_kill(chosen, writes, before)
        convert(replace(chosen, force=True))
        assert output.read_bytes() == straight, f"killed at write {writes}"
    assert killed >= 5


def test_resume_after_many_kills_in_a_row_gives_same_bytes(options, straight, tmp_path) -> None:
    chosen = options(output=tmp_path / "out.nstf", work_dir=tmp_path / "work")
    kills = 0
    while run_and_kill(chosen, 7, False):
        assert not chosen.output.exists()
        kills += 1
        assert kills < 100, "a resumed conversion makes no progress"
    assert kills >= 3
    assert chosen.output.read_bytes() == straight


def test_damaged_results_are_computed_again(options, straight, tmp_path) -> None:
    chosen = options(output=tmp_path / "out.nstf", work_dir=tmp_path / "work")
    convert(chosen)
    for file in sorted((tmp_path / "work" / "store").rglob("*.safetensors"))[::3]:
        file.write_bytes(file.read_bytes()[:40])
    convert(replace(chosen, force=True))
    assert chosen.output.read_bytes() == straight


def test_same_bytes_in_another_folder_time_zone_and_hash_seed(options, small, tmp_path) -> None:
    results = []
    for number, (seed, zone) in enumerate([("0", "UTC"), ("77", "Asia/Tokyo")]):
        folder = tmp_path / f"place{number}"
        shutil.copytree(small.folder, folder / "model")
        shutil.copy(small.text, folder / "text.txt")
        command = [
            sys.executable, "-m", "nstf_convert", "convert", "model", "--budget", "0.5", "-o", "out.nstf",
            "--dataset", "text.txt", "--samples", "6", "--seq-len", "32", "--threads", "1", "--no-search",
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONHASHSEED": seed, "TZ": zone}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        results.append((folder / "out.nstf").read_bytes())
    assert results[0] == results[1]


def test_two_conversions_cannot_share_a_work_directory(options, tmp_path) -> None:
    from nstf.errors import NstfError
    from nstf_convert.pipeline.store.workdir import WorkDir

    (tmp_path / "work").mkdir()
    with WorkDir(tmp_path / "work", {}), pytest.raises(NstfError, match="in use by another conversion"):
        convert(options(work_dir=tmp_path / "work"))
