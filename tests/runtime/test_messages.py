"""What keeps a core awake ends with its block, and each process is left its own cores."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

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


def test_sums_and_parts_are_right_in_any_order_and_in_a_group_of_fewer(tmp_path: Path) -> None:
    program = [sys.executable, Path(__file__).with_name("message_cases.py"), tmp_path / "store"]
    ranks = [subprocess.Popen([*map(str, program), str(rank)], stderr=subprocess.PIPE) for rank in range(3)]
    said = [rank.communicate(timeout=240)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], said


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
