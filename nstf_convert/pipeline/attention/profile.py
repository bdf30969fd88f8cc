"""Expected loss of every way to store a KV group and to thin out a head, on contexts of the length that will be used.

One backward pass gives g, the gradient of the end loss (labels drawn from the model's own predictions) at each head's
output. An option that moves the outputs by d is expected to cost 1/2 E[(g d)^2] nats per token: the second-order KLD,
position by position. A second forward pass makes d for all options, layer by layer, on sampled blocks of 128 queries
spread over the window, so no [T, T] matrix is ever kept.

Shapes: L layers, H query heads, G KV groups, R = H / G, B sampled blocks, T tokens, D head size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nstf.analyzers.sensitivity import checkpoint_layers
from nstf.analyzers.turnstile import layer_list
from nstf.runtime.kv_formats import BLOCK, PAGE, KVFormat, chosen_blocks, predicted_mass, stored
from nstf_convert.pipeline.attention import simulate
from nstf_convert.pipeline.calibrate.gradients import gradient_from_logits
from nstf_convert.pipeline.products import fast_products
from nstf_convert.streamed import StreamedModel

# Every format that a kernel has; of each number of bits the one that is expected to lose least is used.
FORMATS = tuple(
    KVFormat(bits, by, rotate)
    for bits in (8, 4, 2)
    for by in ("channel", "token")
    for rotate in (False, True)
)
# Sinks take a whole page anyway.
SINK = PAGE
WINDOWS = (128, 256, 512, 1024, 2048, 4096)
THRESHOLDS = (0.8, 0.9, 0.95, 0.98)
STRIDE = 16
# A prediction costs as much as reading a sixteenth of the keys; below this length there is little to skip.
SPARSE_FROM = 1024
# Query blocks that are scored in a window, at most: every one of a short window.
SAMPLED_BLOCKS = 8


@dataclass(frozen=True, eq=False)
class Profile:
    """Expected losses in nats per token, float64.

    keys, values: [L, G, formats]; rings: [L, G, windows] of SINK first and `windows` last positions; streaming:
    [L, H, windows] the same for one head alone; blocks: [L, H, thresholds], density: its share of the causal keys that
    are computed, averaged over the sampled blocks. error, mass: [L, H, windows + thresholds] relative L2 error of the
    head's output and share of the attention mass kept.
    """

    context: int
    windows: tuple[int, ...]
    keys: Tensor
    values: Tensor
    rings: Tensor
    streaming: Tensor
    blocks: Tensor
    density: Tensor
    error: Tensor
    mass: Tensor


def profile(model: StreamedModel, contexts: Sequence[Tensor], seed: int) -> Profile:
    """The profile over windows of token ids [T], all of one length, a multiple of 128.

    Raises ValueError for other windows, UnsupportedError for models whose attention cannot be planned.
    """
    lengths = {len(ids) for ids in contexts}
    if len(lengths) != 1 or min(lengths) % BLOCK:
        raise ValueError(
            f"contexts of {sorted(lengths)} tokens; one length, a multiple of {BLOCK}, is needed"
        )
    length = lengths.pop()
    windows = tuple(w for w in WINDOWS if w + SINK <= length // 2)
    blocks = sampled_blocks(length)
    found = []
    for index, ids in enumerate(contexts):
        generator = torch.Generator(model.device).manual_seed(seed + index)
        gradients = output_gradients(model, ids, blocks, generator)
        found.append(_score(model, ids, blocks, gradients, windows))
    mean = {name: torch.stack([f[name] for f in found]).mean(0).cpu() for name in found[0]}
    return Profile(length, windows, **mean)


def sampled_blocks(length: int) -> list[int]:
    """Blocks of queries to score: the last one and others spread over the window, each standing for its stretch."""
    total = length // BLOCK
    count = min(SAMPLED_BLOCKS, total)
    return sorted({math.ceil(total * (i + 1) / count) - 1 for i in range(count)})


def output_gradients(
    model: StreamedModel, ids: Tensor, blocks: Sequence[int], generator: torch.Generator
) -> dict[int, Tensor]:
    """By layer: the gradient of the end loss at the outputs of the sampled queries, [H, B, 128, D] float32."""
    rows = torch.cat([torch.arange(b * BLOCK, (b + 1) * BLOCK) for b in blocks]).to(model.device)
    found: dict[int, Tensor] = {}

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        out = simulate.dense(layer, query, key, value, scale)
        if out.requires_grad:

            def keep(gradient: Tensor) -> None:
                found[layer] = gradient[:, rows].float().reshape(len(gradient), len(blocks), BLOCK, -1)

            out.register_hook(keep)  # type: ignore[no-untyped-call]
        return out

    embedding = model.module.get_input_embeddings()
    handle = embedding.register_forward_hook(lambda module, args, out: out.detach().requires_grad_())
    undo = checkpoint_layers(layer_list(model.module)[1])
    try:
        with simulate.attending(model.module, attend), torch.enable_grad(), fast_products():
            out = model.hidden(ids[None])
            gradient, _, _ = gradient_from_logits(model, out, generator)
            out.backward(gradient)  # type: ignore[no-untyped-call]
    finally:
        undo()
        handle.remove()
    return found


@torch.no_grad()
def _score(
    model: StreamedModel,
    ids: Tensor,
    blocks: Sequence[int],
    gradients: dict[int, Tensor],
    windows: Sequence[int],
) -> dict[str, Tensor]:
    """The tensors of a profile, of one window."""
    layers: dict[int, dict[str, Tensor]] = {}

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        per_group = query.shape[0] // key.shape[0]
        groups = []
        for index in range(key.shape[0]):
            rows = slice(index * per_group, (index + 1) * per_group)
            scorer = _Scorer(query[rows].float(), key[index].float(), value[index].float(), scale, windows)
            parts = [
                scorer.block(b, g) for b, g in zip(blocks, gradients[layer][rows].unbind(1), strict=True)
            ]
            groups.append({name: torch.stack([p[name] for p in parts]).mean(0) for name in parts[0]})
        layers[layer] = {name: torch.stack([g[name] for g in groups]) for name in groups[0]}
        return simulate.dense(layer, query, key, value, scale)

    with simulate.attending(model.module, attend):
        model.hidden(ids[None])
    ordered = [layers[i] for i in sorted(layers)]
    found = {name: torch.stack([layer[name] for layer in ordered]) for name in ordered[0]}
    for name in ("streaming", "blocks", "density", "error", "mass"):
        found[name] = found[name].flatten(1, 2)
    return {name: value.double() for name, value in found.items()}


class _Scorer:
    """What one KV group's options do to the outputs of its heads, block by block."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, windows: Sequence[int]
    ) -> None:
        self.query, self.key, self.value, self.scale, self.windows = query, key, value, scale, windows
        self.keys = [stored(key, fmt) for fmt in FORMATS]
        # What reading values back adds to them, side by side: the weights are multiplied once for all formats.
        self.value_errors = torch.cat([stored(value, fmt) - value for fmt in FORMATS], dim=1)

    def block(self, block: int, gradient: Tensor) -> dict[str, Tensor]:
        """Losses for the queries of one block; gradient: [R, 128, D]."""
        first, end = block * BLOCK, (block + 1) * BLOCK
        query, key, value = self.query[:, first:end], self.key[:end], self.value[:end]
        position = torch.arange(first, end, device=key.device)[:, None]
        distance = position - torch.arange(end, device=key.device)
        old = position // PAGE - torch.arange(end, device=key.device) // PAGE >= 2
        scores = (query @ key.T * self.scale).masked_fill_(distance < 0, -math.inf)
        weights = scores.softmax(-1)
        out = weights @ value
        found = {
            "keys": self._keys(query, scores, old, value, out, gradient),
            "values": self._values(weights, old, gradient),
        }
        streaming, errors, masses = [], [], []
        rings = []
        for window in self.windows:
            moved, mass = _restricted(weights, (distance < window) | (distance > position - SINK), value, out)
            rings.append(_loss((gradient * moved).sum(-1).sum(0)))
            streaming.append(_loss((gradient * moved).sum(-1)))
            errors.append(_relative(moved, out))
            masses.append(mass)
        sparse, density = [], []
        predicted = predicted_mass(query, key, scale=self.scale, stride=STRIDE)
        for threshold in THRESHOLDS:
            kept = chosen_blocks(predicted, threshold)
            if first + 1 < SPARSE_FROM:
                kept = torch.ones_like(kept)
            wide = kept.repeat_interleave(BLOCK, -1)[:, None]
            moved, mass = _restricted(weights, wide, value, out)
            sparse.append(_loss((gradient * moved).sum(-1)))
            density.append((wide & (distance >= 0)).sum((1, 2)) / (distance >= 0).sum())
            errors.append(_relative(moved, out))
            masses.append(mass)
        return {
            **found,
            "rings": _stack(rings, query, ()),
            "streaming": _stack(streaming, query, (len(query),)),
            "blocks": torch.stack(sparse, -1),
            "density": torch.stack(density, -1),
            "error": torch.stack(errors, -1),
            "mass": torch.stack(masses, -1),
        }

    def _keys(
        self, query: Tensor, scores: Tensor, old: Tensor, value: Tensor, out: Tensor, gradient: Tensor
    ) -> Tensor:
        losses = []
        for key in self.keys:
            changed = torch.where(old, query @ key[: value.shape[0]].T * self.scale, scores)
            moved = changed.softmax(-1) @ value - out
            losses.append(_loss((gradient * moved).sum(-1).sum(0)))
        return torch.stack(losses)

    def _values(self, weights: Tensor, old: Tensor, gradient: Tensor) -> Tensor:
        moved = (weights * old) @ self.value_errors[: weights.shape[-1]]
        products = moved.reshape(*gradient.shape[:2], len(FORMATS), -1) * gradient[..., None, :]
        return _loss(products.sum(-1).sum(0).T)


def _restricted(weights: Tensor, kept: Tensor, value: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """(how far outputs move, mean mass kept [R]) when softmax runs over the kept keys only."""
    part = weights * kept
    mass = part.sum(-1, keepdim=True)
    return part @ value / mass.clamp_min(1e-30) - out, mass.mean((1, 2))


def _loss(product: Tensor) -> Tensor:
    """1/2 E[(g d)^2] over the last axis, the queries."""
    half_mean: Tensor = 0.5 * product.double().square().mean(-1)
    return half_mean


def _relative(moved: Tensor, out: Tensor) -> Tensor:
    ratio: Tensor = moved.norm(dim=(1, 2)) / out.norm(dim=(1, 2)).clamp_min(1e-30)
    return ratio


def _stack(parts: list[Tensor], like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[*shape, len(parts)], also when there is none: contexts too short for a ring."""
    return torch.stack(parts, -1) if parts else like.new_zeros(*shape, 0, dtype=torch.float64)


def summary(found: Profile) -> dict[str, Any]:
    """What a calibration file keeps beside the tensors: lengths and the names along the axes."""
    return {
        "context": found.context,
        "windows": list(found.windows),
        "thresholds": list(THRESHOLDS),
        "formats": [str(fmt) for fmt in FORMATS],
    }
