"""When freed memory is given back to the system."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from nstf.analyzers import heap

MB = 1 << 20


def test_memory_is_given_back_where_it_has_grown_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap.sys, "platform", "linux")
    monkeypatch.setattr(heap, "_lowest", 0)
    monkeypatch.setattr(heap, "KEPT_BYTES", 384 * MB)
    at = 0
    given: list[int] = []

    def give_back() -> None:
        nonlocal at
        given.append(at // MB)
        at = min(at, 500 * MB)

    monkeypatch.setattr(heap, "_resident", lambda: at)
    monkeypatch.setattr(heap, "give_back", give_back)
    for megabytes in (300, 450, 700, 800, 885, 400, 780, 790):
        at = megabytes * MB
        heap.give_back_much()
    # 500 stays in use after the first time; the level falls to 400 with the sixth.
    assert given == [450, 885, 790]


@pytest.mark.skipif(sys.platform != "linux", reason="the memory in use is read from /proc")
def test_the_memory_in_use_is_read() -> None:
    before = heap._resident()
    held = bytearray(b"x" * (64 * MB))
    after = heap._resident()
    assert before is not None and after is not None and before > 8 * MB and after >= before + 48 * MB
    del held


def test_where_proc_is_not_mounted_memory_goes_back_only_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(heap.sys, "platform", "linux")
    monkeypatch.setattr(heap, "STATM", tmp_path / "none")
    monkeypatch.setattr(heap, "give_back", lambda: pytest.fail("it does not know how much is in use"))
    heap.give_back_much()
    given: list[bool] = []
    monkeypatch.setattr(heap, "give_back", lambda: given.append(True))
    heap.give_back_much(unknown=True)
    assert given == [True]


HOLES = """
import platform
import subprocess
import sys
import torch
from nstf.analyzers import heap

heap.share_one_arena(getattr(heap, sys.argv[1]))
before, waiting = heap._resident(), []
for _ in range(12):
    passing = torch.ones(2, 1 << 20)
    waiting.append(torch.ones(5, 1 << 18))
    del passing
    larger = torch.ones(2 + len(waiting), 1 << 20)
    del larger
print(heap._resident() - before - sum(x.nbytes for x in waiting))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's heap")
def test_what_goes_between_batches_that_wait_leaves_no_holes() -> None:
    """A process of its own, since the settings stay: what it holds beyond tensors of 5 MiB when larger ones have gone."""

    def left(sizes: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", HOLES, sizes], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert left("MAPPED_BYTES_WAITING") < 8 * MB and left("MAPPED_BYTES") > 16 * MB
