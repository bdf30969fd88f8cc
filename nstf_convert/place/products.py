"""What a product with a part of an encoded matrix takes on a device of a machine file.

One row of activations costs what the planner's model says (`nstf_convert/speed/model.py`, fitted on an H200), with the
machine's own rates; more rows add what the matrix cores need:

    stream  = max(bytes / read rate, weights * work / vector rate)
    compute = 2 (rows - 1) weights / matrix rate
    seconds = launch + max(stream, compute) + min(1, 64 / rows) * min(stream, compute)

Up to 64 rows the two follow each other, from some hundreds on decoding hides behind the matrix cores (int4 on an H200,
docs/gpu_speed.md: within 15 % for 28672 x 8192 at 1 to 4096 rows). Trellis codes are decoded again for every 32 rows beyond
4, and from 65 rows on written out in 16 bits once. On a CPU `--measure` puts times of the real kernels in the place of this
model. Processes of one host read its memory together: none takes less than its bytes at its share of the bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nstf.kernels.triton.architecture import ARCHITECTURES
from nstf_convert.place.costs import Matrix
from nstf_convert.place.machine import Device
from nstf_convert.speed.atoms import atoms_of
from nstf_convert.speed.model import FEW_ROWS, work_of

_FAMILIES = ("cuda", "hip", "avx2", "avx512", "neon")
# Rows up to which decoding and multiplying follow each other.
_SERIAL_ROWS = 64
# Rows for which trellis codes are decoded once; for each further so many it is done again; and rows beyond which blocks are
# decoded for the library's product.
_FREE_ROWS = 4
_TRELLIS_ROWS = 32
_MOST_TRELLIS_ROWS = 64
# Seconds of products: (matrices, parts that each is divided into, rows of activations) -> of each, or None where not known.
Measured = Callable[[Device, Sequence[Matrix], int, int], Sequence[float] | None]


@dataclass(frozen=True)
class Leaf:
    """A stored leaf of a matrix: bytes, weights, and by family of processors what decoding them takes, for up to FEW_ROWS
    rows of activations and for more."""

    size_bytes: float
    weights: float
    work: Mapping[str, float]
    work_of_many: Mapping[str, float]
    trellis: bool


class Products:
    """Prices of products, each computed once. measured: times that take the model's place where they are known."""

    def __init__(self, measured: Measured | None = None) -> None:
        self._measured = measured
        self._leaves: dict[str, tuple[Leaf, ...]] = {}
        self._known: dict[tuple[object, ...], float] = {}

    def seconds(
        self,
        device: Device,
        matrices: Sequence[Matrix],
        parts: int,
        rows: int,
        used: float = 1.0,
        each: float = 0.0,
    ) -> float:
        """A product with one part of so many of each matrix, in one launch where they are stored alike.

        rows: of activations; used: the share of a stack's experts that the rows are sent to; each: rows of an expert (of all
        matrices `rows` where 0).
        """
        key = (device.like, tuple(m.key for m in matrices), parts, rows, used, each)
        if key not in self._known:
            self._known[key] = self._seconds(device, matrices, parts, rows, used, each)
        return self._known[key]

    def _seconds(
        self, device: Device, matrices: Sequence[Matrix], parts: int, rows: int, used: float, each: float
    ) -> float:
        if self._measured is not None and used == 1.0 and not each:
            found = self._measured(device, matrices, parts, rows)
            if found is not None:
                return sum(found)
        launches, work = 0, 0.0
        groups: set[str] = set()
        for matrix in matrices:
            share = used / (parts if matrix.axis is not None else 1)
            leaves = self.leaves(matrix)
            # Matrices that meet the same activations run as one where they are stored alike.
            group = f"{matrix.group} {matrix.tree.kind} {matrix.tree.params}" if matrix.group else matrix.name
            if group not in groups or device.is_cpu:
                launches += len(leaves)
                groups.add(group)
            work += sum(_leaf_seconds(device, leaf, share, each or rows) for leaf in leaves)
        return launches * device.launch_s + work

    def beside_others(
        self, device: Device, seconds: float, matrices: Sequence[Matrix], parts: int, used: float = 1.0
    ) -> float:
        """What `seconds` of such a product become while all devices of the host work: they share its memory's bandwidth, and
        decoding that is slower than what is left of it is slowed by nothing."""
        read = sum(used * m.size_bytes / (parts if m.axis is not None else 1) for m in matrices)
        return max(seconds, read / (device.read_rate * device.together))

    def leaves(self, matrix: Matrix) -> tuple[Leaf, ...]:
        """What a matrix is stored as."""
        if matrix.key not in self._leaves:
            shape = matrix.shape if matrix.lead < len(matrix.shape) else (*matrix.shape, 1)
            found = []
            for atom, times in atoms_of(matrix.tree, shape, matrix.lead):
                weights = times * atom.rows * atom.cols
                few, many = (
                    {f: weights * work_of(atom.leaf, f, rows) for f in _FAMILIES}
                    for rows in (FEW_ROWS, FEW_ROWS + 1)
                )
                found.append(Leaf(times * atom.size_bytes, weights, few, many, atom.leaf.kind == "trellis"))
            self._leaves[matrix.key] = tuple(found)
        return self._leaves[matrix.key]


def _leaf_seconds(device: Device, leaf: Leaf, share: float, rows: float) -> float:
    """Without the launch."""
    read = share * leaf.size_bytes / device.read_rate
    rate = vector_rate(device)
    work = leaf.work if rows <= FEW_ROWS else leaf.work_of_many
    decode = share * work[family_of(device)] / rate if rate else 0.0
    compute = (
        2.0
        * max(0.0, rows - 1)
        * share
        * leaf.weights
        / device.matrix_rate("float32" if device.is_cpu else "bfloat16")
    )
    if device.is_cpu:
        # Decoded blocks serve all rows.
        return max(read, decode) + compute
    if leaf.trellis and rows > _MOST_TRELLIS_ROWS:
        written = 4.0 * share * leaf.weights / device.read_rate
        return max(read, decode) + written + compute
    if leaf.trellis:
        decode *= 1 + max(0.0, rows - _FREE_ROWS) / _TRELLIS_ROWS
    stream = max(read, decode)
    overlap = min(1.0, _SERIAL_ROWS / max(1.0, rows))
    return max(stream, compute) + overlap * min(stream, compute)


def family_of(device: Device) -> str:
    """The family of processors whose instructions a device has."""
    if device.kind in ARCHITECTURES:
        return str(ARCHITECTURES[device.kind].backend)
    if device.is_cpu:
        return "avx512" if device.kind == "cpu" else device.kind
    return "hip" if device.kind.startswith("gfx") else "cuda"


def vector_rate(device: Device) -> float:
    """Lane instructions a second (cycles of all cores on a CPU); 0 where nothing is known: reading alone counts then."""
    if device.vector_rate:
        return device.vector_rate
    return ARCHITECTURES[device.kind].vector_rate if device.kind in ARCHITECTURES else 0.0
