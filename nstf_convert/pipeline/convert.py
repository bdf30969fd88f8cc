"""The conversion: calibrate, plan, encode, measure, compare with uniform, write."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from nstf.errors import BudgetError, NstfError, UsageError
from nstf.runtime.artifact import write_artifact
from nstf_convert.pipeline import choose, reporting
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.attention import attention_plan
from nstf_convert.pipeline.candidates import method_families
from nstf_convert.pipeline.choose import Planned, Table
from nstf_convert.pipeline.job import Job
from nstf_convert.pipeline.mix import Measured
from nstf_convert.pipeline.options import ConvertOptions, ConvertResult
from nstf_convert.pipeline.stages import Stages, bars_off
from nstf_convert.pipeline.units import Unit

log = logging.getLogger("nstf")

# Re-allocations the local search tries, as factors on the expected losses of a class of tensors. The loss model's
# largest error is between classes (table, attention, feed-forward), not within one.
SEARCH_MOVES = (("table", 0.5), ("attention", 2.0), ("feed_forward", 2.0), ("table", 2.0))
MAX_KL_ROUNDS = 6
# Decompositions the plan takes on an estimate are worked out, and the plan made again, at most this often.
CONFIRM_ROUNDS = 4


@dataclass(frozen=True)
class Chosen:
    """The mix that is written: what it measured, the uniform it was compared with, what else was tried."""

    planned: Planned
    measured: Measured | None
    uniform: tuple[Planned, Measured] | None
    tried: tuple[dict[str, Any], ...] = ()


def convert(options: ConvertOptions) -> ConvertResult:
    """Writes the best file within the budget and gives back its report.

    Raises BudgetError (with the smallest size that can be), UsageError, CorruptError, UnsupportedError, NstfError.
    """
    _check_output(options)
    _allowed(options)
    stages = Stages()
    with Job(options, stages) as job:
        table = _table(job)
        attention = attention_plan(job) if options.attention_plan and job.model is not None else None
        job_meta = reporting.Meta(job, attention)
        chosen = _choose(job, table, job_meta)
        with stages.stage("write"):
            report, size = _write(job, table, chosen, job_meta)
        budget_bytes = _budget_bytes(job)
        return ConvertResult(options.output, size, budget_bytes, report)


def plan(options: ConvertOptions) -> dict[str, Any]:
    """What `convert` would do: the report with expected losses and sizes, nothing encoded, nothing written."""
    _allowed(options)
    stages = Stages()
    with Job(options, stages) as job:
        budget_bytes = _budget_bytes(job)
        if budget_bytes is None:
            raise UsageError(
                "a plan needs a size: use --budget, --target-size or --target-bpw instead of --max-kl"
            )
        table = _table(job)
        meta = reporting.Meta(job, None)
        planned, table = _planned(job, table, budget_bytes, meta)
        return reporting.build(job, table, Chosen(planned, None, None), meta, planned.size_bytes)


def _check_output(options: ConvertOptions) -> None:
    if options.output.exists() and not options.force:
        raise UsageError(f"{options.output} exists: give another --output, or --force to replace it")
    if not options.output.parent.is_dir():
        raise UsageError(f"the folder {options.output.parent} does not exist: make it first")


def _allowed(options: ConvertOptions) -> set[str]:
    try:
        return method_families(options.formats)
    except ValueError as error:
        raise UsageError(f"--formats: {error}") from error


def _budget_bytes(job: Job) -> int | None:
    parameters = sum(u.elements for u in job.units.values())
    return job.options.budget.size_bytes(job.checkpoint.total_bytes, parameters)


def _table(job: Job) -> Table:
    with job.stages.stage("candidates"), _bar(job, "candidates") as progress:
        return choose.build_table(job, _allowed(job.options), progress)


def _planned(
    job: Job,
    table: Table,
    budget_bytes: int,
    meta: reporting.Meta,
    weights: Mapping[str, float] | None = None,
) -> tuple[Planned, Table]:
    """The plan under a budget, with hybrids added where it gives few bits."""
    with job.stages.stage("plan"):
        planned = choose.plan_mix(job, table, budget_bytes, meta.widest(), weights, exact=False)
        if "add" in _allowed(job.options):
            low = [u for u in choose.low_bit_units(job, planned) if not _has_hybrids(table, u)]
            for name, more in job.encoder.each(low, job.encoder.hybrids, lambda u: None).items():
                table = table.with_more(name, more)
        planned = choose.plan_mix(job, table, budget_bytes, meta.widest(), weights)
    for _ in range(CONFIRM_ROUNDS):
        doubtful = choose.unconfirmed(table, planned)
        if not doubtful:
            break
        losses = _encode(job, Planned(doubtful, 0.0, 0, "decompositions"))
        table = table.replaced({n: (doubtful[n], value) for n, value in losses.items()})
        with job.stages.stage("plan"):
            planned = choose.plan_mix(job, table, budget_bytes, meta.widest(), weights)
    return planned, table


def _has_hybrids(table: Table, unit: Unit) -> bool:
    return any(c.recipe.method == "add" for c in table.candidates[unit.name])


def _choose(job: Job, table: Table, meta: reporting.Meta) -> Chosen:
    budget_bytes = _budget_bytes(job)
    if budget_bytes is None:
        return _smallest_within(job, table, meta)
    planned, table = _planned(job, table, budget_bytes, meta)
    meta.table = table
    return _never_worse(job, table, planned, budget_bytes, meta)


def _never_worse(job: Job, table: Table, planned: Planned, budget_bytes: int, meta: reporting.Meta) -> Chosen:
    """Encodes and measures the mix and the best uniform file under the same budget, and keeps the better one."""
    meta.true_losses |= _encode(job, planned)
    if job.model is None:
        return Chosen(planned, None, None)
    measured = _measure(job, planned)
    tried = [_trial(planned, measured)]
    with job.stages.stage("plan"):
        uniform_plan = choose.best_uniform(job, table, budget_bytes, meta.widest())
    uniform = None
    if uniform_plan is not None:
        uniform_losses = _encode(job, uniform_plan)
        uniform = (uniform_plan, _measure(job, uniform_plan))
        tried.append(_trial(*uniform))
    best = (planned, measured)
    if job.options.search:
        best = _search(job, table, best, budget_bytes, meta, tried)
    if uniform is not None and uniform[1].score <= best[1].score:
        log.info("the uniform file measured better than the mix and is kept")
        meta.true_losses |= uniform_losses
        best = uniform
    return Chosen(best[0], best[1], uniform, tuple(tried))


def _search(
    job: Job,
    table: Table,
    best: tuple[Planned, Measured],
    budget_bytes: int,
    meta: reporting.Meta,
    tried: list[dict[str, Any]],
) -> tuple[Planned, Measured]:
    """Moves bytes between classes of tensors while the measured loss falls; a fixed number of steps, no clock."""
    weights: dict[str, float] = {}
    skip: set[str] = set()
    for name, factor in SEARCH_MOVES:
        if name in skip:
            continue
        members = [n for n, u in job.units.items() if _class_of(u) == name and n in table.candidates]
        if not members or len(members) == len(table.candidates):
            continue
        trial_weights = {**weights, **{n: weights.get(n, 1.0) * factor for n in members}}
        planned, _ = _planned(job, table, budget_bytes, meta, trial_weights)
        if planned.mix == best[0].mix:
            continue
        planned = replace(planned, label=f"mix, {name} x{factor:g}")
        losses = _encode(job, planned)
        measured = _measure(job, planned)
        tried.append(_trial(planned, measured))
        if measured.score < best[1].score:
            best, weights = (planned, measured), trial_weights
            meta.true_losses |= losses
            skip.add(name)
    return best


def _class_of(unit: Unit) -> str:
    if "embedding" in unit.uses or "head" in unit.uses:
        return "table"
    if unit.role in ("gate", "up", "down", "expert_stack"):
        return "feed_forward"
    if unit.role in ("q", "k", "v", "o", "qkv"):
        return "attention"
    return "other"


def _smallest_within(job: Job, table: Table, meta: reporting.Meta) -> Chosen:
    """The smallest file whose measured mean KLD is within the bound: a search over sizes on measured losses."""
    bound = job.options.budget.value
    if job.model is None or job.calibration is None or not job.calibration.metadata["language"]:
        raise UsageError("--max-kl needs a language model that can be run: use --budget instead")
    smallest = sum(min(c.size_bytes for c in cs) for cs in table.candidates.values())
    largest = sum(max(c.size_bytes for c in cs) for cs in table.candidates.values())
    fixed = choose.exact_size(job, {}, meta.widest(), skip=set(table.candidates))
    low, high = fixed + smallest, fixed + largest + 4096
    best: tuple[Planned, Measured, Table] | None = None
    tried = []
    ratio = 1.0
    for _ in range(MAX_KL_ROUNDS):
        size = _size_for_loss(job, table, bound / ratio, low, high, meta)
        planned, wide = _planned(job, table, size, meta)
        losses = _encode(job, planned)
        measured = _measure(job, planned)
        tried.append(_trial(planned, measured))
        ratio = max(measured.score, 1e-12) / max(planned.expected_loss, 1e-30)
        if measured.score <= bound:
            if best is None or planned.size_bytes < best[0].size_bytes:
                best = (planned, measured, wide)
                meta.true_losses |= losses
            high = size
        else:
            low = size
        if high - low < 0.002 * high:
            break
    if best is None:
        planned, wide = _planned(job, table, high, meta)
        meta.true_losses |= _encode(job, planned)
        measured = _measure(job, planned)
        if measured.score > bound:
            raise BudgetError(
                f"--max-kl {bound:g} cannot be met: the best file measures {measured.score:.3g} nats at "
                f"{planned.size_bytes} bytes",
                planned.size_bytes,
            )
        best = (planned, measured, wide)
    meta.table = best[2]
    result = _never_worse(job, best[2], best[0], best[0].size_bytes, meta)
    return replace(result, tried=(*tried, *result.tried))


def _size_for_loss(job: Job, table: Table, loss: float, low: int, high: int, meta: reporting.Meta) -> int:
    """The size in [low, high] at which the plan expects `loss` (bisection; plans are cheap)."""
    a, b = low, high
    for _ in range(12):
        middle = (a + b) // 2
        try:
            expected = choose.plan_mix(job, table, middle, meta.widest(), exact=False).expected_loss
        except BudgetError:
            expected = float("inf")
        a, b = (middle, b) if expected > loss else (a, middle)
    return b


def _encode(job: Job, planned: Planned) -> dict[str, float]:
    chosen = [(job.units[n], r) for n, r in planned.mix.items()]
    with job.stages.stage("encode"), _bar(job, f"encode {planned.label}") as progress:
        results = job.encoder.encode_all(chosen, progress)
    return {n: r.loss for n, r in results.items()}


def _measure(job: Job, planned: Planned) -> Measured:
    with job.stages.stage("measure"):
        measured = mixes.measure(job, planned.mix)
    log.info("%s: %d bytes, score %.6g", planned.label, planned.size_bytes, measured.score)
    return measured


def _trial(planned: Planned, measured: Measured) -> dict[str, Any]:
    key = "mean_kl" if hasattr(measured.accuracy, "mean_kl") else "relative_l2"
    return {
        "name": planned.label,
        "size_bytes": planned.size_bytes,
        key: measured.score,
        "expected_loss": planned.expected_loss,
    }


def _write(job: Job, table: Table, chosen: Chosen, meta: reporting.Meta) -> tuple[dict[str, Any], int]:
    table = meta.table or table
    size = choose.exact_size(job, chosen.planned.mix, meta.final(table, chosen))
    budget_bytes = _budget_bytes(job)
    if budget_bytes is not None and size > budget_bytes:
        raise NstfError(
            f"the file would be {size} bytes, above the budget of {budget_bytes}: please report this"
        )
    # The report first: once the file has its name, nothing is left to do.
    report = reporting.build(job, table, chosen, meta, size)
    written = write_artifact(
        job.options.output,
        mixes.sources(job, chosen.planned.mix),
        job.checkpoint.files(),
        meta.final(table, chosen),
    )
    if written != size:
        raise NstfError(f"{job.options.output} has {written} bytes instead of {size}: please report this")
    return report, written


@contextmanager
def _bar(job: Job, what: str) -> Iterator[Any]:
    total = sum(u.elements for u in job.units.values() if u.kept is None)
    with tqdm(total=total, desc=what, unit="weight", unit_scale=True, disable=bars_off(), leave=False) as bar:
        yield lambda unit: bar.update(unit.elements)
