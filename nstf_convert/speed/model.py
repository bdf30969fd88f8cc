"""Seconds of a product with one row of activations on a processor that is not here.

    seconds = start + max(bytes / bandwidth, weights * work / rate)

`work` is what decoding and multiplying one weight takes in the unit of `rate`: cycles of a core for CPUs, instructions of a
lane for GPUs. Where the numbers come from:

[h] measured on an H200, 28672 x 8192, one row (docs/gpu_speed.md), start and bandwidth taken off
[z] measured on one core of a Zen 4 (`nstf_convert.speed.measure`, matrices in the caches)
[n] vector instructions in the machine code for each weight (docs/gpu.md), doubled: what int4 on sm_90 takes of the rate
[a] assumed: of the right order; formats keep their order, and a predicted rate may be off by half
"""

from dataclasses import dataclass
from typing import Any

from nstf.kernels.formats import Node
from nstf.kernels.triton.architecture import ARCHITECTURES
from nstf_convert.speed.atoms import Atom
from nstf_convert.speed.targets import Target

# The share of the data sheet's bandwidth that a product reads at [h].
_GPU_BANDWIDTH = 0.85


@dataclass(frozen=True)
class Cpu:
    """A machine that stands for an instruction set [a]. bandwidth: bytes a second of all cores; rate: their cycles."""

    cores: int
    clock_hz: float
    bandwidth: float
    start_s: float = 3e-6

    @property
    def rate(self) -> float:
        return self.cores * self.clock_hz


# Desktop and small server machines of the day.
CPUS = {
    "avx2": Cpu(8, 3.5e9, 40e9),
    "avx512": Cpu(8, 3.5e9, 60e9),
    "neon": Cpu(8, 3.0e9, 60e9),
}
# Cycles of a core for a weight: (formats in int8 of up to 4 bits, wider ones, grids, shuffle, trellis up to 3 bits,
# trellis above, the rest in float32).
_CYCLES = {
    "avx2": {"int": 0.08, "wide": 0.14, "grid": 0.10, "shuffle": 0.09, "sums": 0.6, "trellis": 2.2, "float": 0.3},
    "avx512": {"int": 0.05, "wide": 0.06, "grid": 0.06, "shuffle": 0.06, "sums": 0.15, "trellis": 0.5, "float": 0.15},
    "neon": {"int": 0.2, "wide": 0.3, "grid": 0.25, "shuffle": 0.25, "sums": 6.0, "trellis": 6.0, "float": 0.5},
}  # fmt: skip
# Lane instructions a weight on sm_90, by bits of an integer [h]; those of `_GROUPED` and `_OTHER` that a whole token of an
# 8B shape takes [h].
_INT = {2: 5.3, 3: 7.4, 4: 4.7, 5: 8.0, 6: 8.4, 7: 10.0, 8: 8.0}
# Small groups and zero points on top of them [h].
_SMALL_GROUP, _ZEROS = 1.0, 0.8
# Rows of activations up to which kernels/triton/int_groups.py multiplies symmetric integers; their price, and groups of 32
# on top [h].
FEW_ROWS = 2
_GROUPED, _SMALLEST_GROUP = {2: 3.8, 3: 4.8, 4: 4.9}, 0.5
# Of a launch: what turning the activations of a rotated matrix takes [h].
_TURNING = 0.5
# Other formats on sm_90 [h].
_OTHER = {"grid": 11.9, "mxfp4": 7.7, "fp8": 8.0, "sums": 7.9, "trellis": 21.0, "float": 2.0}
# Shuffle codes there by quarter bits: 12 of a whole token, the others by how much longer the product takes [h]; of 8 to 11,
# 13 and 15 as of the rate above with as many tables.
_SHUFFLE = {
    8: 7.5, 9: 8.8, 10: 9.3, 11: 8.8, 12: 7.5, 13: 8.8, 14: 9.3, 15: 8.8, 16: 8.0, 17: 8.8, 18: 9.1, 19: 9.6, 20: 9.4,
}  # fmt: skip
# What AMD's code takes of sm_90's; by the machine code shuffle takes as many instructions as int4 there, 2.9 to 3.0 [n].
_AMD, _AMD_SHUFFLE = 1.25, 6.0
# Trellis values up to so many quarter bits are sums of bytes.
_MOST_SUMMED = 12


def seconds(target: Target, atom: Atom) -> float:
    """The predicted time of one leaf."""
    weights = atom.rows * atom.cols
    if target.is_cpu:
        family = target.name if target.name in CPUS else "avx2"
        row = CPUS[family]
        work = work_of(atom.leaf, family) * weights
        return row.start_s + max(atom.size_bytes / row.bandwidth, work / row.rate)
    card = ARCHITECTURES[target.name]
    work = work_of(atom.leaf, card.backend) * weights
    read = atom.size_bytes / (_GPU_BANDWIDTH * card.bandwidth)
    launches = 1.0 + (_TURNING if atom.node.kind == "rotated" else 0.0)
    return launches * card.launch_s + max(read, work / card.vector_rate)


def work_of(leaf: Node, family: str, rows: int = 1) -> float:
    """What decoding and multiplying one weight takes: cycles of a core on CPUs (`avx2`, `avx512`, `neon`), instructions of a
    lane on GPUs (`cuda`, `hip`). rows: of activations, which decide about the kernel."""
    if family in _CYCLES:
        return _CYCLES[family][_kind(leaf, wide=5)]
    return _instructions(leaf, family == "hip", rows)


def _kind(leaf: Node, wide: int) -> str:
    """The row of a table that a format belongs to. wide: bits from which integers are wide."""
    if leaf.kind == "int":
        return "wide" if leaf.params.bits >= wide else "int"
    if leaf.kind == "trellis":
        return "sums" if max(leaf.params.quarter_bits) <= _MOST_SUMMED else "trellis"
    return {"grid": "grid", "mxfp4": "grid", "shuffle": "shuffle"}.get(leaf.kind, "float")


def _instructions(leaf: Node, amd: bool, rows: int) -> float:
    """Lane instructions of a GPU for a weight."""
    params = leaf.params
    if leaf.kind == "int" and not amd and rows <= FEW_ROWS and _in_groups(params):
        return _GROUPED[params.bits] + (_SMALLEST_GROUP if params.group < 64 else 0.0)
    if leaf.kind == "shuffle":
        return _AMD_SHUFFLE if amd else _SHUFFLE[params.quarter_bits]
    if leaf.kind == "int":
        found = _INT[params.bits]
        found += _SMALL_GROUP if 0 < params.group < 128 else 0.0
        found += 0.0 if params.symmetric else _ZEROS
    else:
        kind = leaf.kind if leaf.kind in ("mxfp4", "fp8") else _kind(leaf, wide=9)
        found = _OTHER[kind]
    return found * (_AMD if amd else 1.0)


def _in_groups(params: Any) -> bool:
    """Whether int_groups.py multiplies matrices of an integer format."""
    whole_runs = params.group > 0 and params.group % 32 == 0
    few_bits = params.bits < 4 or (params.bits == 4 and params.group < 128)
    return bool(params.symmetric and whole_runs and few_bits)
