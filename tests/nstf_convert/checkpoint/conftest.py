"""Tiny models with fixed seeds, saved the way transformers saves them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def tiny(class_name: str, seed: int = 0, **settings: Any) -> Any:
    """A model of that transformers class with random weights."""
    cls = getattr(transformers, class_name)
    config = cls.config_class(**{**SIZES, **settings})
    torch.manual_seed(seed)
    return cls(config).eval()


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """make_folder(class_name, **config) -> folder of a tiny model; `shard` and `dtype` are understood too."""

    def make(
        class_name: str, name: str = "model", shard: str | None = None, dtype: Any = None, **settings: Any
    ) -> Path:
        model = tiny(class_name, **settings)
        if dtype is not None:
            model = model.to(dtype)
        folder = tmp_path / name
        model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
        return folder

    return make


@pytest.fixture
def llama_folder(make_folder: Callable[..., Path]) -> Path:
    """A tiny Llama with its own head, in one float32 file."""
    return make_folder("LlamaForCausalLM", tie_word_embeddings=False)
