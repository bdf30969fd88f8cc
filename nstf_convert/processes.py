"""Python processes beside the first: helpers (nstf_convert.pipeline.helpers), which import what a conversion needs and then
wait to be told, and one that compiles kernels.

A command begins with those that it may need before it imports torch itself, so that all import at the same time. Begun when
the checkpoint was open, helpers were ready when the first process had done most of their work. This is quick to import.
"""

import atexit
import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from nstf.runtime.imports import left_out

log = logging.getLogger("nstf")

# Helpers beside the first process: at most so many, each for so many of the machine's cores. There are none for checkpoints
# of other sizes: smaller ones are done before helpers are ready, and the matrices of larger ones keep a GPU busy.
MOST_BESIDE, CORES_EACH = 3, 4
SMALLEST_CHECKPOINT, LARGEST_CHECKPOINT = 64 << 20, 1 << 30

# What a helper's Python runs. It does not import the user's script, which may convert without asking what it is run as, and
# it ignores Ctrl-C from its first line on: the first process decides what an interruption means.
START = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path[:] = sys.argv[3:]
from nstf.runtime.imports import distributions_ahead, leave_out
leave_out(sys.argv[2].split())
distributions_ahead()
from nstf_convert.pipeline.helping import main
main(int(sys.argv[1]))
"""

# Which GPUs a process sees; on AMD's the first of these that is set.
VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
# Where Linux has a GPU of NVIDIA's, of AMD's.
NVIDIA, AMD = Path("/dev/nvidiactl"), Path("/dev/kfd")

COMPILES = "nstf.quantizers.rounding.compile_ahead"

Started = tuple["subprocess.Popen[bytes]", Connection]

_waiting: list[tuple[Mapping[str, str], Started]] = []
_compiling: list[tuple[str, "subprocess.Popen[bytes]"]] = []


def begin(model: str, device: str, threads: int | None, bounded: bool) -> None:
    """Starts the processes that a conversion may want beside this one. For a command, which leaves nothing running.

    Before torch is imported nobody knows what a GPU has room for: `end_waiting` ends those that are not wanted. bounded:
    whether the host's memory is; then there may be none for a compiler.
    """
    index = re.fullmatch(r"auto|cuda(?::(\d+))?", device)
    amd = not NVIDIA.exists()
    if index is None or (amd and not AMD.exists()):
        return
    try:
        seen = seeing_only(int(index[1] or 0), amd)
    except IndexError:
        return
    if not {"", "-1"}.isdisjoint(seen.values()):
        return
    cores, weights = threads or _cores(), _weights_bytes(Path(model))
    if not weights:
        return
    atexit.register(end_waiting)
    place = f"cuda:{index[1] or 0}"
    if not bounded and (process := _compiler(place, (cores + 1) // 2)) is not None:
        _compiling.append((place, process))
    if not SMALLEST_CHECKPOINT <= weights <= LARGEST_CHECKPOINT:
        return
    for _ in range(min(MOST_BESIDE, cores // CORES_EACH - 1)):
        if (found := _start(seen, True)) is not None:
            _waiting.append((seen, found))


def started(seen: Mapping[str, str], quiet: bool) -> Started | None:
    """A process and the connection to it, one that waits already if there is one; None where none can be started.

    seen: what the process's environment says of the GPUs that it sees. quiet: what it would warn of, the first process has
    said; with --debug it says it too.
    """
    for number, (own, found) in enumerate(_waiting):
        if own == seen and quiet:
            del _waiting[number]
            return found
    return _start(seen, quiet)


def compiler(device: str, workers: int) -> "subprocess.Popen[bytes] | None":
    """The process that compiles kernels for a device, so many at a time or as many as it began with; None where none can
    be started. What it has not compiled is compiled when it is first used."""
    for number, (own, process) in enumerate(_compiling):
        if own == device:
            del _compiling[number]
            return process
    return _compiler(device, workers)


def end_waiting() -> None:
    """Ends the processes that nobody has taken."""
    while _compiling:
        process = _compiling.pop()[1]
        process.kill()
        process.wait()
    while _waiting:
        process, connection = _waiting.pop()[1]
        connection.close()
        process.kill()
        process.wait()


def seeing_only(index: int, amd: bool) -> dict[str, str]:
    """What a process's environment says so that it has the GPU that torch numbers `index` for its first and only one: what
    asks for the current device, as graphs and compiled kernels do, gets that one in every thread. Raises IndexError where
    fewer are seen."""
    name = VISIBLE[0] if amd and VISIBLE[0] in os.environ else VISIBLE[1]
    visible = os.environ.get(name)
    return {name: str(index) if visible is None else visible.split(",")[index].strip()}


def _start(seen: Mapping[str, str], quiet: bool) -> Started | None:
    if not sys.executable:
        return None
    said = subprocess.DEVNULL if quiet and not log.isEnabledFor(logging.DEBUG) else None
    ours, theirs = Pipe()
    command = [sys.executable, "-c", START, str(theirs.fileno()), " ".join(left_out()), *sys.path]
    try:
        # Its stdin ends with this process.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=said,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **seen},
        )
    except OSError:
        ours.close()
        return None
    finally:
        theirs.close()
    return process, ours


def _compiler(device: str, workers: int) -> "subprocess.Popen[bytes] | None":
    if not sys.executable:
        return None
    # -P: nothing is imported from the folder that the user happens to be in.
    command = [sys.executable, "-P", "-m", COMPILES, device, str(workers)]
    nothing = subprocess.DEVNULL
    with suppress(OSError):
        return subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing)
    return None


def _cores() -> int:
    with suppress(AttributeError, OSError):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _weights_bytes(model: Path) -> int:
    """The bytes of a checkpoint's weights, as far as names tell them; 0 where there is none."""
    try:
        if model.is_file():
            return model.stat().st_size
        names = [p for p in model.iterdir() if p.suffix in (".safetensors", ".bin", ".onnx")]
        return sum(p.stat().st_size for p in names if p.is_file())
    except (OSError, ValueError):  # a path that is none is told by who opens it
        return 0
