"""A connection of a client, with a limit on the time that it may stand without a request."""

from __future__ import annotations

import asyncio
import gc
import resource
import socket
import struct
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from nstf.integrations.serve.stream import SEND_SECONDS

# From the connection, or from the end of an answer, to the end of the next request's head. uvicorn's own limit begins with
# the first answer and ends with the next byte: who sends nothing, or a byte a minute, would stay for ever.
HEAD_SECONDS = 30.0
# Between two looks at a connection that has an answer under way.
LOOK_SECONDS = 5.0
# asyncio's and h11's objects of a connection hold one another, with up to 250 KB that it sent: they go when Python looks for
# such rings, which it does the more rarely the more there is besides.
LOOK_EVERY = 100
# Connections that asyncio takes at once, before this file hears of the first of them.
BURST = 16
# Descriptors that connections leave for files, and for those that are taken only to be told that there are too many.
SPARE = 2 * BURST
# Of SO_LINGER: on, for no second.
_AT_ONCE = struct.pack("ii", 1, 0)
_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)


class Connection(H11Protocol):
    """By h11, which refuses a head that is not whole after 16 KiB, or after what asyncio reads at once (256 KiB); httptools,
    uvicorn's own choice, takes heads of any size.

    What a client does not take lies in the system's memory, too, also of a connection that was closed: the system ends one
    by the same limit.

    A body has a limit of its own (`app.BODY_SECONDS`), and so has a stream that nobody reads (`stream.SEND_SECONDS`).

    Requests are not pipelined: what comes during an answer is dropped, and the connection ends after it. uvicorn would stop
    reading, and no longer see its client leave, and an answer behind one that nobody takes would wait without a limit.
    """

    _limit: asyncio.TimerHandle | None = None
    _lost = 0  # connections of the process that have ended
    _untaken = 0  # bytes of an answer that lay here when the time began
    _again = False  # whether that was HEAD_SECONDS ago, and none of them was taken

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        with suppress(OSError, AttributeError):  # a system without it
            sock = transport.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SEND_SECONDS))
        # The system gives the lowest number that is free: one near the limit says that few are.
        if transport.get_extra_info("socket").fileno() >= _descriptors() - SPARE:
            transport.write(_TOO_MANY)
            transport.close()
        else:
            self._begin()

    def data_received(self, data: bytes) -> None:
        if self._answering():
            self.cycle.keep_alive = False
        elif self.transport.get_write_buffer_size():
            self.transport.close()  # once its client has taken the answer before
        else:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._end()
                self._limit = self.loop.call_later(LOOK_SECONDS, self._look)
            if self._answering() and self.conn.trailing_data[0]:
                self.cycle.keep_alive = False
                self.flow.resume_reading()

    def _answering(self) -> bool:
        """Whether a request is here as a whole, and its answer is not."""
        return self.cycle is not None and not (self.cycle.more_body or self.cycle.response_complete)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)
        Connection._lost += 1
        if Connection._lost % LOOK_EVERY == 0:
            gc.collect()

    def _begin(self) -> None:
        self._end()
        self._untaken, self._again = self.transport.get_write_buffer_size(), False
        self._limit = self.loop.call_later(HEAD_SECONDS, self._over)

    def _end(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _look(self, before: int = 0) -> None:
        """During an answer: ends a connection that is to be closed, once what was left of a stream that nobody reads has all
        been given up. uvicorn would wait for its client. before: bytes that lay here at the last look, of such a one."""
        untaken = self.transport.get_write_buffer_size() if self.transport.is_closing() else 0
        if untaken and untaken == before:
            self._drop()
        else:
            self._limit = self.loop.call_later(LOOK_SECONDS, self._look, untaken)

    def _over(self) -> None:
        """Ends the connection, unless its client is still taking its answer. Where it takes nothing for SEND_SECONDS, the
        rest would keep the connection: it goes."""
        untaken = self.transport.get_write_buffer_size()
        if not untaken:
            self.transport.close()
        elif untaken < self._untaken:
            self._begin()
        elif self._again:
            self._drop()
        else:
            self._again = True
            self._limit = self.loop.call_later(SEND_SECONDS - HEAD_SECONDS, self._over)

    def _drop(self) -> None:
        """Ends the connection with all that lies here and in the system's memory, which would keep that for minutes."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.transport.abort()


def _descriptors() -> float:
    """How many this process may have open."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return float("inf") if most == resource.RLIM_INFINITY else most
