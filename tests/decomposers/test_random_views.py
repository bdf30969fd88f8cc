"""Properties of every decomposition over tensors of random shapes and views; `make fuzz` tries 2,000 of each."""

import math
import os
import random
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import test_contract as contract


def shape_of(rng: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape of a matrix, a view of it with two to four axes), 400 elements at most."""
    while True:
        view = tuple(rng.choice((1, 2, 3, 4, 5, 7, 8, 11)) for _ in range(rng.choice((2, 2, 3, 3, 4))))
        if 2 <= math.prod(view) <= 400:
            break
    cut = rng.randrange(1, len(view))
    return (math.prod(view[:cut]), math.prod(view[cut:])), view


def try_one(name: str, rng: random.Random) -> None:
    """Full rank loses nothing, more rank is never worse, and tensorly rebuilds the same from the factors."""
    shape, view = shape_of(rng)
    w = contract.tensor_of(shape, rng.randrange(1 << 31))
    where = f"{name} {shape} {view}"
    whole = contract.METHODS[name].decompose(w, contract.full(name, view)).dense()
    assert whole.shape == shape and contract.relative(w, whole) < 1e-5, where
    errors = [
        contract.relative(w, contract.METHODS[name].decompose(w, contract.part(name, view, share)).dense())
        for share in (0.2, 0.6, 1.0)
    ]
    # Alternating least squares and HOOI are local searches; the cuts of a train are nested.
    slack = 1e-5 if name == "tensor_train" else 0.05
    assert all(b <= a + slack for a, b in pairwise(errors)), (where, errors)
    contract.test_the_node_is_what_tensorly_reconstructs(name, shape, view)


@pytest.mark.parametrize("name", contract.METHODS)
def test_tensors_of_any_shape_are_taken_apart_and_put_together(name: str) -> None:
    for number in range(20):
        try_one(name, random.Random(f"{name} 1 {number}"))


@pytest.mark.fuzz
@pytest.mark.parametrize("name", contract.METHODS)
def test_2000_tensors_are_taken_apart_and_put_together(name: str) -> None:
    """NSTF_FUZZ_CASES: how many instead; NSTF_FUZZ_SEED: other ones."""
    count, seed = int(os.environ.get("NSTF_FUZZ_CASES", "2000")), int(os.environ.get("NSTF_FUZZ_SEED", "2"))
    torch.set_num_threads(1)
    for number in range(count):
        try_one(name, random.Random(f"{name} {seed} {number}"))
    print(f"{name}: {count} tensors")
