"""The compiled row kernels, each instruction set this processor has, against `decode`."""

from types import ModuleType
from typing import Any

import pytest
import torch

from nstf.kernels.cpu import ext, packed_linear
from nstf.kernels.formats import EncodedTensor, decode

pytestmark = pytest.mark.skipif(ext is None, reason="the extension was not built")

ISAS = ext.row_kernels() if ext is not None else []
SHAPES = ((1, 1), (12, 64), (13, 97), (5, 577), (3, 31), (33, 130))


def leaves(samples: ModuleType) -> list[Any]:
    found = [
        samples.leaf("int", bits=bits, group=group, symmetric=symmetric, scale_bits=8 if group else 16)
        for bits in range(2, 9)
        for group in (0, 32, 64)
        for symmetric in (True, False)
    ]
    found += [samples.leaf("grid", group=group, scale_bits=8 if group else 16) for group in (0, 32, 128)]
    for variant in ("e4m3fn", "e4m3fnuz"):
        found += [samples.leaf("fp8", variant=variant, group=g, scale_bits=s) for g, s in ((0, 16), (32, 32))]
    return [*found, samples.leaf("mxfp4")]


def compiled(encoded: EncodedTensor, isa: str) -> Any:
    return packed_linear.compile_leaf(encoded, isa)


@pytest.mark.parametrize("isa", ISAS)
def test_rows_decode_to_the_same_bits(samples: ModuleType, isa: str) -> None:
    for shape in SHAPES:
        for tree in leaves(samples):
            encoded = samples.random_encoded(tree, shape)
            out = torch.full(shape, float("nan"))
            compiled(encoded, isa).decode(0, out, 2)
            assert torch.equal(out, decode(encoded)), (shape, tree)


@pytest.mark.parametrize("isa", ISAS)
def test_products_are_those_of_the_decoded_matrix(samples: ModuleType, isa: str) -> None:
    for shape in SHAPES:
        for tree in leaves(samples):
            encoded = samples.random_encoded(tree, shape)
            weight = decode(encoded).double()
            matrix = compiled(encoded, isa)
            for batch in (1, 3, 6):
                x = torch.randn(batch, shape[1], generator=torch.Generator().manual_seed(1))
                y = torch.full((batch, shape[0]), float("nan"))
                matrix.matmul_at(x.data_ptr(), batch, y.data_ptr(), 2)
                size = (x.double().abs() @ weight.abs().T).max().clamp_min(1e-30)
                assert float((y - x.double() @ weight.T).abs().max() / size) < 4e-6, (shape, tree, batch)


def test_some_rows_decode_as_those_of_the_whole(samples: ModuleType) -> None:
    encoded = samples.random_encoded(samples.leaf("int", bits=5, group=32), (40, 96))
    out = torch.empty(7, 96)
    packed_linear.packed(encoded).decode(20, out, 1)
    assert torch.equal(out, decode(encoded)[20:27])


def test_the_result_does_not_depend_on_the_number_of_threads(samples: ModuleType) -> None:
    encoded = samples.random_encoded(samples.leaf("int", bits=4, group=64), (700, 256))
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(0))
    results = []
    for threads in (1, 2, 3, 8):
        y = torch.empty(2, 700)
        packed_linear.packed(encoded).matmul_at(x.data_ptr(), 2, y.data_ptr(), threads)
        results.append(y)
    assert all(torch.equal(results[0], y) for y in results)


def test_several_threads_may_call_at_once(samples: ModuleType) -> None:
    from concurrent.futures import ThreadPoolExecutor

    encoded = samples.random_encoded(samples.leaf("int", bits=4, group=64), (700, 256))
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(0))

    def product(_: int) -> torch.Tensor:
        y = torch.empty(1, 700)
        packed_linear.packed(encoded).matmul_at(x.data_ptr(), 1, y.data_ptr(), 2)
        return y

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(product, range(200)))
    assert all(torch.equal(results[0], y) for y in results)


def test_groups_the_row_kernels_cannot_read_are_refused(samples: ModuleType) -> None:
    encoded = samples.random_encoded(samples.leaf("int", bits=4, group=8), (4, 64))
    assert not packed_linear.supports(encoded, torch.device("cpu"), 1)
    with pytest.raises(ValueError, match="multiples of 32"):
        compiled(encoded, "")


def test_arrays_of_the_wrong_size_are_refused(samples: ModuleType) -> None:
    encoded = samples.random_encoded(samples.leaf("int", bits=4, group=32), (4, 64))
    good = dict(encoded.arrays)
    for name, wrong in (("codes", good["codes"][:, :-1]), ("scale", good["scale"][:-1])):
        arrays = {**good, name: wrong.contiguous()}
        with pytest.raises(ValueError):
            compiled(EncodedTensor(encoded.tree, encoded.shape, arrays), "")
    with pytest.raises(ValueError, match="rows out of range"):
        compiled(encoded, "").decode(2, torch.empty(3, 64), 1)
