"""Every command that reads the side files of an artifact answers damaged ones with one line and an exit code of its own."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from small_llama import LLAMA, tensors

from nstf.runtime.artifact import write_artifact
from nstf_convert.cli import run

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_llama" / "model" / "tokenizer.json"
GOOD: dict[str, Any] = {
    "config": LLAMA,
    "tokenizer": EXAMPLE.read_bytes(),
    "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"},
    "generation_config": {"eos_token_id": 2},
}
DEEP = b'{"a":' * 3000 + b"1" + b"}" * 3000
DAMAGES: dict[str, dict[str, Any]] = {
    "config, a list": {"config": []},
    "config, nested deeply": {"config": DEEP},
    "config, sizes of another model": {"config": {"model_type": "llama"}},
    "config, words for numbers": {"config": {**LLAMA, "rms_norm_eps": "x", "max_position_embeddings": "y"}},
    "tokenizer, a list": {"tokenizer": []},
    "tokenizer, nested deeply": {"tokenizer": DEEP},
    "tokenizer, not JSON": {"tokenizer": b"{"},
    "tokenizer, numbers for parts": {"tokenizer": {"model": 5}},
    "settings, a list": {"tokenizer_config": []},
    "generation, nested deeply": {"generation_config": DEEP},
}
COMMANDS = [
    ["inspect", "m.nstf"],
    ["generate", "m.nstf", "hello", "--max-new-tokens", "2"],
    *(["export", "m.nstf", "--to", to, "-o", "out", "--allow-loss"]
      for to in ("hf", "transformers", "compressed-tensors", "gguf", "onnx")),
    ["diff", "m.nstf", "m.nstf"],
    ["eval", "m.nstf", "--reference", "m.nstf", "--dataset", "text.txt", "--seq-len", "16", "--windows", "2"],
    ["bench", "m.nstf", "--prompt", "8", "--tokens", "2", "--repetitions", "1"],
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_side_files_are_one_line_from_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("good morrow, my lord, what news from court today? " * 100)
    stated = {**GOOD, **DAMAGES[damage]}
    files = {f"{k}.json": v if isinstance(v, bytes) else json.dumps(v).encode() for k, v in stated.items()}
    write_artifact("m.nstf", tensors(), files)
    for words in COMMANDS:
        code = run(words)
        said = capsys.readouterr().err
        # Another exception than ours is said with "run again with --debug for the traceback".
        assert code in (0, 2, 4, 5, 6) and "traceback" not in said.lower(), (words, code, said)


def test_a_tokenizer_of_more_tokens_than_the_model_has_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("good morrow, my lord, what news from court today? " * 100)
    (tmp_path / "tasks.jsonl").write_text('{"context": "good", "choices": [" a", " morrow"], "answer": 0}\n')
    files = {f"{k}.json": v if isinstance(v, bytes) else json.dumps(v).encode() for k, v in GOOD.items()}
    write_artifact("m.nstf", tensors(), files)
    assert run(["export", "m.nstf", "-o", "model"]) == 0
    text = ["--dataset", "text.txt", "--seq-len", "16"]
    for words in (
        ["generate", "m.nstf", "good morrow my lord", "--max-new-tokens", "2"],
        ["eval", "m.nstf", "--tasks", "tasks.jsonl"],
        ["eval", "m.nstf", "--reference", "m.nstf", *text, "--windows", "2"],
        ["diff", "m.nstf", "m.nstf", *text, "--windows", "2"],
        ["plan", "model", "--budget", "0.6", *text, "--samples", "4", "--effort", "fast"],
        ["calibrate", "model", "-o", "calibration.safetensors", *text, "--samples", "4"],
        ["convert", "model", "-o", "out.nstf", "--budget", "0.6", *text, "--samples", "4"],
    ):
        code = run(words)
        said = capsys.readouterr().err.splitlines()[-1]
        assert (code in (2, 6)) and (
            "beyond the model's vocabulary" in said or "outside the vocabulary" in said
        ), (
            words,
            code,
            said,
        )


@pytest.mark.parametrize(
    ("target", "change", "said"),
    [
        ("gguf", {"num_hidden_layers": "x"}, "target 'gguf' cannot be written of what its config.json"),
        ("gguf", {"head_dim": -4}, "target 'gguf' cannot be written of what its config.json"),
        ("gguf", {"num_attention_heads": 7}, "does not fit the heads"),
        ("onnx", {"rms_norm_eps": "x"}, "target 'onnx' cannot be written of what its config.json"),
        ("onnx", {"num_hidden_layers": 40}, "which its config.json asks for"),
        ("onnx", {"num_hidden_layers": "2"}, "num_hidden_layers is '2', expected a whole number"),
    ],
)
def test_an_export_says_that_the_config_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, change: dict[str, Any], said: str
) -> None:
    files = {"config.json": json.dumps({**LLAMA, **change}).encode()}
    write_artifact(tmp_path / "m.nstf", tensors(), files)
    code = run(
        ["export", str(tmp_path / "m.nstf"), "--to", target, "-o", str(tmp_path / "out"), "--allow-loss"]
    )
    error = capsys.readouterr().err.splitlines()[-1]
    assert code == 6 and said in error and "--to" not in error, error


@pytest.mark.parametrize("part", ["type_of", "pack", "kind_of", "dense"])
def test_a_mistake_of_ours_is_not_blamed_on_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    from nstf_convert import export
    from nstf_convert.export import gguf_blocks, onnx_weights

    def fails(*_: Any) -> None:
        raise KeyError("ours")

    target, module = ("gguf", gguf_blocks) if part in ("type_of", "pack") else ("onnx", onnx_weights)
    monkeypatch.setattr(module, part, fails)
    files = {"config.json": json.dumps(LLAMA).encode()}
    write_artifact(tmp_path / "m.nstf", tensors(), files)
    request = export.Request(target, tmp_path / "out", allow_loss=True)
    with pytest.raises(KeyError, match="ours"):
        export.export(tmp_path / "m.nstf", request)


def test_only_commands_of_text_speak_of_the_tokenizer() -> None:
    from nstf_convert.cli.messages import explain

    error = IndexError("index out of range in self")
    code, said = explain(error, ["eval", "m.nstf"])
    assert code == 6 and "perhaps the tokenizer" in said
    for command in ("export", "profile", "inspect"):
        code, said = explain(error, [command, "m.nstf"])
        assert code == 1 and "tokenizer" not in said and said.startswith("IndexError")


def test_a_card_holds_no_code_and_no_lines_of_a_stranger() -> None:
    """`architectures` became part of the Python that people copy from an export's card, and of what the command printed."""
    from types import SimpleNamespace

    from nstf_convert.export import card
    from nstf_convert.export.plan import ExportPlan

    evil = "X\nimport os\nos.system('x')\n"
    facts = {"tool": evil, "license": "mit\nextra: 1", "base_model": "a/b\nextra: 2"}
    report = {"accuracy": {"final": {"mean_kl\n# Evil": 0.1}}}
    artifact: Any = SimpleNamespace(manifest=SimpleNamespace(provenance=facts, report=report))
    for stated in ([evil], [5], 5, {"0": 1}, [], ["\x1b[31mX"]):
        config = {"architectures": stated, "model_type": evil}
        text = card.card(artifact, ExportPlan("hf", ()), config, "model", "nstf export")
        assert "from transformers import AutoModel\n" in text
        assert not any(
            line.startswith(("import os", "os.", "extra:", "# Evil")) for line in text.splitlines()
        )
    assert card.class_name({"architectures": ["LlamaForCausalLM"]}) == "LlamaForCausalLM"


def test_names_that_are_not_utf_8_are_written_or_refused_at_once(tmp_path: Path) -> None:
    from nstf.errors import UsageError
    from nstf_convert.cli.convert import write_report
    from nstf_convert.pipeline.calibrate.text import readable
    from nstf_convert.pipeline.store.tensorfile import TensorFile, TensorFileWriter
    from nstf_convert.pipeline.store.workdir import WorkDir

    odd = tmp_path / "m\udcff"
    files = {"config.json": json.dumps(LLAMA).encode()}
    write_artifact(odd, tensors(), files)
    for target in ("hf", "transformers"):
        words = ["export", str(odd), "--to", target, "-o", str(tmp_path / f"out {target}")]
        assert run(words) == 0, target
    assert "m\\udcff" in (tmp_path / "out hf" / "README.md").read_text()
    write_report(tmp_path / "r.json", {"a": "\udcff"})
    assert readable("t\udcff") == "t\\udcff"
    # The whole calibration was made before it could not be opened again.
    for way in (lambda: WorkDir(odd, {}), lambda: TensorFileWriter(odd), lambda: TensorFile(odd)):
        with pytest.raises(UsageError, match="the name is not UTF-8"):
            way()
