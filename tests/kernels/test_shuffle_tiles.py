"""The tiles of shuffle_mma.py: programs that run at once, and registers that let them."""

import pytest
import torch
import triton

from nstf.kernels.formats import shuffle
from nstf.kernels.triton.aot import compile_spec
from nstf.kernels.triton.architecture import ARCHITECTURES
from nstf.kernels.triton.shuffle_mma import shuffle_mma_specs, tile_for

SHAPES = [(28672, 4096), (28672, 8192), (6144, 4096), (4096, 14336), (4096, 4096), (1024, 4096), (1000, 64)]


@pytest.mark.parametrize("rate", shuffle.RATES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_programs_run_at_once_or_there_are_many(rate: int, shape: tuple[int, int]) -> None:
    """A second round of a few programs would take as long as the first: three run beside each other at every rate, four
    where registers are limited."""
    units = ARCHITECTURES["sm_90"].units
    tile = tile_for(rate, *shape, 1, "sm_90")
    params = shuffle.Params(quarter_bits=rate)
    product = shuffle_mma_specs(params, *shape, 1, torch.float32, torch.float32, "sm_90")[0]
    programs = product.grid[0] * product.grid[1]
    assert product.grid[1] * tile.warps * tile.per >= triton.cdiv(shape[1], shuffle.CHUNK)
    if rate in (10, 14):
        assert programs <= 3 * units or 5 * units <= programs or tile.per == 1
        assert tile.registers == 0
    else:
        assert programs <= (4 if tile.registers else 3) * units


@pytest.mark.parametrize(
    "rate", [19, *(pytest.param(r, marks=pytest.mark.slow) for r in (9, 13, 17, 18, 20))]
)
def test_four_programs_fit_a_unit_and_hardly_spill(rate: int) -> None:
    params, row = shuffle.Params(quarter_bits=rate), ARCHITECTURES["sm_90"]
    product = shuffle_mma_specs(params, 28672, 4096, 1, torch.float32, torch.bfloat16, "sm_90")[0]
    report = compile_spec(product, row).report(row.target)
    assert report.vector_registers <= 128 and report.occupancy.groups_per_unit >= 4
    assert report.vector_spills <= 10
