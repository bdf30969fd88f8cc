"""One session at a time in a process."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("nstf")

_ONE_SESSION = threading.RLock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """What a session sets and measures is the process's: those of several threads take turns."""
    if not _ONE_SESSION.acquire(blocking=False):
        log.info("another thread of this process converts: this conversion begins when it has ended")
        _ONE_SESSION.acquire()
    try:
        yield
    finally:
        _ONE_SESSION.release()
