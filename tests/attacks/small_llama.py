"""A Llama of one layer, 32 wide: its config, and its tensors as they are stored."""

from typing import Any

import torch

from nstf.kernels.formats import EncodedTensor, Node, dense

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def tensors(layers: int = 1) -> dict[str, EncodedTensor]:
    """The tensors of LLAMA with so many layers, dense, of random values."""
    from nstf.runtime.skeleton import build_skeleton, parameter_names

    model = build_skeleton(LLAMA | {"num_hidden_layers": layers})
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    tree = Node("dense", dense.Params("float32"))
    return {
        n: EncodedTensor(tree, shapes[n], {"values": torch.randn(shapes[n], generator=generator) * 0.1})
        for n in parameter_names(model)
    }
