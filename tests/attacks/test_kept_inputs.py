"""No command writes over a file that it reads, with --force neither: one line, exit code 2, the file as it was."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy
import pytest
from safetensors.torch import load_file

import nstf_convert
from nstf.errors import CorruptError, UsageError
from nstf.runtime.artifact.atomic_file import _temporary_name
from nstf_convert.checkpoint import open_checkpoint
from nstf_convert.cli import run
from nstf_convert.export.writing import MARK
from nstf_convert.inputs import check_place, keep_apart, keep_inputs

sys.path.insert(0, str(Path(__file__).parent))
from test_small_disks import in_child, mounted

MODEL = Path(__file__).parents[2] / "examples" / "tiny_llama" / "model"
ARTIFACT = Path(__file__).parents[1] / "golden" / "v1.nstf"
QUESTIONS = MODEL.parents[1] / "data" / "questions.jsonl"
EVAL = ["eval", "m.nstf", "--reference", "model", "--dataset", "texts", "--tasks", "q.jsonl", "--junit"]
PLAN = ["plan", "model", "--frontier", "--dataset", "texts", "--calibration", "c.calibration", "--svg"]
CONVERT = [
    "convert",
    "model",
    "--budget",
    "0.5",
    "--dataset",
    "texts",
    "--calibration",
    "c.calibration",
    "--force",
]
# A model's file is read with what lies beside it.
FILE = "model/model.safetensors"
# The last word is the input that would be lost.
COMMANDS = [
    ["eval", "m.nstf", "--reference", FILE, "--junit", "model/generation_config.json"],
    ["plan", FILE, "--frontier", "--svg", "model/tokenizer.json"],
    ["convert", FILE, "--budget", "0.5", "--force", "-o", "new.nstf", "--report", "model/config.json"],
    ["calibrate", FILE, "--force", "-o", "model/tokenizer_config.json"],
    ["convert", "model", "--budget", "0.5", "-o", "new.nstf", "--work-dir", "exported", "--report", "exported/job.json"],
    ["convert", "model", "--budget", "0.5", "--force", "--work-dir", "exported", "-o", "exported/lock"],
    ["convert", "model", "--budget", "0.5", "--work-dir", "new.nstf", "-o", "new.nstf"],
    ["calibrate", "model", "--work-dir", "new.cal", "-o", "new.cal"],
    ["plan", "model", "--frontier", "--work-dir", "exported", "--svg", "exported/job.json"],
    *([*EVAL, name] for name in ("m.nstf", "q.jsonl", "texts/a.txt", "model/config.json", "link.xml")),
    *([*PLAN, name] for name in ("c.calibration", "texts/a.txt", "model/model.safetensors")),
    *([*CONVERT, "-o", "new.nstf", "--report", f"model/{name}.json"] for name in ("config", "tokenizer")),
    *([*CONVERT, "-o", name] for name in ("texts/a.txt", "c.calibration")),
    ["calibrate", "model", "--dataset", "texts", "--force", "-o", "texts/a.txt"],
    ["place", "m.nstf", "--measure", "--save-machine", "m.nstf"],
    ["place", "model/config.json", "--encoding", "int4", "--measure", "--save-machine", "model/config.json"],
    ["export", "m.nstf", "--to", "onnx", "--overwrite", "--source", "s.onnx", "-o", "s.onnx"],
    ["export", "m.nstf", "--to", "onnx", "--overwrite", "--source", "exported/s.onnx", "-o", "exported"],
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inputs of every kind, in the current folder."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a text " * 100)
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "README.md").write_text(f'tags:\n{MARK}\n"s.onnx" "o.onnx"\n')
    for name in ("c.calibration", "s.onnx", "exported/s.onnx"):
        (tmp_path / name).write_bytes(b"an input")
    shutil.copytree(MODEL, tmp_path / "model")
    shutil.copy(ARTIFACT, tmp_path / "m.nstf")
    shutil.copy(QUESTIONS, tmp_path / "q.jsonl")
    (tmp_path / "link.xml").symlink_to("m.nstf")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save_onnx(path: Path, weights: str) -> None:
    """An ONNX file whose one matrix lies in a file beside it."""
    onnx = pytest.importorskip("onnx")
    matrix = onnx.numpy_helper.from_array(numpy.ones((64, 64), numpy.float32), "w")
    model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], [matrix]))
    onnx.save_model(model, str(path), save_as_external_data=True, location=weights, size_threshold=0)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    "words", COMMANDS, ids=lambda words: f"{words[0]}-{words[-2].strip('-')}-{words[-1]}"
)
def test_no_input_is_written_over(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(folder)
    assert run(words) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and printed.startswith("error: ") and words[-1] in printed
    assert contents(folder) == before


def test_nor_by_a_conversion_in_python(folder: Path) -> None:
    before = contents(folder)
    for output in ("texts/a.txt", "model/config.json", "c.calibration"):
        with pytest.raises(UsageError, match=output):
            nstf_convert.convert(
                "model",
                budget=0.5,
                output=output,
                dataset="texts",
                calibration=Path("c.calibration"),
                force=True,
            )
    assert contents(folder) == before


def test_nor_one_whose_path_begins_with_a_tilde(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who reads a path writes `~` out, in Python and in `--dataset=~/texts`, which no shell does."""
    monkeypatch.setenv("HOME", str(folder))
    before = contents(folder)
    for output in ("texts/a.txt", "model/model.safetensors"):
        with pytest.raises(UsageError, match=output):
            nstf_convert.convert("~/model", budget=0.5, output=output, dataset="~/texts", force=True)
    words = ["eval", "m.nstf", "--reference", "model", "--dataset=~/texts/a.txt", "--junit", "texts/a.txt"]
    assert run(words) == 2
    assert f"texts/a.txt is the input {folder}/texts/a.txt" in capsys.readouterr().err
    assert contents(folder) == before


def test_what_nobody_reads_is_replaced_beside_a_model(folder: Path) -> None:
    from nstf_convert.inputs import keep_inputs

    for name in ("gates.xml", "old.nstf", "report.html", "frontier.svg"):
        (folder / "model" / name).write_bytes(b"ours")
        keep_inputs(folder / "model" / name, [folder / "model"])


def test_nor_the_weights_beside_an_onnx_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_onnx(folder / "w.onnx", "w.weights")
    before = contents(folder)
    assert run(["eval", "m.nstf", "--reference", "w.onnx", "--junit", "w.weights"]) == 2
    assert "--junit w.weights is read with w.onnx: give another name" in capsys.readouterr().err
    assert contents(folder) == before


def test_nor_the_weights_of_the_model_that_an_export_rewrites(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_onnx(folder / "own.onnx", "new.onnx.data")
    before = contents(folder)
    words = ["export", "m.nstf", "--to", "onnx", "--overwrite", "--source", "own.onnx", "-o", "new.onnx"]
    assert run(words) == 2 and "would replace new.onnx.data, weights of own.onnx" in capsys.readouterr().err
    assert contents(folder) == before


def linked(folder: Path, name: str) -> None:
    """`name` is moved away, and a link to it stays: as in the hub's cache."""
    (folder / "blobs").mkdir(exist_ok=True)
    there = folder / "blobs" / Path(name).name
    (folder / name).rename(there)
    (folder / name).symlink_to(there)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model/model.safetensors", [*CONVERT, "-o"]),
        ("model/generation_config.json", EVAL),
        ("model/tokenizer.json", ["plan", FILE, "--frontier", "--svg"]),
        ("texts/a.txt", ["calibrate", "model", "--dataset", "texts", "--force", "-o"]),
        ("texts/a.txt", EVAL),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else given,
)
def test_nor_what_a_link_in_a_folder_leads_to(
    name: str, words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    linked(folder, name)
    before = contents(folder)
    assert run([*words, f"blobs/{Path(name).name}"]) == 2
    assert "give another name" in capsys.readouterr().err
    assert contents(folder) == before


def test_nor_what_was_measured_on_this_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nstf_convert.speed.cache.folder", lambda: folder / "cache" / "nstf")
    (folder / "cache" / "nstf").mkdir(parents=True)
    (folder / "cache" / "nstf" / "speed-1.json").write_text("{}")
    assert run([*CONVERT, "-o", "m2.nstf", "--report", "cache/nstf/speed-1.json", "--force"]) == 2
    assert "is kept for what was measured on this machine" in capsys.readouterr().err


def test_no_output_becomes_a_text_of_the_dataset(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", "model", "--dataset", "texts", "-o", "texts/new.txt"]) == 2
    assert "would become part of the folder texts" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tokenizer.model", "chat_template2.jinja", "source.spm", "bpe.codes"])
def test_nor_a_file_of_the_model_s_tokenizer(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run(["calibrate", "model", "--dataset", "texts", "-o", f"model/{name}"]) == 2
    assert "would become part of the folder model" in capsys.readouterr().err


def test_nor_a_file_in_a_folder_that_a_link_leads_to(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "templates").mkdir()
    (folder / "templates" / "tool.jinja").write_text("{{ messages }}")
    (folder / "model" / "additional_chat_templates").symlink_to("../templates")
    assert run([*CONVERT, "-o", "templates/tool.jinja"]) == 2
    assert "is read as" in capsys.readouterr().err
    assert (folder / "templates" / "tool.jinja").read_text() == "{{ messages }}"


def test_nor_what_the_cache_of_the_hub_keeps_of_a_model(tmp_path: Path) -> None:
    from nstf_convert.inputs import keep_inputs

    for kind in ("models", "datasets"):
        kept = tmp_path / f"{kind}--org--name" / "blobs" / "0123"
        with pytest.raises(UsageError, match="lies where org/name is kept"):
            keep_inputs(kept, ["org/name"])
    keep_inputs(tmp_path / "models--org--other" / "x", ["org/name"])


def test_nor_where_a_folder_of_the_cache_is_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To another disk: the name of what it leads to says nothing."""
    (tmp_path / "disk" / "tiny" / "snapshots").mkdir(parents=True)
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "models--org--name").symlink_to(tmp_path / "disk" / "tiny")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for place in (tmp_path / "hub" / "models--org--name", tmp_path / "disk" / "tiny"):
        with pytest.raises(UsageError, match="lies where org/name is kept"):
            keep_inputs(place / "snapshots" / "config.json", ["org/name"])


def test_nor_tiles_that_were_measured_for_a_file(folder: Path) -> None:
    (folder / "m.sm_90.tiles.json").write_bytes(b"measured")
    words = ["place", "m.nstf", "--measure", "--save-machine", "m.sm_90.tiles.json"]
    assert run(words) == 2 and (folder / "m.sm_90.tiles.json").read_bytes() == b"measured"
    # An artifact may have any name.
    for name in ("art", "art.bin"):
        (folder / "m.nstf").rename(folder / name)
        (folder / "art.sm_90.tiles.json").write_bytes(b"measured")
        with pytest.raises(UsageError, match="is read with"):
            keep_inputs(folder / "art.sm_90.tiles.json", [folder / name])
        (folder / name).rename(folder / "m.nstf")


@pytest.mark.parametrize("target", ["gguf", "onnx"])
def test_no_export_writes_over_the_artifact_with_a_file_beside_it(
    target: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["e.README.md"] + ["e.onnx.data"] * (target == "onnx")
    for name in names:
        shutil.copy(ARTIFACT, folder / name)
        before = contents(folder)
        assert run(["export", name, "--to", target, "-o", f"e.{target}", "--overwrite", "--allow-loss"]) == 2
        assert f"is or holds the artifact {name}" in capsys.readouterr().err
        assert contents(folder) == before


def test_an_export_of_a_folder_keeps_weights_that_the_source_has_in_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_onnx(folder / "o.onnx", "o.onnx.data")
    (folder / "o.onnx.data").rename(folder / "exported" / "o.onnx.data")
    (folder / "o.onnx.data").symlink_to("exported/o.onnx.data")
    before = contents(folder)
    words = ["export", "m.nstf", "--to", "onnx", "--overwrite", "--source", "o.onnx", "-o", "exported"]
    assert run(words) == 2 and "would replace o.onnx.data" in capsys.readouterr().err
    assert contents(folder) == before


def test_a_shard_has_no_name_of_ours(folder: Path) -> None:
    """It would be taken for an older artifact, and be replaced."""
    (folder / "model" / "model.safetensors").rename(folder / "model" / "old.nstf")
    names = load_file(folder / "model" / "old.nstf")
    index = json.dumps({"weight_map": dict.fromkeys(names, "old.nstf")})
    (folder / "model" / "model.safetensors.index.json").write_text(index)
    before = contents(folder)
    with pytest.raises(CorruptError, match=r"the shard 'old.nstf' does not end in .safetensors"):
        open_checkpoint(folder / "model")
    assert run(["convert", "model", "--budget", "0.5", "--force", "-o", "model/old.nstf"]) == 5
    assert contents(folder) == before


def test_an_output_that_is_a_link_to_itself_is_one_line(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(UsageError, match="leads nowhere"):
        keep_inputs(loop, [tmp_path])


def test_a_link_among_devices_is_no_place_for_a_file() -> None:
    """With /dev/stdout led to a file `--junit /dev/stdout` took the place of the link itself, where root ran it."""
    if not Path("/dev/stdout").is_symlink():
        pytest.skip("no such link here")
    with pytest.raises(UsageError, match="a folder, a device or a pipe, which a file would replace"):
        check_place(Path("/dev/stdout"))


def test_the_models_folder_is_no_work_directory(tmp_path: Path) -> None:
    """What was kept there was read as a part of the model the next time."""
    with pytest.raises(UsageError, match="is the work directory: choose another work directory"):
        keep_apart(tmp_path, [str(tmp_path)])


def test_a_calibration_from_python_takes_no_place_of_its_text(folder: Path) -> None:
    from nstf_convert.budget import Budget
    from nstf_convert.options import ConvertOptions
    from nstf_convert.pipeline import calibrate

    text = folder / "mine.txt"
    text.write_text("a text of mine")
    options = ConvertOptions(str(folder / "model"), text, Budget("ratio", 0.5), (str(text),), force=True)
    with pytest.raises(UsageError, match="is the input"):
        calibrate(options)
    assert text.read_text() == "a text of mine"


def test_an_input_with_the_name_of_an_unfinished_output_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was removed before the output was written."""
    for words, name in (
        (["eval", "FILE", "--reference", "model", "--dataset", "texts", "--junit"], "j.xml"),
        (["compile", "FILE", "--target", "sm_90", "-o"], "k.nstfk"),
    ):
        file = _temporary_name(Path(name))
        shutil.copy("m.nstf", file)
        assert run([str(file) if word == "FILE" else word for word in words] + [name]) == 2
        assert f"has the name of an unfinished {name}" in capsys.readouterr().err and file.exists()


def by_another_mount(folder: Path) -> None:
    """In a child: commands that are given what they would write over as another mount shows it."""
    mounted("exported", "other")
    before = contents(folder / "exported")
    assert run(["export", "other/model.safetensors", "-o", "exported", "--overwrite"]) == 2
    assert contents(folder / "exported") == before
    for words in (
        ["--work-dir", "exported", "--report", "other/job.json"],
        ["--report", "exported/config.json"],
    ):
        model = "model" if "--work-dir" in words else "other"
        assert run(["convert", model, "--budget", "0.5", "-o", "new.nstf", *words]) == 2
    assert contents(folder / "exported") == before


def test_nor_what_another_mount_shows_elsewhere(folder: Path) -> None:
    for name in ("s.onnx", "README.md"):
        (folder / "exported" / name).unlink()
    shutil.copy(ARTIFACT, folder / "exported" / "model.safetensors")
    (folder / "exported" / "README.md").write_text(f'tags:\n{MARK}\n"model.safetensors"\n')
    (folder / "other").mkdir()
    code = in_child(partial(by_another_mount, folder))
    if code == 77:
        pytest.skip("no mounts here")
    assert code == 0
