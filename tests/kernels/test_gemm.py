"""The packed GEMM's order of programs over dies, its weight-stationary programs, and the tiles it takes by itself."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
import gemm_cases

from nstf.kernels.triton.architecture import ARCHITECTURES
from nstf.kernels.triton.gemm import gemm_specs
from nstf.kernels.triton.packed import Layout, layout_of
from nstf.kernels.triton.spec import hollow


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(Path(gemm_cases.__file__))]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def layout(samples: ModuleType, rows: int, bits: int = 4, group: int = 128, kind: str = "int") -> Layout:
    params = {"group": group} if kind == "grid" else {"bits": bits, "group": group}
    found = layout_of(hollow(samples.leaf(kind, **params), (rows, 4096)))
    assert found is not None
    return found


@pytest.mark.parametrize("grid", gemm_cases.GRIDS, ids=str)
def test_every_tile_has_one_program_and_a_die_has_neighbours(
    grid: tuple[int, ...], interpreted: dict[str, Any]
) -> None:
    tall, wide, parts, beside, dies = grid
    placed = [tuple(place) for place in interpreted[str(grid)]]
    assert sorted(placed) == sorted(product(range(tall), range(wide), range(parts)))
    if (beside, dies) == (1, 1):
        assert placed == [(n, m, part) for part in range(parts) for m in range(wide) for n in range(tall)]
    # In the order of parts, then of groups of tiles of X, then of rows of W, a die has one stretch.
    order = sorted(placed, key=lambda at: (at[2], at[1] // beside, at[0], at[1]))
    for die in range(dies):
        mine = placed[die::dies]
        first = order.index(mine[0]) if mine else 0
        assert mine == order[first : first + len(mine)]


def test_dies_share_fewer_rows_of_weights_than_as_launched(interpreted: dict[str, Any]) -> None:
    # 16 x 4 x 2 tiles on 8 dies: four tiles of W on each, instead of all that are two apart.
    placed = interpreted[str((16, 4, 2, 4, 8))]
    for die in range(8):
        mine = placed[die::8]
        assert len({(n, part) for n, _, part in mine}) == 4 and len({part for *_, part in mine}) == 1


@pytest.mark.parametrize("case", gemm_cases.PRODUCTS, ids=lambda case: case.name)
def test_neither_order_nor_walks_change_a_bit(case: Any, interpreted: dict[str, Any]) -> None:
    assert interpreted[case.name]["differing"] == []
    assert interpreted[case.name]["error"] < case.limit


@pytest.mark.parametrize("target", ARCHITECTURES)
def test_programs_that_share_are_dealt_to_dies_where_there_are_dies(target: str, samples: ModuleType) -> None:
    dies = 8 if target in ("gfx942", "gfx950") else 1
    tall = layout(samples, 1 << 16)
    alone = gemm_specs(tall, 64, torch.float16, target)[0]
    assert alone.grid[1:] == (1, 1) and alone.constants["DIES"] == 1
    for rows, batch in ((1 << 16, 256), (1024, 16)):
        spec = gemm_specs(layout(samples, rows), batch, torch.float16, target)[0]
        assert max(spec.grid[1:]) > 1 and spec.constants["DIES"] == dies
        assert spec.constants["BESIDE"] == (min(spec.grid[1], 8) if dies > 1 else 1)


def test_dear_codes_are_decoded_once_on_cdna(samples: ModuleType) -> None:
    for batch, walked in ((256, 4), (129, 4), (100, 2)):
        dear = layout(samples, 4096, bits=2, group=32)
        spec = gemm_specs(dear, batch, torch.float16, "gfx942")[0]
        assert (spec.constants["WALK"], spec.grid[1]) == (walked, 1)
    assert gemm_specs(dear, 256, torch.float16, "gfx1100")[0].constants["WALK"] == 1
    assert gemm_specs(dear, 256, torch.float16, "sm_90")[0].constants["WALK"] == 1
    # Plain codes cost less than what is lost by staging nothing; tables fill the registers.
    assert gemm_specs(layout(samples, 4096), 256, torch.float16, "gfx942")[0].constants["WALK"] == 1
    table = gemm_specs(layout(samples, 4096, group=64, kind="grid"), 256, torch.float16, "gfx942")[0]
    assert (table.constants["WALK"], table.grid[1]) == (2, 2)
