"""What a decomposition loses at least at a number of stored values, whatever its ranks.

Each unfolding says what is lost at least when its rank is r. Ranks that lose at most t in every unfolding are at least
r_i(t), and take at least numbers(r(t)) values. So a decomposition of fewer values loses more than t: the largest such t
among LEVELS is the bound. It holds for the best decomposition there is, not only for the one that an algorithm finds.
"""

import math
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from nstf.kernels.formats.tree import Shape
from nstf.proposals import FactorForm, Room, Unfolding

LEVELS = np.geomspace(1.0, 1e-7, 128)
"""Losses that are looked at, as shares of the loss of erasing the tensor."""

# Ranks of the unfoldings at each level, [levels] each -> numbers that are stored at least, [levels].
Numbers = Callable[[Sequence[np.ndarray]], np.ndarray]


class Frontier:
    """The bound as a function of the numbers that are stored."""

    def __init__(self, signal: float, parts: Sequence[Unfolding], numbers: Numbers) -> None:
        """signal: the loss of erasing the tensor. parts: the unfoldings whose ranks the decomposition bounds."""
        self._signal, self._parts, self._numbers = signal, parts, numbers
        self._sharp = False
        self._make()

    def _make(self) -> None:
        levels = LEVELS * self._signal
        # Tails fall with the rank: the first rank whose tail is at most the level.
        ranks = [np.searchsorted(-p.tails, -levels, side="left").clip(1, p.side) for p in self._parts]
        self._least = np.maximum.accumulate(self._numbers(ranks))

    def least(self, numbers: float) -> float:
        """A loss that no decomposition of so many numbers is below."""
        above = int(np.searchsorted(self._least, numbers, side="right"))
        return float(LEVELS[above] * self._signal) if above < len(LEVELS) else 0.0

    def may_win(self, room: Room, method: str, size_bytes: int, factor: FactorForm) -> float | None:
        """The bound at a number of bytes where a method may win there, else None (and `room` notes it)."""
        numbers = size_bytes * 8 / factor.bits
        if not self._sharp and not room.rules_out(self.least(numbers), size_bytes, factor, self._signal):
            for part in self._parts:
                part.sharpen()
            self._sharp = True
            self._make()
        least = self.least(numbers)
        return least if room.may_win(method, size_bytes, least, factor, self._signal) else None


def cp_numbers(dims: Shape) -> Numbers:
    """Of CP: one rank, at least that of every unfolding."""
    return lambda ranks: np.max(ranks, axis=0) * float(sum(dims))


def train_numbers(dims: Shape) -> Numbers:
    """Of a tensor train with the ranks of the bonds in turn."""

    def numbers(ranks: Sequence[np.ndarray]) -> np.ndarray:
        bonds = [np.ones(len(LEVELS)), *(r.astype(np.float64) for r in ranks), np.ones(len(LEVELS))]
        return np.asarray(sum(bonds[i] * n * bonds[i + 1] for i, n in enumerate(dims)))

    return numbers


def tucker_numbers(dims: Shape) -> Numbers:
    """Of a Tucker core with its bases: the ranks of the axes in turn, and last that of the matrix, which is at most the
    product of the axes' ranks on either side. An axis that stays whole needs no basis."""

    def numbers(ranks: Sequence[np.ndarray]) -> np.ndarray:
        *axes, matrix = (r.astype(np.float64) for r in ranks)
        best = np.full(len(LEVELS), math.inf)
        for whole in product((False, True), repeat=len(dims)):
            sizes = [np.full_like(r, n) if w else r for r, n, w in zip(axes, dims, whole, strict=True)]
            bases = sum((n * r for r, n, w in zip(axes, dims, whole, strict=True) if not w), np.zeros(1))
            best = np.minimum(best, np.maximum(np.prod(sizes, axis=0), matrix**2) + bases)
        return best

    return numbers
