"""What launches of a kernel on a stream hand on to each other: kept, but never what a graph's capture allocated."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from nstf.kernels.triton import launching


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A card that is not there: its stream, whether that is captured, and what was launched and waited for."""
    state = SimpleNamespace(stream=1, capturing=False, log=[])
    zeros = torch.zeros

    def made(count: int, dtype: torch.dtype | None = None, device: object = None) -> torch.Tensor:
        state.log.append("zeros")
        return zeros(count, dtype=dtype)

    def stream(device: object) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=state.stream, synchronize=lambda: state.log.append("wait"))

    monkeypatch.setattr(launching, "_HANDED_ON", {})
    monkeypatch.setattr(torch, "zeros", made)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    return state


def handed_on(kernel: str = "one") -> torch.Tensor:
    return launching.handed_on(torch.device("cuda", 0), 3, torch.int64, kernel)


def test_launches_of_a_kernel_on_a_stream_share(card: SimpleNamespace) -> None:
    first = handed_on()
    assert card.log == ["zeros", "wait"], "read before the launch in front has ended"
    assert handed_on() is first
    assert handed_on("another") is not first
    card.stream = 2
    assert handed_on() is not first


def test_what_a_capture_allocates_is_not_kept(card: SimpleNamespace) -> None:
    card.capturing = True
    first = handed_on()
    assert card.log == ["zeros", "zeros"], "one launch more, before which the first has ended"
    assert handed_on() is not first
    card.capturing = False
    kept = handed_on()
    assert kept is not first
    card.capturing = True
    assert handed_on() is kept
