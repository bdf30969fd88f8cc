"""`generate` of a loaded model by the CPU engine where the request allows it, by transformers where it does not.

The engine continues one sequence, greedily or by temperature, top-k, top-p and min-p, with or without a repetition penalty.
Beams, several sequences, padding, logits processors, caches handed in and everything else stay with transformers.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from nstf.errors import NstfError
from nstf.runtime.generation_request import Slot, array_versions, fingerprint, read_request
from nstf.runtime.messages import awake
from nstf.runtime.ranks import Ranks

_log = logging.getLogger("nstf")

FURTHER = frozenset({"min_p", "repetition_penalty"})


def use_engine(
    model: Any,
    build: Callable[[bool], Any],
    ranks: Ranks | None = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Makes `model.generate` try the engine first. build(as_loaded): makes the Engine at the first call that can use it, and
    anew where encoded arrays were written into since; as_loaded: whether they still are what the file holds.

    A model that the engine does not run, or that was changed after loading (another parameter, a wrapped module, a
    hook), keeps transformers' `generate`; so does a second caller while the first one's sequence is under way. ranks: of a
    divided model, which ask each other at every call: all use their engines, or none does. check: raises NstfError where
    the file was changed since it was opened, which would otherwise pass for one that the engine does not run.
    """
    slot = model.nstf_engine = Slot()
    before, loaded = fingerprint(model), array_versions(model)

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = MethodType(type(self).generate, self)
        request = read_request(self, args, kwargs, "cpu", further=FURTHER)
        known = request is not None and self is model and fingerprint(self) == before
        taken = known and slot.lock.acquire(blocking=False)
        try:
            engine = _ready(slot, model, build, loaded, request, check) if taken else None
            # At every call: a hook on one rank sends all through modules. The engine stays for calls without it.
            if ranks is not None and not ranks.all_can(engine is not None):
                engine = None
            if engine is None or request is None:
                return plain(*args, **kwargs)
            with awake() if ranks is not None else nullcontext():
                return _run(engine, request)
        finally:
            if taken:
                slot.lock.release()

    model.generate = MethodType(torch.no_grad()(generate), model)


def _ready(
    slot: Slot,
    model: Any,
    build: Callable[[bool], Any],
    loaded: Any,
    request: Any,
    check: Callable[[], None],
) -> Any:
    """The engine with room for a request, or None. loaded: the versions of arrays that the file holds."""
    versions = array_versions(model)
    if not slot.tried or slot.versions != versions:
        check()
        slot.engine, slot.tried, slot.versions = None, True, versions
        try:
            slot.engine = build(versions == loaded)
        except (NstfError, ValueError, RuntimeError, MemoryError) as error:
            _log.debug("no engine: %s", error)
    engine = slot.engine
    room = engine is not None and request["ids"].shape[1] + request["new_tokens"] <= engine.context
    return engine if room else None


def _sampler(request: dict[str, Any]) -> Callable[[Tensor], int] | None:
    """Chooses a token as transformers does: repetition penalty, temperature, top-k, top-p, min-p, torch's generator.

    None where it is the likeliest of the logits as they are.
    """
    from transformers import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    settings, penalty = request["settings"], request["penalty"]
    if settings is None and penalty == 1.0:
        return None
    processors: list[Any] = [] if penalty == 1.0 else [RepetitionPenaltyLogitsProcessor(float(penalty))]
    if settings is not None:
        temperature, top_k, top_p, min_p = (settings[n] for n in ("temperature", "top_k", "top_p", "min_p"))
        if temperature is not None and temperature != 1.0:
            processors.append(TemperatureLogitsWarper(float(temperature)))
        if top_k:
            processors.append(TopKLogitsWarper(int(top_k)))
        if top_p is not None and top_p < 1.0:
            processors.append(TopPLogitsWarper(float(top_p)))
        if min_p:
            processors.append(MinPLogitsWarper(float(min_p)))
    ids = request["ids"].clone()

    def choose(logits: Tensor) -> int:
        nonlocal ids
        threads = torch.get_num_threads()
        # One: torch's other threads would go on looking for work while the engine's start on theirs.
        torch.set_num_threads(1)
        try:
            scores = logits[None]
            for processor in processors:
                scores = processor(ids, scores)
            drawn = scores.argmax(-1) if settings is None else torch.multinomial(scores.softmax(dim=-1), 1)[0]
            if penalty != 1.0:
                ids = torch.cat([ids, drawn[None]], dim=1)
            return int(drawn)
        except RuntimeError as error:  # torch's word for a distribution that is none
            raise NstfError(f"no token can be drawn: the model computes no numbers ({error})") from error
        finally:
            torch.set_num_threads(threads)

    return choose


def _run(engine: Any, request: dict[str, Any]) -> Tensor:
    """Token ids [1, prompt + new], as `generate` returns them."""
    ids, streamer = request["ids"], request["streamer"]
    if streamer is not None:
        streamer.put(ids.cpu())
    new = []
    choose = _sampler(request)
    for token in engine.generate(ids[0], request["new_tokens"], request["stop"], choose):
        new.append(token)
        if streamer is not None:
            streamer.put(torch.tensor([token], dtype=torch.int64, device="cpu"))
    if streamer is not None:
        streamer.end()
    return torch.cat([ids, torch.tensor([new], dtype=ids.dtype, device=ids.device)], dim=1)
