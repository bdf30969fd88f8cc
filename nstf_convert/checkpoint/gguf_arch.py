"""GGUF architectures: metadata to a Hugging Face config, and ggml's names and layouts to transformers'.

llama.cpp's converter renames, permutes the rows of q and k of the llama family (rotary halves become interleaved
pairs), adds 1 to Gemma's norms, and keeps gate and up of experts apart; each is undone here or in `gguf.py`.
Adding an architecture is one entry of ARCHITECTURES.
"""

import math
import re
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nstf.errors import CorruptError, UnsupportedError

Config = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """Its model_type and class in transformers, and what the converter did to it.

    names: last part of `blk.N.<part>` -> module of a layer; extra: config beyond what all language models have;
    permuted: rows of q and k are; offset_norms: norms are stored as 1 + w.
    """

    model_type: str
    model_class: str
    names: Mapping[str, str]
    extra: Callable[["Metadata"], Config]
    permuted: bool = False
    offset_norms: bool = False


class Metadata:
    """A GGUF file's metadata under its architecture's prefix, and the names of its tensors."""

    def __init__(
        self, values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: object
    ) -> None:
        self.values, self.shapes, self.path = values, shapes, path
        self.prefix = values.get("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        """`<architecture>.<key>`."""
        return self.values.get(f"{self.prefix}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        """A count that must be there or have a default; one number repeated for every layer counts as one."""
        value = self.get(key, default)
        if isinstance(value, list | array) and value and all(v == value[0] for v in value):
            value = value[0]
        if type(value) is not int or value < 0:
            raise UnsupportedError(
                f"{self.path}: metadata {self.prefix}.{key} is {_shown(value)}, expected one number for "
                f"all layers"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A real number that must be there (or have a default)."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UnsupportedError(
                f"{self.path}: metadata {self.prefix}.{key} is {_shown(value)}, expected a number"
            )
        if not abs(value) < 3e38:  # nor float32: configs are made of those
            raise CorruptError(f"{self.path}: metadata {self.prefix}.{key} is {value}; download it again")
        return float(value)

    def token_id(self, name: str) -> int | None:
        """`tokenizer.ggml.<name>_token_id`, or None when it is absent or no number."""
        value = self.values.get(f"tokenizer.ggml.{name}_token_id")
        return value if type(value) is int else None

    def positive(self, key: str, default: int | None = None) -> int:
        """As `integer`, for what cannot be zero."""
        value = self.integer(key, default)
        if value == 0:
            raise CorruptError(f"{self.path}: metadata {self.prefix}.{key} is 0; download it again")
        return value

    @property
    def head_dim(self) -> int:
        """Size of one attention head; llama.cpp leaves it out when it is hidden / heads."""
        share = self.positive("embedding_length") // self.positive("attention.head_count")
        return self.positive("attention.key_length", share)


def build_config(meta: Metadata) -> tuple[Config, Architecture]:
    """The config.json of a GGUF file.

    Raises UnsupportedError for an architecture or a setting that is not known.
    """
    name = meta.prefix
    if name == "llama" and meta.get("expert_count"):
        name = "llama.moe"
    architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedError(
            f"{meta.path}: GGUF architecture {str(name)[:60]!r} is unknown (known are {known})"
        )
    embedding = meta.shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise UnsupportedError(f"{meta.path} has no tensor token_embd.weight: it is not a language model")
    heads, layers = meta.positive("attention.head_count"), meta.positive("block_count")
    if layers > len(meta.shapes):
        raise CorruptError(
            f"{meta.path}: metadata says {layers} layers, but there are {len(meta.shapes)} tensors"
        )
    config: Config = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "dtype": "bfloat16",
        "hidden_size": meta.positive("embedding_length"),
        "intermediate_size": meta.integer("feed_forward_length", 0),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": meta.positive("attention.head_count_kv", heads),
        "head_dim": meta.head_dim,
        "max_position_embeddings": meta.positive("context_length"),
        "rms_norm_eps": _short_float(meta.number("attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(meta),
        "vocab_size": embedding[0],
        "tie_word_embeddings": "output.weight" not in meta.shapes,
        "bos_token_id": meta.token_id("bos"),
        "eos_token_id": meta.token_id("eos"),
        "pad_token_id": meta.token_id("padding"),
    }
    return config | architecture.extra(meta), architecture


def _shown(value: Any) -> str:
    """A value for a message, which quotes no whole array."""
    return str(list(value[:60]) if isinstance(value, list | array) else value)[:60]


def _short_float(value: float) -> float:
    """The shortest decimal of the same float32: configs say 1e-05, not 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value)))


# What llama.cpp multiplies attention by beside what follows from the factor, and how much of YaRN it mixes in.
USUAL_SCALING = {"attn_factor": 1.0}
USUAL_YARN = {"yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}


def _check_scaling(meta: Metadata, kind: str) -> None:
    """Raises UnsupportedError for a scaling that no config states."""
    for name, usual in (USUAL_SCALING | (USUAL_YARN if kind == "yarn" else {})).items():
        stated = meta.number(f"rope.scaling.{name}", usual)
        if stated != usual and not (name == "yarn_ext_factor" and stated < 0):  # negative: the usual one
            raise UnsupportedError(
                f"{meta.path}: metadata {meta.prefix}.rope.scaling.{name} is {stated:g}, not {usual:g}, which is "
                "not translated"
            )


def _rope(meta: Metadata) -> Config:
    """`rope_parameters`: theta and the scaling that the metadata states."""
    theta = _short_float(meta.number("rope.freq_base", 10000.0))
    if theta <= 0:
        raise CorruptError(
            f"{meta.path}: metadata {meta.prefix}.rope.freq_base is {theta}; download it again"
        )
    rope: Config = {"rope_type": "default", "rope_theta": theta}
    width = meta.integer("rope.dimension_count", meta.head_dim)
    if width != meta.head_dim:
        # Of the classes here one alone reads this; the others turn whole heads, whatever the config says.
        if meta.prefix != "phi3":
            raise UnsupportedError(
                f"{meta.path}: {width} of a head's {meta.head_dim} numbers are turned, which transformers' {meta.prefix} "
                "does not do"
            )
        rope["partial_rotary_factor"] = width / meta.head_dim
    # Without a word for it a factor is linear, as llama.cpp has it; files of 2023 have it under the second name.
    at = "rope.scaling.factor" if meta.get("rope.scaling.factor") is not None else "rope.scale_linear"
    kind = meta.get("rope.scaling.type", "linear" if meta.number(at, 0.0) else "none")
    _check_scaling(meta, str(kind))
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(
            f"{meta.path}: rope scaling {str(kind)[:40]!r} is not supported (linear and yarn are)"
        )
    rope |= {"rope_type": kind, "factor": meta.number(at)}
    if kind == "yarn":
        for name in ("beta_fast", "beta_slow"):
            if meta.get(f"rope.scaling.yarn_{name}") is not None:
                rope[name] = meta.number(f"rope.scaling.yarn_{name}")
        rope["original_max_position_embeddings"] = meta.integer("rope.scaling.original_context_length")
    return rope


def llama3_rope(rope: Config, head_dim: int, factors: list[float]) -> Config | None:
    """`rope_parameters` of Llama 3.1's scaling when they reproduce the file's `rope_freqs`; None otherwise.

    The file holds, for each frequency, what it is divided by; Llama 3.1 and 3.2 use low 1, high 4, original
    8192.
    """
    if (
        len(factors) != head_dim // 2
        or not all(1 <= f < math.inf for f in factors)
        or "rope_theta" not in rope
    ):
        return None  # also where layers have rules of their own (Gemma 3)
    factor, low, high, original = round(max(factors), 4), 1.0, 4.0, 8192
    for i, stored in enumerate(factors):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * i / head_dim)
        if wavelength < original / high:
            expected = 1.0
        elif wavelength > original / low:
            expected = factor
        else:
            smooth = (original / wavelength - low) / (high - low)
            expected = 1 / ((1 - smooth) / factor + smooth)
        if abs(stored - expected) > 1e-3 * expected:
            return None
    return rope | {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
DENSE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ATTENTION = {key: value for key, value in DENSE.items() if not key.startswith("ffn_") or key == "ffn_norm"}
# Experts have no `.weight` in transformers; gate and up are joined by `gguf.py`.
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
PHI3 = {
    **{
        key: value
        for key, value in DENSE.items()
        if key not in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
    },
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}


def _nothing(_: Metadata) -> Config:
    return {}


def _biases(meta: Metadata) -> Config:
    return {"attention_bias": "blk.0.attn_output.bias" in meta.shapes}


def _phi3(meta: Metadata) -> Config:
    return {"sliding_window": meta.integer("attention.sliding_window", 0) or None}


def _llama(meta: Metadata) -> Config:
    return _biases(meta) | {"mlp_bias": "blk.0.ffn_up.bias" in meta.shapes}


def _mixtral(meta: Metadata) -> Config:
    return {
        "num_local_experts": meta.integer("expert_count"),
        "num_experts_per_tok": meta.integer("expert_used_count"),
        "sliding_window": None,
    }


def _qwen_moe(meta: Metadata) -> Config:
    config: Config = {
        "num_experts": meta.integer("expert_count"),
        "num_experts_per_tok": meta.integer("expert_used_count"),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
        # llama.cpp normalises the kept experts' weights for Qwen3 (src/models/qwen3moe.cpp) and not for
        # Qwen2.
        "norm_topk_prob": meta.prefix == "qwen3moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    if meta.prefix == "qwen2moe":
        shared = meta.shapes.get("blk.0.ffn_up_shexp.weight", (0,))[0]
        config["shared_expert_intermediate_size"] = meta.integer("expert_shared_feed_forward_length", shared)
    return config if meta.prefix == "qwen2moe" else config | _biases(meta)


def _gemma2(meta: Metadata) -> Config:
    return _biases(meta) | {
        "sliding_window": meta.integer("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _query_scale(meta, layers_of_27b=46),
        "attn_logit_softcapping": meta.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.number("final_logit_softcapping", 30.0),
    }


def _gemma3(meta: Metadata) -> Config:
    layers, pattern = meta.integer("block_count"), meta.integer("attention.sliding_window_pattern", 6)
    full = _rope(meta)
    if meta.get("rope.freq_base") is None:
        full["rope_theta"] = 1000000.0
    local = {"rope_type": "default", "rope_theta": _short_float(meta.number("rope.freq_base_swa", 10000.0))}
    return _biases(meta) | {
        "sliding_window": meta.integer("attention.sliding_window"),
        "query_pre_attn_scalar": _query_scale(meta, layers_of_27b=62),
        "layer_types": [
            "sliding_attention" if (i + 1) % max(pattern, 1) else "full_attention" for i in range(layers)
        ],
        # Scaling applies to the global layers only (llama.cpp's gemma3 sets rope_freq_scale_train_swa to 1).
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def _query_scale(meta: Metadata, layers_of_27b: int) -> int:
    """Only the 27B models divide by hidden / heads; llama.cpp, too, tells them by their number of layers."""
    if meta.integer("block_count") == layers_of_27b:
        return meta.integer("embedding_length") // meta.integer("attention.head_count")
    return meta.head_dim


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", DENSE, _llama, permuted=True),
    "llama.moe": Architecture("mixtral", "MixtralForCausalLM", ATTENTION | EXPERTS, _mixtral, permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", DENSE, _nothing),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", DENSE | QK_NORMS, _biases),
    "qwen2moe": Architecture(
        "qwen2_moe", "Qwen2MoeForCausalLM", ATTENTION | EXPERTS | SHARED_EXPERT, _qwen_moe
    ),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", ATTENTION | EXPERTS | QK_NORMS, _qwen_moe),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", DENSE | FOUR_NORMS, _gemma2, offset_norms=True),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", DENSE | FOUR_NORMS | QK_NORMS, _gemma3, offset_norms=True
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", PHI3, _phi3),
}


def parameter_name(architecture: Architecture, ggml_name: str) -> str | None:
    """transformers' name of a ggml tensor; None when the architecture has no place for it."""
    match = re.fullmatch(r"(?:blk\.(0|[1-9][0-9]{0,4})\.)?([a-z0-9_]+)\.(weight|bias)", ggml_name)
    if match is None:
        return None
    block, part, suffix = match.groups()
    module = TOP.get(part) if block is None else architecture.names.get(part)
    if module is None:
        return None
    prefix = "" if block is None else f"model.layers.{block}."
    return f"{prefix}{module}" if part.endswith("_exps") else f"{prefix}{module}.{suffix}"
