"""Matrices for kernels/triton/skinny.py with codes left in place; as a program, the interpreted kernel's errors as JSON.

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
    symmetric: bool
    shape: tuple[int, int] = (41, 1064)
    batch: int = 1
    dtype: str = "bfloat16"
    programs: int = 4
    scale_bits: int = 16

    @property
    def name(self) -> str:
        return "-".join(str(part) for part in self)


# All rates, groups within the runs of a word and across, several blocks of rows for a program, columns that fill nothing.
CASES = [
    Case(4, 128, True),
    Case(4, 64, True, scale_bits=8),
    Case(4, 32, False, batch=3, dtype="float16"),
    Case(3, 64, True, batch=9),
    Case(3, 0, False),
    Case(2, 256, True, dtype="float16"),
    Case(2, 96, False, batch=2),
]
# Of the sum of absolute products. Activations lose nothing; sums are of float32.
LIMIT = 2e-5


def error(case: Case, device: str) -> float:
    """The largest, of the sum of absolute products."""
    from nstf.kernels.triton.packed import pack_leaf
    from nstf.kernels.triton.skinny import skinny, skinny_specs

    tree = leaf("int", bits=case.bits, group=case.group, symmetric=case.symmetric, scale_bits=case.scale_bits)
    encoded = random_encoded(tree, case.shape, 1)
    weight = decode(encoded).double()
    encoded = type(encoded)(tree, encoded.shape, {k: v.to(device) for k, v in encoded.arrays.items()})
    packed = pack_leaf(encoded)
    assert packed is not None
    dtype = getattr(torch, case.dtype)
    # Rows of unlike size, one of them large: each has a scale of its own.
    sizes = torch.tensor([1000.0, 1e-3, 1.0])[torch.arange(case.batch) % 3, None]
    x = torch.randn(case.batch, case.shape[1], generator=torch.Generator().manual_seed(2)) * sizes
    x = x.to(dtype)
    tile = {"PROGRAMS": case.programs, "IN_PLACE": 1}
    specs = skinny_specs(packed.layout, case.batch, dtype, "sm_90", torch.float32, tile)
    assert specs[0].constants["IN_PLACE"] and specs[0].constants["PAIRS"]
    y = skinny(x.to(device), packed, specs, torch.float32).cpu().double()
    return float(((y - x.double() @ weight.T).abs() / (x.double().abs() @ weight.abs().T)).max())


def main() -> None:
    torch.cuda.device = lambda device: nullcontext()  # type: ignore[assignment, misc]
    print(json.dumps({case.name: error(case, "cpu") for case in CASES}))


if __name__ == "__main__":
    main()
