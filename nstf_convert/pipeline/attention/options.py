"""What a KV group can be: which positions it keeps and in which formats, with bytes and expected loss."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from nstf.runtime.attention_plan import GroupPlan, HeadPlan, LayerPlan
from nstf.runtime.kv_formats import PLAIN, KVFormat
from nstf_convert.pipeline.attention.profile import FORMATS, SINK, SPARSE_FROM, STRIDE, THRESHOLDS, Profile

FULL = HeadPlan("full", {}, 0, 0.0, 1.0)
# Kinds of loss that are expected apart and measured apart.
KINDS = ("keys", "values", "ring")


class Losses(NamedTuple):
    """Expected nats per token, or factors for them, by KINDS."""

    keys: float = 0.0
    values: float = 0.0
    ring: float = 0.0

    def dot(self, factors: Sequence[float]) -> float:
        """The sum of all kinds, each times its factor."""
        return sum(f * v for f, v in zip(factors, self, strict=True))


NOTHING = Losses()


@dataclass(frozen=True)
class Choice:
    """One way to store a KV group, with what it is expected to lose on text and at answers to what is hidden far back.

    window: of the model's layer, 0 for none.
    """

    group: GroupPlan
    losses: Losses
    window: int = 0
    answers: Losses = NOTHING

    @property
    def is_plain(self) -> bool:
        """Whether everything that the model reads is kept, in 16 bits."""
        return self.group == own_group(self.window)

    def of(self, kind: str) -> "Choice":
        """The same with only one kind of loss: the others are stored as they are."""
        group = self.group
        if kind != "ring":
            group = replace(group, sink=0, recent=self.window, min_length=0)
        if kind != "keys":
            group = replace(group, keys=PLAIN)
        if kind != "values":
            group = replace(group, values=PLAIN)
        losses, answers = (Losses(**{kind: getattr(part, kind)}) for part in (self.losses, self.answers))
        return Choice(group, losses, self.window, answers)


def own_group(window: int) -> GroupPlan:
    """Everything that a layer with this window reads, in 16 bits."""
    return GroupPlan(0, window, 0, PLAIN, PLAIN)


def choices(profile: Profile, answers: Profile | None = None) -> list[list[Choice]]:
    """All options of every KV group, layer by layer: ring x format of the keys x format of the values.

    answers: expected losses at answers, which take no part in the choice between formats of as many bits.
    """
    layers, groups = profile.keys.shape[:2]
    return [_choices(profile, layer, group, answers) for layer in range(layers) for group in range(groups)]


def _choices(profile: Profile, layer: int, group: int, answers: Profile | None) -> list[Choice]:
    keys = _formats(profile.keys[layer, group].tolist())
    values = _formats(profile.values[layer, group].tolist())
    own = profile.layer_windows[layer]
    rings = [(0, own, 0, 0.0)]
    if not own:
        rings += [
            (SINK, window, SINK + window, loss)
            for window, loss in zip(profile.windows, profile.rings[layer, group].tolist(), strict=True)
        ]
    return [
        Choice(
            GroupPlan(sink, recent, least, key, value),
            Losses(key_loss, value_loss, ring_loss),
            own,
            _at_answers(answers, layer, group, key, value, 0 if own else recent),
        )
        for sink, recent, least, ring_loss in rings
        for key, key_loss in keys
        for value, value_loss in values
    ]


def _at_answers(
    answers: Profile | None, layer: int, group: int, key: KVFormat, value: KVFormat, ring: int
) -> Losses:
    if answers is None:
        return NOTHING
    return Losses(
        0.0 if key == PLAIN else float(answers.keys[layer, group, FORMATS.index(key)]),
        0.0 if value == PLAIN else float(answers.values[layer, group, FORMATS.index(value)]),
        float(answers.rings[layer, group, answers.windows.index(ring)]) if ring else 0.0,
    )


def _formats(losses: Sequence[float]) -> list[tuple[KVFormat, float]]:
    """16 bits, and of each number of bits the format that is expected to lose least."""
    best: dict[int, tuple[float, KVFormat]] = {}
    for fmt, loss in zip(FORMATS, losses, strict=True):
        if fmt.bits not in best or loss < best[fmt.bits][0]:
            best[fmt.bits] = loss, fmt
    return [(PLAIN, 0.0), *((fmt, loss) for loss, fmt in best.values())]


def uniforms(profile: Profile) -> list[list[Choice]]:
    """One setting for all groups: every ring with every number of bits of keys and of values.

    The format of so many bits is one for all too: that with the least expected loss in total. Layers that slide keep their
    own windows.
    """
    layers, groups = profile.keys.shape[:2]
    totals = [_formats(t.sum((0, 1)).tolist()) for t in (profile.keys, profile.values)]
    keys, values = ([fmt for fmt, _ in total] for total in totals)
    found = []
    rings = range(-1, 0 if all(profile.layer_windows) else len(profile.windows))
    for ring, key, value in itertools.product(rings, keys, values):
        recent = 0 if ring < 0 else profile.windows[ring]
        sink, least = (SINK, SINK + recent) if recent else (0, 0)
        losses = (
            _expected(profile.keys, key),
            _expected(profile.values, value),
            float(profile.rings[..., ring].sum()) if recent else 0.0,
        )
        # The losses of all groups are shared out evenly: only their sum is used.
        share = Losses(*(loss / (layers * groups) for loss in losses))
        same = []
        for own in profile.layer_windows:
            kept = (0, own, 0) if own else (sink, recent, least)
            same += [Choice(GroupPlan(*kept, key, value), share, own)] * groups
        found.append(same)
    return found


def _expected(losses: Tensor, fmt: KVFormat) -> float:
    return 0.0 if fmt == PLAIN else float(losses[..., FORMATS.index(fmt)].sum())


def layers_of(chosen: Sequence[Choice], profile: Profile) -> list[LayerPlan]:
    """The layers of a plan: groups as chosen, the heads of a ring streaming, all others full."""
    heads = profile.blocks.shape[1]
    groups = profile.keys.shape[1]
    per_group = heads // groups
    layers = []
    for layer in range(profile.keys.shape[0]):
        own = [choice.group for choice in chosen[layer * groups : (layer + 1) * groups]]
        rules = []
        for head in range(heads):
            group = own[head // per_group]
            rules.append(_streaming(profile, layer, head, group) if group.recent else FULL)
        layers.append(LayerPlan(tuple(rules), tuple(own)))
    return layers


def _streaming(profile: Profile, layer: int, head: int, group: GroupPlan) -> HeadPlan:
    if profile.layer_windows[layer]:  # the model's own: nothing is lost
        return HeadPlan("streaming", {"sink": 0, "window": group.recent}, 0, 0.0, 1.0)
    index = profile.windows.index(group.recent)
    return HeadPlan(
        "streaming",
        {"sink": group.sink, "window": group.recent},
        group.min_length,
        _short(float(profile.error[layer, head, index])),
        min(_short(float(profile.mass[layer, head, index])), 1.0),
    )


@dataclass(frozen=True)
class Thinning:
    """One head of a full group that reads less: its rule, the share of key reads saved, and the expected loss."""

    layer: int
    head: int
    rule: HeadPlan
    saved: float
    loss: float


def thinnings(
    profile: Profile,
    layers: Sequence[LayerPlan],
    answers: Profile | None = None,
    weights: tuple[float, float] = (1.0, 0.0),
) -> list[Thinning]:
    """For every full head its best thinner rule (saved share per expected loss), the cheapest of all first.

    weights: of the losses on text and at answers.
    """
    if answers is not None:
        text, told = weights
        profile = replace(
            profile,
            streaming=text * profile.streaming + told * answers.streaming,
            blocks=text * profile.blocks + told * answers.blocks,
        )
    found = []
    for layer, plan in enumerate(layers):
        for head, rule in enumerate(plan.heads):
            if rule.pattern != "full":
                continue
            options = [*_bands(profile, layer, head), *_blocks(profile, layer, head)]
            worth = [o for o in options if o.saved >= 0.25]
            if worth:
                found.append(max(worth, key=lambda o: o.saved / max(o.loss, 1e-12)))
    return sorted(found, key=lambda o: (-o.saved / max(o.loss, 1e-12), o.layer, o.head))


def thinned(layers: Sequence[LayerPlan], steps: Sequence[Thinning]) -> list[LayerPlan]:
    """The layers with the rules of these steps."""
    rules = {(step.layer, step.head): step.rule for step in steps}
    return [
        replace(plan, heads=tuple(rules.get((layer, head), rule) for head, rule in enumerate(plan.heads)))
        for layer, plan in enumerate(layers)
    ]


def _bands(profile: Profile, layer: int, head: int) -> list[Thinning]:
    found = []
    for index, window in enumerate(profile.windows):
        # A band reads sink + window keys of each query; a dense head half of the context on average.
        saved = 1 - (SINK + window) / (profile.context / 2)
        group = GroupPlan(SINK, window, SINK + window, PLAIN, PLAIN)
        rule = _streaming(profile, layer, head, group)
        found.append(Thinning(layer, head, rule, saved, float(profile.streaming[layer, head, index])))
    return found


def _blocks(profile: Profile, layer: int, head: int) -> list[Thinning]:
    found = []
    for index, threshold in enumerate(THRESHOLDS):
        at = len(profile.windows) + index
        rule = HeadPlan(
            "block_sparse",
            {"threshold": threshold, "stride": STRIDE},
            SPARSE_FROM,
            _short(float(profile.error[layer, head, at])),
            min(_short(float(profile.mass[layer, head, at])), 1.0),
        )
        saved = 1 - float(profile.density[layer, head, index]) - 1 / STRIDE
        found.append(Thinning(layer, head, rule, saved, float(profile.blocks[layer, head, index])))
    return found


def _short(value: float) -> float:
    """Four significant digits: the plan travels in every artifact."""
    return float(f"{value:.4g}")
