"""After the search: the winner is encoded once more with everything known, measured, reported on, and compared.

What is done here keeps the mix (the same trees, the same bytes) and changes what the arrays hold: encoding front to
back under the compressed prefix, and healing. Each is kept only when it measures better on the windows that choose.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from nstf_convert.pipeline import calibration as calibrations
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline import progressive
from nstf_convert.pipeline.choose import Planned
from nstf_convert.pipeline.heal import heal
from nstf_convert.pipeline.mix import Loader, Measured
from nstf_convert.pipeline.probes import Probe
from nstf_convert.pipeline.search import SearchFacts
from nstf_convert.pipeline.sequential import encode_in_prefix
from nstf_convert.pipeline.steps import Run, Trial, bar, trial_json

log = logging.getLogger("nstf")

# Share of the time for healing that goes to healing while encoding.
WHILE_ENCODING = 0.8


@dataclass(frozen=True)
class Final:
    """The mix that is written.

    load: gives its tensors (None: as the encoder made them). measured: on the windows that choose; reported: on the
    windows that do not. uniform: the best single format, measured and reported on the same windows. steps: what was
    done after the search, with the score before and after; healing: its facts.
    """

    planned: Planned
    measured: Measured | None = None
    reported: Measured | None = None
    load: Loader | None = None
    uniform: Trial | None = None
    uniform_reported: Measured | None = None
    probes: tuple[Probe, ...] = ()
    search: SearchFacts | None = None
    steps: tuple[Mapping[str, Any], ...] = ()
    losses: Mapping[str, float] | None = None
    healing: Mapping[str, Any] | None = None

    @property
    def is_uniform(self) -> bool:
        return self.uniform is not None and self.planned.mix == self.uniform.planned.mix


def finish(run: Run, best: Trial, uniform: Trial | None) -> Final:
    """The final encodings of the best mix, measured on the windows that report; never worse than uniform on either."""
    return reported(run, healed(run, encoded(run, best, uniform)))


def encoded(run: Run, best: Trial, uniform: Trial | None) -> Final:
    """The best mix, encoded front to back where that measures better."""
    final = Final(best.planned, best.measured, uniform=uniform)
    return _in_prefix(run, final) if run.job.options.prefix else final


def _in_prefix(run: Run, final: Final) -> Final:
    """The mix encoded front to back, kept when it measures better."""
    job = run.job
    with job.stages.stage("encode front to back"), bar(job, "encode front to back") as progress:
        prefixed = encode_in_prefix(job, final.planned.mix, progress)
    if not prefixed.keys:
        return final
    losses = {n: r.loss for n, r in prefixed.results.items()}
    load: Loader = lambda u, recipe: prefixed.kept(u) if recipe is None else prefixed.load(u, recipe)  # noqa: E731
    return improved(run, final, replace(final, load=load, losses=losses), "front to back")


def healed(run: Run, final: Final) -> Final:
    """Learning against the original, where that was asked for: encoding again with what is left learning, then tuning
    continuous values. Each is kept only when it measures better; out of memory, the mix stays as it is."""
    job = run.job
    if (job.options.heal_minutes <= 0.0 and not job.options.heal_steps) or final.measured is None:
        return final
    try:
        return _healed(run, final, final.measured)
    except torch.OutOfMemoryError:
        log.warning(
            "--heal: the GPU has too little memory for this model; the file is written as it was before"
        )
        return final


def _healed(run: Run, final: Final, start: Measured) -> Final:
    job = run.job
    minutes, steps = job.options.heal_minutes, job.options.heal_steps
    started = time.monotonic()
    facts: dict[str, Any] = {}
    before = final
    load = final.load or mixes.encoder_loader(job)
    if job.options.heal_layers and not progressive.affordable(job):
        log.warning(
            "--heal-layers: the model and its gradients do not fit the memory there is; the layers stay as they are"
        )
    elif job.options.heal_layers:
        share = None if steps is None else round(WHILE_ENCODING * steps)
        with job.stages.stage("heal while encoding"):
            made = progressive.encode_progressively(
                job, final.planned.mix, load, WHILE_ENCODING * minutes, start.score, share
            )
        if made is not None:
            facts["while_encoding"] = made.facts
            final = improved(run, final, replace(final, load=made.loader(load)), "healed while encoding")
            steps = None if steps is None else max(0, steps - made.facts["steps"])
        minutes = max(0.0, minutes - (time.monotonic() - started) / 60)
    with job.stages.stage("heal"):
        tuned = heal(job, final.planned.mix, minutes, final.load, final.measured, steps)
    kept = bool(tuned.encoded)
    step = {"step": "healing", "before": tuned.before.score, "after": tuned.after.score, "kept": kept}
    final = replace(final, steps=(*final.steps, step))
    if kept:
        load = tuned.loader(final.load or mixes.encoder_loader(job))
        final = replace(final, load=load, measured=tuned.after)
    facts = {
        **tuned.facts,
        **facts,
        "before": start.accuracy.to_json(),
        "kept": final.load is not before.load,
    }
    if final.measured is not None:
        facts["after"] = final.measured.accuracy.to_json()
    return replace(final, healing=facts)


def improved(run: Run, before: Final, after: Final, what: str) -> Final:
    """`after`, measured, when it beats `before` on the windows that choose; else `before`. Both are reported."""
    if before.measured is None:
        return before
    with run.job.stages.stage("measure"):
        measured = mixes.measure(run.job, after.planned.mix, load=after.load)
    log.info("%s: score %.6g, before %.6g", what, measured.score, before.measured.score)
    trial = Trial(replace(after.planned, label=f"{after.planned.label}, {what}"), measured)
    run.tried.append(trial_json(trial))
    kept = measured.score < before.measured.score
    facts = {"step": what, "before": before.measured.score, "after": measured.score, "kept": kept}
    chosen = replace(after, measured=measured) if kept else before
    return replace(chosen, steps=(*before.steps, facts))


def reported(run: Run, final: Final) -> Final:
    """Measures on the windows that report. The mix gives way to the uniform file when it loses to it there."""
    job = run.job
    if job.calibration is None or not calibrations.report_batches(job.calibration):
        of_uniform = None if final.uniform is None else final.uniform.measured
        return replace(final, reported=final.measured, uniform_reported=of_uniform)
    with job.stages.stage("report"):
        reported = mixes.measure(job, final.planned.mix, "report", final.load)
        of_uniform = None
        if final.uniform is not None:
            of_uniform = mixes.measure(job, final.uniform.planned.mix, "report")
    final = replace(final, reported=reported, uniform_reported=of_uniform)
    if final.uniform is None or of_uniform is None or final.is_uniform or reported.score <= of_uniform.score:
        return final
    log.info("the uniform file measured better than the mix on the windows that report, and is kept")
    return Final(
        final.uniform.planned,
        final.uniform.measured,
        of_uniform,
        None,
        final.uniform,
        of_uniform,
        steps=final.steps,
    )
