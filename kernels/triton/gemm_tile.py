"""The tile that gemm.py takes for a product where none was measured.

On NVIDIA from sweeps on an H200. On AMD, where nothing was timed, from code objects: registers that last, and the vector
instructions that decoding takes.
"""

import torch
import triton

from nstf.kernels.triton.launching import processors_of
from nstf.kernels.triton.packed import RUN, TABLE, Layout

# The widest tile of activations, beyond which the batch is split over programs, or walked over by one.
WIDEST = 128
# Tiles of X that run side by side on a die: as many as the planner's largest group.
MOST_BESIDE = 8
# What an iteration may stage: a program has 64 KiB on CDNA and RDNA, 227 KiB on Hopper, where two stages should fit.
_AMD_STAGE, _NVIDIA_STAGE = 60_000, 100_000


def tile_for(layout: Layout, batch: int, dtype: torch.dtype, arch: str) -> dict[str, int]:
    """Tile sizes, warps, stages and the other choices of `gemm_specs` for a batch."""
    amd = not arch.startswith("sm_")
    rdna = arch.startswith("gfx1")
    span = RUN * (16 // min(b for b, _ in layout.planes))
    bm = max(16, min(WIDEST, triton.next_power_of_2(batch)))
    if rdna and span > 128:
        # An iteration of so many columns left no registers for more rows: a few spilled at 128.
        bm = min(bm, 64)
    # RDNA's registers hold no wider tile: with 128 rows of W on four waves hundreds of them spilled.
    bn = 64 if bm <= 16 or rdna else 128

    def stage_bytes() -> int:
        return int(bm * span * dtype.itemsize + bn * span * layout.bits // 8)

    most = _AMD_STAGE if amd else _NVIDIA_STAGE
    while stage_bytes() > most and bm > 16:
        bm //= 2
    while stage_bytes() > most and bn > 32:
        bn //= 2
    if arch.startswith("gfx9") and dear(layout) and batch > bm and span <= 256:
        return _walking(layout, batch, arch)
    if rdna and span > 256 and bm > 16:
        bn = 32
    uniform = layout.whole or layout.group % RUN == 0
    # Numbers that go through float32, one by one, take more registers than pairs of them.
    single = layout.mode == TABLE or not uniform
    if arch.startswith("gfx9") and (layout.bits == 6 or single) and bm >= 64:
        bn = 64
    programs = triton.cdiv(layout.rows, bn) * triton.cdiv(batch, bm)
    processors, split = processors_of(arch), 1
    if bm <= 32:
        # Some five small programs for each multiprocessor.
        while programs * split < processors * (5 if bm == 16 else 1.5) and split < 8:
            split *= 2
    else:
        # As many as run at once: two on a multiprocessor, one of the largest.
        split = max(1, min(8, processors * (2 if bm == 64 else 1) // programs))
    stages = max(2, min(3 if bm <= 16 else 4, int(220_000 / stage_bytes() + 0.4)))
    if amd:
        # Look-ups keep more in registers.
        stages = 1 if rdna and bm >= 128 and layout.mode == TABLE else 2
    many = bm >= 128 if not amd else rdna and bm >= (32 if single else 64 if span > 128 else 128)
    return _tile(bm, bn, split, 8 if many else 4, stages)


def dear(layout: Layout) -> bool:
    """Whether a weight costs CDNA's vector ALU more than the plain 4- and 8-bit codes do, scales of short groups counted."""
    plain = layout.bits in (4, 8) and layout.mode != TABLE
    return not plain or not (layout.whole or layout.group >= 128)


def _walking(layout: Layout, batch: int, arch: str) -> dict[str, int]:
    """Weight-stationary: a program decodes its weights once and multiplies several tiles of activations with them.

    For 256 rows that is 1.3 to 2.4 times fewer vector instructions on gfx942 than a program for every tile of 128 (or 64)
    rows. Nothing is staged: so many activations would not fit. Not for an iteration of 512 columns (5 and 7 bits), which
    spilled hundreds of registers.
    """
    rows = max(64, triton.next_power_of_2(batch))
    # Look-ups and two planes keep more in registers.
    walk = min(rows // 64, 2 if layout.mode == TABLE or len(layout.planes) > 1 else 4)
    programs = triton.cdiv(layout.rows, 64) * triton.cdiv(batch, 64 * walk)
    split = max(1, min(8, processors_of(arch) // programs))
    return _tile(64, 64, split, 4, 1) | {"WALK": walk}


def _tile(bm: int, bn: int, split: int, warps: int, stages: int) -> dict[str, int]:
    return {
        "BM": bm,
        "BN": bn,
        "SPLIT": split,
        "WARPS": warps,
        "STAGES": stages,
        "SWAP": 1,
        "CHUNKS": 1,
        "SCALE_WEIGHTS": 0,
        "WALK": 1,
        "BESIDE": 0,
        "DIES": 0,
    }
