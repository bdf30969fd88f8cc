"""The Viterbi search in Triton: interpreted on a CPU, compiled for GPUs that are not here, and run on one that is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nstf.kernels.torch import viterbi as reference
from tests.kernels.diagonal import diagonal

triton = pytest.importorskip("triton")
on_gpu = pytest.importorskip("nstf.kernels.triton.viterbi")

# One program searches two tiles, in two blocks of groups, halves and all.
INTERPRETED = """
import torch
from nstf.kernels.torch import viterbi as reference
from nstf.kernels.triton.viterbi import Launch, viterbi
generator = torch.Generator().manual_seed(0)
x, codebook = torch.randn(2, 256, generator=generator), torch.randn(65536, generator=generator)
codes = viterbi(x, {q}, codebook, Launch(8192, 128, 1))
assert torch.equal(codes, reference.viterbi(x, {q}, codebook))
"""


@pytest.mark.slow
@pytest.mark.parametrize("quarter_bits", [7, 8])
def test_the_interpreted_kernel_gives_the_codes_of_the_reference(quarter_bits: int) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    program = INTERPRETED.format(q=quarter_bits)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("target", "quarter_bits"), diagonal(["sm_90", "gfx942", "gfx90a", "gfx1100"], [10, 12], every=2)
)
def test_the_kernel_compiles_for(
    target: str, quarter_bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = on_gpu._search
    types = {"targets": "*fp32", "codebook": "*fp32", "codes": "*u8", "costs": "*fp32", "back": "*u8"}
    types |= {"states": "*i32", "tiles": "i32", "quarter_bits": "i32"}
    launch = on_gpu.launch_for(1000, quarter_bits, 132)
    constants = {"BITS": 16, "TILE": 256, "SEAM": 48, "UNROLL": on_gpu.UNROLL, "BLOCK": launch.block}
    constants |= {"KMAX": 3, "UNIFORM": quarter_bits == 12}
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(6)},
    )
    lanes = 32 if target in ("sm_90", "gfx1100") else 64
    chip = GPUTarget("cuda", 90, 32) if target == "sm_90" else GPUTarget("hip", target, lanes)
    options = {"num_warps": launch.threads // lanes, "num_stages": 1}
    compiled = triton.compile(source, target=chip, options=options)
    assert len(compiled.asm["cubin" if target == "sm_90" else "hsaco"]) > 1000
    # No number changes threads on its way: the only shared memory is the search for the seam's state.
    assert compiled.metadata.shared <= 4 * launch.threads // lanes


def test_few_tiles_get_big_programs_and_many_get_several_beside_each_other() -> None:
    assert on_gpu.launch_for(36, 12, 132) == on_gpu.Launch(4096, 1024, 1)
    assert on_gpu.launch_for(36, 24, 132) == on_gpu.Launch(1024, 1024, 1)
    for quarter_bits in range(4, 25):
        launch = on_gpu.launch_for(4000, quarter_bits, 132)
        groups = 1 << (16 - -(-quarter_bits // 4))
        assert groups % launch.block == 0 and launch.block >= launch.threads
        assert launch.threads * launch.programs <= 1024


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [3, 700])
@pytest.mark.parametrize("quarter_bits", range(4, 25))
def test_the_gpu_gives_the_codes_of_the_reference(quarter_bits: int, tiles: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(tiles, 256, generator=generator, device="cuda")
    codebook = torch.randn(1 << 16, generator=generator, device="cuda")
    codes = on_gpu.viterbi(x, quarter_bits, codebook)
    some = torch.cat([x[:1], x[-1:]])
    assert torch.equal(torch.cat([codes[:1], codes[-1:]]), reference.viterbi(some, quarter_bits, codebook))
