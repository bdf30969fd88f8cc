"""The rounding sweep in Triton: interpreted on a CPU, compiled for GPUs that are not here, and run on one that is."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from nstf.quantizers import METHODS, method
from nstf.quantizers.rounding.factor import factor
from nstf.quantizers.rounding.ldlq import refit_in_blocks, refit_torch
from nstf.quantizers.rounding.sweep import block_torch, block_triton, sweep, sweep_torch
from nstf.quantizers.stats import Stats
from tests.kernels.diagonal import diagonal
from tests.quantizers.conftest import correlated_hessian, normal
from tests.quantizers.levels import LEVELS

pytest.importorskip("triton")
on_gpu = pytest.importorskip("nstf.kernels.triton.ldlq")

# Levels, columns of a group, whether the columns are ordered and the grid is given: all levels are in the first part.
CASES = list(product(LEVELS, (0, 24), (False, True)))
FIRST = [case for place, case in enumerate(CASES) if place // 4 % 4 == place % 4]

# Triton reads TRITON_INTERPRET when it is imported. More columns than a block, groups longer than one, rows that no
# program's number divides.
INTERPRETED = """
import json, sys, torch
from nstf.quantizers.rounding import sweep
from nstf.quantizers.rounding.factor import factor
from nstf.quantizers.rounding.sweep import block_torch, block_triton, sweep_torch
from tests.kernels import quick_interpreter
from tests.quantizers.conftest import correlated_hessian, normal
from tests.quantizers.levels import LEVELS
quick_interpreter.install()
cols, sweep.BLOCK = map(int, sys.argv[2:4])
in_triton, in_torch = sweep.search_triton, sweep.search
weight, hessian = normal(37, cols), correlated_hessian(cols)
plain, ordered = factor(hessian), factor(hessian, act_order=True)
for name, group, given in json.loads(sys.argv[1]):
    levels = LEVELS[name]
    # The search of scales has interpreted tests of its own (test_scale_search.py).
    sweep.search_triton = in_triton if name in sys.argv[4:] else in_torch
    grid = sweep_torch(weight, levels, group, plain.importance, None, None).grid
    way, frozen = (ordered, grid) if given else (plain, None)
    ours, reference = (
        sweep_torch(weight, levels, group, way.importance, way, frozen, block)
        for block in (block_triton, block_torch)
    )
    # A tie between two levels may fall the other way; from there a row goes its own way.
    same = float((ours.codes == reference.codes).float().mean())
    assert same > 0.97, (name, group, given, same)
    assert torch.allclose(ours.row_loss.sum(), reference.row_loss.sum(), rtol=1e-3), name
"""


@pytest.mark.parametrize(
    ("cases", "cols", "block", "searched"),
    [(FIRST, 43, 16, ["mxfp4"]), pytest.param(CASES, 150, 128, list(LEVELS), marks=pytest.mark.slow)],
    ids=["first", "others"],
)
def test_the_interpreted_kernel_gives_the_codes_of_the_reference(
    cases: list[tuple[str, int, bool]], cols: int, block: int, searched: list[str]
) -> None:
    assert {name for name, _, _ in FIRST} == set(LEVELS)
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", INTERPRETED, json.dumps(cases), str(cols), str(block), *searched]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


REFITTED = """
import torch
from nstf.quantizers.rounding import ldlq
from nstf.quantizers.rounding.factor import factor
from nstf.quantizers.rounding.sweep import sweep
from tests.kernels import quick_interpreter
from tests.quantizers.conftest import correlated_hessian, normal
from tests.quantizers.levels import LEVELS
quick_interpreter.install()
weight, way = normal(37, 96), factor(correlated_hessian(96))
for name, levels in LEVELS.items():
    for group in (0, 8, 24, 32):
        rounded = sweep(weight, levels, group, way.diagonal, way)
        reference = ldlq.refit_torch(weight, rounded, levels, way)
        width = 96 // rounded.grid.scale.shape[1]
        # All groups, or some; all rows at once, and some at a time.
        for rows, block in ((37, 16), (16, 16), (37, 4), (10, 2), (37, 1)):
            ldlq.ROOM, ldlq.BLOCKS = rows * block * block * width, (2 * block, block)
            ours = ldlq.refit_in_blocks(weight, rounded, levels, way)
            same = (ours.grid.scale - reference.grid.scale).abs() <= 1e-5 * reference.grid.scale.abs()
            assert float(same.float().mean()) > 0.97, (name, group, rows, block)
            assert torch.allclose(ours.row_loss, reference.row_loss, rtol=1e-4), (name, group, rows, block)
            assert bool((ours.row_loss <= rounded.row_loss).all()), name
"""


def test_the_interpreted_refit_gives_the_scales_of_the_reference() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", REFITTED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("target", "steps"), diagonal(["sm_90", "gfx942", "gfx1100"], [0, 4, 8]))
def test_the_kernel_compiles_for(
    target: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"codes": "*u8", "group_of": "*i32", "loss": "*fp64"}
    types |= dict.fromkeys(("start", "end", "rows", "cols", "groups", "top"), "i32")
    constants = {"STEPS": steps, "BLOCK": on_gpu.BLOCK, "ROWS": on_gpu.ROWS}
    compiles(on_gpu._sweep, types, constants, target, on_gpu.WARPS)


@pytest.mark.parametrize(("target", "groups"), diagonal(["sm_90", "gfx942", "gfx1100"], [16, 32, 128]))
def test_the_refit_compiles_for(
    target: str, groups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nstf.kernels.triton import scale_refit

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"gain": "*fp64"} | dict.fromkeys(("rows", "groups", "mode"), "i32")
    constants = {"ROWS": scale_refit.NUMBERS // groups, "GROUPS": groups}
    compiles(scale_refit._refit, types, constants, target, scale_refit.WARPS)


def compiles(kernel: Any, types: dict[str, str], constants: dict[str, int], target: str, warps: int) -> None:
    """types: of arguments that are no pointers to float32."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=kernel,
        signature={
            name: "constexpr" if name in constants else types.get(name, "*fp32") for name in kernel.arg_names
        },
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(kernel.arg_names)
            if name not in constants and types.get(name, "*fp32").startswith("*")
        },
    )
    chip = {
        "sm_90": GPUTarget("cuda", 90, 32),
        "gfx942": GPUTarget("hip", "gfx942", 64),
        "gfx1100": GPUTarget("hip", "gfx1100", 32),
    }[target]
    compiled = triton.compile(source, target=chip, options={"num_warps": warps})
    assert len(compiled.asm["cubin" if target == "sm_90" else "hsaco"]) > 1000


@pytest.mark.gpu
@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("group", [0, 24, 32, 128])
def test_the_gpu_gives_the_codes_of_the_reference(name: str, group: int) -> None:
    levels, weight, hessian = LEVELS[name], normal(300, 520).cuda(), correlated_hessian(520).cuda()
    grid = sweep_torch(weight, levels, group, hessian.diagonal(), None, None).grid
    for way, frozen in ((factor(hessian), None), (factor(hessian, act_order=True), grid)):
        ours, reference = (
            sweep_torch(weight, levels, group, way.importance, way, frozen, block)
            for block in (block_triton, block_torch)
        )
        assert float((ours.codes == reference.codes).float().mean()) > 0.9
        assert torch.allclose(ours.row_loss.sum(), reference.row_loss.sum(), rtol=3e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("group", [0, 32, 128])
def test_the_gpu_fits_the_scales_of_the_reference(name: str, group: int) -> None:
    levels, weight, way = LEVELS[name], normal(300, 512).cuda(), factor(correlated_hessian(512).cuda())
    rounded = sweep(weight, levels, group, way.importance, way)
    ours, reference = refit_in_blocks(weight, rounded, levels, way), refit_torch(weight, rounded, levels, way)
    assert torch.allclose(ours.grid.scale, reference.grid.scale, rtol=1e-2)
    assert torch.allclose(ours.row_loss, reference.row_loss, rtol=1e-3)


@pytest.mark.gpu
def test_the_same_bytes_for_every_run_on_a_gpu() -> None:
    weight, stats = normal(300, 520).cuda(), Stats(correlated_hessian(520).cuda())
    for name in METHODS:
        module = method(name)
        params = module.Params(rounding="ldlq")
        first, second = (module.encode(weight, params, Stats(stats.hessian)) for _ in range(2))
        assert all(torch.equal(first.arrays[k], second.arrays[k]) for k in first.arrays), name
