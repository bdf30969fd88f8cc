"""Checkpoints of sound files whose numbers make no model: one line before anything is planned."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from small_llama import LLAMA, tensors
from torch import Tensor

from nstf.kernels.formats import EncodedTensor, Node, dense
from nstf.runtime.artifact import write_artifact
from nstf_convert.checkpoint import open_checkpoint
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


def test_a_model_that_its_own_class_cannot_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """CodeGen divides its heads by four, and builds itself of two. Only `generate` and `profile` said so."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CodeGenConfig, CodeGenForCausalLM, PreTrainedTokenizerFast

    folder, artifact, text = tmp_path / "model", tmp_path / "a.nstf", tmp_path / "text.txt"
    sizes = {"vocab_size": 12, "n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 8, "n_positions": 64}
    CodeGenForCausalLM(CodeGenConfig(**sizes)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({c: i for i, c in enumerate("abcdefgh")}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a", eos_token="b").save_pretrained(folder)
    text.write_text("a b c d e f g h " * 60)
    with open_checkpoint(folder) as checkpoint:
        stored = {n: checkpoint.get(n).float() for n in checkpoint.names()}
        tree = Node("dense", dense.Params("float32"))
        whole = {n: EncodedTensor(tree, tuple(v.shape), {"values": v}) for n, v in stored.items()}
        write_artifact(artifact, whole, checkpoint.files(), {})
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"context": "a b", "choices": [" c", " d"], "answer": 0}')
    short = ["--dataset", str(text), "--seq-len", "16"]
    work = ["--budget", "0.9", "--samples", "8", "--work-dir", str(tmp_path / "work")]
    for command in (
        ["plan", str(folder), *work, *short],
        ["eval", str(artifact), "--reference", str(folder), *short],
        ["eval", str(artifact), "--tasks", str(questions)],
        ["diff", str(artifact), str(folder), *short],
    ):
        assert run([*command, "--quiet"]) == 6, command
        error = capsys.readouterr().err.splitlines()[-1]
        assert "CodeGenForCausalLM cannot run as the config of its file has it (RuntimeError: shape" in error
