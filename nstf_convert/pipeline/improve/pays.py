"""Structure that pays: what a plan with decompositions measures decides whether it keeps them, and how the next is planned.
Where they are expected to save next to nothing they are left before that.

Expected losses know how much directions matter from the calibration alone. A decomposition leaves whole directions out, and
what seemed to matter least there is what a sample says least about: beside integers its expected loss is too small, by a
factor that only a measurement tells (5.5 on a trained ResNet-18, docs/convolutions.md).

Where bytes alone count the measured factor adapts ranks: the plan is made again with it, neighbouring ranks are worked out
at the price that it leaves of a byte, and what measures best is kept. Where a file is to be fast, its mix has to lose no
more than the single format that its bound on time was made from. One that loses more is planned again with the expected
losses of decompositions times the factor that was measured: the plan then takes less of them and is slower, and its promise
is likelier to hold. Where healing was asked for, both sides are healed for a share of the time before they are compared: it
gives structure back more than it gives integers.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from nstf.errors import BudgetError
from nstf_convert.pipeline.allocate import plan as plans
from nstf_convert.pipeline.allocate.timing import PLAIN
from nstf_convert.pipeline.heal.heal import heal
from nstf_convert.pipeline.improve.run import Run
from nstf_convert.pipeline.outcome import Planned, Trial
from nstf_convert.pipeline.propose.recipe import Recipe

log = logging.getLogger("nstf")

# The share of the expected loss, or of a token's time, that decompositions have to save before they are encoded, and
# measured beside the plan without them.
WORTH = 0.02
# Plans with decompositions that are measured, the first one among them.
ROUNDS = 6
# What is added to a measured factor: a plan uses up all that its promise leaves.
MARGIN = 1.1
# A mix that keeps its promise is planned once more with a smaller factor where it loses less than this share of it.
SLACK = 0.6
# Where bytes alone count: decompositions that lose between so many times what is expected and one over it keep their ranks;
# plans that are made and measured otherwise, at most; and the factors that one measurement is believed.
TOLERANCE = 1.25
# Those that have less than this share of a mix's expected loss cannot be told from the noise of a measurement.
NOTICED = 0.05
RANK_ROUNDS = 2
BELIEVED = 8.0
# The share of the healing that decides.
SHORT = 1 / 3


@dataclass(frozen=True)
class Round:
    """One mix with decompositions and what became of it. factor: what their expected losses were times; seconds: of a
    token's (an image's) products, as predicted (None where bytes alone count); score: measured, promise: of the single
    format (of the plan without decompositions), both after `steps` of healing (None: not healed)."""

    factor: float
    size_bytes: int
    seconds: float | None
    score: float
    promise: float
    healed_steps: int | None
    kept: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def worth_structure(run: Run, planned: Planned, budget_bytes: int) -> tuple[Planned, Planned | None]:
    """(a plan, or the one without decompositions where they are expected to save too little: then no further plan takes
    any; the plan without them, where it was made).

    Not where all the effort is wanted, nor where a file is to be fast: there they save time rather than loss.
    """
    speed = run.timing is not None and run.timing.prefer == "speed"
    if not decomposed(planned.mix) or run.session.options.level.every_family or speed:
        return planned, None
    try:
        with run.session.stages.stage("plan"):
            plain = run.without_structure(budget_bytes)
    except BudgetError:
        return planned, None  # nothing else is small enough
    lost = plain.expected_loss / max(planned.expected_loss, 1e-300) - 1.0
    # Where bytes alone count nothing depends on how fast kernels were measured to be.
    timing = run.timing if run.timing is not None and run.timing.bounds_time else None
    slower = 0.0 if timing is None else timing.of(plain.mix) / timing.of(planned.mix) - 1.0
    log.info("without decompositions: %+.1f %% of expected loss, %+.1f %% of time", 100 * lost, 100 * slower)
    if max(lost, slower) > WORTH:
        return planned, plain
    run.plain_only = True
    return replace(plain, label=planned.label), None


def structure_that_pays(
    run: Run,
    mix: Trial,
    budget_bytes: int,
    last_steps: Callable[[Planned], Trial] | None = None,
    plain: Planned | None = None,
) -> Trial:
    """A mix, one planned again, or the plan without decompositions where that measures better by the same last steps: then
    no further plan takes any. last_steps: what the mix went through (None: `Run.encoded`).

    A plan without them that is not as fast as `speed` asks is no rival: there the single format of the bound decides.
    """
    if not decomposed(mix.planned.mix):
        return mix
    steps = last_steps or run.encoded
    try:
        with run.session.stages.stage("plan"):
            plain = plain or run.without_structure(budget_bytes)
    except BudgetError:
        return mix  # nothing else is small enough
    single = None if run.fast_enough(plain.mix, budget_bytes) else _yardstick(run, budget_bytes)
    if single is None:
        trial = steps(replace(plain, label="mix without decompositions"))
        mix = _ranks_as_measured(run, mix, trial, steps, budget_bytes)
        run.plain_only = trial.score < mix.score  # within the time that it was planned for
        return trial if run.plain_only else mix
    kept = _keeping(run, mix, steps, steps(single), budget_bytes)
    if kept is not None:
        return kept
    run.leave_structure()
    return steps(replace(run.plan(budget_bytes), label="mix without decompositions"))


def _ranks_as_measured(
    run: Run, mix: Trial, plain: Trial, steps: Callable[[Planned], Trial], budget_bytes: int
) -> Trial:
    """A mix, or one planned again by what its decompositions lose beside those formats of the plan without them: ranks grow
    while they buy more there than the same bytes do elsewhere, and shrink, or leave, where they lose more. What measures
    best is kept, and with it the factor that it was planned with."""
    best, now, kept = mix, mix, run.factor
    for left in reversed(range(RANK_ROUNDS + 1)):
        beaten = not now.score <= plain.score
        run.rounds.append(
            Round(run.factor, now.planned.size_bytes, None, now.score, plain.score, None, not beaten)
        )
        if now.score < best.score:
            best, kept = now, run.factor
        found = _measured_factor(run, now, now.score, plain, plain.score)
        if not left or not math.isfinite(found) or _share(run, now) < NOTICED:
            break
        found = min(max(found, run.factor / BELIEVED), run.factor * BELIEVED)
        if 1 / TOLERANCE <= found / run.factor <= TOLERANCE:
            break
        run.take_factor(found)
        planned = replace(run.plan(budget_bytes), label="mix, ranks as measured")
        if not decomposed(planned.mix) or planned.mix == now.planned.mix:
            break
        now = steps(planned)
    run.take_factor(kept)
    return best


def _share(run: Run, mix: Trial) -> float:
    """The share of what a mix is expected to lose that its decompositions have."""
    parts = {n: r for n, r in mix.planned.mix.items() if r.family == "decomposed"}
    whole = plans.expected_loss(run.scaled(run.table), mix.planned.mix)
    return plans.expected_loss(run.scaled(run.table), parts) / max(whole, 1e-300)


def decomposed(mix: Mapping[str, Recipe]) -> bool:
    """Whether a mix has decompositions."""
    return any(r.family == "decomposed" for r in mix.values())


def _keeping(
    run: Run, mix: Trial, steps: Callable[[Planned], Trial], single: Trial, budget_bytes: int
) -> Trial | None:
    """The fastest of some mixes that loses no more than the single format, or None."""
    assert run.timing is not None
    promise, healed = _decisive(run, single)
    together = healed is not None
    # Of factors: the largest that broke the promise, the least that kept it.
    low, high = run.factor, math.inf
    best: Trial | None = None
    for left in reversed(range(ROUNDS)):
        score, healed = _decisive(run, mix) if together else (mix.score, None)
        if (
            together and healed is None
        ):  # no memory for healing this one: from here on all are compared as they are
            together, promise = False, single.score
        kept = score <= promise
        seconds = run.timing.of(mix.planned.mix)
        run.rounds.append(Round(run.factor, mix.planned.size_bytes, seconds, score, promise, healed, kept))
        log.info(
            "%s: %.6g, the single format %.6g; decompositions were expected to lose %.3g times as much",
            mix.planned.label, score, promise, run.factor,
        )  # fmt: skip
        if kept:
            high, best = run.factor, mix
        else:
            low = run.factor
        enough = kept and (run.factor == 1.0 or _loss(run, score) > SLACK * _loss(run, promise))
        if enough or not left:
            break
        found = MARGIN * _measured_factor(run, mix, score, single, promise)
        if not math.isfinite(found):  # a score that is NaN
            break
        run.take_factor(math.sqrt(low * high) if best else max(found, MARGIN * low))
        planned = replace(run.plan(budget_bytes), label="mix, planned again")
        if not decomposed(planned.mix) or planned.mix == mix.planned.mix:
            break
        mix = steps(planned)
    if best is not None:
        run.take_factor(high)
    return best


def _measured_factor(run: Run, mix: Trial, score: float, single: Trial, promise: float) -> float:
    """How many times what is expected of them the decompositions of a mix lose, where the single format loses what is
    expected of it, and so do the other tensors of the mix."""
    parts = {n: r for n, r in mix.planned.mix.items() if r.family == "decomposed"}
    rest = {n: r for n, r in mix.planned.mix.items() if n not in parts}
    whole = plans.expected_loss(run.table, single.planned.mix) * _loss(run, score) / _loss(run, promise)
    own = plans.expected_loss(run.table, parts)
    return (whole - plans.expected_loss(run.table, rest)) / max(own, 1e-300)


def _loss(run: Run, score: float) -> float:
    """A score in the unit of expected losses: of models that are no language models it is a root of squares."""
    file = run.session.calibration
    return max(score if file is None or file.metadata["language"] else score * score, 1e-300)


def _decisive(run: Run, trial: Trial) -> tuple[float, int | None]:
    """(the score that decides about a mix, steps of healing before it)."""
    session, options = run.session, run.session.options
    if not options.heals:
        return trial.score, None
    given = None if options.heal_steps is None else max(1, round(SHORT * options.heal_steps))
    try:
        with session.stages.stage("heal"):
            tuned = heal(
                session, trial.planned.mix, SHORT * options.heal_minutes, trial.load, trial.measured, given
            )
    except torch.OutOfMemoryError:
        log.warning("healing: the GPU has too little memory for this model; mixes are compared as they are")
        return trial.score, None
    return tuned.after.score, tuned.facts["steps"]


def _yardstick(run: Run, budget_bytes: int) -> Planned | None:
    """The single format that files which are to be fast lose no more than; None where another preference bounds time."""
    if run.timing is None or run.timing.prefer != "speed":
        return None
    with run.session.stages.stage("plan"):
        found = plans.uniforms(run.session, run.table, budget_bytes, run.meta.widest())
    return next((p for p in found if all(r.method in PLAIN for r in p.mix.values())), None)
