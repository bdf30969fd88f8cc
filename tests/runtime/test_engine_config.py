"""Configs the CPU engine reads itself: published ones mean what they mean to transformers, hostile ones are refused."""

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nstf.errors import CorruptError, UnsupportedError, UsageError
from nstf.kernels.cpu.engine_matrix import available
from nstf.runtime.artifact import write_artifact
from nstf.runtime.engine import Engine
from nstf.runtime.engine_config import read_config

sys.path.insert(0, str(Path(__file__).parent))
from test_engine import build

pytestmark = pytest.mark.skipif(not available(), reason="the CPU engine was not built")

# As published: the older spelling of rotary parameters, keys left out, keys that are null.
CONFIGS = {
    "llama 3": {
        "model_type": "llama", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "num_hidden_layers": 3, "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu",
        "rope_theta": 500000.0, "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3"},
    },
    "llama 2": {
        "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 2, "vocab_size": 32000,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "hidden_act": "silu",
    },
    "llama with biases": {
        "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100,
        "intermediate_size": 128, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "attention_bias": True,
    },
    "mistral": {
        "model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 3, "intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "mistral without windows": {
        "model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "num_hidden_layers": 3, "intermediate_size": 14336, "vocab_size": 32768, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
    },
    "qwen 2": {
        "model_type": "qwen2", "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2,
        "num_hidden_layers": 4, "intermediate_size": 4864, "vocab_size": 151936, "max_position_embeddings": 32768,
        "max_window_layers": 21, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": True, "use_sliding_window": False, "hidden_act": "silu",
    },
    "qwen 3": {
        "model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "num_hidden_layers": 4, "intermediate_size": 3072, "vocab_size": 151936, "max_position_embeddings": 40960,
        "max_window_layers": 28, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "tie_word_embeddings": True, "use_sliding_window": False, "attention_bias": False, "hidden_act": "silu",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_means_the_same_without_transformers(name: str) -> None:
    from nstf.runtime import engine_config
    from nstf.runtime.skeleton import complete_config

    own = engine_config._completed(CONFIGS[name])
    assert own is not None
    short, long = read_config(own), read_config(complete_config(CONFIGS[name]))
    assert dataclasses.replace(short, rotations=()) == dataclasses.replace(long, rotations=())
    assert short.rotations == long.rotations


@pytest.mark.parametrize("change", [
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}},
    {"use_sliding_window": True},
    {"num_hidden_layers": None}, {"partial_rotary_factor": 0.5}, {"rope_theta": None}, {"model_type": "phi3"},
])  # fmt: skip
def test_a_config_that_needs_transformers_is_left_to_it(change: dict[str, Any]) -> None:
    from nstf.runtime import engine_config

    assert engine_config._completed(CONFIGS["qwen 2"] | change) is None


HOSTILE = [
    {"num_attention_heads": 4 + 3 * 2**58}, {"num_key_value_heads": 2 + 2**58}, {"max_position_embeddings": 2**63 - 1},
    {"max_position_embeddings": 2**64}, {"num_hidden_layers": 10**9}, {"num_hidden_layers": "2"}, {"vocab_size": -100},
    {"hidden_act": ["silu"]}, {"model_type": ["llama"]}, {"rope_scaling": [1], "rope_parameters": None}, {"head_dim": 2**62},
    {"intermediate_size": 0}, {"sliding_window": 2**70, "model_type": "mistral"}, {"hidden_size": 32.0},
]  # fmt: skip


@pytest.mark.parametrize("change", HOSTILE, ids=lambda c: next(iter(c)))
def test_sizes_of_a_stranger_are_refused(change: dict[str, Any], tiny: ModuleType, tmp_path: Path) -> None:
    model = build("llama")
    config = tiny.config_json(model) | change
    files = {"config.json": json.dumps(config).encode()}
    write_artifact(tmp_path / "model.nstf", tiny.encode_model(model), files=files)
    with pytest.raises((CorruptError, UnsupportedError, UsageError)):
        Engine.open(tmp_path / "model.nstf", verify=False).forward([1])
