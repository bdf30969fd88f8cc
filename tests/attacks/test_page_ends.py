"""Kernels read no byte before or behind an array: each lies between pages that nobody may touch.

The arrays of an artifact are mapped, so a byte too many can end the process there, though never in a test with ordinary
memory. A sanitizer sees arrays that were allocated; this sees every instruction of the usual build.
"""

import ctypes
import faulthandler
import importlib.util
import itertools
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
import generated_trees
from forked import Counts, Watch, run_batches
from test_generated_trees import compare

from nstf.kernels.formats import EncodedTensor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="by the C library of Linux")
PAGE = mmap.PAGESIZE
NO_ACCESS = 0


class Pages:
    """Copies of tensors that end, or begin, where memory ends. close: gives the pages back."""

    def __init__(self, at_end: bool) -> None:
        self._at_end, self._taken = at_end, list[tuple[int, int]]()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def copy(self, tensor: Tensor) -> Tensor:
        """The same values, between two pages without access."""
        size = tensor.numel() * tensor.element_size()
        inside = -(-size // PAGE) * PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        start = self._libc.mmap(None, inside + 2 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        assert start not in (None, ctypes.c_void_p(-1).value)
        self._taken.append((start, inside + 2 * PAGE))
        for page in (start, start + PAGE + inside):
            assert self._libc.mprotect(page, PAGE, NO_ACCESS) == 0
        at = start + PAGE + (inside - size if self._at_end else 0)
        raw: Any = (ctypes.c_char * size).from_address(at)
        found = torch.frombuffer(raw, dtype=tensor.dtype).reshape(tensor.shape)
        return found.copy_(tensor)

    def close(self) -> None:
        for start, size in self._taken:
            self._libc.munmap(start, size)
        self._taken.clear()


def cases(seed: int, samples: ModuleType) -> Iterator[EncodedTensor]:
    """Every node above every kind for seed 0, else trees drawn at random."""
    drawn = generated_trees.trees(seed) if seed else generated_trees.pairs()
    for number, (tree, shape) in enumerate(drawn):
        yield samples.random_encoded(tree, shape, number)


def batch(seed: int, watch: Watch, samples: ModuleType, count: int | None) -> Counts:
    """Every way to multiply by each of a seed's trees, with all arrays and factors at the end of memory and at its start."""
    torch.set_num_threads(1)
    done = 0
    for number, encoded in enumerate(itertools.islice(cases(seed, samples), count)):
        for at_end in (True, False):
            watch.begin(number)
            pages = Pages(at_end)
            arrays = {path: pages.copy(array) for path, array in encoded.arrays.items()}
            compare(EncodedTensor(encoded.tree, encoded.shape, arrays), f"tree {number}", number, pages.copy)
            pages.close()
            done += 1
    watch.rest()
    return {"products": done}


@pytest.fixture(scope="module")
def samples() -> ModuleType:
    """tests/kernels/conftest.py, which draws the values of a tree."""
    spec = importlib.util.spec_from_file_location(
        "kernels_conftest", Path(__file__).parents[1] / "kernels" / "conftest.py"
    )
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def check(samples: ModuleType, seeds: range, count: int | None, workers: int = 1) -> None:
    total = run_batches(
        lambda seed, watch: batch(seed, watch, samples, count), seeds, hang_s=60, workers=workers
    )
    print(total)
    assert total.wrong == [] and (not seeds or total.counts["products"] > 0)


def test_a_byte_too_many_would_be_noticed() -> None:
    """The pages are what they should be: a read just before or behind ends the process."""

    def past(seed: int, _: Watch) -> Counts:
        faulthandler.disable()
        at_end = bool(seed)
        found = Pages(at_end).copy(torch.arange(5, dtype=torch.uint8))
        assert found.tolist() == [0, 1, 2, 3, 4]
        return {"read": ctypes.string_at(found.data_ptr() + (5 if at_end else -1), 1)[0]}

    total = run_batches(past, [0, 1])
    assert [line.partition(": ")[2] for line in total.wrong] == ["ended by signal 11"] * 2


def test_no_kernel_reads_beyond_an_array(samples: ModuleType) -> None:
    check(samples, range(1, 2), 28)


@pytest.mark.fuzz
def test_no_kernel_reads_beyond_an_array_of_many_trees(samples: ModuleType) -> None:
    """NSTF_FUZZ_ROUNDS: so many times 1000 trees, beside every node above every kind; NSTF_FUZZ_SEED: from which on instead
    of 2, and without those; NSTF_FUZZ_WORKERS: in how many processes."""
    workers, first = int(os.environ.get("NSTF_FUZZ_WORKERS", "1")), int(os.environ.get("NSTF_FUZZ_SEED", "2"))
    if "NSTF_FUZZ_SEED" not in os.environ:
        check(samples, range(1), None)
    check(samples, range(first, first + int(os.environ.get("NSTF_FUZZ_ROUNDS", "4"))), 1000, workers)
