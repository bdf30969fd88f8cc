"""The engine's matrices against `decode`: every format, exact and with int8 activations, one row of activations and many,
with the kernels of every instruction set this processor has."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from nstf.kernels.cpu import engine_matrix, ext
from nstf.kernels.cpu.packed_linear import packed
from nstf.kernels.formats import EncodedTensor, decode

pytestmark = pytest.mark.skipif(not engine_matrix.available(), reason="the extension was not built")

SHAPES = ((1, 1), (13, 97), (40, 160), (33, 577), (20, 64))
# Few rows, four of them, and more have kernels of their own.
BATCHES = (1, 2, 3, 4, 5, 13)
ISAS = ext.isas() if engine_matrix.available() else []

# Activations in 8 bits, a scale for every 8 to 32 columns: half a percent of a product on average, some times that at most.
INT8_ERROR = 0.03


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn."""
    ext.use_isa(request.param)
    yield request.param
    ext.use_isa("")


def trees(samples: ModuleType) -> dict[str, Any]:
    leaf, node = samples.leaf, samples.node
    found = {
        f"int{bits} g{group} {'sym' if symmetric else 'asym'}": leaf(
            "int", bits=bits, group=group, symmetric=symmetric, scale_bits=8 if group else 16
        )
        for bits in range(2, 9)
        for group in (0, 32, 64, 96, 16)
        for symmetric in (True, False)
    }
    found |= {f"grid g{g}": leaf("grid", group=g, scale_bits=8 if g else 16) for g in (0, 32, 128)}
    found |= {v: leaf("fp8", variant=v, group=32, scale_bits=32) for v in ("e4m3fn", "e4m3fnuz")}
    found |= {f"trellis {q}": leaf("trellis", quarter_bits=(q,)) for q in range(4, 25)}
    found |= {f"shuffle {q}": leaf("shuffle", quarter_bits=q) for q in range(8, 21)}
    found |= {f"dense {d}": leaf("dense", dtype=d) for d in ("float32", "bfloat16", "float16")}
    found["mxfp4"] = leaf("mxfp4")
    found["add"] = node("add", {"x": leaf("int", bits=4, group=32), "y": leaf("trellis", quarter_bits=(8,))})
    found["low rank"] = node("low_rank", {"a": leaf("dense"), "b": leaf("int", bits=8, group=32)}, rank=1)
    return found


NAMES = sorted(
    [f"int{b} g{g} {s}" for b in range(2, 9) for g in (0, 32, 64, 96, 16) for s in ("sym", "asym")]
    + [f"grid g{g}" for g in (0, 32, 128)]
    + [f"trellis {q}" for q in range(4, 25)]
    + [f"shuffle {q}" for q in range(8, 21)]
    + ["e4m3fn", "e4m3fnuz", "mxfp4", "add", "low rank", "dense float32", "dense bfloat16", "dense float16"]
)


def error(y: Tensor, x: Tensor, weight: Tensor) -> float:
    """The largest error of a product, as a share of the size of its terms."""
    reference = x.double() @ weight.double().T
    size = (x.double().square() @ weight.double().square().T).sqrt().max().clamp_min(1e-6)
    return float((y - reference).abs().max() / size)


@pytest.mark.parametrize("name", NAMES)
def test_products_and_rows_are_those_of_the_decoded_matrix(samples: ModuleType, name: str, isa: str) -> None:
    tree = trees(samples)[name]
    for shape in SHAPES:
        encoded = samples.random_encoded(tree, shape)
        weight = decode(encoded)
        for exact in (True, False):
            matrix = engine_matrix.compile_matrix(encoded, exact)
            for batch in BATCHES:
                x = torch.randn(batch, shape[1], generator=torch.Generator().manual_seed(batch))
                found = error(engine_matrix.matmul(x, matrix, 2), x, weight)
                assert found < (1e-5 if exact else INT8_ERROR), (shape, exact, batch)
            row = engine_matrix.decode_row(matrix, shape[0] - 1)
            torch.testing.assert_close(torch.tensor(row), weight[-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    [f"int{b} {own}" for b in range(2, 9) for own in ("g0 sym", "g0 asym", "g32 asym", "g96 sym")]
    + ["grid g0", "grid g32", "grid g128"],
)
def test_panels_give_the_products_of_the_decoded_matrix(samples: ModuleType, name: str, isa: str) -> None:
    tree = trees(samples)[name]
    for shape in ((13, 97), (33, 577)):
        encoded = samples.random_encoded(tree, shape)
        weight = decode(encoded)
        stored = engine_matrix.compile_matrix(encoded)
        matrix = engine_matrix.compile_matrix(encoded, panels=2)
        if isa.startswith("avx"):
            assert matrix.kernel.startswith("panels int8 x int8")
        all_rows = torch.randn(13, shape[1], generator=torch.Generator().manual_seed(1))
        products = {}
        for batch in BATCHES:
            x = all_rows[:batch]
            y = products[batch] = engine_matrix.matmul(x, matrix, 2)
            assert error(y, x, weight) < INT8_ERROR, (shape, batch)
            # The same whole numbers, added up in another order.
            torch.testing.assert_close(y, engine_matrix.matmul(x, stored, 2), rtol=1e-4, atol=1e-4)
        # With one scale for as many columns a row's product does not depend on the other rows.
        assert torch.equal(products[4], products[13][:4]) and torch.equal(products[1], products[3][:1])
        row = engine_matrix.decode_row(matrix, shape[0] - 1)
        torch.testing.assert_close(torch.tensor(row), weight[-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block_in", [0, 32, 64])
@pytest.mark.parametrize("block_out", [0, 32])
@pytest.mark.parametrize("exact", [True, False])
def test_rotated_bases(samples: ModuleType, block_in: int, block_out: int, exact: bool, isa: str) -> None:
    for inner in (
        samples.leaf("trellis", quarter_bits=(9, 20), rows=(40, 24)),
        samples.leaf("int", bits=4, group=32),
        samples.leaf("shuffle", quarter_bits=14),
    ):
        tree = samples.node("rotated", {"x": inner}, block_in=block_in, block_out=block_out, seed=7)
        encoded = samples.random_encoded(inner, (64, 192))
        if "section" in encoded.arrays:  # 40 rows of one section and 24 of the other
            bits = torch.tensor([0] * 40 + [1] * 24)[
                torch.randperm(64, generator=torch.Generator().manual_seed(0))
            ]
            packed = (bits.view(8, 8) << torch.arange(8)).sum(1).to(torch.uint8)
            encoded.arrays["section"].copy_(packed)
        arrays = {f"x.{k}": v for k, v in encoded.arrays.items()}
        encoded = EncodedTensor(tree, (64, 192), arrays)
        matrix = engine_matrix.compile_matrix(encoded, exact)
        weight = decode(encoded)
        for batch in BATCHES:
            x = torch.randn(batch, 192, generator=torch.Generator().manual_seed(batch))
            assert error(engine_matrix.matmul(x, matrix, 2), x, weight) < (1e-5 if exact else INT8_ERROR)
        torch.testing.assert_close(
            torch.tensor(engine_matrix.decode_row(matrix, 5)), weight[5], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    "name", ["int4 g32 sym", "int3 g64 asym", "grid g32", "shuffle 13", "trellis 8", "trellis 18"]
)
def test_the_result_does_not_depend_on_the_number_of_threads(
    samples: ModuleType, name: str, isa: str
) -> None:
    matrix = engine_matrix.compile_matrix(samples.random_encoded(trees(samples)[name], (700, 256)))
    for batch in (1, 9):
        x = torch.randn(batch, 256, generator=torch.Generator().manual_seed(0))
        results = [engine_matrix.matmul(x, matrix, threads) for threads in (1, 2, 3, 8)]
        assert all(torch.equal(results[0], y) for y in results)


def test_kernels_name_their_instruction_set_and_exact_is_closer(samples: ModuleType, isa: str) -> None:
    if not ext.engine_int8():
        assert isa == "portable"
        return
    encoded = samples.random_encoded(samples.leaf("int", bits=4, group=32), (64, 256))
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(0))
    exact, fast = (engine_matrix.compile_matrix(encoded, e) for e in (True, False))
    # AVX-512 without VNNI: its own kernels in float32, those of AVX2 in int8.
    assert exact.kernel == f"packed float32, {isa.partition('-')[0]}"
    assert fast.kernel == f"packed int8 x int8, {'avx2' if isa == 'avx512' else isa}"
    weight = decode(encoded)
    assert error(engine_matrix.matmul(x, exact), x, weight) < error(engine_matrix.matmul(x, fast), x, weight)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("code", [0, 255])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_sums_at_the_end_of_their_range_do_not_overflow(
    samples: ModuleType, bits: int, code: int, sign: float, isa: str
) -> None:
    for group, zero in ((32, None), (32, 255 - code), (0, 255 - code)):
        tree = samples.leaf(
            "int", bits=bits, group=group, symmetric=zero is None, scale_bits=8 if group else 16
        )
        encoded = samples.random_encoded(tree, (20, 160))
        encoded.arrays["codes"].fill_(code)
        if zero is not None:
            encoded.arrays["zeros"].fill_(zero)  # codes and zero points at opposite ends
        weight = decode(encoded)
        for panels in (0, 1):
            matrix = engine_matrix.compile_matrix(encoded, panels=panels)
            for batch in BATCHES:
                x = torch.full((batch, 160), sign)  # equal activations lose nothing in int8
                assert error(engine_matrix.matmul(x, matrix, 2), x, weight) < 1e-4


def test_a_grid_of_extremes_does_not_overflow(samples: ModuleType, isa: str) -> None:
    encoded = samples.random_encoded(samples.leaf("grid", group=32, scale_bits=8), (20, 160))
    encoded.arrays["table"].copy_(torch.tensor([1.0, -1.0]).repeat(8))
    weight = decode(encoded)
    for panels in (0, 1):
        matrix = engine_matrix.compile_matrix(encoded, panels=panels)
        for batch in BATCHES:
            x = weight[0].sign().repeat(batch, 1)  # every product is positive
            assert error(engine_matrix.matmul(x, matrix, 2), x, weight) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_number_makes_its_own_row_none(samples: ModuleType, name: str, isa: str) -> None:
    encoded = samples.random_encoded(trees(samples)[name], (20, 160))
    for value in (float("nan"), float("-inf")):
        for matrix in (engine_matrix.compile_matrix(encoded, panels=panels) for panels in (0, 1)):
            for batch in (1, 2, 4, 13):
                x = torch.randn(batch, 160, generator=torch.Generator().manual_seed(batch))
                for column in (0, 159):
                    bad = x.clone()
                    bad[batch - 1, column] = value
                    y = engine_matrix.matmul(bad, matrix, 2)
                    assert not y[-1].isfinite().any(), (value, matrix.kernel, batch, column)
                    assert y[:-1].isfinite().all(), (value, matrix.kernel, batch, column)


def test_integers_and_grids_with_other_scales_stay_as_they_are_stored(samples: ModuleType, isa: str) -> None:
    leaf = samples.leaf
    for kind, own in (("int", {"bits": 4}), ("int", {"bits": 8, "symmetric": False}), ("grid", {})):
        for group, scale_bits in ((32, 16), (16, 8), (16, 16)):
            tree = leaf(kind, group=group, scale_bits=scale_bits, **own)
            encoded = samples.random_encoded(tree, (20, 160))
            matrix = engine_matrix.compile_matrix(encoded, panels=2)
            assert matrix.kernel == engine_matrix.compile_matrix(encoded).kernel
            assert "panels" not in matrix.kernel
            x = torch.randn(5, 160, generator=torch.Generator().manual_seed(0))
            assert error(engine_matrix.matmul(x, matrix, 2), x, decode(encoded)) < INT8_ERROR


def test_other_threads_run_while_a_matrix_is_repacked(samples: ModuleType) -> None:
    import sys
    import threading
    import time

    if not ext.isa().startswith("avx"):
        pytest.skip("no panels here")
    leaf = packed(samples.random_encoded(samples.leaf("int", bits=8, group=32, scale_bits=8), (2048, 4096)))
    turns, done = [0], threading.Event()

    def count() -> None:
        while not done.is_set():
            turns[0] += 1
            time.sleep(1e-4)

    thread, interval = threading.Thread(target=count), sys.getswitchinterval()
    thread.start()
    # From here on who has the interpreter's lock keeps it until it lets go.
    sys.setswitchinterval(60)
    try:
        # As often as it takes the other thread to get a core on a busy machine.
        seen, end = False, time.monotonic() + 30
        while not seen and time.monotonic() < end:
            copies = ext.EngineCopies()
            made = ext.engine_packed(leaf, False, copies)
            before = turns[0]
            copies.run(1)
            seen = turns[0] > before
    finally:
        sys.setswitchinterval(interval)
        done.set()
        thread.join()
    assert seen and made.kernel.startswith("panels")


def test_the_largest_levels_of_shuffle_codes_do_not_overflow(isa: str) -> None:
    codes = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    tables = torch.tensor([23] * 16 + [40] * 16, dtype=torch.uint8)  # every level is 63
    scale, top = torch.full((20,), 255, dtype=torch.uint8), torch.ones(1)
    matrix = ext.engine_shuffle(20, 160, 16, codes, tables, 0.1, scale, top, False)
    for batch in BATCHES:
        for sign in (1.0, -1.0):  # equal activations lose nothing in int8
            y = engine_matrix.matmul(torch.full((batch, 160), sign), matrix, 2)
            torch.testing.assert_close(y, torch.full((batch, 20), sign * 160 * 3.15), rtol=1e-5, atol=0)


def test_shuffle_codes_of_another_size_are_refused() -> None:
    codes, tables = torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.zeros(32, dtype=torch.uint8)
    scale, top = torch.zeros(20, dtype=torch.uint8), torch.ones(1)
    for rows, cols, q, own in (
        (40, 160, 16, tables),
        (20, 200, 16, tables),
        (20, 160, 12, tables),
        (20, 160, 16, tables[:31]),
    ):
        with pytest.raises(ValueError, match="of another size"):
            ext.engine_shuffle(rows, cols, q, codes, own, 0.1, scale, top, False)
    with pytest.raises(ValueError, match="no such rate"):
        ext.engine_shuffle(20, 160, 7, codes, tables, 0.1, scale, top, False)


def test_an_instruction_set_that_is_not_here_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no instruction set 'avx1024' here; there are .*portable"):
        ext.use_isa("avx1024")
    assert ext.isa() == ISAS[0]


def test_zero_activations_give_zero(samples: ModuleType, isa: str) -> None:
    for name in ("int4 g32 asym", "grid g32", "trellis 8", "trellis 20", "int8 g32 sym", "shuffle 16"):
        matrix = engine_matrix.compile_matrix(samples.random_encoded(trees(samples)[name], (20, 64)))
        for batch in (1, 6):
            assert not engine_matrix.matmul(torch.zeros(batch, 64), matrix).any(), name


def test_what_is_no_matrix_is_refused(samples: ModuleType) -> None:
    with pytest.raises(ValueError, match="no matrix"):
        engine_matrix.compile_matrix(samples.random_encoded(samples.leaf("dense"), (4, 4, 4)))
    matrix = engine_matrix.compile_matrix(samples.random_encoded(samples.leaf("dense"), (4, 4)))
    with pytest.raises(ValueError, match="no such row"):
        engine_matrix.decode_row(matrix, 4)


def test_a_rotated_int_leaf_needs_nothing_that_ran_before(samples: ModuleType) -> None:
    from concurrent.futures import ThreadPoolExecutor

    inner = samples.leaf("int", bits=4, group=32)
    tree = samples.node("rotated", {"x": inner}, block_in=32, seed=3)
    encoded = EncodedTensor(
        tree, (64, 192), {f"x.{k}": v for k, v in samples.random_encoded(inner, (64, 192)).arrays.items()}
    )
    x = torch.randn(1, 192, generator=torch.Generator().manual_seed(0))
    matrix, weight = engine_matrix.compile_matrix(encoded), decode(encoded)
    # A new thread has made room for nothing yet.
    with ThreadPoolExecutor(1) as pool:
        y = pool.submit(engine_matrix.matmul, x, matrix, 1).result()
    assert error(y, x, weight) < INT8_ERROR
