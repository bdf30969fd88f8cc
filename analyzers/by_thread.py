"""What hooks gather when several batches run side by side, apart by thread."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ByThread(Generic[T]):
    """A value for each thread that asked for one of its own, and one for all others.

    Autograd runs the hooks of a CPU's backward pass in the thread that started it, those of a GPU's in a thread of its own:
    that one shares the value of the thread that started it as long as nobody has one of its own.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._shared = make, make()
        self._own: dict[int, T] = {}

    def separate(self) -> None:
        """From now on the calling thread has a value of its own."""
        self._own[threading.get_ident()] = self._make()

    @property
    def value(self) -> T:
        """The calling thread's."""
        return self._own.get(threading.get_ident(), self._shared)

    def take(self) -> T:
        """The calling thread's value, which begins anew."""
        key, new = threading.get_ident(), self._make()
        if key in self._own:
            found, self._own[key] = self._own[key], new
        else:
            found, self._shared = self._shared, new
        return found
