"""Models of published shapes with random weights, for measuring time and memory: what they predict means nothing.

A folder as Hugging Face lays it out: sharded bfloat16 safetensors with an index, config.json, and a byte-pair tokenizer of
at most 8192 tokens made from the text given. Matrices are normal with a standard deviation of 0.02 (those that write to
the residual stream less, by the square root of twice the layers, as models are initialised), norms are 1. Made on a GPU
when there is one, a tensor at a time; memory is one shard's and one tensor's.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
SHARD_BYTES = 1 << 30
END = "<|endoftext|>"

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "head_dim": 64,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
}
QWEN_MOE = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def _shape(vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
    }  # fmt: skip


# SmolLM2 135M, Llama 3.2 1B, Llama 3 8B; layers of Llama 3 70B and of Qwen3 30B-A3B, with a short table.
CONFIGS: dict[str, dict[str, Any]] = {
    "135m": {**LLAMA, **_shape(49152, 576, 1536, 30, 9, 3), "tie_word_embeddings": True},
    "1b": {**LLAMA, **_shape(128256, 2048, 8192, 16, 32, 8), "tie_word_embeddings": True},
    "8b": {**LLAMA, **_shape(128256, 4096, 14336, 32, 32, 8), "head_dim": 128},
    "70b-layers": {**LLAMA, **_shape(16384, 8192, 28672, 2, 64, 8), "head_dim": 128},
    "30b-a3b-layers": {
        **QWEN_MOE, **_shape(16384, 2048, 6144, 4, 32, 4), "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
}  # fmt: skip


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    """(name, shape) of every stored tensor, in the order of the layers."""
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        for name, shape in (("q", (queries, hidden)), ("k", (keys, hidden)), ("v", (keys, hidden))):
            yield f"{prefix}.self_attn.{name}_proj.weight", shape
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        if config["model_type"] == "qwen3_moe":
            yield f"{prefix}.self_attn.q_norm.weight", (head,)
            yield f"{prefix}.self_attn.k_norm.weight", (head,)
            yield f"{prefix}.mlp.gate.weight", (config["num_experts"], hidden)
            for expert in range(config["num_experts"]):
                yield from _ffn(f"{prefix}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
        else:
            yield from _ffn(f"{prefix}.mlp", hidden, config["intermediate_size"])
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _ffn(prefix: str, hidden: int, ffn: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.gate_proj.weight", (ffn, hidden)
    yield f"{prefix}.up_proj.weight", (ffn, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, ffn)


def parameters(config: dict[str, Any]) -> int:
    """The number of stored weights."""
    return sum(math.prod(shape) for _, shape in tensors(config))


def make(name: str, folder: Path, text: str, layers: int | None = None) -> Path:
    """Writes the model of CONFIGS[name] into `folder` unless it is there; `layers` instead of its own number."""
    config = CONFIGS[name] | ({"num_hidden_layers": layers} if layers else {})
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, text)
    write_weights(config, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def write_weights(config: dict[str, Any], folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """model-00001-of-0000N.safetensors and so on, and their index."""
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    shards: list[list[tuple[str, Shape]]] = [[]]
    room = shard_bytes
    for name, shape in tensors(config):
        size = 2 * math.prod(shape)
        if shards[-1] and size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append((name, shape))
        room -= size
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        made = {name: _weight(name, shape, config, generator).cpu() for name, shape in shard}
        save_file(made, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(made, file)
    index = {"metadata": {"total_size": 2 * parameters(config)}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def _weight(name: str, shape: Shape, config: dict[str, Any], generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    deviation = 0.02
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        deviation /= math.sqrt(2 * config["num_hidden_layers"])
    weight = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    return weight.normal_(0.0, deviation, generator=generator)


def write_tokenizer(folder: Path, text: str, vocabulary: int = 8192) -> None:
    """tokenizer.json and tokenizer_config.json of a byte-level byte-pair encoding of `text`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
