"""The HTTP server over real connections: answers, streams, refusals, limits, clients that leave."""

import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integrations.serve.conftest import CHAT, HELLO, Served, until

LONG = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0}


def test_an_answer_that_is_still_being_taken_keeps_its_connection() -> None:
    from nstf.integrations.serve.connection import Connection

    done, waiting, waits = [], [8], list[float]()
    here = object.__new__(Connection)

    def call_later(wait: float, call: Callable[[], None]) -> SimpleNamespace:
        waits.append(wait)
        return SimpleNamespace(cancel=lambda: None)

    here.loop = SimpleNamespace(call_later=call_later)
    here.transport = SimpleNamespace(
        get_write_buffer_size=lambda: waiting[0],
        abort=lambda: done.append("abort"),
        close=lambda: done.append("close"),
        get_extra_info=lambda _: SimpleNamespace(setsockopt=lambda *_: done.append("reset")),
    )
    here._begin()
    waiting[0] = 5
    here._over()
    assert done == []  # three bytes went
    here._over()
    assert done == []  # none did, for 30 s
    waiting[0] = 4
    here._over()
    here._over()
    assert done == []
    here._over()
    assert done == [
        "reset",
        "abort",
    ]  # none did for 60 s, which the end of a stream has as its other parts do
    assert waits == [30, 30, 30, 30, 30]
    waiting[0] = 0
    here._over()
    assert done == ["reset", "abort", "close"]


def test_the_system_ends_connections_that_take_nothing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that fits into the system's memory stood there for minutes after its connection was closed."""
    pytest.importorskip("uvicorn")
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from nstf.integrations.serve.connection import Connection

    monkeypatch.setattr(H11Protocol, "connection_made", lambda *_: None)
    here = object.__new__(Connection)
    here._begin = lambda: None
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with socket.create_connection(listening.getsockname()), listening.accept()[0] as own:
            here.connection_made(SimpleNamespace(get_extra_info=lambda _: own))
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


def test_wrong_requests_are_a_line_a_minute() -> None:
    """Each was a line: 300 TLS greetings made 300."""
    pytest.importorskip("uvicorn")
    from nstf.integrations.serve.server import _Seldom

    seldom = _Seldom()

    def said(line: str) -> int:
        made = [logging.LogRecord("uvicorn.error", logging.WARNING, "", 0, line, (), None) for _ in range(5)]
        return sum(map(seldom.filter, made))

    assert said("Invalid HTTP request received.") == said("Unsupported upgrade request.") == 1
    assert said("Invalid HTTP request received.") == 0
    assert said("something else") == 5


WRONG: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    ({"n": 2}, "n"),
    ({"n": True}, "n"),
    ({"tools": [{}]}, "tools"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": 10**400}, None),
    ({"top_p": 0}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"seed": "x"}, "seed"),
    ({"seed": 1 << 70}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"\ud800": 1}}, "stream_options"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": 3}, "stop"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**6}, "messages"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"logit_bias": {"3": 1}}, "logit_bias"),
    ({"colour": "red"}, "colour"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_k": 10**400}, "top_k"),
    ({"top_k": 1 << 31}, "top_k"),
    ({"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
]


def test_wrong_fields_are_named(server: Served) -> None:
    for changes, param in WRONG:
        status, found = server.json(CHAT, HELLO | changes)
        assert status == 400, (changes, found)
        assert found["error"]["type"] == "invalid_request_error" and found["error"]["message"]
        if param is not None:
            assert found["error"]["param"] == param, (changes, found)
    for prompt in ("", [], [-1], [10**9], [[1], [2]], ["a", "b"], 3, None):
        status, found = server.json("/v1/completions", {"prompt": prompt})
        assert (status, found["error"]["param"]) == (400, "prompt"), prompt
    status, found = server.json(CHAT, HELLO | {"model": "gpt-9"})
    assert (status, found["error"]["code"]) == (404, "model_not_found")
    assert server.json(CHAT, HELLO)[0] == 200


def test_wrong_bodies_methods_and_addresses_get_openais_errors(server: Served) -> None:
    for body in (b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"a": NaN}', b"[" * 100000):
        status, _, data = server.call(CHAT, body)
        assert status == 400 and json.loads(data)["error"]["message"], body[:20]
    assert server.call(CHAT, b"{}", Content_Type="text/plain")[0] == 415
    assert server.call(CHAT, b"x" * ((1 << 20) + 1))[0] == 413
    for path, method, expected in [
        ("/nothing", "GET", 404),
        (CHAT, "GET", 405),
        ("/v1/models/x", "GET", 404),
    ]:
        status, _, data = server.call(path, method=method)
        assert status == expected and json.loads(data)["error"]["message"]


def test_a_body_in_chunks_is_limited_too(server: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    parts = (b" " * 65536 for _ in range(20))
    try:
        connection.request("POST", CHAT, parts, {"Content-Type": "application/json"}, encode_chunked=True)
        assert connection.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError):
        pass  # closed before all was sent
    finally:
        connection.close()
    assert server.json(CHAT, HELLO)[0] == 200


def test_a_slow_body_is_given_up(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from nstf.integrations.serve import app

    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n"
        slow.sendall(head.encode() + b"{")
        assert b" 408 " in slow.recv(1000)


def test_a_connection_without_a_whole_request_is_ended(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that says nothing, one whose head comes a byte at a time, one that goes on with a body that was refused."""
    from nstf.integrations.serve import connection

    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    refused = f"{head}Content-Length: {1 << 30}\r\n\r\n"
    for first, then in (("", ""), ("GET /health HTTP/1.1\r\nX: ", "y"), (refused, "x")):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
            slow.sendall(first.encode())
            answers = b""

            def ended(slow: socket.socket = slow, then: str = then) -> bool:
                nonlocal answers
                try:
                    slow.settimeout(0.05)
                    slow.sendall(then.encode())
                    part = slow.recv(10_000)
                except TimeoutError:
                    return False
                except ConnectionError:
                    return True
                answers += part
                return not part

            until(ended)
            assert (b" 413 " in answers) == (first == refused)
    # One whose answer takes longer, and one that asks again on the same connection, are none of these.
    slowly(server, 0.05)
    kept = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for _ in range(2):
        kept.request("POST", CHAT, json.dumps(HELLO), {"Content-Type": "application/json"})
        answer = kept.getresponse()
        assert answer.status == 200 and json.loads(answer.read())["choices"]
    kept.close()


def test_a_key_is_asked_for(serve: Callable[..., Served]) -> None:
    server = serve(key="secret-key")
    for headers in (
        {},
        {"Authorization": "Bearer no"},
        {"Authorization": "Basic secret-key"},
        {"Authorization": "Bearer \xe9"},
    ):
        for path, body in ((CHAT, HELLO), ("/v1/models", None), ("/metrics", None)):
            status, found = server.json(path, body, **headers)
            assert (status, found["error"]["code"]) == (401, "invalid_api_key")
    assert server.json(CHAT, HELLO, Authorization="Bearer secret-key")[0] == 200
    assert server.json("/health")[0] == 200


def test_what_is_not_there_asks_for_the_key_too(serve: Callable[..., Served]) -> None:
    server = serve(key="secret-key")
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/health/x", 404),
        ("GET", CHAT, 405),
        ("OPTIONS", CHAT, 405),
        ("DELETE", "/v1/models", 405),
    ):
        assert server.call(path, method=method)[0] == 401, (method, path)
        assert server.call(path, method=method, Authorization="Bearer secret-key")[0] == status
    assert server.call("/health", method="POST")[0] == server.call("/chat.js", method="PUT")[0] == 405


def test_a_web_page_elsewhere_cannot_use_the_server_under_its_own_name(server: Served) -> None:
    assert server.call("/v1/models", Host="evil.example:8000")[0] == 403
    for path, method in (("/health/", "GET"), ("/nothing", "GET"), ("/health", "POST"), (CHAT, "OPTIONS")):
        # No redirection to a name that a request states, either.
        assert server.call(path, method=method, Host="evil.example")[0] == 403, path
    assert server.call("/v1/models", Host=f"localhost:{server.port}")[0] == 200
    assert server.call("/v1/models", Host="localhost:")[0] == 200  # HTTP lets the port be empty
    # What a page may send without asking first is no JSON.
    assert server.call(CHAT, json.dumps(HELLO).encode(), Content_Type="text/plain")[0] == 415


@pytest.mark.parametrize(
    ("host", "served"),
    [
        ("LOCALHOST", "localhost"),
        ("127.1", "127.1"),
        ("127.0.0.2", "127.0.0.2"),
        ("::1", "[::1]"),
        ("::ffff:127.0.0.1", "[::ffff:127.0.0.1]"),
    ],
)
def test_a_loopback_address_is_one_however_it_is_spelt(host: str, served: str) -> None:
    pytest.importorskip("uvicorn")
    from nstf.integrations.serve.server import allowed_hosts

    assert allowed_hosts(host, None) == {"127.0.0.1", "localhost", "[::1]", served}
    assert allowed_hosts(host, "a key") is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", "", "no.such.host.invalid", "a" * 300])
def test_an_address_that_others_reach_is_for_any_name(host: str) -> None:
    pytest.importorskip("uvicorn")
    from nstf.integrations.serve.server import allowed_hosts

    assert allowed_hosts(host, None) is None


def test_models_health_and_metrics(server: Served) -> None:
    _, found = server.json("/v1/models")
    assert [m["id"] for m in found["data"]] == ["tiny"]
    assert server.json("/v1/models/tiny")[1]["context_length"] == 512
    assert server.json("/health") == (200, {"status": "ok", "engine": "CPU engine"})
    server.json(CHAT, HELLO)
    text = server.call("/metrics")[2].decode()
    assert 'nstf_requests_total{path="/v1/chat/completions",status="200"} 1' in text
    assert "# TYPE nstf_first_token_seconds histogram" in text
    assert 'nstf_first_token_seconds_bucket{le="+Inf"} 1' in text
    assert "nstf_running 0" in text and server.metric("cache_bytes") > 0


def begin(server: Served, body: dict[str, Any], path: str = "/v1/completions") -> http.client.HTTPConnection:
    """A request under way whose answer nobody reads yet."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_ends_when_its_client_leaves(serve: Callable[..., Served], stream: bool) -> None:
    server = serve(parallel=1)
    slowly(server, 0.02)
    left = begin(server, LONG | {"stream": stream})
    until(lambda: server.metric("generated_tokens_total") > 2)
    assert left.sock is not None
    left.sock.close()
    left.close()
    until(lambda: server.metric("cancelled_total") == 1 and server.metric("running") == 0)
    assert server.metric("generated_tokens_total") < 100
    assert server.json(CHAT, HELLO)[0] == 200


PIPELINED = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("together", [True, False])
def test_a_client_that_asks_again_during_an_answer_is_still_seen_to_leave(
    serve: Callable[..., Served], together: bool
) -> None:
    """Reading stopped at the second request, and with it the sight of the connection's end."""
    server = serve(parallel=1)
    slowly(server, 0.02)
    body = json.dumps(LONG).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + body + (PIPELINED if together else b""))
        until(lambda: server.metric("generated_tokens_total") > 2)
        if not together:
            client.sendall(PIPELINED)
            time.sleep(0.2)
    until(lambda: server.metric("cancelled_total") == 1 and server.metric("running") == 0)
    assert server.metric("generated_tokens_total") < 100


@pytest.mark.parametrize("pause", [0.0, 0.001])
def test_a_client_that_asks_on_and_takes_nothing_is_given_up(
    server: Served, monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    from nstf.integrations.serve import connection

    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(connection, "SEND_SECONDS", 1.0)
    lost = connection.Connection._lost
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(0.2)
        client.connect(("127.0.0.1", server.port))
        try:
            for _ in range(1000):
                client.sendall(PIPELINED.replace(b"/health", b"/chat.js"))
                time.sleep(pause)
        except OSError:
            pass
        until(lambda: connection.Connection._lost > lost)


def test_a_stream_that_nobody_takes_is_given_up_with_its_connection(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer had ended, and what lay in asyncio kept the connection for as long as its client liked."""
    from nstf.integrations.serve import connection, stream

    monkeypatch.setattr(stream, "SEND_SECONDS", 1.0)
    monkeypatch.setattr(connection, "LOOK_SECONDS", 0.2)
    server = serve(name="n" * 20_000)
    lost = connection.Connection._lost
    body = json.dumps(LONG | {"stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        until(lambda: connection.Connection._lost > lost)


def test_an_answer_during_which_its_client_asks_again_is_whole_and_the_last(server: Served) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(PIPELINED * 3)
        found = b""
        while part := client.recv(10_000):
            found += part
    assert found.count(b"HTTP/1.1 200 ") == 1 and found.endswith(b"}")


def slowly(server: Served, seconds: float) -> None:
    """Makes every step of the engine take as long at least."""
    before = server.service.backend._batch.step

    def step(parts: Any) -> list[int]:
        time.sleep(seconds)
        found: list[int] = before(parts)
        return found

    server.service.backend._batch.step = step


def test_a_full_queue_is_told_at_once(serve: Callable[..., Served]) -> None:
    server = serve(parallel=1, queue=1)
    slowly(server, 0.05)
    first = begin(server, LONG)
    until(lambda: server.metric("running") == 1)
    second = begin(server, LONG)
    until(lambda: server.metric("waiting") == 1)
    status, headers, data = server.call(CHAT, HELLO)
    assert (status, headers["retry-after"]) == (429, "1")
    assert json.loads(data)["error"]["code"] == "queue_full"
    second.close()  # leaves the queue without having been begun
    until(lambda: server.metric("waiting") == 0)
    first.close()
    until(lambda: server.metric("running") == 0)
    assert server.json(CHAT, HELLO)[0] == 200


def test_a_client_that_does_not_read_does_not_hold_up_the_others(serve: Callable[..., Served]) -> None:
    server = serve(parallel=2)
    idle = begin(server, LONG | {"stream": True})
    assert server.json(CHAT, HELLO)[0] == 200
    until(lambda: server.metric("running") == 0)
    assert idle.getresponse().read().endswith(b"[DONE]\n\n")
    idle.close()


def test_shutting_down_completes_what_is_quick_and_ends_the_rest(serve: Callable[..., Served]) -> None:
    server = serve(parallel=2)
    slowly(server, 0.05)
    connection = begin(server, LONG | {"stream": True})
    response = connection.getresponse()
    until(lambda: server.metric("generated_tokens_total") > 1)
    threading.Thread(target=server.service.close).start()
    data = response.read()
    assert b"shutting down" in data and b"[DONE]" not in data
    connection.close()
    status, found = server.json(CHAT, HELLO)
    assert (status, found["error"]["code"]) == (503, "shutting_down")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("a bug"), 500),
        (MemoryError("a bug"), 503),
        (RuntimeError("a bug: can't allocate memory: you tried to allocate 7 bytes"), 503),
    ],
)
def test_a_failing_step_is_told_and_the_server_goes_on(server: Served, error: Exception, said: int) -> None:
    batch = server.service.backend._batch
    before = batch.step

    def fail(parts: Any) -> list[int]:
        batch.step = before
        raise error

    batch.step = fail
    status, found = server.json(CHAT, HELLO)
    assert (status, found["error"]["type"]) == (said, "server_error") and "a bug" in found["error"]["message"]
    assert server.json(CHAT, HELLO)[0] == 200


def test_limits_of_tokens(serve: Callable[..., Served]) -> None:
    server = serve(context=64, max_tokens=10)
    _, found = server.json("/v1/completions", {"prompt": "A", "temperature": 0})
    assert found["usage"]["completion_tokens"] <= 10
    status, found = server.json("/v1/completions", {"prompt": "A", "max_tokens": 11})
    assert (status, found["error"]["param"]) == (400, "max_tokens")
    status, found = server.json("/v1/completions", {"prompt": "word " * 100})
    assert (status, found["error"]["code"]) == (400, "context_length_exceeded")


def test_the_page_needs_nothing_from_elsewhere(server: Served) -> None:
    from html.parser import HTMLParser

    status, headers, data = server.call("/")
    policy = headers["content-security-policy"]
    assert status == 200 and "default-src 'none'" in policy and "unsafe" not in policy
    found: list[tuple[str, dict[str, str | None]]] = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag, dict(attrs)))

    Tags().feed(data.decode())
    for tag, attributes in found:
        assert not any(name.startswith("on") or name == "style" for name in attributes), tag
        for name in ("src", "href"):
            value = attributes.get(name)
            assert value is None or value == "data:," or server.call(f"/{value}")[0] == 200
    scripts = [a for t, a in found if t == "script"]
    assert scripts and all(a.get("src") for a in scripts)
    ids = {a["id"] for _, a in found if "id" in a}
    code = server.call("/chat.js")[2].decode()
    assert "innerHTML" not in code
    import re

    assert set(re.findall(r'at\("(\w+)"\)', code)) <= ids
    labels = {a.get("for") for t, a in found if t == "label"}
    assert "text" in labels
