"""The band against the explicit mask, and that no T x T tensor is ever made."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nstf.runtime.attention_banded import causal, streaming, visible


def make(total: int, count: int, batch: int = 2, heads: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(total * 1000 + count)
    query = torch.randn(batch, heads, count, 16, generator=generator)
    key, value = torch.randn(2, batch, heads, total, 16, generator=generator).unbind(0)
    return query, key, value


def reference(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor) -> Tensor:
    scores = (query.double() @ key.double().transpose(2, 3) * scale).masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ value.double()).float()


@pytest.mark.parametrize("total", [1, 5, 63, 64, 200, 401])
@pytest.mark.parametrize(("sink", "window"), [(0, 1), (4, 16), (16, 100), (70, 3), (500, 8), (4, 1000)])
@pytest.mark.parametrize("min_length", [0, 90])
def test_the_band_equals_the_masked_reference(total: int, sink: int, window: int, min_length: int) -> None:
    for count in {total, max(total // 3, 1), 1}:
        query, key, value = make(total, count)
        position = torch.arange(total - count, total)
        mask = visible(position, torch.arange(total), sink, window)
        dense = torch.arange(total) <= position[:, None]
        mask = torch.where((position + 1 < min_length)[:, None], dense, mask)
        got = streaming(query, key, value, 0.3, sink=sink, window=window, min_length=min_length)
        torch.testing.assert_close(got, reference(query, key, value, 0.3, mask), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 7, 300, 700])
def test_causal_attention_of_a_chunk_equals_the_masked_reference(count: int) -> None:
    query, key, value = make(700, count, batch=1)
    mask = torch.arange(700) <= torch.arange(700 - count, 700)[:, None]
    torch.testing.assert_close(
        causal(query, key, value, 0.25), reference(query, key, value, 0.25, mask), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("count", [1, 9, 130])
def test_an_evicted_context_gives_the_same_as_the_whole(count: int) -> None:
    sink, window, total = 5, 40, 400
    query, key, value = make(total, count)
    tail = total - count - window
    kept = [torch.cat([t[:, :, :sink], t[:, :, tail:]], dim=2) for t in (key, value)]
    torch.testing.assert_close(
        streaming(query, *kept, 0.25, sink=sink, window=window, tail_start=tail),
        streaming(query, key, value, 0.25, sink=sink, window=window),
        atol=1e-6,
        rtol=1e-5,
    )


def test_dense_queries_cannot_be_had_from_an_evicted_context() -> None:
    query, key, value = make(50, 10)
    with pytest.raises(ValueError, match="evicted"):
        streaming(query, key, value, 1.0, sink=2, window=8, tail_start=30, min_length=1000)


class Largest(TorchDispatchMode):
    """Largest tensor, in elements, that any operation gave back."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, tuple | list) else (out,):
            if isinstance(item, Tensor):
                self.elements = max(self.elements, item.untyped_storage().nbytes() // item.element_size())
        return out


def test_no_tensor_grows_with_the_square_of_the_length() -> None:
    total = 20_000
    query, key, value = (torch.randn(1, 1, total, 8) for _ in range(3))
    with Largest() as largest:
        streaming(query, key, value, 0.3, sink=16, window=128)
    # The inputs and the output have 160,000 elements; a mask of T x T would have 400 million.
    assert largest.elements <= 2 * total * 8
