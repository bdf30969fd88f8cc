"""The measured local search: moves of bytes between tensors, accepted only when the measured loss says so.

The moves come in a fixed order: the weights of whole classes of tensors, then of blocks of layers, then pairs of
single tensors. What a move is depends on what was accepted before it, never on the clock: the clock only says where
the sequence ends. Every comparison is paired, on the same windows.
"""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nstf_convert.pipeline.allocate import plan as plans
from nstf_convert.pipeline.improve.run import Run
from nstf_convert.pipeline.mix import Measured
from nstf_convert.pipeline.outcome import Planned, SearchFacts, Trial
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.table import is_slow, key_of
from nstf_convert.pipeline.propose.units import Unit
from nstf_convert.planner import Option, lower_hull
from nstf_convert.report.build import layer_of

log = logging.getLogger("nstf")

# Factors on a class's or a block's expected losses.
CLASS_FACTOR = 1.6
BLOCK_FACTOR = 1.4
BLOCKS = 24
# Standard errors by which a paired gain must exceed zero, and a domain may seem to lose.
CONFIDENCE = 1.0
# Without a wish of the user: no move that encodes more than this share of the weights by a slow method.
SLOW_SHARE = 0.05
# Tensors whose next step up is tried, by expected loss.
SINGLES = 64


@dataclass
class _State:
    """Where the search is. weights: factors on single tensors' expected losses that the best mix was planned with."""

    best: Trial
    weights: dict[str, float] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    moves: list[dict[str, Any]] = field(default_factory=list)
    slowest_measure: float = 0.0


def search(run: Run, start: Trial, budget_bytes: int) -> tuple[Trial, dict[str, float], SearchFacts]:
    """The best mix found within the options' time or steps, the factors on single tensors' expected losses that it was
    planned with, and what was done."""
    options = run.session.options
    minutes, steps = options.search_limits or (None, 0)
    default = options.search_minutes is None and options.search_steps is None
    facts = SearchFacts(minutes, steps)
    state = _State(start, seen={_mix_key(start.planned)})
    begin = time.perf_counter()
    ended = "no moves are left"
    with run.session.stages.stage("search"):
        for planned, weights in _moves(run, state, budget_bytes):
            if default and _slow_share(run, planned) > SLOW_SHARE:
                continue
            stop = _stop(run, state, planned, facts, time.perf_counter() - begin)
            if stop:
                ended = stop
                break
            _try(run, state, planned, weights)
    accepted = sum(bool(m["accepted"]) for m in state.moves)
    seconds = time.perf_counter() - begin
    done = replace(
        facts,
        steps=len(state.moves),
        accepted=accepted,
        seconds=seconds,
        ended=ended,
        moves=tuple(state.moves),
    )
    log.info("search: %d moves tried, %d accepted, %s", done.steps, accepted, ended)
    return state.best, state.weights, done


def gain(before: Measured, after: Measured) -> tuple[float, float, dict[str, tuple[float, float]]]:
    """(mean gain, its standard error, the same by domain) of `after` over `before` on the same windows.

    Positive is better. Domains count the same; a domain of one window has no error of its own.
    """
    by_domain: dict[str, list[float]] = {}
    for a, b, domain in zip(before.windows, after.windows, before.domains, strict=True):
        by_domain.setdefault(domain, []).append(a - b)
    found = {d: _mean_error(v) for d, v in sorted(by_domain.items())}
    average = sum(m for m, _ in found.values()) / len(found)
    error = math.sqrt(sum(e * e for _, e in found.values())) / len(found)
    return average, error, found


def better(before: Measured, after: Measured) -> bool:
    """Whether the gain is above its noise, and no domain loses by more than its own."""
    if not math.isfinite(after.score):
        return False
    average, error, domains = gain(before, after)
    return average > CONFIDENCE * error and all(m >= -CONFIDENCE * e for m, e in domains.values())


def _mean_error(values: Sequence[float]) -> tuple[float, float]:
    average = sum(values) / len(values)
    if len(values) < 2:
        return average, 0.0
    return average, math.sqrt(sum((v - average) ** 2 for v in values) / (len(values) - 1) / len(values))


def _stop(run: Run, state: _State, planned: Planned, facts: SearchFacts, seconds: float) -> str:
    """Why the next move must not begin, or an empty string."""
    if facts.steps_allowed is not None and len(state.moves) >= facts.steps_allowed:
        return "steps"
    if facts.minutes is None:
        return ""
    wanted = run.seconds_to_encode(planned.mix) + state.slowest_measure
    return "time" if seconds + wanted > 60.0 * facts.minutes else ""


def _slow_share(run: Run, planned: Planned) -> float:
    """The share of the weights that a slow method would have to encode first."""
    sizes = {n: run.session.units[n].elements for n in planned.mix}
    slow = [sizes[n] for n, r in planned.mix.items() if is_slow(r) and run.true_loss(n, r) is None]
    return sum(slow) / max(1, sum(sizes.values()))


def _try(run: Run, state: _State, planned: Planned, weights: dict[str, float]) -> None:
    state.seen.add(_mix_key(planned))
    run.encode(planned)
    begin = time.perf_counter()
    trial = run.measure(planned)
    state.slowest_measure = max(state.slowest_measure, time.perf_counter() - begin)
    won, error, _ = gain(state.best.measured, trial.measured)
    accepted = better(state.best.measured, trial.measured)
    state.moves.append(
        {"move": planned.label, "gain": won, "error": error, "accepted": accepted, "score": trial.score}
    )
    if accepted:
        state.best, state.weights = trial, weights


def _moves(run: Run, state: _State, budget_bytes: int) -> Iterator[tuple[Planned, dict[str, float]]]:
    """Every plan worth a measurement, in order; the caller updates `state` before the next is asked for."""
    units = [run.session.units[n] for n in run.table.candidates]
    classes: dict[str, list[str]] = {}
    for unit in units:
        classes.setdefault(class_of(unit), []).append(unit.name)
    blocks = blocks_of(units)
    for members_of, factor in ((classes, CLASS_FACTOR), (blocks, BLOCK_FACTOR)):
        # The heaviest first: their share of the loss is what a wrong weight costs.
        order = sorted(members_of, key=lambda n: (-_loss_of(run, state, members_of[n]), n))
        if len(order) > 1:
            for name in order:
                yield from _reweighted(run, state, budget_bytes, name, members_of[name], factor)
    yield from _singles(run, state, budget_bytes)


def _reweighted(
    run: Run, state: _State, budget_bytes: int, name: str, members: Sequence[str], factor: float
) -> Iterator[tuple[Planned, dict[str, float]]]:
    """Plans with a group's losses counted more, or less; the direction that was accepted is tried once more."""
    for step in (factor, 1.0 / factor):
        accepted = 0
        while accepted < 2:
            weights = {**state.weights, **{n: state.weights.get(n, 1.0) * step for n in members}}
            planned = run.plan(budget_bytes, weights)
            if _mix_key(planned) in state.seen:
                break
            before = state.best
            yield replace(planned, label=f"mix, {name} x{step:.2g}"), weights
            if state.best is before:
                break
            accepted += 1
        if accepted:
            return


def _singles(run: Run, state: _State, budget_bytes: int) -> Iterator[tuple[Planned, dict[str, float]]]:
    """Plans with one tensor a step up, and those that lose least by it a step down to pay for it."""
    order = sorted(state.best.planned.mix, key=lambda n: (-_loss_of(run, state, [n]), n))
    for name in order[:SINGLES]:
        planned = _swapped(run, state.best.planned, name, budget_bytes)
        if planned is not None and _mix_key(planned) not in state.seen:
            yield planned, state.weights


def _swapped(run: Run, planned: Planned, name: str, budget_bytes: int) -> Planned | None:
    """The plan with `name` one step up its hull, paid for by the steps down that cost least per byte."""
    up = _neighbour(run, name, planned.mix[name], +1)
    if up is None:
        return None
    mix = {**planned.mix, name: up[0]}
    needed = up[1] - (budget_bytes - planned.size_bytes)
    payers = []
    for other, recipe in planned.mix.items():
        down = _neighbour(run, other, recipe, -1) if other != name else None
        if down is not None:
            payers.append((down[2] / -down[1], other, down))
    payers.sort(key=lambda p: p[:2])
    for _, other, down in payers:
        if needed <= 0:
            break
        mix[other] = down[0]
        needed += down[1]
    size = plans.exact_size(run.session, mix, run.meta.widest())
    if needed > 0 or size > budget_bytes or not run.fast_enough(mix, budget_bytes):
        return None
    return Planned(mix, plans.expected_loss(run.table, mix), size, f"mix, {name} up")


def _neighbour(run: Run, name: str, recipe: Recipe, step: int) -> tuple[Recipe, int, float] | None:
    """(recipe, bytes more, loss more) of the next option on a tensor's hull, or None at its end."""
    if name in run.table.fused:
        return None
    found = run.usable(run.table.candidates[name])
    options = [c for c in found if c.exact or c.recipe.family in ("quantised", "dense")]
    now = next((c for c in options if c.recipe == recipe), None)
    hull = [options[i] for i in lower_hull([Option(c.size_bytes, c.loss) for c in options])]
    if now is None:
        return None
    beyond = [c for c in hull if (c.size_bytes - now.size_bytes) * step > 0]
    if not beyond:
        return None
    next_one = min(beyond, key=lambda c: abs(c.size_bytes - now.size_bytes))
    return next_one.recipe, next_one.size_bytes - now.size_bytes, next_one.loss - now.loss


def _loss_of(run: Run, state: _State, members: Sequence[str]) -> float:
    total = 0.0
    for name in members:
        found = run.table.find(name, state.best.planned.mix[name])
        total += found.loss if found is not None else 0.0
    return total


def _mix_key(planned: Planned) -> str:
    return "|".join(f"{n}={key_of(r)}" for n, r in sorted(planned.mix.items()))


def class_of(unit: Unit) -> str:
    """The tensors whose losses the model misjudges alike: tables, attention, feed-forward, other roles by name."""
    if "embedding" in unit.uses or "head" in unit.uses:
        return "table"
    if unit.role in ("gate", "up", "down", "gate_up", "expert_stack"):
        return "feed-forward"
    if unit.role in ("q", "k", "v", "o", "qkv"):
        return "attention"
    return unit.role


def blocks_of(units: Sequence[Unit], most: int = BLOCKS) -> dict[str, list[str]]:
    """Names of tensors by class and third of the model's depth; by class alone where that gives more than `most`."""
    depth = 1 + max((layer_of(u.name) or 0 for u in units), default=0)

    def third(unit: Unit) -> str:
        layer = layer_of(unit.name)
        if layer is None:
            return ""
        part = 3 * layer // depth
        first, last = -(-part * depth // 3), -(-(part + 1) * depth // 3) - 1
        return f", layers {first}-{last}" if first < last else f", layer {first}"

    for scheme in (lambda u: u.role + third(u), lambda u: class_of(u) + third(u), class_of):
        members: dict[str, list[str]] = {}
        for unit in sorted(units, key=lambda u: u.name):
            members.setdefault(scheme(unit), []).append(unit.name)
        if len(members) <= most:
            break
    return dict(sorted(members.items()))
