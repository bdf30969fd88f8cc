"""A thread that begins late, or never."""

import _thread
import time
from collections.abc import Callable
from typing import Any

import pytest

from nstf.errors import NstfError
from nstf.integrations.serve import worker


def test_a_thread_that_begins_after_it_was_given_up_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Callable[[], None]] = []
    ran: list[int] = []

    def late(main: Callable[[], None], arguments: tuple[Any, ...]) -> int:
        held.append(main)
        return 0

    monkeypatch.setattr(_thread, "start_new_thread", late)
    monkeypatch.setattr(worker, "BEGINS_S", 0.01)
    thread = worker.Worker(lambda: ran.append(1))
    with pytest.raises(NstfError, match="not enough memory to start the thread"):
        thread.start()
    held[0]()
    assert ran == []
    begin = time.monotonic()
    thread.join(30.0)
    assert time.monotonic() - begin < 5.0


def test_a_thread_that_begins_is_waited_for() -> None:
    ran: list[int] = []

    def work() -> None:
        time.sleep(0.05)
        ran.append(1)

    thread = worker.Worker(work)
    thread.start()
    thread.join(30.0)
    assert ran == [1]
