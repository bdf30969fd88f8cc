"""Clients of every kind, good and bad, each a function that is one visit to a server and says how it was met."""

import http.client
import json
import random
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# Met with as a refused body is still being sent: the server has said why, and closed.
BROKEN = (BrokenPipeError, ConnectionResetError)

BODIES: list[dict[str, Any]] = [
    {
        "prompt": f"Scene {i}. " + "The king speaks. " * (i * 3),
        "max_tokens": 2 + 5 * i,
        "temperature": 0.5 * (i % 2),
        "seed": i,
    }
    for i in range(8)
]
WRONG_JSON: tuple[bytes, ...] = (
    b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000, b'{"prompt": 3}', b'{"prompt": "x", "n": 2}',
    b'{"prompt": "x", "max_tokens": 1e999}', b'{"prompt": "\\ud800"}', b'{"prompt": "x", "\\ud800": 1}', b'{"seed": {}}',
    b'{"prompt": "x", "stream": true, "stream_options": {"\\udfff": 0}}', b'{"prompt": [' + b"1," * 100_000 + b"1]}",
    b'{"prompt": "' + b"word " * 100_000 + b'"}', b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
)  # fmt: skip
ADDRESSES = (("GET", "/nothing"), ("DELETE", TEXT), ("GET", CHAT), ("GET", "/v1/models/..%2f.."))
GUARDED = (("POST", TEXT, "{}"), ("GET", "/v1/models", None), ("GET", "/metrics", None))
NO_HTTP = (
    b"\x16\x03\x01" + bytes(range(256)) * 8,
    b"\0" * 100_000,
    b"A" * 200_000,
    b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
)
WRONG_KEYS = (
    {},
    {"Authorization": "Bearer no"},
    {"Authorization": "Basic KEY"},
    {"Authorization": "Bearer \xe9"},
)


@dataclass(frozen=True)
class Clients:
    """port, key: of the server; expected: the text that answers each of BODIES."""

    port: int
    key: str
    expected: tuple[str, ...] = ()

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, chunked: bool = False
    ) -> tuple[int, bytes]:  # fmt: skip
        """(status, body) of one request with the key, unless headers are given."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        sent = {"Content-Type": "application/json"} if body is not None else {}
        sent |= {"Authorization": f"Bearer {self.key}"} if headers is None else headers
        try:
            connection.request(method, path, body, sent, encode_chunked=chunked)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def text(self, number: int, stream: bool) -> tuple[int, str]:
        """(status, text) of the answer to one of BODIES."""
        status, data = self.call("POST", TEXT, json.dumps(BODIES[number] | {"stream": stream}))
        if status != 200:
            return status, data.decode()
        if not stream:
            return status, str(json.loads(data)["choices"][0]["text"])
        # A stream in which nothing happens for long has comments, too.
        events = [e.removeprefix("data: ") for e in data.decode().split("\n\n") if e.startswith("data: ")]
        assert events.pop() == "[DONE]"
        return status, "".join(json.loads(e)["choices"][0]["text"] for e in events)

    def ask(self, rng: random.Random) -> str:
        """Wants an answer, and gets that of its own question."""
        time.sleep(rng.random() * 0.8)
        number = rng.randrange(len(BODIES))
        status, text = self.text(number, rng.random() < 0.5)
        if status == 429:
            return "busy"
        assert status == 200 and text == self.expected[number], (number, status, text)
        return "right"

    def vanish(self, rng: random.Random) -> str:
        """Leaves: at once, after some of the answer, in the middle of its head or body; politely or by a reset."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=120) as connection:
            raw = self._raw(json.dumps(rng.choice(BODIES) | {"stream": rng.random() < 0.7}).encode())
            connection.sendall(raw[: rng.randrange(len(raw))] if rng.random() < 0.3 else raw)
            if rng.random() < 0.5:
                connection.settimeout(rng.random() * 0.1 + 0.001)
                try:
                    connection.recv(rng.choice((1, 300, 5000)))
                except TimeoutError:
                    pass
            if rng.random() < 0.5:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        time.sleep(rng.random() * 0.5)
        return "vanished"

    def send_10_mb(self, rng: random.Random) -> str:
        """As JSON, whole or in pieces; some leave in the middle."""
        time.sleep(rng.random())
        kind = rng.randrange(3)
        if kind == 2:
            with socket.create_connection(("127.0.0.1", self.port), timeout=120) as connection:
                try:
                    connection.sendall(self._raw(b'{"prompt": "', 10_000_000))
                    for _ in range(rng.randrange(80)):
                        connection.sendall(b"x" * 65536)
                except BROKEN:
                    pass
            return "left a large body"
        large = b'{"prompt": "' + b"x" * 10_000_000 + b'"}'
        parts: Any = (large[i : i + 65536] for i in range(0, len(large), 65536)) if kind else large
        try:
            status, data = self.call("POST", TEXT, parts, chunked=bool(kind))
        except BROKEN:
            return "too large, cut off"
        if status == 408 and kind:  # on a machine that stands still for half a minute
            return "too large, and late"
        assert status == 413 and json.loads(data)["error"]["code"] == "body_too_large", (status, data)
        return "too large"

    def be_slow(self, rng: random.Random) -> str:
        """Bytes with pauses between: the right answer when all comes in time, else 408, or for a head the end."""
        number, kind = rng.randrange(len(BODIES)), rng.choice(("in time", "body", "head"))
        raw = self._raw(json.dumps(BODIES[number]).encode())
        at = 0 if kind == "head" else raw.index(b"\r\n\r\n") + 10
        found, bite, pause = b"", *((10, 0.01) if kind == "in time" else (1, 0.5))
        with socket.create_connection(("127.0.0.1", self.port), timeout=pause) as connection:
            connection.sendall(raw[:at])
            over = False
            while at < len(raw) and not over:
                try:
                    connection.sendall(raw[at : at + bite])
                    at += bite
                except BROKEN:
                    over = True
                try:
                    found += (part := connection.recv(65536))
                    over = over or part == b"" or b" 408 " in found
                except TimeoutError:
                    pass
                except BROKEN:
                    over = True
            connection.settimeout(120)
            while kind == "in time" and (part := connection.recv(65536)):
                found += part
        if kind == "in time" and found.split()[1] == b"200":
            answer = json.loads(found.split(b"\r\n\r\n", 1)[1])
            assert answer["choices"][0]["text"] == self.expected[number], (number, found)
            return "slow, right"
        if kind == "in time" and found.split()[1] == b"429":
            return "busy"
        assert over and (found == b"" if kind == "head" else b" 408 " in found), (kind, at, found)
        return f"slow {kind}, given up"

    def be_wrong(self, rng: random.Random) -> str:
        """What is refused: JSON, keys, addresses, and what is no HTTP at all."""
        time.sleep(rng.random() * 0.2)
        kind = rng.randrange(4)
        if kind == 0:
            status, data = self.call("POST", rng.choice((CHAT, TEXT)), rng.choice(WRONG_JSON))
            if status == 429:  # found wrong only when its turn would come
                return "busy"
            assert status == 400 and json.loads(data)["error"]["message"], (status, data)
            return "wrong JSON"
        if kind == 1:
            method, path, body = rng.choice(GUARDED)
            status, data = self.call(method, path, body, rng.choice(WRONG_KEYS))
            assert status == 401 and json.loads(data)["error"]["code"] == "invalid_api_key", (status, data)
            return "wrong key"
        if kind == 2:
            method, path = rng.choice(ADDRESSES)
            status, data = self.call(method, path)
            assert status in (404, 405) and json.loads(data)["error"]["message"], (status, data)
            return "wrong address"
        with socket.create_connection(("127.0.0.1", self.port), timeout=120) as connection:
            try:
                connection.sendall(rng.choice(NO_HTTP))
                connection.shutdown(socket.SHUT_WR)
                found = connection.recv(1000)
            except OSError:  # reset, or not connected by now
                return "no HTTP"
        assert found == b"" or b" 400 " in found.partition(b"\r\n")[0], found
        return "no HTTP"

    def look(self, rng: random.Random) -> str:
        """Health, which needs no key and stays."""
        time.sleep(0.25)
        status, data = self.call("GET", "/health", headers={})
        assert (status, json.loads(data)["status"]) == (200, "ok"), (status, data)
        return "healthy"

    def _raw(self, body: bytes, length: int | None = None) -> bytes:
        head = (
            f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self.key}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length or len(body)}\r\n\r\n"
        )
        return head.encode() + body


# How many clients of each kind there are at a time.
KINDS: dict[Callable[[Clients, random.Random], str], int] = {
    Clients.ask: 5, Clients.vanish: 3, Clients.send_10_mb: 1, Clients.be_slow: 4, Clients.be_wrong: 1, Clients.look: 1,
}  # fmt: skip
