"""Which sums go through the GPUs' memory, and that all ranks decide alike. test_divided.py has the sums, on two GPUs."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from nstf.runtime import peer_sums as module
from nstf.runtime.peer_sums import MOST_BYTES, PeerSums, peer_sums
from nstf.runtime.ranks import Ranks

HERE = torch.device("cuda", 0)


class Pretended(PeerSums):
    """Without a GPU: every sum is marked."""

    def __init__(self, *_: Any) -> None:
        pass

    def sum(self, values: torch.Tensor) -> None:
        values.fill_(7.0)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PeerSums", Pretended)
    monkeypatch.setattr(module, "_host", lambda: "host")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    monkeypatch.setattr(module, "_known", lambda device: True)


def decided(*other: bytes) -> PeerSums | None:
    """What this rank decides beside another that says these words."""
    words = iter(other)
    return peer_sums(HERE, 2, lambda own: [own, next(words)])


def test_ranks_on_gpus_of_one_host_sum_by_memory(two_gpus: None) -> None:
    assert decided(b"host 1", b"yes") is not None


@pytest.mark.parametrize("other", [b"host 0", b"elsewhere 1", b"host 2", b"-"])
def test_ranks_elsewhere_sum_by_nccl(two_gpus: None, other: bytes) -> None:
    assert decided(other, b"no") is None


def test_gpus_that_do_not_reach_each_other_sum_by_nccl(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    assert decided(b"host 1", b"no") is None


def test_what_fails_on_one_rank_is_left_by_all(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert decided(b"host 1", b"no") is None

    def failing(*_: Any) -> PeerSums:
        raise RuntimeError("no such handle")

    monkeypatch.setattr(module, "PeerSums", failing)
    assert decided(b"host 1", b"yes") is None


def test_a_cpu_says_no_and_waits_for_nobody() -> None:
    said = []

    def tell(word: bytes) -> list[bytes]:
        said.append(word)
        return [word, word]

    assert peer_sums(torch.device("cpu"), 2, tell) is None and said == [b"-", b"no"]


@pytest.mark.parametrize(("values", "taken"), [
    (torch.zeros(2, 8192), True),
    (torch.zeros(8, dtype=torch.bfloat16), True),
    (torch.zeros(MOST_BYTES // 4), True),
    (torch.zeros(MOST_BYTES // 4 + 4), False),
    (torch.zeros(3), False),
    (torch.zeros(0), False),
    (torch.zeros(16, dtype=torch.float16), False),
])  # fmt: skip
def test_small_sums_of_whole_steps_are_taken(
    values: torch.Tensor, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = replace(Ranks(0, 2), peers=Pretended())
    monkeypatch.setattr("torch.distributed.all_reduce", lambda values: values.fill_(1.0))
    found = ranks.sum(values.clone())
    assert bool((found == (7.0 if taken else 1.0)).all())


def test_alone_a_rank_sums_nothing() -> None:
    ranks = replace(Ranks(0, 2), peers=Pretended())
    with ranks.alone():
        assert ranks.sum(torch.ones(4)).tolist() == [1.0] * 4
        assert ranks.joined(torch.ones(1, 3), 4, 7).shape == (1, 7)
