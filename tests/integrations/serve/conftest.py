"""The sample Llama in int8 with a chat template, and servers of it on this machine's own address."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

MODEL = Path(__file__).parents[3] / "examples" / "tiny_llama" / "model"
CHAT = "/v1/chat/completions"
HELLO = {
    "messages": [{"role": "user", "content": "Good morrow, my lord, what news from court today?"}],
    "max_tokens": 8,
    "temperature": 0,
}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this machine may be connected to."""
    before = socket.socket.connect

    def local(self: socket.socket, address: Any) -> None:
        assert not isinstance(address, tuple) or address[0] in ("127.0.0.1", "localhost"), address
        before(self, address)

    monkeypatch.setattr(socket.socket, "connect", local)


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(tmp_path_factory.mktemp("serve") / "tiny.nstf")


def write_sample(
    path: Path, template: str | None = TEMPLATE, generation: dict[str, Any] | None = None, **config: Any
) -> Path:
    from safetensors.torch import load_file

    from nstf.quantizers.stats import Stats
    from nstf.runtime.artifact import write_artifact
    from nstf_convert.pipeline.propose import recipe as recipes

    int8 = recipes.Recipe("int_grid", {"bits": 8, "group": 32, "symmetric": True})
    plain = recipes.Recipe("dense", {"dtype": "float32"})
    tensors = {
        name: recipes.encode(int8 if w.dim() == 2 else plain, w.float(), Stats(None), 1)
        for name, w in load_file(MODEL / "model.safetensors").items()
    }
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    files = {n: (MODEL / n).read_bytes() for n in names}
    if template is not None:
        settings = json.loads(files["tokenizer_config.json"]) | {"chat_template": template}
        files["tokenizer_config.json"] = json.dumps(settings).encode()
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | config).encode()
    settings = json.loads(files["generation_config.json"]) | (generation or {})
    files["generation_config.json"] = json.dumps(settings).encode()
    write_artifact(path, tensors, files, {})
    return path


@dataclass
class Served:
    """A server in a thread."""

    service: Any
    port: int

    def call(
        self, path: str, body: Any = None, method: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) of one request; a body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = {} if body is None else {"Content-Type": "application/json"}
        named = {k.replace("_", "-"): v for k, v in headers.items()}
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, data, kind | named)
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    def json(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        status, _, data = self.call(path, body, **headers)
        return status, json.loads(data)

    def metric(self, name: str) -> float:
        text = self.call("/metrics")[2].decode()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"nstf_{name}")
        )


@pytest.fixture
def serve(artifact: Path) -> Iterator[Callable[..., Served]]:
    """Starts servers: serve(path=None, key=None, max_body=..., **ServeOptions)."""
    uvicorn = pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    from nstf.integrations.serve.app import App
    from nstf.integrations.serve.connection import Connection
    from nstf.integrations.serve.server import allowed_hosts
    from nstf.integrations.serve.service import ServeOptions, Service

    running = []

    def start(
        path: Path = artifact, key: str | None = None, max_body: int = 1 << 20, **options: Any
    ) -> Served:
        service = Service(path, ServeOptions(**{"name": "tiny", "threads": 2, **options}))
        app = App(service, key, allowed_hosts("127.0.0.1", key), max_body)
        config = uvicorn.Config(
            app.routes(),
            host="127.0.0.1",
            port=0,
            http=Connection,
            ws="none",
            log_level="error",
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        until(lambda: server.started)
        running.append((server, thread, service))
        return Served(service, server.servers[0].sockets[0].getsockname()[1])

    yield start
    for server, thread, service in running:
        server.should_exit = True
        thread.join(20)
        service.close()
        assert not thread.is_alive()


def until(true: Callable[[], bool], seconds: float = 60) -> None:
    """Waits for something that another thread does."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@pytest.fixture
def server(serve: Callable[..., Served]) -> Served:
    return serve()
