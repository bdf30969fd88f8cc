"""Properties of every quantiser over matrices of random shapes and parameters; `make fuzz` tries 20,000 of each."""

import dataclasses
import math
import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from nstf.kernels.formats import EncodedTensor, bitpack, check, decode, node_from_json, node_to_json
from nstf.quantizers import METHODS, method
from nstf.quantizers.stats import Stats
from tests.quantizers.conftest import correlated_hessian

# One, primes, multiples and no multiples of the groups.
ROWS, COLS = (1, 2, 3, 5, 8, 13, 17), (1, 2, 7, 8, 31, 32, 33, 48, 64, 67)
GROUPS = (0, 8, 16, 24, 32, 64)
# The codes of a method, all of them; codes of other methods depend on one another.
CODES = {"fp8": 8, "grid16": 4, "mxfp4": 4}
# A search of Hessians is slow, and a path through codes slower: fewer of them.
CHEAP = ("int_grid", "fp8", "grid16", "mxfp4")


def params_of(rng: random.Random, name: str) -> Any:
    """Parameters of a method, drawn among those that it takes."""
    module = method(name)
    drawn: dict[str, Any] = {"rounding": "ldlq" if rng.random() < 0.2 else "nearest"}
    fields = {field.name for field in dataclasses.fields(module.Params)}
    choices = {
        "group": GROUPS,
        "symmetric": (True, False),
        "quarter_bits": range(8, 21) if name == "shuffle" else range(4, 25),
        "block": (0, 32, 64),
        "variant": ("e4m3fn", "e4m3fnuz"),
        "bits": range(2, 9),
        "scale_bits": (16, 32) if name == "fp8" else (8, 16),
    }
    drawn |= {key: rng.choice(values) for key, values in choices.items() if key in fields}
    return module.Params(**drawn)


def nearest_distance(encoded: EncodedTensor, weight: Tensor, bits: int) -> Tensor:
    """How far every weight is from the nearest value that its group's scale has; codes that mean NaN are none."""
    rows, cols = weight.shape
    stored = encoded.arrays["codes"]
    best = torch.full_like(weight, math.inf)
    for code in range(1 << bits):
        codes = torch.full((rows, cols), code, dtype=torch.uint8)
        packed = codes if stored.shape == codes.shape and bits == 8 else bitpack.pack(codes, bits)
        values = decode(EncodedTensor(encoded.tree, encoded.shape, {**encoded.arrays, "codes": packed}))
        best = torch.minimum(best, (values - weight).abs().nan_to_num(math.inf))
    return best


def try_one(name: str, rng: random.Random) -> str:
    """One matrix: what is declared is what is stored, values are finite, rounding goes to the nearest value."""
    module, params = method(name), params_of(rng, name)
    rows, cols = rng.choice(ROWS), rng.choice(COLS)
    if getattr(params, "block", 0) and cols % params.block:
        params = dataclasses.replace(params, block=0)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 31))
    weight = torch.randn(rows, cols, generator=generator) * rng.choice((1e-6, 0.05, 1.0, 1e3))
    where = f"{name} {params} {rows}x{cols}"
    stats = Stats(correlated_hessian(cols)) if params.rounding == "ldlq" else None
    encoded = module.encode(weight, params, stats)
    check(encoded)
    assert encoded.tree == module.tree(params), where
    assert node_from_json(node_to_json(encoded.tree)) == encoded.tree, where
    assert encoded.size_bytes * 8 == round(module.bits((rows, cols), params) * weight.numel()), where
    values = decode(encoded)
    assert values.shape == weight.shape and bool(values.isfinite().all()), where
    again = module.encode(weight, params, stats)
    assert all(torch.equal(again.arrays[key], array) for key, array in encoded.arrays.items()), where
    if name in CHEAP and params.rounding == "nearest":
        distance = (values - weight).abs()
        best = nearest_distance(encoded, weight, getattr(params, "bits", CODES.get(name, 0)))
        # Stored scales are rounded, and the choice was made with them: a tie may go either way.
        assert bool((distance <= best * (1 + 1e-3) + 1e-6 * weight.abs().max()).all()), where
    return name


def try_many(name: str, count: int, seed: int) -> None:
    for number in range(count):
        try_one(name, random.Random(f"{name} {seed} {number}"))


@pytest.mark.parametrize("name", METHODS)
def test_a_matrix_of_any_shape_is_stored_as_declared_and_rounded_to_the_nearest(name: str) -> None:
    try_many(name, 60 if name in CHEAP else 4, 1)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", METHODS)
def test_20000_matrices_are_stored_as_declared_and_rounded_to_the_nearest(name: str) -> None:
    """NSTF_FUZZ_CASES: how many instead; NSTF_FUZZ_SEED: other ones."""
    count, seed = int(os.environ.get("NSTF_FUZZ_CASES", "20000")), int(os.environ.get("NSTF_FUZZ_SEED", "2"))
    torch.set_num_threads(1)
    try_many(name, count, seed)
    print(f"{name}: {count} matrices")
