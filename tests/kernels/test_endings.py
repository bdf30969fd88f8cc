"""What products do in their own launch: sum, gate, residual stream and norm, interpreted on a CPU and run on a card."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
import ending_cases
from conftest import leaf

from nstf.kernels.triton import gates, linear
from nstf.kernels.triton.aot import compile_spec
from nstf.kernels.triton.architecture import ARCHITECTURES
from nstf.kernels.triton.ending import Ending, Meeting
from nstf.kernels.triton.spec import hollow

CASES = {case.name: case for case in ending_cases.CASES}
ENDINGS = (Ending(False), Ending(True, normed=True), Ending(normed=True), Ending(adds=True))
INT4 = leaf("int", bits=4, group=128)


def test_interpreted_endings_do_what_launches_of_their_own_do() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(Path(ending_cases.__file__))]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert set(found) == set(CASES)
    assert [f"{name}: {what}" for name, same in found.items() for what, ok in same.items() if not ok] == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_endings_on_a_gpu_do_what_launches_of_their_own_do(name: str) -> None:
    assert not [what for what, ok in ending_cases.found(CASES[name], "cuda").items() if not ok]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["skinny", "int_bytes"])
def test_a_graph_gives_the_right_sums_a_thousand_times(kernel: str) -> None:
    """Counters are zero again after each launch: products that follow one another share them."""
    case = ending_cases.Case(kernel, (2048, 4096), 1, 528, "bfloat16")
    made = ending_cases.product_of(case, "cuda")
    x = made[2]
    h, gain = torch.zeros(1, 2048, device="cuda"), torch.ones(2048, device="cuda")

    def step() -> list[torch.Tensor]:
        first, _ = ending_cases.ended(case, made, Ending(), None)
        _, squares = ending_cases.ended(case, made, Ending(adds=True), Meeting(h=h, gain=gain))
        meeting = Meeting(squares=squares, epsilon=1e-5)
        return [first, h, ending_cases.ended(case, made, Ending(False, normed=True), meeting)[0]]

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
        found = [y.clone() for y in captured]
        if i % 10 == 0:
            h.zero_()
            for one, other in zip(found, step(), strict=True):
                assert torch.equal(one, other), i


@pytest.mark.gpu
def test_two_streams_at_once_give_the_right_sums() -> None:
    case = ending_cases.Case("skinny", (4096, 4096), 1, 528, "bfloat16")
    made = ending_cases.product_of(case, "cuda")
    expected, _ = ending_cases.ended(case, made, Ending(), None)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for _ in range(100):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(ending_cases.ended(case, made, Ending(), None)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected) for y in found)


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.name)
@pytest.mark.parametrize("batch", [1, 8])
def test_an_ending_costs_no_registers_that_programs_share(ending: Ending, batch: int) -> None:
    row = ARCHITECTURES["sm_90"]
    for group in (64, 128):
        tree = leaf("int", bits=4, group=group)
        (spec,) = linear.ended_specs(hollow(tree, (28672, 4096)), batch, torch.bfloat16, ending, row.target)
        report = compile_spec(spec, row).report(row.target)
        allowed = 168 if spec.kind == "int_bytes" else 128
        assert report.vector_spills == 0 and report.vector_registers <= allowed, (group, report)
        assert gates.check(spec, report, row) == []


def test_what_has_no_ending() -> None:
    def none(
        tree: object, shape: tuple[int, int], ending: Ending, dtype: torch.dtype = torch.bfloat16
    ) -> bool:
        matrix = hollow(tree, shape)  # type: ignore[arg-type]
        return linear.ended_specs(matrix, 1, dtype, ending, "sm_90") == []

    adds = Ending(adds=True)
    assert not none(INT4, (4096, 4096), adds) and not none(INT4, (4096, 4096), Ending(False))
    assert none(INT4, (4096, 4096), adds, torch.float16), (
        "not divided by its root mean square, it might overflow"
    )
    assert not none(INT4, (4096, 4096), Ending(False), torch.float16)
    assert none(INT4, (4112, 4096), Ending(False)), "the halves are not sixteens of rows"
    assert none(leaf("trellis", quarter_bits=(10,)), (4096, 4096), adds)
    assert linear.ended_specs(hollow(INT4, (4096, 4096)), 1, torch.bfloat16, adds, "gfx942") == []
    assert linear.ended_specs(hollow(INT4, (4096, 4096)), 17, torch.bfloat16, adds, "sm_90") == []
