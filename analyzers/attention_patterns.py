"""How well sparse patterns reproduce the attention of one KV group, from its queries, keys and values alone.

Every pattern is scored by the *output error* (relative L2 of the head's attention output against full
attention, as MInference's second version and SpargeAttn do) and by the attention mass that it keeps; mass
alone rejects too many heads. Softmax over a subset of the keys is the full softmax restricted to it and
divided by its mass, so all patterns are scored from one score matrix.

- streaming(sink, window): the first keys and a local window (Xiao et al. 2023).
- vertical_slash(vertical, slash): the columns and diagonals with the most mass, estimated from the last 64
  queries as a runtime would (MInference, Jiang et al. 2024).
- block_topk(block, threshold): the key blocks that together reach `threshold` of an estimate by
  antidiagonal sums of strided products (XAttention, Xu et al. 2025), with the first and the diagonal block.

Shapes: R query heads of the group, N last queries, T keys, D head size, C patterns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ESTIMATION_QUERIES = 64
STRIDE = 16
KEYS_SHARE = 0.95


@dataclass(frozen=True)
class Pattern:
    """A pattern with its parameters, in the plan's names; `params` is a tuple of pairs so that it can
    be a key.
    """

    name: str
    params: tuple[tuple[str, float], ...] = ()

    def __getitem__(self, name: str) -> float:
        return dict(self.params)[name]


def grid(
    sinks: Sequence[int] = (4, 16, 64),
    windows: Sequence[int] = (64, 128, 256, 512, 1024),
    stripes: Sequence[tuple[int, int]] = ((32, 128), (128, 128), (128, 512), (512, 128)),
    thresholds: Sequence[float] = (0.9, 0.95, 0.99),
    block: int = 64,
) -> tuple[Pattern, ...]:
    """The candidate patterns: all (sink, window) pairs, the (vertical, slash) pairs, the block thresholds."""
    return (
        *(Pattern("streaming", (("sink", s), ("window", w))) for s in sorted(sinks) for w in sorted(windows)),
        *(Pattern("vertical_slash", (("vertical", v), ("slash", s))) for v, s in stripes),
        *(Pattern("block_topk", (("block", block), ("threshold", t))) for t in thresholds),
    )


@dataclass(frozen=True)
class GroupScores:
    """Scores of one KV group on one window of text.

    sq_error: [C, R] squared L2 error of the outputs of the N queries, inf where T is too short for the
    pattern. mass: [C, R] mean share of attention mass kept. share: [C, R] share of the T keys that are
    read. sq_norm: [R] squared L2 norm of the full outputs. keys: [R] mean share of keys needed for 95 % of
    the mass.
    """

    sq_error: Tensor
    mass: Tensor
    share: Tensor
    sq_norm: Tensor
    keys: Tensor


def score_group(
    query: Tensor, key: Tensor, value: Tensor, scale: float, patterns: Sequence[Pattern]
) -> GroupScores:
    """Score all patterns. query: [R, N, D] (the last N positions), key: [T, D], value: [T, Dv], all float32.

    The largest tensors are a few [R, N, T] in float32.
    """
    heads, count, total = query.shape[0], query.shape[1], key.shape[0]
    position = torch.arange(total - count, total, device=query.device)
    distance = position[:, None] - torch.arange(total, device=query.device)
    scores = (query @ key.T * scale).masked_fill_(distance < 0, float("-inf"))
    weights = scores.softmax(dim=-1)
    full = weights @ value
    sq_error = torch.full((len(patterns), heads), float("inf"), device=query.device)
    mass = torch.ones_like(sq_error)
    share = torch.ones_like(sq_error)
    for index, kept, output, used in _streaming(weights, value, distance, patterns):
        sq_error[index] = (output - full).square().sum(dim=(1, 2))
        mass[index], share[index] = kept, used
    masks = _Masks(query, key, weights, distance, scale)
    for index, pattern in enumerate(patterns):
        if pattern.name == "streaming":
            continue
        mask = masks.of(pattern)
        if mask is None:
            continue
        part = weights * mask
        kept_rows = part.sum(dim=-1, keepdim=True)
        output = part @ value / kept_rows.clamp_min(1e-30)
        sq_error[index] = (output - full).square().sum(dim=(1, 2))
        mass[index] = kept_rows.mean(dim=(1, 2))
        share[index] = (mask & (distance >= 0)).sum(dim=(1, 2)) / (count * total)
    return GroupScores(sq_error, mass, share, full.square().sum(dim=(1, 2)), _keys_needed(weights))


def _streaming(weights: Tensor, value: Tensor, distance: Tensor, patterns: Sequence[Pattern]):  # type: ignore[no-untyped-def]
    """(index, mass [R], output [R, N, Dv], share) of every streaming pattern that T is long enough for.

    Windows are nested and sinks are nested, so each key is multiplied once for all windows and once for all
    sinks.
    """
    count, total = distance.shape
    wanted = {
        (int(p["sink"]), int(p["window"])): index for index, p in enumerate(patterns) if p.name == "streaming"
    }
    # Longer ones would read (nearly) everything at this length: they would be exact, and tell nothing.
    wanted = {form: index for form, index in wanted.items() if sum(form) <= total - count}
    first = {
        s: (weights[..., :s].sum(-1), weights[..., :s] @ value[:s]) for s in sorted({s for s, _ in wanted})
    }
    mass, product, before = torch.zeros_like(weights[..., 0]), torch.zeros((), device=value.device), 0
    for window in sorted({w for _, w in wanted}):
        columns = slice(total - count - window + 1, total - before)
        near = distance[:, columns]
        part = weights[..., columns] * ((near >= before) & (near < window))
        mass, product, before = mass + part.sum(-1), product + part @ value[columns], window
        for sink, (sink_mass, sink_product) in first.items():
            if (sink, window) in wanted:
                kept = mass + sink_mass
                output = (product + sink_product) / kept.clamp_min(1e-30)[..., None]
                yield wanted[sink, window], kept.mean(-1), output, (sink + window) / total


class _Masks:
    """Masks [R, N, T] of the estimated patterns; the estimates are made once for all parameters."""

    def __init__(self, query: Tensor, key: Tensor, weights: Tensor, distance: Tensor, scale: float) -> None:
        self.query, self.key, self.weights, self.distance, self.scale = query, key, weights, distance, scale
        self._lines: tuple[Tensor, Tensor] | None = None
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, pattern: Pattern) -> Tensor | None:
        """The mask, or None where the context is too short for the pattern to save anything."""
        count, total = self.distance.shape
        if pattern.name == "vertical_slash":
            vertical, slash = int(pattern["vertical"]), int(pattern["slash"])
            if vertical + slash > total - count:
                return None
            return self._vertical_slash(vertical, slash)
        if pattern.name == "block_topk":
            return self._block_topk(int(pattern["block"]), pattern["threshold"])
        return None

    def _vertical_slash(self, vertical: int, slash: int) -> Tensor:
        if self._lines is None:
            last = self.weights[:, -ESTIMATION_QUERIES:]
            diagonal = torch.zeros_like(last[:, 0])
            for row in range(last.shape[1]):
                seen = last.shape[2] - last.shape[1] + row + 1
                diagonal[:, :seen] += last[:, row, :seen].flip(-1)
            self._lines = last.sum(dim=1), diagonal
        columns, diagonals = self._lines
        keep_column = torch.zeros_like(columns, dtype=torch.bool)
        keep_column.scatter_(1, columns.topk(vertical, dim=1).indices, True)
        keep_diagonal = torch.zeros_like(keep_column)
        keep_diagonal.scatter_(1, diagonals.topk(slash, dim=1).indices, True)
        keep_diagonal[:, 0] = True
        return keep_column[:, None, :] | keep_diagonal[:, self.distance.clamp_min(0)]

    def _block_topk(self, block: int, threshold: float) -> Tensor | None:
        heads, (count, total) = self.query.shape[0], self.distance.shape
        if count % block or block % STRIDE or total < 2 * block:
            return None
        if block not in self._blocks:
            self._blocks[block] = self._estimate(block)
        mass, order = self._blocks[block]
        # A block is needed while those before it have not reached the threshold.
        before = mass.gather(2, order).cumsum(-1) - mass.gather(2, order)
        keep = torch.zeros_like(mass, dtype=torch.bool).scatter_(2, order, before < threshold)
        keep[:, :, 0] = True
        for row in range(count // block):
            keep[:, row, keep.shape[2] - count // block + row] = True
        wide = keep[:, :, None, :, None].expand(-1, -1, block, -1, block).reshape(heads, count, -1)
        return wide[..., wide.shape[2] - total :]

    def _estimate(self, block: int) -> tuple[Tensor, Tensor]:
        """Estimated mass [R, N / block, blocks of keys] and its descending order; blocks end at the
        last key.
        """
        heads, count, size = self.query.shape
        padding = -self.key.shape[0] % block
        key = torch.nn.functional.pad(self.key, (0, 0, padding, 0)).view(-1, STRIDE * size)
        query = self.query.view(heads, -1, STRIDE, size).flip(2).reshape(heads, -1, STRIDE * size)
        scores = query @ key.T * (self.scale / STRIDE)
        row = torch.arange(key.shape[0] - query.shape[1], key.shape[0], device=key.device)
        scores.masked_fill_(row[:, None] < torch.arange(key.shape[0], device=key.device), float("-inf"))
        strides = block // STRIDE
        mass = scores.softmax(-1).view(heads, count // block, strides, -1, strides).sum(-1).mean(2)
        return mass, mass.argsort(dim=-1, descending=True)


def _keys_needed(weights: Tensor) -> Tensor:
    """[R] mean share of the T keys that hold 95 % of the mass of a query."""
    reached = weights.sort(dim=-1, descending=True).values.cumsum(-1) < KEYS_SHARE
    return (reached.sum(-1) + 1).float().mean(-1) / weights.shape[-1]
