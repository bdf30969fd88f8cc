"""Tiny random models, and their artifacts with every matrix encoded at random."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from nstf.kernels.formats import EncodedTensor, Node, array_specs, check, decode
from nstf.kernels.formats.tree import format_of
from nstf.runtime.skeleton import parameter_names, tied_aliases

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SPEECH = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "max_source_positions": 50,
    "begin_suppress_tokens": None,
}
IMAGE = {"image_size": 32, "patch_size": 8}

# architecture: (config class, arguments)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": (
        "LlamaConfig",
        {**GROUPED, "tie_word_embeddings": True, "rope_parameters": SCALED},
    ),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {**GROUPED, "head_dim": 8}),
    "Qwen3ForCausalLM": ("Qwen3Config", {**GROUPED, "head_dim": 8}),
    "MixtralForCausalLM": ("MixtralConfig", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "OlmoeForCausalLM": ("OlmoeConfig", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3MoeForCausalLM": (
        "Qwen3MoeConfig",
        {**GROUPED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "BertModel": ("BertConfig", TEXT),
    "BertForMaskedLM": ("BertConfig", TEXT),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "ViTForImageClassification": (
        "ViTConfig",
        {**{k: v for k, v in TEXT.items() if k != "vocab_size"}, **IMAGE},
    ),
    "ResNetForImageClassification": (
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
    ),
    "WhisperForConditionalGeneration": ("WhisperConfig", SPEECH),
}


def leaf(kind: str, **params: Any) -> Node:
    return Node(kind, format_of(kind).Params(**params))


def new_model(architecture: str, **changes: Any) -> Any:
    """The model as transformers constructs it, with its random weights."""
    import transformers

    config_class, arguments = MODELS[architecture]
    config = getattr(transformers, config_class)(**{**arguments, **changes})
    torch.manual_seed(0)
    return getattr(transformers, architecture)(config).eval()


def config_json(model: Any) -> dict[str, Any]:
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


def dense(values: torch.Tensor) -> EncodedTensor:
    name = str(values.dtype).removeprefix("torch.")
    return EncodedTensor(leaf("dense", dtype=name), tuple(values.shape), {"values": values.detach().clone()})


def random_encoded(tree: Node, shape: tuple[int, ...], seed: int = 0) -> EncodedTensor:
    generator = torch.Generator().manual_seed(seed)
    arrays = {}
    for path, spec in array_specs(tree, shape).items():
        if spec.dtype == torch.uint8:
            arrays[path] = torch.randint(0, 256, spec.shape, dtype=torch.uint8, generator=generator)
        else:
            arrays[path] = (torch.rand(spec.shape, generator=generator) * 0.02 + 0.01).to(spec.dtype)
    encoded = EncodedTensor(tree, shape, arrays)
    check(encoded)
    return encoded


def matrix_tree(model: Any, name: str, shape: tuple[int, ...]) -> Node:
    """int4, through `permute` for GPT-2's Conv1D, over experts and rows for stacks."""
    stack = len(shape) == 3 and "expert" in name
    tree = leaf("int", bits=4, group=32, lead=2 if stack else 1)
    if type(model.get_submodule(name.rpartition(".")[0])).__name__ == "Conv1D":
        return Node("permute", format_of("permute").Params(dims=(1, 0)), {"x": tree})
    return tree


def encode_model(model: Any) -> dict[str, EncodedTensor]:
    """Every matrix of the model encoded at random, the rest dense; the model gets the decoded values."""
    tensors = {}
    for seed, name in enumerate(parameter_names(model)):
        parameter = model.get_parameter(name)
        shape = tuple(parameter.shape)
        if len(shape) < 2:
            tensors[name] = dense(parameter)
        else:
            tensors[name] = random_encoded(matrix_tree(model, name, shape), shape, seed)
        parameter.data.copy_(decode(tensors[name]))
    aliases = tied_aliases(model)
    for name, buffer in model.state_dict().items():
        if name not in tensors and name not in aliases:
            tensors[name] = dense(buffer)
    return tensors


def write(folder: Path, model: Any, files: dict[str, bytes] | None = None, **meta: Any) -> Path:
    """An artifact of the model, its matrices encoded; the model keeps the decoded values."""
    from nstf.runtime.artifact import write_artifact

    path = folder / "model.nstf"
    stored = {"config.json": json.dumps(config_json(model)).encode(), **(files or {})}
    write_artifact(path, encode_model(model), stored, meta)
    return path


def inputs_of(architecture: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 100, (2, 7), generator=generator)
    if "Image" in architecture:
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}
    if "Whisper" in architecture:
        return {"input_features": torch.randn(2, 80, 100, generator=generator), "decoder_input_ids": ids}
    return {"input_ids": ids}


def held_bytes(model: nn.Module) -> int:
    """Bytes of every parameter and buffer, each counted once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """This file's functions, for the tests of this folder."""
    return sys.modules[__name__]
