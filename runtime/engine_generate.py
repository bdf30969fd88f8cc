"""`generate` of a loaded model by the CPU engine where the request allows it, by transformers where it does not.

The engine continues one sequence, greedily or by temperature, top-k and top-p. Beams, several sequences, padding, logits
processors, caches handed in and everything else stay with transformers.
"""

import logging
from collections.abc import Callable
from threading import Lock
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from nstf.errors import NstfError
from nstf.runtime.engine_text import WITHOUT_EFFECT

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
    # "hybrid" is what older files of Gemma say; transformers itself takes it for the default.
    "cache_implementation": (None, "hybrid"),
}


class Slot:
    """The engine of a model, once it was needed. A copy of the model has none: the engine is tied to its arrays."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.tried = False
        self.lock = Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Slot":
        return Slot()

    def __reduce__(self) -> tuple[type["Slot"], tuple[()]]:
        return Slot, ()


def use_engine(model: Any, build: Callable[[], Any]) -> None:
    """Makes `model.generate` try the engine first. build: makes the Engine at the first call that can use it.

    A model that the engine does not run, or that was changed after loading (another parameter, a wrapped module, a
    hook), keeps transformers' `generate`; so does a second caller while the first one's sequence is under way.
    """
    slot = model.nstf_engine = Slot()
    before = _fingerprint(model)

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = MethodType(type(self).generate, self)
        request = _request(self, args, kwargs)
        if request is None or self is not model or _fingerprint(self) != before:
            return plain(*args, **kwargs)
        if not slot.lock.acquire(blocking=False):
            return plain(*args, **kwargs)
        try:
            if not slot.tried:
                slot.tried = True
                try:
                    slot.engine = build()
                except (NstfError, ValueError, RuntimeError, MemoryError) as error:
                    _log.debug("no engine: %s", error)
            engine = slot.engine
            if engine is None or request["ids"].shape[1] + request["new_tokens"] > engine.context:
                return plain(*args, **kwargs)
            return _run(engine, request)
        finally:
            slot.lock.release()

    model.generate = MethodType(torch.no_grad()(generate), model)


def _fingerprint(model: Any) -> tuple[Any, ...]:
    """What must be as it was for the engine to compute what the modules would."""
    return tuple(
        (
            id(module),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            "forward" in vars(module),
            tuple((id(p), p._version) for p in module._parameters.values() if p is not None),
        )
        for module in model.modules()
    )


def _request(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """What to generate, or None when transformers has to do it."""
    given = {k: v for k, v in kwargs.items() if v is not None}
    if len(args) > 1 or set(given) - _KNOWN or model.device.type != "cpu" or model.training:
        return None
    prompts = [*args, *(given[k] for k in ("input_ids", "inputs") if k in given)]
    ids = prompts[0] if len(prompts) == 1 else None
    if (
        not isinstance(ids, Tensor)
        or ids.dim() != 2
        or len(ids) != 1
        or ids.shape[1] == 0
        or ids.dtype != torch.int64
    ):
        return None
    config = model.generation_config
    settings = _settings(config, given)
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
        "choose": _sampler(settings) if settings["do_sample"] else None,
        "streamer": given.get("streamer"),
    }


def _settings(config: Any, given: dict[str, Any]) -> dict[str, Any] | None:
    """The settings the engine reads, or None when any other is set."""
    stated = config.to_dict()
    usual = type(config)().to_dict()
    for name, value in stated.items():
        value = given.get(name, value)
        allowed = _PLAIN.get(name, (None, usual.get(name)))
        if name not in WITHOUT_EFFECT and value not in allowed:
            return None
    if any(given.get(n) not in _PLAIN[n] for n in ("num_beams", "num_return_sequences")):
        return None
    read = ("do_sample", "temperature", "top_k", "top_p", "eos_token_id", "pad_token_id")
    found = {name: given.get(name, getattr(config, name, None)) for name in read}
    # What transformers puts in the place of settings that nobody stated.
    defaults = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0}
    return {k: defaults.get(k) if v is None else v for k, v in found.items()}


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
