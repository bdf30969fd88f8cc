"""What products do in their own launch: sum, gate, residual stream and norm, interpreted on a CPU and run on a card."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
import ending_cases
from conftest import leaf, node
from diagonal import diagonal

from nstf.kernels.triton import gates
from nstf.kernels.triton.aot import compile_spec
from nstf.kernels.triton.architecture import ARCHITECTURES
from nstf.kernels.triton.ended import ended_specs
from nstf.kernels.triton.ending import Ending, Meeting
from nstf.kernels.triton.linear import kernel_of
from nstf.kernels.triton.rotate import rotate_spec
from nstf.kernels.triton.skinny import skinny_kernel
from nstf.kernels.triton.spec import hollow
from nstf.kernels.triton.sums import ending_spec

CASES = {case.name: case for case in ending_cases.CASES}
# A part of the columns that is not full and rows that fill no program; trellises of two rates.
SHORT = [ending_cases.CASES[i].name for i in (2, 4, 6, 7)]
ENDINGS = (Ending(False), Ending(True, normed=True), Ending(normed=True), Ending(adds=True))
INT4 = leaf("int", bits=4, group=128)


@pytest.mark.parametrize(
    "names",
    [SHORT, pytest.param(sorted(CASES.keys() - set(SHORT)), marks=pytest.mark.slow)],
    ids=["short", "long"],
)
def test_interpreted_endings_do_what_launches_of_their_own_do(names: list[str]) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(Path(ending_cases.__file__)), *names]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert set(found) == set(names)
    assert [f"{name}: {what}" for name, same in found.items() for what, ok in same.items() if not ok] == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_endings_on_a_gpu_do_what_launches_of_their_own_do(name: str) -> None:
    assert not [what for what, ok in ending_cases.found(CASES[name], "cuda").items() if not ok]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["skinny", "int_groups", "trellis", "shuffle"])
def test_a_graph_gives_the_same_a_thousand_times(kernel: str) -> None:
    """A chain that adds, norms and gates, each launch of which begins before the one in front of it has ended."""
    case = ending_cases.Case(kernel, (2048, 2048), 1, "bfloat16")
    encoded, x = ending_cases.product_of(case, "cuda")
    h, gain = torch.zeros(1, 2048, device="cuda"), torch.ones(2048, device="cuda")

    def product(
        x: torch.Tensor, ending: Ending, meeting: Meeting
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        parts = ending_cases.parts_of(case, encoded, x)
        return ending_cases.ended(case, parts, x.dtype, ending, meeting)

    def step() -> list[torch.Tensor]:
        new, squares = product(x, Ending(adds=True), Meeting(h=h, gain=gain))
        meeting = Meeting(squares=squares, epsilon=1e-5)
        gated, _ = product(new, Ending(False, normed=True), meeting)
        normed, _ = product(new, Ending(normed=True), meeting)
        return [h, new, gated, normed]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    for i in range(1000):
        x.copy_(torch.randn_like(x))
        h.zero_()
        graph.replay()
        if i % 10 == 0:
            found = [y.clone() for y in captured]
            h.zero_()
            for one, other in zip(found, step(), strict=True):
                assert torch.equal(one, other), i


@pytest.mark.parametrize(("target", "name"), diagonal(ARCHITECTURES, [ending.name for ending in ENDINGS]))
def test_an_ending_compiles_without_spills(name: str, target: str) -> None:
    row, (ending,) = ARCHITECTURES[target], [e for e in ENDINGS if e.name == name]
    spec = ending_spec(1, 4096, 14336, 14, torch.bfloat16, ending, target)
    report = compile_spec(spec, row).report(target)
    assert gates.check(spec, report, row) == []


def test_what_has_no_ending() -> None:
    def none(
        tree: object, shape: tuple[int, int], ending: Ending, dtype: torch.dtype = torch.bfloat16
    ) -> bool:
        matrix = hollow(tree, shape)  # type: ignore[arg-type]
        return ended_specs(matrix, 1, dtype, ending, "sm_90") == []

    adds = Ending(adds=True)
    assert not none(INT4, (4096, 4096), adds) and not none(INT4, (4096, 4096), Ending(False))
    assert none(INT4, (4096, 4096), adds, torch.float16), (
        "not divided by its root mean square, it might overflow"
    )
    assert not none(INT4, (4096, 4096), Ending(False), torch.float16)
    assert none(leaf("int", bits=8, group=8), (4096, 4096), adds), "groups that end within a run of columns"
    assert ended_specs(hollow(INT4, (4096, 4096)), 1, torch.bfloat16, adds, "gfx942") == []
    assert ended_specs(hollow(INT4, (4096, 4096)), 17, torch.bfloat16, adds, "sm_90") == []


def test_one_row_of_8_bits_ends_with_the_sums_of_another_kernel() -> None:
    """Alone gemv.py multiplies it, which leaves no parts."""
    matrix = hollow(leaf("int", bits=8, group=0), (6144, 4096))
    assert kernel_of(matrix, 1, torch.bfloat16, "sm_90") == "gemv"
    for ending in (Ending(normed=True), Ending(adds=True), Ending(False, normed=True)):
        product, end = ended_specs(matrix, 1, torch.bfloat16, ending, "sm_90")
        assert product.fn is skinny_kernel and end.kind == "end"


@pytest.mark.parametrize(
    ("batch", "rows", "ranks", "some"),
    [
        (16, 8192, 2, True),
        (16, 8192, 3, False),  # a rank sends its values to two others: more words than sums by memory take
        (1, 2880, 2, True),
        (2, 2880, 2, False),  # programs would end within a row: `peer_sum` puts values elsewhere
        (2, 2816, 8, True),
    ],
)
def test_an_ending_over_ranks_exchanges_what_a_sum_of_its_own_would(
    batch: int, rows: int, ranks: int, some: bool
) -> None:
    """One rank may end its product so where another's part has no ending."""
    matrix, ending = hollow(INT4, (rows, 2048)), Ending(adds=True, rank=1, ranks=ranks)
    assert bool(ended_specs(matrix, batch, torch.bfloat16, ending, "sm_90")) == some
    assert ended_specs(matrix, batch, torch.bfloat16, Ending(adds=True), "sm_90")


@pytest.mark.parametrize(("kind", "rate"), [("trellis", (12,)), ("shuffle", 12)])
def test_products_of_rotated_paths_end_too(kind: str, rate: object) -> None:
    """What turns the activations, the product, and its sum with what follows."""
    path, endings = leaf(kind, quarter_bits=rate), (Ending(False, normed=True), Ending(adds=True))
    for ending in endings:
        matrix = hollow(node("rotated", {"x": path}, block_in=128, seed=5), (4096, 4096))
        found = ended_specs(matrix, 1, torch.bfloat16, ending, "sm_90")
        assert [spec.kind for spec in found] == ["rotate", f"{kind}_gemm", "end"]
        assert ended_specs(matrix, 1, torch.bfloat16, ending, "gfx942") == []
    both = hollow(node("rotated", {"x": path}, block_in=128, block_out=128), (4096, 4096))
    assert ended_specs(both, 1, torch.bfloat16, endings[1], "sm_90") == []


@pytest.mark.parametrize("block", [32, 64, 128])
def test_a_lane_has_the_number_of_its_place_where_lanes_exchange(block: int) -> None:
    """Shuffles say nothing of wrong lanes: one layout for all tensors, a number of each lane, and none that is moved."""
    spec = rotate_spec(1, 4096, block, 0, torch.bfloat16, torch.float32, False, "sm_90")
    text = str(compile_spec(spec, ARCHITECTURES["sm_90"]).stages["ttgir"])
    layouts = set(re.findall(r"#ttg\.blocked<\{.*?\}>", text))
    assert layouts == {
        "#ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [2], order = [0]}>"
    }
    assert "convert_layout" not in text and "#ttg.linear" not in text
    assert text.count("shfl.sync.bfly") == 4 * 5
