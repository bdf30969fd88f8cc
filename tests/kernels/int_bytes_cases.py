"""Matrices for kernels/triton/int_bytes.py; as a program, the interpreted kernel's errors against `decode` as JSON.

Interpreted kernels run in a process of their own: Triton reads TRITON_INTERPRET when it is imported.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent))
from conftest import leaf, random_encoded

from nstf.kernels.formats import decode


class Case(NamedTuple):
    bits: int
    group: int
    shape: tuple[int, int]
    scale_bits: int = 8
    batch: int = 1
    dtype: str = "float16"
    programs: int = 132

    @property
    def name(self) -> str:
        return "-".join(str(part) for part in self)


CASES = [
    # Groups within a run of words, across words, and across the chunks of a warp; scales in steps and as numbers.
    *(
        Case(bits, group, (24, 1024), scale, 2)
        for bits, group, scale in ((2, 32, 8), (2, 128, 16), (3, 64, 8), (3, 32, 8), (4, 128, 16), (4, 64, 8))
    ),
    # Rows and columns that fill nothing, several blocks of rows for a program, whole warps beyond the last column.
    *(Case(bits, 64, (41, 1000), 8, 1, "bfloat16", 2) for bits in (2, 3, 4)),
    Case(2, 128, (20, 2600), 8, 2, "bfloat16", 4),
    Case(3, 256, (33, 2000), 16, 2, "bfloat16", 3),
    Case(4, 96, (33, 328), 8, 2, "float16", 3),
    Case(4, 128, (16, 4096), 16, 1, "bfloat16"),
]
LIMIT = 1e-6


def error(case: Case, device: str) -> float:
    """The largest, of the sum of absolute products."""
    from nstf.kernels.triton.int_bytes import int_bytes, int_bytes_specs, possible
    from nstf.kernels.triton.packed import pack_leaf

    tree = leaf("int", bits=case.bits, group=case.group, scale_bits=case.scale_bits)
    encoded = random_encoded(tree, case.shape, 1)
    weight = decode(encoded).double()
    encoded = type(encoded)(tree, encoded.shape, {k: v.to(device) for k, v in encoded.arrays.items()})
    packed = pack_leaf(encoded)
    assert packed is not None
    dtype = getattr(torch, case.dtype)
    x = torch.randn(case.batch, case.shape[1], generator=torch.Generator().manual_seed(2)).to(dtype)
    assert possible(packed.layout, case.batch, dtype, "sm_90")
    tile = {"PROGRAMS": case.programs}
    specs = int_bytes_specs(packed.layout, case.batch, dtype, "sm_90", torch.float32, tile)
    y = int_bytes(x.to(device), packed, specs, torch.float32).cpu().double()
    return float(((y - x.double() @ weight.T).abs() / (x.double().abs() @ weight.abs().T)).max())


def main() -> None:
    torch.cuda.device = lambda device: nullcontext()  # type: ignore[assignment, misc]
    print(json.dumps({case.name: error(case, "cpu") for case in CASES}))


if __name__ == "__main__":
    main()
