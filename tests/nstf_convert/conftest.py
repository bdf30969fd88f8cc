"""A tiny trained-size-nothing Llama with a tokenizer, as a Hugging Face folder and as two artifacts."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

WORDS = "the cat sat on a mat and then it ran to see one more dog by old red barn now".split()
DENSE = "model.layers.0.mlp.down_proj.weight"


@dataclass(frozen=True)
class Tiny:
    """folder: the model; same: an artifact that stores it exactly; coarse: one at 3 bits; text: held-out text."""

    folder: Path
    same: Path
    coarse: Path
    text: Path


@pytest.fixture(scope="session", autouse=True)
def _speeds(tmp_path_factory) -> Iterator[None]:
    """Measured speeds are kept for the session, and not among the user's."""
    from nstf_convert.speed import cache

    where = tmp_path_factory.mktemp("speeds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "folder", lambda: where)
        yield


@pytest.fixture(scope="session", autouse=True)
def _rates() -> Iterator[None]:
    """What a unit of work takes here is measured once for the session, and not for half a second in every conversion."""
    from nstf_convert.pipeline import prediction

    measure, known = prediction.measured_rates, {}

    def measured(machine, *arguments):
        key = (machine.device, machine.on_gpu, machine.threads, *arguments)
        if key not in known:
            known[key] = measure(machine, *arguments)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prediction, "measured_rates", measured)
        yield


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch) -> None:
    """Nothing waits for the disk here. What is there after a loss of power: tests/runtime/artifact, tests/attacks."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Tiny:
    root = tmp_path_factory.mktemp("tiny")
    folder = root / "model"
    make_model(folder)
    text = root / "text.txt"
    text.write_text(" ".join(WORDS[(i * i + i // 3) % len(WORDS)] for i in range(600)))
    return Tiny(
        folder,
        make_artifact(folder, root / "same.nstf", None),
        make_artifact(folder, root / "coarse.nstf", 3),
        text,
    )


def make_model(folder: Path) -> None:
    """Saves a Llama of 2 layers and a word-level tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS) + 2,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {"<unk>": 0, "<end>": 1} | {word: i + 2 for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")
    wrapped.save_pretrained(folder)


def make_artifact(folder: Path, path: Path, bits: int | None) -> Path:
    """Writes the model as an artifact: matrices at `bits` (None: dense), the rest dense."""
    from nstf.kernels.formats import EncodedTensor, Node, dense
    from nstf.quantizers import int_grid
    from nstf.runtime.artifact import Shared, write_artifact
    from nstf_convert.checkpoint import open_checkpoint

    tensors = {}
    with open_checkpoint(folder) as checkpoint:
        for name in checkpoint.names():
            weight = checkpoint.get(name).float()
            if bits is None or weight.ndim < 2 or name == DENSE:
                node = Node("dense", dense.Params("float32"))
                tensors[name] = EncodedTensor(node, tuple(weight.shape), {"values": weight})
            else:
                tensors[name] = int_grid.encode(weight, int_grid.Params(bits=bits, group=32))
        tensors |= {alias: Shared(stored) for alias, stored in checkpoint.ties.items()}
        meta = {
            "plan": {
                "budget": {"kind": "ratio", "value": 0.5},
                "roles": {DENSE: "down"},
                "expected_loss": {DENSE: 0.25},
            },
            "provenance": {"checkpoint": checkpoint.fingerprint(), "seed": 0},
            "report": {
                "accuracy": {"final": {"mean_kl": 0.01, "median_kl": 0.001, "p99_kl": 0.1, "top1": 0.9}}
            },
        }
        write_artifact(path, tensors, checkpoint.files(), json.loads(json.dumps(meta)))
    return path
