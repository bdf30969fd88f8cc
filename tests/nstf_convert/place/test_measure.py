"""`--measure` on a CPU with two processes, what is made of its figures, and messages that arrive wrong."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from nstf.errors import NstfError
from nstf.kernels.cpu.engine_matrix import available
from nstf.kernels.formats import Node, integer
from nstf_convert.place import measure
from nstf_convert.place.costs import Matrix
from nstf_convert.place.fabric import Fabric
from nstf_convert.place.measure import first_failure, fit, machine_of, measure_machine, measured_products
from nstf_convert.place.products import Products

FOUND = {
    "ranks": 2, "device": "cpu", "kind": "cpu", "name": "CPU", "dtype": "float32", "threads": 1, "read_alone": 1e10,
    "read_together": 8e9, "flops": 1e11, "memory_bytes": 1e9, "links": [[0, 1, [[1000, 2e-5], [10_000, 1.1e-4]]]],
    "all_reduce": {"2": [[1000, 5e-5], [10_000, 3e-4]]},
}  # fmt: skip


def test_two_processes_measure_this_machine() -> None:
    machine = measure_machine(2)
    assert [d.name for d in machine.devices] == ["process0", "process1"] and machine.devices[0].kind == "cpu"
    assert 1e8 < machine.devices[0].bandwidth < 1e13 and 0 < machine.devices[0].together <= 1
    (link,) = machine.links
    assert 1e6 < link.bandwidth and 0 <= link.latency_s < 1
    curve = machine.collectives.measured[2]
    assert len(curve) == 7 and all(0 < seconds < 10 for _, seconds in curve)
    assert Fabric(machine).all_reduce((0, 1), 1 << 20) > 0


def test_measurements_become_a_machine() -> None:
    machine = machine_of(FOUND, [])
    assert machine.devices[0].together == pytest.approx(0.8)
    assert (machine.links[0].latency_s, machine.links[0].bandwidth) == pytest.approx((1e-5, 1e8))
    assert machine.collectives.start_s == pytest.approx(3e-5)
    assert Fabric(machine).all_reduce((0, 1), 1000) == pytest.approx(5e-5)


def test_copies_that_bring_something_else_are_named() -> None:
    machine = machine_of(FOUND | {"device": "cuda", "kind": "sm_90"}, [(0, 1)])
    assert "direct copies gpu0 to gpu1 do not bring what is sent" in machine.note


def test_a_line_is_fitted_and_never_negative() -> None:
    assert fit([(1e3, 1e-5 + 1e-7), (1e6, 1e-5 + 1e-4), (1e7, 1e-5 + 1e-3)]) == pytest.approx((1e-5, 1e10))
    latency, bandwidth = fit([(1e3, 1e-8), (1e6, 1e-4), (1e7, 2e-3)])
    assert latency == 0 and bandwidth > 0
    assert fit([(1e3, 2e-5), (1e6, 1e-5)])[1] > 1e12


def test_a_process_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.sys, "executable", "/bin/false")
    with pytest.raises(NstfError, match=r"measuring failed in process [01] of 2: no message"):
        measure_machine(2)


def test_the_others_end_with_the_first_that_fails() -> None:
    running = [subprocess.Popen(["sh", "-c", words]) for words in ("sleep 60", "sleep 0.1; exit 3", "exit 0")]
    start = time.monotonic()
    assert first_failure(running, 50) == 1
    assert time.monotonic() - start < 30 and all(process.poll() is not None for process in running)
    assert first_failure([subprocess.Popen(["true"])]) is None
    slow = subprocess.Popen(["sleep", "60"])
    with pytest.raises(TimeoutError):
        first_failure([slow], 0.05)
    assert slow.poll() is not None


@pytest.mark.skipif(not available(), reason="the compiled kernels are not here")
def test_processes_end_with_the_one_that_is_killed() -> None:
    """They went on measuring, and a minute of that was nobody's."""
    program = "from nstf_convert.place import measure; measure.run_workers(2, 'cpu', 1)"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.DEVNULL) as parent:
        children: list[int] = []
        while len(children) < 2 and parent.poll() is None:
            text = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text()
            children = [int(word) for word in text.split()]
        parent.kill()
    assert len(children) == 2
    end = time.monotonic() + 30
    while any(_lives(child) for child in children) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(_lives, children))


def _lives(process: int) -> bool:
    """Whether it is there, and not only its name."""
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_products_on_this_machine_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows in turn with the others of the model, many as the planner times them."""
    from nstf_convert.place import in_turn
    from nstf_convert.speed import cache, prices

    asked, turned = [], []

    def fake(atoms, isa, threads, size_bytes, batch=1):  # type: ignore[no-untyped-def]
        asked.extend((a.rows, a.cols, threads, batch) for a in atoms)
        return dict.fromkeys(atoms, 1e-06)

    def fake_turn(cases, rows, isa, threads, size_bytes, parts):  # type: ignore[no-untyped-def]
        turned.append(([shape for _, shape in cases], rows, threads, size_bytes, parts))
        return [3e-6] * len(cases)

    monkeypatch.setattr(cache, "folder", lambda: None)
    monkeypatch.setattr(prices.measure, "measure", fake)
    monkeypatch.setattr(in_turn, "seconds_in_turn", fake_turn)
    monkeypatch.setattr(measure.os, "cpu_count", lambda: 4)
    machine = machine_of(FOUND, [])
    products = measured_products(machine, 1 << 20)
    tree = Node("int", integer.Params(bits=4, group=64))
    matrix = Matrix("x", tree, (256, 512), "product", 1)
    assert products.seconds(machine.devices[0], [matrix], 2, 3) == pytest.approx(3e-6)
    assert products.seconds(machine.devices[0], [matrix], 2, 32) == pytest.approx(1e-6)
    assert (turned, asked) == ([([(256, 256)], 3, 2, 1 << 20, 2)], [(256, 256, 2, 32)])


@pytest.mark.skipif(not available(), reason="the compiled kernels are not here")
def test_products_in_turn_go_through_the_bytes_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from nstf.kernels.cpu import ext
    from nstf_convert.place import in_turn

    made = []
    whole = in_turn.compile_matrix

    def compiled(encoded, panels):  # type: ignore[no-untyped-def]
        made.append((encoded.size_bytes, panels))
        return whole(encoded, panels=panels)

    monkeypatch.setattr(in_turn, "compile_matrix", compiled)
    monkeypatch.setattr(in_turn, "SECONDS", 0.0)
    tree = Node("int", integer.Params(bits=4, group=64))
    cases = [(tree, (256, 512))] * 2
    first, second = in_turn.seconds_in_turn(cases, 2, ext.isa(), 1, 1 << 19)
    assert first == second > 0, "a matrix that is there twice is timed once"
    assert len(made) > 4 and 0.8 * (1 << 19) < sum(size for size, _ in made) <= 1 << 19
    # As the engine opens a small file: repacked into panels. Ranks read what is stored, and so does all of a large file.
    assert {panels for _, panels in made} == {1}
    made.clear()
    in_turn.seconds_in_turn(cases, 2, ext.isa(), 1, 1 << 19, parts=2)
    assert {panels for _, panels in made} == {0}


def test_processes_of_a_host_share_its_bandwidth_and_nothing_else() -> None:
    """64 KiB a part: at the share that is left, 8e9 bytes a second, they take 8.2 us, however fast one reads alone."""
    device = machine_of(FOUND, ()).devices[0]
    tree, shape = Node("int", integer.Params(bits=4, group=1024)), (256, 1024)
    matrix = Matrix("x.weight", tree, shape, "product", 0)
    left = matrix.size_bytes / 2 / (device.read_rate * 0.8)
    slow, quick = (Products().beside_others(device, s, [matrix], 2) for s in (1e-3, 1e-6))
    assert (slow, quick) == (1e-3, pytest.approx(left)) and left == pytest.approx(8.2e-6, rel=0.05)
