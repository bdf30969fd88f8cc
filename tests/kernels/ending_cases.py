"""Products with an ending against product, sum and what follows in launches of their own; as a program, as JSON.

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

from nstf.kernels.formats import EncodedTensor, decode
from nstf.kernels.formats.tree import array_specs
from nstf.kernels.torch import decode_step


class Case(NamedTuple):
    kernel: str
    shape: tuple[int, int]
    batch: int
    dtype: str = "float16"

    @property
    def name(self) -> str:
        return "-".join(str(part) for part in self)


# One part of the columns and several, the last of them not full; more rows than one program has, and rows that fill none;
# one row of activations, and several.
CASES = [
    Case("skinny", (96, 1024), 1),
    Case("skinny", (544, 1064), 3),
    Case("skinny", (41, 2056), 9),
    Case("bytes", (96, 1024), 1),
    Case("int_groups", (288, 1280), 1),
    Case("int_groups", (41, 1000), 2),
    Case("trellis", (96, 1088), 1),
    Case("sections", (96, 64), 3),
    Case("shuffle", (256, 320), 1),
    Case("shuffle", (64, 128), 6),
]
EPSILON = 1e-5
TREES = {
    "skinny": leaf("int", bits=4, group=64, scale_bits=8),
    "bytes": leaf("int", bits=8, group=0),
    "int_groups": leaf("int", bits=4, group=64, scale_bits=8),
    "trellis": leaf("trellis", quarter_bits=(11,)),
    "sections": leaf("trellis", quarter_bits=(8, 16), rows=(48, 48)),
    "shuffle": leaf("shuffle", quarter_bits=13),
}


def product_of(case: Case, device: str) -> tuple[EncodedTensor, Tensor]:
    """(the matrix, activations)."""
    encoded = (
        random_encoded(TREES[case.kernel], case.shape, 1) if case.kernel != "sections" else _sections(case)
    )
    weight = decode(encoded).double()
    # Sums of about one: not all of a gate's activations should be saturated.
    x = torch.randn(case.batch, case.shape[1], generator=torch.Generator().manual_seed(2)).double()
    x = (x / (x @ weight.T).std()).to(getattr(torch, case.dtype))
    there = {k: v.to(device) for k, v in encoded.arrays.items()}
    return EncodedTensor(encoded.tree, encoded.shape, there), x.to(device)


def _sections(case: Case) -> EncodedTensor:
    """Rows of both sections in turn."""
    tree = TREES[case.kernel]
    arrays = {
        path: torch.randint(0, 256, spec.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        if spec.dtype == torch.uint8
        else torch.ones(spec.shape)
        for path, spec in array_specs(tree, case.shape).items()
    }
    return EncodedTensor(
        tree, case.shape, arrays | {"section": torch.full((case.shape[0] // 8,), 0xAA).byte()}
    )


def parts_of(case: Case, encoded: EncodedTensor, x: Tensor) -> Tensor:
    """f32 [programs along the columns, batch, rows]."""
    from nstf.kernels.triton import linear
    from nstf.kernels.triton.ended import into
    from nstf.kernels.triton.tuner import packed_specs

    if case.kernel in ("skinny", "bytes", "int_groups"):
        # Whether or not it is the one that is taken for a matrix of this size.
        layout, kernel = linear.packed_of(encoded).layout, case.kernel.replace("bytes", "skinny")
        made = list(packed_specs(layout, case.batch, x.dtype, "sm_90", kernel, torch.float32))
    else:
        made = linear.leaf_specs(encoded, case.batch, x.dtype, torch.float32, x.dtype, "sm_90")
    products = [spec for spec in made if spec.kind != "sum"]
    parts = torch.full((products[0].grid[1], case.batch, case.shape[0]), float("nan"), device=x.device)
    into(parts, x, encoded, products)
    return parts


def ended(
    case: Case, parts: Tensor, dtype: torch.dtype, ending: Any, meeting: Any
) -> tuple[Tensor, Tensor | None]:
    from nstf.kernels.triton import sums

    last = sums.ending_spec(case.batch, *case.shape, len(parts), dtype, ending, "sm_90")
    return sums.ended(parts, case.shape[1], dtype, last, meeting)


def found(case: Case, device: str) -> dict[str, bool]:
    """Whether each ending is what launches of their own give: the same bits, but where a root mean square comes in."""
    from nstf.kernels.triton.ending import Ending, Meeting

    encoded, x = product_of(case, device)
    parts, dtype = parts_of(case, encoded, x), x.dtype
    rows, cols = case.shape
    exact = torch.zeros(case.batch, rows, device=device)
    for part in parts:
        exact += part
    y, _ = ended(case, parts, dtype, Ending(), Meeting())
    generator = torch.Generator().manual_seed(3)
    h, gain = (torch.rand(n, rows, generator=generator).to(device) + 0.5 for n in (case.batch, 1))
    stream = h.clone()
    new, squares = ended(case, parts, dtype, Ending(adds=True), Meeting(h=stream, gain=gain[0]))
    assert squares is not None
    plain = x.float() @ decode(encoded).T
    same = {
        "the product": torch.allclose(exact, plain, rtol=1e-3, atol=1e-2),
        "the sum": torch.equal(y, exact.to(dtype)),
        "the stream": torch.equal(stream, h + y.float()),
        "times the gain": torch.equal(new, (stream * gain).to(dtype)),
        "squares": torch.allclose(squares.sum(1), stream.pow(2).sum(1), rtol=1e-6),
    }
    before = torch.rand(case.batch, -(-cols // 256), generator=generator).to(device) * cols / 8
    meeting = Meeting(squares=before, epsilon=EPSILON)
    whole, _ = ended(case, parts, dtype, Ending(normed=True), meeting)
    strength = torch.rsqrt(before.sum(1, keepdim=True) / cols + EPSILON)
    same["normed"] = near(whole, (exact * strength).to(dtype))
    for gelu in (False, True) if rows % 2 == 0 else ():
        name = "gelu" if gelu else "silu"
        gated, _ = ended(case, parts, dtype, Ending(gelu), Meeting())
        same[name] = near(gated, decode_step.gate(y, gelu))
        both, _ = ended(case, parts, dtype, Ending(gelu, normed=True), meeting)
        same[f"{name}, normed"] = near(both, decode_step.gate(whole, gelu))
    return same


def near(y: Tensor, expected: Tensor) -> bool:
    """Apart by one rounding of float16 at most."""
    return torch.allclose(y.float(), expected.float(), rtol=1e-3, atol=1e-3)


def main() -> None:
    import quick_interpreter

    quick_interpreter.install()
    torch.cuda.device = lambda device: nullcontext()  # type: ignore[assignment, misc]
    print(json.dumps({case.name: found(case, "cpu") for case in CASES if case.name in sys.argv[1:]}))


if __name__ == "__main__":
    main()
