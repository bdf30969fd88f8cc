"""Batches that run side by side add to one sum in their order, so that its bits do not depend on how many run at a time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class Turns:
    """Who may add to what, for modules that a batch calls at most once.

    A batch adds under a key when every batch before it has added there, or has left the layer of the key, or is done. The
    earlier batches must have been started before: then none waits for ever.
    """

    def __init__(self, layers: list[nn.Module], layer_of: Callable[[str], int | None]) -> None:
        """layer_of: the index of the layer that a key's module is in, None outside of all."""
        self._layer_of = layer_of
        self._changed = threading.Condition()
        self._own = threading.local()
        self._added: dict[str, set[int]] = {}
        self._left: dict[int, int] = {}
        self._done: set[int] = set()
        self._handles = [layer.register_forward_hook(self._leaves(i)) for i, layer in enumerate(layers)]

    def close(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _leaves(self, layer: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            with self._changed:
                self._left[self._own.index] = layer
                self._changed.notify_all()

        return hook

    @contextmanager
    def running(self, index: int) -> Iterator[None]:
        """The calling thread runs batch `index` inside."""
        self._own.index = index
        try:
            yield
        finally:
            with self._changed:
                self._done.add(index)
                self._changed.notify_all()

    @contextmanager
    def turn(self, key: str) -> Iterator[None]:
        """The calling thread's batch adds under the key inside; waits for those before it."""
        index, layer = self._own.index, self._layer_of(key)
        added = self._added.setdefault(key, set())

        def passed(other: int) -> bool:
            left = layer is not None and self._left.get(other, -1) >= layer
            return other in added or left or other in self._done

        with self._changed:
            self._changed.wait_for(lambda: all(map(passed, range(index))))
        try:
            yield
        finally:
            with self._changed:
                added.add(index)
                self._changed.notify_all()
