"""Pieces of arrays in memory of their own: the same numbers, in large pages where there are some."""

import mmap

import pytest
import torch

from nstf.kernels.formats import pieces
from nstf.kernels.formats.pieces import joined, own

NUMBERS = torch.arange(6000, dtype=torch.int32).view(60, 100)


@pytest.fixture(params=["large", "small", "no memory", "no large pages"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    way: str = request.param
    monkeypatch.setattr(pieces, "LARGE_BYTES", 1 << 30 if way == "small" else 1)
    if way == "no memory":

        def refuse(*_: object, **__: object) -> object:
            raise OSError("no memory")

        monkeypatch.setattr(mmap, "mmap", refuse)
    elif way == "no large pages":

        class Plain(mmap.mmap):
            def madvise(self, *_: object) -> None:
                raise OSError("not known")

        monkeypatch.setattr(mmap, "mmap", Plain)
    return way


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.bool], ids=str)
def test_columns_are_copied_side_by_side(dtype: torch.dtype, memory: str) -> None:
    numbers = NUMBERS.remainder(100).to(dtype)
    part = numbers[:, 20:70]
    found = own(part)
    assert found.is_contiguous() and torch.equal(found, part)
    found.zero_()
    assert bool(numbers.any()), "a copy"
    rows = numbers[10:30]
    assert own(rows).data_ptr() == rows.data_ptr(), "what lies side by side is not copied"


def test_parts_are_joined_one_after_the_other(memory: str) -> None:
    parts = [NUMBERS[:, 5:10], NUMBERS[3:4], NUMBERS[:, ::2]]
    assert torch.equal(joined(parts), torch.cat([part.reshape(-1) for part in parts]))
    assert joined([NUMBERS[7:9]]).data_ptr() == NUMBERS[7:9].data_ptr()
    assert torch.equal(joined([NUMBERS[:, 5:10]]), NUMBERS[:, 5:10].reshape(-1))
