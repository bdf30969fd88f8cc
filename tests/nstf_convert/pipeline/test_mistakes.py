"""A mistake in the input leaves nothing behind, so that its correction is not taken for another session."""

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nstf.errors import CorruptError, NstfError, UsageError
from nstf_convert.pipeline import calibrate, convert
from nstf_convert.pipeline.calibrate import make
from nstf_convert.pipeline.session import Session


def test_a_dataset_that_is_too_short_leaves_no_work_directory(options, tmp_path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("kab")
    chosen = options(("ratio", 0.6), datasets=(str(text),))
    with pytest.raises(UsageError, match="has 1 tokens"):
        convert(chosen)
    assert not chosen.output.with_name(chosen.output.name + ".work").exists()
    assert convert(options(("ratio", 0.6))).output.exists()


def test_a_work_directory_that_was_asked_for_is_kept_and_unlocked(options, tmp_path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("kab")
    work = tmp_path / "mine"
    for _ in range(2):
        with pytest.raises(UsageError, match="has 1 tokens"):
            convert(options(("ratio", 0.6), datasets=(str(text),), work_dir=work))
    assert (work / "job.json").exists()


def test_a_dataset_that_changes_while_it_is_read_is_no_calibration_of_either(
    options, small, tmp_path, monkeypatch
) -> None:
    """The work directory named the text that was there first, and held the statistics of the other."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(small.text.read_text())
    real = make.inputs.text_data

    def late(*given):
        (folder / "b.txt").write_text("kab " * 3000)
        return real(*given)

    monkeypatch.setattr(make.inputs, "text_data", late)
    chosen = options(("ratio", 0.6), datasets=(str(folder),))
    with pytest.raises(UsageError, match="texts changed while it was read"):
        convert(chosen)
    assert not chosen.output.with_name(chosen.output.name + ".work").exists()


def test_a_dataset_whose_name_is_no_text_is_converted_on(options, small, tmp_path) -> None:
    """Any name beyond ASCII where the locale is C. All was done, and the file could not be written."""
    text = tmp_path / "t\udcff.txt"
    text.write_bytes(small.text.read_bytes())
    done = convert(options(("ratio", 0.6), datasets=(str(text),)))
    assert done.output.exists() and "t\\udcff.txt" in json.dumps(done.report).replace("\\\\", "\\")


def test_an_unknown_format_is_refused_before_any_work(options) -> None:
    chosen = options(("ratio", 0.6), formats=("zork",))
    before = sorted(chosen.output.parent.iterdir())
    with pytest.raises(UsageError, match="unknown format 'zork'"):
        convert(chosen)
    assert sorted(chosen.output.parent.iterdir()) == before


def test_weights_that_are_not_finite_leave_no_work_directory(options, small, tmp_path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "broken"
    shutil.copytree(small.folder, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    chosen = options(("ratio", 0.6), model=str(folder))
    with pytest.raises(CorruptError, match="NaN or infinite"):
        convert(chosen)
    assert not chosen.output.with_name(chosen.output.name + ".work").exists()


def test_a_file_that_is_no_calibration_is_not_called_worth_deleting(options, small) -> None:
    weights = small.folder / "model.safetensors"
    with pytest.raises(CorruptError, match=r"not a calibration file.*`nstf calibrate`") as caught:
        convert(options(("ratio", 0.6), calibration=weights))
    assert "delete" not in str(caught.value)


@pytest.mark.parametrize("call", ["is_file", "open"])
def test_a_calibration_file_that_cannot_be_read_is_no_damaged_one(
    options, tmp_path, monkeypatch, call
) -> None:
    path, real = tmp_path / "given.safetensors", getattr(Path, call)
    path.write_bytes(b"x")

    def fails(file, *how, **more):
        if file == path:
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return real(file, *how, **more)

    monkeypatch.setattr(Path, call, fails)
    with pytest.raises(NstfError, match=r"given.safetensors cannot be read \(Permission denied\)") as error:
        convert(options(("ratio", 0.6), calibration=path))
    assert error.value.exit_code == 1


def test_errors_of_the_library_say_what_an_option_means_and_name_no_flag(options, tmp_path) -> None:
    from safetensors.torch import save_file

    broken, uneven = tmp_path / "broken.safetensors", tmp_path / "uneven.safetensors"
    broken.write_bytes(b"no header")
    save_file({"input_ids": torch.zeros(8, 4, dtype=torch.int64), "mask": torch.zeros(7, 4)}, str(uneven))
    for dataset, message in ((broken, "is not a safetensors file"), (uneven, "needs the same first axis")):
        with pytest.raises(UsageError, match=message) as caught:
            convert(options(datasets=(str(dataset),)))
        assert "--" not in str(caught.value) and str(caught.value).startswith(f"the dataset {dataset}")


@pytest.mark.parametrize("command", [convert, calibrate])
def test_an_output_that_appears_meanwhile_stays_and_the_work_is_kept(
    options, monkeypatch, command: Callable[[object], object]
) -> None:
    """Another conversion's file, or the user's, was replaced without force."""
    chosen = options(("ratio", 0.6))
    real = Session.__enter__

    def entered(session: Session) -> Session:
        chosen.output.write_bytes(b"another's")
        return real(session)

    monkeypatch.setattr(Session, "__enter__", entered)
    with pytest.raises(NstfError, match="was written by something else meanwhile") as raised:
        command(chosen)
    assert not isinstance(raised.value, UsageError) and chosen.output.read_bytes() == b"another's"
    assert chosen.output.with_name(chosen.output.name + ".work").is_dir()
    monkeypatch.undo()
    command(options(("ratio", 0.6), force=True))
    assert chosen.output.read_bytes() != b"another's"
