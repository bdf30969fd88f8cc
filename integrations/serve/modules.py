"""Models that neither the CPU engine nor the captured decoder runs: transformers' `generate`, one request at a time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from nstf.errors import UnsupportedError
from nstf.integrations.serve.backend import Backend
from nstf.integrations.serve.errors import wrong
from nstf.integrations.serve.metrics import Metrics
from nstf.integrations.serve.output import Answer
from nstf.runtime.generate import answers_apart, check_writes_text, of_the_model, stated_context, too_long
from nstf.runtime.token_sampler import WORDING

_log = logging.getLogger("nstf")


# Settings of a file without which its model writes another text: the tokens that an answer begins with, and those that no
# answer may have, on the CPU engine neither.
_OF_THE_MODEL = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    *WORDING,
)
_NO_BOUND = 1 << 30  # tokens of a model that states no context
_USUAL_MOST = (
    4096  # of its answers, unless a request asks for more: one that never ends would keep all others waiting
)


class _Ended(Exception):
    """Leaves `generate` between two tokens: the answer is complete, or its client is gone."""


class ModulesBackend(Backend):
    """Answers by a loaded model, one after the other; `queue` wait."""

    name = "transformers modules, one request at a time"

    def __init__(self, model: Any, queue: int, metrics: Metrics, sample: Sequence[int] = ()) -> None:
        """sample: tokens of a short text, which is continued before anybody asks: a model may fail at the first.

        Raises UnsupportedError for a model that cannot write text.
        """
        check_writes_text(model)
        weight = getattr(model.get_output_embeddings(), "weight", None)
        if weight is None:
            raise UnsupportedError(f"{type(model).__name__} does not generate text: it scores no tokens")
        self.model = model
        # What a request does not say is what the API says, not what the file says; ends come with each call.
        own = model.generation_config
        model.generation_config = type(own)(**{name: getattr(own, name, None) for name in _OF_THE_MODEL})
        self._apart = answers_apart(getattr(model, "config", None))
        stated = stated_context(model)
        self.context = stated or _NO_BOUND
        self.usual_most = None if stated else _USUAL_MOST
        self.vocab = int(weight.shape[0])
        if sample and max(sample) < self.vocab:
            self._try_out(sample)
        self._now: Answer | None = None
        super().__init__(1, queue, metrics)
        self._thread.start()

    def _try_out(self, sample: Sequence[int]) -> None:
        """Continues a text by one token. Raises what `stream` would."""
        try:
            with torch.no_grad():
                self._generate(sample, [], max_new_tokens=1, do_sample=False)
        except Exception as error:
            if too_long(error, self.model, len(sample), len(sample)) is not None:
                return  # of its few positions: a shorter text may do
            said = of_the_model(error, self.model)
            if said is error:
                raise
            raise said from error

    def _running(self) -> int:
        return int(self._now is not None and not self._now.finished)

    def _refuse(self, answer: Answer) -> None:
        for field, given in (("logprobs", answer.logprobs), ("response_format", answer.grammar)):
            if given is not None:
                raise wrong(
                    field,
                    f"{field} is for models that are decoded by nstf itself, which does not run this one",
                )

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (self._stopping or self._waiting):
                    self._changed.wait()
                if self._stopping:
                    return
                self._now = answer = self._waiting.popleft()
            try:
                self._run(answer)
            except _Ended:
                if not answer.finished:
                    answer.finished = True
                    self._metrics.add("cancelled_total")
            except BaseException as error:  # a library's panic too: the server goes on
                self._failed(answer, error)
            finally:
                self._now = None

    def _failed(self, answer: Answer, error: BaseException) -> None:
        """Tells the client. Beyond a model's positions an answer ends, as one does that is as long as it may be."""
        tokens = len(answer.tokens) + (1 if self._apart else len(answer.prompt))
        blamed = too_long(error, self.model, len(answer.prompt), tokens)
        if blamed is None:
            _log.exception("an answer failed")
            answer.fail(f"decoding failed: {error}", error=error)
        elif answer.tokens:
            answer.end("length")
        else:
            answer.fail(str(blamed), "prompt")

    def _run(self, answer: Answer) -> None:
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
            self._generate(answer.prompt, ends, streamer=_Streamer(self, answer), **options)
        if not answer.finished:
            answer.end("length")

    def _generate(self, prompt: Sequence[int], ends: list[int], **options: Any) -> None:
        ids = torch.tensor([list(prompt)], device=self.model.device)
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
            **options,
        )


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
