"""Batches go through the layers in step, and a layer that is called twice is noticed."""

import pytest
import torch
from torch import nn

from nstf.analyzers.turnstile import calls_per_layer, run_layer_by_layer


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
