"""Writing tiny GGUF files as llama.cpp's converter would: names, permuted q and k, Gemma's norms plus one."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

DENSE = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
TWO_NORMS = {"post_attention_layernorm": "ffn_norm"}
FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rotary halves of each head's rows interleaved into pairs."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def ggml_tensors(model: Any, arch: str) -> dict[str, np.ndarray]:
    """The model's parameters under ggml's names and in ggml's layouts."""
    config, out = model.config, {}
    norms = FOUR_NORMS if arch.startswith("gemma") else TWO_NORMS
    for name, tensor in model.state_dict().items():
        value = tensor.detach().float().numpy()
        if name == "lm_head.weight":
            if not config.tie_word_embeddings:
                out["output.weight"] = value
            continue
        if name in ("model.embed_tokens.weight", "model.norm.weight"):
            plus = 1 if arch.startswith("gemma") and "norm" in name else 0
            out["token_embd.weight" if "embed" in name else "output_norm.weight"] = value + plus
            continue
        _, _, layer, rest = name.split(".", 3)
        if "mlp.experts." in rest:
            if rest.endswith("gate_up_proj"):
                half = value.shape[1] // 2
                out[f"blk.{layer}.ffn_gate_exps.weight"] = np.ascontiguousarray(value[:, :half])
                out[f"blk.{layer}.ffn_up_exps.weight"] = np.ascontiguousarray(value[:, half:])
            else:
                out[f"blk.{layer}.ffn_down_exps.weight"] = value
            continue
        module, suffix = rest.rsplit(".", 1)
        part = {**DENSE, **norms}[module]
        if arch == "llama" and part in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
            value = permuted(value, heads)
        if arch.startswith("gemma") and part.endswith("norm"):
            value = value + 1
        if part == "ffn_gate_inp_shexp":
            value = value[0]
        out[f"blk.{layer}.{part}.{suffix}"] = value
    return out


def metadata_of(model: Any) -> dict[str, int | float]:
    """The keys llama.cpp's converter writes for every language model."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
    }


def write(
    path: Path,
    arch: str,
    tensors: dict[str, np.ndarray],
    metadata: dict[str, Any],
    kind: "gguf.GGMLQuantizationType | None" = None,
    tokenizer: bool = False,
    pre: str = "smollm",
) -> Path:
    """A GGUF file; matrices are quantised to `kind`, vectors stay float32. pre: how its tokenizer splits text."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        full = key if key.startswith(("general.", "tokenizer.", "split.")) else f"{arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        else:
            writer.add_array(full, value)
    if tokenizer:
        add_tokenizer(writer, pre)
    for name, value in tensors.items():
        if kind is not None and value.ndim > 1:
            writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(value), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: Any, pre: str) -> None:
    """A byte-level BPE vocabulary of 96 tokens: specials, printable ASCII, a few merges."""
    letters = [chr(c) for c in range(ord("!"), ord("~") + 1) if chr(c) not in "{|}~`^"][:86]
    merges = ["h e", "l l", "he ll", "hell o"]
    tokens = ["<unk>", "<s>", "</s>", "Ġ", "Ċ", *letters]
    tokens += ["he", "ll", "hell", "hello"]
    tokens += [f"<pad{i}>" for i in range(96 - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def state(model: Any) -> dict[str, torch.Tensor]:
    """The model's parameters, detached."""
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}
