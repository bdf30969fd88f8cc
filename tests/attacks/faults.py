"""A command whose every call into the system is seen, failed or written down (fault_io.c), and its log as a disk.

As a program (started by `runner` with the shim preloaded): reads one JSON request per line, answers with one JSON line each.
It forks for every request but those with `warm`, which it carries out itself so that everything is imported: a fault costs a
command, and no start.
"""

import ctypes
import errno
import gc
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COUNT, KILL_BEFORE, KILL_AFTER, FAIL, SHORT, INTERRUPT = range(6)


def build(folder: Path) -> Path | None:
    """The shim, compiled; None where there is no gcc or no Linux."""
    compiler = shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        return None
    out = folder / "fault_io.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(out), str(HERE / "fault_io.c"), "-ldl"]
    subprocess.run(command, check=True)
    return out


class Runner:
    """The process that carries the requests out."""

    def __init__(self, shim: Path) -> None:
        environment = {**os.environ, "LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1", "NSTF_SHIM": str(shim)}
        command = [sys.executable, str(Path(__file__))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the runner ended"
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def runner(shim: Path) -> Iterator[Runner]:
    made = Runner(shim)
    try:
        yield made
    finally:
        made.close()


@dataclass(frozen=True)
class Event:
    """One call: what was done, with which path (and other path), where in the file, with which bytes."""

    op: str
    path: str
    other: str = ""
    at: int = 0
    data: bytes = b""


def read_log(path: Path) -> list[Event]:
    """The events of a log of the shim, in order."""
    raw, found, at = path.read_bytes(), [], 0
    while at < len(raw):
        line = raw.index(b"\n", at)
        op, name, other, where, size = raw[at:line].decode().split("\t")
        data = raw[line + 1 : line + 1 + int(size)]
        found.append(Event(op, name, other, int(where), data))
        at = line + 1 + int(size)
    return found


@dataclass
class File:
    """Contents as every process sees them, and as they are on the disk at the latest fsync."""

    seen: bytearray = field(default_factory=bytearray)
    synced: bytes | None = None
    dirty: bool = True

    def content(self) -> bytes:
        """What every process sees."""
        if self.dirty or self.synced is None:
            return bytes(self.seen)
        return self.synced


@dataclass
class Disk:
    """A file system that keeps no promise but fsync's: names are certain after an fsync of their folder, contents after one
    of the file."""

    names: dict[str, File] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    # Names changed since the latest fsync of their folder: path -> what was there then.
    pending: dict[str, File | None] = field(default_factory=dict)
    # Of those, the ones that changed because a folder above them got another name: (its name before, its name now).
    moved: dict[str, tuple[str, str]] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        """Carries an event out."""
        path = event.path
        if event.op in ("create", "truncate"):
            if path not in self.names:
                self.pending.setdefault(path, None)
                self.names[path] = File()
            elif event.op == "truncate":
                self.names[path].seen.clear()
                self.names[path].dirty = True
        elif event.op == "write" and path in self.names:
            self.names[path].dirty = True
            seen = self.names[path].seen
            if len(seen) < event.at:
                seen.extend(bytes(event.at - len(seen)))
            seen[event.at : event.at + len(event.data)] = event.data
        elif event.op == "cut" and path in self.names:
            self.names[path].dirty = True
            seen = self.names[path].seen
            del seen[event.at :]
            seen.extend(bytes(event.at - len(seen)))
        elif event.op in ("rename", "exchange"):
            # Of a folder: every file below it.
            ours, theirs = self._below(path), self._below(event.other) if event.op == "exchange" else {}
            before = dict(self.names)
            for name in [*ours, *theirs]:
                self.names.pop(name)
            for files, old, new in ((ours, path, event.other), (theirs, event.other, path)):
                for name, file in files.items():
                    now = new + name[len(old) :]
                    # A name that is not certain in its folder may be missing from the folder that has moved, too.
                    together = (old, new) if name != old and name not in self.pending else None
                    self._change(name, file, together)
                    self._change(now, before.get(now), together)
                    self.names[now] = file
        elif event.op == "unlink" and path in self.names:
            self.pending.setdefault(path, self.names[path])
            del self.names[path]
        elif event.op == "mkdir":
            self.folders.add(path)
        elif event.op == "fsync":
            if path in self.names:
                file = self.names[path]
                file.synced, file.dirty = bytes(file.seen), False
            else:
                certain = [p for p in self.pending if str(Path(self.moved.get(p, (p,))[0]).parent) == path]
                for name in certain:
                    del self.pending[name]
                    self.moved.pop(name, None)

    def _below(self, path: str) -> dict[str, File]:
        """The files under a name: itself, or those of a folder."""
        return {n: f for n, f in self.names.items() if n == path or n.startswith(f"{path}/")}

    def _change(self, path: str, before: File | None, moved: tuple[str, str] | None) -> None:
        """A name is about to stand for something else."""
        self.pending.setdefault(path, before)
        if moved is not None:
            self.moved.setdefault(path, moved)

    def running(self) -> dict[str, bytes]:
        """What a process that looks now sees: also after a kill."""
        return {path: file.content() for path, file in self.names.items()}

    def after_power_loss(self, choice: Any) -> dict[str, bytes]:
        """One of the states that a power loss may leave. choice: `random.Random`, or anything with its `random`.

        A name that is not certain is there or not, independently of the others, but for those below a folder, which move
        with it; contents that are not certain are the old ones, the new ones, cut off, zeros, or half of each, page by page.
        """
        names: dict[str, File] = dict(self.names)
        undone: dict[frozenset[str], bool] = {}
        for path, before in self.pending.items():
            together = frozenset(self.moved.get(path, (path,)))
            if undone.setdefault(together, choice.random() < 0.5):
                if before is None:
                    names.pop(path, None)
                else:
                    names[path] = before
        return {path: _torn(file, choice) for path, file in names.items()}


def _torn(file: File, choice: Any) -> bytes:
    new, old = file.content(), file.synced
    if not file.dirty:
        return new
    kind = int(choice.random() * 5)
    if kind == 0:
        return old or b""
    if kind == 1:
        return new
    if kind == 2:
        return new[: int(choice.random() * (len(new) + 1))]
    if kind == 3:
        return bytes(len(new))
    pages = range(0, len(new), 4096)
    before = (old or b"").ljust(len(new), b"\0")
    return b"".join((new if choice.random() < 0.5 else before)[at : at + 4096] for at in pages)


def place(state: dict[str, bytes], recorded: Path, folder: Path) -> None:
    """Writes a state of the disk that was recorded under one folder under another."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path, content in state.items():
        to = folder / Path(path).relative_to(recorded)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(content)


def digest_of(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


# The rest runs in the process with the shim.


def _serve() -> None:
    import warnings

    warnings.filterwarnings("ignore")
    from nstf.integrations.serve import server
    from nstf_convert.cli import run

    shim = ctypes.CDLL(os.environ["NSTF_SHIM"])
    shim.nstf_fault_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    # The server is made whole, and ends where it would wait for its first client.
    server.run = lambda app, host, port, ready: ready(1)

    def carry_out(request: dict[str, Any]) -> dict[str, Any]:
        """In the child: a command with its fault, and what came of it."""
        folder = request["folder"]
        tempfile.tempdir = f"{folder}/tmp"  # temporary files belong to what may fail
        Path(tempfile.tempdir).mkdir(exist_ok=True)
        words = [word.replace("{folder}", folder) for word in request["words"]]
        log = -1
        if request.get("log"):
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        if request.get("interrupt"):  # as Ctrl-C does, but after so much time of the processor
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGPROF, lambda *_: signal.raise_signal(signal.SIGINT))
        if request.get("moment_s"):
            signal.setitimer(signal.ITIMER_PROF, request["moment_s"])
        mode, number = request.get("mode", COUNT), request.get("errno", errno.EIO)
        shim.nstf_fault_arm(folder.encode(), request.get("at", 0), mode, number, log)
        try:
            code = run(words)
        finally:
            shim.nstf_fault_disarm()
            signal.setitimer(signal.ITIMER_PROF, 0)
        return {"code": code, "calls": int(shim.nstf_fault_count())}

    for line in sys.stdin:
        request = json.loads(line)
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        out, into = os.pipe()
        said = tempfile.TemporaryFile()
        child = os.fork() if not request.get("warm") else 0
        if child == 0:
            kept = os.dup(1), os.dup(2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1), os.dup2(said.fileno(), 2)
            answer = {"code": None, "calls": 0}
            try:
                answer = carry_out(request)
            finally:
                os.write(into, json.dumps(answer).encode())
                sys.stdout.flush(), sys.stderr.flush()
                if not request.get("warm"):
                    os._exit(0)
                os.dup2(kept[0], 1), os.dup2(kept[1], 2)
                tempfile.tempdir = None
        os.close(into)
        with os.fdopen(out, "rb") as answers:
            text_found = answers.read()
        status = os.waitpid(child, 0)[1] if child else 0
        answer = json.loads(text_found) if text_found else {}
        said.seek(0)
        answer["lines"] = said.read().decode(errors="replace").splitlines()
        said.close()
        answer["cpu_s"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
        answer["signal"] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if request.get("warm"):
            gc.collect()
            gc.freeze()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
