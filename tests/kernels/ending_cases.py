"""Products with an ending against product, sum and what follows as launches of their own; as a program, interpreted, as JSON.

Interpreted kernels run in a process of their own: Triton reads TRITON_INTERPRET when it is imported.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from conftest import leaf, random_encoded

from nstf.kernels.formats import decode
from nstf.kernels.torch import decode_step


class Case(NamedTuple):
    kernel: str
    shape: tuple[int, int]
    batch: int
    programs: int  # along rows and columns together
    dtype: str = "float16"

    @property
    def name(self) -> str:
        return "-".join(str(part) for part in self)


# One part of the columns and several, the last of them not full; more places than rows, and several sixteens for a place;
# rows that are no sixteens; one row of activations, and several.
CASES = [
    Case("skinny", (96, 1024), 1, 2),
    Case("skinny", (96, 2560), 3, 9),
    Case("skinny", (160, 1000), 9, 100),
    Case("skinny", (41, 2056), 1, 6),
    Case("int_bytes", (96, 1024), 1, 3),
    Case("int_bytes", (160, 2560), 2, 9),
    Case("int_bytes", (41, 2056), 1, 4),
]
EPSILON = 1e-5


def product_of(case: Case, device: str) -> tuple[Any, Any, Tensor, Any]:
    """(the kernel's module, the packed matrix, activations, the tile)."""
    from nstf.kernels.triton import int_bytes, skinny
    from nstf.kernels.triton.packed import pack_leaf

    tree = leaf("int", bits=4, group=64, scale_bits=8)
    encoded = random_encoded(tree, case.shape, 1)
    weight = decode(encoded).double()
    # Sums of about one: activations of a gate should not all be saturated.
    x = torch.randn(case.batch, case.shape[1], generator=torch.Generator().manual_seed(2)).double()
    x = (x / (x @ weight.T).std()).to(getattr(torch, case.dtype))
    packed = pack_leaf(
        type(encoded)(tree, encoded.shape, {k: v.to(device) for k, v in encoded.arrays.items()})
    )
    return (
        {"skinny": skinny, "int_bytes": int_bytes}[case.kernel],
        packed,
        x.to(device),
        {"PROGRAMS": case.programs},
    )


def ended(case: Case, made: tuple[Any, Any, Tensor, Any], ending: Any, meeting: Any, out: Any = None) -> Any:
    module, packed, x, tile = made
    out = out or x.dtype
    specs = getattr(module, f"{case.kernel}_specs")(
        packed.layout, case.batch, x.dtype, "sm_90", out, tile, ending
    )
    return getattr(module, f"{case.kernel}_ended")(x, packed, specs[0], out, meeting)


def found(case: Case, device: str) -> dict[str, bool]:
    """Whether each ending is what launches of their own give: the same bits, but where a root mean square comes in."""
    from nstf.kernels.triton.ending import PLAIN, Ending, Meeting

    made = product_of(case, device)
    y, _ = ended(case, made, PLAIN, None)
    exact, _ = ended(case, made, PLAIN, None, torch.float32)
    same = {}
    generator = torch.Generator().manual_seed(3)
    h, gain = (torch.rand(n, case.shape[0], generator=generator).to(device) + 0.5 for n in (case.batch, 1))
    stream = h.clone()
    normed, squares = ended(case, made, Ending(adds=True), Meeting(h=stream, gain=gain[0]))
    same["adds"] = torch.equal(stream, h + y.float()) and torch.equal(normed, (stream * gain).to(y.dtype))
    same["squares"] = torch.allclose(squares.sum(1), stream.pow(2).sum(1), rtol=1e-6)
    before = torch.rand(case.batch, 7, generator=generator).to(device)
    meeting = Meeting(squares=before, epsilon=EPSILON)
    strength = torch.rsqrt(before.sum(1, keepdim=True) / case.shape[1] + EPSILON)
    whole, _ = ended(case, made, Ending(normed=True), meeting)
    close = {"rtol": 2e-3, "atol": 2e-3 * float((exact * strength).abs().max())}
    same["normed"] = torch.allclose(whole.float(), exact * strength, **close)
    for gelu in (False, True) if case.shape[0] % 32 == 0 else ():
        gated, _ = ended(case, made, Ending(gelu), None)
        expected = decode_step.gate(y, gelu)
        same[f"gate {gelu}"] = torch.allclose(gated.float(), expected.float(), rtol=2e-3, atol=1e-3)
        both, _ = ended(case, made, Ending(gelu, normed=True), meeting)
        expected = decode_step.gate(whole, gelu).float()
        close = {"rtol": 4e-3, "atol": 2e-3 * float(expected.abs().max())}
        same[f"gate {gelu} normed"] = torch.allclose(both.float(), expected, **close)
    return same


def main() -> None:
    torch.cuda.device = lambda device: nullcontext()  # type: ignore[assignment, misc]
    print(json.dumps({case.name: found(case, "cpu") for case in CASES}))


if __name__ == "__main__":
    main()
