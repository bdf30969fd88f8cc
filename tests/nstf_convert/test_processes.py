"""Processes that begin before the first one has imported anything: as many as may be wanted, and none that stays."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nstf_convert import processes
from nstf_convert.processes import VISIBLE, begin, end_waiting, seeing_only, started


@pytest.fixture(autouse=True)
def none_left(monkeypatch):
    for name in VISIBLE:
        monkeypatch.delenv(name, raising=False)
    yield
    end_waiting()


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    """A checkpoint of 65 MiB, on a machine that has a GPU of NVIDIA's by the look of it."""
    folder = tmp_path / "model"
    folder.mkdir()
    for number in range(5):
        with (folder / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(13 << 20)
    monkeypatch.setattr(processes, "NVIDIA", tmp_path)
    return folder


def alive(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None


@pytest.mark.parametrize(("device", "threads", "count"), [
    ("auto", 16, 3), ("cuda", 64, 3), ("cuda:1", 12, 2), ("auto", 8, 1), ("auto", 7, 0), ("cpu", 16, 0), ("cuda:0,1", 16, 0),
])  # fmt: skip
def test_a_process_for_four_cores_begins_where_a_gpu_may_take_it(device, threads, count, model) -> None:
    begin(str(model), device, threads, True)
    assert len(processes._waiting) == count
    waiting = [found[0] for _, found in processes._waiting]
    assert all(alive(process) for process in waiting)
    end_waiting()
    assert not any(alive(process) for process in waiting)


def test_checkpoints_of_other_sizes_have_none(model, monkeypatch, tmp_path) -> None:
    (model / "model-0.safetensors").unlink()
    begin(str(model), "auto", 16, True)
    with (model / "model-0.safetensors").open("wb") as file:
        file.truncate(1 << 30)
    begin(str(model), "auto", 16, True)
    begin(str(tmp_path / "no such model"), "auto", 16, False)
    monkeypatch.setattr(processes, "NVIDIA", tmp_path / "none")
    monkeypatch.setattr(processes, "AMD", tmp_path / "none")
    (model / "model-0.safetensors").unlink()
    (model / "model-1.safetensors").write_bytes(bytes(26 << 20))
    begin(str(model), "auto", 16, True)
    assert processes._waiting == []


def test_kernels_are_compiled_from_the_start_where_memory_is_not_bounded(model) -> None:
    begin(str(model), "cuda:1", 2, True)
    assert processes._compiling == []
    begin(str(model), "cuda:1", 2, False)
    assert processes._waiting == []
    [(device, process)] = processes._compiling
    assert device == "cuda:1" and alive(process)
    other = processes.compiler("cpu", 1)
    assert other is not None and other is not process
    other.kill()
    other.wait()
    assert processes.compiler("cuda:1", 1) is process
    assert processes._compiling == []
    process.kill()
    process.wait()


def test_the_compiling_process_runs_every_kernel_once(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch.py").write_text("raise SystemExit(7)")  # nothing is taken from where the user is
    process = processes.compiler("cpu", 1)
    assert process is not None and process.wait(120) == 0


def test_no_compiling_process_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    assert processes.compiler("cpu", 1) is None
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert processes.compiler("cpu", 1) is None


def test_one_that_waits_is_taken_by_who_wants_it_as_it_is(model) -> None:
    begin(str(model), "cuda:1", 8, True)
    (_, (process, connection)) = processes._waiting[0]
    other = started({VISIBLE[1]: "0"}, True)
    assert other is not None and other[0] is not process
    other[0].kill()
    other[0].wait()
    assert started({VISIBLE[1]: "1"}, True) == (process, connection)
    assert processes._waiting == []
    process.kill()
    process.wait()


def test_what_a_process_is_told_ends_with_the_connection(tmp_path) -> None:
    found = started({}, True)
    assert found is not None
    process, connection = found
    connection.close()
    assert process.wait(timeout=60) == 0  # it has imported everything, and nobody tells it anything


def test_a_process_ends_with_the_one_that_began_it(model) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom nstf_convert import processes\n"
        f"processes.NVIDIA = Path({str(model)!r})\n"
        f"processes.begin({str(model)!r}, 'auto', 8, True)\n"
        "print(processes._waiting[0][1][0].pid, flush=True)\nos._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    _wait_for_the_end_of(int(done.stdout))


def _wait_for_the_end_of(pid: int) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
            # Nobody may be there to be told of its end.
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.1)
    pytest.fail("it goes on")


@pytest.mark.parametrize(("visible", "wanted"), [(None, "1"), ("4,5", "5"), ("GPU-a, GPU-b", "GPU-b")])
def test_a_helper_sees_its_own_gpu_only(visible, wanted, monkeypatch) -> None:
    if visible is not None:
        monkeypatch.setenv(VISIBLE[1], visible)
    assert seeing_only(1, amd=False) == {VISIBLE[1]: wanted}


def test_on_amd_the_variable_that_is_set_says_which_gpus_are_seen(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert seeing_only(0, amd=True) == {"CUDA_VISIBLE_DEVICES": "0"}
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "4,5")
    assert seeing_only(1, amd=True) == {"HIP_VISIBLE_DEVICES": "5"}
    assert seeing_only(0, amd=False) == {"CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.parametrize(("visible", "device"), [("0", "cuda:1"), ("", "auto"), ("-1", "auto")])
def test_where_no_gpu_is_to_be_seen_none_begins(visible, device, model, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    begin(str(model), device, 16, True)
    assert processes._waiting == []
