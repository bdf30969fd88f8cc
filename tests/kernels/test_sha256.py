"""Sixteen SHA-256 at a time are hashlib's."""

import hashlib
import os
import random

import pytest

from nstf.kernels.cpu import AVAILABLE, ext
from nstf.runtime.artifact import digests

pytestmark = pytest.mark.skipif(not AVAILABLE or not ext.sha256_available(), reason="no AVX-512 here")


def expected(arrays: list[memoryview]) -> bytes:
    return b"".join(hashlib.sha256(array).digest() for array in arrays)


def test_every_length_up_to_several_blocks() -> None:
    data = memoryview(os.urandom(400))
    arrays = [data[:size] for size in range(401)]
    assert ext.sha256(arrays) == expected(arrays)
    assert ext.sha256([]) == b""


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 40])
def test_any_number_of_arrays_of_any_lengths_and_places(count: int) -> None:
    draw = random.Random(count)
    data = memoryview(os.urandom(9000))
    for _ in range(20):
        arrays = []
        for _ in range(count):
            start, size = draw.randrange(999), draw.choice((0, 1, 55, 56, 63, 64, 65, draw.randrange(8000)))
            arrays.append(data[start : start + size])
        assert ext.sha256(arrays) == expected(arrays)


def test_one_far_longer_than_the_others() -> None:
    data = memoryview(os.urandom(3 << 20))
    arrays = [data[i : i + 100 * i] for i in range(20)] + [data]
    assert ext.sha256(arrays) == expected(arrays)


def test_groups_hold_every_array_once_and_the_largest_first() -> None:
    draw = random.Random(0)
    sizes = {f"a{i}": draw.randrange(1, 1 << 20) for i in range(300)} | {
        "embedding": 1 << 25,
        "head": 1 << 26,
    }
    for together in (True, False):
        groups, left = digests._groups(sizes, together)
        assert sorted([n for group in groups for n in group] + left) == sorted(sizes)
        assert list(groups)[:2] == [["head"], ["embedding"]]
    assert digests._groups({}, True) == digests._groups({}, False)
