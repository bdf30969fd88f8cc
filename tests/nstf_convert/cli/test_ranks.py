"""`--tensor-parallel`: processes for the ranks, one voice, and one line when one fails."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nstf.errors import NstfError, UsageError
from nstf_convert.cli import options, ranks
from nstf_convert.cli.ranks import as_ranks


def test_only_the_first_rank_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
    as_ranks(2, print, "said once")
    assert capfd.readouterr().out == "said once\n"


def test_the_error_of_a_rank_is_raised_and_the_others_end() -> None:
    with pytest.raises(UsageError, match="--stop is empty"):
        as_ranks(2, options.check_stops, [""])


def test_a_rank_that_is_no_number_is_wrong_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("abc", "-1", ""):
        monkeypatch.setenv("RANK", text)
        with pytest.raises(UsageError, match="in the environment: start by torchrun"):
            as_ranks(2, print, "x")


def test_more_ranks_than_cores_can_carry_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_cores", lambda: 2)
    with pytest.raises(UsageError, match="1024 ranks are too many for the 2 cores here: give at most 16"):
        as_ranks(1024, print, "x")


def fail(kind: type[Exception], message: str, last: bool) -> None:
    if last == (os.environ["RANK"] == "1"):
        raise kind(message)
    time.sleep(60)


@pytest.mark.parametrize(("kind", "said"), [
    (RuntimeError, r"rank 1: RuntimeError: Connection closed by peer; run again with --debug for the traceback"),
    (MemoryError, "rank 1: out of memory: Connection closed"),
    (OSError, "rank 1: Connection closed by peer$"),
])  # fmt: skip
def test_any_error_of_a_rank_is_one_line(
    kind: type[Exception], said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "GRACE", 0.1)
    with pytest.raises(NstfError, match=said):
        as_ranks(2, fail, kind, "Connection closed\nby peer", True)
    assert capfd.readouterr().err == ""


def test_debug_shows_the_traceback_of_a_rank(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "GRACE", 0.1)
    logger = logging.getLogger("nstf_convert")
    monkeypatch.setattr(logger, "level", logging.DEBUG)
    with pytest.raises(NstfError, match="rank 0: ValueError: odd"):
        as_ranks(2, fail, ValueError, "odd", False)
    assert "ValueError: odd" in capfd.readouterr().err


PARENT = """
import os, sys, time
from pathlib import Path
from nstf_convert.cli.ranks import as_ranks

def work(folder):
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(100)

if __name__ == "__main__":
    as_ranks(2, work, sys.argv[1])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_their_parent(tmp_path: Path, number: int) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(tmp_path / "parent.py"), str(tmp_path)])
    files = [tmp_path / "0", tmp_path / "1"]
    try:
        wait_for(lambda: all(f.is_file() and f.read_text() for f in files))
    finally:
        parent.send_signal(number)
        parent.wait()
    wait_for(lambda: not any(runs(int(f.read_text())) for f in files))


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# A rank imports its parent's main module first: Ctrl-C, which a terminal sends to all processes, comes meanwhile.
SCRIPT = """
import os, signal, sys

if __name__ == "__mp_main__":
    os.kill(os.getpid(), signal.SIGINT)

from nstf_convert.cli.ranks import as_ranks
from nstf_convert.cli.running import open_streams

def work():
    sys.stdout.write("said once\\n")

if __name__ == "__main__":
    open_streams()
    try:
        as_ranks(2, work)
    except BrokenPipeError:
        os._exit(3)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
"""


def script(
    folder: Path, closed: tuple[int, ...] = (), stdout: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    def start() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a shell has its background ignore
        for number in closed:
            os.close(number)

    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(folder / "script.py")]
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120, preexec_fn=start
    )


def test_ctrl_c_while_ranks_start_is_their_parents_alone(tmp_path: Path) -> None:
    done = script(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "said once\n", "")


@pytest.mark.parametrize("closed", [(1,), (0, 1), (0, 1, 2)])
def test_ranks_of_a_command_whose_streams_are_closed(tmp_path: Path, closed: tuple[int, ...]) -> None:
    done = script(tmp_path, closed)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_stdout_that_nobody_reads_is_no_failure_of_a_rank(tmp_path: Path) -> None:
    """One process says nothing of it, either."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = script(tmp_path, stdout=write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (3, "")


def test_stdin_is_no_prompt_of_several_ranks(nstf, tiny, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = nstf("generate", tiny.same, "-", "--tensor-parallel", 2)
    assert result.code == 2 and "a prompt of - reads stdin" in result.err
    assert len(result.err.splitlines()) == 1


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(NstfError, match=r"rank [01] ended without a word"):
        as_ranks(2, os._exit, 3)


ONE_DIES = """
import multiprocessing, os, sys
from nstf.errors import NstfError
from nstf_convert.cli.ranks import as_ranks

def end():
    if os.environ["RANK"] == "1":
        os._exit(3)
    raise NstfError("the other one is gone")

def look(event, arguments):
    if event == "import" and arguments[0] == "torch":
        print(len(multiprocessing.active_children()))

if __name__ == "__main__":
    sys.addaudithook(look)
    try:
        as_ranks(2, end)
    except NstfError:
        print("told")
"""


def test_ranks_are_ended_before_the_cause_is_looked_for(tmp_path: Path) -> None:
    """That imports torch, which takes seconds."""
    program = tmp_path / "one_dies.py"
    program.write_text(ONE_DIES)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    lines = done.stdout.split()
    assert lines[-1:] == ["told"] and set(lines[:-1]) == {"0"}, (done.stdout, done.stderr)


def test_started_by_torchrun_a_process_is_a_rank_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    as_ranks(2, print, "here")
    assert capsys.readouterr().out == "here\n"


@pytest.mark.parametrize(("words", "message"), [
    (("--kv-cache", "int8"), "do not go with --tensor-parallel"),
    (("--exact", "--device", "cuda"), "--exact and --kv-cache are the CPU engine's"),
    (("--device", "cuda:1"), "with --tensor-parallel give cpu, or cuda for a GPU each"),
    (("--device", "cuda"), "there are 0 GPUs"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(nstf, tiny, words, message, monkeypatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = nstf("generate", tiny.same, "the", "--tensor-parallel", 2, *words)
    assert result.code == 2 and message in result.err


@pytest.mark.slow
def test_two_ranks_generate_what_one_process_does(nstf, tmp_path) -> None:
    import torch

    from nstf.runtime.artifact import write_artifact
    from nstf.runtime.skeleton import build_skeleton
    from tests.runtime.rank_cases import BASE, dense
    from tests.runtime.test_generate import tokenizer_files

    path = tmp_path / "100_words.nstf"  # enough for two ranks
    config = {**BASE, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    torch.manual_seed(0)
    tensors = {n: dense(torch.randn(p.shape)) for n, p in build_skeleton(config).named_parameters()}
    write_artifact(path, tensors, {"config.json": json.dumps(config).encode(), **tokenizer_files()})
    words = ("generate", path, "w5 w7", "--max-new-tokens", 5, "--exact")
    command = [sys.executable, "-m", "nstf_convert", *map(str, words), "--tensor-parallel", "2"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert found.stdout == nstf(*words).out


def listens(folder: str) -> None:
    """Notes the addresses at which this rank takes connections, once it has met the other."""
    import torch

    from nstf.runtime.ranks import join

    ranks = join(2, torch.device("cpu"))
    ranks.sum(torch.ones(1 << 20))
    files = [file for file in Path("/proc/self/fd").iterdir() if file.is_socket()]
    own = {str(file.readlink()) for file in files}
    found = []
    tables = [Path(f"/proc/self/net/{name}") for name in ("tcp", "tcp6")]
    for table in filter(Path.exists, tables):  # there may be no IPv6
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(fields[1])
    (Path(folder) / str(ranks.rank)).write_text("\n".join(found))


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's tables of sockets")
def test_ranks_take_connections_of_this_machine_alone(tmp_path: Path) -> None:
    as_ranks(2, listens, str(tmp_path))
    found = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
    assert found[0] and found[1], "the ranks' store and gloo listen"
    for address in (*found[0], *found[1]):
        assert address.startswith("0100007F:"), f"listens at {address}, not at 127.0.0.1 alone"
