"""Tokens of an answer to text as soon as it is certain, up to a stop string, a stop token or the limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nstf.errors import out_of_memory
from nstf.runtime.stops import StopText
from nstf.runtime.token_sampler import Settings
from nstf.runtime.tokenizing import is_panic

_CONTEXT = 8  # tokens of the prompt that the text is decoded after: some tokenizers drop a first space


@dataclass(frozen=True)
class Piece:
    """Some of an answer. reason: `stop` or `length` with the last piece, `error` with a message as text; else None.

    logprobs: of the tokens it is made of, OpenAI's objects without text. status: of an error; param: the wrong field.
    """

    text: str
    reason: str | None = None
    logprobs: tuple[Any, ...] = ()
    status: int = 500
    param: str | None = None


@dataclass(frozen=True)
class TokenScore:
    """The logarithm of a token's probability, and of the likeliest ones'."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Answer:
    """One request on its way: what was asked for, what has come of it, and where that goes.

    prompt: token ids. emit: is called with pieces, from the thread that decodes. logprobs: None, or the number of
    alternatives. grammar: an object with `allowed`, `take` and `done` (grammar.py), or None.
    """

    prompt: Sequence[int]
    most: int
    settings: Settings
    stop_tokens: frozenset[int]
    stops: tuple[str, ...]
    tokenizer: Any
    emit: Callable[[Piece], None]
    logprobs: int | None = None
    grammar: Any = None
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None  # when the first token came
    left: bool = False  # the client went away; read by the thread that decodes
    finished: bool = False

    def __post_init__(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(ids=list(self.prompt[-_CONTEXT:]), skip_special_tokens=True)
        self._cut = StopText(self.stops)
        self._certain = ""
        self._scores: list[TokenScore] = []

    def take(self, token: int, score: TokenScore | None = None) -> bool:
        """Adds a token; whether the answer goes on."""
        if self.started is None:
            self.started = time.monotonic()
        self.tokens.append(token)
        if score is not None:
            self._scores.append(score)
        if token in self.stop_tokens:
            self.end("stop")
            return False
        self._certain += self._cut.feed(self._decoded(token))
        if self._cut.ended:
            self.end("stop")
            return False
        if self.grammar is not None and self.grammar.done:
            self.end("stop")
            return False
        if len(self.tokens) >= self.most:
            self.end("length")
            return False
        if self._certain:
            text, self._certain = self._certain, ""
            self._send(text, None)
        return True

    def end(self, reason: str) -> None:
        """Sends what was held back and the reason."""
        self.finished = True
        self._send(self._certain + self._cut.rest(), reason)

    def fail(self, message: str, param: str | None = None, error: BaseException | None = None) -> None:
        """Ends the answer with an error: of the request where a field of it is named, else of the server, which may have
        too little memory at the moment (503)."""
        self.finished = True
        status = 400 if param is not None else 503 if error is not None and out_of_memory(error) else 500
        self.emit(Piece(message, "error", status=status, param=param))

    def _send(self, text: str, reason: str | None) -> None:
        scores, self._scores = tuple(self._scores), []
        self.emit(Piece(text, reason, scores))

    def _decoded(self, token: int) -> str:
        try:
            return self._stream.step(self.tokenizer, token) or ""
        except BaseException as error:
            # The library raises plain Exception where bytes make no characters, and panics: the token is left out.
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            from tokenizers.decoders import DecodeStream

            self._stream = DecodeStream(skip_special_tokens=True)
            return ""
