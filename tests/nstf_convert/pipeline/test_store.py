"""Stored results: what was changed on disk is noticed, said once, and made again."""

import errno
import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from nstf.errors import CorruptError, NstfError
from nstf_convert.pipeline import convert
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.session import Session
from nstf_convert.pipeline.store import tensorfile
from nstf_convert.pipeline.store.tensorfile import TensorFile, write_tensors
from nstf_convert.pipeline.store.workdir import WorkDir


@pytest.fixture
def work(tmp_path):
    with WorkDir(tmp_path / "work", {}) as opened:
        opened.put("ab" * 32, {"x": torch.arange(64.0)}, {"loss": 1.5})
        opened.put("cd" * 32, {"x": torch.arange(64.0) + 1}, {"loss": 2.5})
        yield opened


def file_of(work: WorkDir, key: str) -> Path:
    return next((work.path / "store").rglob(f"{key}.safetensors"))


def test_a_flipped_bit_of_an_array_is_found_when_it_is_read(work, caplog) -> None:
    path = file_of(work, "ab" * 32)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert work.find_metadata("ab" * 32) == {"loss": 1.5}
    with caplog.at_level(logging.WARNING, "nstf"):
        assert work.find("ab" * 32) is None
    assert caplog.text.count("is made again") == 1 and not path.exists()


@pytest.mark.parametrize("reason", ["Interrupted system call (4)", "Input/output error (5)"])
def test_an_opening_that_a_signal_interrupted_is_made_again_and_no_other(
    tmp_path, monkeypatch, reason
) -> None:
    path = tmp_path / "x (4)"  # the number that torch's message ends with, in the name
    write_tensors(path, {"x": torch.arange(4.0)}, {})
    real, opened = safetensors.safe_open, []

    def open_(name: str, framework: str) -> Any:
        opened.append(name)
        if len(opened) == 1:
            raise RuntimeError(f"unable to open file <{name}> in read-only mode: {reason}")
        return real(name, framework=framework)

    monkeypatch.setattr(safetensors, "safe_open", open_)
    if reason.startswith("Interrupted"):
        assert torch.equal(TensorFile(path).get("x"), torch.arange(4.0)) and len(opened) == 2
    else:
        with pytest.raises(NstfError, match=r"x \(4\): cannot be read \(Input/output error\)") as error:
            TensorFile(path)
        assert error.value.exit_code == 1
        assert len(opened) == 1


def test_every_flipped_bit_of_a_header_is_found(work) -> None:
    path = file_of(work, "ab" * 32)
    content = path.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    for at in range(8, size, 7):
        changed = bytearray(content)
        changed[at] ^= 4
        path.write_bytes(changed)
        with WorkDir(work.path.with_name(f"other{at}"), {}) as fresh:
            place = fresh.path / "store" / "ab" / path.name
            place.parent.mkdir(parents=True)
            place.write_bytes(changed)
            found = fresh.find("ab" * 32)
        # Spaces at the header's end may change into other white space without a meaning.
        assert found is None or content[at : at + 1] == b" "


def test_results_that_were_swapped_are_not_taken_for_each_other(work) -> None:
    a, b = file_of(work, "ab" * 32), file_of(work, "cd" * 32)
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    assert work.find_metadata("ab" * 32) is None and work.find("cd" * 32) is None


def test_a_folder_in_the_place_of_a_result_is_taken_away(work) -> None:
    path = file_of(work, "ab" * 32)
    path.unlink()
    (path / "inside").mkdir(parents=True)
    assert work.find("ab" * 32) is None
    assert not path.exists()


def test_a_result_that_is_made_again_takes_the_place_of_a_folder(work) -> None:
    """Where it was not looked for before: the conversion ended with `Is a directory`."""
    path = file_of(work, "ab" * 32)
    path.unlink()
    (path / "inside").mkdir(parents=True)
    work.put("ab" * 32, {"x": torch.ones(2)}, {"loss": 1})
    found = work.find("ab" * 32)
    assert found is not None and torch.equal(found[0]["x"], torch.ones(2))


def test_a_file_of_another_writer_is_refused(tmp_path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors", {"nstf": json.dumps({"loss": 1})})
    with pytest.raises(CorruptError, match="is not a file nstf wrote"):
        TensorFile(tmp_path / "x.safetensors")
    write_tensors(tmp_path / "y.safetensors", {"x": torch.ones(2)}, {"a": 1})
    TensorFile(tmp_path / "y.safetensors").verify()


def test_an_empty_tensor_of_too_many_elements_is_refused(tmp_path) -> None:
    """Its strides are more than torch counts, a RuntimeError of its own."""
    entries = {"x": {"dtype": "F32", "shape": [0, 1 << 62, 2], "data_offsets": [0, 0]}}
    kept = {"metadata": {}, "digests": {"x": hashlib.sha256(b"").hexdigest()}, "entries": entries}
    sealed = {"metadata": {}, "digests": kept["digests"], "seal": tensorfile._seal(kept)}
    header = json.dumps({"__metadata__": {"nstf": json.dumps(sealed)}, **entries}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CorruptError, match="more elements than can be counted"):
        TensorFile(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"x":', '"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":'),
        ('"dtype":', '"more":1,"dtype":'),
        ('"nstf":', '"more":"y","nstf":'),
        ('\\"seal\\":', '\\"more\\":1,\\"seal\\":'),
        ('\\"seal\\":', '\\"seal\\":\\"\\",\\"seal\\":'),
    ],
)
def test_a_header_with_a_key_twice_or_of_another_kind_is_refused(tmp_path, old, new) -> None:
    write_tensors(tmp_path / "x", {"x": torch.ones(1)}, {"a": 1})
    raw = (tmp_path / "x").read_bytes()
    size = 8 + int.from_bytes(raw[:8], "little")
    header = raw[8:size].decode()
    assert old in header
    changed = header.replace(old, new, 1).encode()
    (tmp_path / "y").write_bytes(len(changed).to_bytes(8, "little") + changed + raw[size:])
    with pytest.raises(CorruptError, match="is not a file nstf wrote"):
        TensorFile(tmp_path / "y")


def test_a_result_that_the_disk_does_not_give_is_not_thrown_away(work, monkeypatch) -> None:
    """It was taken for a damaged one: too many open files cost the work of hours."""
    path, opened = file_of(work, "ab" * 32), Path.open

    def fails(file: Path, *how: Any, **more: Any) -> Any:
        if file == path:
            raise OSError(errno.EMFILE, "Too many open files", str(file))
        return opened(file, *how, **more)

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(NstfError, match=r"cannot be read \(Too many open files\)") as error:
        work.find("ab" * 32)
    assert error.value.exit_code == 1
    monkeypatch.undo()
    assert work.has("ab" * 32)


@pytest.mark.parametrize("length", [2**40, 2**63, 2**64 - 1])
def test_a_header_that_is_longer_than_its_file_is_refused(tmp_path, length) -> None:
    (tmp_path / "x").write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(CorruptError, match="is not a file nstf wrote"):
        TensorFile(tmp_path / "x")


@pytest.mark.parametrize("inside", [False, True])
def test_a_header_of_very_many_values_is_refused(tmp_path, inside) -> None:
    """40 MB of a calibration's header, or of the metadata in it, took 3 GB."""
    many = "[" + "[]," * 1_000_000 + "[]]"
    sealed = json.dumps({"nstf": f'{{"metadata":{{"x":{many if inside else []}}},"digests":{{}}}}'})
    entry = "" if inside else f',"a":{many}'
    header = f'{{"__metadata__":{sealed}{entry}}}'.encode()
    header += b" " * (-len(header) % 8)
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CorruptError, match="values, too many for its length"):
        TensorFile(tmp_path / "x")


def test_a_header_that_is_nested_deeply_is_refused(tmp_path) -> None:
    header = f'{{"__metadata__":{{"nstf":"x"}},"a":{"[" * 70}{"]" * 70}}}'.encode()
    header += b" " * (-len(header) % 8)
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CorruptError, match="nested deeper than 64 levels"):
        TensorFile(tmp_path / "x")


def test_results_of_another_job_are_made_again(options, small, tmp_path, caplog) -> None:
    """Copied there, over those of the job. They were taken: other weights, another text."""
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(small.folder, other)
    weights = {n: 2 * t for n, t in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    words = small.text.read_text().split()
    (tmp_path / "text.txt").write_text(" ".join(reversed(words)))
    of_other = {"float32": {"model": str(other)}, "calibration": {"datasets": (str(tmp_path / "text.txt"),)}}
    work = tmp_path / "work"
    with Session(options(work_dir=work), Stages()):
        pass
    for name, changes in of_other.items():
        with Session(options(**changes, work_dir=tmp_path / name), Stages()):
            shutil.copy(tmp_path / name / f"{name}.safetensors", work)
    with Session(options(work_dir=work), Stages()) as session:
        for name in session.checkpoint.names():
            assert torch.equal(session.source(name), session.checkpoint.get(name).float()), name
        given = session.calibration_fingerprint()
    with Session(options(work_dir=tmp_path / "new"), Stages()) as session:
        assert session.calibration_fingerprint() == given
    assert caplog.text.count("is made again") == 2


@pytest.mark.parametrize("damaged", ["store", "calibration"])
def test_a_conversion_over_damaged_results_gives_the_same_file(
    default_options, converted, copied_work, damaged
) -> None:
    files = sorted(copied_work.rglob("*.safetensors"))
    wanted = [f for f in files if (damaged in f.parts) or f.name.startswith(damaged)]
    assert wanted
    for number, file in enumerate(wanted[::2]):
        data = bytearray(file.read_bytes())
        data[-len(data) // 3] ^= 16
        file.write_bytes(data if number % 2 == 0 else data[:40])
    assert convert(default_options(work_dir=copied_work)).output.read_bytes() == converted.content
