"""A budget for the KV cache to a plan: expected losses choose, measurements correct and decide.

1. Hulls, multiplier and exact program over the options of all KV groups, as for weights (nstf_convert.planner).
2. What is expected of keys, values and rings is compared with what each alone is measured to lose, and the plan is
   made again with these factors: quantised keys cost more, and rings less, than a second-order estimate says.
3. The best single settings of the same bytes are measured; a plan that loses to one of them is replaced by it.
4. With an allowance, heads of full groups are thinned out for speed, as many as still hold it.

An allowance is for another text than those that choose, and for answers to what is hidden far back: what counts is
Loss.upper (measured.py). Where a budget is given too, it is a limit: half of the allowance is for fewer bytes, which make
decoding faster, and the rest for fewer keys of a prompt's queries.
"""

import itertools
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nstf.errors import BudgetError
from nstf.runtime.attention_plan import LayerPlan
from nstf.runtime.kv_formats import dense_group_bytes, group_bytes
from nstf_convert.pipeline.attention.measured import ANSWERS, Loss
from nstf_convert.pipeline.attention.options import (
    KINDS,
    Choice,
    choices,
    layers_of,
    priced,
    thinned,
    thinnings,
    uniforms,
)
from nstf_convert.pipeline.attention.profile import Profile
from nstf_convert.planner.allocation import allocate

log = logging.getLogger("nstf")

# Rivals that are measured: the best by expectation.
RIVALS = 2
# One setting in place of the smallest plan for an allowance is measured if it is expected to lose at most so much more.
HOPELESS = 4.0
# The first plan for an allowance is expected to lose this much less: about what another text may lose more (Loss.ratio).
BEFORE = 2.0
# Measured steps towards an allowance, and towards the most heads that can be thinned out.
STEPS = 4
# Factors between measured and expected losses are kept within this: beyond, one of both is noise.
FACTOR = 30.0
# An allowance counts as used up from here on: another step would gain less than a measurement is worth.
CLOSE = 0.9
# Of an allowance, for bytes where a budget is given as well.
FOR_BYTES = 0.5

Measurement = Callable[[Sequence[LayerPlan]], Loss]


@dataclass
class Chosen:
    """A chosen plan with what was measured on the way. share: of the dense 16-bit cache at the profile's context."""

    layers: list[LayerPlan]
    loss: Loss
    size_bytes: int
    share: float
    is_uniform: bool = False
    rivals: list[tuple[str, float, float]] = field(default_factory=list)
    factors: tuple[float, ...] = (1.0, 1.0, 1.0)


def check_budget(profile: Profile, head_dim: int, budget: float) -> None:
    """Raises BudgetError when not even the smallest options of all groups keep the budget; nothing is measured."""
    units = priced(choices(profile), head_dim, profile.context, (1.0,) * len(KINDS))
    smallest = sum(min(option.size_bytes for option in unit) for unit in units)
    dense = _dense_bytes(profile, head_dim)
    if smallest > int(budget * dense):
        raise BudgetError(
            f"no plan takes {budget:g} of the KV cache at {profile.context} tokens: the smallest takes "
            f"{smallest / dense:.3f}; give at least `kv_budget` {smallest / dense + 0.0005:.3f}",
            smallest,
        )


def _dense_bytes(profile: Profile, head_dim: int) -> int:
    """Of the cache without a plan, in 16 bits; layers that slide hold their windows alone."""
    groups = profile.keys.shape[1]
    return groups * sum(dense_group_bytes(head_dim, profile.context, own) for own in profile.layer_windows)


class _Chooser:
    def __init__(
        self, profile: Profile, head_dim: int, measure: Measurement, factors: tuple[float, ...] | None
    ) -> None:
        self.profile, self.head_dim, self.measure = profile, head_dim, measure
        self.options = choices(profile)
        self.are_known = factors is not None
        self.factors = factors or (1.0,) * len(KINDS)
        self.dense_bytes = _dense_bytes(profile, head_dim)
        self._prices()

    def _prices(self) -> None:
        self.prices = priced(self.options, self.head_dim, self.profile.context, self.factors)

    def correct(self, chosen: Sequence[Choice]) -> None:
        """Factors from measuring each kind of loss of a plan alone, where they are not known."""
        if self.are_known:
            return
        factors = []
        for index, kind in enumerate(KINDS):
            only = [choice.of(kind) for choice in chosen]
            expected = sum(choice.losses[index] for choice in only)
            if expected <= 0:
                factors.append(self.factors[index])
                continue
            measured = self.measure(layers_of(only, self.profile)).mean
            factors.append(min(max(measured / expected, 1 / FACTOR), FACTOR))
        self.factors = tuple(factors)
        log.info("attention: measured / expected loss of %s: %.2g, %.2g, %.2g", ", ".join(KINDS), *factors)
        self._prices()

    def within(self, budget_bytes: int, exact: bool = True) -> list[Choice]:
        """The best choice within the bytes. Raises Infeasible."""
        found = allocate(self.prices, budget_bytes, exact)
        return [unit[i] for unit, i in zip(self.options, found.choice, strict=True)]

    def cheapest(self, loss: float) -> list[Choice]:
        """The choice of the fewest bytes that is expected to lose at most so much."""
        low, high = sum(min(o.size_bytes for o in unit) for unit in self.prices), self.dense_bytes
        while high - low > self.dense_bytes // 512:
            middle = (low + high) // 2
            if allocate(self.prices, middle, exact=False).loss <= loss:
                high = middle
            else:
                low = middle
        return self.within(high)

    def size(self, chosen: Sequence[Choice]) -> int:
        return sum(group_bytes(c.group, self.head_dim, self.profile.context) for c in chosen)

    def measured(self, chosen: Sequence[Choice], is_uniform: bool = False) -> Chosen:
        layers = layers_of(chosen, self.profile)
        size = self.size(chosen)
        loss = Loss(0.0, 0.0) if all(c.is_plain for c in chosen) else self.measure(layers)
        share = size / self.dense_bytes
        log.info("attention: %.3f of the dense cache, KLD %.5f +- %.5f", share, loss.mean, loss.error)
        return Chosen(layers, loss, size, share, is_uniform, factors=self.factors)

    def rivals(self, budget_bytes: int, most: float = math.inf) -> list[Chosen]:
        """The single settings within the bytes that are expected to lose least, measured; none that is expected to lose
        more than `most`."""
        found = []
        for same in uniforms(self.profile):
            size = self.size(same)
            loss = sum(f * v for c in same for f, v in zip(self.factors, c.losses, strict=True))
            if size <= budget_bytes and loss <= most:
                found.append((loss, size, same))
        best = sorted(found, key=lambda item: item[:2])[:RIVALS]
        return [self.measured(same, is_uniform=True) for _, _, same in best]


def choose(
    profile: Profile,
    head_dim: int,
    measure: Measurement,
    budget: float | None,
    allowed: float | None,
    factors: tuple[float, ...] | None = None,
) -> Chosen:
    """The plan with the least measured loss within `budget` (a share of the dense 16-bit cache), or the smallest whose loss
    on another text stays within `allowed` nats per token with 95 % confidence. With both it does both.

    factors: of measured to expected losses by KINDS, where they are known from another plan of the same profile.
    Raises BudgetError when no plan does.
    """
    if budget is None and allowed is None:
        raise ValueError("a cache plan needs a budget, an allowance or both")
    chooser = _Chooser(profile, head_dim, measure, factors)
    if budget is None:
        assert allowed is not None
        return _thinned(chooser, _allowed(chooser, allowed), allowed)
    check_budget(profile, head_dim, budget)
    if allowed is None:
        return _within(chooser, budget)
    return _thinned(chooser, _both(chooser, budget, allowed), allowed)


def _both(chooser: _Chooser, budget: float, allowed: float) -> Chosen:
    """A plan within the bytes and the allowance, with some of it left where the budget leaves room."""
    most = int(budget * chooser.dense_bytes)
    found = _allowed(chooser, FOR_BYTES * allowed, most)
    if found.size_bytes > most:
        found = _within(chooser, budget, allowed)
    if found.loss.upper > allowed:
        enough = chooser.size(chooser.cheapest(_expectation(chooser, found, allowed))) / chooser.dense_bytes
        forgets = ANSWERS * found.loss.answers >= found.loss.upper
        worse = (
            f"at answers to what is far back {found.loss.answers:.5f}, which counts {ANSWERS:g} times"
            if forgets
            else f"on another text up to {found.loss.upper:.5f}"
        )
        raise BudgetError(
            f"a KV cache of {budget:g} loses {found.loss.mean:.5f} +- {found.loss.error:.5f} nats, {worse}, {allowed:g} are "
            f"allowed: about `kv_budget` {enough:.2f} would hold that",
            int(enough * chooser.dense_bytes),
        )
    return found


def _within(chooser: _Chooser, budget: float, allowed: float = math.inf) -> Chosen:
    """What loses least within the bytes, of plans that hold an allowance where one does."""
    budget_bytes = int(budget * chooser.dense_bytes)
    first = chooser.within(budget_bytes)
    best = chooser.measured(first)
    chooser.correct(first)
    second = chooser.within(budget_bytes)
    if second != first:
        best = _least([best, chooser.measured(second)], allowed)
    return _best(best, chooser.rivals(budget_bytes), chooser.profile, allowed)


def _least(measured: Sequence[Chosen], allowed: float) -> Chosen:
    """What loses least on text; what loses more at answers, or elsewhere, than is allowed comes last."""
    return min(measured, key=lambda c: (c.loss.upper > allowed, c.loss.mean))


def _best(found: Chosen, rivals: Sequence[Chosen], profile: Profile, allowed: float) -> Chosen:
    """The plan, or the rival that is measured to lose less in no more bytes than were allowed."""
    best = _least([found, *rivals], allowed)
    best.rivals = [(_described(c, profile), c.share, c.loss.mean) for c in rivals]
    best.factors = found.factors
    return best


def _allowed(chooser: _Chooser, allowed: float, most: int | None = None) -> Chosen:
    """The smallest plan whose loss is within the allowance; steps by the ratio of measured to expected loss.

    Where it is larger than `most` bytes, some plan that is.
    """
    target = allowed / BEFORE
    chooser.correct(chooser.cheapest(target))
    best: Chosen | None = None
    for _ in range(STEPS):
        chosen = chooser.cheapest(target)
        found = chooser.measured(chosen)
        if found.loss.upper <= allowed and (best is None or found.size_bytes < best.size_bytes):
            best = found
        if found.loss.upper <= 0 or CLOSE * allowed <= found.loss.upper <= allowed:
            break
        if most is not None and best is None and found.size_bytes > most:
            return found
        target *= min(0.97 * _room(found.loss, allowed), FACTOR)
    if best is None:
        plain = [next(c for c in unit if c.is_plain) for unit in chooser.options]
        best = chooser.measured(plain)
    rivals = chooser.rivals(best.size_bytes, HOPELESS * best.loss.mean)
    smaller = [c for c in rivals if c.loss.upper <= allowed]
    return _best(best, smaller, chooser.profile, allowed)


def _expectation(chooser: _Chooser, found: Chosen, allowed: float) -> float:
    """The expected loss at which the measured one would be `allowed`, going by the ratio of a measured plan."""
    budget = int(found.share * chooser.dense_bytes) + 1
    expected = allocate(chooser.prices, budget, exact=False).loss
    return expected * _room(found.loss, allowed)


def _room(loss: Loss, allowed: float) -> float:
    """By which factor the mean loss may change for its upper bound to be the allowance, with error and ratio as they are."""
    with_error = max(allowed - 1.645 * loss.error, 0.1 * allowed)
    of_text = min(with_error, allowed / loss.ratio) / max(loss.mean, 1e-12)
    return min(of_text, allowed / max(ANSWERS * loss.answers, 1e-12))


def _thinned(chooser: _Chooser, found: Chosen, allowed: float) -> Chosen:
    """As many heads thinned out as the allowance holds: by what they are expected to lose, corrected by each measurement."""
    steps = thinnings(chooser.profile, found.layers)
    expected = list(itertools.accumulate(step.loss for step in steps))
    room = found.loss.mean * (_room(found.loss, allowed) - 1) if found.loss.mean else allowed / BEFORE
    ratio = chooser.factors[KINDS.index("ring")]
    low, high = 0, len(steps) + 1
    best = found
    for _ in range(STEPS):
        trial = min(max(bisect_right(expected, room / max(ratio, 1e-12)), low + 1), high - 1)
        if trial <= low or room <= 0:
            break
        layers = thinned(found.layers, steps[:trial])
        loss = chooser.measure(layers)
        log.info("attention: %d heads thinned out, KLD %.5f +- %.5f", trial, loss.mean, loss.error)
        ratio = (loss.mean - found.loss.mean) / max(expected[trial - 1], 1e-12)
        room = max(loss.mean * _room(loss, allowed) - found.loss.mean, 0.0)
        if loss.upper > allowed:
            high = trial
            continue
        low = trial
        best = Chosen(
            layers, loss, found.size_bytes, found.share, found.is_uniform, found.rivals, found.factors
        )
        if loss.upper >= CLOSE * allowed:
            break
    return best


def _described(chosen: Chosen, profile: Profile) -> str:
    """Of a single setting, as a layer that sees everything has it where there is one."""
    own = profile.layer_windows
    layer = own.index(0) if 0 in own else 0
    group = chosen.layers[layer].groups[0]
    ring = f", sink {group.sink} + window {group.recent}" if group.recent and not own[layer] else ""
    return f"keys {group.keys}, values {group.values}{ring}"
