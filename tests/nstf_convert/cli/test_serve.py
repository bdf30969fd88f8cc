"""`nstf serve` and `nstf chat` as processes: signals, ports, keys, what is typed."""

import fcntl
import http.client
import inspect
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import typer

from nstf.errors import UnsupportedError, UsageError
from nstf_convert.cli import run, serve
from tests.integrations.serve.conftest import write_sample


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(tmp_path_factory.mktemp("cli") / "tiny.nstf")


@contextmanager
def process(
    *arguments: object, stdout: int = subprocess.PIPE, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "nstf_convert", *map(str, arguments)]
    own = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
    with subprocess.Popen(
        command,
        preexec_fn=_heeds_control_c,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=own,
    ) as made:
        try:
            yield made
        finally:
            made.kill()


def _heeds_control_c() -> None:
    """A shell starts what runs in its background with Ctrl-C ignored, and so its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def port_of(server: subprocess.Popen[str]) -> int:
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"on http://127\.0\.0\.1:(\d+)", line):
            return int(found.group(1))
    raise AssertionError("the server did not start")


def test_the_loopback_by_another_name_refuses_names_of_web_pages(artifact: Path) -> None:
    pytest.importorskip("uvicorn")
    with process("serve", artifact, "--port", 0, "--threads", 1, "--host", "127.1") as server:
        assert server.stderr is not None
        said = server.stderr.readline()
        found = re.search(r"on http://127\.1:(\d+)", said)
        assert found is not None, said
        for name, status in (("evil.example", 403), ("127.1", 200), ("localhost", 200)):
            connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
            connection.request("GET", "/v1/models", headers={"Host": f"{name}:{found[1]}"})
            assert connection.getresponse().status == status, name
            connection.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
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
        assert server.stderr is not None
        said = server.stderr.read()
        assert "Traceback" not in said and "leaked" not in said


def test_a_thread_that_never_ends_does_not_keep_the_server(artifact: Path) -> None:
    """A schema was read on while nobody waited for it: uvicorn wrote a traceback, and the process stayed."""
    pytest.importorskip("uvicorn")
    program = (
        "import sys, time; from nstf.integrations.serve import server, service\n"
        "server.GRACE_SECONDS, server.BEGINNING_SECONDS = 0.2, 0.3\n"
        "service.Service.begin = lambda *_: time.sleep(100)\n"
        "from nstf_convert.cli import main; sys.argv[1:1] = ['serve']; main()\n"
    )
    words = [sys.executable, "-c", program, str(artifact), "--port", "0", "--threads", "1"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=60)
        connection.request(
            "POST", "/v1/completions", json.dumps({"prompt": "a"}), {"Content-Type": "application/json"}
        )
        time.sleep(0.5)
        server.send_signal(signal.SIGTERM)
        response = connection.getresponse()
        assert response.status == 503 and b"shutting down" in response.read()
        assert server.wait(30) == 0 and server.stderr is not None
        assert "Traceback" not in server.stderr.read()


@pytest.mark.parametrize("gap", [0.02, *(pytest.param(gap, marks=pytest.mark.slow) for gap in (0.0, 0.1))])
def test_a_second_ctrl_c_writes_no_traceback(artifact: Path, gap: float) -> None:
    pytest.importorskip("uvicorn")
    with process("serve", artifact, "--port", 0, "--threads", 1) as server:
        port_of(server)
        server.send_signal(signal.SIGINT)
        time.sleep(gap)
        server.send_signal(signal.SIGINT)
        assert server.stderr is not None
        assert server.stderr.read() in ("", "error: interrupted\n")  # after the server's end
        assert server.wait(30) in (0, 130)


def test_a_second_ctrl_c_ends_the_answers(artifact: Path) -> None:
    pytest.importorskip("uvicorn")
    with process("serve", artifact, "--port", 0, "--threads", 1, "--parallel", 1) as server:
        port, body = port_of(server), {"prompt": "The king", "max_tokens": 490, "temperature": 0}
        clients = [http.client.HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(16)]
        for client in clients:  # a tenth of a second each
            client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        for _ in range(2):
            time.sleep(0.1)
            server.send_signal(signal.SIGINT)
        assert b"shutting down" in clients[-1].getresponse().read()
        for client in clients:
            client.close()
        assert server.wait(30) == 0 and server.stderr is not None
        assert server.stderr.read() == ""


def test_clients_that_hold_all_connections_fill_no_log(artifact: Path) -> None:
    pytest.importorskip("uvicorn")
    with process("serve", artifact, "--port", 0, "--threads", 1) as server:
        port = port_of(server)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (64, 64))
        held = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(100)]
        refused = 0
        for connection in held:
            connection.settimeout(0.01)
            with suppress(TimeoutError, ConnectionResetError):
                refused += b" 503 " in connection.recv(1000)
        for connection in held:
            connection.close()
        assert refused >= 30
        end = time.monotonic() + 60
        answer = b""
        while b'"ok"' not in answer and time.monotonic() < end:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                answer = b"".join(iter(lambda: connection.recv(1000), b""))
        assert b'"ok"' in answer
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0 and server.stderr is not None
        said = server.stderr.read()
        assert "Traceback" not in said and len(said) < 1000


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def _is_limited() -> None:
    """To far more than there is: what a server does under a limit, it does then."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 44, resource.getrlimit(resource.RLIMIT_AS)[1]))


def test_eight_requests_at_once_with_little_memory_left_end_no_server(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance and tokenizers end the process where they find none: with 64, 100 and 330 MiB left they did."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("llguidance")
    monkeypatch.setattr(sys.modules[__name__], "_heeds_control_c", _is_limited)
    with process("serve", artifact, "--port", 0, "--threads", 1) as server:
        port, found = port_of(server), []

        def ask(schema: Any) -> None:
            body: dict[str, Any] = {"prompt": "Once upon a time " * 20, "max_tokens": 40}
            if schema is not None:
                body["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            found.append(client.getresponse().status)
            client.close()

        def limit(more: float | None) -> None:
            size = Path(f"/proc/{server.pid}/statm").read_text().split()[0]
            most = int(size) * resource.getpagesize() + int((more or 0) * 2**20)
            own = resource.prlimit(server.pid, resource.RLIMIT_AS)[1]
            resource.prlimit(server.pid, resource.RLIMIT_AS, (1 << 44 if more is None else most, own))

        many = {"enum": list(range(10_000))}
        for more, schemas in (
            (2, [None, SCHEMA]), (64, [SCHEMA]), (100, [None, many]),
            (192, [None]), (330, [many]), (400, [SCHEMA, many, None]),
        ):  # fmt: skip
            limit(more)
            clients = [
                threading.Thread(target=ask, args=(schemas[i % len(schemas)],), daemon=True) for i in range(8)
            ]
            for each in clients:
                each.start()
            for each in clients:
                each.join(60)
            assert len(found) == 8 and set(found) <= {200, 503}, (more, found)
            assert server.poll() is None
            found.clear()
        limit(None)
        ask(SCHEMA)
        assert found == [200]
        limit(0.1)  # not enough for the thread that ends the answers
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0 and server.stderr is not None
        assert "Traceback" not in server.stderr.read()


def test_a_port_in_use_is_named(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["serve", str(artifact), "--port", str(port)]) == 1
    said = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}" in said and "(--port, --host)" in said


def test_wrong_options_are_refused(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("uvicorn")
    empty = tmp_path / "key"
    empty.write_text("\n")
    (tmp_path / "long").write_text("k" * 5000)
    for options, message in [
        (["--api-key-file", str(empty)], "API key"),
        (["--api-key-file", str(tmp_path / "none")], "cannot be read"),
        (["--api-key-file", str(tmp_path / "long")], "has 5000 letters; clients can send 4096"),
        (["--kv-cache", "int3"], "--kv-cache"),
        (["--max-body", "lots"], "--max-body"),
        (["--chat-template", str(tmp_path / "none")], "--chat-template"),
        (["--kernels", str(empty)], "--kernels is for a GPU"),
        (["--device", "cuda", "--exact"], "--device cpu"),
    ]:
        assert run(["serve", str(artifact), *options]) == 2
        assert message in capsys.readouterr().err
    assert run(["generate", str(artifact), "The king", "--kernels", str(empty)]) == 2
    assert "--kernels is for a GPU" in capsys.readouterr().err


def test_every_option_of_serve_arrives(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("uvicorn")
    from nstf.errors import UnsupportedError
    from nstf.integrations.serve import server, service

    key, template = tmp_path / "key", tmp_path / "template"
    key.write_text("k-1\n")
    template.write_text("{{ messages }}")
    seen: list[Any] = []

    def serve(app: Any, host: str, port: int, ready: Any) -> None:
        ready(port)
        seen.extend((app, app.service, host, port))

    monkeypatch.setattr(server, "run", serve)
    checks: dict[str, tuple[tuple[str, ...], Any]] = {
        "host": (("::1",), lambda a, s: seen[2] == "::1"),
        "port": (("8123",), lambda a, s: seen[3] == 8123),
        "api_key_file": ((str(key),), lambda a, s: (a._key, a._hosts) == ("k-1", None)),
        "parallel": (("3",), lambda a, s: len(s.backend._slots) == 3),
        "queue": (("5",), lambda a, s: s.backend._queue_size == 5),
        "context": (("77",), lambda a, s: s.context == 77),
        "max_tokens": (("9",), lambda a, s: s.options.max_tokens == 9),
        "max_body": (("1KiB",), lambda a, s: a._max_body == 1024),
        "name": (("other",), lambda a, s: s.options.name == "other"),
        "chat_template": ((str(template),), lambda a, s: s.prompts.own.chat_template == "{{ messages }}"),
        "reproducible": ((), lambda a, s: s.backend._batch._least == 4 and s.backend._reproducible),
        "prefix_reuse": (("--no-prefix-reuse",), lambda a, s: not s.backend._reuse),
        "exact": ((), lambda a, s: not any("int8 x" in k for k in s.backend._batch.engine.kernels.values())),
        "kv_cache": (("int8",), lambda a, s: s.options.kv_cache == "int8"),
        "attention": (("full",), lambda a, s: s.options.attention == "full"),
        "device": (("cpu",), lambda a, s: s.backend.name == "CPU engine"),
        "threads": (("1",), lambda a, s: s.backend._batch.engine.threads == 1),
    }
    from nstf_convert.cli.serve import serve as command

    own = set(inspect.signature(command).parameters)
    assert own == {*checks, "artifact", "kernels"}, "an option that no test gives"
    for name, (values, holds) in checks.items():
        seen.clear()
        words = (
            values if values and values[0].startswith("--no-") else (f"--{name.replace('_', '-')}", *values)
        )
        assert run(["serve", str(artifact), *words]) == 0, words
        assert holds(seen[0], seen[1]), words
    assert "on http://" in capsys.readouterr().err

    assert run(["serve", str(artifact), "--attention", "planned"]) == 2
    assert "no attention plan" in capsys.readouterr().err

    # Options of the engine alone are refused where it does not run the model, and --kernels where no GPU is.
    def other(*_: object, **__: object) -> Any:
        raise UnsupportedError("another architecture")

    monkeypatch.setattr("nstf.runtime.engine.Engine.open", other)
    for words in (("--kv-cache", "int8"), ("--reproducible",)):
        for verb in ("serve", "chat") if words[0] == "--kv-cache" else ("serve",):
            assert run([verb, str(artifact), *words]) == 2
            said = capsys.readouterr().err
            assert words[0] in said and "another architecture" in said
    assert service.Service(artifact, service.ServeOptions("x")).backend.name == "decoder without graphs"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("a\nb\r\tc", "a b c"),
        ("\u202eabc\udcff", "\\u202eabc\\udcff"),
        (" \n", None),
        ("", None),
    ],
)
def test_a_name_with_control_characters_reaches_no_terminal_and_no_client(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str, shown: str | None
) -> None:
    pytest.importorskip("uvicorn")
    from nstf.integrations.serve import server

    seen: list[str] = []

    def serve(app: Any, host: str, port: int, ready: Any) -> None:
        ready(port)
        seen.append(app.service.options.name)

    monkeypatch.setattr(server, "run", serve)
    assert run(["serve", str(artifact), "--name", name]) == 0
    assert seen == [shown or artifact.stem]  # one of blanks alone was no name at all
    said = capsys.readouterr().err
    assert f"{seen[0]} on http://" in said and all(line.isprintable() for line in said.splitlines())


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


def test_a_template_that_fails_is_an_error_of_a_chat_by_a_pipe(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ raise_exception('no') }}")
    with process("chat", artifact, "--chat-template", tmp_path / "t.jinja") as chat:
        _, errors = chat.communicate("Good morrow\n", timeout=120)
    assert chat.returncode == 1 and errors.startswith("error: ")


def test_control_c_stops_the_answer_and_not_the_program(artifact: Path) -> None:
    # A pipe with room for six bytes: the program waits in the midst of its answer until they are read.
    read_end, write_end = os.pipe()
    room = fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 1)
    os.write(write_end, b"." * (room - 6))
    with (
        process("chat", artifact, "--temperature", 0, "--threads", 1, stdout=write_end) as chat,
        os.fdopen(read_end, "rb") as answers,
    ):
        os.close(write_end)
        assert chat.stdin is not None
        chat.stdin.write("Tell me all\n")
        chat.stdin.flush()
        limit = time.monotonic() + 100
        while waiting(read_end) < room:
            assert chat.poll() is None and time.monotonic() < limit
            time.sleep(0.01)
        chat.send_signal(signal.SIGINT)
        time.sleep(0.2)  # what is written now is read after the signal
        drained = threading.Thread(target=lambda: printed.append(answers.read()))
        printed: list[bytes] = []
        drained.start()
        _, errors = chat.communicate("/reset\n/exit\n", timeout=60)
        drained.join()
    assert chat.returncode == 0 and "(stopped)" in errors and "forgotten" in errors
    assert len(printed[0]) < room + 20  # not the 500 tokens that it would have been


def waiting(descriptor: int) -> int:
    """Bytes in a pipe that were not read."""
    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4), sys.byteorder)


def _refuse(*_: object, **__: object) -> None:
    raise UnsupportedError("not by the engine")


def test_generate_draws_with_all_options(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    own = write_sample(tmp_path / "own.nstf", generation={"repetition_penalty": 1.8, "top_k": 1})
    mine = str(own)

    def of_its_own(*options: str) -> str:
        assert run(["generate", mine, "The king", "--max-new-tokens", "24", *options]) == 0
        return capsys.readouterr().out

    # The file's settings hold unless others are stated, also those that switch them off; by the engine and by transformers.
    assert of_its_own() == text("--repetition-penalty", "1.8") != text()
    assert of_its_own("--repetition-penalty", "1") == text()
    draw = ("--temperature", "1", "--seed", "5")
    off = ("--repetition-penalty", "1", "--top-k", "0", "--min-p", "0")
    assert of_its_own(*draw, "--repetition-penalty", "1") == text() == text(*draw, "--top-k", "1")
    assert of_its_own(*draw, *off) == text(*draw, "--top-k", "0") != text()
    monkeypatch.setattr("nstf.runtime.engine.Engine.__init__", _refuse)
    assert of_its_own("--repetition-penalty", "1") != of_its_own()
    assert of_its_own(*draw, *off) != of_its_own(*draw, "--repetition-penalty", "1")
    monkeypatch.undo()
    for options, message in [
        (["--top-k", "3"], "--temperature"),
        (["--stop", ""], "--stop"),
        (["--temperature", "1", "--top-p", "0"], "top_p"),
    ]:
        assert run(["generate", str(artifact), "The king", *options]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("host", ["", " ", "x" * 64, "\0", "\udcff", "256.1.1.1"])
def test_a_host_that_is_none_is_one_line(host: str) -> None:
    """asyncio's traceback of a name that is too long had sixty lines, and an empty one took every address."""
    from nstf.integrations.serve.server import AddressError, run

    with pytest.raises(AddressError, match="cannot listen on"):
        run(None, host, 0, print)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["--api-key-file", "--chat-template"])
def test_a_device_that_never_ends_is_no_text(artifact: Path, option: str, capsys: Any) -> None:
    assert run(["serve", str(artifact), option, "/dev/zero"]) == 2
    assert "longer than 16777216 bytes" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--api-key-file", "--chat-template"])
def test_a_pipe_that_nobody_writes_into_is_not_waited_for_without_end(
    tmp_path: Path, artifact: Path, option: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(serve, "WAITED", 0.2)
    assert run(["serve", str(artifact), option, str(tmp_path / "pipe")]) == 2
    assert "nobody wrote into it for 0.2 seconds" in capsys.readouterr().err


def test_a_text_may_come_through_a_pipe_and_in_parts(tmp_path: Path) -> None:
    """As `--api-key-file <(command)` hands it on."""
    os.mkfifo(tmp_path / "pipe")

    def write() -> None:
        with (tmp_path / "pipe").open("wb", buffering=0) as pipe:
            pipe.write(b"one ")
            time.sleep(0.1)
            pipe.write(b"two")

    writer = threading.Thread(target=write)
    writer.start()
    assert serve.read_text(tmp_path / "pipe", "--api-key-file") == "one two"
    writer.join()


def test_a_text_that_is_too_long_is_not_said_to_be_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that are read may end in the middle of a letter."""
    monkeypatch.setattr(serve, "MOST_TEXT", 2)
    (tmp_path / "text").write_text("éé", encoding="utf-8")
    with pytest.raises(UsageError, match="longer than 2 bytes"):
        serve.read_text(tmp_path / "text", "--chat-template")


def test_a_line_that_is_no_text_does_not_end_a_chat(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from nstf_convert.cli.chat import Conversation

    typed = iter(["a\udcff", "/system b\udcff", "/exit", "never reached"])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    with pytest.raises(typer.Exit) as ended:  # the lines are of a pipe
        Conversation(None, None, (), None, None).run()  # type: ignore[arg-type]
    assert ended.value.exit_code == 1
    assert (
        capsys.readouterr().err == 2 * "error: this line is not UTF-8 text\n"
        and next(typed) == "never reached"
    )


def test_an_empty_key_of_the_environment_is_no_open_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """It meant to have one: the server answered everybody."""
    monkeypatch.setenv("NSTF_API_KEY", "")
    path = write_sample(tmp_path / "m.nstf")
    assert run(["serve", str(path), "--port", "0"]) == 2
    assert (
        "the API key in NSTF_API_KEY must be printable ASCII without spaces, not empty"
        in capsys.readouterr().err
    )
