"""Limits on the address space too low for the libraries: one line that says so, never a loop or another error."""

import mmap
import subprocess
import sys

import pytest

from nstf.errors import UnsupportedError
from nstf.runtime import memory_limit
from nstf.runtime.memory_limit import causes, has_room
from nstf_convert.cli.messages import explain

MIB = 1 << 20
LIMITED = """
import resource, sys
pages = int(open("/proc/self/statm").read().split()[0])
limit = {limit} or pages * resource.getpagesize() + (100 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""
LOADING = (
    LIMITED
    + """
from nstf.runtime.memory_limit import watch_limit
watch_limit()
try:
    import scipy
except MemoryError as error:
    print(error)
"""
)
COMMAND = (
    LIMITED
    + """
from nstf_convert.cli import run
sys.exit(run(["place", "examples/shapes/dense-8b.json", "--encoding", "int4", "--machine", "h100x8"]))
"""
)


def test_looking_for_room_takes_none_from_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was left was taken for a moment, in which another thread found nothing: libraries in Rust end the process."""
    taken: list[int] = []
    monkeypatch.setattr(mmap, "mmap", lambda *sizes: taken.extend(sizes))
    for free, found in ((10 * MIB, True), (19 * MIB, True), (10 * MIB - 1, False), (-MIB, False)):
        monkeypatch.setattr(memory_limit, "_free", lambda free=free: free)
        assert has_room(10 * MIB) is found
    assert not taken


def test_what_a_limit_leaves_is_known() -> None:
    program = LIMITED.format(limit=0) + (
        "from nstf.runtime.memory_limit import _free, has_room\n"
        "print(_free() >> 20, has_room(60 << 20), has_room(30 << 20), has_room(120 << 20))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    free, *rooms = found.stdout.split()
    assert 60 <= int(free) <= 100 and rooms == ["True", "True", "False"], found.stderr
    assert memory_limit._free() is None and has_room(MIB)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heaps")
def test_threads_share_one_heap_where_address_space_is_limited() -> None:
    """With 192 MiB left the heaps of a server's threads took all, and a library in Rust ended the process."""
    program = """
import threading
from nstf.runtime.memory_limit import _free, share_one_heap
share_one_heap()
begin, end = threading.Barrier(5), threading.Event()
def work():
    kept = [bytearray(600) for _ in range(1000)]
    begin.wait()
    end.wait()
threads = [threading.Thread(target=work) for _ in range(4)]
before = _free()
for each in threads:
    each.start()
begin.wait()
print((before - _free()) >> 20)
end.set()
"""
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 44, 1 << 44))\n"
    found = subprocess.run([sys.executable, "-c", limit + program], capture_output=True, text=True)
    stacks = 4 * 8
    assert int(found.stdout) < stacks + 60, found.stderr


def test_a_library_that_has_no_room_is_not_loaded() -> None:
    found = subprocess.run([sys.executable, "-c", LOADING.format(limit=0)], capture_output=True, text=True)
    assert found.stdout == "the limit on the address space leaves no room for scipy\n", found.stderr


@pytest.mark.parametrize("size", [400, 850, pytest.param(940, marks=pytest.mark.slow)])
def test_a_command_under_a_limit_ends_in_one_line(size: int, request: pytest.FixtureRequest) -> None:
    """Between 780 and 850 MiB SciPy's OpenBLAS asked without end for memory, on the machine where this was found."""
    program = [sys.executable, "-c", COMMAND.format(limit=size * MIB)]
    found = subprocess.run(program, capture_output=True, text=True, cwd=request.config.rootpath, timeout=120)
    lines = found.stderr.strip().splitlines()
    assert found.returncode == 0 or (found.returncode == 1 and "out of memory" in lines[-1]), found.stderr


def test_a_missing_model_class_behind_missing_memory_is_told_as_memory() -> None:
    error = UnsupportedError("cannot build a model")
    error.__cause__ = ModuleNotFoundError("Could not import module")
    error.__cause__.__context__ = ImportError("libx.so: failed to map segment from shared object")
    assert explain(error, ["place"]) == (
        1,
        "out of memory: libx.so: failed to map segment from shared object; free some, or raise its limit",
    )
    error.__cause__.__context__ = error  # a circle ends
    assert list(causes(error)) == [error, error.__cause__]
    assert explain(error, ["place"])[0] == UnsupportedError.exit_code
