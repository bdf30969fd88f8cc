"""What the C++ engine needs to know of a model's config.json: sizes, norms, windows and rotary angles.

One entry of `_FAMILIES` per architecture of the Llama family; a model it does not describe exactly is refused, and the
caller uses the module path.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nstf.errors import UnsupportedError

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """How an architecture differs from Llama."""

    qk_norm: bool = False
    out_norms: bool = False
    unit_norms: bool = False  # norms are stored less one
    scaled_embedding: bool = False
    gelu: bool = False


_FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(qk_norm=True),
    "gemma3_text": Family(qk_norm=True, out_norms=True, unit_norms=True, scaled_embedding=True, gelu=True),
}
_ACTIVATIONS = {"silu": False, "swish": False, "gelu_pytorch_tanh": True}


@dataclass(frozen=True)
class EngineConfig:
    """The sizes of the model, and per layer its window (0: none) and its number in `rotations`, (cosines, sines) each
    [context, head_size / 2]."""

    family: Family
    shape: dict[str, Any]
    windows: tuple[int, ...]
    rotation_of: tuple[int, ...]
    rotations: tuple[tuple[Tensor, Tensor], ...]
    tied: bool


def read_config(config: Config) -> EngineConfig:
    """The engine's view of a config.json. Raises UnsupportedError, naming what the engine does not do."""
    kind = config.get("model_type")
    family = _FAMILIES.get(str(kind))
    if family is None:
        raise UnsupportedError(f"the CPU engine does not run architecture {str(kind)[:40]!r}")
    activation = config.get("hidden_act", config.get("hidden_activation", "silu"))
    if family.gelu:
        activation = config.get("hidden_activation") or "gelu_pytorch_tanh"
    if activation not in _ACTIVATIONS:
        raise UnsupportedError(f"the CPU engine has no activation {str(activation)[:40]!r}")
    if config.get("attn_logit_softcapping") is not None:
        raise UnsupportedError("the CPU engine does not cap attention scores")
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        head_size = int(config.get("head_dim") or hidden // heads)
        layers = int(config["num_hidden_layers"])
        context = int(config.get("max_position_embeddings") or 4096)
        scalar = config.get("query_pre_attn_scalar")
        shape = {
            "hidden": hidden,
            "layers": layers,
            "heads": heads,
            "kv_heads": int(config.get("num_key_value_heads") or heads),
            "head_size": head_size,
            "ffn": int(config["intermediate_size"]),
            "vocab": int(config["vocab_size"]),
            "context": context,
            "epsilon": float(config.get("rms_norm_eps") or 1e-6),
            "score_scale": float(scalar if scalar else head_size) ** -0.5,
            # transformers rounds the square root to the embedding's dtype; it is exact in float32 there.
            "embedding_scale": math.sqrt(hidden) if family.scaled_embedding else 1.0,
            "logit_cap": float(config.get("final_logit_softcapping") or 0.0),
            "gelu": _ACTIVATIONS[activation],
        }
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedError(f"the CPU engine cannot read this config.json ({error!r})") from error
    windows = _windows(config, layers)
    kinds = config.get("layer_types") or ["full_attention"] * layers
    names = sorted(set(kinds))
    made = [_rotation(_rope(config, name), head_size, context) for name in names]
    if len(made) > 1 and all(torch.equal(made[0][0], m[0]) for m in made):
        made, kinds, names = made[:1], [names[0]] * layers, names[:1]
    return EngineConfig(
        family,
        shape,
        windows,
        tuple(names.index(k) for k in kinds),
        tuple(made),
        bool(config.get("tie_word_embeddings", True)),
    )


def _windows(config: Config, layers: int) -> tuple[int, ...]:
    """Positions each layer sees, 0 for all of them."""
    size = config.get("sliding_window")
    kinds = config.get("layer_types")
    if kinds is not None:
        if len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
            raise UnsupportedError(f"the CPU engine does not know layer types {sorted(set(kinds))}")
        if "sliding_attention" in kinds and not size:
            raise UnsupportedError("config.json names sliding layers and no sliding_window")
        return tuple(int(size or 0) if k == "sliding_attention" else 0 for k in kinds)
    if size and config.get("model_type") == "mistral":
        return (int(size),) * layers
    if size and config.get("use_sliding_window"):
        raise UnsupportedError("the CPU engine needs layer_types to know which layers slide")
    return (0,) * layers


def _rope(config: Config, kind: str) -> dict[str, Any]:
    """The rotary parameters of a kind of layer, in the words of transformers 5, from either spelling."""
    stated = config.get("rope_parameters")
    if isinstance(stated, Mapping):
        own = stated.get(kind)
        return dict(own) if isinstance(own, Mapping) else dict(stated)
    theta = float(config.get("rope_theta") or 10000.0)
    if config.get("model_type") == "gemma3_text" and kind == "sliding_attention":
        return {"rope_type": "default", "rope_theta": float(config.get("rope_local_base_freq") or 10000.0)}
    scaling = config.get("rope_scaling") or {}
    rope = dict(scaling) | {"rope_theta": scaling.get("rope_theta", theta)}
    return rope | {"rope_type": scaling.get("rope_type", scaling.get("type", "default"))}


def _rotation(rope: Config, size: int, context: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [context, size / 2] (Su et al. 2021); linear and Llama 3's scaling of the frequencies."""
    kind = rope.get("rope_type", "default")
    if float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedError("the CPU engine turns whole heads only")
    inverse = 1.0 / float(rope.get("rope_theta", 10000.0)) ** (torch.arange(0, size, 2).float() / size)
    if kind == "linear":
        inverse = inverse / float(rope["factor"])
    elif kind == "llama3":
        inverse = _llama3(inverse, rope)
    elif kind != "default":
        raise UnsupportedError(f"the CPU engine does not know rope type {str(kind)[:40]!r}")
    angles = torch.outer(torch.arange(context).float(), inverse)
    return angles.cos().contiguous(), angles.sin().contiguous()


def _llama3(inverse: Tensor, rope: Config) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones stay, those between change smoothly."""
    factor, low, high = (float(rope[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    old = float(rope["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse
    smooth = (old / wavelength - low) / (high - low)
    between = (1 - smooth) * inverse / factor + smooth * inverse
    out = torch.where(wavelength > old / low, inverse / factor, inverse)
    return torch.where((wavelength <= old / low) & (wavelength >= old / high), between, out)
