"""`--tensor-parallel N`: one process for each rank on this machine, as torchrun would start them."""

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import Any

from nstf.errors import NstfError, UsageError
from nstf_convert.cli.output import setup_logging
from nstf_convert.cli.running import open_streams

# Seconds that the other ranks have to say why, once one failed.
GRACE = 2.0
# Each is a process that imports torch: beyond, a wrong number would keep a machine busy for minutes.
RANKS_A_CORE = 8


class RankDied(NstfError):
    """A rank is gone and could not say why."""


class RankFailed(NstfError):
    """Another error than ours in a rank, in one line. It may follow from another rank's end, such as a lost connection."""


def as_ranks(count: int, work: Callable[..., None], *arguments: Any, own_cores: bool = False) -> None:
    """Runs `work(*arguments)` in `count` processes; only the first one's stdout is shown.

    Started by torchrun, this process is a rank itself and does the work at once. work: a function of a module. own_cores:
    each process that is started here has its share of the cores.
    Raises the error of the first rank that fails, always as an NstfError, and NstfError for one that dies; BrokenPipeError
    where nobody reads stdout.
    """
    if "RANK" in os.environ:
        rank = os.environ["RANK"]
        if not (rank.isascii() and rank.isdecimal()):
            raise UsageError(f"RANK is {rank[:40]!r} in the environment: start by torchrun, or take it out")
        _silence(int(rank[:9]))
        work(*arguments)
        return
    if count > (most := RANKS_A_CORE * _cores()):
        raise UsageError(f"{count} ranks are too many for the {_cores()} cores here: give at most {most}")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    level = logging.getLogger("nstf_convert").level
    pipes = [context.Pipe() for _ in range(count)]
    ranks = [
        context.Process(
            target=_rank,
            args=(rank, count, port, level, pipes[rank][1], own_cores, work, arguments),
            daemon=True,
        )
        for rank in range(count)
    ]
    try:
        with _control_c_waits():
            for process in ranks:
                process.start()
        for _, told in pipes:
            told.close()
        failures = _wait({pipe: rank for rank, (pipe, _) in enumerate(pipes)})
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()
    # Only now: looking for the cause imports torch, seconds in which the other ranks would go on waiting.
    if failures:
        raise _cause(failures)


@contextlib.contextmanager
def _control_c_waits() -> Iterator[None]:
    """Processes that start inside begin with it blocked: a terminal sends it to all, and they import for a second."""
    resource_tracker.ensure_running()  # by the first start, it would end the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(pipes: dict[Any, int]) -> list[Exception]:
    """What failed, once every rank is done, or soon after one failed, since the others wait for it."""
    failures: list[Exception] = []
    while pipes and (found := wait(list(pipes), GRACE if failures else None)):
        ready: Any
        for ready in found:
            rank = pipes.pop(ready)
            try:
                failure = ready.recv()
            except (EOFError, OSError):
                failure = RankDied(f"rank {rank} ended without a word; was it killed, for memory perhaps?")
            if failure is not None:
                failures.append(failure)
    return failures


def _cause(failures: list[Exception]) -> Exception:
    """The failure that the others most likely follow from."""
    from nstf.runtime.ranks import OtherFailed

    followers = (RankDied, RankFailed, OtherFailed)  # from likely cause to likely effect
    return min(failures, key=lambda f: next((i for i, k in enumerate(followers, 1) if isinstance(f, k)), 0))


def _rank(
    rank: int,
    count: int,
    port: int,
    level: int,
    told: Any,
    own_cores: bool,
    work: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    open_streams()
    Thread(target=_end_with_parent, daemon=True).start()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # gloo would listen where the host's name leads
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // count)))  # torch's threads
    if own_cores:
        from nstf.runtime.ranks import use_own_cores

        use_own_cores(rank, count)
    _silence(rank)
    debug = level == logging.DEBUG
    # Every rank does the same stages: one tells of them.
    setup_logging(level == logging.WARNING or (rank > 0 and not debug), level == logging.INFO, debug)
    failure: Exception | None = None
    try:
        work(*arguments)
        sys.stdout.flush()
    except Exception as error:
        if debug:
            traceback.print_exc()
        failure = _told(error, rank)
    # Until the parent ends all: a rank that goes first takes its connections with it, and the others fail for that.
    with contextlib.suppress(EOFError, OSError):
        told.send(failure)
        told.recv()
    os._exit(0)  # not by way of another flush to a stdout that may be closed


def _told(error: Exception, rank: int) -> Exception:
    """What the parent is sent: our errors as they are, others as the line that the command would print. A stdout that nobody
    reads any more is none: the command ends as it does in one process."""
    if isinstance(error, NstfError | BrokenPipeError):
        return error
    from nstf_convert.cli.messages import explain

    return RankFailed(f"rank {rank}: {explain(error, ())[1]}")


def _end_with_parent() -> None:
    """A parent that is killed ends nobody itself."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _cores() -> int:
    """Those that this process may use: a container or taskset may give it fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _silence(rank: int) -> None:
    """All ranks compute the same; one says it."""
    if rank:
        sys.stdout = Path(os.devnull).open("w")
