"""The conversion: table, probes, plan, encode, measure, uniform, search, last steps, report, write."""

from dataclasses import replace
from typing import Any

from nstf.errors import NstfError, UsageError
from nstf.runtime.artifact import write_artifact
from nstf_convert.pipeline import choose, reporting
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.attention import attention_plan
from nstf_convert.pipeline.candidates import method_families
from nstf_convert.pipeline.finish import Final, finish
from nstf_convert.pipeline.job import Job
from nstf_convert.pipeline.max_kl import smallest_within
from nstf_convert.pipeline.options import ConvertOptions, ConvertResult
from nstf_convert.pipeline.probes import run_probes
from nstf_convert.pipeline.search import search, starting_mix
from nstf_convert.pipeline.stages import Stages
from nstf_convert.pipeline.steps import Run, bar


def convert(options: ConvertOptions) -> ConvertResult:
    """Writes the best file within the budget and gives back its report.

    Raises BudgetError (with the smallest size that can be), UsageError, CorruptError, UnsupportedError, NstfError.
    """
    _check_output(options)
    _allowed(options)
    stages = Stages()
    with Job(options, stages) as job:
        _check_healing(job)
        run = _start(job, options.attention_plan)
        probes = run_probes(run) if options.probes else ()
        final = replace(_choose(run), probes=probes)
        with stages.stage("write"):
            report, size = _write(run, final)
        return ConvertResult(options.output, size, _budget_bytes(job), report)


def plan(options: ConvertOptions) -> dict[str, Any]:
    """What `convert` would do: the report with expected losses and sizes, nothing encoded, nothing written.

    Nothing is measured either, so the losses are the loss model's own, without the probes' factors.
    """
    _allowed(options)
    stages = Stages()
    with Job(options, stages) as job:
        budget_bytes = _budget_bytes(job)
        if budget_bytes is None:
            raise UsageError(
                "a plan needs a size: use --budget, --target-size or --target-bpw instead of --max-kl"
            )
        run = _start(job, False)
        planned = run.plan(budget_bytes)
        return reporting.build(run, Final(planned), planned.size_bytes)


def _start(job: Job, attention: bool) -> Run:
    """The run with its table of candidates."""
    allowed = _allowed(job.options)
    with job.stages.stage("candidates"), bar(job, "candidates") as progress:
        table = choose.build_table(job, allowed, progress)
    found = attention_plan(job) if attention and job.model is not None else None
    return Run(job, reporting.Meta(job, found), table, allowed)


def _choose(run: Run) -> Final:
    """The mix to write, within the budget's bytes or the bound on the measured loss."""
    job = run.job
    budget_bytes = _budget_bytes(job)
    if budget_bytes is None:
        return smallest_within(run, job.options.budget.value)
    if job.model is None:
        planned = run.plan(budget_bytes)
        run.encode(planned)
        return Final(planned)
    mix, weights = starting_mix(run, budget_bytes)
    uniform = run.best_uniform(budget_bytes, mix.planned.expected_loss)
    best = mix if uniform is None or mix.score < uniform.score else uniform
    best, _, facts = search(run, best, budget_bytes, weights)
    return replace(finish(run, best, uniform), search=facts)


def _check_output(options: ConvertOptions) -> None:
    if options.output.exists() and not options.force:
        raise UsageError(f"{options.output} exists: give another --output, or --force to replace it")
    if not options.output.parent.is_dir():
        raise UsageError(f"the folder {options.output.parent} does not exist: make it first")


def _check_healing(job: Job) -> None:
    wanted = job.options.heal_minutes > 0.0 or job.options.heal_steps
    if wanted and (job.calibration is None or not job.calibration.metadata["language"]):
        raise UsageError("--heal needs a language model that can be run: convert without it")


def _allowed(options: ConvertOptions) -> set[str]:
    try:
        return method_families(options.formats)
    except ValueError as error:
        raise UsageError(f"--formats: {error}") from error


def _budget_bytes(job: Job) -> int | None:
    parameters = sum(u.elements for u in job.units.values())
    return job.options.budget.size_bytes(job.checkpoint.total_bytes, parameters)


def _write(run: Run, final: Final) -> tuple[dict[str, Any], int]:
    job = run.job
    meta = run.meta.final(run, final)
    size = choose.exact_size(job, final.planned.mix, meta)
    budget_bytes = _budget_bytes(job)
    if budget_bytes is not None and size > budget_bytes:
        raise NstfError(
            f"the file would be {size} bytes, above the budget of {budget_bytes}: please report this"
        )
    # The report first: once the file has its name, nothing is left to do.
    report = reporting.build(run, final, size)
    sources = mixes.sources(job, final.planned.mix, final.load)
    written = write_artifact(job.options.output, sources, job.checkpoint.files(), meta)
    if written != size:
        raise NstfError(f"{job.options.output} has {written} bytes instead of {size}: please report this")
    return report, written
