"""Planted structure against the same bytes in plain formats: what is found in tensors made of factors and noise.

    python benchmarks/planted.py [--noise 0 0.1 0.3]

Each row: the form that loses least beside plain formats of its bytes among those that a conversion would make, its
bytes, and its loss beside that of the lower hull of plain formats at its bytes, both as shares of the loss of erasing the
tensor. Below the smallest plain format the hull is the line to the erased tensor. No calibration: all errors count alike.
"""

import argparse
import time

import numpy as np
import torch

from nstf.analyzers.signatures import Signature
from nstf.proposals import Room, Target
from nstf.quantizers.stats import Stats, loss
from nstf_convert.pipeline.propose import candidates as cand
from nstf_convert.pipeline.propose import methods, structure
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import Unit
from nstf_convert.planner import Option, lower_hull

# Kind -> (role, product of random factors, their shapes); matrices of prime sides have no reshape. "+" is no product: what
# all experts share and, a tenth as large, what tells them apart.
KINDS: dict[str, tuple[str, str, tuple[tuple[int, ...], ...]]] = {
    "noise": ("up", "ij->ij", ((256, 192),)),
    "low rank 8": ("up", "ir,rj->ij", ((257, 8), (8, 191))),
    "CP of rank 6": ("conv", "ir,jr,kr,lr->ijkl", ((64, 6), (48, 6), (3, 6), (3, 6))),
    "Tucker 3 x 12 x 12": ("expert_stack", "abc,ia,jb,kc->ijk", ((3, 12, 12), (16, 3), (40, 12), (48, 12))),
    "train 3, 8": ("expert_stack", "ib,bjc,ck->ijk", ((16, 3), (3, 40, 8), (8, 48))),
    "one matrix + 0.1 each": ("expert_stack", "+", ((1, 64, 96), (8, 64, 96))),
}


def row(kind: str, noise: float) -> str:
    """A line of the table."""
    role, product, shapes = KINDS[kind]
    generator = torch.Generator().manual_seed(0)
    factors = [torch.randn(shape, generator=generator) for shape in shapes]
    weight = factors[0] + 0.1 * factors[1] if product == "+" else torch.einsum(product, *factors)
    weight = weight / weight.std() + noise * torch.randn(weight.shape, generator=generator)
    lead = 2 if role == "expert_stack" else 1
    unit = Unit("w", tuple(weight.shape), "float32", role, lead)
    known, allowed = Signature(weight, Stats(), lead, role), methods.method_families(None)
    start = time.process_time()
    simple = cand.plain_recipes(known, allowed, few=False)
    losses = cand.estimates(known, simple)
    plain = [(cand.arrays_bytes(unit, r), v) for r, v in zip(simple, losses, strict=True)]
    between = time.process_time()

    def size_of(recipe: Recipe) -> int:
        return cand.arrays_bytes(unit, recipe)

    def measure(recipe: Recipe) -> float:
        made = recipes.decode(recipes.encode(recipe, weight, Stats(), lead))
        return loss(weight, made.reshape(weight.shape), Stats(), lead)

    found = structure.explore(known, Target(), Room(frozenset(allowed), size_of=size_of), plain, measure)
    spent = f"{between - start:.2f} + {time.process_time() - between:.2f}"
    options = [Option(0, known.signal), *(Option(*point) for point in plain)]
    hull = [options[i] for i in lower_hull(options)]

    def rival(size: int) -> float:
        return float(np.interp(size, [o.size_bytes for o in hull], [o.loss for o in hull]))

    shape = " x ".join(map(str, weight.shape))
    if not found.made:
        bounds = ", ".join(f"{k.method} {k.least / k.rival:.2f}" for k in found.looks if k.rival)
        return f"| {kind} | {shape} | {noise:g} | nothing tried (bound / rival: {bounds}) | | | | {spent} |"
    best, value = min(found.made, key=lambda m: m[1] / rival(size_of(m[0])))
    said = recipes.describe(recipes.tree_of(best, tuple(weight.shape), lead))
    shares = f"{value / known.signal:.2g} | {rival(size_of(best)) / known.signal:.2g}"
    return f"| {kind} | {shape} | {noise:g} | {said} | {size_of(best)} | {shares} | {spent} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 0.1, 0.3])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| planted | shape | noise | best form made | bytes | its loss | plain formats there | CPU s, plain + structure |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for kind in KINDS:
        for noise in arguments.noise[:1] if kind == "noise" else arguments.noise:
            print(row(kind, noise), flush=True)


if __name__ == "__main__":
    main()
