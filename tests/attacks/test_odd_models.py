"""Checkpoints of sound files whose numbers make no model: one line before anything is planned."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from small_llama import LLAMA, tensors
from torch import Tensor

from nstf_convert.cli import run

NORM, TABLE = "model.norm.weight", "model.embed_tokens.weight"
Change = Callable[[dict[str, Tensor]], None]


def filled(name: str, value: float) -> Change:
    return lambda stored: stored.update({name: stored[name] * 0 + value})


WRONG: dict[str, tuple[dict[str, Any], Change, str]] = {
    "a norm of zeros": ({}, filled(NORM, 0.0), "damaged"),
    "a table of zeros": ({}, filled(TABLE, 0.0), "damaged"),
    "weights too large": ({}, filled("model.layers.0.mlp.down_proj.weight", 1e38), "values up to 1e+38"),
    "a norm too large": ({}, filled(NORM, 1e38), "damaged"),
    "a negative epsilon": ({"rms_norm_eps": -1.0}, lambda stored: None, "damaged"),
    "biases that are not there": ({"attention_bias": True}, lambda stored: None, "has no parameter"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_model_that_computes_nothing_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, change, expected = WRONG[name]
    folder = tmp_path / "model"
    folder.mkdir()
    stored = {n: t.arrays["values"].clone() for n, t in tensors().items()}
    change(stored)
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**LLAMA, **config}))
    words = ["plan", str(folder), "--budget", "0.9", "--effort", "fast", "--samples", "8", "--seq-len", "16"]
    words += ["--work-dir", str(tmp_path / "work"), "--quiet"]
    assert run(words) == 6
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and expected in error
