"""What a call of `generate` asks for, as far as our own decoders do it; everything else is left to transformers."""

import math
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from nstf.runtime.engine_text import WITHOUT_EFFECT
from nstf.runtime.parameter import EncodedParameter

# Arguments of `generate` that our own decoders honour; any other that is not None leaves the call to transformers.
_KNOWN = {
    "inputs", "input_ids", "attention_mask", "max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p",
    "eos_token_id", "pad_token_id", "bos_token_id", "streamer", "use_cache", "num_beams", "num_return_sequences",
}  # fmt: skip

# Settings of a GenerationConfig, and what they must be for them.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "penalty_alpha": (None, 0, 0.0),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "min_p": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "bad_words_ids": (None,),
    "force_words_ids": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None,),
    "guidance_scale": (None, 1.0),
    "stop_strings": (None,),
    "max_time": (None,),
    "watermarking_config": (None,),
    "prompt_lookup_num_tokens": (None,),
    "dola_layers": (None,),
    "constraints": (None,),
    "exponential_decay_length_penalty": (None,),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "return_dict_in_generate": (None, False),
    # "hybrid" is what older files of Gemma say; transformers itself takes it for the default.
    "cache_implementation": (None, "hybrid"),
}


class Slot:
    """A model's own decoder, once it was needed. A copy of the model has none: the decoder is tied to its arrays."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.tried = False
        self.versions: tuple[int, ...] = ()  # of the arrays it was made from
        self.lock = Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Slot":
        return Slot()

    def __reduce__(self) -> tuple[type["Slot"], tuple[()]]:
        return Slot, ()


def fingerprint(model: Any) -> tuple[Any, ...]:
    """What must be as it was for a decoder to compute what the modules would."""
    plan = id(vars(model).get("_nstf_attention_state"))  # of runtime/attention.py
    return plan, *(
        (
            id(module),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            "forward" in vars(module),
            # Casting and moving a module keep both the object and its version.
            tuple(
                (id(p), p._version, p.data_ptr(), p.dtype)
                for p in module._parameters.values()
                if p is not None
            ),
        )
        for module in model.modules()
    )


def array_versions(model: Any) -> tuple[int, ...]:
    """What changes when somebody writes into encoded arrays. (`load_state_dict` changes the fingerprint, too.)"""
    return tuple(
        array._version
        for module in model.modules()
        if isinstance(module, EncodedParameter)
        for array in module._buffers.values()
        if array is not None
    )


def read_request(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str,
    most: int = 1,
    further: frozenset[str] = frozenset(),
) -> dict[str, Any] | None:
    """What to generate, or None when transformers has to do it. device: the type the model must be on; most: sequences;
    further: of min_p and repetition_penalty, those that the decoder knows.
    """
    given = {k: v for k, v in kwargs.items() if v is not None}
    if len(args) > 1 or set(given) - _KNOWN - further or model.device.type != device or model.training:
        return None
    prompts = [*args, *(given[k] for k in ("input_ids", "inputs") if k in given)]
    ids = prompts[0] if len(prompts) == 1 else None
    if (
        not isinstance(ids, Tensor)
        or ids.dim() != 2
        or not 1 <= len(ids) <= most
        or ids.shape[1] == 0
        or ids.dtype != torch.int64
        or ids.device != model.device
    ):
        return None
    config = model.generation_config
    settings = _settings(config, given, further)
    if settings is None:
        return None
    mask, pad = given.get("attention_mask"), settings["pad_token_id"]
    if mask is not None:
        if not bool((mask == 1).all()):
            return None
    elif pad is not None and bool((ids == pad).any()):
        return None  # transformers infers a mask
    # None given to switch the end off, one length beside the other: transformers knows what they mean together.
    end = settings["eos_token_id"]
    ends = end if isinstance(end, list | tuple) else [] if end is None else [end]
    if any(type(t) is not int for t in ends) or ("eos_token_id" in kwargs and kwargs["eos_token_id"] is None):
        return None
    new_tokens = given.get("max_new_tokens", getattr(config, "max_new_tokens", None))
    if type(new_tokens) is not int or new_tokens < 1 or "max_length" in given:
        return None
    return {
        "ids": ids,
        "new_tokens": new_tokens,
        "stop": frozenset(ends),
        "pad": pad if pad is not None else next(iter(ends), 0),
        "settings": settings if settings["do_sample"] else None,
        "penalty": settings["repetition_penalty"],
        "streamer": given.get("streamer"),
    }


def _settings(config: Any, given: dict[str, Any], further: frozenset[str]) -> dict[str, Any] | None:
    """The settings a decoder reads, or None when any other is set."""
    stated = config.to_dict()
    usual = type(config)().to_dict()
    for name, value in stated.items():
        value = given.get(name, value)
        allowed = _PLAIN.get(name, (None, usual.get(name)))
        if name not in WITHOUT_EFFECT | further and value not in allowed:
            return None
    if any(given.get(n) not in _PLAIN[n] for n in ("num_beams", "num_return_sequences")):
        return None
    read = (
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "eos_token_id",
        "pad_token_id",
    )
    found = {name: given.get(name, getattr(config, name, None)) for name in read}
    # What transformers puts in the place of settings that nobody stated.
    defaults = {
        "do_sample": False,
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    settings = {k: defaults.get(k) if v is None else v for k, v in found.items()}
    return settings if _in_range(settings) else None


def _in_range(settings: dict[str, Any]) -> bool:
    """Whether the numbers are in range; what to say of others is known to transformers."""
    penalty = settings["repetition_penalty"]
    if type(penalty) not in (int, float) or not 0 < penalty < math.inf:
        return False
    if not settings["do_sample"]:
        return True
    temperature, top_k, top_p, min_p = (settings[n] for n in ("temperature", "top_k", "top_p", "min_p"))
    numbers = all(type(v) in (int, float) for v in (temperature, top_p, min_p)) and type(top_k) is int
    return numbers and 0 < temperature < math.inf and top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1
