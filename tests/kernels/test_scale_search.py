"""The scale search in Triton: interpreted on a CPU, compiled for GPUs that are not here, and run on one that is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nstf.quantizers.rounding.sweep import block_torch, nearest_triton, sweep_torch
from tests.kernels.diagonal import diagonal
from tests.quantizers.conftest import normal
from tests.quantizers.levels import LEVELS

pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).parent))
from launches import catching, pretend

from nstf.kernels.triton.architecture import ARCHITECTURES

on_gpu = pytest.importorskip("nstf.kernels.triton.scale_search")

# Triton reads TRITON_INTERPRET when it is imported. Groups that end before the row, a row longer than a program's columns,
# a group of zeros, largest weights of both signs.
INTERPRETED = """
import sys
from dataclasses import replace
import torch
from nstf.quantizers import fp8
from nstf.quantizers.rounding.sweep import block_torch, nearest_triton, sweep_torch
from tests.kernels import quick_interpreter
from tests.quantizers.conftest import normal
from tests.quantizers.levels import LEVELS
quick_interpreter.install()
LEVELS["fp8-f32"] = fp8.levels(fp8.Params(scale_bits=32))
LEVELS["grid-scale8"] = replace(LEVELS["grid"], scale="u8", signs=False)
def compare(group, rows, cols):
    weight = normal(rows, cols)
    weight[0, :40] = 0
    weight[1, 3], weight[1, 5] = -weight[1].abs().max() - 0.1, weight[1].abs().max() + 0.1
    importance = torch.rand(cols) + 0.1
    for name, levels in LEVELS.items():
        reference = sweep_torch(weight, levels, group, importance, None, None, block_torch)
        ours, errors = nearest_triton(weight, levels, group, importance, None)
        for mine, wanted in (
            (ours.codes, reference.codes),
            (ours.grid.scale, reference.grid.scale),
            (ours.grid.zero, reference.grid.zero),
            (ours.grid.largest, reference.grid.largest),
        ):
            assert mine.shape == wanted.shape and mine.dtype == wanted.dtype
            # Two scales that are equally good may fall either way.
            same = float(torch.isclose(mine.float(), wanted.float(), rtol=1e-6, atol=0).float().mean())
            assert same > 0.98, (name, same)
        assert torch.allclose(ours.row_loss, reference.row_loss, rtol=1e-3), name
        assert torch.allclose(errors, weight - ours.decode(levels), atol=1e-7), name
        moved = weight * 1.1
        frozen, errors = nearest_triton(moved, levels, group, importance, ours.grid)
        reference = sweep_torch(moved, levels, group, importance, None, ours.grid, block_torch)
        assert float((frozen.codes == reference.codes).float().mean()) > 0.999, name
        assert torch.allclose(errors, moved - frozen.decode(levels), atol=1e-7), name
        assert frozen.grid is ours.grid
for words in sys.argv[1:]:
    compare(*map(int, words.split(",")))
"""


@pytest.mark.parametrize(
    "shapes",
    [("32,3,72", "0,2,1100", "128,3,96"), pytest.param(("64,2,136",), marks=pytest.mark.slow)],
    ids=["first", "others"],
)
def test_the_interpreted_kernel_gives_the_codes_of_the_reference(shapes: tuple[str, ...]) -> None:
    """Shapes: columns of a group, rows, columns."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", INTERPRETED, *shapes]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# All forms of a list in one launch, of one matrix and of one each: what each alone gives; and estimates made of that.
TOGETHER = """
import torch
from nstf.quantizers import grid16, int_grid, mxfp4
from nstf.quantizers.rounding import estimate, sweep
from nstf.quantizers.stats import Stats
from tests.kernels import quick_interpreter
from tests.quantizers.conftest import normal
quick_interpreter.install()
rows, cols = 1, 264
estimate.PASSES, grid16.ROUNDS = 1, 2
Params = int_grid.Params
params = [Params(b, g, s, k) for b, g, s, k in (
    (2, 32, True, 8), (3, 0, True, 16), (4, 64, False, 8), (4, 0, True, 8)
)]
forms = [(int_grid.levels(p), p.group) for p in params] + [(mxfp4.LEVELS, 32)]
weight, importance = normal(rows, cols), torch.rand(cols) + 0.1
weight[0, 64:128] = 0
hessian = torch.eye(cols) + 0.1
wanted = [estimate.Form(levels, group, estimate.Rounding("ldlq")) for levels, group in forms]
alone = estimate.expected_losses(weight, 1, wanted, Stats(hessian))
nearest = [estimate.Form(levels, group, estimate.Rounding("nearest")) for levels, group in forms[:3]]
plain = estimate.expected_losses(weight, 1, nearest, Stats(hessian))
tables = [grid16.fit(weight, grid16.Params(group, 8), Stats(hessian), 512) for group in (32, 64)]
sweep.in_triton = lambda weight: True
lists = sweep.launched_together(weight, forms)
assert sorted(at for same in lists for at in same) == list(range(len(forms))) and len(lists) == 4, lists
for same in lists:
    own = [forms[at] for at in same]
    errors = torch.full((len(own), rows, cols), float("nan"))
    scales = sweep.nearest_many(weight, own, importance, None, errors)[:2]
    moved = torch.stack([weight * (1 + 0.1 * i) for i in range(len(own))])
    again = torch.full_like(errors, float("nan"))
    sweep.nearest_many(moved, own, importance, scales, again)
    for i, (levels, group) in enumerate(own):
        rounded, left = sweep.nearest_triton(weight, levels, group, importance, None)
        groups = rounded.grid.scale.shape[1]
        assert torch.equal(errors[i], left), (levels, group)
        assert torch.equal(scales[0][i, :, :groups], rounded.grid.scale)
        _, left = sweep.nearest_triton(moved[i].contiguous(), levels, group, importance, rounded.grid)
        assert torch.equal(again[i], left), (levels, group)
ours = estimate.expected_losses(weight, 1, wanted, Stats(hessian))
assert torch.allclose(torch.tensor(ours), torch.tensor(alone), rtol=1e-3), (ours, alone)
ours = estimate.expected_losses(weight, 1, nearest, Stats(hessian))
assert torch.allclose(torch.tensor(ours), torch.tensor(plain), rtol=1e-3), (ours, plain)
two = [grid16.Params(group, 8) for group in (32, 64)]
for ours, alone in zip(grid16.fit_many(weight, two, Stats(hessian), 512), tables, strict=True):
    assert torch.allclose(ours.values(), alone.values(), atol=2e-3), (ours, alone)
"""


def test_forms_that_are_launched_together_give_what_each_gives_alone() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", TOGETHER], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# The format's numbers lie before memory that nobody may touch. Interpreted, a read beyond them ends the process.
AT_THE_END = """
import ctypes, mmap, torch
from nstf.quantizers.rounding import sweep
from tests.kernels import quick_interpreter
from tests.quantizers.conftest import normal
from tests.quantizers.levels import LEVELS
quick_interpreter.install()
page, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)
area = mmap.mmap(-1, 2 * page)
at = ctypes.addressof(ctypes.c_char.from_buffer(area))
assert libc.mprotect(ctypes.c_void_p(at + page), page, 0) == 0  # PROT_NONE
usual = sweep._packed
def packed(levels, width, device):
    form = usual(levels, width, device)
    there = torch.frombuffer(area, dtype=torch.float32, count=len(form), offset=page - 4 * len(form))
    return there.copy_(form)
sweep._packed = packed
weight, importance = normal(100, 8), torch.ones(8)
scale = torch.full((100, 1), 0.01)
u8 = {name: levels for name, levels in LEVELS.items() if levels.scale == "u8"}
assert u8
for name, levels in u8.items():
    grid = sweep.Grid(scale, torch.full_like(scale, 8.0), torch.ones(100, 1), 8)
    found, _ = sweep.nearest_triton(weight, levels, 8, importance, grid)
    assert found.codes.shape == (100, 8), name
"""


def test_given_scales_need_no_super_scales() -> None:
    """They were looked for beyond the format's numbers: 8-bit scales that are given have none."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", AT_THE_END], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)


@pytest.mark.parametrize(
    ("target", "table", "shape"),
    diagonal(["sm_90", "gfx942", "gfx1100"], [False, True], [on_gpu.NARROW, on_gpu.WIDE]),
)
def test_the_kernel_compiles_for(
    target: str, table: bool, shape: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = on_gpu._round
    constants = {"TABLE": table, "GROUPS": shape[0], "COLS": shape[1]}
    types = {"codes": "*u8", "margin": "fp32"} | dict.fromkeys(
        ("rows", "cols", "most_groups", "form_stride", "weight_stride", "frozen"), "i32"
    )
    source = ASTSource(
        fn=kernel,
        signature={
            name: "constexpr" if name in constants else types.get(name, "*fp32") for name in kernel.arg_names
        },
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    chip = {
        "sm_90": GPUTarget("cuda", 90, 32),
        "gfx942": GPUTarget("hip", "gfx942", 64),
        "gfx1100": GPUTarget("hip", "gfx1100", 32),
    }[target]
    compiled = triton.compile(source, target=chip, options={"num_warps": shape[2], "num_stages": 1})
    assert len(compiled.asm["cubin" if target == "sm_90" else "hsaco"]) > 1000


def test_a_conversion_compiles_four_kernels_whatever_the_shapes() -> None:
    with catching() as launches:
        pretend(ARCHITECTURES["sm_90"], [])
        on_gpu._round.device_caches.clear()
        for levels in LEVELS.values():
            for group, rows, cols in ((0, 1, 1), (0, 3, 1100), (32, 7, 72), (64, 16, 128), (128, 2, 1 << 15)):
                weight = normal(rows * cols + 1)[1:].view(rows, cols)  # starts between two 16-byte addresses
                found, _ = nearest_triton(weight, levels, group, torch.ones(cols), None)
                nearest_triton(weight, levels, group, torch.ones(cols), found.grid, weight)
        on_gpu._round.device_caches.clear()
    assert len({launch["hash"] for launch in launches}) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("group", [0, 24, 32, 128])
def test_the_gpu_gives_the_codes_of_the_reference(name: str, group: int) -> None:
    levels, weight, importance = (
        LEVELS[name],
        normal(300, 1240).cuda(),
        20 * normal(1240, seed=2).abs().cuda() + 0.1,
    )
    ours, errors = nearest_triton(weight, levels, group, importance, None)
    reference = sweep_torch(weight, levels, group, importance, None, None, block_torch)
    assert float((ours.codes == reference.codes).float().mean()) > 0.97
    assert float((ours.grid.scale == reference.grid.scale).float().mean()) > 0.97
    assert torch.allclose(ours.row_loss, reference.row_loss, rtol=1e-3)
    assert torch.allclose(errors, weight - ours.decode(levels), atol=1e-6)
