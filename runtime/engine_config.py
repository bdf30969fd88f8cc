"""What the C++ engine needs to know of a model's config.json: sizes, norms, windows and rotary angles.

One entry of `_FAMILIES` per architecture of the Llama family; a model it does not describe exactly is refused, and the
caller uses the module path.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping

from nstf.errors import UnsupportedError
from nstf.kernels.records import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Config = Mapping[str, Any]


@frozen
class Family:
    """How an architecture differs from Llama, and which keys of its config transformers reads."""

    qk_norm: bool = False
    out_norms: bool = False
    unit_norms: bool = False  # norms are stored less one
    scaled_embedding: bool = False
    activation: str = "hidden_act"
    biases: str = "config"  # where q, k and v have them: as attention_bias says, always on q, k and v, never
    windows: str = "none"  # none, all layers, or those that layer_types names
    score_scalar: bool = False
    logit_cap: bool = False


_FAMILIES = {
    "llama": Family(),
    "mistral": Family(biases="never", windows="all"),
    "qwen2": Family(biases="qkv", windows="layer_types"),
    "qwen3": Family(qk_norm=True, windows="layer_types"),
    "gemma3_text": Family(
        qk_norm=True, out_norms=True, unit_norms=True, scaled_embedding=True, activation="hidden_activation",
        windows="layer_types", score_scalar=True, logit_cap=True,
    ),
}  # fmt: skip
_ACTIVATIONS = {"silu": False, "swish": False, "gelu_pytorch_tanh": True}
# Keys that would change what is computed, and what they must be.
_REFUSED = {
    "attn_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
    "mlp_bias": (None, False),
    "attention_multiplier": (None,),
    "residual_multiplier": (None,),
    "logits_scaling": (None,),
    "embedding_multiplier": (None,),
}
_LARGEST_HEAD = 512  # of the C++ code's buffers
# A config comes from a stranger: products of sizes have to fit 64 bits, and lists of layers the memory.
_LARGEST_SIZE = 1 << 30
_MOST_LAYERS = 1 << 12


@frozen
class EngineConfig:
    """The sizes of the model, and per layer its window (0: none) and its number in `rotations`, the angles a position
    turns by, [head_size / 2]. biases: the projections that have one."""

    family: Family
    shape: dict[str, Any]
    windows: tuple[int, ...]
    rotation_of: tuple[int, ...]
    rotations: tuple[array[float], ...]
    tied: bool
    biases: tuple[str, ...]


# What a config has to state, and what transformers takes where it is silent; any other family is left to transformers.
_STATED = (
    "num_attention_heads hidden_size num_hidden_layers intermediate_size vocab_size max_position_embeddings rms_norm_eps "
    "tie_word_embeddings"
).split()
_ALSO_STATED = {
    "llama": (),
    "mistral": ("sliding_window",),
    "qwen2": (),
    "qwen3": ("head_dim",),
}
_ROPE_TYPES = ("default", "linear", "llama3")


def completed(config: Config) -> Config:
    """The config with every key that is read here, as transformers completes it.

    Llama, Mistral and Qwen, whose configs state nearly everything, do without transformers: importing it takes longer than
    loading such a model. Raises UnsupportedError when transformers refuses the config.
    """
    try:
        found = _completed(config)
    except (
        TypeError,
        ValueError,
        AttributeError,
    ):  # not of the types a config has: transformers knows what to say
        found = None
    if found is not None:
        return found
    from nstf.runtime.skeleton import complete_config

    return complete_config(config)


def _completed(config: Config) -> Config | None:
    """The config completed by what its family's class does, or None where that is not all there is to it."""
    kind = config.get("model_type")
    rope = _rope_parameters(config)
    if (
        not isinstance(kind, str)
        or kind not in _ALSO_STATED
        or rope is None
        or "partial_rotary_factor" in config
    ):
        return None
    if any(config.get(k) is None for k in _STATED) or any(k not in config for k in _ALSO_STATED[kind]):
        return None
    full = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")} | {
        "rope_parameters": rope
    }
    full["hidden_act"] = config.get("hidden_act") or "silu"
    full["attention_bias"] = bool(config.get("attention_bias"))
    if config.get("num_key_value_heads") is None:
        full["num_key_value_heads"] = config["num_attention_heads"]
    if kind.startswith("qwen") and config.get("layer_types") is None:
        if config.get("use_sliding_window"):
            return None
        full["layer_types"] = ["full_attention"] * _size(config, "num_hidden_layers", _MOST_LAYERS)
    return full


def _rope_parameters(config: Config) -> dict[str, Any] | None:
    """The rotary parameters in today's spelling, from today's or the older ones; None for kinds that need more."""
    stated = config.get("rope_parameters")
    if stated is None:
        stated = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    elif config.keys() & {"rope_theta", "rope_scaling"}:
        return None
    if not isinstance(stated, Mapping) or stated.get("rope_theta") is None:
        return None
    kind = stated.get("rope_type", stated.get("type", "default"))
    return {**stated, "rope_type": kind} if kind in _ROPE_TYPES else None


def read_config(config: Config) -> EngineConfig:
    """The engine's view of a `completed` config.

    Raises UnsupportedError, naming what the engine does not do.
    """
    kind = config.get("model_type")
    family = _FAMILIES.get(str(kind))
    if family is None:
        raise UnsupportedError(f"the CPU engine does not run architecture {str(kind)[:40]!r}")
    for key, allowed in _REFUSED.items():
        if config.get(key) not in allowed:
            raise UnsupportedError(f"the CPU engine does not do {key} {str(config[key])[:40]!r}")
    activation = config.get(family.activation)
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise UnsupportedError(f"the CPU engine has no activation {str(activation)[:40]!r}")
    try:
        return _read(config, family, _ACTIVATIONS[activation])
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError) as error:
        raise UnsupportedError(f"the CPU engine cannot read this config.json ({error!r})") from error


def _size(config: Config, key: str, most: int = _LARGEST_SIZE) -> int:
    """A size the config states. Raises ValueError unless it is 1 to `most`."""
    value = config[key]
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{key} is {str(value)[:40]}")
    return value


def _read(config: Config, family: Family, gelu: bool) -> EngineConfig:
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    head_size = _size(config, "head_dim") if config.get("head_dim") else hidden // heads
    layers = _size(config, "num_hidden_layers", _MOST_LAYERS)
    if not 0 < head_size <= _LARGEST_HEAD or head_size % 2:
        raise UnsupportedError(f"the CPU engine has no heads of {head_size}")
    scalar = float(config["query_pre_attn_scalar"]) if family.score_scalar else float(head_size)
    shape = {
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": _size(config, "num_key_value_heads"),
        "head_size": head_size,
        "ffn": _size(config, "intermediate_size"),
        "vocab": _size(config, "vocab_size"),
        "context": _size(config, "max_position_embeddings"),
        "epsilon": float(config["rms_norm_eps"]),
        "score_scale": scalar**-0.5,
        "embedding_scale": math.sqrt(hidden) if family.scaled_embedding else 1.0,
        "logit_cap": float(config.get("final_logit_softcapping") or 0.0) if family.logit_cap else 0.0,
        "gelu": gelu,
    }
    kinds = list(config["layer_types"]) if family.windows == "layer_types" else ["full_attention"] * layers
    if len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise UnsupportedError(f"the CPU engine does not know layer types {sorted(set(kinds))}")
    window = _size(config, "sliding_window") if config.get("sliding_window") else 0
    if "sliding_attention" in kinds and not window:
        raise UnsupportedError("config.json names sliding layers and no sliding_window")
    slides = ["sliding_attention" in k or family.windows == "all" for k in kinds]
    names = sorted(set(kinds))
    rotations = tuple(_frequencies(_rope(config, name), head_size, config) for name in names)
    biased = {"qkv": ("q", "k", "v"), "never": ()}.get(
        family.biases, ("q", "k", "v", "o") if config.get("attention_bias") else ()
    )
    return EngineConfig(
        family,
        shape,
        tuple(window if s else 0 for s in slides),
        tuple(names.index(k) for k in kinds),
        rotations,
        bool(config["tie_word_embeddings"]),
        biased,
    )


def _rope(config: Config, kind: str) -> Config:
    """The rotary parameters of a kind of layer: one set for all, or one for each kind."""
    stated = config["rope_parameters"]
    own = stated.get(kind)
    found: Config = own if isinstance(own, Mapping) else stated
    return found


def _frequencies(rope: Config, size: int, config: Config) -> array[float]:
    """Angles per position [size / 2] (Su et al. 2021); linear and Llama 3's scaling of the frequencies."""
    kind = rope.get("rope_type", "default")
    if float(rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedError("the CPU engine turns whole heads only")
    inverse = [float(rope["rope_theta"]) ** (-i / size) for i in range(0, size, 2)]
    if kind == "linear":
        inverse = [f / float(rope["factor"]) for f in inverse]
    elif kind == "llama3":
        stated = {"original_max_position_embeddings": config["max_position_embeddings"], **rope}
        inverse = [_llama3(f, stated) for f in inverse]
    elif kind != "default":
        raise UnsupportedError(f"the CPU engine does not know rope type {str(kind)[:40]!r}")
    return array("f", inverse)


def _llama3(inverse: float, rope: Config) -> float:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones stay, those between change smoothly."""
    factor, low, high = (float(rope[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    old = float(rope["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse
    if wavelength > old / low:
        return inverse / factor
    if wavelength < old / high:
        return inverse
    smooth = (old / wavelength - low) / (high - low)
    return (1 - smooth) * inverse / factor + smooth * inverse
