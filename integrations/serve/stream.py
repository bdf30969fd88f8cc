"""Server-sent events, and work that ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
QUIET_SECONDS = 15.0  # after which a comment is sent, so that nobody in between takes the connection for dead
SEND_SECONDS = 60.0  # a client that takes nothing for as long is given up


class Gone(Exception):
    """The client closed the connection."""


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of some work; Gone, and the work cancelled, when the client leaves before."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """Events as they come. done: is called at the end, whoever ended it."""

    def __init__(self, events: AsyncIterator[str], done: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self.body_iterator = events
        self._done = done
        self.media_type = "text/event-stream"
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(self._send(send), receive)
        except (Gone, OSError, TimeoutError):
            pass  # `done` tells who decodes
        finally:
            self._done()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for text in self._with_comments():
            async with asyncio.timeout(SEND_SECONDS):
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _with_comments(self) -> AsyncIterator[str]:
        source = aiter(self.body_iterator)
        while True:
            following = asyncio.ensure_future(anext(source))  # type: ignore[arg-type]
            try:
                while not (await asyncio.wait({following}, timeout=QUIET_SECONDS))[0]:
                    yield ": still at work\n\n"
                yield following.result()
            except StopAsyncIteration:
                return
            finally:
                following.cancel()
                # Its exception holds this frame, which would hold it, and with it the whole answer.
                del following
