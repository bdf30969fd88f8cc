"""The likeliest token by the extension's search."""

import pytest
import torch

ext = pytest.importorskip("nstf.kernels.cpu._ext")
from nstf.runtime.engine import greedy  # noqa: E402

# One block of the search, its ends, several with a rest.
SIZES = (1, 2, 1023, 1024, 1025, 5000)


@pytest.mark.parametrize("size", SIZES)
def test_the_first_of_the_largest(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for at in {0, size // 2, size - 1}:
        logits = torch.randn(size, generator=generator).clamp(max=3.0)
        logits[at] = logits[-1] = 4.0
        assert greedy(logits) == ext.argmax(logits) == at


@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_chosen_past_a_nan(size: int) -> None:
    logits = torch.zeros(size)
    logits[0] = 9.0
    logits[size - 1] = float("nan")
    assert greedy(logits) == size - 1


@pytest.mark.parametrize("value", [float("-inf"), float("inf"), -3.0])
def test_equal_logits_give_the_first(value: float) -> None:
    assert greedy(torch.full((2000,), value)) == 0


def test_a_view_with_strides_is_searched_as_it_is_seen() -> None:
    logits = torch.zeros(64, 2)
    logits[5, 0], logits[7, 1] = 2.0, 1.0
    assert greedy(logits[:, 1]) == 7


def test_nothing_has_no_likeliest_token() -> None:
    with pytest.raises(ValueError, match="argmax of nothing"):
        greedy(torch.empty(0))
