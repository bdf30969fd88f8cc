"""Work on several threads: in order, and done whether or not a thread begins."""

import _thread
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from nstf.runtime.side_by_side import side_by_side


@pytest.mark.parametrize("threads", [1, 3, 50])
def test_results_are_in_the_order_of_the_items(threads: int) -> None:
    def slow(item: int) -> int:
        time.sleep(0.001 * (item % 3))
        return item * item

    assert side_by_side(slow, range(20), threads) == [i * i for i in range(20)]
    assert side_by_side(slow, [], threads) == []


def test_items_are_worked_on_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=20)
    assert side_by_side(lambda item: together.wait() >= 0 and item, [1, 2, 3], 3) == [1, 2, 3]


@pytest.mark.parametrize("how", ["refused", "no memory", "begins and dies"])
def test_the_caller_does_what_no_thread_takes_up(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """`threading.Thread.start` waits without end for a thread that dies before it says that it lives."""

    def start(function: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
        if how == "begins and dies":
            return 1
        raise RuntimeError("can't start new thread") if how == "refused" else MemoryError

    monkeypatch.setattr(_thread, "start_new_thread", start)
    assert side_by_side(lambda item: item + 1, range(5), 4) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("threads", [1, 4])
def test_what_the_function_raises_is_raised_once_nothing_runs_any_more(threads: int) -> None:
    running, begun = 0, 0

    def fails(item: int) -> None:
        nonlocal running, begun
        running += 1
        begun += 1
        try:
            time.sleep(0.002)
            if item == 2:
                raise KeyError(item)
        finally:
            running -= 1

    with pytest.raises(KeyError):
        side_by_side(fails, range(1000), threads)
    assert running == 0 and begun < 100
