"""Every kernel compiled for every target and read: spills, matrix cores, wide loads, emulation, vector work a weight.

No card is needed, and none is claimed to have run. What a kernel breaks today is listed in KNOWN_MISSES and in
docs/gpu.md; anything else is a failure. The default run compiles a kernel for one target, `make slow` every format for all.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
aot = pytest.importorskip("nstf.kernels.triton.aot")

sys.path.insert(0, str(Path(__file__).parent))
from diagonal import diagonal  # noqa: E402

from nstf.kernels.triton import gates, tuner  # noqa: E402
from nstf.kernels.triton.architecture import ARCHITECTURES, Architecture  # noqa: E402
from nstf.kernels.triton.code_object import CodeReport  # noqa: E402
from nstf.kernels.triton.packed import layout_of  # noqa: E402
from nstf.kernels.triton.spec import KernelSpec, hollow, specs_for  # noqa: E402

SHAPE = (4096, 4096)
TARGETS = len(ARCHITECTURES)
# Half of it takes gemm.py at 256 rows on Hopper too, where larger matrices have a kernel of their own.
SMALL = (4096, 2048)
# One of each kernel, the rows of the table in docs/gpu.md; the batch decides which kernel a format gets.
CASES = {
    "int4 gemv": ("int4", 1),
    "int4 gemm 16": ("int4", 16),
    "int4 gemm 256": ("int4", 256),
    "int4 gemm 256 small": ("int4", 256),
    "int4 decode": ("int4", 3000),
    "trellis gemv": ("trellis", 1),
    "trellis decode": ("trellis", 600),
    "low rank": ("low rank", 1),
    "tensor train 8": ("tensor train", 8),
    "int4 and low rank": ("int4 and low rank", 1),
    "int4 and low rank 8": ("int4 and low rank", 8),
}
# One of each other family of formats: decoding once for many rows, planes, tables, the tiles between.
FAMILIES = {
    "int3 zeros 256": ("int3 zeros", 256),
    "int6 zeros 64": ("int6 zeros", 64),
    "fp8 16": ("fp8", 16),
    "mxfp4 1": ("mxfp4", 1),
    "grid4 32": ("grid4", 32),
    "rotated 1": ("rotated", 1),
}
MORE = {
    **{
        f"{name} {batch}": (name, batch)
        for name in ("int2", "int5", "int6 zeros", "int8", "fp8", "mxfp4", "grid4")
        for batch in (1, 16, 32, 64, 256)
    },
    **{
        f"{name} 256 small": (name, 256)
        for name in ("int2", "int3 zeros", "int5", "int6 zeros", "int8", "fp8", "mxfp4", "grid4")
    },
    **{f"int3 zeros {batch}": ("int3 zeros", batch) for batch in (1, 16, 256)},
    **{f"int4 in 24 {batch}": ("int4 in 24", batch) for batch in (16, 64, 256)},
    **{f"rotated {batch}": ("rotated", batch) for batch in (1, 16)},
    "trellis gemv 8": ("trellis", 8),
    "shuffle 1": ("shuffle", 1),
    **{
        f"{name} and low rank {batch}": (f"{name} and low rank", batch)
        for name in ("int3 zeros", "grid4")
        for batch in (1, 8)
    },
}
# (case, target or "*") -> parts of the misses that are known.
NARROW, PARTLY = "no load of 16 bytes", "bytes of an iteration come in loads of 16 bytes"
WORK = "vector instructions for each weight"
CDNA, RDNA = ("gfx90a", "gfx942", "gfx950"), ("gfx1100", "gfx1201")
KNOWN_MISSES: dict[tuple[str, str], tuple[str, ...]] = {
    # 3.02 with bfloat16 activations; 2.99 with float16.
    ("int4 gemv", "gfx942"): ("3.02 vector",),
    **{("rotated 1", target): ("3.02 vector",) for target in ("gfx90a", "gfx942")},
    **{(name, "*"): (NARROW,) for name in ("trellis gemv", "trellis gemv 8", "trellis decode")},
    # A plane of longer codes, with scales (and zero points) of short groups: up to 3.4.
    **{("int5 1", target): (WORK,) for target in CDNA},
    **{("int6 zeros 1", target): (WORK,) for target in (*CDNA, *RDNA)},
    # The plane of one or two bits comes in loads of 8 bytes.
    **{("int5 16", target): (PARTLY,) for target in CDNA},
    **{("int6 zeros 16", target): (PARTLY,) for target in (*CDNA, *RDNA)},
    **{("int6 zeros 32", target): (PARTLY,) for target in CDNA},
    # Tiles from sweeps on an H200 spill some words; tiles that do not were not timed.
    **{
        (name, "sm_90"): ("spills",)
        for name in (
            *("int2 64", "int5 16", "int5 32", "int5 64", "int5 256 small", "int6 zeros 64"),
            *("int6 zeros 256 small", "mxfp4 64", "int3 zeros 256 small"),
        )
    },
}


def shape_of(name: str) -> tuple[int, int]:
    """Of the matrix of a case."""
    return SMALL if name.endswith("small") else SHAPE


def tree(name: str, samples: Any) -> Any:
    leaf, node = samples.leaf, samples.node
    dense = leaf("dense", dtype="float16")
    if name.endswith(" and low rank"):
        base, correction = tree(name.removesuffix(" and low rank"), samples), tree("low rank", samples)
        return node("add", {"x": base, "y": correction})
    return {
        "int4": lambda: leaf("int", bits=4, group=128),
        "int8": lambda: leaf("int", bits=8, group=64),
        "int2": lambda: leaf("int", bits=2, group=32),
        "int3 zeros": lambda: leaf("int", bits=3, group=64, symmetric=False),
        "int4 in 24": lambda: leaf("int", bits=4, group=24),
        "int5": lambda: leaf("int", bits=5, group=64),
        "int6 zeros": lambda: leaf("int", bits=6, group=64, symmetric=False),
        "fp8": lambda: leaf("fp8"),
        "mxfp4": lambda: leaf("mxfp4"),
        "grid4": lambda: leaf("grid", group=64),
        "trellis": lambda: leaf("trellis", quarter_bits=(10,)),
        "shuffle": lambda: leaf("shuffle", quarter_bits=12),
        "low rank": lambda: node("low_rank", {"a": dense, "b": dense}, rank=64),
        "tensor train": lambda: node(
            "tensor_train", {f"core{i}": dense for i in range(4)}, ranks=(32, 64, 32), view=(64, 64, 64, 64)
        ),
        "rotated": lambda: node("rotated", {"x": leaf("int", bits=4, group=128)}, block_in=128, seed=3),
    }[name]()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """compiled(spec, row) -> its report; each kernel is compiled once."""
    known: dict[str, CodeReport] = {}

    def report(spec: KernelSpec, row: Architecture) -> CodeReport:
        key = aot.key(spec, row)
        if key not in known:
            known[key] = aot.compile_spec(spec, row).report(row.target)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield report


def check(
    case: tuple[str, int], name: str, row: Architecture, samples: Any, compiled: Any, dtype: torch.dtype
) -> None:
    specs = specs_for(tree(case[0], samples), shape_of(name), case[1], dtype, row.target)
    assert specs, "no kernel"
    allowed = KNOWN_MISSES.get((name, row.target), ()) + KNOWN_MISSES.get((name, "*"), ())
    wrong = []
    for spec in specs:
        report = compiled(spec, row)
        assert report.loop.instructions > 0 and report.vector_registers > 0
        if (
            case == ("shuffle", 1)
            and dtype == torch.bfloat16
            and spec.kind in ("shuffle_gemm", "shuffle_gemv")
        ):
            assert gates.expected(spec, row, report).vector_per_weight == 3.0
        found = gates.check(spec, report, row)
        wrong += [f"{spec.name}: {line}" for line in found if not any(part in line for part in allowed)]
    assert wrong == []


@pytest.mark.parametrize(("name", "target"), diagonal(CASES, ARCHITECTURES, every=TARGETS))
def test_a_kernel_keeps_its_promises(name: str, target: str, samples: Any, compiled: Any) -> None:
    check(CASES[name], name, ARCHITECTURES[target], samples, compiled, torch.float16)


@pytest.mark.parametrize(("name", "target"), diagonal(FAMILIES, ARCHITECTURES, every=TARGETS))
def test_a_family_of_formats_keeps_its_promises(name: str, target: str, samples: Any, compiled: Any) -> None:
    # What people run: bfloat16 where its arithmetic is emulated by mistake more easily, float16 otherwise.
    dtype = torch.bfloat16 if FAMILIES[name][1] > 16 else torch.float16
    check(FAMILIES[name], name, ARCHITECTURES[target], samples, compiled, dtype)


def test_a_family_has_no_case_of_its_own_in_the_default_run_alone() -> None:
    assert FAMILIES.items() <= MORE.items()


@pytest.mark.slow
@pytest.mark.parametrize("target", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_every_format_keeps_its_promises(
    name: str, dtype: torch.dtype, target: str, samples: Any, compiled: Any
) -> None:
    check((CASES | MORE)[name], name, ARCHITECTURES[target], samples, compiled, dtype)


def test_the_known_misses_are_of_cases_and_targets_that_exist() -> None:
    for name, target in KNOWN_MISSES:
        assert name in CASES | MORE and target in (*ARCHITECTURES, "*"), (name, target)


@pytest.mark.parametrize(
    ("rate", "target"),
    [
        (16, "sm_90"),
        (12, "gfx950"),
        *(
            pytest.param(rate, target, marks=pytest.mark.slow)
            for target in ARCHITECTURES
            for rate in (12, 14, 16, 18)
            if (rate, target) not in ((16, "sm_90"), (12, "gfx950"))
        ),
    ],
)
def test_a_weight_of_shuffle_codes_takes_three_vector_instructions_at_most(
    rate: int, target: str, samples: Any, compiled: Any
) -> None:
    row = ARCHITECTURES[target]
    specs = specs_for(samples.leaf("shuffle", quarter_bits=rate), (8192, 4096), 1, torch.bfloat16, target)
    (spec,) = [s for s in specs if s.kind in ("shuffle_gemm", "shuffle_gemv")]
    report = compiled(spec, row)
    wanted = gates.expected(spec, row, report)
    assert wanted.vector_per_weight == 3.0 and gates.check(spec, report, row) == []


@pytest.mark.parametrize(
    ("name", "target"), diagonal(dict.fromkeys(tuner.NAMES[1:5]), ARCHITECTURES, every=4)
)
def test_what_the_tuner_may_try_compiles_without_spills(
    name: str, target: str, samples: Any, compiled: Any
) -> None:
    row = ARCHITECTURES[target]
    layout = layout_of(hollow(tree("int4", samples), SHAPE))
    assert layout is not None
    if name not in tuner.short_list(layout, 64, torch.float16, target):
        pytest.skip(f"no {name} there")
    spec = tuner.specs_with(layout, 64, torch.float16, target, name)[0]
    assert gates.check(spec, compiled(spec, row), row) == []


@pytest.mark.parametrize("target", ["gfx942", "gfx1100"])
def test_the_occupancy_of_registers_is_the_compilers(target: str, samples: Any) -> None:
    import re

    from nstf.kernels.triton.architecture import occupancy

    row = ARCHITECTURES[target]
    spec = specs_for(tree("int4", samples), SHAPE, 1, torch.float16, target)[0]
    made = aot.compile_spec(spec, row)
    said = re.search(r"; Occupancy: (\d+)", made.stages["amdgcn"])
    assert said is not None
    report = made.report(target)
    assert occupancy(row, report.vector_registers, 0, row.simds).waves_per_simd == int(said.group(1))


def test_the_attributes_make_wide_loads_and_buffer_operations(samples: Any, compiled: Any) -> None:
    import dataclasses

    row = ARCHITECTURES["gfx942"]
    spec = specs_for(tree("int4", samples), SHAPE, 1, torch.float16, row.target)[0]
    with_them, without = compiled(spec, row), compiled(dataclasses.replace(spec, divisible=()), row)
    assert with_them.loop.streams and max(with_them.loop.loads) == 16
    assert without.loop.wide_share < with_them.loop.wide_share


@pytest.mark.parametrize(("name", "target"), diagonal(CASES, ARCHITECTURES, every=TARGETS))
def test_the_table_in_the_docs_is_what_is_compiled(name: str, target: str, compiled: Any) -> None:
    import code_objects

    found = code_objects.written((Path(__file__).parents[2] / "docs/gpu.md").read_text(encoding="utf-8"))
    if not found:
        pytest.skip("the table was made with another Triton")
    cell = code_objects.cell(name, ARCHITECTURES[target], compiled)
    there = found[name][list(ARCHITECTURES).index(target)]
    assert cell == there, "make the table anew: python tests/kernels/code_objects.py docs/gpu.md"
