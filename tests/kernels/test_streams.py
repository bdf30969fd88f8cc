"""Work side by side and captured steps: the same results as one after the other."""

import pytest
import torch

from nstf.kernels.streams import Replayed, in_turn, side_by_side

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_jobs_side_by_side_see_what_was_made_before_and_are_done_after(device) -> None:
    x = torch.ones(1 << 20, device=device)
    for _ in range(10):
        x = x + 1
    found = side_by_side([lambda n=n: (x * n).sum() for n in range(4)], device)
    total = sum(found[1:], found[0])
    assert float(total) == 11 * 6 * (1 << 20)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_jobs_in_turn_all_come_to_their_ends(device) -> None:
    x = torch.ones(1 << 16, device=device)
    for _ in range(10):
        x = x + 1
    found = [torch.zeros_like(x) for _ in range(9)]

    def job(n: int):
        for _ in range(50 * n):
            found[n] += x
            yield

    in_turn([job(n) for n in range(9)], device)
    assert [float(f.sum()) for f in found] == [11 * 50 * n * (1 << 16) for n in range(9)]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_job_that_fails_among_others_says_so(device) -> None:
    def job(n: int):
        yield
        if n == 2:
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        in_turn([job(n) for n in range(4)], device)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_replayed_step_gives_what_the_step_gives(device) -> None:
    calls = []

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(x.shape)
        halves = side_by_side([lambda: x * 2, lambda: y + 1], device)
        return halves[0] + halves[1], x - y

    replayed = Replayed(step, 8)
    for n in range(8):
        x, y = torch.full((64,), float(n), device=device), torch.arange(64.0, device=device)
        total, difference = replayed(x, y)
        assert torch.equal(total, 2 * x + y + 1) and torch.equal(difference, x - y), n
    other, _ = replayed(torch.ones(3, device=device), torch.ones(3, device=device))
    assert other.tolist() == [4.0, 4.0, 4.0]
    assert len(calls) == (9 if device.type == "cpu" else 3)


@pytest.mark.gpu
def test_graphs_one_after_the_other_share_memory_and_keep_their_results() -> None:
    for size in (1 << 20, 1 << 21, 1 << 20):
        replayed = Replayed(lambda x: ((x * 3).cumsum(0),), 8)
        for n in range(6):
            x = torch.full((size,), float(n), device="cuda")
            (found,) = replayed(x)
            assert torch.equal(found, (x * 3).cumsum(0))
