"""What a manifest says for people may be anything: what is no number is left out of `nstf.open` and `nstf inspect`."""

from pathlib import Path
from typing import Any

import pytest
import torch

import nstf
from nstf.kernels.formats import EncodedTensor, Node, dense
from nstf.runtime.artifact import write_artifact
from nstf_convert.cli import run

TENSORS = {
    name: EncodedTensor(Node("dense", dense.Params("float32")), (2,), {"values": torch.ones(2)})
    for name in ("dense", "other")
}
VALUES: tuple[Any, ...] = (None, "x", "a\nb\x1b[31m", -1, 10**400, 1e300, [], {}, [{}], True)
FIGURES = {
    "mean_kl": 0.1,
    "mean_kl_se": 0.01,
    "median_kl": 0.1,
    "p99_kl": 1.0,
    "top1": 0.9,
    "ppl": 9.0,
    "tokens": 10,
}
COSINES = {"mean_cosine": 0.9, "min_cosine": 0.8, "relative_l2": 0.1, "outputs": 8}


def changes(good: Any) -> list[Any]:
    """An object with each of its values, and itself, in place of which is something else, or nothing."""
    found = list(VALUES)
    for name, value in good.items():
        found.append({n: v for n, v in good.items() if n != name})
        found += [{**good, name: other} for other in (changes(value) if isinstance(value, dict) else VALUES)]
    return found


@pytest.mark.parametrize("final", [FIGURES, COSINES], ids=["language", "other"])
def test_what_is_no_number_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], final: dict[str, Any]
) -> None:
    name, path = "dense", tmp_path / "m.nstf"
    plan = {"budget": {"kind": "ratio", "value": 0.5}, "expected_loss": {name: 0.1}, "roles": {name: "up"}}
    cases = [{"plan": other} for other in changes(plan) if isinstance(other, dict)]
    cases += [{"report": {"accuracy": other}} for other in changes({"final": final, "chosen": "mix"})]
    for case in [{"plan": plan, "report": {"accuracy": {"final": final}}}, *cases]:
        write_artifact(path, TENSORS, {}, case)
        with nstf.open(path) as file:
            loss = file.tensors[name].expected_loss
            assert loss is None or isinstance(loss, float)
            for value in (file.accuracy or {}).values():
                assert value is None or (isinstance(value, int | float) and abs(value) <= 1e300)
        for words in (["inspect", str(path)], ["inspect", str(path), "--json"]):
            code = run(words)
            told = capsys.readouterr()
            assert code == 0 and told.err == "", (case, told.err)
            assert all(c.isprintable() for c in told.out.replace("\n", ""))


def test_figures_are_told_as_they_are(tmp_path: Path) -> None:
    plan = {"expected_loss": {"dense": 2, "other": True}}
    report = {"accuracy": {"final": {**FIGURES, "ppl": None}}}
    write_artifact(tmp_path / "m.nstf", TENSORS, {}, {"plan": plan, "report": report})
    with nstf.open(tmp_path / "m.nstf") as file:
        assert file.tensors["dense"].expected_loss == 2.0
        assert file.tensors["other"].expected_loss is None
        assert file.accuracy == {**FIGURES, "ppl": None}
