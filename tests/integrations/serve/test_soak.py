"""Clients that come and go for a while: every answer is the right one, and nothing is left behind."""

import gc
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from tests.integrations.serve.conftest import Served, until
from tests.integrations.serve.soak_clients import BODIES, BROKEN, KINDS, TEXT, Clients

KEY = "KEY"


@pytest.fixture
def server(artifact: Path, tmp_path: Path) -> Iterator[tuple[int, int]]:
    """(process, port) of `nstf serve`, which takes some answers at a time and lets a few wait."""
    pytest.importorskip("uvicorn")
    words = f"serve {artifact} --port 0 --parallel 4 --queue 3 --threads 1 --reproducible".split()
    log = tmp_path / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "nstf_convert", *words],
            env={**os.environ, "NSTF_API_KEY": KEY},
            stderr=errors,
        )
    try:
        until(lambda: "on http://" in log.read_text() or process.poll() is not None, 600)
        assert process.poll() is None, log.read_text()
        yield process.pid, int(log.read_text().rpartition("http://127.0.0.1:")[2].split()[0])
        process.terminate()
        assert process.wait(60) == 0
        assert "Traceback" not in log.read_text(), log.read_text()[-3000:]
    finally:
        process.kill()
        process.wait()


def held(process: int) -> dict[str, int]:
    """What a process holds: bytes resident, descriptors, threads."""
    root = Path(f"/proc/{process}")
    if not root.exists():
        pytest.skip("needs /proc")
    pages = int((root / "statm").read_text().split()[1])
    return {
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "files": len(list((root / "fd").iterdir())),
        "threads": len(list((root / "task").iterdir())),
    }


def visit(clients: Clients, seconds: float, seed: int) -> dict[str, int]:
    """All kinds of clients for a while; how often each was met how."""
    end, counts, problems, lock = time.monotonic() + seconds, dict[str, int](), list[str](), threading.Lock()

    def come(kind: Any, rng: random.Random) -> None:
        while time.monotonic() < end and not problems:
            try:
                met = kind(clients, rng)
            except Exception as error:
                problems.append(f"{kind.__name__}: {error!r}")
                return
            with lock:
                counts[met] = counts.get(met, 0) + 1

    threads = [
        threading.Thread(target=come, args=(kind, random.Random(f"{seed} {kind.__name__} {i}")))
        for kind, count in KINDS.items()
        for i in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    return counts


def at_rest(clients: Clients) -> bool:
    """Whether nothing is asked for."""
    text = clients.call("GET", "/metrics")[1].decode()
    return all(f"nstf_{name} 0\n" in text for name in ("running", "waiting"))


def answered(port: int) -> Clients:
    """Clients that know the right answers."""
    first = Clients(port, KEY)
    found = Clients(port, KEY, tuple(first.text(i, stream=False)[1] for i in range(len(BODIES))))
    assert len(set(found.expected)) == len(BODIES)
    return found


def test_clients_of_all_kinds(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    from nstf.integrations.serve import app, connection

    monkeypatch.setattr(app, "BODY_SECONDS", 3)
    monkeypatch.setattr(connection, "HEAD_SECONDS", 3)
    server = serve(parallel=4, queue=3, reproducible=True, key=KEY)
    clients = answered(server.port)
    counts = visit(clients, 3, 1)
    assert {"right", "vanished", "healthy"} <= set(counts)
    until(lambda: at_rest(clients))
    # What is running is counted down before its place is given back.
    until(lambda: all(s.answer is None for s in server.service.backend._slots))
    assert clients.text(1, stream=False) == (200, clients.expected[1])


def test_no_request_keeps_itself(serve: Callable[..., Served]) -> None:
    """Too large bodies and streams were held by errors that held the frame they were raised in, until the collector came:
    within ten minutes 70 MB. Looked for after every kind of answer, with the collector off until then."""
    server = serve(key=KEY)
    clients = Clients(server.port, KEY)
    large = b'{"prompt": "' + b"x" * (2 << 20) + b'"}'
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            assert clients.text(0, stream=True)[0] == clients.text(0, stream=False)[0] == 200
            parts: Any = (large[i : i + 65536] for i in range(0, len(large), 65536))
            for body, chunked in ((large, False), (parts, True)):
                try:
                    assert clients.call("POST", TEXT, body, chunked=chunked)[0] == 413
                except BROKEN:
                    pass
        until(lambda: at_rest(clients))
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        files = [o.f_code.co_filename for o in gc.garbage if isinstance(o, FrameType)]
    finally:
        gc.set_debug(0)
        gc.enable()
        gc.garbage.clear()
    assert [name for name in files if "integrations/serve" in name and "tests" not in name] == []


def test_rings_that_connections_leave_are_looked_for_and_what_was_there_before_is_left_out(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nstf.integrations.serve import connection, server

    seen, looked = list[int](), list[int]()
    monkeypatch.setattr(server._Server, "run", lambda self: seen.append(gc.get_freeze_count()))
    app: Any = SimpleNamespace(routes=lambda: None, service=SimpleNamespace(close=lambda: None))
    before = gc.get_freeze_count()
    server.run(app, "127.0.0.1", 0, lambda port: None)
    assert seen[0] > before + 10_000 and gc.get_freeze_count() == 0
    monkeypatch.setattr(connection.gc, "collect", lambda: looked.append(1))
    clients = Clients(serve(key=KEY).port, KEY)
    for _ in range(connection.LOOK_EVERY):
        clients.call("GET", "/health")
    until(lambda: bool(looked))


@pytest.mark.soak
def test_ten_minutes_of_clients_of_all_kinds_leave_nothing_behind(server: tuple[int, int]) -> None:
    """NSTF_SOAK_SECONDS: for how long instead."""
    seconds = int(os.environ.get("NSTF_SOAK_SECONDS", "600"))
    process, port = server
    clients = answered(port)
    idle = held(process)
    found = []
    for part, share in enumerate((0.25, 0.75)):
        counts = visit(clients, seconds * share, part)
        until(lambda: at_rest(clients))
        until(lambda: held(process)["files"] <= idle["files"])
        # anyio keeps up to 40 threads for what many clients asked at once, and ends those that were idle for ten seconds
        # when one is asked for again.
        until(
            lambda: held(process)["threads"] <= idle["threads"] + 2 or not clients.text(0, stream=False), 120
        )
        found.append(held(process))
        print(f"{seconds * share:.0f} s: {dict(sorted(counts.items()))}; then {found[-1]}")
        assert {"right", "vanished", "too large", "wrong JSON", "wrong key", "healthy"} <= set(counts)
    assert all(clients.text(i, stream=False) == (200, text) for i, text in enumerate(clients.expected))
    before, after = found
    assert after["bytes"] - before["bytes"] < max(before["bytes"] // 100, 4 << 20), found
