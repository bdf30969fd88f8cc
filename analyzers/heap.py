"""The heap: keeping memory that was freed from counting as memory in use."""

import ctypes
import os
import sys
import threading
from pathlib import Path

STATM = Path("/proc/self/statm")
# What a thread may leave in the heap, freed and unfit for its next sizes, before it is returned.
KEPT_BYTES = 256 << 20
# Sizes from which on glibc takes memory from the system one by one, and returns it at once. Backward passes free all they
# take, so they reuse a heap: the largest that glibc accepts, without whose page faults they take a tenth less time.
MAPPED_BYTES = 32 << 20
# Where batches wait with what they hold, what goes beside it leaves holes in a heap that the next sizes do not fit: 0.7 of
# 2.7 GiB for a 135 M model, whose passes take no longer without.
MAPPED_BYTES_WAITING = 4 << 20
_lowest = 0
_looking = threading.Lock()


def share_one_arena(mapped_bytes: int = MAPPED_BYTES) -> None:
    """Keeps glibc from giving every batch's thread a heap of its own, each of which keeps what was freed in it.

    With 16 batches of a 135 M model that was 1 GiB. Few run at a time, so one heap serves all. Its end is not returned with
    every large tensor that is freed there, only to be taken again page by page with the next.
    mapped_bytes: the sizes that are no part of it.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(-8, 1)  # M_ARENA_MAX
            mallopt(-1, KEPT_BYTES)  # M_TRIM_THRESHOLD
            mallopt(-3, mapped_bytes)  # M_MMAP_THRESHOLD, which glibc no longer adapts


def give_back() -> None:
    """Returns freed memory to the system, where glibc keeps it in pieces that the next sizes do not fit.

    A backward pass of a 135 M model left 120 MB more with every window, 7 GiB after 64.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def give_back_much(unknown: bool = False) -> None:
    """As `give_back`, only where the memory in use has grown by `KEPT_BYTES` since it was lowest: what is returned costs
    page faults when it is taken again (a tenth of a backward pass's time, at every layer). unknown: whether to return it
    where the system does not say how much is in use."""
    global _lowest
    if sys.platform != "linux":
        return
    with _looking:
        now = _resident()
        if now is None:
            if unknown:
                give_back()
            return
        if now > _lowest + KEPT_BYTES:
            give_back()
            _lowest = _resident() or now
        else:
            _lowest = min(_lowest, now)


def _resident() -> int | None:
    """Bytes of memory in use; None in a container or a jail without /proc."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return None
