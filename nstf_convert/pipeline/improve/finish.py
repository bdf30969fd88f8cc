"""The last steps: healing, where that was asked for, and the windows that report. The mix keeps its trees and bytes."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.calibrate import statistics as calibrations
from nstf_convert.pipeline.heal.heal import heal
from nstf_convert.pipeline.improve.run import Run
from nstf_convert.pipeline.mix import Measured
from nstf_convert.pipeline.outcome import Final, SearchFacts, Trial

log = logging.getLogger("nstf")


def finish(run: Run, best: Trial, uniform: Trial | None, facts: SearchFacts | None) -> Final:
    """The better of the mix and the best uniform file, healed and measured on the windows that report."""
    return reported(run, healed(run, chosen(run, best, uniform, facts)))


def chosen(run: Run, mix: Trial, uniform: Trial | None, facts: SearchFacts | None) -> Final:
    """The mix by its last steps, or the uniform file where that measures better on the windows that choose."""
    steps: tuple[Mapping[str, Any], ...] = ()
    if run.session.options.front_to_back and mix.load is None:
        after = run.in_a_pass(mix.planned)
        kept = after.score < mix.score
        steps = ({"step": "front to back", "before": mix.score, "after": after.score, "kept": kept},)
        mix = after if kept else mix
    best = mix if uniform is None or mix.score < uniform.score else uniform
    return Final(
        best.planned,
        best.measured,
        load=best.load,
        uniform=uniform,
        search=facts,
        steps=steps,
        losses=best.losses,
    )


def healed(run: Run, final: Final) -> Final:
    """Continuous values tuned against the original, where that was asked for; kept only when it measures better. Out
    of memory, the mix stays as it is."""
    options = run.session.options
    if not options.heals or final.measured is None:
        return final
    try:
        return _healed(run, final, final.measured)
    except torch.OutOfMemoryError:
        log.warning("healing: the GPU has too little memory for this model; the file is written as it was")
        return final


def _healed(run: Run, final: Final, start: Measured) -> Final:
    session, options = run.session, run.session.options
    with session.stages.stage("heal"):
        tuned = heal(session, final.planned.mix, options.heal_minutes, final.load, start, options.heal_steps)
    kept = bool(tuned.encoded)
    step = {"step": "healing", "before": tuned.before.score, "after": tuned.after.score, "kept": kept}
    final = replace(final, steps=(*final.steps, step))
    if kept:
        load = tuned.loader(final.load or mixes.encoder_loader(session))
        final = replace(final, load=load, measured=tuned.after)
    after = tuned.after if kept else start
    facts = {
        **tuned.facts,
        "before": start.accuracy.to_json(),
        "kept": kept,
        "after": after.accuracy.to_json(),
    }
    return replace(final, healing=facts)


def reported(run: Run, final: Final) -> Final:
    """Measures on the windows that report. The mix gives way to the uniform file when it loses to it there."""
    session, uniform = run.session, final.uniform
    if session.calibration is None or not calibrations.report_batches(session.calibration):
        of_uniform = None if uniform is None else uniform.measured
        return replace(final, reported=final.measured, uniform_reported=of_uniform)
    with session.stages.stage("report"):
        reported = mixes.measure(session, final.planned.mix, "report", final.load)
        of_uniform = None
        if uniform is not None:
            of_uniform = mixes.measure(session, uniform.planned.mix, "report", uniform.load)
    final = replace(final, reported=reported, uniform_reported=of_uniform)
    if uniform is None or of_uniform is None or final.is_uniform or reported.score <= of_uniform.score:
        return final
    log.info("the uniform file measured better than the mix on the windows that report, and is kept")
    return Final(
        uniform.planned, uniform.measured, of_uniform, uniform.load, uniform, of_uniform,
        search=final.search, steps=final.steps, losses=uniform.losses,
    )  # fmt: skip
