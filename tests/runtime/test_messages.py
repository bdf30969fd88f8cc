"""What keeps a core awake ends with its block, and each process is left its own cores."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nstf.kernels.cpu import ext
from nstf.runtime import messages
from nstf.runtime.messages import awake
from nstf.runtime.ranks import use_own_cores

THREADS = Path("/proc/self/task")


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or ext is None, reason="needs Linux and the extension"
)
def test_a_thread_that_keeps_the_core_awake_ends_with_its_block() -> None:
    before = {*THREADS.iterdir()}
    with pytest.raises(KeyError), awake():
        (own,) = {*THREADS.iterdir()} - before
        raise KeyError(own)
    assert not {*THREADS.iterdir()} - before


def test_where_no_thread_can_be_started_the_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def awake_thread() -> None:
        raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr(messages, "ext", SimpleNamespace(Awake=awake_thread))
    with awake():
        pass
    with pytest.raises(KeyError), awake():
        raise KeyError


@pytest.mark.parametrize(
    ("cores", "rank", "ranks", "own"),
    [({2, 3, 5, 7}, 1, 2, [5, 7]), ({0, 1, 2}, 0, 2, [0]), ({4}, 1, 2, None)],
)
def test_each_of_a_hosts_ranks_has_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], rank: int, ranks: int, own: list[int] | None
) -> None:
    used: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, chosen: used.append(chosen), raising=False)
    use_own_cores(rank, ranks)
    assert used == ([] if own is None else [own])
