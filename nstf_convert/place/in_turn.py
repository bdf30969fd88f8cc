"""Seconds of products on this CPU as a model makes them: one after the other, through as many bytes as the model has.

The planner times a product by itself after all other bytes passed through the caches, which ranks formats well; added up
over the layers of a model such times were 0.8 to 1.3 times what the layers took. A model reads its matrices in turn: of
one that is larger than the caches some part is still there in the next token, and none waits for a first page.

The cores of a shared host have a fast and a slow state, 1.35 times apart, which last some tenths of a second. So all
products of a layer are timed in rounds, over seconds, and of each the least counts.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nstf.kernels.cpu.engine_matrix import compile_matrix, panel_threads
from nstf.kernels.formats import Node
from nstf_convert.speed.atoms import Atom, atoms_of
from nstf_convert.speed.measure import Pool, clock_for, pool_bytes, using

# More rows take their time from arithmetic, and a pass through a whole model with them takes seconds.
MOST_ROWS = 16
_MOST_COPIES = 4096
# Rounds, and seconds that all leaves are measured for together. The first pass through a leaf's copies, which finds nothing
# in the caches, does not count.
ROUNDS, SECONDS = 12, 3.0


def seconds_in_turn(
    cases: Sequence[tuple[Node, tuple[int, ...]]],
    rows: int,
    isa: str,
    threads: int,
    size_bytes: int,
    parts: int = 1,
) -> list[float]:
    """Of each encoded matrix [out, in] the product with `rows` of activations. size_bytes: of the whole model's weights.
    parts: that each was divided into; ranks read what is stored, a whole small file is repacked into panels as it is opened.
    """
    timed = InTurn(cases, rows, isa, threads, size_bytes, parts)
    for _ in range(ROUNDS):
        timed.round(SECONDS / ROUNDS)
    return timed.seconds()


class InTurn:
    """The same in rounds, for a caller who does something else between them."""

    def __init__(
        self,
        cases: Sequence[tuple[Node, tuple[int, ...]]],
        rows: int,
        isa: str,
        threads: int,
        size_bytes: int,
        parts: int = 1,
    ) -> None:
        panels = panel_threads(size_bytes, threads) if parts == 1 else 0
        self._leaves = [list(atoms_of(tree, shape, 1)) for tree, shape in cases]
        atoms = {atom for found in self._leaves for atom, _ in found}
        with using(isa):
            self._passes = {atom: _through(atom, rows, threads, size_bytes, panels) for atom in atoms}
        self._clock, self._least = clock_for(threads), dict.fromkeys(atoms, float("inf"))
        for run, _ in self._passes.values():
            run()

    def round(self, seconds: float) -> None:
        """Times all leaves, in about so many seconds and each once at least."""
        for atom, (run, count) in self._passes.items():
            end = time.perf_counter() + seconds / len(self._passes)
            while True:
                start = self._clock()
                run()
                self._least[atom] = min(self._least[atom], (self._clock() - start) / count)
                if time.perf_counter() >= end:
                    break

    def seconds(self) -> list[float]:
        """Of each matrix."""
        return [sum(times * self._least[atom] for atom, times in found) for found in self._leaves]


def _through(
    atom: Atom, rows: int, threads: int, size_bytes: int, panels: int
) -> tuple[Callable[[], None], int]:
    """A pass through so many copies of a leaf as lie in the model's bytes, and their number."""
    pool = Pool(size_bytes)
    count = min(max(1, pool_bytes(size_bytes) // atom.size_bytes), _MOST_COPIES)
    copies: list[Any] = [compile_matrix(pool.encoded(atom), panels=panels) for _ in range(count)]
    x, y = torch.randn(rows, atom.cols), torch.empty(rows, atom.rows)

    def run() -> None:
        source, result = x.data_ptr(), y.data_ptr()
        for matrix in copies:
            matrix.multiply_at(source, rows, result, threads)

    return run, count
