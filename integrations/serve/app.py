"""The HTTP side: routes, keys, limits, answers as JSON or as server-sent events."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from nstf.integrations.serve.errors import ApiError
from nstf.integrations.serve.output import Answer, Piece
from nstf.integrations.serve.protocol import parse
from nstf.integrations.serve.replies import Replies
from nstf.integrations.serve.service import Service
from nstf.integrations.serve.stream import EventStream, Gone, unless_gone
from nstf.runtime.memory_limit import has_room

BODY_SECONDS = 30.0  # for the whole body of a request
# Address space that is free before a request is tokenised in a thread: a library in Rust ends the process where it finds no
# memory, and Python waits without end for a thread that finds none.
ROOM_BYTES = 64 << 20
# Likewise for one with a JSON schema, which is more than to read it needs: the thread takes up to 72 MiB for itself.
SCHEMA_ROOM_BYTES = 256 << 20
NO_ROOM = "the server has too little memory for this request at the moment"
PAGE = Path(__file__).parent / "page"
_PAGE_FILES = {
    "/": ("chat.html", "text/html"),
    "/chat.js": ("chat.js", "text/javascript"),
    "/chat.css": ("chat.css", "text/css"),
}
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

_log = logging.getLogger("nstf")

Handler = Callable[[HttpRequest], Awaitable[Response]]


class App:
    """The routes of one service. key: what clients must send, None for no key. max_body: bytes.

    hosts: names that requests may be for, None for any: a web page elsewhere could make a browser ask a server on this
    machine under its own name.
    """

    def __init__(
        self,
        service: Service,
        key: str | None = None,
        hosts: frozenset[str] | None = None,
        max_body: int = 4 << 20,
    ) -> None:
        self.service = service
        self._key = key
        self._hosts = hosts
        self._max_body = max_body
        self._created = int(time.time())

    def routes(self) -> Starlette:
        """The ASGI application."""
        found = [
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self._text), methods=["POST"]),
            Route("/v1/models", self._guarded(self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guarded(self._model), methods=["GET"]),
            Route("/metrics", self._guarded(self._metrics), methods=["GET"]),
            Route("/health", self._guarded(self._health, open_=True), methods=["GET"]),
        ]
        found += [Route(path, self._guarded(self._page, open_=True), methods=["GET"]) for path in _PAGE_FILES]

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            yield
            if has_room(ROOM_BYTES):
                await run_in_threadpool(self.service.close)
            else:
                self.service.close()  # there is no memory for a thread

        made = Starlette(
            routes=found,
            lifespan=lifespan,
            exception_handlers={HTTPException: self._not_a_route},  # type: ignore[dict-item]
        )
        made.router.redirect_slashes = False  # it would send browsers to whatever host a request names
        return made

    def _guarded(self, handler: Handler, open_: bool = False) -> Handler:
        """A handler behind the checks that all share, whose errors are OpenAI's JSON. open_: without the key."""

        async def handle(request: HttpRequest) -> Response:
            path = request.scope["route"].path
            try:
                self._check(request, open_)
                response = await handler(request)
            except ApiError as error:
                response = _refusal(error)
            except (Gone, ClientDisconnect):
                response = Response(status_code=499)  # nobody reads it
            except asyncio.CancelledError:
                # The server ends, and has waited long enough for a thread that reads a schema or a text.
                response = _refusal(ApiError(503, "the server is shutting down", code="shutting_down"))
            except Exception as error:
                response = _refusal(_failed(error, path))
            self.service.metrics.add("requests_total", 1, f'path="{path}",status="{response.status_code}"')
            return response

        return handle

    def _check(self, request: HttpRequest, open_: bool) -> None:
        host = request.headers.get("host", "").lower()
        before, _, port = host.rpartition(":")
        # A port may be left out behind its colon.
        name = before if port.isdecimal() or (before and not port) else host
        if self._hosts is not None and name not in self._hosts:
            raise ApiError(403, "this server answers requests for this machine only", code="wrong_host")
        if self._key is None or open_:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode(), self._key.encode())
        if kind.lower() != "bearer" or not same:
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
            )

    async def _body(self, request: HttpRequest) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "the body must be JSON: send Content-Type: application/json")
        stated = request.headers.get("content-length", "0")
        if stated.isdecimal() and int(stated) > self._max_body:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > self._max_body:
                        raise self._too_large()
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:.0f} seconds") from error
        return bytes(body)

    def _too_large(self) -> ApiError:
        """Not kept in a variable where it is raised: it holds that frame, which would hold it, and with it the body."""
        return ApiError(413, f"the body is larger than {self._max_body} bytes", code="body_too_large")

    async def _chat(self, request: HttpRequest) -> Response:
        return await self._answer(request, chat=True)

    async def _text(self, request: HttpRequest) -> Response:
        return await self._answer(request, chat=False)

    async def _answer(self, http: HttpRequest, chat: bool) -> Response:
        request = parse(await self._body(http), chat, self.service.options.name)
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Piece] = asyncio.Queue()

        def emit(piece: Piece) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        if not has_room(ROOM_BYTES if request.schema is None else SCHEMA_ROOM_BYTES):
            raise ApiError(503, NO_ROOM)
        answer = await run_in_threadpool(self.service.begin, request, emit)
        replies = Replies(request, answer, self.service.options.name, self.service.prompts.token_text)
        if request.stream:
            return EventStream(replies.events(pieces), lambda: self._done(answer))
        try:
            found = await unless_gone(_all(pieces), http.receive)
        finally:
            self._done(answer)
        return JSONResponse(replies.whole(found))

    def _done(self, answer: Answer) -> None:
        """After the last byte, or when the client is gone."""
        if not answer.finished:
            self.service.backend.cancel(answer)
        now = time.monotonic()
        self.service.metrics.time("request_seconds", now - answer.arrived)
        if answer.started is not None:
            self.service.metrics.time("first_token_seconds", answer.started - answer.arrived)

    async def _models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: HttpRequest) -> Response:
        if request.path_params["name"] != self.service.options.name:
            raise ApiError(404, "there is no such model here; see /v1/models", "model", "model_not_found")
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.service.options.name,
            "object": "model",
            "created": self._created,
            "owned_by": "nstf",
            "context_length": self.service.context,
            "chat": self.service.prompts.has_template,
        }

    async def _health(self, _: HttpRequest) -> Response:
        return JSONResponse({"status": "ok", "engine": self.service.backend.name})

    async def _metrics(self, _: HttpRequest) -> Response:
        return PlainTextResponse(self.service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _page(self, request: HttpRequest) -> Response:
        name, kind = _PAGE_FILES[request.url.path]
        return Response((PAGE / name).read_bytes(), media_type=kind, headers=_PAGE_HEADERS)

    async def _not_a_route(self, request: HttpRequest, error: HTTPException) -> Response:
        """Checked as all else is: without the key nobody learns what is here."""
        path = request.scope["path"]
        try:
            self._check(request, open_=path == "/health" or path in _PAGE_FILES)
        except ApiError as refused:
            return _refusal(refused)
        texts = {
            404: "there is nothing here; see /v1/models",
            405: f"{request.method} is not for this address",
        }
        return _refusal(ApiError(error.status_code, texts.get(error.status_code, str(error.detail))))


def _refusal(error: ApiError) -> Response:
    headers = {429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(
        error.status
    )
    return JSONResponse(error.to_json(), error.status, headers)


def _failed(error: Exception, path: str) -> ApiError:
    """What a client is told of an error that is not its own. Memory that ended is a line in our log, all else is a bug."""
    if isinstance(error, MemoryError) or "can't start new thread" in str(error):
        _log.warning("%s: %s", path, NO_ROOM)
        return ApiError(503, NO_ROOM)
    _log.exception("%s failed", path)
    return ApiError(500, "the server failed at this request; its log says more")


async def _all(pieces: asyncio.Queue[Piece]) -> list[Piece]:
    found = [await pieces.get()]
    while found[-1].reason is None:
        found.append(await pieces.get())
    return found
