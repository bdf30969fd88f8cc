"""The planner's short list for the packed GEMM (gemm.py), and the measurement of it on a GPU.

The kernel's own choice of a tile (`gemm_specs` without `tile`) is always measured too, so that tuning never ends with
something slower than what runs without it.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from nstf.kernels.triton.architecture import Architecture, architecture
from nstf.kernels.triton.gemm import gemm_specs
from nstf.kernels.triton.packed import FLOAT, RUN, TABLE, Layout
from nstf.kernels.triton.planner import Problem, Tiling, TuningCache, lds_bytes, plan, tune
from nstf.kernels.triton.spec import KernelSpec

# Vector instructions to make a 16-bit number of a stored weight in gemm.py, without what does not depend on the number
# of weights: counted in the code objects for gfx942 (batch 16). Tables of values take loads too.
DECODE = {"int": 2.5, "fp": 3.0, "grid": 4.3}


def problem_of(layout: Layout, batch: int) -> Problem:
    """The planner's problem of a packed matrix: stored bits with scales and zero points, and the cost of decoding."""
    kind = "grid" if layout.mode == TABLE else "fp" if layout.mode == FLOAT else "int"
    scale_bits = 8 if layout.scales else 32 if layout.wide_scales else 16
    bits = layout.bits + (scale_bits + (0 if layout.symmetric else layout.bits)) / layout.group
    name = f"{kind}{layout.bits}{'' if layout.symmetric else 'z'}g{layout.group}"
    return Problem(batch, layout.rows, layout.cols, bits, DECODE[kind], name, depth=_depth(layout))


def tile_of(tiling: Tiling, problem: Problem) -> dict[str, int]:
    """The tiling in gemm.py's words."""
    return {
        "BM": tiling.block_m,
        "BN": tiling.block_n,
        "SPLIT": tiling.split_k,
        "WARPS": tiling.waves,
        "STAGES": tiling.stages,
        "WALK": tiling.walked(problem),
        "BESIDE": tiling.group,
        "DIES": tiling.xcds,
    }


# The tiles that were measured on the cards of this process, from files beside artifacts.
_MEASURED = TuningCache()


def use_measured(cache: TuningCache, target: str) -> int:
    """From now on products on `target` run with the tiles of a cache; how many of its entries those are.

    Raises ValueError for a tile that no tuner writes, with its key: such a file was not made by one.
    """
    known = {key: entry for key, entry in cache.entries.items() if key.startswith(f"{target}/")}
    for key, (tiling, _) in known.items():
        sizes = (tiling.block_m, tiling.block_n, tiling.split_k, tiling.waves)
        powers = all(size and size & (size - 1) == 0 for size in sizes)
        if not powers or not (
            16 <= min(sizes[:2]) and max(sizes[:2]) <= 256 and sizes[2] <= 64 and sizes[3] <= 16
        ):
            raise ValueError(f"entry {key[:60]!r} is no tile of these kernels")
        if not (1 <= tiling.stages <= 8 and 1 <= tiling.group <= 64 and 1 <= tiling.xcds <= 64):
            raise ValueError(f"entry {key[:60]!r} is no tile of these kernels")
    _MEASURED.entries |= known
    return len(known)


def measured_specs(
    layout: Layout, batch: int, dtype: torch.dtype, target: str, out: torch.dtype | None = None
) -> list[KernelSpec]:
    """The launches of the packed GEMM: with the tile that was measured for this product, or the kernel's own."""
    # Tiles are measured with 16-bit activations; others take another share of local memory.
    if _MEASURED.entries and dtype.itemsize == 2:
        tiling = _MEASURED.get(problem_of(layout, batch), target)
        row = architecture(target)
        fits = (
            tiling is not None
            and lds_bytes(problem_of(layout, batch), tiling, row) <= row.lds_bytes_per_group
        )
        if tiling is not None and fits and suits(layout)(tiling):
            return specs_with(layout, batch, dtype, row, tiling, out)
    return gemm_specs(layout, batch, dtype, target, out=out)


def specs_with(
    layout: Layout,
    batch: int,
    dtype: torch.dtype,
    row: Architecture,
    tiling: Tiling,
    out: torch.dtype | None = None,
) -> list[KernelSpec]:
    """The launches of a tiling, with AMD's options where it has matrix instructions."""
    tile = tile_of(tiling, problem_of(layout, batch))
    made = gemm_specs(layout, batch, dtype, row.target, tile, out)
    if row.backend != "hip":
        return made
    options = {"kpack": tiling.kpack, "waves_per_eu": tiling.waves_per_eu}
    if tiling.nonkdim:
        options["matrix_instr_nonkdim"] = tiling.nonkdim
    return [replace(spec, options=options) if spec.kind == "gemm" else spec for spec in made]


def suits(layout: Layout) -> Callable[[Tiling], bool]:
    """Which tilings gemm.py does: on matrix cores, and as deep as a chunk of codes."""
    return lambda tiling: tiling.matrix and tiling.block_k == _depth(layout)


def _depth(layout: Layout) -> int:
    """Columns of a chunk of the narrowest plane."""
    return RUN * (16 // min(bits for bits, _ in layout.planes))


def proposals(
    layout: Layout, batch: int, dtype: torch.dtype, row: Architecture, count: int = 4
) -> list[tuple[Tiling, list[KernelSpec]]]:
    """The short list with its launches, best first. Raises ValueError for a batch of 1: gemv.py has no tiles."""
    found = plan(problem_of(layout, batch), row, count, suits(layout))
    return [(x.tiling, specs_with(layout, batch, dtype, row, x.tiling)) for x in found]


def tune_gemm(
    layout: Layout,
    batch: int,
    dtype: torch.dtype,
    target: str,
    cache: TuningCache,
    seconds: Callable[[list[KernelSpec]], float],
    count: int = 4,
) -> Tiling | None:
    """The tiling that measured best (`specs_with` makes its launches), remembered in `cache`, or None for the kernel's own.

    seconds: runs launches on the GPU and gives their time (`triton.testing.do_bench`); it may raise RuntimeError
    for what the card cannot run.
    """
    row, problem = architecture(target), problem_of(layout, batch)
    if (known := cache.get(problem, target)) is not None:
        return known
    tried = TuningCache()
    best = tune(
        problem,
        row,
        lambda tiling: seconds(specs_with(layout, batch, dtype, row, tiling)),
        tried,
        count,
        suits(layout),
    )
    time_s = tried.entries[problem.key(target)][1]
    if time_s >= seconds(gemm_specs(layout, batch, dtype, target)):
        return None
    cache.put(problem, target, best, time_s)
    return best
