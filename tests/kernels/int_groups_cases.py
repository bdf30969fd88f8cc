"""Matrices for kernels/triton/int_groups.py; as a program, the interpreted kernel's errors against `decode` as JSON.

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
    dtype: str = "bfloat16"
    programs: int = 132
    batch: int = 1

    @property
    def name(self) -> str:
        return "-".join(str(part) for part in self)


CASES = [
    *(Case(bits, group, (48, 1024), scale) for bits in (2, 3, 4) for group, scale in ((32, 8), (64, 16))),
    *(Case(bits, 128, (48, 1280), 8, "float16") for bits in (2, 3, 4)),
    # Rows and columns that fill nothing, several blocks of rows for a program, whole warps beyond the last column.
    *(Case(bits, 64, (41, 1000), 8, "bfloat16", 2) for bits in (2, 3, 4)),
    Case(2, 128, (20, 2600), 8, "bfloat16", 4),
    Case(3, 256, (33, 2000), 16, "float16", 3),
    Case(4, 96, (33, 328), 8, "float16", 3),
    *(Case(bits, 64, (41, 1000), 8, "bfloat16", 2, batch=2) for bits in (2, 3, 4)),
    Case(4, 32, (48, 640), 16, "float16", batch=2),
]
# Sums in float32 of products with 128 or 1024 beside the code.
LIMIT = 2e-5


def error(case: Case, device: str) -> float:
    """The largest, of the sum of absolute products."""
    from nstf.kernels.triton.int_groups import int_groups, int_groups_specs, possible
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
    specs = int_groups_specs(packed.layout, case.batch, dtype, "sm_90", torch.float32, tile)
    y = int_groups(x.to(device), packed, specs, torch.float32).cpu().double()
    return float(((y - x.double() @ weight.T).abs() / (x.double().abs() @ weight.abs().T)).max())


def main() -> None:
    import quick_interpreter

    quick_interpreter.install()
    torch.cuda.device = lambda device: nullcontext()  # type: ignore[assignment, misc]
    print(json.dumps({case.name: error(case, "cpu") for case in CASES}))


if __name__ == "__main__":
    main()
