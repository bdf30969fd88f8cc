"""Plans within a bound on time: what the options' preference and least speed come to in seconds at a budget."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nstf.errors import BudgetError
from nstf_convert.pipeline.allocate import plan as plans
from nstf_convert.pipeline.allocate.timing import (
    BALANCE,
    PLAIN,
    Bound,
    Timing,
    fastest,
    only,
    too_slow,
)
from nstf_convert.pipeline.outcome import Planned
from nstf_convert.pipeline.propose.table import Table
from nstf_convert.planner import TooSlow

# The yardstick of `balance` may be expected to lose so many times what the best int or grid file of these bytes loses. That
# one takes widths that are slow to unpack, 5 bits to 7, for the last of the loss: with AVX2 at 1.6 times the time of 4 bits.
# With 2 a small model lost all trellis codes where they are fast; with 2.5 a file for two targets did not keep both bounds.
SLACK = 1.5
# Of two sets of options the one that loses so many times what the other does is not planned to the last byte: that buys
# less than a hundredth.
CLOSE = 1.02
# Halvings of the time that `speed` looks for: its bound is within a hundredth of the least.
_HALVINGS = 6


def plan(
    timing: Timing,
    table: Table,
    budget_bytes: int,
    meta: Mapping[str, Any],
    weights: Mapping[str, float] | None,
    exact: bool,
) -> Planned:
    """The plan within the bytes and the seconds that the options allow. Raises BudgetError.

    The yardstick of `balance` is a plan of few formats; where headers leave no room for a better one, it is the plan.
    """
    session = timing.session
    allowed = bound(timing, table, budget_bytes, meta)
    if allowed is None:
        return plans.plan_mix(session, table, budget_bytes, meta, weights, exact)
    found, fastest_seconds, impossible = [], math.inf, []
    tables = _tables(timing, table)

    def planned(one: Table, to_the_end: bool) -> Planned:
        return plans.plan_mix(
            session,
            one,
            budget_bytes,
            meta,
            weights,
            to_the_end,
            timing.seconds,
            allowed.seconds,
            timing.saved,
        )

    for one in tables:
        try:
            found.append((planned(one, exact and len(tables) == 1), one))
        except TooSlow as error:
            fastest_seconds = min(fastest_seconds, error.fastest_seconds)
        except BudgetError as error:
            impossible.append(error)
    if found:
        least = min(p.expected_loss for p, _ in found)
        if exact and len(tables) > 1:
            found = [(planned(one, True), one) for p, one in found if p.expected_loss <= CLOSE * least]
        return min((p for p, _ in found), key=lambda p: p.expected_loss)
    if len(impossible) == len(tables):
        raise impossible[0]
    asked = session.options.min_speed
    plain = only(table, PLAIN)
    if plain is not None:
        reference = plans.plan_mix(session, plain, budget_bytes, meta, weights, exact)
        wanted = _asked(timing, table, budget_bytes, meta)
        if wanted is None or timing.of(reference.mix) <= wanted.seconds:
            return reference
    raise too_slow(str(asked), fastest_seconds, timing, budget_bytes)


def _tables(timing: Timing, table: Table) -> list[Table]:
    """The table, and on GPUs one whose tensors are stored alike where they may run as one: they save launches, and have
    less choice."""
    return [table, replace(table, fused=timing.groups)] if timing.groups and not table.fused else [table]


def bound(timing: Timing, table: Table, budget_bytes: int, meta: Mapping[str, Any]) -> Bound | None:
    """The seconds that a token's products may take at a budget; None where nothing bounds them.

    Found once for a budget: what is learned of losses later moves no bound. Raises BudgetError for a speed that no file of
    these bytes has.
    """
    if budget_bytes not in timing.bounds:
        found = [_preferred(timing, table, budget_bytes, meta), _asked(timing, table, budget_bytes, meta)]
        timing.bounds[budget_bytes] = min(
            (b for b in found if b is not None), key=lambda b: b.seconds, default=None
        )
    return timing.bounds[budget_bytes]


def _preferred(timing: Timing, table: Table, budget_bytes: int, meta: Mapping[str, Any]) -> Bound | None:
    """The bound of `--prefer`; None for `size`, and where no int or grid file is so small."""
    session, plain = timing.session, only(table, PLAIN)
    if timing.prefer == "size" or plain is None:
        return None
    try:
        reference = plans.plan_mix(session, plain, budget_bytes, meta, exact=False)
    except BudgetError:
        return None
    high = timing.of(reference.mix)
    if timing.prefer == "balance":
        most = SLACK * reference.expected_loss
        seconds = _least_seconds(timing, plain, budget_bytes, meta, most, high)
        return Bound(seconds / BALANCE, f"{BALANCE:g} of the speed of an int or grid file of this size")
    single = plans.uniforms(session, table, budget_bytes, meta)
    losses = [p.expected_loss for p in single if next(iter(p.mix.values())).method in PLAIN]
    most = max(min(losses, default=reference.expected_loss), reference.expected_loss)
    seconds = _least_seconds(timing, table, budget_bytes, meta, most, high)
    return Bound(seconds, "the fastest that loses no more than one int or grid format for all")


def _least_seconds(
    timing: Timing, table: Table, budget_bytes: int, meta: Mapping[str, Any], most: float, high: float
) -> float:
    """The least time at which a plan of a table is expected to lose no more than `most`, without the launches that it saves.
    high: a time that is enough."""
    tables = _tables(timing, table)

    def is_enough(seconds: float, one: Table) -> bool:
        try:
            found = plans.plan_mix(
                timing.session, one, budget_bytes, meta, None, False, timing.seconds, seconds, timing.saved
            )
        except (TooSlow, BudgetError):
            return False
        return found.expected_loss <= most

    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        good = any(is_enough(middle, one) for one in tables)
        low, high = (low, middle) if good else (middle, high)
    return high


def _asked(timing: Timing, table: Table, budget_bytes: int, meta: Mapping[str, Any]) -> Bound | None:
    """The bound of `--min-speed`. Raises BudgetError where it leaves no time at all."""
    session, asked = timing.session, timing.session.options.speed_asked
    if asked is None:
        return None
    kind, value = asked
    if kind == "times":
        least = fastest(plans.uniforms(session, table, budget_bytes, meta), timing)
        if least is None:
            return None
        return Bound(least / value, f"{value:g} times the fastest single format of these bytes")
    # Every target must be that fast; the planner's seconds are the first one's.
    each = [timing.token.products(t, value) for t in timing.targets]
    if len(each) > 1:
        common = timing.common_seconds()
        each = [s / c * common[0] for s, c in zip(each, common, strict=True)]
    seconds = min(each)
    if seconds <= 0:
        raise too_slow(str(session.options.min_speed), 0.0, timing, budget_bytes)
    return Bound(seconds, f"{value:g} tokens a second")
