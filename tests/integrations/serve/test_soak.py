"""Clients that come and go for a while: every answer is the right one, and nothing is left behind."""

import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.integrations.serve.conftest import Served, until
from tests.integrations.serve.test_server import begin


@pytest.mark.parametrize("seconds", [4, pytest.param(300, marks=pytest.mark.soak)])
def test_a_soak(serve: Callable[..., Served], seconds: int) -> None:
    server = serve(parallel=4, queue=3, reproducible=True)
    bodies: list[dict[str, Any]] = [
        {
            "prompt": f"Scene {i}. " + "The king speaks. " * (i * 3),
            "max_tokens": 2 + 5 * i,
            "temperature": 0.5 * (i % 2),
            "seed": i,
        }
        for i in range(8)
    ]
    expected = [server.json("/v1/completions", b)[1]["choices"][0]["text"] for b in bodies]
    counts = {"right": 0, "busy": 0, "left": 0, "refused": 0}
    problems: list[str] = []
    end = time.monotonic() + seconds

    def client(seed: int) -> None:
        drawn = random.Random(seed)
        while time.monotonic() < end and not problems:
            i = drawn.randrange(len(bodies))
            try:
                act = drawn.random()
                if act < 0.15:
                    connection = begin(server, bodies[i] | {"stream": drawn.random() < 0.5})
                    time.sleep(drawn.random() * 0.05)
                    connection.close()
                    counts["left"] += 1
                    continue
                if act < 0.25:
                    status = server.call("/v1/completions", drawn.choice((b"{", b"[]", b'{"prompt": 3}')))[0]
                    assert status == 400
                    counts["refused"] += 1
                    continue
                status, _, data = server.call("/v1/completions", bodies[i] | {"stream": act < 0.6})
                if status == 429:
                    counts["busy"] += 1
                    continue
                assert status == 200, data
                if act < 0.6:
                    chunks = [
                        json.loads(e[6:]) for e in data.decode().split("\n\n") if e and e != "data: [DONE]"
                    ]
                    text = "".join(c["choices"][0]["text"] for c in chunks)
                else:
                    text = json.loads(data)["choices"][0]["text"]
                assert text == expected[i], (i, text, expected[i])
                counts["right"] += 1
            except Exception as error:
                problems.append(repr(error))

    threads = [threading.Thread(target=client, args=(n,)) for n in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert counts["right"] and counts["left"] and counts["refused"], counts
    until(lambda: server.metric("running") == 0 and server.metric("waiting") == 0)
    assert all(s.answer is None for s in server.service.backend._slots)
    assert server.json("/v1/completions", bodies[1])[1]["choices"][0]["text"] == expected[1]
