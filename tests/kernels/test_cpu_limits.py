"""The C++ kernels at their ends: no rows, sizes beyond 64 bits, trees of trees, too little memory, several threads."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nstf.kernels.cpu import convolution, engine_matrix, shuffle_linear
from nstf.kernels.formats import Node, decode

pytestmark = pytest.mark.skipif(not engine_matrix.available(), reason="the extension was not built")
HERE = Path(__file__).parent
CPU = HERE.parents[1] / "kernels" / "cpu"
SIDE, DEEP = 32, 8


def nested(samples: ModuleType, kind: str, depth: int) -> Node:
    """`depth` nodes of a kind, each the child of the one before."""
    leaf = samples.leaf("dense", dtype="float16")
    if depth == 0:
        return leaf
    child = nested(samples, kind, depth - 1)
    if kind == "permute":
        return samples.node(kind, {"x": child}, dims=(1, 0))
    if kind == "rotated":
        return samples.node(kind, {"x": child}, block_in=0, block_out=SIDE, seed=depth)
    if kind == "low_rank":
        return samples.node(kind, {"a": leaf, "b": child}, rank=SIDE)
    return samples.node(kind, {"factor0": leaf, "factor1": child}, rank=SIDE, view=(SIDE, SIDE))


@pytest.mark.parametrize("kind", ["permute", "rotated", "low_rank"])
def test_a_row_of_deeply_nested_products_does_not_take_powers_of_their_size(
    samples: ModuleType, kind: str
) -> None:
    encoded = samples.random_encoded(nested(samples, kind, DEEP), (SIDE, SIDE))
    matrix = engine_matrix.compile_matrix(encoded)
    assert matrix.kernel == "dense"  # decoded once: row by row this would take hours
    weight = decode(encoded)
    assert torch.allclose(torch.tensor(engine_matrix.decode_row(matrix, 3)), weight[3], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["permute", "rotated", "low_rank"])
def test_what_the_converter_writes_stays_as_it_is_stored(samples: ModuleType, kind: str) -> None:
    encoded = samples.random_encoded(nested(samples, kind, 1), (SIDE, SIDE))
    assert engine_matrix._row_work(encoded.tree, encoded.shape) <= 2 * SIDE * SIDE


def test_no_rows_of_activations_give_no_rows(samples: ModuleType) -> None:
    shuffled = samples.random_encoded(samples.leaf("shuffle"), (64, 64))
    assert shuffle_linear.matmul(torch.zeros(0, 64), shuffled).shape == (0, 64)
    for kind in ("permute", "low_rank", "cp"):
        matrix = engine_matrix.compile_matrix(
            samples.random_encoded(nested(samples, kind, 1), (SIDE, SIDE)), way="steps"
        )
        assert engine_matrix.matmul(torch.zeros(0, SIDE), matrix).shape == (0, SIDE)


def test_intermediate_values_beyond_64_bits_are_refused_as_memory(samples: ModuleType) -> None:
    """A tree of 600 numbers that stands for 10**12, and whose first step would have 10**20."""
    side, rank = 52, 52**6
    one = samples.leaf("dense", dtype="float16")

    def vectors(size: tuple[int, int], view: tuple[int, ...]) -> Node:
        node = samples.node("cp", {f"factor{i}": one for i in range(len(view))}, rank=1, view=view)
        engine_matrix.array_specs(node, size)
        return node

    factors = {f"factor{i}": vectors((n, rank), (n, *[side] * 6)) for i, n in enumerate((1, *[side] * 7))}
    tree = samples.node("cp", factors, rank=rank, view=(1, *[side] * 7))
    encoded = samples.random_encoded(tree, (1, side**7))
    with pytest.raises(MemoryError):
        engine_matrix.compile_matrix(encoded, way="steps")


def test_a_convolution_with_steps_beyond_64_bits_has_no_kernel(samples: ModuleType) -> None:
    weight = samples.random_encoded(samples.leaf("int", bits=8, group=0), (32, 4, 2, 2))
    found = convolution.convolve(torch.ones(1, 4, 4, 4), weight, None, (1, 1 << 62), (0,) * 4, (1, 1), 1)
    assert found is None


def _share(matrix: Any, x: torch.Tensor, wrong: list[int]) -> None:
    wanted = engine_matrix.matmul(x, matrix, 1)
    for _ in range(40):
        wrong.append(int(not torch.equal(engine_matrix.matmul(x, matrix, 2), wanted)))


@pytest.mark.parametrize("kind", ["add", "low_rank", "rotated", "permute", "cp"])
def test_several_threads_multiply_by_one_matrix(samples: ModuleType, kind: str) -> None:
    if kind == "add":
        tree = samples.node("add", {"x": samples.leaf("dense"), "y": samples.leaf("int", group=32)})
    else:
        tree = nested(samples, kind, 1)
    if kind == "rotated":  # by rows and columns, over no leaf
        tree = samples.node("rotated", {"x": nested(samples, "low_rank", 1)}, block_in=SIDE, block_out=SIDE)
    encoded = samples.random_encoded(tree, (SIDE, SIDE))
    matrix = engine_matrix.compile_matrix(encoded, exact=True, way="steps")
    wrong: list[int] = []
    threads = [
        threading.Thread(target=_share, args=(matrix, torch.randn(rows, SIDE), wrong))
        for rows in (1, 7, 40, 200)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0] * 160


# Memory for one stack of a thread, or for none: not for the seven that are asked for.
SWEEP = """
import resource, torch
from nstf.kernels.cpu import ext
rows, cols, none = 256, 64, torch.empty(0)
def zeros(*shape, dtype=torch.float32): return torch.zeros(*shape, dtype=dtype)
arguments = (
    torch.randn(rows, cols), torch.ones(cols), torch.ones(cols), torch.empty(0, 0), torch.empty(0, dtype=torch.int64),
    none, none, torch.ones(3), 64, 4, True, False, False, False, 1, 7.0, zeros(rows, 1), zeros(rows, 1), zeros(rows, 1),
    zeros(rows, cols, dtype=torch.uint8), zeros(rows, dtype=torch.float64), 8, 16,
)
now = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (12 << 20),) * 2)
ext.ldlq_sweep(*arguments)
print(float(arguments[20].sum()) > 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits on memory as Linux has them")
@pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer takes more addresses than that"
)
def test_rounding_goes_on_with_the_threads_there_is_memory_for() -> None:
    done = subprocess.run([sys.executable, "-c", SWEEP], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-2000:]


@pytest.mark.parametrize("main", ["scratch_ends", pytest.param("page_cache_ends", marks=pytest.mark.slow)])
def test_memory_that_ends_in_the_middle_is_an_error_and_leaves_nothing_half_done(
    tmp_path: Path, main: str
) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program, sources = tmp_path / main, [str(HERE / f"{main}.cpp")]
    if main == "page_cache_ends":
        sources.append(str(CPU / "engine" / "page_cache.cpp"))
    subprocess.run([compiler, "-std=c++17", "-O1", f"-I{CPU}", *sources, "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
