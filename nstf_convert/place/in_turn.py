"""Seconds of products on this CPU as a model makes them: one after the other, through as many bytes as the model has.

The planner times a product by itself after all other bytes passed through the caches, which ranks formats well; added up
over the layers of a model such times were 0.8 to 1.3 times what the layers took. A model reads its matrices in turn: of
one that is larger than the caches some part is still there in the next token, and none waits for a first page.
"""

import time

import torch

from nstf.kernels.cpu.engine_matrix import compile_matrix, panel_threads
from nstf.kernels.formats import Node
from nstf_convert.speed.atoms import Atom, atoms_of
from nstf_convert.speed.measure import Pool, clock_for, pool_bytes, typical, using

# More rows take their time from arithmetic, and a pass through a whole model with them takes seconds.
MOST_ROWS = 16
_MOST_COPIES = 4096
# Seconds that one leaf is measured for, and passes at least; the first, which finds nothing in the caches, does not count.
_SECONDS, _PASSES = 0.2, 3


def seconds_in_turn(
    tree: Node, shape: tuple[int, ...], rows: int, isa: str, threads: int, size_bytes: int, parts: int = 1
) -> float:
    """A product of an encoded matrix [out, in] with `rows` of activations. size_bytes: of the whole model's weights. parts:
    that it was divided into; ranks read what is stored, a whole small file is repacked into panels as it is opened."""
    panels = panel_threads(size_bytes, threads) if parts == 1 else 0
    with using(isa):
        leaves = [
            (times, _of(atom, rows, threads, size_bytes, panels)) for atom, times in atoms_of(tree, shape, 1)
        ]
    return sum(times * seconds for times, seconds in leaves)


def _of(atom: Atom, rows: int, threads: int, size_bytes: int, panels: int) -> float:
    """The same of a leaf: through so many copies of it as lie in the model's bytes."""
    pool, clock = Pool(size_bytes), clock_for(threads)
    count = min(max(1, pool_bytes(size_bytes) // atom.size_bytes), _MOST_COPIES)
    copies = [compile_matrix(pool.encoded(atom), panels=panels) for _ in range(count)]
    x, y = torch.randn(rows, atom.cols), torch.empty(rows, atom.rows)
    source, result = x.data_ptr(), y.data_ptr()
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(times) <= _PASSES or time.perf_counter() < end:
        start = clock()
        for matrix in copies:
            matrix.multiply_at(source, rows, result, threads)
        times.append((clock() - start) / count)
    return typical(times[1:])
