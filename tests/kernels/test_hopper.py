"""Products on Hopper by asynchronous matrix instructions: compiled and read on a CPU, run on a card that has them.

Gluon has no interpreter; what of it is plain arithmetic (the order of a program's work) is run here as Python.
"""

import itertools
import re
import types
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
hopper = pytest.importorskip("nstf.kernels.triton.hopper")
if not hopper.available():
    pytest.skip("this Triton has no Gluon", allow_module_level=True)

from nstf.kernels.formats import decode  # noqa: E402
from nstf.kernels.triton import aot, gates, wgmma, wgmma_share  # noqa: E402
from nstf.kernels.triton.architecture import ARCHITECTURES  # noqa: E402
from nstf.kernels.triton.assembly import disassemble  # noqa: E402
from nstf.kernels.triton.packed import layout_of, pack_leaf  # noqa: E402
from nstf.kernels.triton.spec import hollow, specs_for  # noqa: E402

ROW = ARCHITECTURES["sm_90"]


def trees(samples: Any) -> dict[str, Any]:
    leaf = samples.leaf
    return {
        **{f"int{bits}": leaf("int", bits=bits, group=128) for bits in range(2, 9)},
        "int4 in 32": leaf("int", bits=4, group=32),
        "int4 with zeros": leaf("int", bits=4, group=64, symmetric=False),
        "int4 row": leaf("int", bits=4, group=0),
        "int8 with zeros": leaf("int", bits=8, group=64, symmetric=False),
        "int8 in steps": leaf("int", bits=8, group=64, scale_bits=8),
        "fp8": leaf("fp8"),
        "fp8 fnuz": leaf("fp8", variant="e4m3fnuz"),
        "mxfp4": leaf("mxfp4"),
        "grid": leaf("grid", group=64),
        "grid in steps": leaf("grid", group=32, scale_bits=8),
    }


# float32: what a matrix that is rotated on both sides wants. Its results take twice the room in local memory.
QUICK = (
    *(("int4", 256, None), ("int3", 64, None), ("fp8", 64, None), ("grid", 64, None)),
    ("int8", 300, torch.float32),
)
MORE = (
    *((name, 256, None) for name in ("int3", "int7", "int8", "fp8", "grid")),
    *((name, 64, None) for name in ("int4", "int7", "int8")),
    ("int6", 256, torch.float32),
)


@pytest.mark.parametrize(
    ("name", "batch", "out"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_compiled_kernels_keep_their_promises(
    name: str, batch: int, out: torch.dtype | None, samples: Any
) -> None:
    layout = layout_of(hollow(trees(samples)[name], (16384, 4096)))
    (spec,) = hopper.wgmma_specs(layout, batch, torch.bfloat16, "sm_90", out)
    compiled = aot.compile_spec(spec, ROW)
    assert gates.check(spec, compiled.report("sm_90"), ROW) == []
    # The point of the kernel: matrix instructions run while weights are decoded. Where the assembler cannot tell that the
    # registers of an operand stay as they are, it waits for all of them after each.
    text = disassemble(compiled.binary)
    if text is None:
        pytest.skip("no nvdisasm")
    products, waits = text.count("HGMMA."), len(re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0", text))
    assert products >= 4
    assert waits <= spec.constants["GROUPED"], "waits for all products after each"


def test_a_product_that_is_written_twice_keeps_them_too(samples: Any) -> None:
    layout = layout_of(hollow(trees(samples)["int4"], (8192, 4096)))
    (spec,) = hopper.wgmma_specs(layout, 512, torch.bfloat16, "sm_90")
    both = hopper._twice(spec)
    assert both is hopper._twice(spec) and both.name != spec.name
    assert gates.check(both, aot.compile_spec(both, ROW).report("sm_90"), ROW) == []


def test_it_takes_large_matrices_on_hopper_alone(samples: Any) -> None:
    int4, grid = (layout_of(hollow(trees(samples)[n], (14336, 4096))) for n in ("int4", "grid"))
    half = torch.bfloat16
    assert hopper.suits(int4, 256, half, "sm_90")
    assert hopper.suits(grid, 20, half, "sm_90")
    assert not hopper.suits(int4, 20, half, "sm_90"), "gemm.py is faster"
    for arch in ("sm_80", "sm_100", "gfx942"):
        assert not hopper.suits(int4, 256, half, arch)
    assert not hopper.suits(int4, 256, torch.float32, "sm_90")
    assert not hopper.suits(int4, 4096, half, "sm_90")
    small = layout_of(hollow(trees(samples)["int4"], (1024, 1024)))
    assert not hopper.suits(small, 256, half, "sm_90")
    odd = layout_of(hollow(trees(samples)["int4"], (14336, 4100)))
    assert not hopper.suits(odd, 256, half, "sm_90"), "rows that the copy engine cannot read"
    kinds = {spec.kind for spec in specs_for(trees(samples)["int4"], (14336, 4096), 256, half, "sm_90")}
    assert kinds == {"wgmma"}
    kinds = {spec.kind for spec in specs_for(trees(samples)["int4"], (14336, 4096), 256, half, "gfx942")}
    assert kinds == {"gemm"}


@pytest.mark.parametrize("bits", range(2, 9))
def test_an_iteration_is_an_even_number_of_steps(bits: int, samples: Any) -> None:
    layout = layout_of(hollow(samples.leaf("int", bits=bits, group=128), (16384, 4096)))
    (spec,) = hopper.wgmma_specs(layout, 256, torch.float16, "sm_90")
    planes, bk = spec.constants["PLANES"], spec.constants["BK"]
    runs = wgmma.runs_of(planes, bk)
    assert runs * 32 % (2 * bk) == 0
    assert all(runs % (16 // plane) == 0 for plane in planes)


@pytest.mark.parametrize(
    ("name", "shape", "batch", "taken"),
    [
        *(
            ("int4", (4096, 4096), 128, True),
            ("int4", (4096, 4096), 64, False),
            ("int4", (4096, 2048), 256, False),
        ),
        *(("int4", (8192, 28672), 64, False), ("int3", (28672, 8192), 32, True)),
        *(("grid in steps", (4096, 4096), 20, True), ("grid in steps", (4096, 2048), 64, False)),
        *(("int8", (8192, 8192), 64, True), ("int8", (8192, 8192), 32, False)),
        *(("fp8", (4096, 14336), 64, False), ("fp8", (8192, 8192), 64, True)),
        *(
            ("int6", (8192, 8192), 20, True),
            ("int5", (8192, 8192), 20, False),
            ("int5", (10240, 4096), 20, True),
        ),
    ],
)
def test_what_was_faster_on_a_card_is_taken(
    name: str, shape: tuple[int, int], batch: int, taken: bool, samples: Any
) -> None:
    layout = layout_of(hollow(trees(samples)[name], shape))
    assert hopper.suits(layout, batch, torch.bfloat16, "sm_90") == taken


def test_whole_programs_share_a_tile_where_they_fill_the_device(samples: Any) -> None:
    def of(shape: tuple[int, int], batch: int) -> tuple[int, int, int]:
        (spec,) = hopper.wgmma_specs(
            layout_of(hollow(trees(samples)["int4"], shape)), batch, torch.float16, "sm_90"
        )
        return spec.constants["BM"], spec.constants["SPLIT"], spec.grid[0]

    assert of((8192, 8192), 256) == (256, 2, 128)
    assert of((14336, 4096), 256) == (256, 1, 112)
    assert of((10240, 8192), 256) == (256, 0, 132), "80 tiles would leave a third of it idle"
    assert of((4096, 4096), 256) == (128, 2, 128), "four to a tile of 256 would read three sums"


@pytest.mark.parametrize("shape", [(300, 1000), (4096, 4096), (8192, 1024), (128 * 66, 512), (4096, 14336)])
def test_every_program_has_a_share(shape: tuple[int, int], samples: Any) -> None:
    begin = types.FunctionType(wgmma_share.begin_of.fn.__code__, {})
    for tree in trees(samples).values():
        for batch in (17, 64, 128, 256, 300, 2048):
            layout = layout_of(hollow(tree, shape))
            (spec,) = hopper.wgmma_specs(layout, batch, torch.bfloat16, "sm_90")
            known, programs = spec.constants, spec.grid[0]
            chunks = -(-layout.padded // (32 * wgmma.runs_of(known["PLANES"], known["BK"])))
            units = -(-shape[0] // known["BN"]) * -(-batch // known["BM"]) * chunks
            at = [
                begin(p, programs, units, chunks, known["SPLIT"], known["LAG"]) for p in range(programs + 1)
            ]
            assert at[0] == 0
            assert at[-1] == units
            assert all(first < second for first, second in itertools.pairwise(at))


def walks(
    units: int, programs: int, chunks: int, down: int, split: int, lag: int
) -> list[list[tuple[int, int]]]:
    """(tile, chunk) of each program in its order, by the kernel's own arithmetic."""
    plain = types.SimpleNamespace(where=lambda c, a, b: a if c else b, maximum=max)
    after, begin_of = (
        types.FunctionType(function.fn.__code__, {"gl": plain})
        for function in (wgmma_share.after, wgmma_share.begin_of)
    )
    found = []
    for program in range(programs):
        begin, left = (begin_of(p, programs, units, chunks, split, lag) for p in (program, program + 1))
        tile = (left - 1) // chunks
        place = (tile // down, tile % down, max(begin - tile * chunks, 0), left - tile * chunks)
        walk = []
        for _ in range(left - begin):
            walk.append((place[0] * down + place[1], place[2]))
            place = after(place, begin, chunks, down)
        found.append(walk)
    return found


@pytest.mark.parametrize(
    ("tiles", "down", "chunks", "programs", "split", "lag"),
    [
        *((6, 1, 8, 5, 0, 0), (6, 2, 8, 48, 0, 0), (7, 1, 1, 3, 0, 0), (12, 3, 5, 11, 0, 0)),
        *((4, 4, 33, 132, 0, 0), (3, 1, 7, 1, 0, 0)),
        *((6, 2, 8, 12, 2, 0), (6, 1, 32, 24, 4, 2), (5, 5, 7, 5, 1, 0), (2, 1, 5, 6, 3, 2)),
    ],
)
def test_programs_share_all_chunks_and_wait_downwards(
    tiles: int, down: int, chunks: int, programs: int, split: int, lag: int
) -> None:
    found = walks(tiles * chunks, programs, chunks, down, split, lag)
    everything = sorted(unit for walk in found for unit in walk)
    assert everything == [(tile, chunk) for tile in range(tiles) for chunk in range(chunks)]
    assert all(found), "the program above one without a share would wait for it"
    if split > 1:
        assert all(len({tile for tile, _ in walk}) == 1 for walk in found)
        longest = max(len(walk) for i, walk in enumerate(found) if i % split != split - 1)
        assert min(map(len, found[split - 1 :: split])) >= longest + lag - 1
    for program, walk in enumerate(found):
        unfinished = {t for t, _ in walk} - {t for t, c in walk if c == chunks - 1}
        # One slot for sums is enough, and it is filled before the program can come to wait.
        assert unfinished <= {walk[0][0]}
        begun_elsewhere = {t for t, _ in walk} - {t for t, c in walk if c == 0}
        assert begun_elsewhere <= {walk[-1][0]}
        for tile in begun_elsewhere - unfinished:
            others = [p for p, other in enumerate(found) if p != program and any(t == tile for t, _ in other)]
            assert all(p < program for p in others)
            assert all(found[p][0][0] == tile for p in others)


SHARES: tuple[tuple[tuple[int, int], int, dict[str, int]], ...] = (
    ((520, 2112), 70, {"PROGRAMS": 5, "SPLIT": 0}),  # several tiles and parts of tiles for each
    ((260, 4096), 256, {"PROGRAMS": 2, "SPLIT": 0}),
    ((520, 2112), 150, {"SPLIT": 2, "LAG_COLUMNS": 256}),
    ((520, 2112), 300, {"SPLIT": 3, "LAG_COLUMNS": 256}),
    ((520, 2112), 100, {"SPLIT": 1, "LAG_COLUMNS": 0}),
    # Two programs on a multiprocessor, in tiles of 32 and 64 rows.
    ((520, 2112), 20, {"PROGRAMS": 5, "SPLIT": 0}),
    ((520, 2112), 64, {"PROGRAMS": 5, "SPLIT": 0}),
    ((520, 2112), 48, {"SPLIT": 2}),
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "batch"), [((300, 1000), 37), ((520, 2112), 70), ((260, 1088), 300)])
def test_products_are_those_of_the_decoded_matrix(
    shape: tuple[int, int], batch: int, dtype: torch.dtype, samples: Any
) -> None:
    for name in trees(samples):
        compare(name, shape, batch, dtype, None, None, samples)


def test_scales_that_float16_does_not_hold_go_through_float32(samples: Any) -> None:
    def pairs(name: str, dtype: torch.dtype) -> bool:
        (spec,) = hopper.wgmma_specs(
            layout_of(hollow(trees(samples)[name], (8192, 4096))), 256, dtype, "sm_90"
        )
        return bool(spec.constants["PAIRS"])

    assert not pairs("mxfp4", torch.float16), "powers of two up to 2**127"
    assert pairs("mxfp4", torch.bfloat16)
    assert pairs("fp8", torch.float16), "one scale a row, applied to the sums"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "batch", "tile"), SHARES)
def test_products_of_all_ways_to_share_them(
    shape: tuple[int, int], batch: int, tile: dict[str, int], dtype: torch.dtype, samples: Any
) -> None:
    for name in ("int4", "int3", "int8 with zeros", "grid in steps"):
        compare(name, shape, batch, dtype, None, tile, samples)
    compare("int6", shape, batch, dtype, torch.float32, tile, samples)


def compare(
    name: str,
    shape: tuple[int, int],
    batch: int,
    dtype: torch.dtype,
    out: torch.dtype | None,
    tile: dict[str, int] | None,
    samples: Any,
) -> None:
    """A product on the card against that of the decoded matrix, and against itself."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not Hopper")
    tree = trees(samples)[name]
    encoded = samples.random_encoded(tree, shape)
    weight = decode(encoded).double().cuda()
    encoded = type(encoded)(tree, shape, {path: array.cuda() for path, array in encoded.arrays.items()})
    x = torch.randn(batch, shape[1], device="cuda", dtype=dtype)
    packed = pack_leaf(encoded)
    specs = hopper.wgmma_specs(packed.layout, batch, dtype, "sm_90", out, tile)
    exact, size = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    y = hopper.wgmma(x, packed, specs, out)
    limit = 3e-3 if dtype == torch.float16 else 1.2e-2
    assert float(((y.double() - exact).abs() / size).max()) < limit, name
    for _ in range(5):
        again = hopper.wgmma(x, packed, specs, out)
        assert torch.equal(y, again), f"{name}: sums depend on who comes first"
    twin = torch.zeros_like(y)
    assert torch.equal(hopper.wgmma(x, packed, specs, out, twin), y) and torch.equal(twin, y)
