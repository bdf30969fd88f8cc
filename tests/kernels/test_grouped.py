"""Grouped products of experts from their codes against the decoded stack: every format that a stack is stored in, experts
without tokens, tokens without experts, every instruction set."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from nstf.kernels.cpu import ext, grouped
from nstf.kernels.formats import EncodedTensor, decode
from nstf.kernels.torch.rows import expert

pytestmark = pytest.mark.skipif(not grouped.available(), reason="the extension was not built")

HERE = Path(__file__).parent
CPU = HERE.parents[1] / "kernels" / "cpu"
ISAS = ext.isas() if grouped.available() else []
# As for the engine's matrices: half a percent of a product on average, some times that at most.
INT8_ERROR = 0.03


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn."""
    ext.use_isa(request.param)
    yield request.param
    ext.use_isa("")


def trees(samples: ModuleType, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Stacks [experts, out, in] of every format; where each expert begins anew in tiles and paths."""
    leaf, node = samples.leaf, samples.node
    int4, dense = leaf("int", bits=4, group=32, lead=2), leaf("dense", dtype="float32")
    found = {f"int{b}": leaf("int", bits=b, group=32, scale_bits=8, lead=2) for b in range(2, 9)}
    found |= {
        f"int{b} asym": leaf("int", bits=b, group=64, symmetric=False, scale_bits=8, lead=2)
        for b in (2, 3, 4)
    }
    found |= {f"dense {d}": leaf("dense", dtype=d) for d in ("float32", "bfloat16", "float16")}
    found["int5 rows"] = leaf("int", bits=5, group=0, lead=2)
    found["grid"] = leaf("grid", group=32, scale_bits=8, lead=2)
    found["fp8"] = leaf("fp8", group=32, scale_bits=32, lead=2)
    found["mxfp4"] = leaf("mxfp4", lead=2)
    numbers = {"core": int4, "factor0": leaf("int", bits=8, group=0)}
    shared = node("tucker", numbers, ranks=(1, *shape[1:]), view=shape)
    low = node("low_rank", {"a": leaf("int", bits=4, group=0), "b": dense}, rank=3, lead=2)
    found["one matrix for all"] = node("add", {"x": leaf("int", bits=2, group=32, lead=2), "y": shared})
    found["low rank"] = low
    found["low rank beside codes"] = node("add", {"x": int4, "y": low})
    if shape[1] % 16 == 0:
        trellis = leaf("trellis", quarter_bits=(9,), lead=2)
        found |= {f"trellis {q}": leaf("trellis", quarter_bits=(q,), lead=2) for q in (4, 8, 12, 18, 24)}
        if shape[2] % 32 == 0:
            found["rotated trellis"] = node("rotated", {"x": trellis}, block_in=32, lead=2, seed=3)
            both = {"x": found["rotated trellis"], "y": shared}
            found["one matrix for all + rotated trellis"] = node("add", both)
    if shape[1] % 256 == 0:
        found |= {f"shuffle {q}": leaf("shuffle", quarter_bits=q, lead=2) for q in (8, 13, 20)}
        inner = leaf("shuffle", quarter_bits=10, lead=2)
        found["rotated shuffle"] = node("rotated", {"x": inner}, block_in=64, lead=2, seed=3)
    return found


@cache
def sample(samples: ModuleType, name: str, shape: tuple[int, int, int]) -> tuple[EncodedTensor, Tensor]:
    """(a stack, the decoded one). Of a shared matrix an expert's number is rounded into its scales, as everywhere
    (tests/kernels/test_rows.py): so they are decoded expert by expert."""
    encoded = samples.random_encoded(trees(samples, shape)[name], shape)
    parts = [part for e in range(shape[0]) if (part := expert(encoded, e)) is not None]
    return encoded, torch.stack([decode(part) for part in parts])


# Nobody chooses expert 1, and some choose none.
EXPERTS = 5
CHOICES = {
    "one token": [[3, 0]],
    "several": [[0, 2], [2, 5], [4, 2], [5, 5], [2, 0], [3, 2], [0, 4]],
    "many": [[t * 7 % 4 + (t * 7 % 4 > 0), 4 if t % 4 else 5] for t in range(40)],
}


def wanted(x: Tensor, index: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(each choice's product, the size of its terms), float64 [tokens, choices, rows]; zero for no expert."""
    padded = torch.cat([weight, torch.zeros_like(weight[:1])]).double()[index]
    y = torch.einsum("tk,tcrk->tcr", x.double(), padded)
    return y, torch.einsum("tk,tcrk->tcr", x.double().square(), padded.square()).sqrt()


def check(encoded: EncodedTensor, weight: Tensor, choices: Any, exact: bool) -> None:
    x = torch.randn(len(choices), encoded.shape[2], generator=torch.Generator().manual_seed(1))
    index = torch.tensor(choices)
    routing = grouped.route(index, encoded.shape[0])
    stack = grouped.stack(encoded, False, exact)
    assert stack is not None
    stack._most = 1 << 60  # here also where a library would be faster
    assert stack.ready(routing)
    parts = stack.multiply(x, routing, gather=True)
    y, size = wanted(x, index, weight)
    flat, sizes = y.flatten(0, 1)[routing.order[: routing.taken]], size.flatten(0, 1)
    error = (parts - flat).abs().max() / sizes.max().clamp_min(1e-6)
    assert parts.shape == flat.shape and float(error) < (2e-5 if exact else INT8_ERROR), float(error)
    # The same rows, sorted beforehand.
    own = x[routing.order[: routing.taken] // index.shape[1]]
    assert torch.equal(stack.multiply(own, routing, gather=False), parts)
    weights = torch.rand(index.shape, generator=torch.Generator().manual_seed(2))
    scattered = torch.zeros(index.numel(), encoded.shape[1])
    scattered[routing.order[: routing.taken]] = parts
    summed = (scattered.view(*index.shape, -1) * weights[..., None]).sum(1)
    torch.testing.assert_close(grouped.combine(parts, routing, weights), summed, rtol=1e-5, atol=1e-5)


# Odd sizes, tiles of 16 rows that begin anew with every expert, and paths of 256.
SHAPES = ((5, 13, 97), (5, 48, 160), (5, 256, 64))
NAMES = {
    (5, 13, 97): "int2|int3|int4|int6|int8|int5 rows|grid|fp8|mxfp4|dense float32|dense bfloat16|low rank|"
    "low rank beside codes|one matrix for all",
    (5, 48, 160): "int3 asym|int7|dense float16|trellis 4|trellis 12|trellis 18|rotated trellis|"
    "one matrix for all + rotated trellis",
    (5, 256, 64): "shuffle 8|shuffle 13|shuffle 20|rotated shuffle|int2 asym|trellis 24",
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_decoded_experts(
    samples: ModuleType, shape: tuple[int, int, int], isa: str
) -> None:
    for name in NAMES[shape].split("|"):
        encoded, weight = sample(samples, name, shape)
        for choices in CHOICES.values():
            for exact in (True, False):
                try:
                    check(encoded, weight, choices, exact)
                except AssertionError as error:
                    raise AssertionError(f"{name}, {len(choices)} tokens, exact {exact}: {error}") from error


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_every_format_in_every_shape(
    samples: ModuleType, shape: tuple[int, int, int], isa: str
) -> None:
    for name in trees(samples, shape):
        for choices in CHOICES.values():
            check(*sample(samples, name, shape), choices, exact=True)
            check(*sample(samples, name, shape), choices, exact=False)


def test_stacks_that_are_stored_transposed_are_multiplied_from_their_codes(samples: ModuleType) -> None:
    inner = samples.leaf("int", bits=4, group=32, lead=2)
    encoded = samples.random_encoded(samples.node("permute", {"x": inner}, dims=(0, 2, 1)), (3, 64, 24))
    routing = grouped.route(torch.tensor([[0, 2], [2, 0]]), 3)
    stack = grouped.stack(encoded, True, True)  # [experts, in, out]: each product is x @ W
    assert stack is not None and (stack.rows, stack.cols) == (24, 64) and stack.ready(routing)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    found = stack.multiply(x, routing, gather=True)
    expected = torch.stack([x[0], x[1], x[0], x[1]])
    weight = decode(encoded)[[0, 0, 2, 2]]
    torch.testing.assert_close(found, torch.einsum("nk,nkr->nr", expected, weight), rtol=1e-4, atol=1e-4)
    assert grouped.stack(encoded, False, True) is None


def test_stacks_that_no_kernel_reads_expert_by_expert_have_none(samples: ModuleType) -> None:
    dense = samples.leaf("dense", dtype="float32")
    cp = samples.node("cp", {f"factor{i}": dense for i in range(3)}, rank=3, view=(3, 24, 64))
    for tree in (
        cp,
        samples.leaf("int", bits=4, group=32, lead=1),  # all of a row's experts in one
        samples.leaf("int", bits=4, group=8, lead=2),  # groups that the kernels for rows do not read
        samples.leaf("trellis", quarter_bits=(8,), lead=2),  # tiles of two experts
    ):
        assert grouped.stack(samples.random_encoded(tree, (3, 24, 64)), False, True) is None, tree.kind


def test_an_expert_that_is_not_there_is_refused(samples: ModuleType) -> None:
    for bad in (-1, 4, 2**62):
        with pytest.raises(ValueError, match="an expert that is not there"):
            grouped.route(torch.tensor([[0, bad]]), 3)
    encoded = samples.random_encoded(samples.leaf("int", bits=4, group=32, lead=2), (3, 24, 64))
    stack = grouped.stack(encoded, False, True)
    routing = grouped.route(torch.tensor([[0, 1]]), 3)
    assert stack is not None
    with pytest.raises(ValueError, match="an expert that is hit has no matrix"):
        stack.multiply(torch.zeros(1, 64), routing, gather=True)
    assert stack.ready(routing)
    with pytest.raises(ValueError, match=r"activations \[2, 64\] for experts of 64 columns"):
        stack.multiply(torch.zeros(2, 64), routing, gather=True)


@pytest.mark.parametrize("name", ["int4", "rotated trellis", "shuffle 13", "one matrix for all"])
def test_the_result_does_not_depend_on_the_number_of_threads(samples: ModuleType, name: str) -> None:
    shape = (5, 512, 256)
    encoded = samples.random_encoded(trees(samples, shape)[name], shape)
    stack = grouped.stack(encoded, False, False)
    before, results = torch.get_num_threads(), []
    for choices in CHOICES.values():
        routing = grouped.route(torch.tensor(choices), 5)
        x = torch.randn(len(choices), 256, generator=torch.Generator().manual_seed(0))
        assert stack is not None and stack.ready(routing)
        results.append([])
        try:
            for threads in (1, 2, 3, 8):
                torch.set_num_threads(threads)
                results[-1].append(stack.multiply(x, routing, gather=True))
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(found[0], y) for found in results for y in found)


@pytest.mark.parametrize(("name", "most"), [("int4", 64), ("rotated trellis", 16), ("shuffle 13", None)])
def test_float32_products_of_many_tokens_are_left_to_a_library(
    samples: ModuleType, name: str, most: int | None
) -> None:
    encoded = samples.random_encoded(trees(samples, (5, 256, 64))[name], (5, 256, 64))
    for tokens in (16, 17, 64, 65, 300):
        routing = grouped.route(torch.tensor([[0, 3]] * tokens), 5)  # so many for each of two experts
        for exact in (True, False):
            stack = grouped.stack(encoded, False, exact)
            assert stack is not None
            assert stack.ready(routing) == (not exact or most is None or tokens <= most)


def test_a_long_prompt_goes_in_waves_and_gives_each_token_what_it_has_alone(samples: ModuleType) -> None:
    encoded = samples.random_encoded(samples.leaf("int", bits=4, group=32, lead=2), (5, 24, 64))
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, 5, (3000, 2), generator=generator)  # waves end at 1024 rows
    x = torch.randn(3000, 64, generator=generator)
    routing = grouped.route(index, 5)
    stack = grouped.stack(encoded, False, False)
    assert stack is not None and stack.ready(routing)
    y = grouped.combine(stack.multiply(x, routing, gather=True), routing, torch.ones(3000, 2))
    expected = torch.einsum("tk,trk->tr", x, decode(encoded)[index].sum(1))
    assert float((y - expected).norm() / expected.norm()) < 0.01
    assert float((y - expected).abs().max()) < 0.1 * float(expected.std())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_is_held_does_not_grow_with_the_rows_of_one_expert(samples: ModuleType) -> None:
    encoded = samples.random_encoded(samples.leaf("int", bits=4, group=32, lead=2), (3, 16, 1024))
    x = torch.randn(16384, 1024, generator=torch.Generator().manual_seed(0))
    stack = grouped.stack(encoded, False, False)
    assert stack is not None

    def product(rows: Tensor) -> Tensor:
        routing = grouped.route(torch.ones(len(rows), 1, dtype=torch.int64), 3)
        assert stack.ready(routing)
        return stack.multiply(rows, routing, gather=True)

    def held() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    apart = torch.cat([product(part) for part in x.split(1024)])
    before = held()
    assert torch.equal(product(x), apart)
    # Once 64 MiB of rows in order and what was prepared of them; now as much as of 1024 rows, and the result.
    assert held() - before < 16 << 20


def test_several_threads_may_run_the_same_experts(samples: ModuleType) -> None:
    encoded = samples.random_encoded(samples.leaf("int", bits=4, group=32, lead=2), (5, 64, 64))
    weight, failures = decode(encoded), []

    def caller(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(50):
            index = torch.randint(0, 6, (9, 2), generator=generator)
            x = torch.randn(9, 64, generator=generator)
            routing = grouped.route(index, 5)
            stack = grouped.stack(encoded, False, True)
            assert stack is not None and stack.ready(routing)
            y = grouped.combine(stack.multiply(x, routing, gather=True), routing, torch.ones(9, 2))
            if not torch.allclose(y, wanted(x, index, weight)[0].sum(1).float(), atol=1e-3):
                failures.append(seed)

    threads = [threading.Thread(target=caller, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize(
    "sanitizer", ["", *(pytest.param(s, marks=pytest.mark.slow) for s in ("thread", "address,undefined"))]
)
def test_what_a_worker_throws_reaches_the_caller_and_the_next_call_works(
    tmp_path: Path, sanitizer: str
) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    out, engine = tmp_path / "grouped", CPU / "engine"
    sources = [
        HERE / "grouped_throws.cpp",
        CPU / "parallel.cpp",
        engine / "grouped.cpp",
        engine / "matrix.cpp",
    ]
    flags = ["-std=c++17", "-O1", "-g", "-pthread", f"-I{CPU}"]
    flags += [f"-fsanitize={sanitizer}"] if sanitizer else []
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(out)], check=True)
    done = subprocess.run([out], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "600 1\n", ""), done.stdout + done.stderr
