"""What attention_decode.py is compiled with: warps, stages, steps and so on, by how pages are stored."""

from nstf.kernels.triton.attention_pages import Forms
from nstf.kernels.triton.launching import overlaps

# Of attention_bytes.py: programs of a warp with SLOTS pages in shared memory. Eight fit; six, and those of the last pages
# beside them, are faster (H100).
BY_BYTES = {"BYTES": 1, "SLOTS": 2, "RESIDENT": 6, "REGS": 0, "STAGES": 2}


def by_bytes(forms: Forms, group: int, masked: bool, ring: bool, arch: str) -> bool:
    """Whether codes are multiplied as bytes: by what attention_bytes.py can."""
    keys, values = forms.keys, forms.values
    known = keys.bits == values.bits == 4 and keys.channel and not values.channel and forms.size == 128
    return known and group <= 4 and not masked and not ring and arch == "sm_90" and overlaps(arch)


def runs_of(forms: Forms) -> tuple[int, int]:
    """Runs of channels of keys and of values."""

    def runs(bits: int, words: int, few: int) -> int:
        return 1 if bits == 16 else 16 // bits // 2 if words < few else 16 // bits * max(1, words // 32)

    keys, values = forms.keys.bits, forms.values.bits
    return runs(keys, forms.size * keys // 32, 8), runs(values, forms.size * values // 16, 16)


def tile_of(forms: Forms, masked: bool, arch: str) -> dict[str, int]:
    """RESIDENT: programs for each multiprocessor; STEP: positions at a time; ROWS: of queries, what instructions have; REGS:
    registers of a thread at most (0: as many as there are), so that so many programs are resident; FOLD: as in the kernel.

    Codes: programs of one warp, which wait for nobody, as many as run at once: a second wave for a few took half as long
    again (H200, heads of 128). The four schedulers of a multiprocessor have 16384 registers each, so programs of one warp
    come in fours: 12 of 168 registers, or 8 where local memory holds no more or, with rules, 168 would spill. 16 of 128 are
    slower.
    """
    bits = forms.keys.bits, forms.values.bits
    small = arch.startswith(("gfx11", "gfx12"))
    warps, step = (4, 64) if bits[1] == 16 else (1, 64)
    if not arch.startswith("sm_") or forms.size > 128:
        step = 32
    if small and min(bits) < 16:
        # Even so it spills: the operands of their matrix cores are held twice.
        warps, step = 1 if min(bits) == 8 else 2, 16
    elif small or forms.size > 128:
        warps *= 2
    nvidia = arch.startswith("sm_")
    registers = 168 if nvidia and warps == 1 else 0
    resident = 12 // warps if nvidia and forms.size <= 128 else max(4, 12 // warps)
    stages = 2
    if registers and forms.record_bytes * step > 16000 * 64:
        resident, registers = 8, 0
    elif registers and masked:
        resident, registers, stages = 8, 0, 3
    return {
        "WARPS": warps,
        "STAGES": stages,
        "EACH": 2,
        "STEP": step,
        "RESIDENT": resident,
        "ROWS": 8 if nvidia else 16,
        "FOLD": int(nvidia),
        "REGS": registers,
        "BYTES": 0,
        "SLOTS": 2,
    }
