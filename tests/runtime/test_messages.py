"""Messages between ranks: through shared memory and through gloo. What keeps a core awake ends with its block, and each
process is left its own cores."""

import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from threading import Thread, Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nstf.kernels.cpu import ext
from nstf.runtime import messages
from nstf.runtime import ranks as ranks_of
from nstf.runtime.messages import awake
from nstf.runtime.ranks import use_own_cores

THREADS = Path("/proc/self/task")


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or ext is None, reason="needs Linux and the extension"
)
def test_a_thread_that_keeps_the_core_awake_ends_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "has_quota", lambda: False)
    before = {*THREADS.iterdir()}
    with pytest.raises(KeyError), awake():
        (own,) = {*THREADS.iterdir()} - before
        raise KeyError(own)
    assert not {*THREADS.iterdir()} - before


@pytest.mark.parametrize(
    ("limits", "bound"),
    [
        ({"": "max 100000", "a/b": "200000 100000"}, True),
        ({"a": "50000 100000", "a/b": "max 100000"}, True),
        ({"": "100000 100000"}, True),
        ({"a": "max 100000", "a/b": "max 100000", "a/c": "50000 100000"}, False),
        ({}, False),
    ],
)
def test_a_quota_of_processor_time_is_seen(tmp_path: Path, limits: dict[str, str], bound: bool) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("1:cpu:/\n0::/a/b\n")
    for name, limit in limits.items():
        (tmp_path / "root" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name / "cpu.max").write_text(limit)
    assert messages.has_quota(groups, tmp_path / "root") == bound
    assert not messages.has_quota(tmp_path / "missing", tmp_path / "root")


def test_no_core_is_kept_awake_under_a_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    thread = SimpleNamespace(stop=lambda: started.append(-1))
    monkeypatch.setattr(messages, "ext", SimpleNamespace(Awake=lambda: started.append(1) or thread))
    for quota, expected in ((True, []), (False, [1, -1])):
        monkeypatch.setattr(messages, "has_quota", lambda quota=quota: quota)
        with awake():
            pass
        assert started == expected


def test_where_no_thread_can_be_started_the_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def awake_thread() -> None:
        raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr(messages, "ext", SimpleNamespace(Awake=awake_thread))
    monkeypatch.setattr(messages, "has_quota", lambda: False)
    with awake():
        pass
    with pytest.raises(KeyError), awake():
        raise KeyError


shared_memory = pytest.mark.skipif(not hasattr(ext, "SharedBox"), reason="needs Linux and the extension")


def test_sums_and_parts_are_right_in_any_order_and_in_a_group_of_fewer(tmp_path: Path) -> None:
    """Through gloo and, where there is such a thing, through shared memory."""
    ways = ["sent", *(["shared"] if hasattr(ext, "SharedBox") else [])]
    program = [sys.executable, Path(__file__).with_name("message_cases.py"), tmp_path / "store"]
    before = {*Path("/dev/shm").glob("nstf-*")}
    ranks = [
        subprocess.Popen([*map(str, program), str(rank), *ways], stderr=subprocess.PIPE) for rank in range(3)
    ]
    said = [rank.communicate(timeout=240)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], said
    assert all(way in text.splitlines() for way in ways for text in said), said
    assert {*Path("/dev/shm").glob("nstf-*")} <= before, "memory that outlives its processes"


def boxes(folder: Path, count: int, capacity: int, spin_us: float, limit_s: float = 60.0) -> list[Any]:
    """The boxes of so many ranks, all in this process."""
    path = folder / "shared"
    path.write_bytes(bytes(ext.SharedBox.size_bytes(count, capacity)))
    with path.open("r+b") as file:
        return [ext.SharedBox(file.fileno(), r, count, capacity, spin_us, limit_s) for r in range(count)]


@shared_memory
@pytest.mark.parametrize("spin_us", [0.0, 1000.0], ids=["sleeping", "looking"])
def test_shared_memory_sums_in_the_order_of_the_ranks(spin_us: float, tmp_path: Path) -> None:
    count, rounds = 3, 100
    made = boxes(tmp_path, count, 4 * 300, spin_us)  # larger messages go in pieces
    numbers = torch.randn(rounds, count, 1000, generator=torch.Generator().manual_seed(0))
    found = torch.empty_like(numbers)
    parts = torch.empty(rounds, count, count, 500, dtype=torch.int32)

    def work(rank: int) -> None:
        for i in range(rounds):
            size = 1 + 37 * i % 1000
            own = numbers[i, rank].clone()
            made[rank].sum(own.data_ptr(), size)
            found[i, rank] = own
            word = torch.full((500,), 10 * i + rank, dtype=torch.int32)
            made[rank].exchange(word.data_ptr(), word.nbytes, parts[i, rank].data_ptr())

    threads = [Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(rounds):
        size, (a, b, c) = 1 + 37 * i % 1000, numbers[i]
        for rank in range(count):
            assert torch.equal(found[i, rank, :size], ((a + b) + c)[:size])
            assert torch.equal(found[i, rank, size:], numbers[i, rank, size:])
            assert torch.equal(
                parts[i, rank], 10 * i + torch.arange(3, dtype=torch.int32)[:, None].expand(3, 500)
            )


@shared_memory
def test_shared_memory_refuses_a_file_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(100))
    with (tmp_path / "short").open("r+b") as file:
        with pytest.raises(RuntimeError, match="too short"):
            ext.SharedBox(file.fileno(), 0, 2, 64, 0.0, 1.0)
        with pytest.raises(ValueError, match="no such rank"):
            ext.SharedBox(file.fileno(), 2, 2, 64, 0.0, 1.0)


OTHER = """
import sys
from nstf.kernels.cpu import ext
with open(sys.argv[1], "r+b") as file:
    box = ext.SharedBox(file.fileno(), 1, 2, 64, 0.0, 60.0)
print("there", flush=True)
sys.stdin.read()
"""


@shared_memory
def test_who_waits_for_a_process_that_ended_is_told(tmp_path: Path) -> None:
    first, _ = boxes(tmp_path, 2, 64, 0.0)
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path / "shared")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"there\n"
        other.kill()  # and nobody has asked for its exit code
        values = torch.zeros(4)
        with pytest.raises(RuntimeError, match="rank 1 has ended"):
            first.sum(values.data_ptr(), 4)


@shared_memory
def test_a_process_of_an_unknown_namespace_is_not_said_to_have_ended(tmp_path: Path) -> None:
    """Without /proc nothing is known of other processes: all of them seemed to have ended."""
    first, _ = boxes(tmp_path, 2, 64, 0.0, limit_s=0.2)
    with (tmp_path / "shared").open("r+b") as file:
        for rank in (0, 1):
            file.seek(128 * rank + 8)  # in a rank's line: its process, and the namespace of that number
            file.write(struct.pack("=i4xQ", (1 << 31) - 1, 0))
    values = torch.zeros(4)
    with pytest.raises(RuntimeError, match="too long"):
        first.sum(values.data_ptr(), 4)


def test_the_file_is_removed_where_the_other_ranks_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell(word: bytes) -> list[bytes]:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(messages, "SHARED_FOLDER", str(tmp_path))
    with pytest.raises(RuntimeError, match="closed by peer"):
        messages.shared_mailbox(SimpleNamespace(rank=0, size=2, tell=tell))
    assert not [*tmp_path.iterdir()]


@shared_memory
def test_a_wait_has_an_end_and_listens_to_signals(tmp_path: Path) -> None:
    first, _ = boxes(tmp_path, 2, 64, 0.0, limit_s=0.2)
    values = torch.zeros(4)
    with pytest.raises(RuntimeError, match="too long"):
        first.sum(values.data_ptr(), 4)
    again, _ = boxes(tmp_path, 2, 64, 0.0)
    # A shell has its background ignore SIGINT, and then Python has no handler for it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            again.sum(values.data_ptr(), 4)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("cores", "rank", "ranks", "own"),
    [({2, 3, 5, 7}, 1, 2, [3, 7]), ({0, 1, 2}, 0, 2, [0]), ({4}, 1, 2, None)],
)
def test_each_of_a_hosts_ranks_has_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], rank: int, ranks: int, own: list[int] | None
) -> None:
    used: list[list[int]] = []
    # As Linux numbers them: 0 and 4, 1 and 5, ... are the two hyperthreads of a core.
    monkeypatch.setattr(ranks_of, "place_of", lambda processor: (0, processor % 4, processor))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, chosen: used.append(chosen), raising=False)
    use_own_cores(rank, ranks)
    assert used == ([] if own is None else [own])
