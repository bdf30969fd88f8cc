"""Products from codes are the same whatever a process has set in torch as its default dtype and device."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import generated_trees

from nstf.kernels.convolution import After, Geometry, convolve
from nstf.kernels.cpu import convolution, engine_matrix, grouped
from nstf.kernels.formats import EncodedTensor, decode, node_to_json, rotated, shuffle, trellis
from nstf.kernels.linear import linear
from nstf.kernels.registry import kernels
from nstf.kernels.torch.rows import decode_rows

pytestmark = pytest.mark.skipif(not engine_matrix.available(), reason="the extension was not built")
CPU = torch.device("cpu")
TABLES = (
    trellis._codebook,
    trellis._sums,
    trellis._quantiles,
    shuffle._tables,
    rotated._hadamard_matrix,
    rotated._signs,
)
SETTINGS = [torch.float16, torch.float64, "meta"]


@contextmanager
def setting(value: Any) -> Iterator[None]:
    """A default dtype or device of the process, before any table is made."""
    for made in TABLES:
        made.cache_clear()
    before = torch.get_default_dtype()
    try:
        if value == "meta":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(value)
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


def check(work: Callable[[EncodedTensor], list[Tensor]], encoded: Any, value: Any, name: str) -> None:
    """encoded(): the same tensor anew, of which nothing is kept yet."""
    wanted, fresh = work(encoded()), encoded()
    with setting(value):
        found = work(fresh)
    for i, (got, right) in enumerate(zip(found, wanted, strict=True)):
        assert (got.dtype, got.device) == (right.dtype, right.device), (name, i)
        assert torch.equal(got, right), (name, i)


@pytest.mark.parametrize("value", SETTINGS, ids=str)
def test_products_of_a_matrix(samples: ModuleType, value: Any) -> None:
    for number, (tree, shape) in enumerate(generated_trees.pairs()):
        inputs = [torch.randn(n, shape[1], generator=torch.Generator().manual_seed(n)) for n in (1, 3, 40)]
        rows = torch.tensor([0, shape[0] - 1, 0])

        def work(encoded: EncodedTensor, inputs: list[Tensor] = inputs, rows: Tensor = rows) -> list[Tensor]:
            found = [decode(encoded), decode_rows(encoded, rows), decode_rows(encoded, slice(0, 1))]
            for x in inputs:
                found += [linear(x, encoded), linear(x.bfloat16(), encoded)]
                for kernel in kernels():
                    fits = not kernel.FORMATS or encoded.tree.kind in kernel.FORMATS
                    if fits and kernel.supports(encoded, CPU, len(x)):
                        found.append(kernel.matmul(x, encoded))
                found.append(engine_matrix.matmul(x, engine_matrix.compile_matrix(encoded), 1))
            return found

        check(
            work,
            lambda n=number, t=tree, s=shape: samples.random_encoded(t, s, n),
            value,
            f"{node_to_json(tree)} {shape}",
        )


@pytest.mark.parametrize("value", SETTINGS, ids=str)
def test_convolutions(samples: ModuleType, value: Any) -> None:
    tree, shape = samples.leaf("int", bits=4, group=32, scale_bits=8), (32, 32, 3, 3)
    x, gain, bias = (
        torch.randn(s, generator=torch.Generator().manual_seed(1)) for s in ((2, 32, 9, 9), 32, 32)
    )
    geometry = Geometry((1, 1), (1, 1, 1, 1), (1, 1), 1)

    def work(encoded: EncodedTensor) -> list[Tensor]:
        stage = convolution.compiled(encoded, (1, 1), (1, 1, 1, 1), (1, 1), 1)
        turned = None if stage is None else convolution.in_turn([stage, stage]).run(x, bias)
        after = After(gain, x, 0.0)
        plain = convolve(x, encoded, bias, geometry), convolve(x, encoded, bias, geometry, after=after)
        return [*plain, *([] if turned is None else [turned])]

    check(work, lambda: samples.random_encoded(tree, shape), value, "convolution")


@pytest.mark.parametrize("value", SETTINGS, ids=str)
@pytest.mark.parametrize("exact", [True, False])
def test_experts(samples: ModuleType, value: Any, exact: bool) -> None:
    tree, shape = samples.leaf("int", bits=4, group=32, scale_bits=8, lead=2), (6, 64, 64)
    x, index = torch.randn(5, 64), torch.tensor([[0, 3], [1, 3], [5, 2], [3, 6], [0, 1]])
    weights = torch.rand(5, 2)

    def work(encoded: EncodedTensor) -> list[Tensor]:
        stack, routing = grouped.stack(encoded, False, exact), grouped.route(index, 6)
        assert stack is not None and stack.ready(routing)
        parts = stack.multiply(x, routing, gather=True)
        again = stack.multiply(parts, routing, gather=False)
        return [routing.order, routing.offsets, parts, again, grouped.combine(again, routing, weights)]

    check(work, lambda: samples.random_encoded(tree, shape), value, "experts")
