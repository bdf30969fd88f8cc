"""Every way to multiply by an encoded matrix against `decode`, over generated trees: kinds nested at random."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import generated_trees

from nstf.kernels.cpu import engine_matrix
from nstf.kernels.formats import EncodedTensor, decode, kinds, node_to_json
from nstf.kernels.linear import linear
from nstf.kernels.registry import kernels
from nstf.kernels.torch.rows import decode_rows, take

CPU = torch.device("cpu")
BATCHES = (1, 3, 17)
# Of the largest product possible, max over rows |x| |w|: float32 sums in another order; int8 activations.
EXACT, INT8 = 2e-4, 4e-2
# A matrix of zeros may come out as a rounding of its terms, which are no zeros.
LEAST = 1e-2


def compare(
    encoded: EncodedTensor, name: str, seed: int, place: Callable[[Tensor], Tensor] = lambda x: x
) -> None:
    """Raises AssertionError naming the way that differs. place: where the other factor is to lie."""
    weight = decode(encoded)
    generator = torch.Generator().manual_seed(seed)
    for batch in BATCHES:
        x = place(torch.randn(batch, encoded.shape[1], generator=generator))
        wanted = (x.double() @ weight.double().T).float()
        scale = float(x.norm(dim=1).max() * weight.double().norm(dim=1).max()) + LEAST

        def close(
            found: Tensor, way: str, limit: float = EXACT, wanted: Tensor = wanted, scale: float = scale
        ) -> None:
            error = float((found.double() - wanted.double()).abs().max()) / scale
            assert error < limit, (
                f"{name}: {way} is off by {error:.2g}: {node_to_json(encoded.tree)} {encoded.shape}"
            )

        close(linear(x, encoded), f"linear at batch {batch}")
        for kernel in kernels():
            fits = not kernel.FORMATS or encoded.tree.kind in kernel.FORMATS
            if fits and kernel.supports(encoded, CPU, batch):
                close(kernel.matmul(x, encoded), f"{kernel.NAME} at batch {batch}")
        if engine_matrix.available():
            close(engine_matrix.matmul(x, engine_matrix.compile_matrix(encoded, exact=True), 2), "engine")
            close(engine_matrix.matmul(x, engine_matrix.compile_matrix(encoded), 2), "engine with int8", INT8)
    rows = torch.randint(0, encoded.shape[0], (5,), generator=generator)
    largest = float(weight.abs().max()) + LEAST
    for chosen, some in (("rows", rows), ("a range", slice(0, -(-encoded.shape[0] // 2)))):
        assert float((decode_rows(encoded, some) - weight[some]).abs().max()) / largest < EXACT, (
            name,
            chosen,
        )
    if engine_matrix.available():
        row = torch.tensor(engine_matrix.decode_row(engine_matrix.compile_matrix(encoded), int(rows[0])))
        assert float((row - weight[rows[0]]).abs().max()) / largest < EXACT, (name, "the engine's row")


def run(samples: ModuleType, seed: int, count: int) -> None:
    for number, (tree, shape) in enumerate(itertools.islice(generated_trees.trees(seed), count)):
        compare(samples.random_encoded(tree, shape, number), f"tree {number} of seed {seed}", number)


def test_every_path_does_what_decode_says_for_every_node_above_every_kind(samples: ModuleType) -> None:
    assert {*generated_trees.LEAVES, *generated_trees.NODES} == set(kinds())
    for number, (tree, shape) in enumerate(generated_trees.pairs()):
        compare(samples.random_encoded(tree, shape, number), f"pair {number}", number)


def test_every_path_does_what_decode_says_over_generated_trees(samples: ModuleType) -> None:
    run(samples, 1, 140)


@pytest.mark.fuzz
def test_every_path_does_what_decode_says_over_many_generated_trees(samples: ModuleType) -> None:
    """NSTF_FUZZ_ROUNDS: of how many thousand trees instead of 20; NSTF_FUZZ_SEED: the first one's seed."""
    first = int(os.environ.get("NSTF_FUZZ_SEED", "2"))
    for seed in range(first, first + int(os.environ.get("NSTF_FUZZ_ROUNDS", "20"))):
        run(samples, seed, 1000)


def test_both_orders_of_axes_are_told_apart(samples: ModuleType) -> None:
    """`permute` with dims [0, 1] was once multiplied by its transpose, which for a square matrix nobody notices."""
    stored = samples.leaf("int", bits=4, group=32)
    for dims, shape in itertools.product(((0, 1), (1, 0)), ((64, 64), (32, 96))):
        compare(
            samples.random_encoded(samples.node("permute", {"x": stored}, dims=dims), shape), str(dims), 0
        )


def test_a_part_of_a_stack_is_what_decode_says(samples: ModuleType) -> None:
    rng, taken = generated_trees.random.Random(5), 0
    for number in range(150):
        shape = (rng.randint(2, 4), rng.choice((4, 8, 32)), rng.choice((8, 32, 64)))
        encoded = samples.random_encoded(generated_trees.tree_of(rng, shape, 2), shape, number)
        part = take(encoded, 1)
        if part is not None:
            taken += 1
            whole = decode(encoded)[1]
            assert torch.allclose(
                decode(part), whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max() + 1e-30)
            ), node_to_json(encoded.tree)
    assert taken > 10


def triton(seed: int, count: int) -> dict[str, object]:
    """What tests/kernels/triton_generated.py says of `count` trees."""
    program = [sys.executable, str(Path(__file__).with_name("triton_generated.py")), str(seed), str(count)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_the_interpreted_triton_kernels_do_what_decode_says_over_generated_trees() -> None:
    pytest.importorskip("triton")
    assert triton(1, 20) == {"run": 20, "wrong": []}


@pytest.mark.fuzz
def test_the_interpreted_triton_kernels_do_what_decode_says_over_many_generated_trees() -> None:
    pytest.importorskip("triton")
    assert triton(2, 600) == {"run": 600, "wrong": []}
