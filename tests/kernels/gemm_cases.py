"""The order of the packed GEMM's programs, and programs that walk over tiles: as a program, what came out as JSON.

Interpreted kernels run in a process of their own: Triton reads TRITON_INTERPRET when it is imported.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parent))
from triton_cases import Case, encoded_of, relative_error

from nstf.kernels.formats import decode
from nstf.kernels.triton.gemm import gemm, gemm_specs, placed
from nstf.kernels.triton.packed import pack_leaf

# (tiles of W's rows, tiles of X's rows, parts of the columns, BESIDE, DIES): grids that dies divide, and odd ones.
GRIDS = (
    (8, 2, 1, 2, 8),
    (16, 4, 2, 4, 8),
    (5, 3, 2, 2, 8),
    (7, 1, 3, 1, 4),
    (3, 1, 1, 1, 8),
    (13, 5, 1, 8, 3),
    (6, 5, 2, 2, 1),
    (4, 3, 2, 1, 1),
)
ORDERS = ({"DIES": 8, "BESIDE": 8}, {"DIES": 3, "BESIDE": 2, "SPLIT": 2})
WALKS = ({"WALK": 2}, {"WALK": 4, "SPLIT": 2})
PRODUCTS = (
    Case("int4", (37, 264), 40),
    Case("int4_group_24", (20, 48), 40, "float16"),
    Case("int6_asymmetric", (20, 264), 40, "float16"),
    Case("fp8", (33, 96), 55, "float16"),
)
# Other ways to multiply the same walks by.
WAYS: dict[str, tuple[dict[str, int], ...]] = {
    "int4": ({"WALK": 2, "SWAP": 0},),
    "int6_asymmetric": ({"WALK": 2, "SCALE_WEIGHTS": 1},),
}


@triton.jit(do_not_specialize=["found"])
def where_kernel(found, BESIDE: tl.constexpr, DIES: tl.constexpr):
    n, m, part = placed(BESIDE, DIES)
    at = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(found + at * 3, n)
    tl.store(found + at * 3 + 1, m)
    tl.store(found + at * 3 + 2, part)


def places(tall: int, wide: int, parts: int, beside: int, dies: int) -> list[list[int]]:
    """(tile of W, tile of X, part) of each program, in the order in which they are launched."""
    found = torch.full((tall * wide * parts, 3), -1, dtype=torch.int32)
    where_kernel[(tall, wide, parts)](found, BESIDE=beside, DIES=dies)
    return found.tolist()


def products(case: Case) -> dict[str, Any]:
    """Of a product by tiles of 16 rows: its error, and which other orders and walks give other bits."""
    encoded = encoded_of(case)
    packed = pack_leaf(encoded)
    assert packed is not None
    x = torch.randn(case.batch, case.shape[1], generator=torch.Generator().manual_seed(1))
    x = x.to(getattr(torch, case.dtype))

    def run(changes: dict[str, int]) -> torch.Tensor:
        tile = {"BM": 16, "BN": 16, "SPLIT": 1, **changes}
        return gemm(x, packed, gemm_specs(packed.layout, case.batch, x.dtype, "gfx942", tile))

    known: dict[str, torch.Tensor] = {}

    def plain(changes: dict[str, int]) -> torch.Tensor:
        """The same sums in the order as launched, each tile of activations by a program of its own."""
        kept = {name: value for name, value in changes.items() if name not in ("DIES", "BESIDE", "WALK")}
        if str(kept) not in known:
            known[str(kept)] = run({**kept, "DIES": 1, "BESIDE": 1})
        return known[str(kept)]

    tiles = (*ORDERS, *WALKS, *WAYS.get(case.tree, ()))
    differing = [str(tile) for tile in tiles if not torch.equal(run(tile), plain(tile))]
    return {"error": relative_error(plain({}), x, decode(encoded)), "differing": differing}


def main() -> None:
    import quick_interpreter

    quick_interpreter.install()
    found: dict[str, Any] = {str(grid): places(*grid) for grid in GRIDS}
    found |= {case.name: products(case) for case in PRODUCTS}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
