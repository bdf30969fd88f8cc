"""Decompositions, transposes and unusual groups in the C++ engine against `decode`: products and rows."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from nstf.kernels.cpu import engine_matrix, ext
from nstf.kernels.formats import EncodedTensor, Node, decode

pytestmark = pytest.mark.skipif(not engine_matrix.available(), reason="the extension was not built")

BATCHES = (1, 3, 17, 40)
# One product with int8 activations is off by at most 0.03 of the size of its terms; a chain has one per factor.
INT8_ERROR = 0.06
CHAINS: dict[str, tuple[str, tuple[int, int], dict[str, Any], dict[str, str]]] = {
    "cp matrix": ("cp", (13, 29), {"rank": 5, "view": (13, 29)}, {}),
    "cp rows": ("cp", (24, 37), {"rank": 23, "view": (4, 6, 37)}, {"factor1": "int5", "factor2": "row8"}),
    "cp balanced": ("cp", (30, 66), {"rank": 33, "view": (5, 6, 6, 11)}, {"factor0": "half", "factor3": "grid"}),
    "cp three axes a side": ("cp", (24, 36), {"rank": 17, "view": (2, 3, 4, 3, 2, 6)}, {}),
    "tucker matrix": ("tucker", (33, 65), {"ranks": (20, 33), "view": (33, 65)}, {"core": "group4"}),
    "tucker heads": ("tucker", (36, 96), {"ranks": (3, 8, 40), "view": (4, 9, 96)}, {"core": "tall4", "factor2": "row8"}),
    "tucker two factors": ("tucker", (60, 70), {"ranks": (5, 7, 3, 14), "view": (5, 12, 5, 14)}, {"core": "row8"}),
    "tucker core alone": ("tucker", (12, 40), {"ranks": (3, 4, 40), "view": (3, 4, 40)}, {"core": "tall4"}),
    "tucker vector rows": ("tucker", (1, 45), {"ranks": (1, 5, 4), "view": (1, 5, 9)}, {}),
    "train matrix": ("tensor_train", (31, 40), {"ranks": (9,), "view": (31, 40)}, {"core0": "tall8", "core1": "row8"}),
    "train rows": ("tensor_train", (48, 90), {"ranks": (6, 36), "view": (6, 8, 90)}, {"core1": "tall4", "core2": "group4"}),
    "train balanced": ("tensor_train", (30, 77), {"ranks": (5, 19, 6), "view": (5, 6, 7, 11)}, {"core2": "tall8"}),
    "train columns": ("tensor_train", (20, 84), {"ranks": (15, 9), "view": (20, 7, 12)}, {"core0": "half"}),
}  # fmt: skip


def factor(samples: ModuleType, name: str) -> Node:
    leaves: dict[str, dict[str, Any]] = {
        "row8": {"bits": 8, "group": 0},
        "tall8": {"bits": 8, "group": 0, "lead": 2},
        "group4": {"bits": 4, "group": 32, "scale_bits": 8},
        "tall4": {"bits": 4, "group": 32, "scale_bits": 8, "lead": 2},
        "int5": {"bits": 5, "group": 16, "symmetric": False},
    }
    if name in leaves:
        found: Node = samples.leaf("int", **leaves[name])
        return found
    made: Node = samples.leaf("grid", group=0) if name == "grid" else samples.leaf("dense", dtype="float16")
    return made if name in ("grid", "half") else samples.leaf("dense")


def chain(samples: ModuleType, name: str, nested: bool = False) -> EncodedTensor:
    kind, shape, params, leaves = CHAINS[name]
    shapes = samples.format_of(kind).children(samples.format_of(kind).Params(**params), shape)
    children = {n: factor(samples, leaves.get(n, "float")) for n in shapes}
    if nested:  # the last factor as a product of two, the one before as a sum
        last = max(shapes)
        lead = len(shapes[last]) - 1
        parts = {"a": samples.leaf("int", bits=8, group=0), "b": samples.leaf("dense")}
        children[last] = samples.node("low_rank", parts, rank=1, lead=lead)
        for other in sorted(shapes)[-2:-1]:
            children[other] = samples.node("add", {"x": children[other], "y": samples.leaf("dense")})
    encoded: EncodedTensor = samples.random_encoded(samples.node(kind, children, **params), shape)
    return encoded


def error(y: Tensor, x: Tensor, weight: Tensor) -> float:
    """The largest error of a product, as a share of the size of its terms."""
    reference = x.double() @ weight.double().T
    size = (x.double().square() @ weight.double().square().T).sqrt().max()
    return float((y - reference).abs().max() / size)


def check(matrix: Any, weight: Tensor, limit: float) -> None:
    for batch in BATCHES:
        x = torch.randn(batch, weight.shape[1], generator=torch.Generator().manual_seed(batch))
        assert error(engine_matrix.matmul(x, matrix, 2), x, weight) < limit, batch
    for row in {0, len(weight) // 2, len(weight) - 1}:
        size = float(weight.abs().max())
        found = torch.tensor(engine_matrix.decode_row(matrix, row))
        torch.testing.assert_close(found, weight[row], rtol=1e-5, atol=1e-6 * size)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("nested", [False, True])
def test_products_through_the_factors_are_those_of_the_decoded_matrix(
    samples: ModuleType, name: str, nested: bool
) -> None:
    encoded = chain(samples, name, nested)
    weight = decode(encoded)
    for exact in (True, False):
        matrix = engine_matrix.compile_matrix(encoded, exact, "steps")
        assert matrix.kernel.startswith(CHAINS[name][0])
        check(matrix, weight, 1e-5 if exact else INT8_ERROR)
    check(engine_matrix.compile_matrix(encoded, False, "decoded"), weight, 1e-5)


@pytest.mark.parametrize("name", CHAINS)
def test_the_number_of_threads_changes_nothing(samples: ModuleType, name: str) -> None:
    matrix = engine_matrix.compile_matrix(chain(samples, name), way="steps")
    for batch in (1, 40):
        x = torch.randn(batch, matrix.shape[1], generator=torch.Generator().manual_seed(0))
        results = [engine_matrix.matmul(x, matrix, threads) for threads in (1, 2, 3)]
        for y in results[1:]:
            torch.testing.assert_close(y, results[0], rtol=1e-5, atol=1e-5 * float(results[0].abs().max()))


def test_large_factors_and_groups_of_rows_that_do_not_fit_the_scratch(samples: ModuleType) -> None:
    row = samples.leaf("int", bits=8, group=0)
    tree = samples.node(
        "tucker", {"core": row, "factor0": row, "factor1": row, "factor2": row}, ranks=(8, 60, 300), view=(9, 64, 700)
    )  # fmt: skip
    encoded = samples.random_encoded(tree, (576, 700))
    # Two of these factors have more values than a slab, and 300 rows more than the room for intermediate results.
    matrix, weight = engine_matrix.compile_matrix(encoded, True, "steps"), decode(encoded)
    x = torch.randn(300, 700, generator=torch.Generator().manual_seed(0))
    assert error(engine_matrix.matmul(x, matrix, 2), x, weight) < 1e-5


def test_the_way_follows_from_the_work(samples: ModuleType) -> None:
    row = samples.leaf("int", bits=8, group=0)

    def kernel(shape: tuple[int, int], rank: int, view: tuple[int, ...]) -> str:
        tree = samples.node("cp", {f"factor{i}": row for i in range(len(view))}, rank=rank, view=view)
        return str(engine_matrix.compile_matrix(samples.random_encoded(tree, shape)).kernel)

    assert kernel((576, 576), 100, (24, 24, 24, 24)).startswith("cp")
    # Here the factors take more multiplications than the matrix has numbers, several times.
    assert kernel((576, 576), 5000, (24, 24, 24, 24)) == "dense"


def test_views_that_mix_rows_and_columns_are_decoded(samples: ModuleType) -> None:
    row = samples.leaf("dense")
    tree = samples.node("cp", {f"factor{i}": row for i in range(3)}, rank=4, view=(4, 30, 5))
    encoded = samples.random_encoded(tree, (20, 30))
    matrix = engine_matrix.compile_matrix(encoded, way="steps")
    assert matrix.kernel == "dense"
    check(matrix, decode(encoded), 1e-5)


@pytest.mark.parametrize("shape", [(1, 1), (13, 97), (577, 40), (40, 700)])
@pytest.mark.parametrize("kind", ["row8", "int5", "float", "half", "cp"])
def test_permuted_matrices(samples: ModuleType, shape: tuple[int, int], kind: str) -> None:
    stored = shape[::-1]
    inner = factor(samples, kind)
    if kind == "cp":
        inner = samples.node("cp", dict.fromkeys(("factor0", "factor1"), inner), rank=1, view=stored)
    for dims, size in (((1, 0), shape), ((0, 1), stored)):
        encoded = samples.random_encoded(samples.node("permute", {"x": inner}, dims=dims), size)
        check(engine_matrix.compile_matrix(encoded, True, "steps"), decode(encoded), 1e-5)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_that_are_no_multiple_of_32(samples: ModuleType, bits: int, symmetric: bool) -> None:
    for group, shape in ((16, (21, 96)), (8, (5, 72)), (48, (7, 144)), (24, (3, 240))):
        for scale_bits in (8, 16):
            tree = samples.leaf("int", bits=bits, group=group, symmetric=symmetric, scale_bits=scale_bits)
            encoded = samples.random_encoded(tree, shape)
            matrix = engine_matrix.compile_matrix(encoded)
            assert matrix.kernel.startswith("reshaped, packed float32")
            check(matrix, decode(encoded), 1e-5)


@pytest.mark.parametrize("group", [16, 48])
def test_grids_with_groups_that_are_no_multiple_of_32(samples: ModuleType, group: int) -> None:
    encoded = samples.random_encoded(samples.leaf("grid", group=group, scale_bits=8), (21, 144))
    matrix = engine_matrix.compile_matrix(encoded)
    assert matrix.kernel.startswith("reshaped, packed float32")
    check(matrix, decode(encoded), 1e-5)


def test_factors_of_another_size_are_refused(samples: ModuleType) -> None:
    small = engine_matrix.compile_matrix(samples.random_encoded(samples.leaf("dense"), (4, 3)))
    with pytest.raises(ValueError, match="another size"):
        ext.engine_chain("cp", 4, 5, [4, 5], [3], [small, small], "")
    for view, ranks, parts in (
        ([4, 4], [3], [small, small]),
        ([4, 5], [3, 3], [small, small]),
        ([4, 5], [3], [small]),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            ext.engine_chain("cp", 4, 5, view, ranks, parts, "")
