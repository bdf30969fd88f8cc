"""A checkpoint, a text or a tokenizer that changes during a run, or between two: no file is of both."""

import importlib
import json
import os
import shutil
from pathlib import Path

import pytest

from nstf.errors import UsageError
from nstf_convert import dataset as texts
from nstf_convert.checkpoint import source
from nstf_convert.pipeline import convert
from nstf_convert.pipeline.calibrate import make
from nstf_convert.pipeline.session import Session


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


def test_a_dataset_that_changes_before_healing_reads_it_is_not_healed_on(
    options, small, tmp_path, monkeypatch
) -> None:
    """The healed values would stand in the work directory for the text that was there first."""
    text = Path(shutil.copy(small.text, tmp_path / "a.txt"))
    healing = importlib.import_module("nstf_convert.pipeline.heal.text")
    real = healing._text_windows

    def late(*given):
        text.write_text(small.text.read_text()[::-1])
        return real(*given)

    monkeypatch.setattr(healing, "_text_windows", late)
    with pytest.raises(UsageError, match=r"a.txt changed while it was read"):
        convert(options(datasets=(str(text),), heal_steps=20))


def test_results_of_another_tokenizer_are_not_taken(options, small, tmp_path) -> None:
    """The same text has other tokens: its calibration was taken for that of the tokenizer that is there now."""
    model = shutil.copytree(small.folder, tmp_path / "model")
    chosen = {"model": str(model), "work_dir": tmp_path / "work"}
    convert(options(**chosen))
    file = model / "tokenizer.json"
    stated = json.loads(file.read_text())
    stated["normalizer"] = {"type": "Lowercase"}
    file.write_text(json.dumps(stated))
    with pytest.raises(UsageError, match=r"another job \(tokenizer: .*model has changed\)"):
        convert(options(**chosen, force=True))


def test_results_of_other_own_texts_are_not_taken(options, tmp_path, monkeypatch) -> None:
    """Without a dataset the text ships with Python: that of another version was taken for the one that is there now."""
    chosen = {"datasets": (), "seq_len": 8, "work_dir": tmp_path / "work"}
    convert(options(**chosen))
    real = make.inputs.manual
    monkeypatch.setattr(make.inputs, "manual", lambda: [part.upper() for part in real()])
    with pytest.raises(
        UsageError, match=r"another job \(own_texts: what ships with Python and nstf has changed\)"
    ):
        convert(options(**chosen, force=True))


def test_what_samples_do_not_show_is_told_by_the_time(options, small, tmp_path, monkeypatch) -> None:
    """Of large checkpoints and texts a part is hashed: a change elsewhere left the results of what was there before."""
    monkeypatch.setattr(source, "FULL_DIGEST_LIMIT", 1)
    monkeypatch.setattr(texts, "FINGERPRINT_SAMPLE", 100)
    model = shutil.copytree(small.folder, tmp_path / "model")
    text = tmp_path / "a.txt"
    content = small.text.read_bytes()
    text.write_bytes(content)
    chosen = {"model": str(model), "datasets": (str(text),), "work_dir": tmp_path / "work", "force": True}
    convert(options(**chosen))
    text.write_bytes(content[:200] + content[200:-200].upper() + content[-200:])
    with pytest.raises(UsageError, match=r"another job \(datasets_times: .*a.txt has changed\)"):
        convert(options(**chosen))
    text.write_bytes(content)
    # The name of a text stands in the file: the same text under another one is another job.
    renamed = tmp_path / "b.txt"
    renamed.write_bytes(content)
    with pytest.raises(UsageError, match=r'names of datasets was \["a.txt"\], now \["b.txt"\]'):
        convert(options(**{**chosen, "datasets": (str(renamed),)}))
    os.utime(text, ns=(1, 1))
    convert(options(**{**chosen, "restart": True}))
    os.utime(model / "model.safetensors", ns=(1, 1))
    with pytest.raises(UsageError, match=r"another job \(checkpoint_times: .*model has changed\)"):
        convert(options(**chosen))


def test_a_checkpoint_that_is_written_into_meanwhile_is_no_model(
    options, small, tmp_path, monkeypatch
) -> None:
    """The file held some tensors of the one and some of the other."""
    model = shutil.copytree(small.folder, tmp_path / "model")
    story = importlib.import_module("nstf_convert.pipeline.convert")
    real = story._choose

    def late(run):
        found = real(run)
        with (model / "model.safetensors").open("r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write(b"\0\0")
        return found

    monkeypatch.setattr(story, "_choose", late)
    chosen = options(model=str(model))
    with pytest.raises(UsageError, match="model was written into while it was read"):
        convert(chosen)
    assert not chosen.output.exists()


@pytest.mark.parametrize("end", [UsageError, pytest.param(KeyboardInterrupt, marks=pytest.mark.slow)])
def test_what_was_made_of_a_checkpoint_that_was_written_into_is_not_resumed(
    options, small, tmp_path, monkeypatch, end: type[BaseException]
) -> None:
    """Once the model was as before, its job had results of the other: a file of both, and no word. Those of an earlier run
    stay."""
    model = shutil.copytree(small.folder, tmp_path / "model")
    file = model / "model.safetensors"
    first = file.read_bytes()
    work = tmp_path / "work"
    chosen = {"model": str(model), "work_dir": work, "force": True}
    wanted = convert(options(**chosen, output=tmp_path / "a.nstf")).output.read_bytes()
    shutil.rmtree(work)
    convert(options(("ratio", 0.9), **chosen))
    before = {p: p.stat().st_mtime_ns for p in work.rglob("*") if p.is_file() and p.name != "lock"}
    made, real = [], Session.encoder_for

    def late(session: Session, *given):
        with file.open("r+b") as opened:
            opened.write(first[:-2000] + bytes(2000))
        return real(session, *given)

    def ended(run, final):
        made.extend(p for p in work.rglob("*.safetensors") if p not in before)
        if end is KeyboardInterrupt:
            raise KeyboardInterrupt
        run.session.job.check_checkpoint()

    monkeypatch.setattr(Session, "encoder_for", late)
    monkeypatch.setattr(importlib.import_module("nstf_convert.pipeline.convert"), "_write", ended)
    with pytest.raises(end):
        convert(options(**chosen))
    assert made and not any(p.exists() for p in made)
    assert all(p.stat().st_mtime_ns == at for p, at in before.items())
    monkeypatch.undo()
    with file.open("r+b") as opened:
        opened.write(first)
    assert convert(options(**chosen)).output.read_bytes() == wanted


def test_a_checkpoint_that_is_copied_over_itself_meanwhile_is_not_trusted(
    options, small, tmp_path, monkeypatch
) -> None:
    """It held zeros for a moment; what was made of them was a file, and results for the next run."""
    model = shutil.copytree(small.folder, tmp_path / "model")
    file, story = model / "model.safetensors", importlib.import_module("nstf_convert.pipeline.convert")
    whole, real = file.read_bytes(), story._choose

    def late(run):
        with file.open("r+b") as opened:
            opened.write(whole)
        return real(run)

    monkeypatch.setattr(story, "_choose", late)
    with pytest.raises(UsageError, match="model was written into while it was read"):
        convert(options(model=str(model), work_dir=tmp_path / "work"))
    assert not list((tmp_path / "work").rglob("*.safetensors"))


@pytest.mark.parametrize("restored", [False, True])
def test_nor_one_that_is_written_into_while_the_file_is_written(
    options, small, tmp_path, monkeypatch, restored: bool
) -> None:
    """restored: as by `cp -p`, which puts the time back."""
    model = shutil.copytree(small.folder, tmp_path / "model")
    file, story = model / "model.safetensors", importlib.import_module("nstf_convert.pipeline.convert")
    whole, real = file.read_bytes(), story.write_artifact

    def late(*given, **named):
        before = file.stat()
        with file.open("r+b") as opened:
            opened.write(whole)
        if restored:
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        return real(*given, **named)

    monkeypatch.setattr(story, "write_artifact", late)
    chosen = options(model=str(model))
    with pytest.raises(UsageError, match="model was written into while it was read"):
        convert(chosen)
    assert not chosen.output.exists()


def test_what_fails_by_a_checkpoint_that_is_written_into_is_its_fault(
    options, small, tmp_path, monkeypatch
) -> None:
    """It was an error of the solver's, by NaN, with no word of the checkpoint."""
    model = shutil.copytree(small.folder, tmp_path / "model")
    story = importlib.import_module("nstf_convert.pipeline.convert")

    def late(run):
        (model / "model.safetensors").touch()
        raise ValueError("`c` must be an array of finite numbers")

    monkeypatch.setattr(story, "_choose", late)
    with pytest.raises(UsageError, match="model was written into while it was read"):
        convert(options(model=str(model)))


def test_a_checkpoint_that_is_replaced_meanwhile_is_converted(options, small, tmp_path, monkeypatch) -> None:
    model = shutil.copytree(small.folder, tmp_path / "model")
    story = importlib.import_module("nstf_convert.pipeline.convert")
    real = story._choose

    def later(run):
        (model / "new").write_bytes(b"another model")
        (model / "new").replace(model / "model.safetensors")
        return real(run)

    monkeypatch.setattr(story, "_choose", later)
    convert(options(model=str(model), force=True))
