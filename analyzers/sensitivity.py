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


class OutputSensitivity:
    """Gathers the summed squared gradient of every watched module's output, one value per output feature."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def watch(self, name: str, module: nn.Module) -> Any:
        """Starts gathering at the output of `module`; features are the last axis, channels for convolutions."""

        def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            if isinstance(out, Tensor) and out.requires_grad:
                out.register_hook(lambda grad: self._add(name, module, grad))  # type: ignore[no-untyped-call]

        return module.register_forward_hook(hook)

    def _add(self, name: str, module: nn.Module, grad: Tensor) -> None:
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            grad = grad.transpose(1, -1)
        grad = grad.detach().reshape(-1, grad.shape[-1])
        total = grad.square().sum(dim=0).double()
        self._sums[name] = self._sums.get(name, 0) + total

    def per_unit(self, units: int) -> dict[str, Tensor]:
        """The sums divided by `units` (tokens of a language model, samples of another): [features] float32.

        A module that runs several times per unit (a convolution's positions, a token's experts) counts each time.
        """
        return {n: (s / units).to(torch.float32) for n, s in self._sums.items()}


def checkpoint_layers(layers: Sequence[nn.Module]) -> Callable[[], None]:
    """Recomputes each layer in the backward pass instead of keeping its activations and weights; returns undo."""
    originals = [layer.forward for layer in layers]

    def wrap(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return run

    for layer, forward in zip(layers, originals, strict=True):
        layer.forward = wrap(layer, forward)  # type: ignore[method-assign]

    def undo() -> None:
        for layer in layers:
            del layer.forward  # type: ignore[attr-defined]

    return undo


def sampled_loss(logits: Tensor, generator: torch.Generator) -> Tensor:
    """-sum log p(y) with y drawn from softmax(logits): logits [n, vocabulary] -> scalar."""
    log_p = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        noise = torch.empty_like(log_p).exponential_(generator=generator)
        labels = (log_p.exp() / noise).argmax(dim=-1)  # the exponential race draws from a categorical
    return -log_p.gather(1, labels[:, None]).sum()


def head_sensitivity(logits: Tensor) -> Tensor:
    """The Fisher diagonal at the logits, mean over rows of p (1 - p): [n, vocabulary] -> [vocabulary]."""
    p = torch.softmax(logits, dim=-1)
    return (p * (1 - p)).mean(dim=0)
