"""The conversion as a story: open and calibrate, propose, allocate, improve, write.

session.Session     the checkpoint, the model, devices and memory, the calibration
propose/            every tensor's candidates with prices and expected losses   -> Table
allocate/           one candidate a tensor within the budget                   -> Planned
improve/            encoded front to back, measured, compared, searched, healed -> Final
"""

import json
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from nstf.errors import NstfError, UnsupportedError, UsageError
from nstf.runtime.artifact import write_artifact
from nstf_convert.inputs import check_artifact_name, check_place, check_still_free, keep_inputs
from nstf_convert.options import ConvertOptions, ConvertResult
from nstf_convert.pipeline import frontier as frontiers
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline import reporting
from nstf_convert.pipeline.allocate import plan as plans
from nstf_convert.pipeline.allocate.division import Divisions
from nstf_convert.pipeline.allocate.timing import Timing
from nstf_convert.pipeline.attention import plan as attention
from nstf_convert.pipeline.attention import possible
from nstf_convert.pipeline.header import Meta
from nstf_convert.pipeline.improve.finish import finish
from nstf_convert.pipeline.improve.max_kl import smallest_within
from nstf_convert.pipeline.improve.pays import structure_that_pays, worth_structure
from nstf_convert.pipeline.improve.run import Run, counter
from nstf_convert.pipeline.improve.search import search
from nstf_convert.pipeline.outcome import Final
from nstf_convert.pipeline.progress import Stages
from nstf_convert.pipeline.propose.methods import method_families
from nstf_convert.pipeline.propose.table import build_table
from nstf_convert.pipeline.propose.units import Unit
from nstf_convert.pipeline.session import Session
from nstf_convert.speed.token import measured_rate

log = logging.getLogger("nstf")

# Tokens a second below which a file's speed is predicted only: timing it would take minutes.
SLOWEST_MEASURED = 4.0


def convert(
    options: ConvertOptions, done: Callable[[ConvertResult], None] = lambda result: None
) -> ConvertResult:
    """Writes the best file within the budget and gives back its report. done: is called with that when the file has its
    name; what it raises leaves the work directory where it is.

    Raises BudgetError (with the smallest size that can be), UsageError, CorruptError, UnsupportedError, NstfError.
    """
    _check_output(options)
    _allowed(options)
    stages = Stages()
    with Session(options, stages, check=_check) as session:
        _check_healing(session)
        run = _propose(session, _plans_attention(session))
        final = _choose(run)
        _plan_attention(run, final)
        with stages.stage("write"):
            report, size = _write(run, final)
        with stages.stage("measure speed"):
            _measure_speed(run, report)
        result = ConvertResult(options.output, size, _budget_bytes(session), report)
        done(result)
        return result


def plan(options: ConvertOptions) -> dict[str, Any]:
    """What `convert` would do: the report with expected losses and sizes. Decompositions and hybrids that may win are made,
    for their losses; nothing else is encoded, no model measured, and nothing written."""
    _allowed(options)
    stages = Stages()
    with Session(options, stages, check=_check_divisions) as session:
        budget_bytes = _budget_bytes(session)
        if budget_bytes is None:
            raise UsageError(
                "a plan needs a size: a bound on the measured divergence can only be met by converting"
            )
        run = _propose(session, False)
        planned = run.plan(budget_bytes)
        if session.model is not None:
            planned, _ = worth_structure(run, planned, budget_bytes)
        return reporting.build(run, Final(planned), planned.size_bytes)


def frontier(options: ConvertOptions) -> dict[str, Any]:
    """Sizes, predicted speeds and expected losses that `convert` could reach (nstf_convert.pipeline.frontier)."""
    _allowed(options)
    with Session(options, Stages(), check=_check_divisions, any_size=True) as session:
        return frontiers.frontier(_propose(session, False))


def _propose(session: Session, plans_attention: bool) -> Run:
    """The run with its table of candidates."""
    allowed, divisions = _allowed(session.options), _divisions(session, session.units)
    with session.stages.stage("candidates"):
        table = build_table(session, allowed, counter(session))
    free = None
    if divisions is not None:
        free, table = table, divisions.table(table, session.units)
    timing = Timing(session, _expected_bytes(session))
    if session.options.target or session.options.bounds_time:
        table = timing.held(table)
    if session.options.bounds_time:
        with session.stages.stage("measure kernels"):
            timing.prepare(table)
    widest = attention.widest(session) if plans_attention else None
    return Run(session, Meta(session, widest), table, allowed, timing, divisions=divisions, free=free)


def _divisions(session: Session, units: Mapping[str, Unit]) -> Divisions | None:
    """What `tp` allows; None without it. Raises as Divisions for a model that cannot be divided so."""
    ranks = session.options.tp
    if ranks is None:
        return None
    return Divisions(session.config or {}, units, ranks, lambda u, r: session.encoder.expected(u, r))


def _check_divisions(session: Session) -> None:
    """Before the calibration: raises as Divisions."""
    if session.options.tp is not None:
        _divisions(session, session.found_units())


def _check(session: Session) -> None:
    """Before the calibration: what was asked for and this model cannot have."""
    _check_divisions(session)
    _check_attention(session)
    _check_images(session)


def _check_images(session: Session) -> None:
    """Raises UsageError for images smaller than what the model's first convolution reads at a time."""
    side = session.options.image_size
    modules = () if session.model is None else session.model.module.modules()
    first = next((m for m in modules if isinstance(m, nn.Conv2d)), None)
    if side is None or first is None or first.padding == "same":
        return
    around = (0, 0) if isinstance(first.padding, str) else first.padding
    least = max(k - 2 * p for k, p in zip(first.kernel_size, around, strict=True))
    if side < least:
        raise UsageError(
            f"images of {side} x {side} are too small: this model reads {least} x {least} at a time"
        )


def _check_attention(session: Session) -> None:
    """Before the calibration: raises as `possible.check` where a plan was asked for, not where an effort brings it along."""
    options = session.options
    if not options.plans_attention:
        return
    asked = options.kv_budget is not None or options.kv_max_kl is not None
    try:
        possible.check(session)
    except (UnsupportedError, UsageError) as error:
        if asked or (not isinstance(error, UnsupportedError) and options.context is not None):
            raise type(error)(f"no plan for the KV cache: {error}") from error


def _plans_attention(session: Session) -> bool:
    """Whether a plan is made, and then its profile at once: a mistake in what was asked shows before the long steps.

    Raises UsageError where one was asked for and cannot be made.
    """
    options = session.options
    if not options.plans_attention:
        return False
    asked = options.kv_budget is not None or options.kv_max_kl is not None
    try:
        if not attention.is_plannable(session):
            raise UnsupportedError("the model is no language model that was calibrated on text")
        attention.prepare(session)
    except (UnsupportedError, UsageError) as error:
        if asked or (isinstance(error, UsageError) and options.context is not None):
            raise type(error)(f"no plan for the KV cache: {error}") from error
        log.warning("no attention plan: %s", error)
        return False
    return True


def _plan_attention(run: Run, final: Final) -> None:
    """The plan for the weights as they are stored takes the place of the widest one."""
    if run.meta.attention is None:
        return
    weights = mixes.weights_of(run.session, final.planned.mix, final.load)
    plan, facts = attention.make(run.session, run.session.streamed(weights))
    run.meta.attention, run.meta.attention_facts = json.loads(plan.to_json()), facts


def _expected_bytes(session: Session) -> int:
    """About what the file will take: the budget, or half the checkpoint where that follows from a loss."""
    return _budget_bytes(session) or session.checkpoint.total_bytes // 2


def _choose(run: Run) -> Final:
    """The mix to write, within the budget's bytes or the bound on the measured loss."""
    session = run.session
    budget_bytes = _budget_bytes(session)
    if budget_bytes is None or session.model is None:
        session.beside.close()
    if budget_bytes is None:
        return smallest_within(run, session.options.budget.value)
    planned = run.plan(budget_bytes)
    if session.model is None:
        run.encode(planned)
        return Final(planned)
    planned, plain = worth_structure(run, planned, budget_bytes)
    plain_only = run.plain_only
    begun, facts = run.begin_comparing(planned, budget_bytes), None
    rivals = [] if begun else run.rivals(budget_bytes)
    run.ahead(rivals)
    if session.options.search_limits is None:
        mix = structure_that_pays(run, run.encoded(planned), budget_bytes, plain=plain)
    else:
        start = structure_that_pays(run, run.measure(planned), budget_bytes, run.measure, plain)
        mix, _, facts = search(run, start, budget_bytes)
    # Plans without decompositions may take more time, and so may single formats.
    if begun or run.plain_only != plain_only:
        rivals = run.rivals(budget_bytes)
        session.beside.close()  # where a single format was left, nobody asked what was encoded beside
    return finish(run, mix, run.best(rivals, mix), facts)


def _measure_speed(run: Run, report: dict[str, Any]) -> None:
    """Adds to the report how fast the written file decodes on each target that is here; large models are left out."""
    timing, facts = run.timing, report.get("speed")
    if timing is None or not facts:
        return
    for target, found in zip(timing.targets, facts["targets"], strict=True):
        rate = found["predicted_rate"]
        if target.is_cpu and target.here and rate and rate > SLOWEST_MEASURED:
            found["measured_rate"] = measured_rate(run.session.options.output, target, timing.prices.threads)


def _check_output(options: ConvertOptions) -> None:
    keep_inputs(options.output, [options.model, *options.datasets, options.calibration])
    if options.output.is_dir():
        raise UsageError(f"the output {options.output} is a folder: give a file in it")
    check_artifact_name(options.output)
    if os.path.lexists(options.output) and not options.force:
        raise UsageError(f"{options.output} exists: give another output, or force to replace it")
    if not options.output.parent.is_dir():
        raise UsageError(f"the folder {options.output.parent} does not exist: make it first")
    check_place(options.output)


def _check_healing(session: Session) -> None:
    if session.options.heals and session.calibration is None:
        raise UsageError("healing needs a model that can be run: convert without it")


def _allowed(options: ConvertOptions) -> set[str]:
    try:
        return method_families(options.formats, options.bounds_time)
    except ValueError as error:
        raise UsageError(f"formats: {error}") from error


def _budget_bytes(session: Session) -> int | None:
    parameters = sum(u.elements for u in session.units.values())
    return session.options.budget.size_bytes(session.checkpoint.total_bytes, parameters)


def _write(run: Run, final: Final) -> tuple[dict[str, Any], int]:
    session = run.session
    meta = run.meta.final(reporting.expected_losses(run, final), final)
    size = plans.exact_size(session, final.planned.mix, meta)
    budget_bytes = _budget_bytes(session)
    if budget_bytes is not None and size > budget_bytes:
        raise NstfError(
            f"the file would be {size} bytes, above the budget of {budget_bytes}: please report this"
        )
    # The report first: once the file has its name, nothing is left to do.
    report = reporting.build(run, final, size)
    sources = mixes.sources(session, final.planned.mix, final.load)
    check = session.job.check_checkpoint
    check()
    options = session.options
    check_still_free(options.output, options.force)
    files = session.checkpoint.files()
    try:
        written = write_artifact(options.output, sources, files, meta, keep=not options.force, ready=check)
    except UsageError as error:
        if not options.output.is_dir():
            raise
        # It was none when the work began: not the user's mistake, for which the work directory would go.
        raise NstfError(f"{error}; run the same again, which goes on from here") from error
    if written != size:
        raise NstfError(f"{options.output} has {written} bytes instead of {size}: please report this")
    return report, written
