"""How exactly float32 matrix products are computed in a part of a conversion."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fast_products() -> Iterator[None]:
    """Products may round their inputs: to TF32 on a GPU, to bfloat16 on a CPU with units for that (AMX: 2.5 times faster).

    For statistics of inputs and gradients: 0.4 % per product, with random signs, are far below what a sample of text leaves
    open, and a second moment of rounded inputs is still positive semi-definite. Not for anything that is reported.
    """
    with _precision("medium"):
        yield


@contextmanager
def exact_products() -> Iterator[None]:
    """Products are computed in float32 inside a block of `fast_products`."""
    with _precision("highest"):
        yield


@contextmanager
def _precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
