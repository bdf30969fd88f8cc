"""Paths at which nothing can lie: one line and exit code 2 (wrong use), in commands and in Python."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import nstf.runtime
import nstf_convert
from nstf.errors import NstfError, UsageError
from nstf.runtime.artifact.atomic_file import write_whole
from nstf_convert import dataset
from nstf_convert.checkpoint import open_checkpoint
from nstf_convert.cli import run

MODEL = Path(__file__).parents[2] / "examples" / "tiny_llama" / "model"
ARTIFACT = Path(__file__).parents[1] / "golden" / "v1.nstf"
LONG = "n" * 256
NAMES = {
    "long": lambda folder: str(folder / LONG),
    "half a pair": lambda folder: str(folder / "x\ud800"),
    "a NUL": lambda folder: str(folder / "x\0y"),
    "below a file": lambda folder: str(ARTIFACT / "x"),
    "a circle": lambda folder: str(folder / "circle"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "circle").symlink_to("circle")
    return tmp_path


@pytest.mark.parametrize("how", NAMES)
@pytest.mark.parametrize("field", ["model", "output", "dataset", "work_dir", "calibration"])
def test_no_argument_of_a_conversion_names_such_a_path(folder: Path, field: str, how: str) -> None:
    given = {"model": str(MODEL), "output": str(folder / "o.nstf"), field: NAMES[how](folder)}
    model = given.pop("model")
    with pytest.raises(UsageError, match=r"nothing can lie there|no file can have such a name"):
        nstf_convert.convert(model, budget=0.5, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", NAMES)
@pytest.mark.parametrize("call", [nstf.runtime.load, nstf.runtime.load_tensors, nstf.runtime.load_tokenizer])
def test_nor_does_what_is_loaded(folder: Path, how: str, call: Callable[[str], object]) -> None:
    with pytest.raises(UsageError):
        call(NAMES[how](folder))


@pytest.mark.parametrize("how", NAMES)
def test_nor_a_checkpoint(folder: Path, how: str) -> None:
    with pytest.raises(UsageError):
        open_checkpoint(NAMES[how](folder))


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that may not be searched, whoever runs the tests."""
    folder, real = tmp_path / "locked", os.stat
    folder.mkdir()

    def stat(path: Any, *how: Any, **more: Any) -> os.stat_result:
        followed = os.path.realpath if more.get("follow_symlinks", True) else os.path.abspath
        if not isinstance(path, int) and folder in Path(followed(os.fsdecode(path))).parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *how, **more)

    monkeypatch.setattr(os, "stat", stat)
    return folder


@pytest.mark.parametrize("field", ["model", "output", "dataset", "work_dir", "calibration"])
def test_a_folder_that_may_not_be_searched_is_one_of_our_errors(locked: Path, field: str) -> None:
    """It was a PermissionError, or what lies there was said not to exist."""
    given = {"model": str(MODEL), "output": str(locked.with_name("o.nstf")), field: str(locked / "x.txt")}
    model = given.pop("model")
    with pytest.raises(NstfError, match=r"x\.txt: cannot be looked up \(Permission denied\)") as error:
        nstf_convert.convert(model, budget=0.5, **given)  # type: ignore[arg-type]
    assert error.value.exit_code == 1


def test_nor_is_a_model_of_such_a_folder_said_to_hold_nothing(
    locked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NstfError, match=r"cannot be read \(Permission denied\)"):
        open_checkpoint(locked)
    monkeypatch.undo()
    monkeypatch.setattr(Path, "iterdir", _denied)
    with pytest.raises(NstfError, match=r"locked: cannot be read \(Permission denied\)"):
        open_checkpoint(locked)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_nor_is_a_link_into_such_a_folder_said_to_dangle(locked: Path, tmp_path: Path, name: str) -> None:
    """A cache of the hub whose blobs may not be searched was said to be damaged, with exit code 5."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    (folder / name).unlink()
    (folder / name).symlink_to("../locked/blob")
    with pytest.raises(NstfError, match=rf"{name}: cannot be looked up \(Permission denied\)") as error:
        nstf_convert.convert(folder, output=tmp_path / "o.nstf", budget=0.5)
    assert error.value.exit_code == 1


def test_nor_is_a_key_or_a_template_of_such_a_folder_wrong_use(
    locked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Path.open

    def opened(path: Path, *how: Any, **more: Any) -> Any:
        path.stat()  # for root, who may search every folder
        return real(path, *how, **more)

    monkeypatch.setattr(Path, "open", opened)
    for option in ("--api-key-file", "--chat-template"):
        assert run(["serve", str(ARTIFACT), option, str(locked / "x")]) == 1
        assert "cannot be read" in capsys.readouterr().err
        assert run(["serve", str(ARTIFACT), option, str(locked.with_name("none"))]) == 2


def _denied(path: Path) -> Any:
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


def test_a_home_folder_that_is_none() -> None:
    for call in (open_checkpoint, lambda path: list(dataset.load_text(path))):
        with pytest.raises(UsageError, match="no such user's home folder"):
            call("~nobody-is-called-so/x")


def test_a_file_that_is_written_has_a_place(folder: Path) -> None:
    for how in ("long", "below a file"):
        with pytest.raises(UsageError):
            write_whole(Path(NAMES[how](folder)), b"x")


# Arguments in which LONG stands for the name.
COMMANDS = [
    ["diff", f"{LONG}.nstf", str(ARTIFACT)],
    ["diff", str(ARTIFACT), LONG],
    ["inspect", f"{LONG}.nstf"],
    ["verify", LONG],
    ["convert", LONG, "--budget", "0.5", "-o", "x.nstf"],
    ["convert", str(MODEL), "--budget", "0.5", "-o", f"{LONG}.nstf"],
    ["convert", str(MODEL), "--budget", "0.5", "--work-dir", LONG],
    ["convert", str(MODEL), "--budget", "0.5", "--dataset", f"{LONG}.txt"],
    ["convert", str(MODEL), "--budget", "0.5", "--calibration", LONG],
    ["calibrate", str(MODEL), "-o", LONG],
    ["plan", str(MODEL), "--budget", "0.5", "--work-dir", LONG],
    ["generate", f"{LONG}.nstf", "x"],
    ["serve", LONG],
    ["place", LONG, "--machine", "h200x1"],
    ["place", str(ARTIFACT), "--machine", LONG],
    ["export", str(ARTIFACT), "-o", LONG],
    ["export", LONG, "-o", "x"],
    ["bench", LONG],
    ["profile", LONG],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: "-".join(w[:9] for w in words if w != "0.5"))
def test_commands_end_with_the_code_of_wrong_use(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(words) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and printed.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["arrays", "parquet", "bin", "source"])
def test_a_name_that_a_library_cannot_open_is_no_damage(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were called damaged, or no files of their kind."""
    odd = os.fsdecode(b"\xff")
    model, rest = "examples/tiny_conv/model", ["--budget", "0.9", "--effort", "fast"]
    if kind == "arrays":
        save_file({"pixel_values": torch.randn(8, 3, 32, 32)}, tmp_path / "a")
        (tmp_path / "a").rename(tmp_path / f"{odd}.safetensors")
        words = ["plan", model, *rest, "--dataset", str(tmp_path / f"{odd}.safetensors")]
    elif kind == "parquet":
        pytest.importorskip("pyarrow")
        (tmp_path / f"{odd}.parquet").write_bytes(b"PAR1")
        words = ["plan", "examples/tiny_llama/model", *rest, "--dataset", str(tmp_path / f"{odd}.parquet")]
    elif kind == "bin":
        torch.save({"w": torch.randn(64, 64)}, tmp_path / "w")
        (tmp_path / "w").rename(tmp_path / f"{odd}.bin")
        words = ["plan", str(tmp_path / f"{odd}.bin"), *rest]
    else:
        pytest.importorskip("onnx")
        shutil.copy(ARTIFACT, tmp_path / "m.nstf")
        (tmp_path / f"{odd}.onnx").write_bytes(b"x")
        words = [
            "export",
            str(tmp_path / "m.nstf"),
            "--to",
            "onnx",
            "--source",
            str(tmp_path / f"{odd}.onnx"),
        ]
        words += ["-o", str(tmp_path / "out.onnx")]
    assert run(["-q", *words]) == 2
    error = capsys.readouterr().err
    assert "the name is not UTF-8" in error and error.count("\n") == 1
