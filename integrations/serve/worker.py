"""A thread whose start fails where there is no memory for it."""

import _thread
from collections.abc import Callable
from threading import Event, Lock

from nstf.errors import NstfError

# A busy machine takes a while to let a thread begin.
BEGINS_S = 60.0


class Worker:
    """Runs a function in a thread that does not keep the process alive.

    `threading.Thread.start` waits without end for a sign of life, which a thread that found no memory never gives.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._begun, self._ended = Event(), Event()
        self._lock, self._given_up = Lock(), False

    def start(self) -> None:
        """Raises NstfError when the thread does not begin."""
        try:
            _thread.start_new_thread(self._main, ())
            self._begun.wait(BEGINS_S)
        except (RuntimeError, MemoryError):
            pass
        with self._lock:
            self._given_up = not self._begun.is_set()
        if self._given_up:
            raise NstfError(
                "not enough memory to start the thread that decodes; free some, or raise its limit"
            )

    def join(self, wait_s: float) -> None:
        """Waits until the function has ended, `wait_s` seconds at most; not at all where it never began."""
        if self._begun.is_set():
            self._ended.wait(wait_s)

    def _main(self) -> None:
        with self._lock:
            if self._given_up:
                return
            self._begun.set()
        try:
            self._run()
        finally:
            self._ended.set()
