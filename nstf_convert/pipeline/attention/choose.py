"""A budget for the KV cache to a plan: expected losses choose, measurements correct and decide.

1. Hulls, multiplier and exact program over the options of all KV groups, as for weights (nstf_convert.planner).
2. What is expected of keys, values and rings is compared with what each alone is measured to lose, and the plan is
   made again with these factors: quantised keys cost more, and rings less, than a second-order estimate says.
3. The best single settings of the same bytes are measured; a plan that loses to one of them is replaced by it.
4. With an allowance, heads of full groups are thinned out for speed, as many as still hold it.
5. Where a plan for an allowance loses more at answers to what is hidden far back than on text, options are priced by what
   they are expected to lose at both, so that both are about equal: groups that look far back keep more, others less.

An allowance is for another text than those that choose, and for answers to what is hidden far back: what counts is
Loss.upper (measured.py). Where a budget is given too, it is a limit: half of the allowance is for fewer bytes, which make
decoding faster, and the rest for fewer keys of a prompt's queries.
"""

import itertools
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

from nstf.errors import BudgetError
from nstf.runtime.kv_formats import group_bytes
from nstf_convert.pipeline.attention.chooser import (
    FACTOR,
    TINY,
    Chooser,
    Chosen,
    Measurement,
    dense_cache_bytes,
)
from nstf_convert.pipeline.attention.measured import ANSWERS, Loss
from nstf_convert.pipeline.attention.options import (
    choices,
    thinned,
    thinnings,
)
from nstf_convert.pipeline.attention.profile import Profile

log = logging.getLogger("nstf")

# One setting in place of the smallest plan for an allowance is measured if it is expected to lose at most so much more.
HOPELESS = 4.0
# The first plan for an allowance is expected to lose this much less: about what another text may lose more (Loss.ratio).
BEFORE = 2.0
# Measured steps towards an allowance, and towards the most heads that can be thinned out.
STEPS = 4
# An allowance counts as used up from here on: another step would gain less than a measurement is worth.
CLOSE = 0.9
# Of an allowance, for bytes where a budget is given as well.
FOR_BYTES = 0.5


def check_budget(profile: Profile, head_dim: int, budget: float) -> None:
    """Raises BudgetError when not even the smallest options of all groups keep the budget; nothing is measured."""
    smallest = sum(
        min(group_bytes(choice.group, head_dim, profile.context) for choice in unit)
        for unit in choices(profile)
    )
    dense = dense_cache_bytes(profile, head_dim)
    if smallest > int(budget * dense):
        raise BudgetError(
            f"no plan takes {budget:g} of the KV cache at {profile.context} tokens: the smallest takes "
            f"{smallest / dense:.3f}; give at least `kv_budget` {smallest / dense + 0.0005:.3f}",
            smallest,
        )


def choose(
    profile: Profile,
    head_dim: int,
    measure: Measurement,
    budget: float | None,
    allowed: float | None,
    factors: tuple[float, ...] | None = None,
    at_answers: Callable[[], Profile] | None = None,
) -> Chosen:
    """The plan with the least measured loss within `budget` (a share of the dense 16-bit cache), or the smallest whose loss
    on another text stays within `allowed` nats per token with 95 % confidence. With both it does both.

    factors: of measured to expected losses by KINDS, where they are known from another plan of the same profile.
    at_answers: makes the profile of what options lose at answers; called once, where those are what an allowance hangs on.
    Raises BudgetError when no plan does.
    """
    if budget is None and allowed is None:
        raise ValueError("a cache plan needs a budget, an allowance or both")
    chooser = Chooser(profile, head_dim, measure, factors, at_answers)
    if budget is None:
        assert allowed is not None
        return _thinned(chooser, _allowed(chooser, allowed), allowed)
    check_budget(profile, head_dim, budget)
    if allowed is None:
        return _within(chooser, budget)
    return _thinned(chooser, _both(chooser, budget, allowed), allowed)


def _both(chooser: Chooser, budget: float, allowed: float) -> Chosen:
    """A plan within the bytes and the allowance, with some of it left where the budget leaves room."""
    most = int(budget * chooser.dense_bytes)
    found = _allowed(chooser, FOR_BYTES * allowed, most)
    if found.size_bytes > most:
        found = _within(chooser, budget, allowed)
    if found.loss.upper > allowed:
        enough = chooser.size(chooser.cheapest(_expectation(chooser, found, allowed))) / chooser.dense_bytes
        forgets = found.loss.of_answers >= found.loss.of_text
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


def _within(chooser: Chooser, budget: float, allowed: float = math.inf) -> Chosen:
    """What loses least within the bytes, of plans that hold an allowance where one does."""
    budget_bytes = int(budget * chooser.dense_bytes)
    first = chooser.within(budget_bytes)
    best = chooser.measured(first)
    chooser.correct(first)
    last, chosen = best, first
    again = chooser.within(budget_bytes)
    for _ in range(STEPS):
        if [c.group for c in again] == [c.group for c in chosen]:
            break
        found = chooser.measured(again)
        best = _least([best, found], allowed)
        if math.isfinite(found.loss.upper):  # the others say nothing
            last, chosen = found, again
        if best.loss.upper <= allowed or not chooser.heed_answers(chosen, last.loss):
            break
        again = chooser.within(budget_bytes)
    return _best(best, chooser.rivals(budget_bytes), chooser.profile, allowed)


def _least(measured: Sequence[Chosen], allowed: float) -> Chosen:
    """What loses least on text; what may lose more than is allowed, at answers or elsewhere, comes last."""
    return min(measured, key=lambda c: (c.loss.upper if c.loss.upper > allowed else 0.0, c.loss.mean))


def _best(found: Chosen, rivals: Sequence[Chosen], profile: Profile, allowed: float) -> Chosen:
    """The plan, or the rival that is measured to lose less in no more bytes than were allowed."""
    best = _least([found, *rivals], allowed)
    best.rivals = [(_described(c, profile), c.share, c.loss.mean) for c in rivals]
    best.factors = found.factors
    return best


def _allowed(chooser: Chooser, allowed: float, most: int | None = None) -> Chosen:
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
        is_first = chooser.answers is None
        heeds = chooser.heed_answers(chosen, found.loss)
        if not (heeds and is_first):
            if found.loss.upper <= 0 or CLOSE * allowed <= found.loss.upper <= allowed:
                break
            if most is not None and best is None and found.size_bytes > most:
                return found
        # Prices that heed answers are what counts against the allowance.
        target = 0.97 * allowed if heeds else target * min(0.97 * _room(found.loss, allowed), FACTOR)
    if best is None:
        plain = [next(c for c in unit if c.is_plain) for unit in chooser.options]
        best = chooser.measured(plain)
    rivals = chooser.rivals(best.size_bytes, HOPELESS * best.loss.mean)
    smaller = [c for c in rivals if c.loss.upper <= allowed]
    return _best(best, smaller, chooser.profile, allowed)


def _expectation(chooser: Chooser, found: Chosen, allowed: float) -> float:
    """The expected loss at which the measured one would be `allowed`, going by the ratio of a measured plan."""
    budget = int(found.share * chooser.dense_bytes) + 1
    expected = max(chooser.expected(chooser.within(budget, exact=False)))
    return expected * _room(found.loss, allowed)


def _room(loss: Loss, allowed: float) -> float:
    """By which factor the mean loss may change for its upper bound to be the allowance, with error and ratio as they are."""
    with_error = max(allowed - 1.645 * loss.error, 0.1 * allowed)
    of_text = min(with_error, allowed / loss.ratio) / max(loss.mean, TINY)
    return min(of_text, allowed / max(loss.of_answers, TINY))


def _thinned(chooser: Chooser, found: Chosen, allowed: float) -> Chosen:
    """As many heads thinned out as the allowance holds: by what they are expected to lose, corrected by each measurement."""
    heeds = chooser.answers is not None
    text, told = chooser.weights
    weights = text * chooser.factors.ring, told * chooser.answer_factors.ring
    steps = thinnings(chooser.profile, found.layers, chooser.answers, weights)
    expected = list(itertools.accumulate(step.loss for step in steps))

    def counted(loss: Loss) -> float:
        """In the unit of `expected`."""
        return loss.upper if heeds else loss.mean

    def most(loss: Loss) -> float:
        return allowed if heeds else loss.mean * _room(loss, allowed)

    room = most(found.loss) - counted(found.loss) if found.loss.mean else allowed / BEFORE
    ratio = 1.0 if heeds else chooser.factors.ring
    low, high = 0, len(steps) + 1
    best = found
    for _ in range(STEPS):
        trial = min(max(bisect_right(expected, room / max(ratio, TINY)), low + 1), high - 1)
        if trial <= low or room <= 0:
            break
        layers = thinned(found.layers, steps[:trial])
        loss = chooser.measure(layers)
        log.info("attention: %d heads thinned out, KLD %.5f +- %.5f", trial, loss.mean, loss.error)
        ratio = (counted(loss) - counted(found.loss)) / max(expected[trial - 1], TINY)
        room = max(most(loss) - counted(found.loss), 0.0)
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
