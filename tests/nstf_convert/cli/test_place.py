"""`nstf place`: the table, the JSON, and one line for every mistake."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nstf.errors import NstfError
from nstf_convert.place.machine import EXAMPLES, from_json
from tests.nstf_convert.place.stored import LLAMA, artifact_of

SHAPE = Path(__file__).parents[3] / "examples" / "shapes" / "dense-8b.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact_of(tmp_path_factory.mktemp("place") / "model.nstf", LLAMA)


def test_the_best_plans_are_a_table_and_json(nstf: Callable[..., Any], model: Path) -> None:
    result = nstf("place", model, "--machine", "h200x2", "--batch", "4")
    assert result.code == 0, result.err
    assert "predicted, not measured" in result.out and "tokens/s" in result.out
    for name in ("one device", "tensor 2", "pipeline 2"):
        assert f"\n{name} " in result.out
    data = nstf("place", model, "--machine", "h200x2", "--batch", "4", "--json").json
    assert data["nstf_placement"] == 1 and {p["name"] for p in data["plans"]} == {
        "one device",
        "tensor 2",
        "pipeline 2",
    }
    steps = [p["predicted"]["step_s"] for p in data["plans"]]
    assert steps == sorted(steps) and all(
        p["predicted"]["tokens_per_s"] == pytest.approx(4 / p["predicted"]["step_s"]) for p in data["plans"]
    )


def test_engines_take_what_the_json_says(nstf: Callable[..., Any], model: Path) -> None:
    plans = {p["name"]: p for p in nstf("place", model, "--machine", "h200x2", "--json").json["plans"]}
    assert plans["tensor 2"]["load"] == {"tensor_parallel": 2}
    assert plans["tensor 2"]["vllm"] == ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "1"]
    assert plans["tensor 2"]["environment"] == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert plans["pipeline 2"]["load"] is None
    assert [s["layers"] for s in plans["pipeline 2"]["stages"]] == [[0, 1], [1, 2]]


def test_mixtures_of_experts_name_expert_parallelism(nstf: Callable[..., Any]) -> None:
    shape = SHAPE.with_name("moe-30b-a3b.json")
    plans = nstf(
        "place", shape, "--encoding", "int4", "--machine", "mi300x8", "--batch", "64", "--json"
    ).json["plans"]
    best = plans[0]
    assert best["experts"] == "whole" and "--enable-expert-parallel" in best["vllm"]
    assert best["data_parallel"] * best["tensor_parallel"] > 1 and set(best["environment"]) <= {
        "HIP_VISIBLE_DEVICES"
    }


def test_the_aim_decides(nstf: Callable[..., Any]) -> None:
    words = ("place", SHAPE, "--encoding", "int4", "--machine", "h100x8", "--json")
    fast, cheap = (nstf(*words, "--aim", aim).json["plans"][0] for aim in ("time", "cost"))
    assert cheap["name"] == "one device" and fast["tensor_parallel"] > 1
    few = nstf(*words, "--devices", "2").json["plans"]
    assert max(len(p["devices"]) for p in few) == 2


def test_a_measured_machine_is_kept_and_read_again(
    nstf: Callable[..., Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nstf_convert.place import measure
    from tests.nstf_convert.place.test_measure import FOUND

    # The processes have a test of their own; kernels are not timed here.
    monkeypatch.setattr(measure, "run_workers", lambda ranks, device, threads: FOUND)
    monkeypatch.setattr(measure, "measured_products", lambda machine, size: measure.Products())
    kept = tmp_path / "here.json"
    first = nstf("place", model, "--measure", "--save-machine", kept, "--json")
    assert first.code == 0, first.err
    assert from_json(json.loads(kept.read_text())).devices[1].name == "process1"
    again = nstf("place", model, "--machine", kept, "--json")
    assert again.json == first.json


def test_where_the_machine_cannot_be_kept_nothing_is_measured(
    nstf: Callable[..., Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nstf_convert.place import measure

    def fail(*_: object) -> None:
        raise NstfError("it was measured")

    monkeypatch.setattr(measure, "run_workers", fail)
    for path, message in ((tmp_path / "no" / "m.json", "does not exist"), (tmp_path, "is a folder")):
        result = nstf("place", model, "--measure", "--save-machine", path)
        assert result.code == 2 and message in result.err and len(result.err.splitlines()) == 1
    kept = tmp_path / "m.json"
    older = json.dumps({"nstf_machine": 1, "name": "older"})
    kept.write_text(older)
    assert "it was measured" in nstf("place", model, "--measure", "--save-machine", kept).err
    assert kept.read_text() == older and [p.name for p in tmp_path.iterdir()] == ["m.json"]


@pytest.mark.parametrize("text", ['{"model_type": "llama"}', "notes", "[" * 100_000])
def test_a_machine_takes_no_other_files_place(
    nstf: Callable[..., Any], model: Path, tmp_path: Path, text: str
) -> None:
    other = tmp_path / "config.json"
    other.write_text(text)
    result = nstf("place", model, "--measure", "--save-machine", other)
    assert result.code == 2 and "there is a file that is no machine's" in result.err
    assert len(result.err.splitlines()) == 1 and other.read_text() == text


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_machine_is_kept_in_a_regular_file_alone(
    nstf: Callable[..., Any], model: Path, tmp_path: Path, kind: str
) -> None:
    """`--save-machine /dev/stdout` put a file in the link's place."""
    place = tmp_path / "machine.json"
    place.mkdir() if kind == "folder" else os.mkfifo(place)
    result = nstf("place", model, "--measure", "--save-machine", place)
    assert result.code == 2 and "is a folder, a device or a pipe" in result.err and not place.is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give --machine FILE (or an example's name) or --measure, one of them"),
        (("--machine", "h200x2", "--measure"), "one of them"),
        (("--machine", "h300"), "no such file, and no example; there are"),
        (("--machine", "h200x2", "--aim", "fun"), "--aim 'fun': choose one of time, cost, prompt"),
        (("--machine", "h200x2", "--encoding", "int4"), "--encoding is for a config.json"),
        (("--machine", "h200x2", "--save-machine", "x"), "add --measure"),
        (("--machine", "h200x2", "--batch", "0"), "Input should be greater than or equal to 1"),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    nstf: Callable[..., Any], model: Path, words: tuple[str, ...], message: str
) -> None:
    result = nstf("place", model, *words)
    assert result.code == 2 and message in result.err and len(result.err.splitlines()) == 1


def test_configs_that_are_wrong_are_named(nstf: Callable[..., Any], tmp_path: Path) -> None:
    words = ("--machine", "h200x2", "--encoding", "int4")
    assert "add --encoding int4" in nstf("place", SHAPE, *words[:2]).err
    for text, message in (("{", "not JSON"), ("[]", "not an object"), ("{}", "does not read the config")):
        (tmp_path / "config.json").write_text(text)
        result = nstf("place", tmp_path / "config.json", *words)
        assert result.code == (6 if text == "{}" else 2) and message in result.err
    assert nstf("place", tmp_path / "no.json", *words).code == 2
    assert nstf("place", tmp_path / "no.nstf", *words).code == 2


def test_a_mark_of_the_encoding_is_no_mistake(nstf: Callable[..., Any], tmp_path: Path) -> None:
    """Editors on Windows write it; `nstf convert` reads such a config."""
    for file in (SHAPE, EXAMPLES / "h200x2.json"):
        (tmp_path / file.name).write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    words = ("--machine", tmp_path / "h200x2.json", "--encoding", "int4")
    assert nstf("place", tmp_path / SHAPE.name, *words).code == 0


def test_what_fits_nowhere_says_by_how_much(nstf: Callable[..., Any]) -> None:
    result = nstf("place", SHAPE.with_name("dense-405b.json"), "--encoding", "bf16", "--machine", "h200x2")
    assert result.code == 1 and "no plan fits" in result.err and "755.96 GiB" in result.err


@pytest.mark.parametrize("asked", [("AutoConfig", "for_model"), ("AutoModelForCausalLM", "from_config")])
def test_a_full_disk_is_no_config_that_cannot_be_read(
    nstf: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, asked: tuple[str, str]
) -> None:
    """transformers writes a file for a moment; a Llama was called a model that it does not know."""
    import transformers

    def full(*_: Any, **__: Any) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(getattr(transformers, asked[0]), asked[1], full)
    result = nstf("place", SHAPE, "--encoding", "int4", "--machine", "h200x2")
    assert result.code == 1 and "no folder for temporary files can be written" in result.err
