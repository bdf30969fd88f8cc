"""Expected loss of every way to store a KV group and to thin out a head, on contexts of the length that will be used.

One backward pass gives g, the gradient of the end loss (labels drawn from the model's own predictions) at each head's
output. An option that moves the outputs by d is expected to cost 1/2 E[(g d)^2] nats per token: the second-order KLD,
position by position. A second forward pass makes d for all options, layer by layer, on sampled blocks of 128 queries
spread over the window, so no [T, T] matrix is ever kept.

The same for answers to what is hidden far back (`profile_of_answers`): there the end loss is that of the answers' tokens
alone, and the queries are those of the questions.

Shapes: L layers, H query heads, G KV groups, R = H / G, B sampled blocks, T tokens, D head size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nstf.analyzers.sensitivity import checkpoint_layers
from nstf.analyzers.turnstile import layer_list
from nstf.runtime.kv_formats import BLOCK, PAGE, KVFormat, chosen_blocks, predicted_mass, stored
from nstf_convert.pipeline.attention import simulate
from nstf_convert.pipeline.attention.retrieval import Haystack
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
    head's output and share of the attention mass kept. layer_windows: of the model's own layers, 0 for those that see
    everything; a layer that slides has no rings, bands or blocks to choose from, and zeros where they would be.
    """

    context: int
    windows: tuple[int, ...]
    layer_windows: tuple[int, ...]
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
    return Profile(length, windows, simulate.check(model.module), **mean)


def profile_of_answers(
    model: StreamedModel, stacks: Sequence[Haystack], windows: Sequence[int], seed: int
) -> Profile:
    """Expected losses in nats per token of the answers to what is hidden in contexts of one length, a multiple of 128.

    windows: of the profile that these losses stand beside. What an option does to the queries before the questions is left
    out: they say little of what is far back.
    """
    found = []
    for index, stack in enumerate(stacks):
        told = torch.cat([torch.arange(first - 1, end - 1) for first, end in stack.answers])
        blocks = range(int(told.min()) // BLOCK, int(told.max()) // BLOCK + 1)
        generator = torch.Generator(model.device).manual_seed(seed + index)
        gradients = output_gradients(model, stack.ids, blocks, generator, told)
        scored = _score(model, stack.ids, blocks, gradients, windows)
        # From means over the blocks' queries to sums, shared by the tokens of the answers.
        scale = len(blocks) * BLOCK / len(told)
        found.append(
            {
                n: v * scale if n in ("keys", "values", "rings", "streaming", "blocks") else v
                for n, v in scored.items()
            }
        )
    mean = {name: torch.stack([f[name] for f in found]).mean(0).cpu() for name in found[0]}
    return Profile(len(stacks[0].ids), tuple(windows), simulate.check(model.module), **mean)


def sampled_blocks(length: int) -> list[int]:
    """Blocks of queries to score: the last one and others spread over the window, each standing for its stretch."""
    total = length // BLOCK
    count = min(SAMPLED_BLOCKS, total)
    return sorted({math.ceil(total * (i + 1) / count) - 1 for i in range(count)})


def output_gradients(
    model: StreamedModel,
    ids: Tensor,
    blocks: Sequence[int],
    generator: torch.Generator,
    told: Tensor | None = None,
) -> dict[int, Tensor]:
    """By layer: the gradient of the end loss at the outputs of the sampled queries, [H, B, 128, D] float32.

    told: positions whose predictions make the end loss, all of them by default.
    """
    rows = torch.cat([torch.arange(b * BLOCK, (b + 1) * BLOCK) for b in blocks]).to(model.device)
    found: dict[int, Tensor] = {}

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
        out = simulate.dense(layer, query, key, value, scale, window)
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
            judged = out if told is None else out[:, told.to(out.device)]
            gradient, _, _ = gradient_from_logits(model, judged, generator)
            judged.backward(gradient)  # type: ignore[no-untyped-call]
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

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
        per_group = query.shape[0] // key.shape[0]
        groups = []
        for index in range(key.shape[0]):
            rows = slice(index * per_group, (index + 1) * per_group)
            scorer = _Scorer(
                query[rows].float(), key[index].float(), value[index].float(), scale, windows, window
            )
            groups.append(scorer.losses(blocks, gradients[layer][rows].unbind(1)))
        layers[layer] = {name: torch.stack([g[name] for g in groups]) for name in groups[0]}
        return simulate.dense(layer, query, key, value, scale, window)

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
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, windows: Sequence[int], own: int = 0
    ) -> None:
        """own: the window of the model's layer, 0 for none."""
        self.query, self.key, self.value, self.scale, self.windows = query, key, value, scale, windows
        self.own = own

    def losses(self, blocks: Sequence[int], gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """Means over the blocks; gradients: [R, 128, D] of each."""
        parts, outs = [], []
        # What reading values back adds to them, side by side: the weights are multiplied once for all formats.
        size = self.value.shape[1]
        errors = self.value.new_empty(len(self.value), len(FORMATS) * size)
        for index, fmt in enumerate(FORMATS):
            torch.sub(stored(self.value, fmt), self.value, out=errors[:, index * size : (index + 1) * size])
        for block, gradient in zip(blocks, gradients, strict=True):
            found, out = self._block(block, gradient, errors)
            parts.append(found)
            outs.append(out)
        del errors
        means = {name: torch.stack([p[name] for p in parts]).mean(0) for name in parts[0]}
        # Keys one format after another: in all formats at a time they would take twelve times the memory.
        by_format = []
        for fmt in FORMATS:
            key = stored(self.key, fmt)
            by_format.append(
                torch.stack([self._keys(*of, key) for of in zip(blocks, outs, gradients, strict=True)]).mean(
                    0
                )
            )
        return {"keys": torch.stack(by_format), **means}

    def _seen(self, block: int) -> tuple[int, Tensor, Tensor]:
        """(first key that some query of the block sees, positions [128, 1], distances [128, keys])."""
        first, end = block * BLOCK, (block + 1) * BLOCK
        start = max(first - self.own + 1, 0) if self.own else 0
        position = torch.arange(first, end, device=self.key.device)[:, None]
        return start, position, position - torch.arange(start, end, device=self.key.device)

    def _hidden(self, distance: Tensor) -> Tensor:
        """Keys that a query does not see."""
        return (distance < 0) | (distance >= self.own) if self.own else distance < 0

    def _scores(self, block: int, key: Tensor) -> Tensor:
        start, _, distance = self._seen(block)
        query = self.query[:, block * BLOCK : (block + 1) * BLOCK]
        scores = query @ key[start : (block + 1) * BLOCK].T * self.scale
        return scores.masked_fill_(self._hidden(distance), -math.inf)

    def _block(self, block: int, gradient: Tensor, value_errors: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """(losses for the queries of one block, their outputs [R, 128, D]); gradient: [R, 128, D]."""
        first, end = block * BLOCK, (block + 1) * BLOCK
        start, position, distance = self._seen(block)
        query, key, value = self.query[:, first:end], self.key[start:end], self.value[start:end]
        weights = self._scores(block, self.key).softmax(-1)
        out = weights @ value
        old = position // PAGE - (position - distance) // PAGE >= 2
        found = {"values": self._values(weights * old, value_errors[start:end], gradient)}
        if self.own:
            return found | self._nothing(query), out
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
        }, out

    def _nothing(self, query: Tensor) -> dict[str, Tensor]:
        """Where a layer slides there is no ring, band or block to choose."""
        heads, bands, blocks = len(query), len(self.windows), len(THRESHOLDS)

        def zeros(*shape: int) -> Tensor:
            return query.new_zeros(*shape, dtype=torch.float64)

        return {
            "rings": zeros(bands),
            "streaming": zeros(heads, bands),
            "blocks": zeros(heads, blocks),
            "density": zeros(heads, blocks),
            "error": zeros(heads, bands + blocks),
            "mass": zeros(heads, bands + blocks),
        }

    def _keys(self, block: int, out: Tensor, gradient: Tensor, key: Tensor) -> Tensor:
        """The loss of one format: keys [T, D] as they are read back, but for the last two pages of each query."""
        start, position, distance = self._seen(block)
        scores = self._scores(block, key)
        # Where some query of the block reads 16 bits.
        near = max(block * BLOCK - PAGE, start) - start
        old = position // PAGE - (position - distance[:, near:]) // PAGE >= 2
        query, end = self.query[:, block * BLOCK : (block + 1) * BLOCK], (block + 1) * BLOCK
        plain = query @ self.key[start + near : end].T * self.scale
        plain.masked_fill_(self._hidden(distance[:, near:]), -math.inf)
        scores[..., near:] = torch.where(old, scores[..., near:], plain)
        moved = scores.softmax(-1) @ self.value[start:end] - out
        return _loss((gradient * moved).sum(-1).sum(0))

    def _values(self, weights: Tensor, errors: Tensor, gradient: Tensor) -> Tensor:
        moved = weights @ errors
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
