"""A small Llama with a tokenizer and a text, large enough that every kind of candidate is tried."""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

WORDS = [
    a + b
    for a in ("ka", "lo", "mi", "nu", "pe", "ra", "si", "to")
    for b in ("b", "d", "g", "l", "m", "n", "r", "s")
]


@dataclass(frozen=True)
class Small:
    """folder: the model; text: text of its words; options: settings that make a conversion quick."""

    folder: Path
    text: Path


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Small:
    root = tmp_path_factory.mktemp("small")
    folder = root / "model"
    make_llama(folder)
    rng = random.Random(0)
    text = root / "text.txt"
    text.write_text(" ".join(rng.choice(WORDS) for _ in range(3000)))
    return Small(folder, text)


def make_llama(folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Saves a Llama of 2 layers, 64 wide, and a word-level tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS) + 2,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.25,
        bos_token_id=1,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    vocabulary = {"<unk>": 0, "<end>": 1} | {word: i + 2 for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")
    wrapped.save_pretrained(folder)


@pytest.fixture
def options(small, tmp_path):
    """Makes ConvertOptions for the small model; keyword arguments override."""
    from nstf_convert.pipeline import Budget, ConvertOptions

    def make(budget=("ratio", 0.5), **changes):
        settings = {
            "model": str(small.folder),
            "output": tmp_path / "out.nstf",
            "datasets": (str(small.text),),
            "samples": 6,
            "seq_len": 32,
            "threads": 1,
            "search": False,
            "prefix": False,
            "attention_plan": False,
            "formats": ("int_grid", "svd", "add"),
        }
        return ConvertOptions(budget=Budget(*budget), **{**settings, **changes})

    return make
