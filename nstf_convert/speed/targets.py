"""What `--target` names: this machine, an instruction set of CPUs, or a GPU's architecture."""

from collections.abc import Sequence
from dataclasses import dataclass

from nstf.errors import UsageError
from nstf.kernels.cpu import ext
from nstf.kernels.cpu.engine_matrix import available
from nstf.kernels.formats import Node
from nstf.kernels.triton.architecture import ARCHITECTURES

# The instruction sets that a name may stand for, the best first. "avx2" is what every processor with AVX2 runs: where
# this machine has AVX-VNNI as well, grids cost half as much with it, and a file planned for that is slow without.
CPU_SETS = {
    "avx2": ("avx2",),
    "avx2-vnni": ("avx2-vnni",),
    "avx512": ("avx512-vbmi", "avx512-vnni", "avx512"),
    "neon": ("neon-dotprod", "neon"),
}
# 8-bit floats as matrix cores and conversions of a GPU know them, by our names of the formats.
_FP8 = {"e4m3fn": "f8E4M3FN", "e5m2": "f8E5M2", "e4m3fnuz": "f8E4M3FNUZ", "e5m2fnuz": "f8E5M2FNUZ"}


@dataclass(frozen=True)
class Target:
    """name: as the user gave it. isa: the CPU's instruction set, or empty for a GPU. here: whether this machine runs it,
    so that its kernels can be timed."""

    name: str
    isa: str
    here: bool

    @property
    def is_cpu(self) -> bool:
        return bool(self.isa)

    def holds(self, tree: Node) -> bool:
        """Whether the target has what a format needs. 8-bit floats of the other flavour, and MXFP4 where no instruction
        knows it, are taken apart bit by bit on a GPU; a CPU decodes all of them alike."""
        if any(not self.holds(child) for child in tree.children.values()):
            return False
        if self.is_cpu:
            return True
        row = ARCHITECTURES[self.name]
        if tree.kind == "fp8":
            return _FP8.get(str(tree.params.variant), "") in row.fp8
        return tree.kind != "mxfp4" or row.scaled_fp4


def known() -> tuple[str, ...]:
    """Every name that a target may have."""
    return ("cpu", *CPU_SETS, *ARCHITECTURES)


def parse(names: Sequence[str], on_gpu: bool) -> tuple[Target, ...]:
    """The targets of these names, or this machine's when there is none. on_gpu: the conversion itself runs on a GPU, which
    then is this machine's target.

    Raises UsageError for an unknown name.
    """
    wanted = list(dict.fromkeys(names)) or [_here(on_gpu)]
    return tuple(_target(name) for name in wanted)


def check(names: Sequence[str]) -> None:
    """Raises UsageError for a name that no target has."""
    for name in names:
        if name not in known():
            raise UsageError(f"unknown target {name[:40]!r}: choose from {', '.join(known())}")


def _here(on_gpu: bool) -> str:
    if on_gpu:
        from nstf.kernels.triton.aot import target_here

        found = target_here()
        if found in ARCHITECTURES:
            return str(found)
    return "cpu"


def _target(name: str) -> Target:
    check([name])
    if name in ARCHITECTURES:
        return Target(name, "", False)
    sets = list(ext.isas()) if available() else []
    if name == "cpu":
        return Target(name, ext.isa() if sets else "portable", bool(sets))
    found = next((isa for isa in CPU_SETS[name] if isa in sets), None)
    return Target(name, found or CPU_SETS[name][-1], found is not None)
