"""Seconds of products on this processor, by the kernels that run the file.

Formats are timed in turn, several rounds of them, so that a slow moment of the machine meets them alike. Every product is
timed by itself, and one of the fastest counts (`typical`): what other programs did to the others says nothing of the
kernel. Between two products of a matrix as many bytes as the model has pass through the caches: matrices of all formats are
gone through one after the other, around and around, as a model's are by token after token. With several threads a program
on one of their cores can still hold up every product of a format for as long as it runs: what came out too long beside the
format's processor time with one thread is timed again (`_steady`).
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor

from nstf.kernels.cpu import ext
from nstf.kernels.cpu.engine_matrix import compile_matrix, panel_threads
from nstf.kernels.formats import EncodedTensor, Node, array_specs, bitpack, trellis
from nstf_convert.speed.atoms import Atom
from nstf_convert.speed.cache import SHORTEST

ROUNDS = 5
# A format whose gain from threads is so many times below the usual one of its shape was probably held up. What memory
# limits gains less, too, but comes out the same when it is timed again.
HELD_UP = 1.5
_REPEATS = 4
# Random numbers that stand for scales.
_SCALES = 1 << 18
# Products after which all threads are awake.
_AWAKE = 3
# Bytes of one format that a round goes through, and how many matrices at most.
_ROUND_BYTES = 1 << 20
_COPIES = 16
# Weights of a model lie in at most so many bytes as far as the caches are concerned.
LARGEST_POOL = 1 << 27
_SMALLEST_POOL = 1 << 18


class Pool:
    """Random bytes that stand for codes: arrays are views of it, one after the other, around and around."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = pool_bytes(size_bytes)
        part = torch.randint(
            0, 256, (min(self.size_bytes, 1 << 20),), dtype=torch.uint8, generator=_generator()
        )
        self._bytes = part.repeat(-(-self.size_bytes // len(part)))
        self._scales = torch.rand(_SCALES, generator=_generator()).add_(0.5)
        self._at = self._scale_at = 0

    def encoded(self, atom: Atom) -> EncodedTensor:
        """A matrix with random codes and plausible scales."""
        return self.filled(atom.node, (atom.rows, atom.cols))

    def filled(self, node: Node, shape: tuple[int, ...]) -> EncodedTensor:
        """The same of any tree."""
        arrays = {}
        for name, spec in array_specs(node, shape).items():
            if name.rpartition(".")[2] == "section":
                arrays[name] = _sections(node, name)
            elif spec.dtype == torch.uint8:
                arrays[name] = self._take(spec.size_bytes).reshape(spec.shape)
                if _holds_fp8(node):
                    # None that means NaN; by this thread alone, as in `pass_by`.
                    arrays[name] = torch.from_numpy(arrays[name].numpy() & 0x77)
            else:
                arrays[name] = self._take_scales(math.prod(spec.shape)).to(spec.dtype).reshape(spec.shape)
        return EncodedTensor(node, shape, arrays)

    def pass_by(self, count: int | None = None) -> None:
        """Reads so many bytes behind those that were handed out last, or all of them: what other matrices of the model do to
        the caches.

        By this thread alone: torch's others would go on spinning for a millisecond and more, on a core that the products
        timed next need. These then took up to twice as long, always those of the first formats of a round.
        """
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            words, first = self._bytes.view(torch.int64), self._at // 8
            end = first + (self.size_bytes if count is None else max(0, count)) // 8
            for part in words[first:end], words[: max(0, end - len(words))]:
                if len(part):
                    part.max()
        finally:
            torch.set_num_threads(before)

    def rewind(self) -> None:
        """From here on arrays are views from the first byte on."""
        self._at = 0

    def _take_scales(self, count: int) -> Tensor:
        """So many numbers of 0.5 to 1.5, in turn too: to draw them anew for each matrix took a third of all the time."""
        if count > _SCALES:
            return self._scales.repeat(-(-count // _SCALES))[:count]
        if self._scale_at + count > _SCALES:
            self._scale_at = 0
        found = self._scales[self._scale_at : self._scale_at + count]
        self._scale_at += -(-count // 16) * 16
        return found

    def _take(self, count: int) -> Tensor:
        if count > self.size_bytes:
            return self._bytes.repeat(-(-count // self.size_bytes))[:count]
        if self._at + count > self.size_bytes:
            self._at = 0
        found = self._bytes[self._at : self._at + count]
        self._at += -(-count // 64) * 64
        return found


def _sections(node: Node, name: str) -> Tensor:
    """The numbers of the sections of a trellis leaf's rows, one section after the other, as the format packs them."""
    for child in name.split(".")[:-1]:
        node = node.children[child]
    rows = node.params.rows
    numbers = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.uint8), torch.tensor(rows))
    return bitpack.pack(numbers[None], trellis.section_bits(node.params))[0]


def _holds_fp8(node: Node) -> bool:
    return node.kind == "fp8" or any(_holds_fp8(child) for child in node.children.values())


def pool_bytes(size_bytes: int) -> int:
    """The bytes among which a model's weights lie, rounded up by at most a quarter, within limits: what decides which
    cache holds them. To the next power of two, weights of 18 MB would be timed as 32, which a cache of that size does not
    hold beside anything else."""
    step = max(1, (1 << max(0, size_bytes - 1).bit_length()) // 8)
    return min(max(-(-size_bytes // step) * step, _SMALLEST_POOL), LARGEST_POOL)


def measure(
    atoms: Iterable[Atom], isa: str, threads: int, size_bytes: int, batch: int = 1
) -> dict[Atom, float]:
    """Seconds of a product of each leaf with `batch` rows of activations. size_bytes: of the whole model's weights."""
    shapes: dict[tuple[int, int], list[Atom]] = {}
    for atom in dict.fromkeys(atoms):
        shapes.setdefault((atom.rows, atom.cols), []).append(atom)
    pool = Pool(size_bytes)
    found: dict[Atom, float] = {}
    with using(isa):
        for same in shapes.values():
            found |= _steady(same, pool, threads, batch, panel_threads(size_bytes, threads))
    return found


def _steady(atoms: Sequence[Atom], pool: Pool, threads: int, batch: int, panels: int) -> dict[Atom, float]:
    """Seconds of leaves of one shape. Other programs add nothing to one thread's processor time, so the ratio to it shows
    what was held up; the least of some repetitions counts then."""
    found = _measure(atoms, pool, threads, batch, panels)
    if threads == 1 or len(atoms) == 1:
        return found
    alone = _measure(atoms, pool, 1, batch, panels)
    for _ in range(_REPEATS):
        ratios = {a: found[a] / max(alone[a], SHORTEST) for a in atoms}
        longest = HELD_UP * median(ratios.values())
        slow = [a for a in atoms if ratios[a] > longest]
        if not slow:
            break
        again = _measure(slow, pool, threads, batch, panels)
        found |= {a: min(found[a], again[a]) for a in slow}
    return found


def _measure(atoms: Sequence[Atom], pool: Pool, threads: int, batch: int, panels: int) -> dict[Atom, float]:
    """The same for leaves of one shape."""
    rows, cols = atoms[0].rows, atoms[0].cols
    x = torch.randn(batch, cols, generator=_generator())
    y = torch.empty(batch, rows)
    times: dict[Atom, list[float]] = {atom: [] for atom in atoms}
    clock, source, result = clock_for(threads), x.data_ptr(), y.data_ptr()
    # The threads sleep while bytes pass by, and waking them takes longer than most products: a token's are awake.
    first = compile_matrix(pool.encoded(atoms[0]), panels=panels)
    for group in _groups(atoms, pool, batch):
        pool.rewind()
        made = [
            (a, compile_matrix(pool.encoded(a), panels=panels)) for a, n in group.items() for _ in range(n)
        ]
        rest = pool.size_bytes - sum(a.size_bytes * n for a, n in group.items())
        # The first round brings all of them where the round before leaves them.
        for at in range(-1, ROUNDS if batch == 1 else 2):
            pool.pass_by(rest)
            for _ in range(_AWAKE if threads > 1 else 0):
                first.multiply_at(source, batch, result, threads)
            for atom, matrix in made:
                start = clock()
                matrix.multiply_at(source, batch, result, threads)
                if at >= 0:
                    times[atom].append(clock() - start)
    return {atom: typical(found) for atom, found in times.items()}


def _groups(atoms: Iterable[Atom], pool: Pool, batch: int) -> Iterator[dict[Atom, int]]:
    """How many matrices of each leaf are gone through together: no more bytes than the model has, where more than one leaf
    fits. Panels lie in memory of their own: if all leaves took turns, more would pass between two products of theirs."""
    group: dict[Atom, int] = {}
    held = 0
    for atom in atoms:
        # A product with many rows takes long enough to be timed once, and reads the matrix from the caches anyway.
        room = min(_ROUND_BYTES, pool.size_bytes) if batch == 1 else 0
        copies = min(_COPIES, max(1, room // atom.size_bytes))
        if group and held + copies * atom.size_bytes > pool.size_bytes:
            yield group
            group, held = {}, 0
        group[atom] = copies
        held += copies * atom.size_bytes
    if group:
        yield group


def clock_for(threads: int) -> Callable[[], float]:
    """What times are read from: with one thread its own processor time, to which nothing else adds."""
    return time.thread_time if threads == 1 else time.perf_counter


def typical(seconds: Sequence[float]) -> float:
    """The time that a tenth of the measurements are below: the least of few."""
    return sorted(seconds)[len(seconds) // 10]


@contextmanager
def using(isa: str) -> Iterator[None]:
    """Matrices made inside have the kernels of this instruction set."""
    before = ext.isa()
    ext.use_isa(isa)
    try:
        yield
    finally:
        ext.use_isa(before)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
