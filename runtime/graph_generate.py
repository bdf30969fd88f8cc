"""`generate` of a loaded model on a GPU by captured graphs where the request allows it, by transformers where it does not.

A few sequences of one length, greedily or by temperature, top-k and top-p. Beams, penalties, padding, caches handed in,
other architectures and everything else stay with transformers.
"""

import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from nstf.errors import NstfError
from nstf.kernels.triton import launch_errors
from nstf.runtime.generation_request import Slot, fingerprint, read_request
from nstf.runtime.graph_decoder import LARGEST_BATCH, Decoder
from nstf.runtime.parameter import EncodedParameter
from nstf.runtime.ranks import Ranks
from nstf.runtime.sampling import Sampling

_log = logging.getLogger("nstf")


def decoder_of(model: Any) -> Decoder:
    """The decoder of a model: by its attention plan where one was applied. Raises UnsupportedError."""
    from nstf.runtime.attention import plan_of

    plan = plan_of(model)
    if plan is None:
        return Decoder(model)
    from nstf.runtime.graph_planned import PlannedDecoder

    return PlannedDecoder(model, plan)


def use_graphs(model: Any, build: Callable[[Any], Decoder] = decoder_of) -> None:
    """Makes `model.generate` try captured decoding first. build: makes the Decoder at the first call that can use it.

    A model that it does not run, or that was changed or moved after loading, keeps transformers' `generate`; so does
    a second caller while the first one's sequences are under way. Tokens are the same up to rounding: norms and rotations
    are computed in float32 here, in the model's dtype there, and a prompt whose length comes again is replayed
    (runtime/graph_prompt.py).
    """
    slot = model.nstf_graphs = Slot()
    state: dict[str, Any] = {"before": _arrays(model), "device": model.device}

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = MethodType(type(self).generate, self)
        request = read_request(self, args, kwargs, state["device"].type, LARGEST_BATCH)
        if request is None or self is not model or not slot.lock.acquire(blocking=False):
            return plain(*args, **kwargs)
        try:
            ranks: Ranks | None = getattr(model, "nstf_ranks", None)
            if _arrays(model) != state["before"]:
                slot.engine = None  # what it was made of may be gone
                if ranks is not None:
                    ranks.all_can(False)
                return plain(*args, **kwargs)
            # Tensors that outlive the call must not be those of an inference mode the caller is in.
            with torch.inference_mode(False), torch.no_grad():
                decoder = _ready(slot, state, model, build, request, ranks)
                return plain(*args, **kwargs) if decoder is None else _run(decoder, request)
        finally:
            slot.lock.release()

    model.generate = MethodType(torch.no_grad()(generate), model)


def _arrays(model: Any) -> tuple[Any, ...]:
    """What must be as it was for the graphs to compute what the modules would."""
    encoded = [m for m in model.modules() if isinstance(m, EncodedParameter)]
    return fingerprint(model), tuple(id(m.encoded) for m in encoded)


def _ready(
    slot: Slot,
    state: dict[str, Any],
    model: Any,
    build: Callable[[Any], Decoder],
    request: dict[str, Any],
    ranks: Ranks | None,
) -> Decoder | None:
    """The decoder with room and a graph for a request; None when it does not do it, or on another rank."""
    if ranks is None:
        return _tried(slot, state, model, build, request, Decoder.prepare)
    # Sums inside a capture need all ranks: what may fail on one is tried without them first.
    with ranks.alone():
        decoder = _tried(slot, state, model, build, request, Decoder.rehearse)
    if not ranks.all_can(decoder is not None):
        if decoder is not None:
            _log.warning("decoding goes through transformers: another rank has no captured graph")
            decoder.drop()
        return None
    assert decoder is not None
    decoder.prepare(*_wanted(decoder, request))
    return decoder


def _wanted(decoder: Decoder, request: dict[str, Any]) -> tuple[int, int, Sampling | None]:
    """(sequences, tokens to make room for, how to choose them)."""
    batch, count = request["ids"].shape
    return batch, decoder.first_room(count, request["new_tokens"]), _sampling(request["settings"])


def _tried(
    slot: Slot,
    state: dict[str, Any],
    model: Any,
    build: Callable[[Any], Decoder],
    request: dict[str, Any],
    prepare: Callable[..., None],
) -> Decoder | None:
    """The decoder, once `prepare` went well with what a request wants; None when it did not."""
    try:
        if not slot.tried:
            slot.tried = True
            slot.engine = build(model)
            state["before"] = _arrays(model)  # matrices moved into stacks
        decoder: Decoder | None = slot.engine
        if decoder is None or request["ids"].shape[1] + request["new_tokens"] > decoder.context:
            return None
        prepare(decoder, *_wanted(decoder, request))
        return decoder
    except torch.OutOfMemoryError as error:
        # Less may be asked for next time.
        _log.warning("decoding goes through transformers: %s", " ".join(str(error).split())[:300])
        if slot.engine is not None:
            slot.engine.drop()
        return None
    except launch_errors(NstfError, ValueError, MemoryError) as error:
        # A model it does not know is the usual case; that a capture fails on one it knows is not.
        level = logging.DEBUG if isinstance(error, NstfError) else logging.WARNING
        _log.log(level, "decoding goes through transformers: %s", " ".join(str(error).split())[:300])
        slot.engine = None
        return None


def _sampling(settings: dict[str, Any] | None) -> Sampling | None:
    if settings is None:
        return None
    temperature, top_k, top_p = (settings[n] for n in ("temperature", "top_k", "top_p"))
    return Sampling(float(temperature or 1.0), int(top_k or 0), float(1.0 if top_p is None else top_p))


def _run(decoder: Decoder, request: dict[str, Any]) -> Tensor:
    """Token ids [batch, prompt + new], as `generate` returns them: a sequence that ended is filled up with the padding."""
    ids, streamer, stop, pad = (request[n] for n in ("ids", "streamer", "stop", "pad"))
    if streamer is not None:
        streamer.put(ids.cpu())
    ended = [False] * len(ids)
    columns = []
    for tokens in decoder.generate(ids, request["new_tokens"], _sampling(request["settings"])):
        column = [pad if done else token for token, done in zip(tokens, ended, strict=True)]
        ended = [done or token in stop for token, done in zip(column, ended, strict=True)]
        columns.append(column)
        if streamer is not None:
            streamer.put(torch.tensor(column))
        if all(ended):
            break
    if streamer is not None:
        streamer.end()
    return torch.cat([ids, torch.tensor(columns, dtype=ids.dtype, device=ids.device).T], dim=1)
