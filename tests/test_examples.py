"""The sample models are what they are said to be, and the examples' commands exist."""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer

from nstf_convert.cli import run

EXAMPLES = Path(__file__).parent.parent / "examples"
LANGUAGE_MODELS = {"tiny_llama": 2_879_744, "tiny_moe": 1_754_176}


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a script of the examples runs: its folder comes first."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.syspath_prepend(str(EXAMPLES / "tiny_conv"))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in ("language_model", "shapes"):
            del sys.modules[name]


def test_the_sample_llama_is_the_one_that_was_asked_for() -> None:
    config = json.loads((EXAMPLES / "tiny_llama" / "model" / "config.json").read_text())
    asked = {"model_type": "llama", "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512}
    asked |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8}
    asked |= {"hidden_act": "silu", "tie_word_embeddings": True}
    assert asked == {key: config[key] for key in asked}


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_a_sample_language_model_has_learned_english(name: str, on_path: None) -> None:
    from language_model import documents, encode_documents, mean_loss

    folder = EXAMPLES / name / "model"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert sum(p.numel() for p in model.parameters()) == LANGUAGE_MODELS[name]
    ids = encode_documents(tokenizer.backend_tokenizer, documents("heldout.txt"))[:4097]
    # The first chapter is the hardest part of the text, 36 and 37; over all of it both are at 25.
    assert math.exp(mean_loss(model, ids, 512, "cpu")) < 40
    text = "Call me Ishmael — “some years ago”;\n\n\t12 £"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_sample_convolutional_model_names_shapes_it_has_not_seen(on_path: None) -> None:
    from shapes import CLASSES, pictures

    folder = EXAMPLES / "tiny_conv" / "model"
    model = AutoModelForImageClassification.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    ).eval()
    pixels, labels = pictures(192, 10**9)
    with torch.inference_mode():
        right = (model(pixel_values=pixels).logits.argmax(-1) == labels).float().mean()
    assert right > 0.94
    assert [model.config.id2label[i] for i in range(10)] == list(CLASSES)
    wide = [
        p
        for n, p in model.named_parameters()
        if p.ndim == 4 and p.shape[2:] == (3, 3) and min(p.shape[:2]) >= 64
    ]
    assert len(wide) >= 8


def test_sample_weights_stay_small() -> None:
    limits = {"tiny_llama": 6_000_000, "tiny_moe": 4_000_000, "tiny_conv": 2_000_000}
    for name, limit in limits.items():
        assert (EXAMPLES / name / "model" / "model.safetensors").stat().st_size < limit


def test_no_sentence_of_the_held_out_text_was_trained_on() -> None:
    data = EXAMPLES / "data"
    trained = (data / "prose.txt").read_text("utf-8") + (data / "speeches.txt").read_text("utf-8")
    sentences = re.split(r"(?<=[.!?])\s+", (data / "heldout.txt").read_text("utf-8"))
    assert [s for s in sentences if len(s) > 60 and s in trained] == []


def commands_in(text: str) -> list[tuple[str, list[str]]]:
    """(sub-command, its options) of every `nstf ...` line, continued lines joined."""
    lines = text.replace("\\\n", " ").splitlines()
    found = [re.match(r"\s*(?:run: )?nstf ([a-z]+) (.*)", line) for line in lines]
    return [(m.group(1), re.findall(r"(?<!\S)(--[a-z0-9-]+|-[a-z])\b", m.group(2))) for m in found if m]


@pytest.mark.parametrize("file", ["README.md", "github-actions/accuracy-gate.yml"])
def test_every_command_of_the_examples_exists_with_its_options(file: str, capsys: Any) -> None:
    commands = commands_in((EXAMPLES / file).read_text("utf-8"))
    assert len(commands) >= 3
    for command, options in commands:
        assert run([command, "--help"]) == 0
        shown = capsys.readouterr().out
        for option in options:
            assert re.search(rf"(?<!\S){re.escape(option)}\b", shown), f"nstf {command} has no {option}"


def test_the_questions_are_those_that_their_script_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.util import module_from_spec, spec_from_file_location

    from nstf_convert.gates.tasks import read_tasks

    spec = spec_from_file_location("questions", EXAMPLES / "data" / "questions.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.questions((EXAMPLES / "data" / "heldout.txt").read_text("utf-8"))
    found = read_tasks(EXAMPLES / "data" / "questions.jsonl")
    assert [(q.name, q.task, q.context, list(q.choices), q.answer) for q in found] == [
        (m["id"], m["task"], m["context"], m["choices"], m["answer"]) for m in made
    ]
    assert len(found) == 120 and {q.task for q in found} == {"ending", "order"}
