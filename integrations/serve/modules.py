"""Models that the CPU engine does not run, and GPUs: transformers' `generate`, one request at a time.

On a GPU that is the captured decoder where it runs the model (runtime/graph_generate.py).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from threading import Condition, Thread
from typing import Any

import torch

from nstf.errors import UnsupportedError
from nstf.integrations.serve.errors import ApiError, wrong
from nstf.integrations.serve.metrics import Metrics
from nstf.integrations.serve.output import Answer

_log = logging.getLogger("nstf")


class _Ended(Exception):
    """Leaves `generate` between two tokens: the answer is complete, or its client is gone."""


class ModulesBackend:
    """Answers by a loaded model, one after the other; `queue` wait."""

    name = "transformers modules, one request at a time"

    def __init__(self, model: Any, context: int, queue: int, metrics: Metrics) -> None:
        if not getattr(model, "can_generate", lambda: False)():
            raise UnsupportedError(f"{type(model).__name__} does not generate text")
        self.model = model
        # What a request does not say is what the API says, not what the file says; ends come with each call.
        own = model.generation_config
        model.generation_config = type(own)(
            bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
        )
        self.context = context
        self.vocab = int(model.get_output_embeddings().weight.shape[0])
        self._queue_size = queue
        self._metrics = metrics
        self._waiting: deque[Answer] = deque()
        self._running: Answer | None = None
        self._changed = Condition()
        self._stopping = False
        metrics.gauges["running"] = lambda: int(self._running is not None)
        metrics.gauges["waiting"] = lambda: len(self._waiting)
        self._thread = Thread(target=self._loop, name="nstf-decode", daemon=True)
        self._thread.start()

    def submit(self, answer: Answer) -> None:
        """Puts an answer into the queue. Raises ApiError (400) for what transformers is not asked for here, 429 and 503."""
        if answer.logprobs is not None:
            raise wrong(
                "logprobs", "logprobs are given by the CPU engine only, which does not run this model"
            )
        if answer.grammar is not None:
            raise wrong(
                "response_format", "response_format needs the CPU engine, which does not run this model"
            )
        with self._changed:
            self._check_room()
            self._waiting.append(answer)
            self._changed.notify()

    def check_room(self) -> None:
        """Raises what `submit` would raise now."""
        with self._changed:
            self._check_room()

    def _check_room(self) -> None:
        if self._stopping:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if len(self._waiting) >= self._queue_size + (self._running is None):
            raise ApiError(
                429,
                f"the server is busy: one answer is running and {self._queue_size} are waiting; try again later",
                code="queue_full",
            )

    def cancel(self, answer: Answer) -> None:
        """Its client left: the answer leaves the queue, or ends after the token that is being computed."""
        with self._changed:
            answer.left = True
            if answer in self._waiting:
                self._waiting.remove(answer)
                answer.finished = True
                self._metrics.add("cancelled_total")

    def close(self, wait_s: float = 5.0) -> None:
        """Ends all answers and the thread."""
        with self._changed:
            self._stopping = True
            for answer in self._waiting:
                answer.fail("the server is shutting down")
            self._waiting.clear()
            self._changed.notify()
        self._thread.join(wait_s)

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (self._stopping or self._waiting):
                    self._changed.wait()
                if self._stopping:
                    return
                self._running = answer = self._waiting.popleft()
            try:
                self._run(answer)
            except _Ended:
                if not answer.finished:
                    answer.finished = True
                    self._metrics.add("cancelled_total")
            except Exception as error:  # the server goes on
                _log.exception("an answer failed")
                answer.fail(f"decoding failed: {error}")
            finally:
                self._running = None

    def _run(self, answer: Answer) -> None:
        ids = torch.tensor([list(answer.prompt)], device=self.model.device)
        s = answer.settings
        options: dict[str, Any] = {"max_new_tokens": answer.most, "do_sample": s.temperature > 0}
        if s.temperature > 0:
            options |= {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p}
            if s.min_p > 0:
                options["min_p"] = s.min_p
        if s.repetition_penalty != 1:
            options["repetition_penalty"] = s.repetition_penalty
        ends = sorted(answer.stop_tokens)
        self._metrics.add("prompt_tokens_total", len(answer.prompt))
        with torch.no_grad(), torch.random.fork_rng():
            if s.seed is None:
                torch.seed()
            else:
                torch.manual_seed(s.seed % (1 << 64))
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                streamer=_Streamer(self, answer),
                eos_token_id=ends or None,
                pad_token_id=ends[0] if ends else 0,
                **options,
            )
        if not answer.finished:
            answer.end("length")


class _Streamer:
    """What `generate` hands its tokens to: the prompt first, then one by one."""

    def __init__(self, backend: ModulesBackend, answer: Answer) -> None:
        self._backend, self._answer, self._skip = backend, answer, True

    def put(self, tokens: torch.Tensor) -> None:
        if self._backend._stopping and not self._answer.finished:
            self._answer.fail("the server is shutting down")
        if self._answer.left or self._answer.finished:
            raise _Ended
        if self._skip:
            self._skip = False
            return
        for token in tokens.reshape(-1).tolist():
            self._backend._metrics.add("generated_tokens_total")
            if not self._answer.take(int(token)):
                raise _Ended

    def end(self) -> None:
        """Nothing is held back here."""


def context_of(config: Any) -> int:
    """Tokens a sequence may have, by a model's configuration; no bound where it states none."""
    text = config.get_text_config()
    stated = getattr(text, "max_position_embeddings", None)
    return int(stated) if stated else int(math.pow(2, 30))
