"""Attention over pages: interpreted on a CPU, compiled for GPUs that are not here, run on one."""

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
import attention_cases
from attention_cases import fmt
from diagonal import diagonal

from nstf.kernels.triton import attention_predict, gates
from nstf.kernels.triton.aot import compile_spec
from nstf.kernels.triton.architecture import ARCHITECTURES, architecture
from nstf.kernels.triton.assembly import disassemble
from nstf.kernels.triton.attention_append import append_spec
from nstf.kernels.triton.attention_decode import decode_specs
from nstf.kernels.triton.attention_pages import ALL, NEAR, Form, Forms, Pages, fetch_spec, store_spec
from nstf.kernels.triton.attention_predict import sums_spec
from nstf.kernels.triton.attention_prefill import prefill_spec, shares
from nstf.kernels.triton.spec import KernelSpec

# In the default run; `make slow` runs all of them.
FEW = (
    *("a page fills up", "by bytes", "a ring of 16 bits", "numbers of 50,000", "prefill: blocks and codes"),
    *("generated 0", "generated 2", "generated 9", "generated, long 107"),
)


def interpreted(names: tuple[str, ...]) -> dict[str, float]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(Path(attention_cases.__file__)), *names]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, float] = json.loads(done.stdout)
    return found


def check(found: dict[str, float]) -> None:
    assert {name: e for name, e in found.items() if not e < attention_cases.limit(name)} == {}


def test_interpreted_kernels_attend_as_the_reference() -> None:
    found = interpreted(FEW)
    assert set(found) == set(FEW)
    check(found)


def test_heads_by_blocks_leave_blocks_out_of_long_generated_prompts() -> None:
    assert min(attention_cases.blocks_left_out(seed) for seed in attention_cases.LONG.values()) > 0.1


@pytest.mark.slow
def test_all_interpreted_cases_attend_as_the_reference() -> None:
    found = interpreted(())
    cases = (
        *attention_cases.DECODE,
        *attention_cases.PREFILL,
        *attention_cases.GENERATED,
        *attention_cases.LONG,
    )
    assert len(found) == len(cases)
    check(found)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    (
        *attention_cases.DECODE,
        *attention_cases.ON_A_CARD,
        *(f"prefill: {n}" for n in attention_cases.PREFILL),
        *attention_cases.GENERATED,
        *attention_cases.LONG,
    ),
)
def test_the_kernels_on_a_gpu_attend_as_the_reference(name: str) -> None:
    check(attention_cases.errors("cuda", [name]))


def pages(keys: str, values: str, size: int, dtype: torch.dtype = torch.bfloat16) -> Pages:
    """Eight stored heads without their bytes."""
    forms = Forms(*(Form(f.bits, f.by == "channel", f.rotate) for f in (fmt(keys), fmt(values))), size)

    def empty(*shape: int, kind: torch.dtype = dtype) -> Any:
        return torch.empty(shape, dtype=kind, device="meta")

    near = (1, 8, NEAR, size)
    return Pages(
        forms, empty(1024, kind=torch.int32), empty(1, 2048, kind=torch.int64), 0, empty(*near), empty(*near),
        empty(8, kind=torch.int32), ALL, 1,
    )  # fmt: skip


FORMATS = ("16 16", "8c 8t", "4c 4t", "4tr 4tr", "2c 2t", "4c 16")


def spec_of(name: str, target: str) -> KernelSpec:
    """The launches that an 8B model makes, by name."""
    kind, *rest = name.split()
    size = 128
    if kind in ("decode", "merge"):
        both = decode_specs(pages(rest[0], rest[1], size), 1, 32, 8, len(rest) > 2, target, 65536)
        return both[kind == "merge"]
    if kind == "prefill":
        return prefill_spec(
            torch.bfloat16,
            size,
            1,
            32,
            256,
            rest[0] == "lists",
            rest[0] in ("bands", "narrow"),
            rest[-1] == "same",
            target,
            narrow=rest[0] == "narrow",
            together=int(rest[1]) if rest[1:] and rest[1].isdigit() and shares(size, target) else 1,
        )
    stored = pages("4c", "4tr", size)
    if kind == "append":
        return append_spec(stored, 1, 32, 8, True, True, target)
    if kind == "store":
        return store_spec(stored, rest[0] == "values", 1, 4)
    if kind == "fetch":
        return fetch_spec(stored, rest[0] == "values", 1, 4)
    return sums_spec(torch.bfloat16, size, 16, 32, 128, 1024, target)


KERNELS = (
    *(f"decode {form}" for form in FORMATS),
    "decode 4c 4t masked",
    "merge 4c 4t",
    "merge 4tr 4tr",
    "prefill dense same",
    "prefill dense",
    "prefill bands same",
    "prefill bands",
    "prefill narrow same",
    "prefill narrow",
    "prefill narrow 4 same",
    "prefill narrow 4",
    "prefill narrow 2",
    "prefill dense 4 same",
    "prefill dense 4",
    "prefill lists same",
    "prefill lists",
    "append",
    "store keys",
    "store values",
    "fetch keys",
    "fetch values",
    "sums",
)


@pytest.mark.parametrize(("name", "target"), diagonal(KERNELS, ARCHITECTURES, every=24))
def test_a_kernel_compiles_and_keeps_its_promises(name: str, target: str) -> None:
    row = architecture(target)
    spec = spec_of(name, target)
    report = compile_spec(spec, row).report(target)
    matrix = spec.kind in ("attention_decode", "attention_prefill", "attention_sums")
    assert gates.expected(spec, row).matrix == matrix
    allowed = next(
        (parts for (n, t), parts in KNOWN_MISSES.items() if name.startswith(n) and target in t), ()
    )
    found = gates.check(spec, report, row)
    assert [line for line in found if not any(part in line for part in allowed)] == []


@pytest.mark.parametrize(
    "name", ["prefill dense same", "prefill dense", "prefill dense 4 same", "prefill lists same"]
)
def test_matrix_instructions_of_prefill_do_not_wait_for_each_other(name: str) -> None:
    row = architecture("sm_90")
    compiled = compile_spec(spec_of(name, row.target), row)
    text = disassemble(compiled.binary)
    if text is None:
        pytest.skip("no nvdisasm that reads it")
    products = text.count("HGMMA.")
    assert products >= 20 and text.count("WARPGROUP.DEPBAR") <= products // 3


CDNA, RDNA = ("gfx90a", "gfx942", "gfx950"), ("gfx1100", "gfx1201")
# Beginnings of names, targets -> parts of the misses that are known (docs/attention.md).
KNOWN_MISSES: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {
    # The operands of RDNA's matrix cores are held twice (RDNA3), and a page of codes has many.
    # Addresses and bounds in scalar registers, moved to lanes of vector registers: nothing goes to memory.
    ("prefill", CDNA): ("spills 0 vector",),
    # As many registers as there are, and a few more; timed, nothing without is faster.
    ("prefill narrow 4", ("sm_90",)): ("spills",),
    ("prefill dense 4", ("sm_90",)): ("spills",),
    ("prefill narrow 2", ("sm_90",)): ("spills",),
    ("decode 4c 4t masked", CDNA): ("spills 0 vector",),
    **{(f"decode {form}", RDNA): ("spills",) for form in ("8c 8t", "4c 4t", "2c 2t", "4c 16")},
}


def test_ties_go_to_the_lower_block_and_the_first_and_the_diagonal_are_kept() -> None:
    mass = torch.tensor([[[0.1, 0.4, 0.4, 0.1], [0.0, 0.5, 0.5, 0.0]]])
    keep = attention_predict.choose(mass, torch.tensor([3, 2]), torch.tensor([0.4]))
    assert keep.tolist() == [[[True, True, False, True], [True, True, True, False]]]
    blocks, counts = attention_predict.listed(keep)
    assert counts.tolist() == [[3, 3]] and blocks[0, :, :3].tolist() == [[0, 1, 3], [0, 1, 2]]
