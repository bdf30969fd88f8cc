"""A limit on the address space (`ulimit -v`), met before libraries are loaded that cannot meet it themselves.

SciPy's OpenBLAS asks again without end for the buffers of its threads where it is refused them, and a library whose segments
do not fit ends in an ImportError that some other library then takes for a missing package. So before each of them is loaded
it is asked for room; where there is none a MemoryError says so.
"""

import importlib.abc
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from nstf.errors import out_of_memory

# Address space that loading each takes with one thread (83, 488 and 144 MiB), and some more.
ROOM = {"numpy": 128 << 20, "scipy": 192 << 20, "torch": 512 << 20}
# Less is left where an extension fails without saying why.
LEAST_ROOM = 64 << 20

_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h


class _Watch(importlib.abc.MetaPathFinder):
    """Finds nothing: looks for room where one of these libraries is about to be loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in ROOM and not has_room(ROOM[fullname]):
            raise MemoryError(f"the limit on the address space leaves no room for {fullname}")
        return None


def watch_limit() -> None:
    """Looks for room before each library from now on, where the address space of this process is limited."""
    import resource

    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    # Buffers for one thread: those of all cores may take gigabytes of it, and we let torch multiply.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def share_one_heap() -> None:
    """Lets the threads of this process allocate from one heap, where its address space is limited: glibc reserves 64 to
    128 MiB of it for each thread, and one that was refused its own may find none at all."""
    import ctypes

    if _free() is not None:
        with suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def memory_ended(error: BaseException) -> bool:
    """Whether a library's error comes of memory: it says so, or it lost what it wanted to say where little is left."""
    return out_of_memory(error) or (isinstance(error, SystemError) and not has_room(LEAST_ROOM))


def has_room(size: int) -> bool:
    """Whether so many bytes of address space can be had.

    They are taken for a moment, unless a limit leaves less than twice as many: another thread may need the rest meanwhile.
    """
    free = _free()
    if free is not None and free < 2 * size:
        return free >= size
    try:
        mmap.mmap(-1, size).close()
    except OSError:
        return False
    return True


def _free() -> int | None:
    """Bytes that the limit on the address space leaves; None without a limit, or where that is not known."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return None
    return limit - pages * resource.getpagesize()


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those behind it."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__
