"""Programs that hand each other sums: what AMD's code objects do before a counter is raised and while one waits for it."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
aot = pytest.importorskip("nstf.kernels.triton.aot")

sys.path.insert(0, str(Path(__file__).parent))
from diagonal import diagonal  # noqa: E402

from nstf.kernels.torch.decode_step import Heads  # noqa: E402
from nstf.kernels.triton.architecture import ARCHITECTURES  # noqa: E402
from nstf.kernels.triton.assembly import _parse  # noqa: E402
from nstf.kernels.triton.decode_step import attend_spec  # noqa: E402
from nstf.kernels.triton.spec import KernelSpec, specs_for  # noqa: E402

AMD = [target for target, row in ARCHITECTURES.items() if row.backend == "hip"]
WAITS = {"gfx9": "s_waitcnt vmcnt(0)", "gfx11": "s_waitcnt_vscnt null, 0", "gfx12": "s_wait_storecnt 0"}
BARRIERS = ("s_barrier", "s_barrier_signal")


def kernel(name: str, target: str, samples: Any) -> KernelSpec:
    if name == "attention":
        heads = Heads(8, 2, 64, 0.125)
        return attend_spec(1, heads, 1024, torch.float16, False, False, target)
    leaf, node = samples.leaf, samples.node
    dense = leaf("dense", dtype="float16")
    tree = node("low_rank", {"a": dense, "b": dense}, rank=32)
    if name != "low rank":
        tree = node("add", {"x": leaf("int", bits=4, group=128), "y": tree})
    (spec,) = specs_for(tree, (1024, 4096), 8 if name.endswith("8") else 1, torch.float16, target)
    return spec


@pytest.mark.parametrize(
    ("name", "target"),
    diagonal(["low rank", "int4 and low rank", "int4 and low rank 8", "attention"], AMD, every=4),
)
def test_every_wave_waits_for_its_stores_before_a_counter_is_raised(
    name: str, target: str, samples: Any
) -> None:
    """From each atomic that others wait for back to the barrier in front of it, and to the wait in front of that."""
    text = aot.compile_spec(kernel(name, target, samples), ARCHITECTURES[target]).stages["amdgcn"]
    wait = next(wait for prefix, wait in WAITS.items() if target.startswith(prefix))
    lines = [" ".join(line.split(";")[0].split()) for line in text.splitlines()]
    lines = [line for line in lines if re.match(r"[a-z]\w*( |$)", line) and not line.startswith("v_mov")]
    stores = [i for i, line in enumerate(lines) if re.match(r"(global|buffer|flat)_store", line)]
    raised = 0
    for at, line in enumerate(lines):
        if not re.match(r"global_atomic_(add|inc)", line) or not any(i < at for i in stores):
            continue
        barrier = max((i for i in range(at) if lines[i].split(" ")[0] in BARRIERS), default=-1)
        before = max((i for i in range(barrier) if lines[i] == wait), default=-1)
        # Nothing is stored between the wait and the barrier, nor from there to the atomic.
        assert before >= 0 and not any(before < i < at for i in stores), (target, lines[barrier - 8 : at + 1])
        if target in ("gfx942", "gfx950"):
            assert any(found.startswith("buffer_wbl2") for found in lines[barrier:at])
        raised += 1
    assert raised >= (2 if name.startswith("int4") else 1)


@pytest.mark.parametrize(
    ("name", "target"), diagonal(["int4 and low rank", "int4 and low rank 8"], AMD, every=4)
)
def test_who_waits_looks_at_the_counter_again_and_again(name: str, target: str, samples: Any) -> None:
    """A load that the compiler took out of its loop would be waited on for ever."""
    text = aot.compile_spec(kernel(name, target, samples), ARCHITECTURES[target]).stages["amdgcn"]
    body, loops = _parse(text)
    looking = [
        (a, b)
        for a, b in loops
        if b - a < 60 and any(re.match(r"(global|flat)_load_(dwordx2|b64)", i.mnemonic) for i in body[a:b])
    ]
    assert len(looking) >= (2 if name.startswith("int4") else 1)
