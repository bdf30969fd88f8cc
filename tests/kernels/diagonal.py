"""A sample of a product of cases: the default run takes a diagonal, `make slow` all the others."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def diagonal(*axes: Iterable[Any], every: int = 3) -> list[Any]:
    """The product of `axes` for `pytest.mark.parametrize`; slow unless the places on the axes sum to a multiple of `every`.

    Where two axes have at least `every` values, each value of each axis is in the default run.
    """
    found = []
    for numbered in product(*(enumerate(axis) for axis in axes)):
        values = tuple(value for _, value in numbered)
        marks = () if sum(place for place, _ in numbered) % every == 0 else (pytest.mark.slow,)
        found.append(pytest.param(*values, marks=marks, id="-".join(str(value) for value in values)))
    return found
