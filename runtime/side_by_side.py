"""Work on several threads that ends, too, where there is no memory for a thread."""

from __future__ import annotations

import _thread
from collections import deque
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeVar

    Item = TypeVar("Item")
    Result = TypeVar("Result")


def side_by_side(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """What a function gives for each item, in their order, by the caller and up to `threads` - 1 threads beside it.

    Raises the first thing that the function raised; items that nobody has begun are left then. Not by a pool of threads
    (concurrent.futures): `threading.Thread.start` waits for a sign of life, which one that finds no memory never gives.
    Here the caller does what no thread takes up.
    """
    todo = deque(enumerate(items))
    found: list[Result | None] = [None] * len(todo)
    failures: list[BaseException] = []

    def take() -> None:
        while True:
            try:
                index, item = todo.popleft()
            except IndexError:
                return
            try:
                found[index] = function(item)
            except BaseException as error:  # raised again by the caller
                failures.append(error)
                todo.clear()
                return

    def work(busy: _thread.LockType) -> None:
        with busy:
            take()

    # Each held by its thread while that has an item in hand.
    locks = [_thread.allocate_lock() for _ in range(min(threads, len(todo)) - 1)]
    try:
        for busy in locks:
            with suppress(RuntimeError, MemoryError):
                _thread.start_new_thread(work, (busy,))
        take()
    finally:
        todo.clear()
    for busy in locks:
        with busy:
            pass
    if failures:
        raise failures[0]
    return found  # type: ignore[return-value]  # all are done
