"""Codes multiplied where they lie in their bytes: interpreted on a CPU, compiled for a card elsewhere, and run on one."""

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
import int_bytes_cases
from conftest import leaf, random_encoded
from launches import catching, compiled_facts, differing, forget, pretend

from nstf.kernels.triton import gates, int_bytes, linear, tuner
from nstf.kernels.triton.aot import compile_spec
from nstf.kernels.triton.architecture import ARCHITECTURES
from nstf.kernels.triton.packed import Layout, layout_of
from nstf.kernels.triton.spec import hollow, specs_for

CASES = {case.name: case for case in int_bytes_cases.CASES}


def layout(bits: int, group: int, rows: int = 28672, cols: int = 8192, **others: Any) -> Layout:
    found = layout_of(hollow(leaf("int", bits=bits, group=group, **others), (rows, cols)))
    assert found is not None
    return found


def test_the_interpreted_kernel_gives_what_decode_says() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(Path(int_bytes_cases.__file__))]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert set(found) == set(CASES)
    assert {name: error for name, error in found.items() if not error < int_bytes_cases.LIMIT} == {}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_on_a_gpu_gives_what_decode_says(name: str) -> None:
    if torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("no matrix instructions for bytes")
    assert int_bytes_cases.error(CASES[name], "cuda") < int_bytes_cases.LIMIT


@pytest.mark.parametrize(("bits", "group"), [(2, 64), (3, 64), (4, 64), (4, 32)])
def test_its_code_keeps_its_promises(bits: int, group: int) -> None:
    row = ARCHITECTURES["sm_90"]
    spec, _ = int_bytes.int_bytes_specs(layout(bits, group, scale_bits=8), 1, torch.bfloat16, row.target)
    report = compile_spec(spec, row).report(row.target)
    broken = [line for line in gates.check(spec, report, row) if "spill" not in line]
    assert broken == []
    # At 4 bits a number or two that all blocks share is fetched once for two of them.
    assert report.vector_spills <= (2 if bits == 4 else 0)


def test_which_products_take_it() -> None:
    def taken(of: Layout, batch: int = 1, dtype: torch.dtype = torch.bfloat16, arch: str = "sm_90") -> bool:
        return int_bytes.suits(of, batch, dtype, arch)

    assert all(taken(layout(bits, 64, scale_bits=8), batch) for bits in (2, 3, 4) for batch in (1, 2))
    assert taken(layout(3, 128)) and not taken(layout(4, 128))
    shapes = ((28672, 4096), (4096, 14336), (128256, 4096))
    assert not any(taken(layout(4, 64, *shape)) for shape in shapes)
    assert all(taken(layout(3, 64, *shape)) and taken(layout(4, 32, *shape)) for shape in shapes)
    assert not any(taken(layout(bits, 64)) for bits in (5, 8))
    assert not taken(layout(4, 64, 4096, 4096)) and not taken(layout(4, 64), 3)
    assert not taken(layout(4, 64), 1, torch.float32) and not taken(layout(4, 64), 1, arch="gfx942")
    assert not taken(layout(4, 64, symmetric=False)) and not taken(layout(4, 0)) and not taken(layout(4, 24))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_what_is_compiled_ahead_is_what_runs(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int_bytes, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(int_bytes, "LEAST_WEIGHTS_64", 0)
    monkeypatch.setattr(int_bytes, "LEAST_COLUMNS_64", 0)
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
        assert [facts["kernel"] for facts in launched] == ["int_bytes_kernel", "sum_kernel"]
        for launch, compiled in zip(launched, expected, strict=True):
            assert differing(launch, compiled) == {}, f"batch {batch}"
