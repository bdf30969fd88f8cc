"""The first choice and the short list of tiles (kernels/triton/tuner.py) against others, on a GPU.

    python benchmarks/gpu_tiles.py [--others 12] [--json FILE]

For each matrix and number of rows of activations: the time of every tile of the short list, and of tiles of gemm.py drawn
at random from those that fit; then how much slower than the best of all the first choice is, and the best of the short list.
Compiling takes a few minutes. Times are taken as in gpu_kernels.py.
"""

import argparse
import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gpu_kernels import FORMATS, copies, random_encoded, seconds

from nstf.kernels.triton import launch_errors, tuner
from nstf.kernels.triton.gemm import gemm, gemm_specs
from nstf.kernels.triton.gemm_tile import tile_for
from nstf.kernels.triton.hopper import wgmma
from nstf.kernels.triton.linear import arch_of
from nstf.kernels.triton.packed import Layout, pack_leaf
from nstf.kernels.triton.spec import KernelSpec

SHAPES = ((4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (28672, 8192))
CASES = [("int4 g128", shape, rows) for shape in SHAPES for rows in (32, 64, 128, 256)]
CASES += [("int8 g128", shape, rows) for shape in ((4096, 4096), (14336, 4096)) for rows in (32, 128)]
CASES += [("int3 g128", (4096, 4096), 32), ("int3 g128", (14336, 4096), 64)]
# What two or more stages of a tile may take of a program's local memory.
_MOST_STAGED = 200_000


def others(layout: Layout, rows: int, arch: str, count: int) -> list[dict[str, int]]:
    """Tiles of gemm.py from all over the space, the same in every run."""
    own = tile_for(layout, rows, torch.bfloat16, arch)
    found = []
    for bm, bn, parts, warps, stages in product(
        (16, 32, 64, 128), (32, 64, 128, 256), (1, 2, 4, 8), (4, 8), (2, 3, 4)
    ):
        staged = stages * 128 * (2 * bm + bn * layout.bits // 8)
        useful = rows <= 4 * bm < 8 * rows and bm * bn <= 1 << 14 and (warps == 4 or bm * bn >= 1 << 12)
        if useful and staged < _MOST_STAGED:
            found.append({**own, "BM": bm, "BN": bn, "SPLIT": parts, "WARPS": warps, "STAGES": stages})
    return random.Random(rows).sample(found, min(count, len(found)))


def measured(name: str, shape: tuple[int, int], rows: int, count: int) -> dict[str, Any]:
    """Microseconds of the tiles of a case, and what was slower than the best by how much."""
    first = random_encoded(FORMATS[name], shape, 0)
    made = [random_encoded(FORMATS[name], shape, i) for i in range(min(16, copies(first.size_bytes)))]
    packed = [p for p in map(pack_leaf, made) if p is not None]
    layout, x = packed[0].layout, torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16)
    arch = arch_of(x.device)

    def time(specs: list[KernelSpec], kernel: str) -> float | None:
        run = wgmma if kernel == "wgmma" else gemm
        try:
            return 1e6 * float(seconds([lambda p=p: run(x, p, specs) for p in packed]))  # type: ignore[misc]
        except launch_errors():  # more registers or local memory than the card has
            return None

    listed = {
        tile: time(tuner.specs_with(layout, rows, x.dtype, arch, tile), tuner.kernel_of(tile))
        for tile in tuner.short_list(layout, rows, x.dtype, arch)
    }
    drawn = [
        time(gemm_specs(layout, rows, x.dtype, arch, tile), "gemm")
        for tile in others(layout, rows, arch, count)
    ]
    known = [t for t in listed.values() if t is not None]
    best = min(known + [t for t in drawn if t is not None])
    chosen = listed[tuner.first_choice(layout, rows, x.dtype, arch)]
    found = {"first": chosen and chosen / best, "listed": min(known) / best, "best_us": best}
    print(
        f"{name}, {shape[0]} x {shape[1]}, {rows} rows: best {best:.1f} us, first choice {found['first']:.2f}, "
        f"short list {found['listed']:.2f} ({len(known)} tiles, {len(drawn)} others)",
        flush=True,
    )
    return {"case": [name, shape, rows], **found, "short_list_us": listed, "others_us": drawn}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--others", type=int, default=12, help="tiles drawn at random for each case")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "gpu_tiles.py: torch sees no GPU; nothing was measured\n")
    rows = [measured(*case, options.others) for case in CASES]
    for what in ("first", "listed"):
        near = sum(1 for row in rows if row[what] is not None and row[what] <= 1.1)
        print(f"{what}: within 1.1 times of the best in {near} of {len(rows)} cases")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
