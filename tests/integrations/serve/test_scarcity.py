"""A server whose memory or descriptors end: requests are refused, and it goes on."""

import asyncio
import errno
import logging
import sys
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


class Room:
    """Stands for `has_room`: keeps the sizes that are asked for, and answers by a rule."""

    def __init__(self, rule: Callable[[list[int]], bool]) -> None:
        self.asked: list[int] = []
        self._rule = rule

    def __call__(self, size: int) -> bool:
        self.asked.append(size)
        return self._rule(self.asked)


OBJECT = HELLO | {"response_format": {"type": "json_object"}}


def test_a_schema_is_read_only_where_there_is_room(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance ends the process where it finds no memory."""
    pytest.importorskip("llguidance")
    from nstf.integrations.serve import grammar

    none = Room(lambda asked: False)
    some = Room(lambda asked: asked[-1] <= grammar.READ_BYTES)
    with monkeypatch.context() as full:
        full.setattr(grammar, "has_room", none)
        status, found = server.json(CHAT, OBJECT)
        assert status == 503 and "too little memory" in found["error"]["message"]
        assert none.asked == [grammar.READ_BYTES] and server.json(CHAT, HELLO)[0] == 200
        # Its first use makes something of the tokenizer, which takes more.
        full.setattr(grammar, "has_room", some)
        assert server.json(CHAT, OBJECT)[0] == 503 and some.asked[-1] > grammar.READ_BYTES + (1 << 20)
    assert server.json(CHAT, OBJECT)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_with_a_schema_ends_where_memory_does(
    server: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    pytest.importorskip("llguidance")
    from nstf.integrations.serve import grammar

    assert server.json(CHAT, OBJECT)[0] == 200
    with monkeypatch.context() as full:
        full.setattr(grammar, "has_room", Room(lambda asked: asked.count(grammar.TOKEN_BYTES) < 6))
        status, _, found = server.call(CHAT, OBJECT | {"stream": stream, "max_tokens": 30})
        assert status == (200 if stream else 503)
        assert b"server_error" in found and b"64 MiB of memory" in found and b"DONE" not in found
    assert server.json(CHAT, OBJECT)[0] == 200


@pytest.mark.parametrize(("room", "status"), [(False, 503), (True, 501)])
def test_a_library_that_does_not_fit_is_no_missing_one(
    server: Served, monkeypatch: pytest.MonkeyPatch, room: bool, status: int
) -> None:
    from nstf.integrations.serve import grammar

    monkeypatch.setitem(sys.modules, "llguidance", None)  # an ImportError
    monkeypatch.setattr(grammar, "has_room", Room(lambda asked: room or len(asked) == 1))
    found_status, found = server.json(CHAT, OBJECT)
    assert found_status == status and ("llguidance" in found["error"]["message"]) == room


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
        handler(loop, {"message": "Fatal read error on socket transport", "exception": MemoryError()})
    handler(loop, {"message": "something else", "exception": ValueError("x")})
    loop.close()
    assert len(caplog.records) == 1 and len(others) == 1
