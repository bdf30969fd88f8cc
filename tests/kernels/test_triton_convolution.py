"""The Triton convolution: run by the interpreter, and compiled for every target."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from nstf.kernels.triton import aot
from nstf.kernels.triton.architecture import ARCHITECTURES
from nstf.kernels.triton.packed import layout_of
from nstf.kernels.triton.spec import hollow

on_gpu = pytest.importorskip("nstf.kernels.triton.convolution")

# Triton reads TRITON_INTERPRET when it is imported.
INTERPRETED = """
import quick_interpreter
import torch
import torch.nn.functional as F
from conftest import leaf, random_encoded
from nstf.kernels.formats import decode
from nstf.kernels.triton.convolution import convolve
quick_interpreter.install()
cases = [
    (leaf("int", bits=4, group=32), (1, 9, 8, 7), (20, 9, 3, 3), (1, 1), (1, 1), (1, 1)),
    (leaf("int", bits=3, group=32, symmetric=False, scale_bits=8), (2, 5, 9, 6), (7, 5, 2, 3), (2, 1), (0, 2), (2, 1)),
    (leaf("int", bits=6, group=0), (1, 24, 5, 5), (70, 24, 1, 1), (2, 2), (0, 0), (1, 1)),
    (leaf("grid", group=64), (2, 16, 6, 6), (9, 16, 3, 3), (1, 1), (1, 1), (1, 1)),
]
for number, (tree, images, shape, stride, padding, dilation) in enumerate(cases):
    for dtype, limit in ((torch.float32, 1e-5), (torch.float16, 5e-3)):
        encoded = random_encoded(tree, shape)
        x = torch.randn(images).to(dtype)
        x = x.contiguous(memory_format=torch.channels_last) if number % 2 else x
        bias = torch.randn(shape[0])
        around = (padding[0], padding[0], padding[1], padding[1])
        y = convolve(x, encoded, bias, stride, around, dilation, 1)
        wanted = F.conv2d(x.double(), decode(encoded).double(), bias.double(), stride, padding, dilation)
        assert y.shape == wanted.shape and y.dtype == dtype and y.stride() == wanted.stride()
        error = float((y.double() - wanted).norm() / wanted.norm())
        assert error < limit, (number, dtype, error)
"""


def test_the_interpreted_kernel_is_the_convolution() -> None:
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "target", [t if t == "gfx942" else pytest.param(t, marks=pytest.mark.slow) for t in ARCHITECTURES]
)
def test_it_compiles_to_matrix_instructions_without_spills(samples: ModuleType, target: str) -> None:
    layout = layout_of(hollow(samples.leaf("int", bits=4, group=64), (128, 576)))
    assert layout is not None
    spec = on_gpu.convolution_specs(layout, torch.float16, 3136, (3, 3), (1, 1), (1, 1), (1, 1), target)[0]
    made = aot.compile_spec(spec, ARCHITECTURES[target])
    report = made.report(target)
    assert report.vector_spills == 0 and report.scratch_bytes == 0
    text = made.stages["amdgcn" if "amdgcn" in made.stages else "ptx"]
    assert any(name in text for name in ("v_mfma", "v_wmma", "mma.sync", "wgmma"))
