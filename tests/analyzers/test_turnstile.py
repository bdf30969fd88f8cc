"""Batches go through the layers in step, and a layer that is called twice is noticed."""

import threading

import pytest
import torch
from torch import nn

from nstf.analyzers.moments import begun_mean_outer
from nstf.analyzers.turnstile import call_order, calls_per_layer, run_in_step, run_layer_by_layer


def stack(order: list[int]) -> tuple[list[nn.Module], object]:
    layers: list[nn.Module] = [nn.Linear(4, 4) for _ in range(2)]

    def run() -> None:
        x = torch.ones(1, 4)
        for index in order:
            x = layers[index](x)

    return layers, run


def test_every_batch_leaves_a_layer_before_any_enters_the_next() -> None:
    layers, run = stack([0, 1])
    seen = []
    handles = [layer.register_forward_hook(lambda *_, i=i: seen.append(i)) for i, layer in enumerate(layers)]
    run_layer_by_layer(layers, [run] * 3, lambda index: seen.append(("after", index)))
    assert seen == [("after", -1), 0, 0, 0, ("after", 0), 1, 1, 1, ("after", 1)]
    assert len(handles) == 2


def test_a_layer_that_is_called_again_is_counted_and_refused() -> None:
    layers, run = stack([0, 1, 0])
    assert calls_per_layer(layers, run) == [2, 1]
    with pytest.raises(ValueError, match="called more than once"):
        run_layer_by_layer(layers, [run] * 2, lambda index: None)


def test_the_error_of_a_batch_is_raised() -> None:
    layers, run = stack([0, 7])
    with pytest.raises(IndexError):
        run_layer_by_layer(layers, [run] * 2, lambda index: None)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_all_batches_stand_before_a_gate_with_their_inputs(workers: int) -> None:
    layers, _ = stack([0, 1])
    log = []

    def run(value: float) -> torch.Tensor:
        x = layers[0](torch.full((1, 4), value))
        log.append(("between", value))
        return layers[1](x)

    def at_gate(gate: int, inputs: list) -> None:
        given = [x[0] if isinstance(x, tuple) else x for x in inputs]
        log.append(("gate", gate, len(given)))
        if gate == 0:
            assert [float(x[0, 0]) for x in given] == [0.0, 1.0, 2.0]
        if gate == 2:
            assert torch.equal(given[1], layers[1](layers[0](torch.ones(1, 4))))

    run_in_step([[m] for m in layers], [lambda v=float(v): run(v) for v in range(3)], at_gate, workers)
    assert log[0] == ("gate", 0, 3)
    assert sorted(log[1:4]) == [("between", 0.0), ("between", 1.0), ("between", 2.0)]
    assert log[4:] == [("gate", 1, 3), ("gate", 2, 3)]


def test_batch_that_does_not_come_by_a_gate_waits_at_its_next_one() -> None:
    layers, run_both = stack([0, 1])
    seen = []
    run_in_step(
        [[m] for m in layers],
        [run_both, lambda: layers[1](torch.ones(1, 4))],
        lambda gate, inputs: seen.append([x is not None for x in inputs]),
    )
    assert seen[:2] == [[True, False], [True, True]]


def test_module_that_is_called_again_is_let_through() -> None:
    layers, run = stack([0, 1, 0])
    gates = []
    run_in_step([[m] for m in layers], [run] * 2, lambda gate, inputs: gates.append(gate), workers=2)
    assert gates == [0, 1, 2]
    assert call_order(layers, run) == [layers[0], layers[1], layers[0]]


def test_error_of_one_of_several_running_batches_is_raised() -> None:
    layers, run = stack([0, 1])
    _, bad = stack([0, 7])
    with pytest.raises(IndexError):
        run_in_step([[m] for m in layers], [run, bad, run, bad], lambda gate, inputs: None, workers=3)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_some_batches_go_on_while_the_others_wait_for_what_is_done_at_the_gate(workers: int) -> None:
    layers, _ = stack([0, 1])
    log, there = [], threading.Event()

    def run(value: float) -> torch.Tensor:
        x = layers[0](torch.full((1, 4), value))
        log.append(value)
        if value == 3.0:
            there.set()
        return layers[1](x)

    def at_gate(gate: int, inputs: list) -> object:
        log.append(("gate", gate, len([x for x in inputs if x is not None])))
        if gate == 2:
            return None

        def rest() -> None:
            # With threads to spare the early ones come by while this is done.
            assert gate > 0 or workers == 1 or there.wait(60)
            log.append(("rest", gate))

        return rest

    runs = [lambda v=float(v): run(v) for v in range(4)]
    run_in_step([[m] for m in layers], runs, at_gate, workers, ahead=(2, 3))
    early, late = [2.0, 3.0], [0.0, 1.0]
    assert log[0] == ("gate", 0, 4)
    assert log[1:4] == ([("rest", 0), *early] if workers == 1 else [*early, ("rest", 0)])
    assert sorted(log[4:6]) == late and log[6:] == [("gate", 1, 4), ("rest", 1), ("gate", 2, 4)]


def test_a_batch_beyond_the_gate_is_not_let_through_its_next_one_early() -> None:
    layers, run_both = stack([0, 1])
    seen = []

    def at_gate(gate: int, inputs: list) -> object:
        seen.append([x is not None for x in inputs])
        return lambda: None

    def skips() -> torch.Tensor:
        return layers[1](torch.ones(1, 4))

    run_in_step([[m] for m in layers], [run_both, skips], at_gate, 2, ahead=(1,))
    assert seen[:2] == [[True, False], [True, True]]


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_of_early_batches_and_of_the_work_beside_them_are_raised(workers: int) -> None:
    layers, run = stack([0, 1])
    _, bad = stack([0, 7])
    with pytest.raises(IndexError):
        run_in_step([[m] for m in layers], [run, bad], lambda *_: lambda: None, workers, ahead=(1,))

    def at_gate(gate: int, inputs: list) -> object:
        return lambda: int("x")

    with pytest.raises(ValueError, match="invalid literal"):
        run_in_step([[m] for m in layers], [run, run], at_gate, workers, ahead=(1,))


def test_an_error_of_the_work_does_not_wait_for_all_batches_beside_it() -> None:
    layers, run = stack([0, 1])
    begun, failed = threading.Event(), threading.Event()
    passed = []

    def early() -> torch.Tensor:
        x = layers[0](torch.ones(1, 4))
        begun.set()
        assert failed.wait(30)
        passed.append(True)
        return layers[1](x)

    def work() -> None:
        assert begun.wait(30)
        failed.set()
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        run_in_step([[m] for m in layers], [run] + [early] * 6, lambda *_: work, 2, ahead=range(1, 7))
    assert len(passed) == 1


def test_mean_outer_is_weighted_and_does_not_depend_on_workers() -> None:
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(50, 6, generator=g) for _ in range(5)]
    w = [torch.rand(50, generator=g) for _ in range(5)]
    one = begun_mean_outer(x, x, w, 1)()
    assert torch.equal(one, begun_mean_outer(x, x, w, 3)())
    rows, weights = torch.cat(x), torch.cat(w)
    assert torch.allclose(one, (rows * weights[:, None]).T @ rows / weights.sum(), atol=1e-6)
    assert torch.allclose(begun_mean_outer(x, x)(), rows.T @ rows / 250, atol=1e-6)
