"""A server whose memory or descriptors end: requests are refused, and it goes on."""

import asyncio
import errno
import logging
from collections.abc import Callable
from typing import Any

import pytest

from tests.integrations.serve.conftest import CHAT, HELLO, Served, until


def test_connections_beyond_the_descriptors_are_told(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from nstf.integrations.serve import connection

    with monkeypatch.context() as few:
        few.setattr(connection, "_descriptors", lambda: 1)
        status, headers, _ = server.call("/health")
        assert status == 503 and headers["retry-after"] == "1"
    assert server.call("/health")[0] == 200


def test_a_request_without_room_is_refused_before_it_is_read(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nstf.integrations.serve import app

    with monkeypatch.context() as full:
        full.setattr(app, "has_room", lambda size: False)
        status, found = server.json(CHAT, HELLO)
        assert status == 503 and "too little memory" in found["error"]["message"]
    assert server.json(CHAT, HELLO)[0] == 200


@pytest.mark.parametrize(
    ("error", "status"),
    [(MemoryError(), 503), (RuntimeError("can't start new thread"), 503), (KeyError("a bug"), 500)],
)
def test_what_a_request_raises_is_openais_error(
    server: Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    status: int,
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(logging.getLogger("nstf"), "propagate", True)
    with monkeypatch.context() as failing:
        failing.setattr(server.service, "begin", fail)
        found_status, found = server.json(CHAT, HELLO)
    assert (found_status, found["error"]["type"]) == (status, "server_error")
    until(lambda: bool(caplog.records))
    # Memory that ends is a line, a bug has its traceback in the log.
    assert [r.exc_info is not None for r in caplog.records] == [status == 500]
    assert server.json(CHAT, HELLO)[0] == 200


def test_that_connections_cannot_be_taken_is_said_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("uvicorn")
    from nstf.integrations.serve import server

    monkeypatch.setattr(logging.getLogger("nstf"), "propagate", True)
    loop = asyncio.new_event_loop()
    others: list[dict[str, Any]] = []
    handler: Callable[..., None] = server._Scarcity()
    monkeypatch.setattr(loop, "default_exception_handler", others.append, raising=False)
    full = {
        "message": "socket.accept() out of system resource",
        "exception": OSError(errno.EMFILE, "Too many"),
    }
    for _ in range(100):
        handler(loop, full)
    handler(loop, {"message": "something else", "exception": ValueError("x")})
    loop.close()
    assert len(caplog.records) == 1 and len(others) == 1
