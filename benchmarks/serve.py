"""Tokens per second and time to first token of `nstf serve` beside llama.cpp's llama-server, for 1, 4 and 8 clients.

    python benchmarks/serve.py model.nstf --gguf model.gguf --seconds 20 --rounds 3 --json out/serve.json

Both servers run on this machine with the same threads; one is idle while the other is asked. Clients continue texts of
`--prompt-tokens` words or so, each text another one, so no cache helps. llama-server is built once from the sdist of
llama-cpp-python (peers/llama_cpp.py) unless `--llama-server` names one. Which files lose as much accuracy as each other
is measured by benchmarks/quality.py; docs/serve.md names the pair.
"""

import argparse
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from peers.llama_cpp import build

TEXT = Path(__file__).parents[1] / "examples" / "data" / "heldout.txt"


@dataclass
class Load:
    """What some clients got: tokens per second over all of them, and seconds to the first token.

    processor_s: the server's own user and system time, which other work on the machine changes less than the clock.
    """

    server: str
    clients: int
    answers: int
    tokens: int
    seconds: float
    processor_s: float
    first_token_s: list[float]

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def start(command: list[str], port: int, log: Path) -> subprocess.Popen[bytes]:
    """A server that answers /health. Exits with the log's end where it does not."""
    with log.open("wb") as out:
        made = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    for _ in range(1200):
        if made.poll() is not None:
            break
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return made
        except OSError:
            pass
        time.sleep(0.1)
    made.kill()
    sys.exit(f"{command[0]} did not start:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-5:]))


def ask(port: int, prompt: str, tokens: int) -> tuple[int, float]:
    """(tokens of the answer, seconds to the first) of one streamed completion."""
    body = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(f"port {port}: {response.status} {response.read(300)!r}")
    first, pieces, stated = 0.0, 0, None
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        chunk: dict[str, Any] = json.loads(line[6:])
        if chunk.get("usage"):
            stated = chunk["usage"]["completion_tokens"]
        if chunk.get("choices") and chunk["choices"][0].get("text"):
            pieces += 1
            first = first or time.perf_counter() - began
    connection.close()
    return stated if stated is not None else pieces, first or time.perf_counter() - began


def processor_time(process: int) -> float:
    """Seconds of processor time of a process so far, all its threads together (Linux)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(
    server: str, process: int, port: int, clients: int, seconds: float, prompts: list[str], tokens: int
) -> Load:
    """Clients that ask again as soon as they are answered; no request begins after `seconds`."""
    found: list[tuple[int, float]] = []
    taken = iter(prompts)
    lock = threading.Lock()
    used = processor_time(process)
    began = time.perf_counter()

    def client() -> None:
        while time.perf_counter() - began < seconds:
            with lock:
                prompt = next(taken, None)
            if prompt is None:
                return
            result = ask(port, prompt, tokens)
            with lock:
                found.append(result)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    passed = time.perf_counter() - began
    used = processor_time(process) - used
    return Load(server, clients, len(found), sum(t for t, _ in found), passed, used, [f for _, f in found])


def texts(words: int) -> list[str]:
    """Pieces of the held-out text, none of which begins like another."""
    all_words = TEXT.read_text(encoding="utf-8").split()
    step = max(1, words // 4)
    return [" ".join(all_words[i : i + words]) for i in range(0, len(all_words) - words, step)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--gguf", type=Path, help="measure llama-server with this file, too")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-words", type=int, default=96)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", default="cpu", help="of nstf serve; llama-server stays on the CPU")
    parser.add_argument("--reproducible", action="store_true", help="nstf serve --reproducible, too")
    parser.add_argument("--out", type=Path, default=Path("out"), help="logs, and the build of llama.cpp")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end, too
    args.out.mkdir(parents=True, exist_ok=True)
    most = max(args.clients)
    threads = str(args.threads)
    nstf = [sys.executable, "-m", "nstf_convert", "serve", str(args.artifact)]
    nstf += ["--parallel", str(most), "--threads", threads, "--device", args.device]
    commands = {"nstf": nstf}
    if args.reproducible:
        commands["nstf --reproducible"] = [*nstf, "--reproducible"]
    if args.gguf:
        flags = ("-DLLAMA_BUILD_SERVER=ON",)
        tool = args.llama_server or build(args.out / "llama.cpp", ("llama-server",), args.threads, flags)[0]
        room = str(1024 * most)
        commands["llama-server"] = [
            str(tool),
            "-m",
            str(args.gguf),
            "-np",
            str(most),
            "-c",
            room,
            "-t",
            threads,
        ]
    prompts = texts(args.prompt_words)
    ports: dict[str, int] = {}
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            ports[name] = free_port()
            log = args.out / f"serve-{name.replace(' ', '')}.log"
            running[name] = start([*command, "--port", str(ports[name])], ports[name], log)
        found = measure(args, {name: (running[name].pid, port) for name, port in ports.items()}, prompts)
    finally:
        for server in running.values():
            server.terminate()
            server.wait(30)
    report(found, list(commands))
    if args.json:
        args.json.write_text(
            json.dumps([asdict(f) | {"tokens_per_second": f.speed} for f in found], indent=1)
        )


def measure(args: argparse.Namespace, servers: dict[str, tuple[int, int]], prompts: list[str]) -> list[Load]:
    """Every server (process, port) in turn for each number of clients, `rounds` times; a round takes other texts than the
    one before.
    """
    found = []
    used = dict.fromkeys(servers, 0)
    for _, port in servers.values():
        ask(port, "Once", 4)
    for clients in args.clients:
        for _ in range(args.rounds):
            for name, (process, port) in servers.items():
                fresh = prompts[used[name] :]
                if not fresh:
                    sys.exit("the held-out text is used up; ask for fewer --seconds or --rounds")
                found.append(load(name, process, port, clients, args.seconds, fresh, args.tokens))
                used[name] += found[-1].answers
                print(f"{name}, {clients} clients: {found[-1].speed:.1f} tokens/s", file=sys.stderr)
    return found


def report(found: list[Load], names: list[str]) -> None:
    """Medians of the rounds as a table, and how many times as fast as each other server the first one is: by the clock, and
    by its own processor time for a token.
    """
    print(f"{'server':<22}{'clients':>8}{'tokens/s':>10}{'first token, s':>16}", end="")
    print(f"{'processor ms/token':>20}{'times':>8}{'by processor':>14}")
    for clients in sorted({f.clients for f in found}):
        mine = {n: [f for f in found if (f.server, f.clients) == (n, clients)] for n in names}
        speed = {n: statistics.median(f.speed for f in rounds) for n, rounds in mine.items()}
        cost = {n: statistics.median(f.processor_s / f.tokens for f in r) for n, r in mine.items()}
        for name, rounds in mine.items():
            first = statistics.median(s for f in rounds for s in f.first_token_s)
            row = f"{name:<22}{clients:>8}{speed[name]:>10.1f}{first:>16.3f}{1000 * cost[name]:>20.2f}"
            if name != names[0]:
                row += f"{speed[names[0]] / speed[name]:>8.2f}{cost[name] / cost[names[0]]:>14.2f}"
            print(row)


if __name__ == "__main__":
    main()
