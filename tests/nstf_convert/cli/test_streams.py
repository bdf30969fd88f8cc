"""The command as a process: streams that are closed or full, and Ctrl-C before its first and after its last line."""

import io
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nstf.kernels.cpu.engine_matrix import available

FILE = str(Path(__file__).parents[2] / "golden" / "v1.nstf")
MAIN = "from nstf_convert.cli import main; main()"


def ended(
    words: list[str],
    before: str = "",
    out: int = subprocess.PIPE,
    err: int = subprocess.PIPE,
    preexec_fn: Callable[[], None] | None = None,
    control_c: signal.Handlers = signal.SIG_DFL,
) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command in a new process. before: code that runs first there; control_c: what it
    does with SIGINT when it starts, whatever the tests were started with: a shell has its background ignore it."""

    def start() -> None:
        signal.signal(signal.SIGINT, control_c)
        if preexec_fn is not None:
            preexec_fn()

    command = [sys.executable, "-c", before + MAIN, *words]
    done = subprocess.run(command, stdout=out, stderr=err, text=True, timeout=120, preexec_fn=start)
    return done.returncode, done.stdout or "", done.stderr or ""


def closing(*numbers: int) -> Callable[[], None]:
    def close() -> None:
        for number in numbers:
            os.close(number)

    return close


def no_bytes() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@pytest.mark.parametrize("numbers", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_streams_change_no_exit_code(numbers: tuple[int, ...]) -> None:
    code, out, err = ended(["verify", FILE, "--json"], preexec_fn=closing(*numbers))
    assert (code, err) == (0, "") and (1 in numbers or '"arrays"' in out)
    code, out, err = ended(["verify", "no.nstf"], preexec_fn=closing(*numbers))
    assert code == 2 and out == "" and (2 in numbers or err.startswith("error: "))


def test_a_full_disk_below_the_messages_changes_no_exit_code(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        for words, wanted in ((["verify", "no.nstf"], 2), (["verify", FILE], 0)):
            code, out, _ = ended(words, err=log.fileno(), preexec_fn=no_bytes)
            assert code == wanted and bool(out) == (wanted == 0)


def test_a_full_disk_below_the_results_is_one_line(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        code, _, err = ended(["verify", FILE, "--json"], out=out.fileno(), preexec_fn=no_bytes)
    assert code == 1 and err.startswith("error: ") and err.count("\n") == 1


# Ctrl-C where a module is about to be imported.
PRESSED = """
import os, signal, sys
class Pressed:
    def find_spec(name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Pressed)
"""


@pytest.mark.parametrize(
    "module", ["nstf_convert.cli.running", "nstf.errors", "nstf_convert.cli.commands", "typer"]
)
def test_ctrl_c_during_imports_is_one_line(module: str) -> None:
    code, out, err = ended(["verify", FILE], PRESSED.format(module=module))
    assert (code, out, err) == (130, "", "error: interrupted\n")


# Ctrl-C while an object is finalised, where a module is imported; that lasts until the command is interrupted again.
FINALISED = """
import os, signal, sys, time
class Last:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(10))
class Pressed:
    def find_spec(name, *_):
        if name == "nstf_convert.cli.verify":
            Last()
            for _ in range(1000):
                time.sleep(0.01)
sys.meta_path.insert(0, Pressed)
"""


def test_ctrl_c_in_a_finaliser_ends_the_command(tmp_path: Path) -> None:
    """Python wrote a traceback, and the command went on."""
    code, out, err = ended(["verify", FILE], FINALISED)
    assert (code, out, err) == (130, "", "error: interrupted\n")


LATE = "import atexit, os, signal; atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"


def test_ctrl_c_after_the_last_line_is_no_traceback() -> None:
    code, out, err = ended(["verify", FILE, "--json"], LATE)
    assert code == -signal.SIGINT and '"arrays"' in out and err == ""


@pytest.mark.parametrize("before", [PRESSED.format(module="nstf_convert.cli.running"), LATE])
def test_a_command_that_was_started_with_ctrl_c_ignored_ignores_it_to_the_end(before: str) -> None:
    code, out, err = ended(["verify", FILE, "--json"], before, control_c=signal.SIG_IGN)
    assert code == 0 and '"arrays"' in out and err == ""


@pytest.mark.skipif(not available(), reason="the CPU engine was not built")
def test_what_is_alive_at_the_end_is_not_listed_as_leaked() -> None:
    alive = (
        "import ctypes; from nstf.kernels.cpu import ext; x = ext.ImageSteps()\n"
        "ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))\n"
    )
    code, _, err = ended(["verify", FILE], alive)
    assert (code, err) == (0, "")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8:surrogateescape", "ascii"])
def test_a_prompt_on_stdin_that_is_no_text_is_wrong_use(encoding: str) -> None:
    """Python's errors are strict there, but for the locales C and POSIX."""
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "generate", FILE, "-"],
        input=b"he\xffllo\n",
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    assert (done.returncode, done.stderr) == (2, b"error: the prompt is not UTF-8 text\n")


def test_a_name_that_is_no_text_is_made_visible(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"m\xff\xc3\xa9.nstf")
    path.write_bytes(Path(FILE).read_bytes())
    before = "import sys; sys.stdout.reconfigure(encoding='utf-8', errors='strict');"
    code, out, err = ended(["verify", str(path)], before)
    assert (code, err) == (0, "") and "m\\udcff" in out.splitlines()[0]


def test_a_name_that_is_no_text_is_made_visible_in_a_callers_own_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nstf_convert.cli import run

    path = tmp_path / os.fsdecode(b"m\xff.nstf")
    path.write_bytes(Path(FILE).read_bytes())
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="utf-8", errors="strict")
    monkeypatch.setattr(sys, "stdout", stream)
    assert run(["verify", str(path)]) == 0 and stream.errors == "strict"
    assert b"m\\udcff" in written.getvalue()


def test_ctrl_c_in_text_that_runs_as_code_is_the_exit_code_of_an_interruption(tmp_path: Path) -> None:
    """`python -m` ended by the signal, though the KeyboardInterrupt was caught and said: calibrate did in 7 of 23 runs."""
    (tmp_path / "odd.py").write_text(
        "from nstf_convert.cli import main, running\n"
        "def run(arguments):\n"
        "    try:\n"
        "        exec('raise KeyboardInterrupt')\n"
        "    except KeyboardInterrupt:\n"
        "        print('said')\n"
        "    return 130\n"
        "running.run = run\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-m", "odd"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "said\n")
