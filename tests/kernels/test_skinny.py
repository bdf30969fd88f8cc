"""skinny.py with codes left in place, interpreted on a CPU and run on a card; when it is taken, and what it saves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
import skinny_cases
from conftest import leaf

from nstf.kernels.triton.aot import compile_spec
from nstf.kernels.triton.architecture import ARCHITECTURES
from nstf.kernels.triton.packed import layout_of
from nstf.kernels.triton.skinny import mask_of, power_of, shift_of, skinny_specs
from nstf.kernels.triton.spec import KernelSpec, hollow

CASES = {case.name: case for case in skinny_cases.CASES}


def spec_of(shape: tuple[int, int], in_place: bool | None, bits: int = 4) -> KernelSpec:
    layout = layout_of(hollow(leaf("int", bits=bits, group=128), shape))
    assert layout is not None
    tile = {} if in_place is None else {"IN_PLACE": int(in_place)}
    return skinny_specs(layout, 1, torch.bfloat16, "sm_90", torch.float32, tile)[0]


def test_interpreted_codes_in_place_give_what_decode_says() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(Path(skinny_cases.__file__))]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert set(found) == set(CASES)
    assert {name: error for name, error in found.items() if not error < skinny_cases.LIMIT} == {}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_codes_in_place_on_a_gpu_give_what_decode_says(name: str) -> None:
    # Matrix cores cut off what lies below the largest of sixteen products with 1024 and a code.
    assert skinny_cases.error(CASES[name], "cuda") < 5 * skinny_cases.LIMIT


def test_moved_codes_are_those_of_their_run_and_lie_within_ten_bits() -> None:
    for bits in (2, 3, 4):
        for j in range(16 // bits):
            for code in range(1 << bits):
                word = (0x5A5A5A5A & ~(((1 << bits) - 1) * 0x00010001 << bits * j)) | (
                    code * 0x00010001 << bits * j
                )
                found = (word >> shift_of(bits, j)) & mask_of(bits, j)
                assert found == int(code * power_of(bits, j)) * 0x00010001
                assert found & ~0x03FF03FF == 0


def test_it_is_taken_where_programs_have_many_rows_and_saves_most_of_the_shifts() -> None:
    assert spec_of((28672, 4096), None).constants["IN_PLACE"]
    assert not spec_of((4096, 4096), None).constants["IN_PLACE"]
    assert not spec_of((28672, 4096), None, bits=5).constants["IN_PLACE"]
    row = ARCHITECTURES["sm_90"]
    before, now = (
        compile_spec(spec_of((28672, 4096), way), row).report("sm_90").loop for way in (False, True)
    )
    # 16 words, of which each was moved three times and is once.
    assert now.matrix == before.matrix == 16
    assert now.instructions <= before.instructions - 24
