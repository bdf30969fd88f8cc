"""Copies that C++ makes of an engine's codes, beside what Python does: it needs none of Python's turns."""

from __future__ import annotations

import _thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Copying:
    """The run of `copies` (`ext.EngineCopies`) on some threads: now in the background, or in `finish`.

    Whoever runs it in the background calls `finish` before the process ends.
    """

    def __init__(self, copies: Any, threads: int, background: bool) -> None:
        self._copies, self._threads = copies, threads
        self._failure: BaseException | None = None
        self._running = _thread.allocate_lock()  # held while the thread lives
        if background:
            self._running.acquire()
            try:
                # Not threading.Thread: see `Verifying`. Without a thread the copies are made where one waits.
                _thread.start_new_thread(self._work, ())
            except (RuntimeError, MemoryError):
                self._running.release()

    def finish(self) -> None:
        """Returns when all is copied; raises what copying raised, whenever it is called."""
        with self._running:
            if self._failure is None:
                self._copy()
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            self._copy()
        finally:
            self._running.release()

    def _copy(self) -> None:
        try:
            self._copies.run(self._threads)
        except BaseException as error:
            self._failure = error
