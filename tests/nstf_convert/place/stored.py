"""A small artifact of random weights."""

import json
from pathlib import Path
from typing import Any

import torch

from nstf import quantizers
from nstf.kernels.formats import EncodedTensor, Node
from nstf.kernels.formats.dense import Params as Dense
from nstf.runtime.artifact import Shared, write_artifact
from nstf.runtime.skeleton import build_skeleton

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
    "tie_word_embeddings": True, "max_position_embeddings": 64,
}  # fmt: skip


def artifact_of(
    path: Path,
    config: dict[str, Any],
    bits: int = 4,
    shared: tuple[str, str] = ("lm_head.weight", "model.embed_tokens.weight"),
) -> Path:
    """An artifact with random weights, all matrices in integers, groups of 128."""
    torch.manual_seed(0)
    tensors: dict[str, Any] = {}
    grid: Any = quantizers.method("int_grid")
    for name, value in build_skeleton(config).named_parameters():
        weight = torch.randn(value.shape)
        if weight.dim() == 2:
            tensors[name] = grid.encode(weight, grid.Params(bits=bits, group=128))
        else:
            tensors[name] = EncodedTensor(
                Node("dense", Dense("bfloat16")), tuple(weight.shape), {"values": weight.bfloat16()}
            )
    if config["tie_word_embeddings"]:
        tensors[shared[0]] = Shared(shared[1])
    write_artifact(path, tensors, {"config.json": json.dumps(config).encode()})
    return path
