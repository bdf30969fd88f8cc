"""`nstf serve` and `nstf chat` as processes: signals, ports, keys, what is typed."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nstf_convert.cli import run
from tests.integrations.serve.conftest import write_sample


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(tmp_path_factory.mktemp("cli") / "tiny.nstf")


@contextmanager
def process(*arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "nstf_convert", *map(str, arguments)]
    own = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=own
    ) as made:
        try:
            yield made
        finally:
            made.kill()


def port_of(server: subprocess.Popen[str]) -> int:
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"on http://127\.0\.0\.1:(\d+)", line):
            return int(found.group(1))
    raise AssertionError("the server did not start")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_after_the_answers(artifact: Path, number: signal.Signals) -> None:
    pytest.importorskip("uvicorn")
    with process("serve", artifact, "--port", 0, "--threads", 1, NSTF_API_KEY="abc") as server:
        connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=60)
        body = json.dumps({"prompt": "The king", "max_tokens": 100, "temperature": 0, "stream": True})
        head = {"Content-Type": "application/json", "Authorization": "Bearer abc"}
        connection.request("POST", "/v1/completions", body, head)
        response = connection.getresponse()
        assert response.status == 200 and response.read(20)
        server.send_signal(number)
        assert response.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        assert server.wait(30) == 0
        assert server.stderr is not None and "Traceback" not in server.stderr.read()


def test_a_port_in_use_is_named(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["serve", str(artifact), "--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_wrong_options_are_refused(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("uvicorn")
    empty = tmp_path / "key"
    empty.write_text("\n")
    for options, message in [
        (["--api-key-file", str(empty)], "API key"),
        (["--api-key-file", str(tmp_path / "none")], "cannot be read"),
        (["--kv-cache", "int3"], "--kv-cache"),
        (["--max-body", "lots"], "--max-body"),
        (["--chat-template", str(tmp_path / "none")], "--chat-template"),
    ]:
        assert run(["serve", str(artifact), *options]) == 2
        assert message in capsys.readouterr().err


def test_a_missing_package_is_named(
    artifact: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.startswith(("uvicorn", "nstf.integrations.serve"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert run(["serve", str(artifact)]) == 2
    assert "pip install" in capsys.readouterr().err


def test_a_conversation(artifact: Path) -> None:
    lines = [
        "Good morrow",
        "/system Be brief.",
        "And you?",
        "/nonsense",
        "/reset",
        "Good morrow",
        "/exit",
        "never read",
    ]
    with process("chat", artifact, "--max-new-tokens", 8, "--temperature", 0) as chat:
        out, errors = chat.communicate("\n".join(lines) + "\n", timeout=120)
    assert chat.returncode == 0, errors
    answers = out.splitlines()
    assert answers and "unknown command /nonsense" in errors and "forgotten" in errors
    assert "the system message is set" in errors


def test_control_c_stops_the_answer_and_not_the_program(artifact: Path) -> None:
    with process("chat", artifact, "--temperature", 0, "--threads", 1) as chat:
        assert chat.stdin is not None and chat.stdout is not None and chat.stderr is not None
        guard = threading.Timer(120, chat.kill)
        guard.start()
        try:
            stopped = any(_interrupted(chat) for _ in range(10))
            _, errors = chat.communicate("/reset\n/exit\n", timeout=60)
        finally:
            guard.cancel()
        assert stopped and chat.returncode == 0 and "forgotten" in errors


def _interrupted(chat: subprocess.Popen[str]) -> bool:
    """Ctrl-C shortly after a question. False where the small model had answered before the signal came."""
    assert chat.stdin is not None and chat.stdout is not None and chat.stderr is not None
    chat.stdin.write("/reset\nTell me all\n")
    chat.stdin.flush()
    chat.stdout.read(1)
    chat.send_signal(signal.SIGINT)
    said = ""
    while not said.endswith(("(stopped)", "ends\n")) and (more := chat.stderr.read(1)):
        said += more
    return said.endswith("(stopped)")


def test_generate_draws_with_all_options(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = [
        "--temperature",
        "0.9",
        "--top-k",
        "40",
        "--top-p",
        "0.9",
        "--min-p",
        "0.01",
        "--repetition-penalty",
        "1.1",
    ]

    def text(*options: str) -> str:
        assert run(["generate", str(artifact), "The king", "--max-new-tokens", "24", *options]) == 0
        return capsys.readouterr().out

    first = text(*drawn, "--seed", "3")
    assert text(*drawn, "--seed", "3") == first
    assert len({text(*drawn, "--seed", str(s)) for s in range(4)}) > 1
    stop = first.strip()[6:9]
    assert text(*drawn, "--seed", "3", "--stop", stop).rstrip("\n") == first[: first.index(stop)]
    assert text("--repetition-penalty", "1.8") != text()
    for options, message in [
        (["--top-k", "3"], "--temperature"),
        (["--stop", ""], "--stop"),
        (["--temperature", "1", "--top-p", "0"], "top_p"),
    ]:
        assert run(["generate", str(artifact), "The king", *options]) == 2
        assert message in capsys.readouterr().err
