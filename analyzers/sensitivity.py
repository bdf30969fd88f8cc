"""How much the end loss reacts to an error at the output of each layer: the diagonal of the Fisher information.

For a small change dz of a layer's outputs, KL(p || p') ~ 1/2 dz^T F dz with F = E[g g^T], where g is the gradient
of -log p(y) at a label y drawn from the model's own prediction (Amari 1998; Kunstner et al. 2019 on why y must
be sampled). The diagonal of F, averaged over tokens, weighs the rows of a weight's error:
KL ~ 1/2 sum_j F_j dW_j H dW_j^T.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nstf.analyzers.by_thread import ByThread
from nstf.analyzers.same_draws import SameDraws
from nstf.errors import UnsupportedError

# Squares that are in memory at a time on a CPU: in its caches they cost half.
BLOCK = 1 << 15


class OutputSensitivity:
    """Gathers the summed squared gradient of every watched module's output, one value per output feature."""

    def __init__(self) -> None:
        self._sums: ByThread[dict[str, Tensor]] = ByThread(dict)

    def watch(self, name: str, module: nn.Module) -> Any:
        """Starts gathering at the output of `module`; features are the last axis, channels for convolutions."""

        def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            if isinstance(out, Tensor) and out.requires_grad:
                out.register_hook(lambda grad: self._add(name, module, grad))  # type: ignore[no-untyped-call]

        return module.register_forward_hook(hook)

    def separate(self) -> None:
        """From now on what the calling thread runs is summed apart."""
        self._sums.separate()

    def _add(self, name: str, module: nn.Module, grad: Tensor) -> None:
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            grad = grad.transpose(1, -1)
        grad = grad.detach().reshape(-1, grad.shape[-1])
        total = _sum_of_squares(grad).double()
        sums = self._sums.value
        sums[name] = sums.get(name, 0) + total

    def take(self) -> dict[str, Tensor]:
        """What was summed since the last call, by name: [features] float64.

        A module that runs several times (for a convolution's positions, a token's experts) counts each time.
        """
        return self._sums.take()


def _sum_of_squares(rows: Tensor) -> Tensor:
    """[n, features] -> float32 [features]."""
    if rows.device.type != "cpu":
        return rows.square().sum(dim=0, dtype=torch.float32)
    total = rows.new_zeros(rows.shape[1], dtype=torch.float32)
    for part in torch.split(rows, max(1, BLOCK // max(1, rows.shape[1]))):
        total += part.float().square().sum(dim=0)
    return total


def checkpoint_layers(
    layers: Sequence[nn.Module], before: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Recomputes each layer in the backward pass instead of keeping its activations and weights; returns undo. before: is
    called whenever a layer is about to be computed."""
    originals = [layer.forward for layer in layers]

    def wrap(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        drawless: set[tuple[int, ...]] = set()  # shapes of inputs for which the layer drew no random numbers

        def computed(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before()
            shape = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else None
            if shape in drawless:
                return forward(*args, **kwargs)
            with SameDraws() as draws:  # the second time what was drawn the first time
                out = forward(*args, **kwargs)
            if shape is not None and not draws.drew:
                drawless.add(shape)
            return out

        def run(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(computed, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return run

    for layer, forward in zip(layers, originals, strict=True):
        layer.forward = wrap(layer, forward)  # type: ignore[method-assign]

    def undo() -> None:
        for layer in layers:
            del layer.forward  # type: ignore[attr-defined]

    return undo


def sampled_gradient(logits: Tensor, generator: torch.Generator, labels: int) -> tuple[Tensor, Tensor]:
    """(a random gradient at the logits whose covariance is the Fisher information there, its exact diagonal).

    logits: [n, vocabulary]; both results [n, vocabulary]. The gradient of -log p(y) is p - onehot(y). The sum over
    `labels` independent y ~ p, divided by sqrt(labels), has the same covariance diag(p) - p p^T, and is close to a
    Gaussian: one unlikely label alone would let its token count a hundred times what it should.

    Raises UnsupportedError where the logits are NaN or all infinite.
    """
    p = torch.softmax(logits.float(), dim=-1)
    if not bool(p.sum().isfinite()):
        raise UnsupportedError("the model's outputs are not finite: its weights or its config are damaged")
    drawn = torch.multinomial(p, labels, replacement=True, generator=generator)
    diagonal = p * (1 - p)
    sample = p.mul_(labels).scatter_add_(1, drawn, p.new_full(drawn.shape, -1.0)).div_(labels**0.5)
    return sample.to(logits.dtype), diagonal
