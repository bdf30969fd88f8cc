"""When and how wgmma.py runs: the choice of tiles, the launch, and whether this Triton has what it is written in."""

from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.launching import (
    even_sizes,
    handed_on,
    launch,
    layout_constants,
    layout_name,
    leaf_arguments,
    overlap_options,
    overlaps,
    processors_of,
    scale_type,
)
from nstf.kernels.triton.packed import EXPONENT, FLOAT, INTEGER, RUN, TABLE, Layout, Packed
from nstf.kernels.triton.spec import KernelSpec, pointer_type

# Above, decoding once for all tiles of activations is faster.
LARGEST_BATCH = 2048
# Rows of W of a tile: those of two warpgroups, whose instructions take 64 each.
_BN = 128
# Where this kernel was faster than gemm.py on an H200, in sweeps over the matrices of Llama-3 8B and 70B. Programs that
# share a tile exchange its sums, which small matrices do not repay.
_TALL = 80 * _BN  # rows of W
_MIDDLE, _LARGE = 1 << 24, 1 << 25  # weights
# Below so many rows of W, 8-bit codes with a scale a row took 1.2 times as long as in gemm.py (4096 x 14336, 64 rows).
_FEW = 64 * _BN


def possible(layout: Layout, batch: int, dtype: torch.dtype, arch: str) -> bool:
    """Whether this kernel does it: Hopper, 16-bit activations that its copy engine reads, groups of whole runs."""
    if arch != "sm_90" or dtype not in (torch.float16, torch.bfloat16) or not available():
        return False
    if not (layout.whole or layout.group % RUN == 0) or layout.cols % 8:
        return False
    return 16 < batch <= LARGEST_BATCH


def suits(layout: Layout, batch: int, dtype: torch.dtype, arch: str) -> bool:
    """Whether to take this kernel unmeasured: a matrix and batch for which it was faster than gemm.py."""
    if not possible(layout, batch, dtype, arch):
        return False
    weights, tall = layout.rows * layout.cols, layout.rows >= _TALL
    if batch > 64:
        return weights >= _MIDDLE
    # What gemm.py decodes fast, up to 64 rows of activations: it took 0.9 of the time.
    light = layout.mode == INTEGER and layout.symmetric and layout.group >= 128
    if layout.mode == TABLE:
        return tall or weights >= _MIDDLE  # gemm.py looks numbers up one by one: 1.4 to 2.5 times the time
    if batch > 32:
        few = layout.whole and layout.rows < _FEW
        return (tall or (weights >= _LARGE and not few)) and not (light and layout.bits == 4)
    light &= layout.bits in (2, 4) or (layout.bits == 8 and not layout.whole)
    return (tall or (weights >= _LARGE and layout.bits == 6)) and not light


def available() -> bool:
    """Whether this Triton has Gluon; its interpreter does not run it."""
    return not triton.knobs.runtime.interpret and _has_gluon()


@cache
def _has_gluon() -> bool:
    try:
        return find_spec("triton.experimental.gluon.language.nvidia.hopper") is not None
    except ImportError:
        return False


def wgmma_specs(
    layout: Layout,
    batch: int,
    dtype: torch.dtype,
    arch: str,
    out: torch.dtype | None = None,
    tile: dict[str, int] | None = None,
) -> list[KernelSpec]:
    """The launch for X [batch, cols]. `tile` overrides the choice; `out`: Y's dtype (X's when None)."""
    from nstf.kernels.triton.wgmma import runs_of, wgmma_kernel

    out = out or dtype
    chosen = _tile(layout, batch, arch, out) | (tile or {})
    bm, bn, bk, ahead, warps, grouped = (chosen[n] for n in ("BM", "BN", "BK", "AHEAD", "WARPS", "GROUPED"))
    span = RUN * runs_of(tuple(b for b, _ in layout.planes), bk)
    tiles = triton.cdiv(layout.rows, bn) * triton.cdiv(batch, bm)
    chunks = triton.cdiv(layout.padded, span)
    split, lag = chosen["SPLIT"], chosen["LAG_COLUMNS"] // span
    if split > chunks - lag:
        split = lag = 0
    half = dtype == torch.float16
    # A bfloat16 holds 128 + 7 bits, and no float16 of a table.
    pairs = layout.mode == INTEGER and layout.bits <= (8 if half else 7)
    pairs |= layout.mode == TABLE and half
    # Nor does a float16 hold every scale that is stored as a float32 or as an exponent.
    wide = layout.wide_scales or layout.scales == EXPONENT
    pairs |= layout.mode == FLOAT and (layout.whole or not (half and wide))
    return [
        KernelSpec(
            name=f"wgmma_{layout_name(layout)}_{pointer_type(dtype)[1:]}_{layout.groups}x{layout.group}"
            f"_{bm}x{bn}x{bk}a{ahead}w{grouped}x{warps}s{split}l{lag}"
            + (f"_{pointer_type(out)[1:]}" if out != dtype else ""),
            fn=wgmma_kernel,
            signature={
                "x": f"tensordesc<{pointer_type(dtype)[1:]}[{bm}, {bk}],{_shared(bk)!r}>",
                "words": "*i32",
                "scale": scale_type(layout),
                "zeros": "*u8",
                "row_scale": "*fp32",
                "table": "*fp16",
                "y": pointer_type(out),
                "twin": pointer_type(out),
                "parts": "*fp32",
                "flags": "*i32",
                **dict.fromkeys(("batch", "rows", "cols", "padded"), "i32"),
            },
            constants={
                **layout_constants(layout),
                "DTYPE": tl.float16 if half else tl.bfloat16,
                "PAIRS": pairs,
                "TWICE": False,
                "PDL": overlaps(arch),
                "BM": bm,
                "BN": bn,
                "BK": bk,
                "AHEAD": ahead,
                "SPLIT": split,
                "LAG": lag,
                "GROUPED": grouped,
                "WARPS": warps,
            },
            divisible=(
                *("words", "scale", "zeros", "row_scale", "table", "y", "twin", "parts", "flags"),
                *even_sizes(layout),
            ),
            num_warps=warps,
            num_stages=1,
            options=overlap_options(arch),
            batch=batch,
            kind="wgmma",
            # A program without a share would be waited for by the one above it.
            grid=(min(tiles * chunks, tiles * split or chosen["PROGRAMS"]), 1, 1),
        )
    ]


def wgmma(
    x: Tensor,
    packed: Packed,
    specs: list[KernelSpec],
    out: torch.dtype | None = None,
    twin: Tensor | None = None,
) -> Tensor:
    """x [batch, cols] -> y [batch, rows] of `out` (x's dtype when None), as the specs were made for. twin: another place for
    y as well, which may be in another GPU's memory."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    (spec,) = specs
    layout, batch, known = packed.layout, len(x), spec.constants
    # The copy engine wants rows side by side from an aligned address on.
    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    tile = [known["BM"], known["BK"]]
    described = TensorDescriptor(x, list(x.shape), list(x.stride()), tile, _shared(known["BK"]))
    y = torch.empty(batch, layout.rows, dtype=out or x.dtype, device=x.device)
    parts = torch.empty(spec.grid[0], known["BN"], known["BM"], dtype=torch.float32, device=x.device)
    # Zeros, which a launch leaves as it found them: as many for all shapes, so that few are made in a capture.
    count = max(2 * processors_of("sm_90"), spec.grid[0] * known["GROUPED"])
    flags = handed_on(x.device, count, torch.int32, "wgmma")
    sizes = (batch, layout.rows, layout.cols, layout.padded)
    if twin is not None:
        spec = _twice(spec)
    launch(spec, described, *leaf_arguments(packed), y, y if twin is None else twin, parts, flags, *sizes)
    return y


def _twice(spec: KernelSpec) -> KernelSpec:
    """The launch that writes Y to two places, made once."""
    key = "twice"
    if key not in spec.kept:
        spec.kept[key] = replace(spec, name=f"{spec.name}_twice", constants={**spec.constants, "TWICE": True})
    found: KernelSpec = spec.kept[key]
    return found


@cache
def _shared(bk: int) -> Any:
    """How a tile of activations lies in shared memory: rows of bk numbers, swizzled."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_byte_width=min(128, 2 * bk), element_bitwidth=16, rank=2)


def _tile(layout: Layout, batch: int, arch: str, out: torch.dtype) -> dict[str, int]:
    """The tile and how programs share it, from sweeps on an H200 (docs/gpu_speed.md).

    Two programs on a multiprocessor for few rows of activations, else one.
    """
    # Results of 256 rows in float32 find no room in local memory.
    most = 128 if out == torch.float32 else 256
    bm = max(32, min(most, triton.next_power_of_2(batch)))
    two = bm <= 64
    programs = processors_of(arch) * (2 if two else 1)
    split = _split(layout, batch, bm, programs)
    if bm == 256 and split > 1:
        half = _split(layout, batch, bm // 2, programs)
        if half and _cycles(layout, bm // 2, half) < _cycles(layout, bm, split):
            bm, split = bm // 2, half
    # Warpgroups apart took 0.95 to 0.84 of the time, but 1.3 times as long for codes with a plane of one bit. And beside the
    # sums of 256 rows the way into the second one's code wants a register more than 3 and 6 bits leave.
    apart = not two and layout.bits not in (5, 7) and not (bm == 256 and layout.bits in (3, 6))
    return {
        "BM": bm,
        "BN": _BN,
        # A chunk of 3-bit codes is an odd number of runs.
        "BK": 32 if layout.bits == 3 else 64,
        # With 4 steps instead of 3 a product of 64 rows by 3-bit codes took 1.7 times as long; why was not found.
        "AHEAD": 3 if bm == 256 or (bm <= 64 and layout.bits == 3) else 4,
        "GROUPED": 2 if apart else 1,
        "WARPS": 4 if two or apart else 8,
        "PROGRAMS": programs,
        "SPLIT": split,
        # What the others take to write their sums, in columns: none where a chunk is longer (3, 5 and 7 bits).
        "LAG_COLUMNS": 256 if bm >= 128 and split > 1 else 0,
    }


def has_whole_shares(layout: Layout, batch: int, arch: str, dtype: torch.dtype) -> bool:
    """Whether programs of the kernel's own tile share tiles in whole numbers, and could have equal shares of all instead."""
    return _tile(layout, batch, arch, dtype)["SPLIT"] > 0


def _split(layout: Layout, batch: int, bm: int, programs: int) -> int:
    """Programs to a tile where whole numbers of them fill most of the device, else 0: then shares are equal, and a program
    has parts of two tiles, of which it hands on one and waits for the other's."""
    tiles = triton.cdiv(layout.rows, _BN) * triton.cdiv(batch, bm)
    # A share of fewer columns is over before its first words are there.
    split = min(programs // tiles, triton.cdiv(layout.cols, 512))
    # 96 programs of 132 were a little faster than equal shares (6144 x 4096), 80 much slower (10240 x 8192).
    return split if split * tiles >= 0.7 * programs else 0


def _cycles(layout: Layout, bm: int, split: int) -> float:
    """Of a tile in 256 or 128 rows of activations: 64 columns and reading another's sums, of int4. The latter was measured
    by the clock of a multiprocessor; the former with warpgroups in step (1180 and 760), less what running apart saved since.
    Other formats take longer for both tiles."""
    step, read = (1100, 2540) if bm == 256 else (640, 1270)
    return layout.cols / 64 / split * step + (split - 1) * read
