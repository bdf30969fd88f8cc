"""What the planner and the inspection must know of a GPU: one row for each target that nstf compiles for.

A target (`gfx942`, `sm_90`) names an instruction set; several cards share it. The row describes the instruction set and
one card of it, `card`: its number of units, bandwidth and peaks. Where the numbers come from:

[l] LLVM, AMDGPUUsage.rst and AMDGPUBaseInfo.cpp: registers, their granule, waves for each SIMD, local memory
[i] AMD's instruction set guides (CDNA2, CDNA3, CDNA4, RDNA3, RDNA4): matrix instructions, wave sizes, number formats
[d] AMD's and NVIDIA's data sheets of the card: units, clock, bandwidth, peaks without sparsity
[c] CUDA C programming guide, compute capability 9.0, and the occupancy calculator
[a] assumed: a round number of the right order; moves a prediction, never a check

A unit is what one workgroup runs on: a compute unit of CDNA, a workgroup processor of RDNA (two compute units: the
compiler's default mode), a streaming multiprocessor of NVIDIA.
"""

from dataclasses import dataclass, field
from typing import Literal

from nstf.errors import UsageError

Backend = Literal["hip", "cuda"]


@dataclass(frozen=True)
class Architecture:
    """One target. Bytes, hertz, bytes per second and operations per second (a multiply-add is two)."""

    target: str
    card: str
    backend: Backend
    wave: int  # lanes [i]
    units: int  # [d]
    simds: int  # of a unit [i]
    xcds: int  # dies that workgroups are dealt to in turn, each with its own second-level cache [d]
    vector_registers: (
        int  # of a lane's column of a SIMD; CDNA: vector and accumulation registers together [l]
    )
    register_granule: int  # [l]
    registers_per_wave: int  # a wave can address at most this many [l]
    waves_per_simd: int  # [l]
    lds_bytes: int  # of a unit [l][i]
    lds_bytes_per_group: int  # of one workgroup at most [l]
    lds_granule: int  # [l]
    lds_rate: int  # bytes a unit reads from local memory in a clock [i]
    cache_bytes: int  # second level, of one XCD [d]
    clock_hz: float  # [d]
    bandwidth: float  # [d]
    matrix_16bit: float  # float16 and bfloat16 [d]
    matrix_8bit: float  # int8, and fp8 where `fp8` names one [d]
    matrix_shapes: tuple[tuple[int, int, int], ...]  # (m, n, k) of the 16-bit instructions [i]
    fp8: frozenset[str] = field(default_factory=frozenset)  # MLIR's names of those the matrix cores take [i]
    scaled_fp4: bool = False  # block-scaled 4-bit products are instructions [i]
    bf16: bool = False  # the vector ALU adds and multiplies bfloat16; else matrix cores alone know it [i]
    cache_rate: int = 64  # bytes a unit gets from the second-level cache in a clock [a]
    latency_s: float = 8e-7  # of a load from memory under load [a]
    launch_s: float = 3e-6  # from one kernel's end to the next one's start [a]

    @property
    def lanes_per_clock(self) -> int:
        """Vector instructions a unit starts in a clock, times their lanes [i]."""
        return self.simds * (16 if self.wave == 64 else 32)

    @property
    def vector_rate(self) -> float:
        """Lane-instructions of the vector ALU per second, on all units."""
        return self.units * self.lanes_per_clock * self.clock_hz

    def matrix_rate(self, bits: int) -> float:
        """Operations per second of the matrix cores on operands of so many bits."""
        return self.matrix_8bit if bits <= 8 else self.matrix_16bit


_OCP = frozenset({"f8E4M3FN", "f8E5M2"})
_FNUZ = frozenset({"f8E4M3FNUZ", "f8E5M2FNUZ"})
_CDNA: dict = {
    "backend": "hip",
    "wave": 64,
    "simds": 4,
    "vector_registers": 512,
    "register_granule": 8,
    "registers_per_wave": 512,
    "waves_per_simd": 8,
}
# The 1.5 times larger register file of the larger cards of each generation.
_RDNA: dict = {
    "backend": "hip",
    "wave": 32,
    "simds": 4,
    "xcds": 1,
    "vector_registers": 1536,
    "register_granule": 24,
    "registers_per_wave": 256,
    "waves_per_simd": 16,
    "lds_bytes": 128 << 10,
    "lds_bytes_per_group": 64 << 10,
    "lds_granule": 512,
    "lds_rate": 256,
    "matrix_shapes": ((16, 16, 16),),
    "cache_rate": 128,
    "latency_s": 6e-7,
}

ARCHITECTURES: dict[str, Architecture] = {
    row.target: row
    for row in (
        Architecture(
            target="gfx90a",
            card="MI250X, one of its two dies",
            units=110,
            xcds=1,
            lds_bytes=64 << 10,
            lds_bytes_per_group=64 << 10,
            lds_granule=512,
            lds_rate=128,
            cache_bytes=8 << 20,
            clock_hz=1.7e9,
            bandwidth=1.638e12,
            matrix_16bit=191.5e12,
            matrix_8bit=191.5e12,
            matrix_shapes=((16, 16, 16), (32, 32, 8)),
            **_CDNA,
        ),
        Architecture(
            target="gfx942",
            card="MI300X",
            units=304,
            xcds=8,
            lds_bytes=64 << 10,
            lds_bytes_per_group=64 << 10,
            lds_granule=512,
            lds_rate=128,
            cache_bytes=4 << 20,
            clock_hz=2.1e9,
            bandwidth=5.3e12,
            matrix_16bit=1307.4e12,
            matrix_8bit=2614.9e12,
            matrix_shapes=((16, 16, 16), (32, 32, 8)),
            fp8=_FNUZ,
            **_CDNA,
        ),
        Architecture(
            target="gfx950",
            card="MI355X",
            units=256,
            xcds=8,
            lds_bytes=160 << 10,
            lds_bytes_per_group=160 << 10,
            lds_granule=1280,
            lds_rate=256,
            cache_bytes=4 << 20,
            clock_hz=2.4e9,
            bandwidth=8.0e12,
            matrix_16bit=2516.6e12,
            matrix_8bit=5033.2e12,
            matrix_shapes=((16, 16, 32), (32, 32, 16)),
            fp8=_OCP,
            scaled_fp4=True,
            **_CDNA,
        ),
        Architecture(
            target="gfx1100",
            card="RX 7900 XTX",
            units=48,
            cache_bytes=6 << 20,
            clock_hz=2.5e9,
            bandwidth=960e9,
            matrix_16bit=122.8e12,
            matrix_8bit=122.8e12,
            **_RDNA,
        ),
        Architecture(
            target="gfx1201",
            card="RX 9070 XT",
            units=32,
            cache_bytes=8 << 20,
            clock_hz=2.97e9,
            bandwidth=640e9,
            matrix_16bit=195e12,
            matrix_8bit=389e12,
            fp8=_OCP,
            **_RDNA,
        ),
        Architecture(
            target="sm_90",
            card="H200",
            backend="cuda",
            wave=32,
            units=132,
            simds=4,
            xcds=1,
            vector_registers=512,  # 65536 of a multiprocessor, by 4 partitions and 32 lanes [c]
            register_granule=8,
            registers_per_wave=255,
            waves_per_simd=16,
            lds_bytes=228 << 10,
            lds_bytes_per_group=227 << 10,
            lds_granule=1024,
            lds_rate=128,
            cache_bytes=50 << 20,
            clock_hz=1.98e9,
            bandwidth=4.8e12,
            matrix_16bit=989.4e12,
            matrix_8bit=1978.9e12,
            matrix_shapes=((64, 8, 16), (16, 8, 16)),
            fp8=_OCP,
            bf16=True,
            latency_s=6e-7,
        ),
    )
}
# Fixed costs of a workgroup's local memory: NVIDIA's driver keeps 1 KiB of it [c].
_CUDA_RESERVED_BYTES = 1024
_CUDA_GROUPS_PER_UNIT = 32
_AMD_GROUPS_PER_UNIT = 32


def architecture(target: str) -> Architecture:
    """The row of a target. Raises UsageError that lists the known ones."""
    try:
        return ARCHITECTURES[target]
    except KeyError:
        known = ", ".join(ARCHITECTURES)
        raise UsageError(f"unknown target {target[:40]!r}: nstf compiles for {known}") from None


@dataclass(frozen=True)
class Occupancy:
    """Waves that share a SIMD (a fraction when a workgroup has fewer waves than the unit has SIMDs)."""

    waves_per_simd: float
    groups_per_unit: int
    limit: str  # registers, lds, waves or groups: what would have to shrink for more


def occupancy(row: Architecture, registers: int, lds_bytes: int, waves: int) -> Occupancy:
    """How many workgroups of `waves` waves fit on a unit.

    registers: of a lane, vector and accumulation registers together, as the code object states them.
    lds_bytes: of a workgroup (Triton's `metadata.shared`: the AMD code object itself says 0). A SIMD holds
    registers // (registers of a wave, rounded up to the granule) waves; waves are dealt to the SIMDs in turn.
    """
    granule = row.register_granule
    rounded = max(granule, -(-registers // granule) * granule)
    by_registers = row.vector_registers // rounded
    per_simd = -(-waves // row.simds)
    limits = {
        "registers": (min(by_registers, row.waves_per_simd) * row.simds) // waves
        if waves < row.simds
        else min(by_registers, row.waves_per_simd) // per_simd,
        "groups": _CUDA_GROUPS_PER_UNIT if row.backend == "cuda" else _AMD_GROUPS_PER_UNIT,
    }
    if by_registers >= row.waves_per_simd:
        limits["waves"] = limits.pop("registers")
    if lds_bytes:
        wanted = lds_bytes + (_CUDA_RESERVED_BYTES if row.backend == "cuda" else 0)
        wanted = -(-wanted // row.lds_granule) * row.lds_granule
        fits = lds_bytes <= row.lds_bytes_per_group
        limits["lds"] = row.lds_bytes // wanted if fits else 0
    limit = min(limits, key=lambda name: limits[name])
    groups = limits[limit]
    return Occupancy(groups * waves / row.simds, groups, limit)
