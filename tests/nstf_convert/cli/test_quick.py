"""`nstf generate` without typer: the same text, and everything else is left to the full command."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from nstf.kernels.cpu.engine_matrix import available
from nstf_convert.cli import quick, run
from tests.runtime.test_engine_text import written

needs_engine = pytest.mark.skipif(not available(), reason="the CPU engine was not built")


@pytest.fixture(scope="module")
def tiny() -> ModuleType:
    from tests.runtime import conftest

    return conftest


def test_plain_command_lines_are_read() -> None:
    assert quick.parsed(["generate", "m.nstf", "a text"]) == ("m.nstf", "a text", {}, False)
    wanted = ("m.nstf", "a text", {"--max-new-tokens": 5, "--threads": 2}, True)
    for words in (
        "generate|m.nstf|a text|--max-new-tokens|5|--threads=2|--exact",
        "generate|--exact|--threads|2|m.nstf|--max-new-tokens=5|a text",
        "generate|--exact|--threads|2|--max-new-tokens=5|--|m.nstf|a text",
    ):
        assert quick.parsed(words.split("|")) == wanted
    assert quick.parsed(["generate", "m.nstf", "--", "-x"]) == ("m.nstf", "-x", {}, False)


@pytest.mark.parametrize(
    "words",
    [
        "", "chat|m|t", "generate|m", "generate|m|t|u", "generate|m|-", "generate|m|  ", "generate||t",
        "generate|m|t|--json",
        "generate|m|t|--max-new-tokens", "generate|m|t|--max-new-tokens|0", "generate|m|t|--max-new-tokens|+5",
        "generate|m|t|--max-new-tokens|5|--max-new-tokens|6", "generate|m|t|--threads|1025", "generate|m|t|--threads|٣",
        "generate|m|t|--exact=1", "generate|m|t|--exact|--exact", "generate|m|t|-h", "generate|m|t|--help",
        "generate|m|t|--temperature|0.5", "generate|m|t|--device|cpu", "generate|m|\ud800",
        "generate|m|t|--max-new-tokens|9999999999",
    ],
)  # fmt: skip
def test_all_others_are_left_to_the_full_command(words: str) -> None:
    assert quick.parsed(words.split("|")) is None


@needs_engine
def test_the_text_is_that_of_the_full_command(
    tiny: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tiny, tmp_path)
    words = ["generate", str(path), "Once upon a time", "--max-new-tokens", "12"]
    assert run(words) == 0
    short = capsys.readouterr().out
    monkeypatch.setattr(quick, "parsed", lambda words: None)
    assert run(words) == 0
    assert capsys.readouterr().out == short and short.endswith("\n")


@needs_engine
def test_what_is_wrong_with_a_file_is_said_by_the_full_command(
    tiny: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tiny, tmp_path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for name, code, message in ((path, 5, "file is damaged"), (tmp_path / "none", 2, "no such file")):
        assert run(["generate", str(name), "a time"]) == code
        out, err = capsys.readouterr()
        last = err.splitlines()[-1]
        assert out == "" and message in last and last.startswith("error: ")


@needs_engine
def test_it_imports_neither_typer_nor_the_library_of_tokenizers(tiny: ModuleType, tmp_path: Path) -> None:
    """Nor what takes long in Python's own: these are the milliseconds before the first token (docs/cpu.md)."""
    words = ["generate", str(written(tiny, tmp_path)), "a time", "--max-new-tokens", "5"]
    slow = ("typer", "pydantic", "tokenizers", "dataclasses", "inspect", "pathlib", "typing")
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; before = set(sys.modules)\n"  # what finds an editable package, too
        f"from nstf_convert.cli import run; assert run({words!r}) == 0\n"
        f"print([m for m in {slow!r} if m in sys.modules and m not in before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[]\n"), done.stdout


@needs_engine
def test_a_reader_that_leaves_is_no_error(tiny: ModuleType, tmp_path: Path) -> None:
    words = ["generate", str(written(tiny, tmp_path)), "a time", "--max-new-tokens", "40"]
    code = f"import sys; from nstf_convert.cli import main; sys.argv[1:] = {words!r}; main()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 1
