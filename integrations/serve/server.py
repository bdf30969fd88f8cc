"""Runs the application until a signal ends it: answers under way are completed, for some seconds."""

from __future__ import annotations

import asyncio
import errno
import gc
import ipaddress
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from nstf.errors import NstfError
from nstf.integrations.serve.app import ROOM_BYTES, App
from nstf.integrations.serve.connection import BURST, Connection
from nstf.runtime.memory_limit import has_room

_HOST_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
GRACE_SECONDS = 10
# What requests may take beyond these that are no answers yet.
BEGINNING_SECONDS = 5
# Connections that the system keeps until they are taken.
BACKLOG = 2048
# What `accept` says where descriptors or memory end, and how often that is said.
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SAY_SECONDS = 60.0

_log = logging.getLogger("nstf")


class _Server(uvicorn.Server):
    """Ends with this function's return: uvicorn's own raises the signal again, which makes a failure of a clean end."""

    def __init__(
        self, config: uvicorn.Config, ready: Callable[[int], None], close: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._ready, self._close = ready, close
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {s: signal.signal(s, self.handle_exit) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal does not wait for answers. uvicorn's own would also cancel the task of the lifespan, which is
        logged as a failure."""
        if self.should_exit and self._loop is not None:
            self._loop.call_soon_threadsafe(self._end_answers)
        self.should_exit = True

    def _end_answers(self) -> None:
        if has_room(ROOM_BYTES):
            asyncio.get_running_loop().run_in_executor(None, self._close)
        else:
            self._close()  # there is no memory for a thread

    async def shutdown(self, sockets: Any = None) -> None:
        """Answers under way have GRACE_SECONDS; then each is ended with an error, while its connection still stands."""
        timer = asyncio.get_running_loop().call_later(GRACE_SECONDS, self._end_answers)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    async def startup(self, sockets: Any = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_Scarcity())
        await super().startup(sockets)
        if self.started:
            for listening in [s for server in self.servers for s in server.sockets]:
                _wait_longer(listening.fileno())
            self._ready(self.servers[0].sockets[0].getsockname()[1])


class _Scarcity:
    """What asyncio reports beside tasks. That a connection cannot be taken, or not be read for want of memory (it is closed
    then), is one line now and then: by itself it writes a traceback for each attempt, megabytes a second where a client
    holds all connections."""

    _said = -SAY_SECONDS

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _SCARCE:
            reason = error.strerror
        elif isinstance(error, MemoryError):
            reason = "out of memory"
        else:
            loop.default_exception_handler(context)
            return
        if time.monotonic() - self._said >= SAY_SECONDS:
            self._said = time.monotonic()
            _log.warning("connections are not taken for now: %s", reason)


class _Seldom(logging.Filter):
    """Lets what uvicorn says of each wrong request through once in a while: a client can send a thousand a second."""

    _LINES = (
        "Invalid HTTP request received.",
        "ASGI callable returned without completing response.",
        "Unsupported upgrade request.",
        "No supported WebSocket library detected.",
    )

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        line = next((line for line in self._LINES if str(record.msg).startswith(line)), None)
        if line is None or time.monotonic() - self._said.get(line, -SAY_SECONDS) < SAY_SECONDS:
            return line is None
        self._said[line] = time.monotonic()
        return True


def _wait_longer(descriptor: int) -> None:
    """Lets the system keep BACKLOG connections of a listening socket: asyncio keeps only as many as it takes at once."""
    with socket.socket(fileno=os.dup(descriptor)) as listening:
        listening.listen(BACKLOG)


def _addresses(host: str, port: int) -> list[Any]:
    """Where a server of that name listens. As asyncio asks: `*` is this machine to one who asks for somewhere to connect
    to, and every address to one who asks for where to listen."""
    return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))


def is_local(host: str) -> bool:
    """Whether only this machine reaches a server there, however the address is spelt: `127.1` and `LOCALHOST`, too."""
    try:
        found = _addresses(host, 0) if host.strip() else []
    except (OSError, ValueError):  # `run` says what is wrong with it
        return False
    addresses = [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]
    # An IPv6 address that stands for one of IPv4 is no loopback to every version of Python.
    known = [getattr(address, "ipv4_mapped", None) or address for address in addresses]
    return bool(known) and all(address.is_loopback for address in known)


def allowed_hosts(host: str, key: str | None) -> frozenset[str] | None:
    """Names a request may be for: those of this machine, where only it reaches the server and no key is asked for."""
    if key is not None or not is_local(host):
        return None
    return _HOST_NAMES | {f"[{host}]" if ":" in host else host.lower()}


class AddressError(NstfError):
    """The address to listen on is taken, or not of this machine."""


def _check_host(host: str, port: int) -> None:
    """Raises AddressError for what names no address: uvicorn writes tracebacks about some, and takes others for all."""
    try:
        if not host.strip():
            raise ValueError("it is empty")
        _addresses(host, port)
    except (OSError, ValueError) as error:  # a UnicodeError, too: labels that are too long
        raise AddressError(
            f"cannot listen on {host[:100]!r}: {error}; give an address of this machine"
        ) from error


def run(app: App, host: str, port: int, ready: Callable[[int], None]) -> None:
    """Serves until SIGINT or SIGTERM. ready: is called with the port when requests are taken. Raises AddressError where
    the address cannot be had.
    """
    _check_host(host, port)
    config = uvicorn.Config(
        app.routes(),
        host=host,
        port=port,
        http=Connection,
        workers=1,  # else what WEB_CONCURRENCY says
        ws="none",
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS + BEGINNING_SECONDS,
        timeout_keep_alive=30,
        lifespan="on",
        backlog=BURST,
    )
    logging.getLogger("uvicorn.error").addFilter(_Seldom())
    server = _Server(config, ready, app.service.close)
    gc.collect()
    gc.freeze()  # what is here now stays: to look for what connections leave (connection.py) takes a millisecond, not 100
    try:
        server.run()
    except SystemExit as error:  # uvicorn's way of saying that it could not bind, after a line in its log
        raise AddressError(
            f"cannot listen on {host}:{port} (the line before says why): choose another port, or an address of this machine"
        ) from error
    finally:
        gc.unfreeze()
