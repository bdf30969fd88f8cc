"""Runs a program and samples what it uses: memory of all its processes, and of each GPU how busy it is and its memory."""

import contextlib
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

MEMORY_PERIOD_S = 0.25
GPU_PERIOD_MS = 200


@dataclass
class Usage:
    """What was seen. Times are seconds since the start; bytes are the largest sums over the program's processes.

    processor_seconds: of all its processes and threads. host_bytes: or the kernel's own high-water mark of the largest
    process, if that is more. anonymous_bytes and file_bytes: resident memory of its own and of mapped files, which the
    system can take back. gpu: (time, device, share busy since the last sample, bytes in use beyond what was there before).
    lines: (time, line of stderr).
    """

    seconds: float = 0.0
    processor_seconds: float = 0.0
    code: int = 0
    host_bytes: int = 0
    anonymous_bytes: int = 0
    file_bytes: int = 0
    gpu: list[tuple[float, int, float, int]] = field(default_factory=list)
    lines: list[tuple[float, str]] = field(default_factory=list)

    @property
    def gpu_bytes(self) -> int | None:
        """The most memory used on one GPU; None without a GPU."""
        return max((used for _, _, _, used in self.gpu), default=None)

    def busy(self, spans: Sequence[tuple[float, float]]) -> float | None:
        """The mean share of the time in `spans` that the GPUs in use were busy; None without samples there."""
        used = {device for _, device, _, size in self.gpu if size > 64 << 20}
        inside = [b for t, d, b, _ in self.gpu if d in used and any(a <= t <= z for a, z in spans)]
        return sum(inside) / len(inside) if inside else None


def run(command: Sequence[str]) -> tuple[str, Usage]:
    """(stdout, what it used) of a program; its exit code is in the usage."""
    usage = Usage()
    gpu = _Gpu()
    before = _children_seconds()
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    stop = threading.Event()
    threads = [
        threading.Thread(target=_read_lines, args=(process, start, usage)),
        threading.Thread(target=_sample_memory, args=(process.pid, usage, stop)),
        threading.Thread(target=gpu.sample, args=(start, usage)),
    ]
    for thread in threads:
        thread.start()
    assert process.stdout is not None
    out = process.stdout.read()
    usage.code = process.wait()
    usage.seconds = time.monotonic() - start
    usage.processor_seconds = _children_seconds() - before
    stop.set()
    gpu.stop()
    for thread in threads:
        thread.join()
    return out, usage


def _children_seconds() -> float:
    """Processor time of the children that have ended, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _read_lines(process: "subprocess.Popen[str]", start: float, usage: Usage) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        usage.lines.append((time.monotonic() - start, line.rstrip()))


def _sample_memory(pid: int, usage: Usage, stop: threading.Event) -> None:
    while True:
        resident = own = 0
        for process in _family(pid):
            # A process may end between two reads, and other systems have no such files.
            with contextlib.suppress(OSError, KeyError):
                found = _fields(Path(f"/proc/{process}/smaps_rollup"))
                resident, own = resident + found["Rss"], own + found["Anonymous"]
                mark = _fields(Path(f"/proc/{process}/status"))["VmHWM"]
                usage.host_bytes = max(usage.host_bytes, mark)
        usage.host_bytes = max(usage.host_bytes, resident)
        usage.anonymous_bytes = max(usage.anonymous_bytes, own)
        usage.file_bytes = max(usage.file_bytes, resident - own)
        if stop.wait(MEMORY_PERIOD_S):
            return


def _family(pid: int) -> list[int]:
    """A process and all below it."""
    found, pending = [], [pid]
    while pending:
        found.append(pending.pop())
        for file in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                pending += [int(child) for child in file.read_text().split()]
    return found


def _fields(path: Path) -> dict[str, int]:
    """The sizes in a file of /proc, in bytes."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0].rstrip(":"): 1024 * int(row[1]) for row in rows if len(row) == 3 and row[2] == "kB"}


class _Gpu:
    """nvidia-smi, asked five times a second; nothing where there is none."""

    QUERY = "--query-gpu=index,utilization.gpu,memory.used"

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._before: dict[int, int] = {}
        if tool := shutil.which("nvidia-smi"):
            command = [tool, self.QUERY, "--format=csv,noheader,nounits"]
            once = subprocess.run(command, capture_output=True, text=True)
            self._before = {device: used for device, _, used in map(_reading, once.stdout.splitlines())}
            self._process = subprocess.Popen(
                [*command, "-lms", str(GPU_PERIOD_MS)], stdout=subprocess.PIPE, text=True
            )

    def sample(self, start: float, usage: Usage) -> None:
        if self._process is None or self._process.stdout is None:
            return
        for line in self._process.stdout:
            device, busy, used = _reading(line)
            more = max(used - self._before.get(device, 0), 0)
            usage.gpu.append((time.monotonic() - start, device, busy, more))

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


def _reading(line: str) -> tuple[int, float, int]:
    """(device, share busy, bytes in use) of a line `0, 87, 1234`."""
    device, busy, used = (part.strip() for part in line.split(","))
    return int(device), float(busy) / 100, int(used) << 20
