"""`nstf diff`: two artifacts, or one with its original."""

import builtins
import errno
import json
import os
from pathlib import Path

import pytest
import torch

import nstf as package
from nstf.kernels.formats import EncodedTensor, Node, dense
from nstf.runtime.artifact import write_artifact
from nstf_convert.cli import run


def test_an_artifact_is_compared_with_its_original(nstf, tiny) -> None:
    found = nstf(
        "diff",
        tiny.folder,
        tiny.coarse,
        "--dataset",
        tiny.text,
        "--windows",
        "2",
        "--seq-len",
        "32",
        "--json",
    )
    data = found.json
    assert found.code == 0 and data["only_first"] == [] == data["only_second"]
    rows = {row["name"]: row for row in data["tensors"]}
    row = rows["model.layers.0.self_attn.q_proj.weight"]
    assert (row["first"], row["second"]) == ("float32", "int3 g32")
    assert row["first_bytes"] == 32 * 32 * 4 and row["second_bytes"] == 32 * (12 + 2)
    from safetensors.torch import load_file

    dense = load_file(tiny.folder / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"].double()
    with package.open(tiny.coarse) as file:
        change = file.decode("model.layers.0.self_attn.q_proj.weight").double() - dense
    assert row["relative_error"] == pytest.approx(float(change.norm() / dense.norm()), rel=1e-6)
    assert row["largest_error"] == pytest.approx(float(change.abs().max()), rel=1e-6)
    assert data["equal_tensors"] == sum(r["largest_error"] == 0 for r in data["tensors"]) > 0
    assert data["measured"]["mean_kl"] > 0 and data["protocol"]["windows"] == 2
    assert data["first_file_bytes"] is None and data["second_file_bytes"] == tiny.coarse.stat().st_size
    measured = json.loads(_eval(nstf, tiny))
    assert data["measured"] == measured["measured"]


def _eval(nstf, tiny) -> str:
    words = ("--dataset", tiny.text, "--windows", "2", "--seq-len", "32", "--json")
    return nstf("eval", tiny.coarse, "-r", tiny.folder, *words).out


def test_two_artifacts_as_text(nstf, tiny) -> None:
    found = nstf("diff", tiny.same, tiny.coarse, "--largest", "3")
    lines = found.out.splitlines()
    assert found.code == 0 and lines[0].split()[:4] == ["tensor", "shape", "A", "B"]
    errors = [float(line.split()[-2]) for line in lines[1:4]]
    assert errors == sorted(errors, reverse=True) and errors[0] > 0 and not lines[4]
    assert "tensors         20 in both" in found.out or " in both, " in found.out
    assert "give --dataset TEXT" in found.out and "bytes in the file" in found.out


def test_a_file_does_not_differ_from_itself(nstf, tiny) -> None:
    data = nstf("diff", tiny.coarse, tiny.coarse, "--json").json
    assert data["relative_error"] == 0 and data["equal_tensors"] == len(data["tensors"])
    assert all("lm_head" not in row["name"] for row in data["tensors"]), "tied: compared once"


def write(path: Path, **tensors: torch.Tensor) -> Path:
    node = Node("dense", dense.Params("float32"))
    encoded = {n: EncodedTensor(node, tuple(t.shape), {"values": t}) for n, t in tensors.items()}
    write_artifact(path, encoded, {}, {})
    return path


def test_what_only_one_has_and_other_shapes_are_named(nstf, tmp_path) -> None:
    a = write(tmp_path / "a.nstf", one=torch.ones(2, 3), two=torch.zeros(2), three=torch.ones(4))
    b = write(tmp_path / "b.nstf", one=torch.ones(3, 2), two=torch.ones(2), four=torch.ones(1))
    found = nstf("diff", a, b)
    assert found.code == 0 and "other shape" in found.out and "only in A" in found.out and "four" in found.out
    data = nstf("diff", a, b, "--json").json
    assert data["only_first"] == ["three"] and data["only_second"] == ["four"]
    one, two = data["tensors"]
    assert one["relative_error"] is None and two["relative_error"] is None and two["largest_error"] == 1
    assert "over all values of the 1 tensor of one shape" in found.out and "3x2" in found.out

    c = write(tmp_path / "c.nstf", one=torch.ones(6), two=torch.zeros(1, 2))
    assert "no tensor has the same shape" in nstf("diff", a, c).out
    assert nstf("diff", a, c, "--json").json["relative_error"] is None


def test_what_is_not_finite_is_neither_equal_nor_of_another_shape(nstf, tmp_path) -> None:
    broken = torch.ones(4, 4)
    broken[1, 2] = torch.nan
    beyond = torch.ones(4, 4)
    beyond[0] = torch.inf
    moved = beyond.clone()
    moved[3] = 2
    a = write(tmp_path / "a.nstf", one=torch.ones(4, 4))
    b = write(tmp_path / "b.nstf", one=broken)
    for first, second in ((a, b), (b, a)):
        found = nstf("diff", first, second)
        assert "1 in both, 0 of them equal, 1 not finite" in found.out and "not finite" in found.out
        assert "other shape" not in found.out and "none: no tensor of one shape is finite" in found.out
    data = nstf("diff", a, b, "--json").json
    assert (data["equal_tensors"], data["tensors_not_finite"], data["tensors_of_other_shapes"]) == (0, 1, 0)

    alone = nstf("diff", b, b)
    assert "1 in both, 1 of them equal" in alone.out and "not finite" not in alone.out

    c = write(tmp_path / "c.nstf", one=broken, two=beyond, three=beyond, four=torch.ones(2))
    d = write(tmp_path / "d.nstf", one=broken, two=moved, three=-beyond, four=torch.full((2,), 2.0))
    found = nstf("diff", c, d)
    assert "4 in both, 1 of them equal, 2 not finite" in found.out
    assert "relative error  1, over all values of the 2 tensors of one shape and finite" in found.out
    rows = nstf("diff", c, d, "--json").json["tensors"]
    assert {row["name"]: row["largest_error"] for row in rows} == {
        "one": 0,
        "two": 1,
        "three": None,
        "four": 1,
    }


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (("missing.nstf", "missing.nstf"), "no such file", 2),
        (("./missing", "./missing"), "no such file or folder", 2),
        (("same", "same", "--dataset", "missing.txt"), "--dataset: no such file", 2),
        (("same", "text"), "", 6),
    ],
)
def test_what_cannot_be_compared_is_one_line(nstf, tiny, words, message, code) -> None:
    names = {"same": tiny.same, "text": tiny.text}
    found = nstf("diff", *[names.get(w, w) for w in words])
    assert message in found.err and len(found.err.splitlines()) == 1 and found.code in (2, code)


@pytest.mark.parametrize("call", ["stat", "open"])
@pytest.mark.parametrize("side", [0, 1])
def test_a_path_that_the_disk_does_not_give_is_one_line(tmp_path, monkeypatch, capsys, call, side) -> None:
    paths = [str(write(tmp_path / name, w=torch.ones(4, 4))) for name in ("a.nstf", "b.nstf")]
    owner = os if call == "stat" else builtins
    real = getattr(owner, call)

    def fails(path, *how, **more):
        if not isinstance(path, int) and os.fspath(path) == paths[side]:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path, *how, **more)

    monkeypatch.setattr(owner, call, fails)
    assert run(["diff", *paths]) == 1
    monkeypatch.undo()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "Input/output error" in said and paths[side] in said


def test_help_names_both_files(capsys) -> None:
    assert run(["diff", "--help"]) == 0
    assert "nstf diff [OPTIONS] A B" in capsys.readouterr().out
