"""The thread pool of the CPU kernels: what a worker throws reaches the caller and does not end the process."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CPU = HERE.parents[1] / "kernels" / "cpu"


def program(folder: Path, *flags: str, main: str = "parallel_throws.cpp") -> Path:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    out = folder / "parallel"
    source = [str(HERE / main), str(CPU / "parallel.cpp")]
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-g", "-pthread", f"-I{CPU}", *flags, *source, "-o", str(out)],
        check=True,
    )
    return out


def test_what_a_task_throws_is_thrown_to_the_caller_and_the_pool_goes_on(tmp_path: Path) -> None:
    done = subprocess.run([program(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "2000 1\n"), done.stderr


def test_several_callers_at_once_get_each_its_own(tmp_path: Path) -> None:
    done = subprocess.run([program(tmp_path, main="parallel_callers.cpp")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_every_share_is_done_once_and_each_worker_asked_for_what_it_fetches(tmp_path: Path) -> None:
    done = subprocess.run([program(tmp_path, main="parallel_shares.cpp")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0 800 1\n"), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("main", ["parallel_throws.cpp", "parallel_callers.cpp", "parallel_shares.cpp"])
def test_the_pool_has_no_race_that_thread_sanitizer_finds(tmp_path: Path, main: str) -> None:
    done = subprocess.run([program(tmp_path, "-fsanitize=thread", main=main)], capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-4000:]
