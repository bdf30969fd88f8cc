"""Groups in columns of the matrix cores: interpreted on a CPU, compiled for a card elsewhere, and run on one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
import int_groups_cases
from conftest import leaf, random_encoded
from launches import catching, compiled_facts, differing, forget, pretend

from nstf.kernels.triton import gates, int_groups, linear, tuner
from nstf.kernels.triton.aot import compile_spec
from nstf.kernels.triton.architecture import ARCHITECTURES
from nstf.kernels.triton.packed import Layout, layout_of
from nstf.kernels.triton.spec import hollow, specs_for

CASES = {case.name: case for case in int_groups_cases.CASES}


def layout(bits: int, group: int, rows: int = 28672, cols: int = 4096, **others: Any) -> Layout:
    found = layout_of(hollow(leaf("int", bits=bits, group=group, **others), (rows, cols)))
    assert found is not None
    return found


def test_the_interpreted_kernel_gives_what_decode_says() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(Path(int_groups_cases.__file__))]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert set(found) == set(CASES)
    assert {name: error for name, error in found.items() if not error < int_groups_cases.LIMIT} == {}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_on_a_gpu_gives_what_decode_says(name: str) -> None:
    if torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("no such matrix instructions")
    assert int_groups_cases.error(CASES[name], "cuda") < int_groups_cases.LIMIT


@pytest.mark.parametrize(
    ("bits", "group", "batch"),
    [
        *((2, 64, 1), (3, 128, 1), (4, 64, 2)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((3, 64, 1), (3, 64, 2), (4, 32, 1), (4, 64, 1))
        ),
    ],
)
def test_its_code_keeps_its_promises(bits: int, group: int, batch: int) -> None:
    row, of = ARCHITECTURES["sm_90"], layout(bits, group, scale_bits=8)
    spec, _ = int_groups.int_groups_specs(of, batch, torch.bfloat16, row.target)
    assert gates.check(spec, compile_spec(spec, row).report(row.target), row) == []


def test_which_products_take_it() -> None:
    def taken(of: Layout, batch: int = 1, dtype: torch.dtype = torch.bfloat16, arch: str = "sm_90") -> bool:
        return int_groups.suits(of, batch, dtype, arch)

    assert all(taken(layout(bits, 64, scale_bits=8), batch) for bits in (2, 3, 4) for batch in (1, 2))
    assert not any(taken(layout(bits, 64)) for bits in (5, 8)) and not taken(layout(4, 64), 3)
    # skinny.py is faster; more groups than columns of the instruction.
    assert taken(layout(3, 128)) and not taken(layout(4, 128))
    assert taken(layout(3, 32)) and taken(layout(4, 32), 2) and not taken(layout(3, 32), 2)
    assert not taken(layout(4, 64), 1, torch.float32) and not taken(layout(4, 64), 1, arch="gfx942")
    assert not taken(layout(4, 64, symmetric=False)) and not taken(layout(4, 0)) and not taken(layout(4, 24))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_what_is_compiled_ahead_is_what_runs(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "packed_specs", tuner.packed_specs.__wrapped__)
    row, shape = ARCHITECTURES["sm_90"], (384, 2560)
    encoded = random_encoded(leaf("int", bits=bits, group=64, scale_bits=8), shape, 1)
    for batch in (1, 2):
        ahead = specs_for(encoded, shape, batch, torch.bfloat16, row.target)
        with catching() as launched:
            pretend(row, ahead)
            linear._matmul(torch.zeros(batch, 2560, dtype=torch.bfloat16), encoded, row.target)
        expected = [compiled_facts(spec, row) for spec in ahead]
        forget(ahead)
        assert [facts["kernel"] for facts in launched] == ["int_groups_kernel", "sum_kernel"]
        for launch, compiled in zip(launched, expected, strict=True):
            assert differing(launch, compiled) == {}, f"batch {batch}"
