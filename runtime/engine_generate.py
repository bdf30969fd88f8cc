"""`generate` of a loaded model by the CPU engine where the request allows it, by transformers where it does not.

The engine continues one sequence, greedily or by temperature, top-k and top-p. Beams, several sequences, padding, logits
processors, caches handed in and everything else stay with transformers.
"""

import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from nstf.errors import UnsupportedError

_log = logging.getLogger("nstf")

# Arguments of `generate` that the engine honours; any other that is not None leaves the call to transformers.
_KNOWN = {
    "inputs", "input_ids", "attention_mask", "max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p",
    "eos_token_id", "pad_token_id", "bos_token_id", "streamer", "use_cache", "num_beams", "num_return_sequences",
}  # fmt: skip

# Settings of a GenerationConfig, and what they must be for the engine.
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
    "cache_implementation": (None,),
}


def use_engine(model: Any, build: Callable[[], Any]) -> None:
    """Makes `model.generate` try the engine first. build: makes the Engine at the first call that can use it.

    A model that the engine does not run keeps transformers' `generate`; `model.nstf_engine` then stays None.
    """
    original = model.generate
    state: dict[str, Any] = {"tried": False}

    def engine() -> Any:
        if not state["tried"]:
            state["tried"] = True
            try:
                model.nstf_engine = build()
            except UnsupportedError as error:
                _log.debug("no engine: %s", error)
        return model.nstf_engine

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = _request(self, args, kwargs)
        if request is None or engine() is None:
            return original(*args, **kwargs)
        return _run(engine(), request)

    model.nstf_engine = None
    model.generate = MethodType(torch.no_grad()(generate), model)


def _request(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """What to generate, or None when transformers has to do it."""
    given = {k: v for k, v in kwargs.items() if v is not None}
    if len(args) > 1 or set(given) - _KNOWN or model.device.type != "cpu" or model.training:
        return None
    ids = args[0] if args else given.get("input_ids", given.get("inputs"))
    if (
        not isinstance(ids, Tensor)
        or ids.dim() != 2
        or len(ids) != 1
        or ids.shape[1] == 0
        or ids.is_floating_point()
    ):
        return None
    mask = given.get("attention_mask")
    if mask is not None and not bool((mask == 1).all()):
        return None
    config = model.generation_config
    settings = {name: given.get(name, getattr(config, name, None)) for name in _PLAIN}
    if any(value not in _PLAIN[name] for name, value in settings.items()):
        return None
    new_tokens = given.get(
        "max_new_tokens", None if "max_length" in given else getattr(config, "max_new_tokens", None)
    )
    if new_tokens is None:
        length = given.get("max_length", getattr(config, "max_length", None))
        # transformers' own default is 20 tokens in all, with a warning of its own.
        if length is None or ("max_length" not in given and length == 20):
            return None
        new_tokens = length - ids.shape[1]
    if new_tokens < 1:
        return None
    end = given.get("eos_token_id", getattr(config, "eos_token_id", None))
    stop = (
        frozenset()
        if end is None
        else frozenset(int(t) for t in (end if isinstance(end, list | tuple) else [end]))
    )
    sample = bool(given.get("do_sample", config.do_sample))
    chosen = {
        name: given.get(name, getattr(config, name, None)) for name in ("temperature", "top_k", "top_p")
    }
    return {
        "ids": ids,
        "new_tokens": int(new_tokens),
        "stop": stop,
        "choose": _sampler(chosen) if sample else None,
        "streamer": given.get("streamer"),
    }


def _sampler(settings: dict[str, Any]) -> Callable[[Tensor], int]:
    """Draws a token as transformers does: temperature, then the top k, then the top p, then torch's generator."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    temperature, top_k, top_p = (settings[n] for n in ("temperature", "top_k", "top_p"))
    warpers: list[Any] = []
    if temperature is not None and temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(float(temperature)))
    if top_k:
        warpers.append(TopKLogitsWarper(int(top_k)))
    if top_p is not None and top_p < 1.0:
        warpers.append(TopPLogitsWarper(float(top_p)))

    def choose(logits: Tensor) -> int:
        threads = torch.get_num_threads()
        # One: torch's other threads would go on looking for work while the engine's start on theirs.
        torch.set_num_threads(1)
        try:
            scores = logits[None]
            for warper in warpers:
                scores = warper(None, scores)
            return int(torch.multinomial(scores.softmax(dim=-1), 1))
        finally:
            torch.set_num_threads(threads)

    return choose


def _run(engine: Any, request: dict[str, Any]) -> Tensor:
    """Token ids [1, prompt + new], as `generate` returns them."""
    ids, streamer = request["ids"], request["streamer"]
    if streamer is not None:
        streamer.put(ids.cpu())
    new = []
    for token in engine.generate(ids[0], request["new_tokens"], request["stop"], request["choose"]):
        new.append(token)
        if streamer is not None:
            streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()
    return torch.cat([ids, torch.tensor([new], dtype=ids.dtype)], dim=1)
