"""The smallest file whose measured loss stays within a bound."""

from dataclasses import replace

from nstf.errors import BudgetError, UsageError
from nstf_convert.pipeline.allocate import plan as plans
from nstf_convert.pipeline.improve.finish import chosen, healed, reported
from nstf_convert.pipeline.improve.pays import structure_that_pays
from nstf_convert.pipeline.improve.run import Run
from nstf_convert.pipeline.improve.search import search
from nstf_convert.pipeline.outcome import Final, Trial

# Sizes that are encoded and measured on the way to the bound, before and after the search.
ROUNDS = 6
ROUNDS_AFTER_SEARCH = 3
# How often the bound is tightened because the windows that report say more than those that chose.
TIGHTENED = 3
# What encoding front to back leaves of the loss is turned into bytes when it is less than this.
GAINED = 0.95
# Sizes closer than this are one.
CLOSE = 0.002


def smallest_within(run: Run, bound: float) -> Final:
    """The smallest file found that keeps `bound` on the windows that choose and on those that report.

    Raises BudgetError when no file does, UsageError for a model that cannot be measured in nats.
    """
    session = run.session
    if session.model is None or session.calibration is None or not session.calibration.metadata["language"]:
        raise UsageError(
            "a bound on the divergence needs a language model that can be run: give a size instead"
        )
    asked = bound
    for _ in range(TIGHTENED):
        final = reported(run, _within(run, bound, asked))
        if final.reported is None or final.reported.score <= asked:
            tuned = healed(run, final)
            return final if tuned.load is final.load else reported(run, tuned)
        # The windows that chose were kind: ask for as much less as the others say.
        bound *= 0.98 * asked / final.reported.score
    size = final.planned.size_bytes
    raise BudgetError(
        f"a divergence of {asked:g} could not be met on unseen text: the last file has {size} bytes", size
    )


def _within(run: Run, bound: float, asked: float) -> Final:
    low, high = _range(run)
    trial = _smallest(run, bound, low, high, {}, 1.0, ROUNDS)
    if trial is None:
        trial = run.measure(run.plan(high))
        if trial.score > bound:
            size = trial.planned.size_bytes
            raise BudgetError(
                f"a divergence of {asked:g} cannot be met: the best file measures {trial.score:.3g} nats at {size} bytes",
                size,
            )
    start, facts = trial, None
    # Where plain formats lose less at these bytes, what that gains is turned into bytes too.
    best = trial = structure_that_pays(run, start, start.planned.size_bytes, run.measure)
    weights: dict[str, float] = {}
    if run.session.options.search_limits is not None:
        best, weights, facts = search(run, trial, trial.planned.size_bytes)
    if best is not start:
        # What was gained at this size is turned into bytes.
        ratio = best.score / max(best.planned.expected_loss, 1e-30)
        smaller = _smallest(run, bound, low, best.planned.size_bytes, weights, ratio, ROUNDS_AFTER_SEARCH)
        if smaller is not None and smaller.planned.size_bytes < best.planned.size_bytes:
            best = smaller
    final = _encoded(run, best)
    if final.measured is not None and final.measured.score < GAINED * best.score and not final.is_uniform:
        # So is what encoding front to back gained.
        share = final.measured.score / best.score
        ratio = best.score / max(best.planned.expected_loss, 1e-30)
        smaller = _smallest(
            run, bound / share, low, best.planned.size_bytes, weights, ratio, ROUNDS_AFTER_SEARCH
        )
        if smaller is not None and smaller.planned.size_bytes < best.planned.size_bytes:
            again = _encoded(run, smaller)
            if again.measured is not None and again.measured.score <= bound:
                final = again
    return replace(final, search=facts)


def _encoded(run: Run, best: Trial) -> Final:
    """The mix, or the uniform file where that measures better, as it would be written."""
    return chosen(run, best, run.best(run.rivals(best.planned.size_bytes)), None)


def _range(run: Run) -> tuple[int, int]:
    """File sizes between which the answer lies."""
    candidates = run.table.candidates.values()
    fixed = plans.exact_size(run.session, {}, run.meta.widest(), skip=set(run.table.candidates))
    smallest = sum(min(c.size_bytes for c in cs) for cs in candidates)
    largest = sum(max(c.size_bytes for c in cs) for cs in candidates)
    return fixed + smallest, fixed + largest + 4096


def _smallest(
    run: Run, bound: float, low: int, high: int, weights: dict[str, float], ratio: float, rounds: int
) -> Trial | None:
    """The smallest mix within the bound: a secant search over sizes on measured losses.

    ratio: measured over expected loss, as far as it is known.
    """
    best: Trial | None = None
    for _ in range(rounds):
        size = _size_for_loss(run, bound / ratio, low, high)
        trial = run.measure(run.plan(size, weights))
        ratio = max(trial.score, 1e-12) / max(trial.planned.expected_loss, 1e-30)
        if trial.score <= bound:
            if best is None or trial.planned.size_bytes < best.planned.size_bytes:
                best = trial
            high = size
        else:
            low = size
        if high - low < CLOSE * high:
            break
    return best


def _size_for_loss(run: Run, loss: float, low: int, high: int) -> int:
    """The size in [low, high] at which the plan expects `loss` (bisection; such plans are cheap)."""
    a, b = low, high
    for _ in range(12):
        middle = (a + b) // 2
        try:
            expected = run.planned(middle, None, exact=False).expected_loss
        except BudgetError:
            expected = float("inf")
        a, b = (middle, b) if expected > loss else (a, middle)
    return b
