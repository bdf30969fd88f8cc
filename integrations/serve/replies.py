"""Answers in OpenAI's words: whole, or chunk by chunk."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import accumulate
from typing import Any

from nstf.integrations.serve.errors import ApiError
from nstf.integrations.serve.output import Answer, Piece, TokenScore
from nstf.integrations.serve.protocol import Request


class Replies:
    """The replies to one request. token_text: the text of a token, for logprobs."""

    def __init__(
        self, request: Request, answer: Answer, model: str, token_text: Callable[[int], str]
    ) -> None:
        self._request, self._answer, self._token_text = request, answer, token_text
        self._chat = request.messages is not None
        self._head = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The answer as one object. Raises ApiError where it failed."""
        last = pieces[-1]
        if last.reason == "error":
            raise ApiError(last.status, last.text, last.param)
        text = "".join(p.text for p in pieces)
        choice: dict[str, Any] = {"index": 0, "finish_reason": last.reason}
        choice["logprobs"] = self._logprobs([s for p in pieces for s in p.logprobs], 0)
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": [choice], "usage": self._usage()}

    async def events(self, pieces: asyncio.Queue[Piece]) -> AsyncIterator[str]:
        """Server-sent events up to `[DONE]`."""
        if self._chat:
            yield self._event({"role": "assistant", "content": ""}, None, ())
        offset = 0
        while True:
            piece = await pieces.get()
            if piece.reason == "error":
                yield _data(ApiError(piece.status, piece.text, piece.param).to_json())
                return
            if piece.text or piece.logprobs:
                yield self._event(
                    {"content": piece.text}, None if self._chat else piece.reason, piece.logprobs, offset
                )
            if piece.reason is not None:
                if self._chat or not (piece.text or piece.logprobs):
                    yield self._event({}, piece.reason, ())
                break
            offset += len(piece.text)
        if self._request.with_usage:
            yield _data({**self._chunk(), "choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    def _chunk(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk" if self._chat else "text_completion"}

    def _event(
        self, delta: dict[str, Any], reason: str | None, scores: Sequence[TokenScore], offset: int = 0
    ) -> str:
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": reason,
            "logprobs": self._logprobs(scores, offset),
        }
        if self._chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        chunk = {**self._chunk(), "choices": [choice]}
        if self._request.with_usage:
            chunk["usage"] = None
        return _data(chunk)

    def _usage(self) -> dict[str, Any]:
        prompt, new = len(self._answer.prompt), len(self._answer.tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": self._answer.cached},
        }

    def _logprobs(self, scores: Sequence[TokenScore], offset: int) -> dict[str, Any] | None:
        if self._request.logprobs is None or not scores:
            return None
        if self._chat:
            content = []
            for s in scores:
                top = [self._one(token, value) for token, value in s.top]
                content.append({**self._one(s.token, s.logprob), "top_logprobs": top})
            return {"content": content, "refusal": None}
        texts = [self._token_text(s.token) for s in scores]
        offsets = list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else []
        tops = [{self._token_text(token): value for token, value in s.top} for s in scores]
        return {
            "tokens": texts,
            "token_logprobs": [s.logprob for s in scores],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _one(self, token: int, value: float) -> dict[str, Any]:
        text = self._token_text(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "replace"))}


def _data(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
