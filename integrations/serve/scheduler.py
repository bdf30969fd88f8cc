"""Continuous batching: a thread that decodes all running answers together, a token each a step, on the CPU engine or a GPU.

A new answer joins between two steps; its prompt is computed in pieces beside the others' tokens. What a sequence's cache
holds is kept after its answer, and a later prompt that begins alike starts after the common part.
"""

from __future__ import annotations

import logging
import math
from array import array
from ctypes import c_float, string_at
from dataclasses import dataclass, field
from functools import partial

from nstf.errors import NstfError
from nstf.integrations.serve.backend import Backend
from nstf.integrations.serve.grammar import TooComplex
from nstf.integrations.serve.metrics import Metrics
from nstf.integrations.serve.output import Answer, TokenScore
from nstf.runtime.engine_batch import Part, Steps
from nstf.runtime.token_sampler import TokenSampler, Wording, log_shares

_log = logging.getLogger("nstf")

_NO_NUMBERS = "the model computes no numbers (NaN) for this text; the file may be broken"
# The logarithm of no probability at all, as OpenAI has it: JSON has no infinities.
_LEAST = -9999.0
_WORTH_KEEPING = 16  # tokens that are not computed again; the beginning of all chats is alike


@dataclass
class _Slot:
    """A sequence of the batch: what its cache holds, and whose answer it works on."""

    number: int
    tokens: list[int] = field(default_factory=list)
    from_prompt: int = 0  # how many of them were computed as a prompt
    answer: Answer | None = None
    sampler: TokenSampler | None = None
    used: int = 0  # when it last began an answer


class Scheduler(Backend):
    """Answers by one model, `parallel` at a time and `queue` waiting. name: of what decodes."""

    def __init__(
        self,
        name: str,
        batch: Steps,
        parallel: int,
        queue: int,
        metrics: Metrics,
        reproducible: bool = False,
        prefix_reuse: bool = True,
        wording: Wording | None = None,
    ) -> None:
        """wording: what the file lets no answer contain."""
        self.name = name
        self.context, self.vocab = batch.context, batch.vocab
        self._batch = batch
        self._slots = [_Slot(i) for i in range(parallel)]
        self._reproducible = reproducible
        self._reuse = prefix_reuse
        self._wording = wording or Wording()
        self._clock = 0
        self._due = 0  # tokens of prompts that steps beside answers would have taken, had they been cut
        super().__init__(parallel, queue, metrics)
        metrics.gauges["cache_bytes"] = lambda: batch.cache_bytes
        self._thread.start()

    def _refuse(self, answer: Answer) -> None:
        """Nothing: it gives every answer that the server is asked for."""

    def _running(self) -> int:
        # A client that has all of its answer may ask again before its slot is empty.
        return sum(s.answer is not None and not s.answer.finished for s in self._slots)

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (self._stopping or self._waiting or any(s.answer for s in self._slots)):
                    self._changed.wait()
                self._drop_left()
                if self._stopping:
                    self._end_all()
                    return
                joining = self._admit()
            try:
                for slot, answer in joining:
                    self._begin(slot, answer)
                self._step()
            except (
                BaseException
            ) as error:  # a library's panic too: the server goes on; those whose step it was are told
                _say("a step failed", error)
                for slot in self._slots:
                    self._forget(slot, error)

    def _drop_left(self) -> None:
        for slot in self._slots:
            if slot.answer is not None and slot.answer.left:
                slot.answer.finished = True
                slot.answer = None
                self._metrics.add("cancelled_total")

    def _end_all(self) -> None:
        for slot in self._slots:
            if slot.answer is not None:
                slot.answer.fail("the server is shutting down")
            slot.answer = None

    def _forget(self, slot: _Slot, error: BaseException) -> None:
        if slot.answer is not None:
            slot.answer.fail(f"decoding failed: {error}", error=error)
        slot.answer, slot.tokens, slot.from_prompt = None, [], 0
        self._batch.release(slot.number)

    def _admit(self) -> list[tuple[_Slot, Answer]]:
        """Free slots for those who wait, in order; each takes the one whose cache begins most like its prompt."""
        joining = []
        free = [s for s in self._slots if s.answer is None]
        while free and self._waiting:
            answer = self._waiting.popleft()
            slot = max(free, key=partial(self._worth, answer))
            free.remove(slot)
            slot.answer = answer
            self._clock += 1
            slot.used = self._clock
            joining.append((slot, answer))
        return joining

    def _worth(self, answer: Answer, slot: _Slot) -> tuple[int, bool, int]:
        """A slot for an answer: one with much of its prompt, else an empty one, else the one whose answer is the oldest."""
        common = self._common(slot, answer)
        # A conversation that goes another way soon keeps its place: an empty slot takes a copy of what is common.
        goes_on = len(slot.tokens) - common < max(common, _WORTH_KEEPING)
        return (common if goes_on and common >= _WORTH_KEEPING else 0, not slot.tokens, -slot.used)

    def _common(self, slot: _Slot, answer: Answer) -> int:
        """Tokens of a prompt that a slot's cache holds; at most all but the last, whose logits are needed."""
        if not self._reuse:
            return 0
        # Tokens of an answer went through attention alone, where sums have another order: their last bits may differ.
        known = slot.from_prompt if self._reproducible else len(slot.tokens)
        most = min(known, len(slot.tokens), len(answer.prompt) - 1)
        common = next((i for i in range(most) if slot.tokens[i] != answer.prompt[i]), most)
        return self._batch.resumable(slot.number, common)

    def _begin(self, slot: _Slot, answer: Answer) -> None:
        common = self._common(slot, answer)
        best = max(self._slots, key=lambda s: self._common(s, answer))
        found = self._common(best, answer)
        if best is not slot and found >= common + _WORTH_KEEPING:
            try:
                self._batch.copy(best.number, slot.number, found)
                common = found
            except MemoryError:
                common = 0  # computed anew then: what the slot held may be gone
        slot.tokens = list(answer.prompt[:common])
        slot.from_prompt = common
        slot.sampler = TokenSampler(answer.settings, answer.prompt)
        answer.cached = common
        self._metrics.add("prompt_tokens_total", len(answer.prompt))
        self._metrics.add("cached_tokens_total", common)

    def _step(self) -> None:
        """One pass over the weights: the next token of each answer, and a piece of the prompts that are not done."""
        running = [s for s in self._slots if s.answer is not None and self._has_room(s, s.answer)]
        if not running:
            return
        decoding = [s for s in running if s.answer and len(s.tokens) >= len(s.answer.prompt)]
        beginning = sorted((s for s in running if s not in decoding), key=lambda s: s.used)
        parts, wanting = [], []
        together = self._batch.together
        if decoding and any(self._is_whole(s) for s in beginning):
            # A whole block takes a step of its own, as often as pieces beside the answers would have done as much.
            self._due += self._batch.beside
            if self._due >= together:
                self._due -= together
                decoding, beginning = [], [s for s in beginning if self._is_whole(s)]
        for slot in decoding:
            assert slot.answer is not None
            parts.append(Part(slot.number, len(slot.tokens), slot.answer.tokens[-1:]))
            wanting.append(slot)
        room = min(together - len(parts), self._batch.beside if decoding else together)
        for slot in beginning:
            assert slot.answer is not None
            first = len(slot.tokens)
            if room <= 0 or (self._is_whole(slot) and room < together):
                continue
            # No piece goes over the beginning of a block.
            cut = room if self._batch.sparse_from is None else min(room, together - first % together)
            ids = slot.answer.prompt[first : first + cut]
            room -= len(ids)
            last = first + len(ids) == len(slot.answer.prompt)
            parts.append(Part(slot.number, first, ids, prompt=True, wanted=last))
            if last:
                wanting.append(slot)
        addresses = self._batch.step(parts)
        self._metrics.add("steps_total")
        by_number = {s.number: s for s in running}
        for part in parts:
            slot = by_number[part.sequence]
            slot.tokens.extend(part.ids)
            if part.prompt:
                slot.from_prompt = len(slot.tokens)
        for slot, address in zip(wanting, addresses, strict=True):
            self._next(slot, address)

    def _is_whole(self, slot: _Slot) -> bool:
        """Whether what comes next of a slot's prompt is a block that sparse attention works on as a whole."""
        sparse_from, together, first = self._batch.sparse_from, self._batch.together, len(slot.tokens)
        if sparse_from is None or slot.answer is None or first % together or first < sparse_from:
            return False
        return first + together <= len(slot.answer.prompt)

    def _has_room(self, slot: _Slot, answer: Answer) -> bool:
        """Whether the cache holds what comes next of an answer; without the memory for it, that answer alone ends."""
        try:
            self._batch.reserve(slot.number, max(len(answer.prompt), len(slot.tokens) + 1))
        except MemoryError as error:
            self._forget(slot, error)
            return False
        return True

    def _next(self, slot: _Slot, address: int) -> None:
        """Chooses and hands over the next token of a slot's answer."""
        answer, sampler = slot.answer, slot.sampler
        assert answer is not None and sampler is not None
        try:
            # Kept before the sampler changes them: OpenAI's numbers are of the model's own distribution.
            kept = _copied(address, self.vocab) if answer.logprobs is not None else None
            allowed = answer.grammar.allowed() if answer.grammar is not None else 0
            if self._wording and answer.grammar is None:  # a grammar could be left without a token
                self._wording.change(address, answer.prompt, answer.tokens, answer.stop_tokens)
            token = sampler.choose(address, self.vocab, allowed)
            if math.isnan(c_float.from_address(address + 4 * token).value):
                raise NstfError(_NO_NUMBERS)
            if answer.grammar is not None:
                answer.grammar.take(token)
            score = None if kept is None else _score(kept, token, answer.logprobs or 0)
            self._metrics.add("generated_tokens_total")
            if not answer.take(token, score):
                slot.answer = None
        except TooComplex as error:
            answer.fail(str(error), "response_format")
            slot.answer = None
        except BaseException as error:  # a library's panic is no Exception, and would end the thread
            _say("an answer failed", error)
            answer.fail(f"the answer failed: {error}", error=error)
            slot.answer = None


def _say(what: str, error: BaseException) -> None:
    """Memory that ended is a line in our log, all else is a bug."""
    if isinstance(error, MemoryError):
        _log.warning("%s: %s", what, error)
    else:
        _log.error(what, exc_info=error)


def _copied(address: int, vocab: int) -> array[float]:
    kept = array("f")
    kept.frombytes(string_at(address, 4 * vocab))
    return kept


def _score(logits: array[float], token: int, count: int) -> TokenScore:
    """Raises NstfError where infinities or NaN among the logits leave no probabilities."""
    shares = log_shares(logits.buffer_info()[0], len(logits), count, token)
    if any(math.isnan(value) for _, value in shares):
        raise NstfError(_NO_NUMBERS)
    *top, (_, own) = [(each, max(value, _LEAST)) for each, value in shares]
    return TokenScore(token, own, tuple(top))
