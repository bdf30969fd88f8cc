"""A transformers language model as llama.cpp lays it out: names, rows, metadata.

The inverse of `nstf_convert.checkpoint.gguf_arch`: its table of architectures serves both ways, and a model that is no
entry there is refused. Experts' gate and up, one tensor in transformers, are two in ggml.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nstf.errors import UnsupportedError
from nstf.runtime.attention_windows import windows_of
from nstf_convert.checkpoint.gguf_arch import ARCHITECTURES, TOP, Architecture

# Architectures whose metadata is written here; the others of the table are read, not written.
WRITTEN = ("llama", "qwen2", "qwen3", "gemma3")
# Of these llama.cpp reads biases, and only some.
_BIASED = ("llama", "qwen2")


@dataclass(frozen=True)
class Placed:
    """A tensor of the GGUF file. name: ggml's; source: ours; heads: of rows to interleave, or 0; offset: added to it."""

    name: str
    source: str
    heads: int = 0
    offset: float = 0.0


def architecture_of(config: Mapping[str, Any]) -> tuple[str, Architecture]:
    """(GGUF's name, entry) of a config. Raises UnsupportedError."""
    kind = config.get("model_type")
    for name in WRITTEN:
        if ARCHITECTURES[name].model_type == kind:
            return name, ARCHITECTURES[name]
    known = ", ".join(ARCHITECTURES[n].model_type for n in WRITTEN)
    raise UnsupportedError(
        f"target 'gguf' takes models of type {known}, not {str(kind)[:40]!r}: target 'hf' is a folder that llama.cpp's "
        "convert_hf_to_gguf.py may read"
    )


def placed(
    name: str, architecture: Architecture, config: Mapping[str, Any], names: Sequence[str]
) -> list[Placed]:
    """Every tensor's place, in the order of `names`. Raises UnsupportedError for one that has none."""
    parts = {module: part for part, module in architecture.names.items()}
    top = {module: part for part, module in TOP.items()}
    found = []
    for source in names:
        stem, _, suffix = source.rpartition(".")
        ggml = top.get(stem)
        if ggml is None and stem.startswith("model.layers."):
            layer, _, module = stem.removeprefix("model.layers.").partition(".")
            ggml = f"blk.{layer}.{parts[module]}" if module in parts else None
        if ggml is None or suffix not in ("weight", "bias")[: 1 + (name in _BIASED)]:
            raise UnsupportedError(f"target 'gguf': tensor {source!r} has no place in GGUF's {name}")
        heads = 0
        if architecture.permuted and module_of(source) in ("q_proj", "k_proj"):
            key = "num_attention_heads" if module_of(source) == "q_proj" else "num_key_value_heads"
            heads = int(config.get(key) or config["num_attention_heads"])
        offset = 1.0 if architecture.offset_norms and ggml.endswith("norm") else 0.0
        found.append(Placed(f"{ggml}.{suffix}", source, heads, offset))
    return found


def check_windows(target: str, config: Mapping[str, Any]) -> None:
    """Raises UnsupportedError for a model whose layers slide over less than its context, in a graph that has no windows."""
    context = int(config["max_position_embeddings"])
    if narrow := [window for window in windows_of(config) if 0 < window < context]:
        raise UnsupportedError(
            f"target {target!r}: {len(narrow)} layers slide over {narrow[0]} positions, and there they would see all "
            f"{context}: target 'hf' keeps them"
        )


def module_of(name: str) -> str:
    """The last module of a parameter's name."""
    return name.split(".")[-2] if "." in name else name


def interleaved(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of [heads * head_dim, ...] from transformers' rotary halves to llama.cpp's interleaved pairs."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def write_metadata(writer: Any, name: str, config: Mapping[str, Any]) -> np.ndarray[Any, Any] | None:
    """Adds the architecture's settings; gives back Llama 3's rope factors when the model has them.

    Raises UnsupportedError for a rope scaling that is not written.
    """
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    writer.add_block_count(int(config["num_hidden_layers"]))
    writer.add_context_length(int(config["max_position_embeddings"]))
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.get("num_key_value_heads") or heads))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_vocab_size(int(config["vocab_size"]))
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    if name == "gemma3":
        writer.add_sliding_window(int(config["sliding_window"]))
        local = rope.get("sliding_attention") or {}
        writer.add_rope_freq_base_swa(float(local.get("rope_theta", 10000.0)))
        rope = rope.get("full_attention") or rope
    return _write_rope(writer, rope, head_dim)


def _write_rope(writer: Any, rope: Mapping[str, Any], head_dim: int) -> np.ndarray[Any, Any] | None:
    import gguf

    kind = rope.get("rope_type", "default")
    base = float(rope.get("rope_theta", 10000.0))
    writer.add_rope_freq_base(base)
    if kind == "default":
        return None
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
        return None
    if kind == "llama3":
        return llama3_factors(rope, base, head_dim)
    raise UnsupportedError(
        f"target 'gguf': rope scaling {str(kind)[:40]!r} is not written (linear and llama3 are)"
    )


def llama3_factors(rope: Mapping[str, Any], base: float, head_dim: int) -> np.ndarray[Any, Any]:
    """What every frequency is divided by, float32 [head_dim / 2] (Llama 3.1's scaling)."""
    wave = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    factor, original = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    smooth = (original / wave - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    found = np.where(wave < original / high, 1.0, np.where(wave > original / low, factor, between))
    return found.astype(np.float32)


def check(name: str, config: Mapping[str, Any]) -> None:
    """Raises UnsupportedError for a setting that llama.cpp's graph of the architecture does not compute."""
    _check_activation(name, config)
    if name == "gemma3":
        _check_gemma(config)
    else:
        check_windows("gguf", config)


def _check_activation(name: str, config: Mapping[str, Any]) -> None:
    wanted = ("gelu_pytorch_tanh",) if name == "gemma3" else ("silu", "swish")
    used = config.get("hidden_activation") or config.get("hidden_act") or wanted[0]
    if used not in wanted:
        raise UnsupportedError(f"target 'gguf': llama.cpp's {name} computes {wanted[0]}, the model {used!r}")


def _check_gemma(config: Mapping[str, Any]) -> None:
    """llama.cpp's Gemma 3 has every sixth layer attend to all, scales queries by the head's size, caps no logits, looks back
    alone, and scales the positions of no other layer."""
    layers = config.get("layer_types") or []
    expected = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(len(layers))]
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    scale = int(config["hidden_size"]) // heads if config["num_hidden_layers"] == 62 else head_dim
    capped = config.get("final_logit_softcapping") or config.get("attn_logit_softcapping")
    local = ((config.get("rope_parameters") or {}).get("sliding_attention") or {}).get("rope_type", "default")
    other = capped or config.get("use_bidirectional_attention") or local != "default"
    if layers != expected or config.get("query_pre_attn_scalar", scale) != scale or other:
        raise UnsupportedError("target 'gguf': the model's attention is not that of llama.cpp's gemma3")
