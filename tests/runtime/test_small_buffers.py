"""What a constructor may compute: refused before its memory is asked for, and nothing else is."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from nstf.runtime.artifact.config import Limits
from nstf.runtime.small_buffers import small_buffers

LIMITS = Limits(1, 1, 1)  # tensors of 2^24 elements, tables of 2^20
WIDE = 1 << 16  # its square takes 16 GB as bytes
Make = Callable[[], Any]


def grid() -> tuple[torch.Tensor, ...]:
    side = torch.arange(WIDE)
    return torch.meshgrid(side, side, indexing="ij")


LARGE: dict[str, Make] = {
    "a grid": grid,
    "a stacked grid": lambda: torch.stack(grid()),
    "an expanded tensor": lambda: torch.zeros(1).expand(WIDE, WIDE) * 2,
    "pieces, stacked": lambda: torch.stack([torch.zeros(1 << 20)] * 17),
    "pieces, joined": lambda: torch.cat(tensors=[torch.zeros(1 << 20)] * 17),
    "repeated": lambda: torch.zeros(WIDE).repeat(WIDE, 1),
    "repeated by a list": lambda: torch.zeros(WIDE).repeat([WIDE, 1]),
    "tiled": lambda: torch.tile(torch.zeros(WIDE), (WIDE, 1)),
    "each repeated": lambda: torch.zeros(WIDE).repeat_interleave(WIDE),
    "each repeated as often as a tensor says": lambda: torch.repeat_interleave(
        torch.zeros(4), torch.tensor([1 << 30] * 4)
    ),
    "made by another": lambda: torch.zeros(1).new_zeros((WIDE, WIDE)),
    "made by another, by sizes": lambda: torch.zeros(1).new_ones(WIDE, WIDE),
    "by numpy, zeros": lambda: numpy.zeros((WIDE, WIDE), dtype=numpy.int8),
    "by numpy, ones": lambda: numpy.ones(shape=(WIDE, WIDE), dtype=numpy.int8),
    "by numpy, one number": lambda: numpy.full((WIDE, WIDE), 1, dtype=numpy.int8),
    "by numpy, numbers between two": lambda: numpy.linspace(0, 1, 1 << 30),
    "by numpy, a range": lambda: numpy.arange(1 << 30),
    "by numpy, a range of small steps": lambda: numpy.arange(0.0, 1.0, 1e-9),
    "by numpy, a product": lambda: numpy.outer(numpy.arange(WIDE), numpy.arange(WIDE)),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_table_is_refused_before_its_memory_is_asked_for(name: str) -> None:
    with small_buffers(LIMITS), pytest.raises(ValueError, match="elements, beyond the file's tensors"):
        LARGE[name]()


SMALL: dict[str, Make] = {
    "on meta": lambda: torch.stack([torch.zeros(1, device="meta").expand(WIDE, WIDE) * 2] * 2),
    "a stack": lambda: torch.stack([torch.zeros(4), torch.ones(4)], dim=-1),
    "repeats": lambda: torch.arange(4).repeat(2, 3).repeat_interleave(2).tile(2),
    "a grid": lambda: torch.stack(torch.meshgrid(torch.arange(9), torch.arange(9), indexing="ij")) + 1,
    "by numpy": lambda: (numpy.linspace(0, 1), numpy.arange(1, 9, 2), numpy.full(3, 1), numpy.outer([1, 2], [3])),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_usual_tables_are_made(name: str) -> None:
    with small_buffers(LIMITS):
        SMALL[name]()


def test_functions_of_numpy_kept_by_a_module_imported_meanwhile_are_unlimited_afterwards() -> None:
    with small_buffers(LIMITS):
        kept = numpy.zeros
        with pytest.raises(TypeError):
            numpy.zeros()  # type: ignore[call-overload]
    assert kept(1 << 21, numpy.int8).size == 1 << 21 and numpy.zeros is not kept
