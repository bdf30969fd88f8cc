"""The kernels between a decoder's matrices: interpreted on a CPU, compiled for GPUs that are not here, run on one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
import decode_step_cases
from diagonal import diagonal

from nstf.kernels.torch.decode_step import Heads
from nstf.kernels.triton import gates
from nstf.kernels.triton.aot import compile_spec
from nstf.kernels.triton.architecture import ARCHITECTURES, architecture
from nstf.kernels.triton.decode_step import attend_spec, gate_spec, norm_spec
from nstf.kernels.triton.likeliest import likeliest_spec
from nstf.kernels.triton.prompt_heads import place_spec


def test_the_interpreted_kernels_do_what_the_torch_functions_do() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(Path(decode_step_cases.__file__))]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert set(found) >= set(decode_step_cases.ATTENTION) and len(found) == 29
    assert {name: e for name, e in found.items() if not e < decode_step_cases.limit(name)} == {}


@pytest.mark.gpu
def test_the_kernels_on_a_gpu_do_what_the_torch_functions_do() -> None:
    found = decode_step_cases.errors("cuda")
    assert {name: e for name, e in found.items() if not e < decode_step_cases.limit(name)} == {}


# float32 products are no matrix instructions everywhere, and heads of 512 are no model's today: they have to run, no more.
@pytest.mark.parametrize(
    ("heads", "target"),
    diagonal(((torch.float32, 128), (torch.float32, 256), (torch.bfloat16, 512)), sorted(ARCHITECTURES)),
)
def test_unusual_heads_fit_the_local_memory(target: str, heads: tuple[torch.dtype, int]) -> None:
    row, (dtype, size) = architecture(target), heads
    spec = attend_spec(1, Heads(8, 4, size, 0.1), 1024, dtype, False, False, target)
    found = compile_spec(spec, row).report(target)
    assert found.lds_bytes <= row.lds_bytes_per_group, (found.lds_bytes, found.vector_spills)


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("batch", [1, 16])
def test_attention_leaves_the_first_level_cache_as_it_is(batch: int, size: int) -> None:
    """Above 48 KiB a launch divides it anew, and a multiprocessor empties before: 0.25 ms of a captured token of 8B."""
    spec = attend_spec(batch, Heads(32, 8, size, 0.1), 8192, torch.bfloat16, False, False, "sm_90")
    assert compile_spec(spec, architecture("sm_90")).report("sm_90").lds_bytes <= 48 << 10


@pytest.mark.parametrize(
    ("kernel", "target"),
    diagonal(
        ("attend", "norm", "gate", "likeliest", "attend in a window", "attend in slots", "place"),
        ARCHITECTURES,
    ),
)
def test_the_kernels_keep_their_promises(kernel: str, target: str) -> None:
    row, dtype = architecture(target), torch.bfloat16
    spec = {
        "norm": norm_spec(1, 4096, dtype, target, dtype),
        "gate": gate_spec(1, 14336, dtype, False, target),
        "place": place_spec(
            512, Heads(32, 8, 128, 0.1), ("tokens", "first_at", "capacity"), dtype, True, True, target
        ),
        "likeliest": likeliest_spec(1, 128256, dtype, target),
        "attend": attend_spec(1, Heads(32, 8, 128, 0.1), 1024, dtype, False, False, target),
        "attend in a window": attend_spec(1, Heads(8, 4, 256, 0.1, 512), 1024, dtype, True, False, target),
        "attend in slots": attend_spec(
            8, Heads(32, 8, 128, 0.1), 1024, dtype, False, False, target, slots=True
        ),
    }[kernel]
    assert gates.expected(spec, row).matrix == (spec.kind == "attend")
    assert gates.check(spec, compile_spec(spec, row).report(target), row) == []
