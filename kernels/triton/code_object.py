"""Reads a compiled kernel without the card: registers, spills, local memory, occupancy, and its loop.

Local memory is not in AMD's code objects: Triton's is dynamic and their note says 0, so it is taken from Triton's
`metadata.shared`. The loop is counted in `asm["amdgcn"]` for AMD, in the disassembly for NVIDIA (the wheel of triton
brings nvdisasm), or else in its PTX.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nstf.errors import CorruptError
from nstf.kernels.triton.architecture import Architecture, Occupancy, architecture, occupancy
from nstf.kernels.triton.assembly import Counts, disassemble, main_loop
from nstf.kernels.triton.elf import amd_metadata, cuda_resources


@dataclass(frozen=True)
class CodeReport:
    """What a code object tells. Registers are a lane's; vector_registers holds accumulation registers too."""

    name: str
    target: str
    waves: int
    vector_registers: int
    accumulation_registers: int
    scalar_registers: int
    vector_spills: int
    scalar_spills: int
    scratch_bytes: int
    lds_bytes: int
    occupancy: Occupancy
    code_bytes: int
    emulated: tuple[str, ...]
    loop: Counts
    listing: str  # amdgcn, sass or ptx: what the loop was counted in

    def vector_per_weight(self, weights: float) -> float:
        """Vector instructions for each weight, of which a workgroup's loop iteration handles `weights`."""
        row = architecture(self.target)
        return self.loop.vector * row.wave * self.waves / weights

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"wide_share": self.loop.wide_share}


def inspect(asm: Mapping[str, Any], metadata: Mapping[str, Any], target: str) -> CodeReport:
    """The report of one compiled kernel.

    asm: Triton's stages by name (`amdgcn` and `hsaco`, or `ptx` and `cubin`; `ttir` when emulated formats are
    to be found). metadata: Triton's, as a mapping (`name`, `num_warps`, `shared`). Raises CorruptError when the
    code object cannot be read.
    """
    row = architecture(target)
    waves, shared = int(metadata["num_warps"]), int(metadata["shared"])
    if row.backend == "hip":
        binary = asm["hsaco"]
        kernels = [k for k in amd_metadata(binary).get("amdhsa.kernels", []) if isinstance(k, dict)]
        if len(kernels) != 1:
            raise CorruptError(f"code object: {len(kernels)} kernels inside, expected 1; compile it again")
        note = {key: value for key, value in kernels[0].items() if isinstance(value, int)}
        registers, accumulation = note.get(".vgpr_count", 0), note.get(".agpr_count", 0)
        scalars, scratch = note.get(".sgpr_count", 0), note.get(".private_segment_fixed_size", 0)
        spills = note.get(".vgpr_spill_count", 0), note.get(".sgpr_spill_count", 0)
        listing, text = "amdgcn", str(asm["amdgcn"])
    else:
        binary = asm["cubin"]
        registers, scratch = cuda_resources(binary)
        accumulation = scalars = 0
        spills = scratch // 4, 0
        sass = disassemble(binary)
        listing, text = ("sass", sass) if sass is not None else ("ptx", str(asm["ptx"]))
    return CodeReport(
        name=str(metadata["name"]),
        target=target,
        waves=waves,
        vector_registers=registers,
        accumulation_registers=accumulation,
        scalar_registers=scalars,
        vector_spills=spills[0],
        scalar_spills=spills[1],
        scratch_bytes=scratch,
        lds_bytes=shared,
        occupancy=occupancy(row, registers, shared, waves),
        code_bytes=len(binary),
        emulated=emulated(str(asm.get("ttir", "")), row),
        loop=main_loop(text),
        listing=listing,
    )


# Rounding to bfloat16 in software after each: 4 to 6 instructions for one.
_BF16 = re.compile(r"arith\.(?:add|sub|mul|div)f\b.*(?:x|: )bf16\b")
_FP8 = re.compile(r"f8E\d\w*")


def emulated(ttir: str, row: Architecture) -> tuple[str, ...]:
    """Number formats in the kernel's Triton IR that the target has no instruction for.

    The compiler emulates them silently: 8-bit floats of the other flavour turn 300 instructions into 13000, and a
    bfloat16 sum becomes a float32 one that is rounded by hand.
    """
    found = {word for word in _FP8.findall(ttir) if word not in row.fp8}
    if "tt.dot_scaled" in ttir and not row.scaled_fp4:
        found.add("dot_scaled")
    if not row.bf16 and _BF16.search(ttir):
        found.add("bf16 arithmetic")
    return tuple(sorted(found))


@dataclass(frozen=True)
class Expected:
    """What a kernel promises of its loop. weights, weight_bytes: of a workgroup's iteration; None when not known."""

    matrix: bool = False  # a matrix product: matrix instructions
    wide_loads: bool = True  # the weights come in loads of 16 bytes
    weights: float | None = None
    weight_bytes: float | None = None
    vector_per_weight: float | None = None  # at most


def misses(report: CodeReport, expected: Expected) -> list[str]:
    """The promises that a code object breaks, one line each with the number found; empty when it keeps them."""
    row, loop, found = architecture(report.target), report.loop, []
    if report.vector_spills or report.scalar_spills or report.scratch_bytes or loop.scratch:
        found.append(
            f"spills {report.vector_spills} vector and {report.scalar_spills} scalar registers, "
            f"{report.scratch_bytes} bytes of scratch"
        )
    if report.lds_bytes > row.lds_bytes_per_group:
        found.append(f"{report.lds_bytes} bytes of local memory; a workgroup has {row.lds_bytes_per_group}")
    elif report.occupancy.groups_per_unit < 1:
        found.append(f"does not fit on a unit: {report.occupancy.limit}")
    if report.emulated:
        found.append(f"emulates {', '.join(report.emulated)}")
    if expected.matrix and not loop.matrix:
        found.append("no matrix instruction in its loop")
    if expected.wide_loads and (narrow := _narrow_weights(report, expected)):
        found.append(narrow)
    if expected.vector_per_weight is not None and expected.weights:
        measured = report.vector_per_weight(expected.weights)
        if measured > expected.vector_per_weight:
            most = expected.vector_per_weight
            found.append(f"{measured:.2f} vector instructions for each weight; at most {most:g}")
    return found


def _narrow_weights(report: CodeReport, expected: Expected) -> str:
    """Why the weights cannot all come in loads of 16 bytes; empty when they can."""
    loop, lanes = report.loop, architecture(report.target).wave * report.waves
    wide = 16 * lanes * sum(count for width, count in loop.loads.items() if width >= 16)
    if not wide:
        return f"no load of 16 bytes in its loop; the widest has {max(loop.loads, default=0)}"
    if expected.weight_bytes is None:
        return ""
    if wide < expected.weight_bytes:
        return f"{wide} bytes of an iteration come in loads of 16 bytes; its weights have {expected.weight_bytes:g}"
    # Wide loads may all be those of the activations. AMD's buffer descriptors tell arrays apart.
    whole = [s for s in loop.streams if lanes * sum(w * n for w, n in s.items()) >= expected.weight_bytes]
    if loop.streams and whole and not any(min(s) >= 16 for s in whole):
        return f"no array of {expected.weight_bytes:g} bytes an iteration comes in loads of 16 bytes alone"
    return ""
