"""Which layers add their output to the residual stream, found by running the model once.

In a pre-norm transformer the stream r enters a norm, a block reads the normed r, and its last linear layer's output y
gives the next norm r + y. That is what is looked for, numerically, so that no architecture has to be known: post-norm
models, scaled residuals and parallel blocks are simply not found.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = 1e-4


def residual_writers(
    model: nn.Module, layers: Mapping[str, nn.Module], run: Callable[[], Any]
) -> dict[str, str]:
    """For each of `layers` (by path) that writes to the stream: the path of the norm whose input is the stream there.

    run: one forward pass of `model` on a few tokens.
    """
    found: dict[str, str] = {}
    stream: tuple[str, Tensor] | None = None
    written: tuple[str, Tensor, tuple[str, Tensor]] | None = None

    def at_norm(path: str, x: Any) -> None:
        nonlocal stream, written
        if not isinstance(x, Tensor):
            return
        if written is not None and written[1].shape == x.shape:
            layer, y, (norm, before) = written
            written = None
            if float((before + y - x).abs().max()) <= TOLERANCE * float(x.abs().max()):
                found[layer] = norm
        stream = (path, x)

    def at_layer(path: str, y: Any) -> None:
        nonlocal written
        if isinstance(y, Tensor) and stream is not None and stream[1].shape == y.shape:
            written = (path, y, stream)

    handles = []
    for path, module in model.named_modules():
        if is_norm(module):
            handles.append(module.register_forward_pre_hook(lambda m, args, p=path: at_norm(p, args[0])))
    for path, module in layers.items():
        handles.append(module.register_forward_hook(lambda m, args, out, p=path: at_layer(p, out)))
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return found


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a LayerNorm, an RMSNorm or an architecture's own kind of these."""
    return "Norm" in type(module).__name__ and not any(True for _ in module.children())
