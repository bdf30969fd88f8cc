"""`--tensor-parallel N`: one process for each rank on this machine, as torchrun would start them."""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from nstf.errors import NstfError

# Seconds that the other ranks have to say why, once one failed.
GRACE = 2.0


def as_ranks(count: int, work: Callable[..., None], *arguments: Any) -> None:
    """Runs `work(*arguments)` in `count` processes; only the first one's stdout is shown.

    Started by torchrun, this process is a rank itself and does the work at once. work: a function of a module.
    Raises the NstfError of the first rank that fails, and NstfError for one that dies.
    """
    if "RANK" in os.environ:
        _silence(int(os.environ["RANK"]))
        work(*arguments)
        return
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(count)]
    ranks = [
        context.Process(target=_rank, args=(rank, count, port, pipes[rank][1], work, arguments), daemon=True)
        for rank in range(count)
    ]
    for process in ranks:
        process.start()
    for _, told in pipes:
        told.close()
    try:
        _wait({pipe: rank for rank, (pipe, _) in enumerate(pipes)})
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _wait(pipes: dict[Any, int]) -> None:
    """Returns when every rank is done. Raises once one failed, since the others wait for it, with the reason."""
    failures: list[NstfError] = []
    while pipes and (found := wait(list(pipes), GRACE if failures else None)):
        ready: Any
        for ready in found:
            rank = pipes.pop(ready)
            try:
                failure = ready.recv()
            except EOFError:
                failure = NstfError(f"rank {rank} ended without a word; was it killed, for memory perhaps?")
            if failure is not None:
                failures.append(failure)
    if failures:
        from nstf.runtime.ranks import OtherFailed

        raise next((f for f in failures if not isinstance(f, OtherFailed)), failures[0])


def _rank(
    rank: int, count: int, port: int, told: Any, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))  # torch's threads
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks
    _silence(rank)
    try:
        work(*arguments)
        sys.stdout.flush()
    except NstfError as error:
        told.send(error)
    else:
        told.send(None)
        # Until the parent ends all: a rank that goes first takes its connections with it.
        with contextlib.suppress(EOFError, OSError):
            told.recv()


def _silence(rank: int) -> None:
    """All ranks compute the same; one says it."""
    if rank:
        sys.stdout = Path(os.devnull).open("w")
