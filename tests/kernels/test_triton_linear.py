"""The Triton kernels against `decode`: interpreted on a CPU, compiled for GPUs that are not here, and run on one that is."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
import triton_cases

from nstf.kernels.formats import EncodedTensor, decode
from nstf.kernels.registry import choose
from nstf.kernels.triton import linear
from nstf.kernels.triton.factors import CHAINS
from nstf.kernels.triton.packed import FORMATS, PackedCodes, compact, layout_of, pack_leaf, planes_of
from nstf.kernels.triton.spec import hollow, specs_for

CASES = {case.name: case for case in triton_cases.cases()}


@pytest.fixture(scope="module", params=[0, pytest.param(1, marks=pytest.mark.slow)], ids=["first", "others"])
def interpreted(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What came out of the cases of a part."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(Path(triton_cases.__file__)), str(request.param)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert len(found) > 50
    return found


def test_the_interpreted_kernels_give_what_decode_says(interpreted: dict[str, Any]) -> None:
    errors = {name: found["error"] for name, found in interpreted.items()}
    assert {name: error for name, error in errors.items() if not error < CASES[name].limit} == {}


def test_the_launches_are_those_that_are_compiled_ahead(interpreted: dict[str, Any]) -> None:
    compared = 0
    for name, found in interpreted.items():
        if CASES[name].rows:
            continue
        ahead = triton_cases.launches_of(CASES[name])
        assert found["launched"] == [spec.name for spec in ahead], name
        compared += bool(ahead)
    assert compared > 30


def test_codes_become_numbers_in_pairs_where_the_interpreter_has_the_dtype(
    interpreted: dict[str, Any],
) -> None:
    """skinny.py as it runs on a card, but for plain bfloat16, which the interpreter does not multiply."""
    paired = 0
    for name, found in interpreted.items():
        if CASES[name].dtype == "float16" or CASES[name].tree == "grid":
            assert found["single"] == [], name
            paired += sum(launch.startswith("skinny") for launch in found["launched"])
    assert paired >= 5


def test_a_quicker_interpreter_gives_the_same_numbers(interpreted: dict[str, Any]) -> None:
    """quick_interpreter.py, in which all but a few cases of the default run are interpreted."""
    twice = {name: found for name, found in interpreted.items() if "plain error" in found}
    if interpreted.keys() >= set(triton_cases.INTERPRETED_TWICE):
        assert set(twice) == set(triton_cases.INTERPRETED_TWICE)
    assert all(found["error"] == found["plain error"] for found in twice.values())


def test_no_case_is_in_neither_part_and_programs_take_several_blocks_of_rows_in_one() -> None:
    first, others = triton_cases.parted()
    assert sorted(case.name for case in first + others) == sorted(CASES) and len(CASES) > 200
    (few,) = (case for case in first if case.processors)
    (spec,) = triton_cases.launches_of(few)
    (usual,) = triton_cases.launches_of(few._replace(processors=0))
    assert spec.grid[0] < usual.grid[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_on_a_gpu_give_what_decode_says(name: str) -> None:
    if CASES[name].arch and CASES[name].arch != linear.arch_of(torch.device("cuda:0")):
        pytest.skip("has instructions of another card, at which the compiler ends the process")
    assert triton_cases.error_of(CASES[name], "cuda") < CASES[name].limit


def test_every_format_is_tried() -> None:
    kinds = {triton_cases.TREES[case.tree].kind for case in CASES.values()}
    assert kinds >= set(linear.FORMATS) and set(linear.FORMATS) >= set(FORMATS)


def test_packing_keeps_every_code(samples: ModuleType) -> None:
    """The words unpacked again by the formula of the module, one code at a time."""
    from nstf.kernels.formats import bitpack

    for bits in range(2, 9):
        encoded = samples.random_encoded(samples.leaf("int", bits=bits, group=32), (3, 200))
        packed = pack_leaf(encoded)
        assert packed is not None
        layout, words = packed.layout, packed.words.tolist()
        codes = bitpack.unpack(encoded.arrays["codes"], bits, 200)
        for row, k in ((0, 0), (1, 31), (2, 33), (0, 198), (2, 199), (1, 127)):
            found = 0
            for size, shift in layout.planes:
                runs = 16 // size
                chunk, rest = divmod(k, 32 * runs)
                j, place = divmod(rest, 32)
                at = layout.start(shift) + row * layout.width(size) + chunk * 16 + place // 2
                found |= ((words[at] >> (16 * (place % 2) + j * size)) & ((1 << size) - 1)) << shift
            assert found == int(codes[row, k]), (bits, row, k)
        assert packed.words.numel() == layout.words


@pytest.mark.parametrize(
    "name", ["int3", "int6_asymmetric", "int4_group_24", "grid", "fp8", "mxfp4", "rotated_both", "add"]
)
def test_codes_kept_as_words_alone_are_what_was_stored(name: str) -> None:
    shape = (64, 128) if name in ("rotated_both", "add") else (7, 200)
    encoded = triton_cases.encoded_of(triton_cases.Case(name, shape, 1))
    kept = compact(encoded)
    path = "x.codes" if name in ("rotated_both", "add") else "codes"
    codes, stored = kept.arrays[path], encoded.arrays[path]
    assert isinstance(codes, PackedCodes) and codes.shape == stored.shape and codes.dtype == stored.dtype
    assert torch.equal(codes.clone(), stored) and torch.equal(codes[2:5], stored[2:5])
    rows = torch.tensor([6, 0, 6])
    assert torch.equal(codes[rows], stored[rows])
    assert torch.equal(decode(kept), decode(encoded))
    assert compact(kept).arrays[path] is codes
    if path == "codes":
        packed = pack_leaf(kept)
        assert packed is not None and packed.words is codes.words
        assert torch.equal(packed.words, pack_leaf(encoded).words)  # type: ignore[union-attr]


def test_planes_hold_the_bits_of_a_code_once() -> None:
    for bits in range(2, 9):
        planes = planes_of(bits)
        assert sum(size for size, _ in planes) == bits
        assert [shift for _, shift in planes] == [sum(s for s, _ in planes[:i]) for i in range(len(planes))]


def test_codes_that_mean_nan_are_left_to_the_reference(samples: ModuleType) -> None:
    encoded = samples.random_encoded(samples.leaf("fp8"), (4, 64))
    assert pack_leaf(encoded) is not None
    codes = encoded.arrays["codes"].clone()
    codes[2, 5] = 0xFF
    assert pack_leaf(EncodedTensor(encoded.tree, encoded.shape, {**encoded.arrays, "codes": codes})) is None


def test_a_matrix_that_is_not_on_a_gpu_is_left_to_others(samples: ModuleType) -> None:
    encoded = samples.random_encoded(samples.leaf("int"), (16, 64))
    assert not linear.supports(encoded, torch.device("cpu"), 1)
    assert choose(encoded, torch.device("cpu"), 1).NAME != linear.NAME


def test_a_missing_gpu_is_said_in_words(monkeypatch: pytest.MonkeyPatch, samples: ModuleType) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert linear.unsuitable() == "torch sees no GPU" and not linear.available()
    monkeypatch.setattr(linear, "_arch", lambda index: "sm_61")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Old card")
    assert "Old card is sm_61" in linear.unsuitable() or torch.version.hip
    linear._warned.cache_clear()
    encoded = samples.random_encoded(samples.leaf("int"), (16, 64))
    with pytest.warns(UserWarning, match="slower torch path: Old card is sm_61"):
        assert not linear.supports(encoded, torch.device("cuda:0"), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not linear.supports(encoded, torch.device("cuda:0"), 1)
    linear._warned.cache_clear()


def test_specs_need_no_arrays_and_have_unique_names() -> None:
    for name, tree in triton_cases.TREES.items():
        shape = (40, 192) if name.endswith("_sections") else (4096, 4096)
        if tree.kind in CHAINS:
            shape = (45, 126)
        for batch in (1, 8, 64, 1000):
            made = specs_for(tree, shape, batch, torch.bfloat16, "gfx942")
            assert len({spec.name for spec in made}) == len(made), name
            for spec in made:
                assert set(spec.signature) | set(spec.constants) == set(spec.fn.arg_names), spec.name
                assert set(spec.divisible) <= set(spec.signature), spec.name
    layout = layout_of(hollow(triton_cases.TREES["int4"], (64, 128)))
    assert layout is not None and layout.words == 64 * 128 // 8


def test_a_correction_is_one_launch_unless_several_were_measured_to_be_faster(samples: ModuleType) -> None:
    dense, int4 = samples.leaf("dense", dtype="float16"), samples.leaf("int", bits=4, group=128)

    def kinds(shape: tuple[int, int], rank: int, batch: int, arch: str) -> list[str]:
        chain = samples.node("low_rank", {"a": dense, "b": dense}, rank=rank)
        tree = samples.node("add", {"x": int4, "y": chain})
        return [spec.kind for spec in specs_for(tree, shape, batch, torch.float16, arch)]

    for shape, rank in (((4096, 4096), 16), ((28672, 8192), 64), ((14336, 4096), 128)):
        assert kinds(shape, rank, 8, "sm_90") == ["corrected_skinny"]
    apart = ["skinny", "sum", "low_rank"]
    assert kinds((8192, 28672), 64, 1, "sm_90") == apart == kinds((28672, 8192), 32, 1, "sm_90")
    assert kinds((4096, 4096), 129, 8, "sm_90") == apart
    assert kinds((4096, 4096), 64, 9, "sm_90") == ["skinny", "sum"]
    assert kinds((8192, 28672), 64, 1, "gfx942") == ["corrected_gemv"]


@pytest.mark.parametrize(
    "arch", ["gfx942", *(pytest.param(a, marks=pytest.mark.slow) for a in ("sm_90", "gfx1100"))]
)
def test_the_kernels_compile_for(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    lanes = 64 if arch.startswith("gfx9") else 32
    chip = GPUTarget("cuda", 90, 32) if arch == "sm_90" else GPUTarget("hip", arch, lanes)
    seen = set()
    for name, batch in (
        ("int4_group_128", 1),
        ("int4_group_128", 17),
        ("rotated_trellis", 1),
        ("low_rank", 1),
    ):
        for spec in specs_for(triton_cases.TREES[name], (1024, 1024), batch, torch.float16, arch):
            names = spec.fn.arg_names
            source = ASTSource(
                fn=spec.fn,
                signature={n: spec.signature.get(n, "constexpr") for n in names},
                constexprs={(names.index(n),): value for n, value in spec.constants.items()},
                attrs={(names.index(n),): [["tt.divisibility", 16]] for n in spec.divisible},
            )
            options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, **spec.options}
            binary = triton.compile(source, target=chip, options=options).asm
            seen.add(spec.kind)
            assert ("ptx" if arch == "sm_90" else "hsaco") in binary
            if spec.kind == "gemv" and arch == "gfx942":
                # Every load of codes takes 16 bytes.
                assert "load_dwordx4" in binary["amdgcn"]
    common = {"gemm", "rotate", "low_rank"}
    if arch == "sm_90":
        assert seen == common | {"skinny", "sum", "trellis_gemm"}
    else:
        assert seen >= common | {"gemv", "trellis_gemv"}
