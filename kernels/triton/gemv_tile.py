"""The tile that gemv.py takes for a plane of codes, and where it brings their fields."""

import triton

from nstf.kernels.triton.launching import lanes_of, processors_of
from nstf.kernels.triton.packed import INTEGER, Layout

_LOWEST = 11  # the lowest bit of a mantissa where a field may begin


def tile_for(layout: Layout, bits: int, arch: str) -> dict[str, int]:
    """QUADS: fours of words side by side; 32 to 64 columns a thread, so that registers hold their activations.

    From sweeps on an H200. Four warps as far as their registers last, since the warps of a program meet once for every ROWS
    rows; eight for 8-bit codes, where only bytes in flight count.
    """
    lanes = lanes_of(arch)
    per_quad = 8 * (16 // bits)
    quads = layout.padded // per_quad
    wide = min(triton.next_power_of_2(quads), 32768 // triton.next_power_of_2(per_quad))
    columns = wide * per_quad
    warps = max(128 // lanes, columns // ((32 if bits == 8 else 64) * lanes))
    warps = max(1, min(512 // lanes, wide // lanes, 1 << (warps.bit_length() - 1)))
    each = max(1, wide // (warps * lanes))
    rows = 2 if warps * lanes > 128 or bits == 3 else 4
    if warps * lanes == 512 and not (layout.mode == INTEGER and layout.symmetric and bits < 8):
        rows = 1
    if arch.startswith("gfx1") and (bits != 4 or layout.mode != INTEGER):
        # 256 registers: four rows of the wider codes would spill.
        rows = 1 if bits == 1 else max(1, rows // 2)
    # Threads that find room on a multiprocessor, by the registers that so many columns need.
    threads = 768 if columns <= 32 * warps * lanes else 512
    return {
        "QUADS": wide,
        "WARPS": warps,
        "ROWS": max(1, min(rows, 8 // each)),
        "SPLIT": triton.cdiv(quads, wide),
        "PROGRAMS": processors_of(arch) * max(1, threads // (warps * lanes)),
    }


def places(bits: int) -> tuple[int, ...]:
    """The shift, left when positive, that brings each field of a word into a mantissa: (j, half) by 2 j + half.

    From the top of the word down, a field takes the shift of the one above it as long as it stays at _LOWEST or higher.
    """
    offsets = sorted((16 * half + j * bits for j in range(16 // bits) for half in range(2)), reverse=True)
    shift_of, shift = {}, 0
    for i, offset in enumerate(offsets):
        if i == 0 or offset + shift < _LOWEST:
            shift = 23 - bits - offset
        shift_of[offset] = shift
    return tuple(shift_of[16 * half + j * bits] for j in range(16 // bits) for half in range(2))
