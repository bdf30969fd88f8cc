"""The GPU's search of shuffle codes: interpreted on a CPU, compiled for several targets, and run where there is a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from nstf.kernels.formats import shuffle
from nstf.kernels.torch import shuffle_search as reference
from nstf.kernels.triton import shuffle_search as on_gpu

# Steps with two rows and with one; with one and with none.
CASES = [(9, 32), (18, 32)]
# A whole segment and part of another; 8 groups of one path.
LONG = [(8, 288), (16, 512), (13, 96)]

INTERPRETED = """
import json, sys
from tests.kernels import quick_interpreter
from tests.kernels.test_shuffle_search import agree, agree_matrix_by_matrix, on_gpu
quick_interpreter.install()
on_gpu.MOST_ROWS = 256  # what has more rows takes several launches
for q, rows in json.loads(sys.argv[1]):
    agree(q, rows, "cpu", least=1.0)
if len(sys.argv) > 2:
    agree_matrix_by_matrix("cpu")
"""


def agree(quarter_bits: int, rows: int, device: str, least: float) -> None:
    """The kernel's codes and values are the reference's, but for a share of 1 - least of the codes."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, 16, generator=generator)
    target = weight + 0.1 * torch.randn(rows, 16, generator=generator)
    level = shuffle.STEPS[quarter_bits] * (0.5 + torch.rand(rows, generator=generator))
    level[3] = 0  # a row of zeros
    importance = 2 * torch.rand(rows, generator=generator)
    feedback = 0.3 * torch.randn(16, 16, generator=generator).triu(1)
    given = [t.to(device) for t in (target, weight, level, importance, feedback)]
    rounded, codes = on_gpu.round_columns(*given, quarter_bits)
    tables = reference.float_tables(quarter_bits)
    expected, paths = reference.round_columns(
        target, weight, level, importance, feedback, quarter_bits, tables
    )
    assert rounded.device.type == codes.device.type == device
    same = float((codes.cpu() == paths).float().mean())
    assert same >= least, (quarter_bits, rows, same)
    if least == 1.0:
        assert torch.equal(rounded.cpu(), expected)
    assert torch.allclose(
        (rounded.cpu() - target).square().mean(), (expected - target).square().mean(), rtol=1e-3
    )


def agree_matrix_by_matrix(device: str) -> None:
    """Matrices under one another, each with its own feedback: what the kernel gives for each of them alone."""
    generator = torch.Generator().manual_seed(7)
    sizes, bits = (256, 288), 9
    weight = torch.randn(sum(sizes), 16, generator=generator)
    level = torch.full((len(weight),), shuffle.STEPS[bits])
    feedback = 0.3 * torch.randn(2, 16, 16, generator=generator).triu(1)
    which = torch.tensor([0, 1, 1], dtype=torch.int32)
    given = [t.to(device) for t in (weight, weight, level, torch.ones(len(weight)), feedback)]
    rounded, codes = on_gpu.round_columns(*given, bits, which.to(device))
    start = 0
    for matrix, size in enumerate(sizes):
        rows = slice(start, start + size)
        own = [t[rows] for t in given[:4]]
        alone, paths = on_gpu.round_columns(*own, given[4][matrix], bits)
        groups = slice(start // shuffle.GROUP, (start + size) // shuffle.GROUP)
        assert torch.equal(rounded[rows], alone) and torch.equal(codes[groups], paths), matrix
        start += size
    # Without feedback there is nothing to tell matrices by.
    for found, same in zip(
        on_gpu.round_columns(*given[:4], None, bits, which.to(device)),
        on_gpu.round_columns(*given[:4], None, bits),
        strict=True,
    ):
        assert torch.equal(found, same)


@pytest.mark.parametrize("cases", [CASES, pytest.param(LONG, marks=pytest.mark.slow)], ids=["short", "long"])
def test_the_interpreted_kernel_gives_the_codes_of_the_reference(cases: list[tuple[int, int]]) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", INTERPRETED, str([list(c) for c in cases])]
    program += ["matrices"] if cases is LONG else []
    done = subprocess.run(
        program, env=environment, capture_output=True, text=True, cwd=Path(__file__).parent.parent.parent
    )
    assert done.returncode == 0, done.stderr


# One row ends at a step where a program has a multiprocessor for itself, two where it has not.
@pytest.mark.parametrize(("ends", "room"), [(1, "alone"), (2, "beside")])
@pytest.mark.parametrize(
    "target", ["sm_90", "gfx942", *(pytest.param(t, marks=pytest.mark.slow) for t in ("gfx90a", "gfx1100"))]
)
def test_the_kernel_compiles_for(
    target: str, ends: int, room: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = on_gpu._round_columns
    types = dict.fromkeys(("symbols", "oldest", "starts"), "*u8") | dict.fromkeys(
        ("kinds", "ending", "stops", "which"), "*i32"
    )
    types |= dict.fromkeys(("costs", "places", "twice"), "*i32")
    types |= dict.fromkeys(("rows", "steps", "target_stride", "weight_stride"), "i32")
    types |= dict.fromkeys(("matrix_stride", "feedback_stride"), "i32")
    types |= {"low": "fp32", "high": "fp32"}
    signature = {p.name: "constexpr" if p.is_constexpr else types.get(p.name, "*fp32") for p in kernel.params}
    constants = on_gpu.CONSTANTS | {"ENDS": ends, "NORMALISE": on_gpu.NORMALISE[ends]}
    source = ASTSource(kernel, signature, constexprs=constants)
    nvidia = target.startswith("sm_")
    lanes = 64 if target.startswith("gfx9") else 32
    gpu = GPUTarget("cuda", int(target[3:]), 32) if nvidia else GPUTarget("hip", target, lanes)
    made = triton.compile(source, target=gpu, options={"num_warps": on_gpu.WARPS[room]})
    assert len(made.asm["cubin" if nvidia else "hsaco"]) > 1000


@pytest.mark.gpu
@pytest.mark.parametrize(("quarter_bits", "rows"), CASES + LONG)
def test_a_gpu_gives_the_codes_of_the_reference(quarter_bits: int, rows: int) -> None:
    agree(quarter_bits, rows, "cuda", least=0.97)


@pytest.mark.gpu
def test_a_gpu_rounds_matrices_under_one_another_as_each_alone() -> None:
    agree_matrix_by_matrix("cuda")


def test_programs_that_share_a_multiprocessor_have_fewer_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu, "_multiprocessors", lambda device: 132)
    device = torch.device("cuda")
    monkeypatch.setattr(torch.version, "hip", None)
    assert [on_gpu._warps(n, device) for n in (1, 132, 133, 500)] == [8, 8, 4, 4]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert on_gpu._warps(1, device) == 4
