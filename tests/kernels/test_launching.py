"""What launches of a kernel on a stream hand on to each other: kept, but never what a graph's capture allocated. And what
is kept of Triton's own work for a launch."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton.compiler import CompiledKernel

from nstf.kernels.formats.tree import Node, format_of
from nstf.kernels.triton import launching, tuner
from nstf.kernels.triton.ended import ended_specs
from nstf.kernels.triton.ending import Ending
from nstf.kernels.triton.spec import KernelSpec, hollow, remembered


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A card that is not there: its stream, whether that is captured, and what was launched and waited for."""
    state = SimpleNamespace(stream=1, capturing=False, log=[])
    zeros = torch.zeros

    def made(count: int, dtype: torch.dtype | None = None, device: object = None) -> torch.Tensor:
        state.log.append("zeros")
        return zeros(count, dtype=dtype)

    def stream(device: object) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=state.stream, synchronize=lambda: state.log.append("wait"))

    monkeypatch.setattr(launching, "_HANDED_ON", {})
    monkeypatch.setattr(torch, "zeros", made)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    return state


def handed_on(kernel: str = "one") -> torch.Tensor:
    return launching.handed_on(torch.device("cuda", 0), 3, torch.int64, kernel)


def test_launches_of_a_kernel_on_a_stream_share(card: SimpleNamespace) -> None:
    first = handed_on()
    assert card.log == ["zeros", "wait"], "read before the launch in front has ended"
    assert handed_on() is first
    assert handed_on("another") is not first
    card.stream = 2
    assert handed_on() is not first


def test_what_a_capture_allocates_is_not_kept(card: SimpleNamespace) -> None:
    card.capturing = True
    first = handed_on()
    assert card.log == ["zeros", "zeros"], "one launch more, before which the first has ended"
    assert handed_on() is not first
    card.capturing = False
    kept = handed_on()
    assert kept is not first
    card.capturing = True
    assert handed_on() is kept


class Compiled(CompiledKernel):  # type: ignore[misc]
    """A compiled kernel that notes what it is run with."""

    def __init__(self) -> None:
        self.ran: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.ran.append((grid, *arguments))


class Function:
    """A kernel's function: how often Triton was asked for it."""

    def __init__(self, compiled: object) -> None:
        self.compiled, self.arg_names = compiled, ["x", "count", "A", "B"]
        self.asked: list[tuple[tuple[object, ...], dict[str, object]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def ask(*arguments: object, **constants: object) -> object:
            self.asked.append((arguments, constants))
            return self.compiled

        return ask


def spec_of(function: Function) -> KernelSpec:
    return KernelSpec("test", function, {"x": "*fp32", "count": "i32"}, {"B": 2, "A": 1}, grid=(3, 1, 1))


def test_a_kernel_is_asked_for_once_for_arguments_that_compile_alike() -> None:
    compiled = Compiled()
    function = Function(compiled)
    spec, x = spec_of(function), torch.zeros(32)
    launching.launch(spec, x, 5)
    assert function.asked[0][1]["A"] == 1 and not compiled.ran
    launching.launch(spec, x, 7)
    # The constants come in the order of the function's arguments, not of the spec.
    assert len(function.asked) == 1 and compiled.ran == [((3, 1, 1), x, 7, 1, 2)]
    others: tuple[tuple[torch.Tensor, int], ...] = ((x[1:], 7), (x, 16), (x, 1), (x.half(), 7), (x, 1 << 40))
    for count, (some, number) in enumerate(others, 2):
        launching.launch(spec, some, number)
        assert len(function.asked) == count, "another address, number or type compiles anew"
    launching.launch(spec_of(function), x, 7)
    launching.launch(replace(spec, name="derived"), x, 7)
    assert len(function.asked) == 8, "another spec knows nothing of this one's"


def test_what_does_not_compile_is_asked_for_each_time() -> None:
    function = Function(None)  # Triton's interpreter gives nothing back
    spec = spec_of(function)
    for _ in range(2):
        launching.launch(spec, torch.zeros(32), 5)
    assert len(function.asked) == 2 and not spec.kept


def test_specs_are_made_once_but_for_tiles_that_are_measured() -> None:
    made = []

    @remembered
    def spec(rows: int, tile: dict[str, int] | None = None, arch: str = "sm_90") -> list[int]:
        made.append(rows)
        return [rows]

    assert spec(3) is spec(3) and spec(3, arch="sm_90") == [3]
    assert spec(3, {"N": 8}) is not spec(3, {"N": 8}) and spec(3, tile={"N": 8}) == [3]
    assert made == [3, 3, 3, 3, 3]


@pytest.mark.parametrize("rows", [1, 8])
def test_a_product_with_an_ending_asks_once_for_its_launches(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = hollow(Node("int", format_of("int").Params(bits=4, group=128)), (256, 256))
    first = ended_specs(matrix, rows, torch.bfloat16, Ending(normed=True), "sm_90")
    assert first and ended_specs(matrix, rows, torch.bfloat16, Ending(normed=True), "sm_90") is first
    assert ended_specs(matrix, rows, torch.bfloat16, Ending(adds=True), "sm_90") is not first
    # Measured tiles may be others.
    monkeypatch.setattr(tuner, "_MEASURED", tuner.TuningCache(version=tuner.measured_version() + 1))
    assert ended_specs(matrix, rows, torch.bfloat16, Ending(normed=True), "sm_90") is not first
