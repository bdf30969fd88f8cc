"""A mistake in the input leaves nothing behind, so that its correction is not taken for another session."""

import errno
import importlib
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nstf.errors import CorruptError, NstfError, UnsupportedError, UsageError
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


def test_a_dataset_whose_name_is_no_text_is_converted_on(options, small, tmp_path) -> None:
    """Any name beyond ASCII where the locale is C. All was done, and the file could not be written."""
    text = tmp_path / "t\udcff.txt"
    text.write_bytes(small.text.read_bytes())
    done = convert(options(("ratio", 0.6), datasets=(str(text),)))
    assert done.output.exists() and "t\\udcff.txt" in json.dumps(done.report).replace("\\\\", "\\")


def test_a_text_that_is_given_twice_is_refused(options, small, tmp_path) -> None:
    """It was measured on windows that it was fitted on: those of each are drawn in an order of its own."""
    again = shutil.copy(small.text, tmp_path / "again.txt")
    with pytest.raises(UsageError, match=r"again.txt is given twice"):
        convert(options(datasets=(str(small.text), str(again))))
    assert list(tmp_path.iterdir()) == [again]
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "more.txt").write_text("kab " * 3000)
    (folder / "link.txt").symlink_to(again)
    with pytest.raises(UsageError, match=r"again.txt is given twice"):
        convert(options(datasets=(str(folder), str(again))))


def test_what_a_process_has_set_in_torch_changes_nothing(options, tmp_path) -> None:
    """A default of float64 was a ValueError of a kernel, and inference mode torch's error of a backward pass."""
    wanted = convert(options(output=tmp_path / "a.nstf")).output.read_bytes()
    torch.set_default_dtype(torch.float64), torch.set_float32_matmul_precision("medium")
    torch.set_default_device("meta")
    try:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            found = convert(options(output=tmp_path / "b.nstf")).output.read_bytes()
            assert torch.is_inference_mode_enabled() and torch.is_autocast_enabled("cpu")
        assert torch.get_default_dtype() == torch.float64
        assert torch.get_default_device().type == "meta"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_default_dtype(torch.float32), torch.set_float32_matmul_precision("highest")
        torch.set_default_device(None)
    assert found == wanted


def test_a_calibration_of_rounded_products_is_of_no_other_precision(options, tmp_path) -> None:
    """It was resumed by a plain job, and gave other bytes."""
    wanted = convert(options(output=tmp_path / "a.nstf")).output.read_bytes()
    torch.set_float32_matmul_precision("medium")
    try:
        calibrated = calibrate(options(output=tmp_path / "c"))
    finally:
        torch.set_float32_matmul_precision("highest")
    found = convert(options(output=tmp_path / "b.nstf", calibration=calibrated))
    assert found.output.read_bytes() == wanted


def test_settings_that_a_given_calibration_makes_useless_are_said(options, tmp_path, caplog) -> None:
    given = calibrate(options(output=tmp_path / "c"))
    convert(options(output=tmp_path / "a.nstf", calibration=given, datasets=(), samples=None, seq_len=512))
    assert "no effect" not in caplog.text
    convert(options(output=tmp_path / "b.nstf", calibration=given, samples=5, seq_len=64))
    assert "no effect of `datasets`, `samples`, `seq_len`: the calibration that is given" in caplog.text


def test_no_name_is_not_the_current_folder(options) -> None:
    with pytest.raises(UsageError, match="a path is empty"):
        options(("ratio", 0.6), datasets=("",))


def test_an_unknown_format_is_refused_before_any_work(options) -> None:
    chosen = options(("ratio", 0.6), formats=("zork",))
    before = sorted(chosen.output.parent.iterdir())
    with pytest.raises(UsageError, match="unknown format 'zork'"):
        convert(chosen)
    assert sorted(chosen.output.parent.iterdir()) == before


def test_what_is_left_out_of_a_checkpoint_is_reported(options, small, tmp_path, caplog) -> None:
    """It was noted, and nobody was told."""
    from safetensors.torch import load_file, save_file

    from nstf_convert.notice import NOTICE
    from nstf_convert.report.html import render

    folder = tmp_path / "more"
    shutil.copytree(small.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    odd = {f"!{i:02d})": 1 for i in range(60)}  # what ends as the note of labels does
    text = json.dumps(
        {**config, **odd, "a_text": "several words", "half \ud800": 1, "id2label": {"0": "x" * 300}}
    )
    (folder / "config.json").write_text(text)
    weights = load_file(folder / "model.safetensors")
    extra = {"value_head.weight": torch.zeros(1, 8)}
    save_file({**weights, **extra}, folder / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(NOTICE, "nstf"):
        report = convert(options(("ratio", 0.6), model=str(folder))).report
    said = [
        "config.json: left out id2label (the end of 1 long label), "
        + ", ".join(f"!{i:02d})" for i in range(49))
        + " and 13 more",
        "1 tensors have no place in LlamaForCausalLM and are left out: value_head.weight",
    ]
    assert list(report["model"]["notes"]) == said
    page = render(report)
    assert all(note in caplog.text and note in page for note in said)
    page.encode()


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


@pytest.mark.parametrize("command", [convert, calibrate])
def test_nor_is_one_replaced_that_appears_while_the_output_is_written(
    options, monkeypatch, command: Callable[[object], object]
) -> None:
    """Of a large model that takes minutes; the last look was before them."""
    chosen, real = options(("ratio", 0.6)), os.fsync

    def synced(descriptor: int) -> None:
        real(descriptor)
        written = Path(f"/proc/self/fd/{descriptor}").readlink()
        if written.parent == chosen.output.parent and written.is_file() and not chosen.output.exists():
            chosen.output.write_bytes(b"another's")

    monkeypatch.setattr(os, "fsync", synced)
    with pytest.raises(NstfError, match="was written by something else meanwhile"):
        command(chosen)
    assert chosen.output.read_bytes() == b"another's"
    work = chosen.output.with_name(chosen.output.name + ".work")
    assert {p.name for p in chosen.output.parent.iterdir() if p.name.startswith((".", "out"))} == {
        chosen.output.name, work.name,
    }  # fmt: skip


def test_an_output_that_becomes_a_folder_meanwhile_costs_no_work(options, monkeypatch) -> None:
    """It was called the user's mistake, for which the work directory goes."""
    chosen, real = options(("ratio", 0.6), force=True), Session.__enter__

    def entered(session: Session) -> Session:
        chosen.output.mkdir()
        return real(session)

    monkeypatch.setattr(Session, "__enter__", entered)
    with pytest.raises(NstfError, match=r"is a folder; .* which goes on from here") as raised:
        convert(chosen)
    assert not isinstance(raised.value, UsageError)
    assert chosen.output.with_name(chosen.output.name + ".work").is_dir()


def test_an_output_with_the_name_of_another_tools_file_is_refused_before_the_work(options) -> None:
    """The command said so; from Python an artifact was written under the name."""
    chosen = options(("ratio", 0.6))
    with pytest.raises(
        UsageError, match=r"would be taken for a \.gguf file and loaded wrongly: name it out\.nstf"
    ):
        convert(replace(chosen, output=chosen.output.with_name("out.gguf")))
    assert not list(chosen.output.parent.glob("out*"))


def test_an_output_that_is_a_link_to_nothing_is_refused_before_the_work(options) -> None:
    chosen = options(("ratio", 0.6))
    chosen.output.symlink_to("nowhere")
    for command in (convert, calibrate):
        with pytest.raises(UsageError, match="exists: give another output"):
            command(chosen)
    assert chosen.output.is_symlink() and len(list(chosen.output.parent.iterdir())) == 1


@pytest.mark.parametrize("given", ["model", "datasets", "calibration", "output"])
def test_no_file_of_the_user_has_the_name_of_a_result(options, small, tmp_path, given) -> None:
    """`restart` removed a calibration that was given, and lay in the work directory."""
    work = tmp_path / "work"
    shutil.copytree(small.folder, work)
    (work / "model.safetensors").rename(work / "calibration.safetensors")
    (work / "job.json").write_text("{}")
    before = {p.name: p.read_bytes() for p in work.iterdir()}
    path = work / "calibration.safetensors"
    value = {"model": str(path), "datasets": (str(path),)}.get(given, path)
    with pytest.raises(UsageError, match="has the name of a result in the work directory"):
        (calibrate if given == "output" else convert)(
            options(work_dir=work, restart=True, force=True, **{given: value})
        )
    assert {p.name: p.read_bytes() for p in work.iterdir()} == before


@pytest.mark.parametrize("by", ["an index", "a link"])
def test_nor_a_file_that_is_read_by_another_way(options, small, tmp_path, by) -> None:
    from safetensors.torch import load_file

    work = tmp_path / "work"
    shutil.copytree(small.folder, work)
    model = work if by == "an index" else tmp_path / "linked.safetensors"
    (work / "model.safetensors").rename(work / "float32.safetensors")
    if by == "an index":
        names = dict.fromkeys(load_file(work / "float32.safetensors"), "float32.safetensors")
        (work / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    else:
        model.symlink_to(work / "float32.safetensors")
        shutil.copy(work / "config.json", tmp_path)
    (work / "job.json").write_text(json.dumps({"tool": "x", "checkpoint": "y", "names": {}}))
    said = "is the work directory" if by == "an index" else "has the name of a result in the work directory"
    with pytest.raises(UsageError, match=said):
        convert(options(model=str(model), work_dir=work, restart=True))
    assert (work / "float32.safetensors").read_bytes() == (small.folder / "model.safetensors").read_bytes()


def test_tokens_that_the_model_has_no_embedding_of_are_said(options, small, tmp_path) -> None:
    """In Python it was an IndexError, and left a work directory: words are easily added to a tokenizer alone."""
    model = shutil.copytree(small.folder, tmp_path / "model")
    file = model / "tokenizer.json"
    stated = json.loads(file.read_text())
    known = stated["model"]["vocab"]
    stated["model"]["vocab"] = {word: number + 1000 * (number > 9) for word, number in known.items()}
    file.write_text(json.dumps(stated))
    with pytest.raises(UnsupportedError, match=r"makes token \d+, beyond the model's vocabulary of \d+"):
        convert(options(model=str(model)))
    assert not list(tmp_path.glob("**/*.work"))


def test_a_model_that_computes_nan_where_it_is_only_measured_is_refused(options, small, monkeypatch) -> None:
    statistics = importlib.import_module("nstf_convert.pipeline.calibrate.statistics")
    real = statistics.reference_outputs

    def spoiled(*given):
        for i, found in enumerate(real(*given)):
            yield torch.full_like(found, math.nan) if i == 1 else found

    monkeypatch.setattr(statistics, "reference_outputs", spoiled)
    chosen = options(("ratio", 0.6))
    with pytest.raises(UnsupportedError, match="the model's outputs are not finite"):
        convert(chosen)
    assert not chosen.output.exists()


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "here"])
def test_an_output_that_no_file_can_replace_is_refused_before_the_work(
    kind: str, options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    place = {
        "folder": tmp_path / "folder",
        "pipe": tmp_path / "pipe",
        "device": Path(os.devnull),
        "here": Path(),
    }
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(make, "make", lambda *_: pytest.fail("it was calibrated"))
    with pytest.raises(UsageError, match="is a folder"):
        convert(replace(options(("ratio", 0.6)), output=place[kind], force=True))
    assert sorted(tmp_path.iterdir()) == before
