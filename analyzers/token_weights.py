"""How much each token's input to a layer matters to the end loss: the weights of `H = sum_t w_t x_t x_t^T / sum_t w_t`.

An error dW changes the loss of token t by about 1/2 sum_j g_tj^2 (dW_j x_t)^2, with g_t the gradient at the layer's
outputs. With g_tj^2 ~ s_j w_t / mean(w), s_j the mean over tokens and w_t the mean over outputs, its mean over tokens
is 1/2 sum_j s_j dW_j H dW_j^T with the weighted H (GuidedQuant, Kim et al., 2025, arXiv 2505.07004, with one group of
outputs). The row sensitivities s_j keep their meaning: dividing by sum_t w_t leaves H a mean over tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nstf.analyzers.by_thread import ByThread


@dataclass(frozen=True, eq=False)
class TokenSquares:
    """What a batch says about its tokens.

    squares: by layer, [rows] float32, each row's squared gradient summed over the layer's outputs; features: by layer,
    how many outputs that are; key_of: by layer, the first layer that reads the same input.
    """

    squares: dict[str, Tensor]
    features: dict[str, int]
    key_of: dict[str, str]


@dataclass(eq=False)
class _Gathered:
    """Since the last call of `take`. last: the input that was read last, and its key."""

    parts: dict[str, list[Tensor]] = field(default_factory=dict)
    features: dict[str, int] = field(default_factory=dict)
    key_of: dict[str, str] = field(default_factory=dict)
    last: tuple[Tensor, str] | None = None


class TokenGradients:
    """Gathers each token's squared gradient at the outputs of watched layers, one value per input row.

    Layers that read the very same tensor (q, k and v) belong together, under the name of the first: the names and groups
    are those of `moments.InputMoments`.
    """

    def __init__(self) -> None:
        self._gathered: ByThread[_Gathered] = ByThread(_Gathered)

    def separate(self) -> None:
        """From now on what the calling thread runs is gathered apart."""
        self._gathered.separate()

    def watch(self, name: str, module: nn.Module) -> Any:
        """Starts gathering for a layer whose output's last axis is its features; returns the hook's handle."""

        def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            if not isinstance(out, Tensor) or not out.requires_grad:
                return
            found = self._gathered.value
            if name not in found.key_of:
                shared = found.last is not None and found.last[0] is args[0]
                found.key_of[name] = found.last[1] if shared and found.last else name
                found.last = (args[0], found.key_of[name])
            out.register_hook(lambda grad: self._add(name, grad))  # type: ignore[no-untyped-call]

        return module.register_forward_hook(hook)

    def _add(self, name: str, grad: Tensor) -> None:
        rows, found = grad.detach().reshape(-1, grad.shape[-1]), self._gathered.value
        found.features[name] = rows.shape[1]
        # A norm leaves no squares in memory: a tenth of the time of float32 ones.
        squares = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).square_()
        found.parts.setdefault(name, []).append(squares)

    def take(self) -> TokenSquares:
        """What was gathered since the last call: the rows of a batch."""
        found = self._gathered.take()
        squares = {n: torch.cat(parts) for n, parts in found.parts.items()}
        return TokenSquares(squares, found.features, found.key_of)


def token_weights(batches: Sequence[TokenSquares], rows: int) -> dict[str, Tensor]:
    """The weights by key, [rows] float32 with mean 1, in the order of the batches; layers that read one input count by
    the mean over all their outputs.

    A layer that saw another number of rows than `rows` (it runs several times, or for some tokens only) has none.
    """
    features: dict[str, int] = {}
    key_of: dict[str, str] = {}
    for batch in batches:
        features |= batch.features
        for name, key in batch.key_of.items():
            key_of.setdefault(name, key)  # a layer's group is that of the first batch that came by
    out = {}
    for key in sorted(set(key_of.values())):
        members = sorted(n for n, k in key_of.items() if k == key and n in features)
        joined = [torch.cat([b.squares[n] for b in batches if n in b.squares]) for n in members]
        if not joined or any(j.numel() != rows for j in joined):
            continue
        total = torch.stack(joined).sum(dim=0, dtype=torch.float64)
        total = total / sum(features[n] for n in members)
        if bool(torch.isfinite(total).all()) and float(total.sum()) > 0:
            out[key] = (total / total.mean()).float()
    return out


def temper(weights: Tensor, power: float, cap: float) -> Tensor:
    """Weights with lighter tails: w^power, at most `cap` times their mean; [rows], mean 1.

    Gradients of single tokens are heavy-tailed (one token of a thousand can hold half of the sum), and a Hessian is a
    sample mean: fewer, heavier tokens make it noisier. Raises ValueError unless 0 <= power <= 1 and cap > 1.
    """
    if not 0 <= power <= 1 or not cap > 1:
        raise ValueError(
            f"a power of {power} and a cap of {cap} do not temper weights: give 0..1 and above 1"
        )
    out = weights.double() ** power
    # Capping lowers the mean, and with it the cap: the fixed point is reached from above.
    for _ in range(16):
        out = out / out.mean().clamp_min(1e-300)
        out = out.clamp_max(cap)
    return (out / out.mean().clamp_min(1e-300)).float()
