"""report.json: everything that was decided and measured, and what was rejected."""

import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from nstf.proposals import Look
from nstf_convert.export import engines
from nstf_convert.pipeline import header
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.allocate import plan as plans
from nstf_convert.pipeline.calibrate import statistics as calibrations
from nstf_convert.pipeline.improve.run import Run
from nstf_convert.pipeline.outcome import Final
from nstf_convert.pipeline.progress import Peaks, peaks
from nstf_convert.pipeline.propose import methods
from nstf_convert.pipeline.propose.candidates import Candidate
from nstf_convert.pipeline.session import Session
from nstf_convert.planner import Option, pareto
from nstf_convert.report import build as schema
from nstf_convert.report import families

# Why a method has no candidate: a bound; and where no method said why.
RULED_OUT = "a bound from below: forms that were tried lose less in the same bytes, or cost less at any price of a byte"
ELSEWHERE = "the target does not hold its forms, or they cannot be divided among the ranks"


def expected_losses(run: Run, final: Final) -> dict[str, float]:
    """By tensor: the loss found by encoding, or the planner's estimate where nothing was encoded."""
    return {n: expected_loss(run, final, n) for n in final.planned.mix}


def build(run: Run, final: Final, size_bytes: int) -> dict[str, Any]:
    """report.json as data (its schema is nstf_convert.report.build)."""
    session = run.session
    signatures: dict[str, dict[str, Any]] = {}
    if session.options.signatures:
        with session.stages.stage("signatures"):
            signatures = session.encoder.signatures(list(session.units.values()))
    tensors = [_tensor(run, final, name, signatures.get(name, {})) for name in sorted(session.units)]
    uniform = None
    if final.uniform is not None:
        planned = final.uniform.planned
        reported = header.accuracy(final.uniform_reported) or {}
        uniform = schema.Uniform(
            planned.label,
            planned.size_bytes,
            reported,
            final.uniform.score,
            header.domains(final.uniform_reported),
        )
    accuracy = schema.AccuracyFacts(
        final=header.accuracy(final.reported),
        domains=header.domains(final.reported),
        selection=None if final.measured is None else final.measured.score,
        protocol=_protocol(session),
        chosen=header.chosen_word(final),
        uniform=uniform,
        stopped=tuple(found.to_json() for found in run.stopped),
        tried=tuple(run.tried),
        search=None if final.search is None else final.search.to_json(),
        steps=final.steps,
        healing=final.healing,
        structure=tuple(found.to_json() for found in run.rounds),
    )
    options = session.options
    budget_bytes = options.budget.size_bytes(
        session.checkpoint.total_bytes, sum(u.elements for u in session.units.values())
    )
    return schema.build(
        model=schema.ModelFacts(
            name=options.model,
            architecture=str(((session.config or {}).get("architectures") or ["unknown"])[0]),
            format=session.checkpoint.kind,
            fingerprint=session.checkpoint.fingerprint(),
            parameters=sum(u.elements for u in session.units.values()),
            tensor_bytes=session.checkpoint.total_bytes,
            tensors=len(session.units),
            notes=session.checkpoint.notes,
        ),
        budget={
            "kind": options.budget.kind,
            "value": options.budget.value,
            "bytes": budget_bytes,
        },
        size_bytes=size_bytes,
        tensors=tensors,
        accuracy=accuracy,
        files_bytes=_files_bytes(session),
        attention=run.meta.attention and {**run.meta.attention, "choice": run.meta.attention_facts},
        calibration=header.calibration(session),
        stages=session.stages.done,
        families=families.compare(_priced(run, final), _ruled_out(run)),
        resources=resources(session),
        speed=speed(run, final),
        # Not at the bytes of the file: plans count the header at its widest, by which the smallest one has no room there.
        tensor_parallel=run.cost_of_division(
            budget_bytes or plans.exact_size(session, final.planned.mix, run.meta.widest())
        ),
    )


def _priced(run: Run, final: Final) -> list[families.Tensor]:
    """Every tensor's candidates by family, with the true losses of those that were encoded."""
    out = []
    for name, options in sorted(run.table.candidates.items()):
        priced = []
        for c in options:
            true = run.true_loss(name, c.recipe)
            value = c.loss if true is None else true
            priced.append(families.Priced(c.tree, c.size_bytes, value, c.exact or true is not None))
        chosen = mixes.tree_of(run.session.units[name], final.planned.mix.get(name))
        out.append(families.Tensor(name, tuple(priced), chosen))
    return out


def _ruled_out(run: Run) -> dict[str, list[float]]:
    """By family: how many times as much as the same bytes in plain formats each tensor loses at least (of what experts
    share: about), where for that reason nothing of the family was tried."""
    out: dict[str, list[float]] = {}
    for name, options in run.table.candidates.items():
        tried = {c.recipe.method for c in options}
        unit = run.session.units[name]
        closest: dict[str, float] = {}
        for look in run.session.encoder.looks(unit, run.allowed):
            if look.method not in tried and look.rival > 0.0:
                closest[look.method] = min(_ratio(look), closest.get(look.method, math.inf))
        for method, ratio in closest.items():
            family = families.family_of_kind(methods.kind_of(method), experts=unit.lead == 2)
            out.setdefault(family, []).append(ratio)
    return out


def _tensor(run: Run, final: Final, name: str, signature: dict[str, Any]) -> schema.TensorReport:
    session = run.session
    unit = session.units[name]
    recipe = final.planned.mix.get(name)
    note = f"copied: {unit.kept}" if unit.kept else ""
    options = run.table.candidates.get(name, ())
    rejected = [schema.Alternative(c.tree, c.loss) for c in worth_showing(options) if c.recipe != recipe]
    return schema.TensorReport(
        name=name,
        role=unit.role,
        shape=unit.shape,
        dtype=unit.dtype,
        tree=mixes.tree_of(unit, recipe),
        source_bytes=session.checkpoint.info(name).size_bytes,
        expected_loss=None if recipe is None else expected_loss(run, final, name),
        calibrated=session.statistics.calibrated(unit),
        note=note,
        method="dense" if recipe is None else methods.name_of(recipe.method),
        signature=signature,
        rejected=rejected,
        not_tried=_not_tried(run, name),
    )


def _not_tried(run: Run, name: str) -> list[schema.NotTried]:
    """Of every method of the conversion that has no candidate for a tensor: why. None for one that is copied."""
    options, unit = run.table.candidates.get(name), run.session.units[name]
    if options is None:
        return []
    engine = engines.engine_of(run.allowed)
    looks: dict[str, Look] = {}
    for look in run.session.encoder.looks(unit, run.allowed):
        known = looks.get(look.method)
        if known is None or (not look.reason and _ratio(look) < _ratio(known)):
            looks[look.method] = look
    out = []
    for method in sorted(set(methods.known()) & run.allowed - {"dense", *(c.recipe.method for c in options)}):
        found = looks.get(method)
        shown = methods.name_of(method)
        if found is None:
            engine_only = f"no form of it fits {engine} files" if engine else ELSEWHERE
            out.append(schema.NotTried(shown, engine_only))
        elif found.reason:
            out.append(schema.NotTried(shown, found.reason))
        else:
            ratio = _ratio(found) if found.rival > 0.0 else None
            out.append(schema.NotTried(shown, RULED_OUT, found.size_bytes, ratio))
    return out


def _ratio(look: Look) -> float:
    """How many times what has to be beaten a form loses at least; infinite where nothing is lost there."""
    return look.least / look.rival if look.rival > 0.0 else math.inf


def worth_showing(options: "tuple[Candidate, ...] | list[Candidate] | Any") -> list[Candidate]:
    """The Pareto front of every method: by family alone, CP would vanish behind a better Tucker."""
    out = []
    for method in sorted({c.recipe.method for c in options}):
        members = [c for c in options if c.recipe.method == method]
        front = pareto([Option(c.size_bytes, c.loss) for c in members])
        out += [members[i] for i in front]
    return out


def expected_loss(run: Run, final: Final, name: str) -> float:
    """The loss found by encoding, or the planner's estimate where nothing was encoded."""
    recipe = final.planned.mix[name]
    true = (final.losses or {}).get(name, run.true_loss(name, recipe))
    if true is not None:
        return true
    found = run.table.find(name, recipe)
    if found is None:
        raise ValueError(f"{name}: no candidate is stored as {recipe}")
    return found.loss


def speed(run: Run, final: Final) -> dict[str, Any] | None:
    """What decoding the mix is predicted to take, and the bound it was planned with; the measurement follows the file."""
    timing, options = run.timing, run.session.options
    if timing is None:
        return None
    mix = final.planned.mix
    bound = next((b for b in reversed(timing.bounds.values()) if b is not None), None)
    columns = zip(
        timing.targets, timing.totals(mix), timing.rates(mix), timing.prefill_rates(mix), strict=True
    )
    return {
        "prefer": options.prefer,
        "min_speed": options.min_speed,
        "bound": None if bound is None else bound.why,
        "bound_seconds": None if bound is None else bound.seconds,
        "threads": timing.prices.threads,
        "targets": [
            {
                "target": target.name,
                "isa": target.isa,
                "prices": "measured" if target.is_cpu and target.here else "modelled",
                "products_seconds": seconds,
                "predicted_rate": rate,
                "predicted_prefill_rate": prefill,
                "measured_rate": None,
            }
            for target, seconds, rate, prefill in columns
        ],
    }


def resources(session: Session) -> dict[str, Any]:
    """What the conversion could use and what it took, beside what was predicted before it started."""
    machine, predicted = session.machine, session.prediction
    windows = _windows(session)
    fewer = windows is not None and min(windows.values()) < windows["asked"]
    taken = [peaks(machine.device), *session.helpers.peaks, *session.beside.peaks]
    return {
        "devices": [str(d) for d in machine.devices],
        "threads": machine.threads,
        "effort": session.options.effort,
        "host_bound_bytes": machine.host_bytes,
        "host_peak_bytes": sum(p.host_bytes for p in taken),
        "gpu_bound_bytes": machine.gpu_bytes or None,
        "gpu_peak_bytes": _of_the_fullest(taken),
        "peaks": [asdict(p) for p in taken],
        "memory_short": machine.short and fewer,
        "windows": windows,
        "seconds": sum(s.seconds for s in session.stages.done),
        "predicted_seconds": None if predicted is None else predicted.total_seconds,
        "predicted_host_bytes": None if predicted is None else predicted.host_bytes,
        "predicted_gpu_bytes": None if predicted is None else predicted.gpu_bytes,
    }


def _of_the_fullest(taken: Sequence[Peaks]) -> int | None:
    """The memory taken of the GPU of which most was: the peaks of its processes, as if they came together."""
    of = Counter[str]()
    for found in taken:
        if found.gpu_bytes is not None:
            of[found.device] += found.gpu_bytes
    return max(of.values(), default=None)


def _windows(session: Session) -> dict[str, int] | None:
    """How many windows there were, how many were calibrated on, and waited while layers were encoded."""
    file = session.calibration
    if file is None:
        return None
    calibrated = int(file.metadata["source"]["fit_windows"])
    asked = int(file.metadata["source"].get("found_windows", calibrated))
    found = {"asked": asked, "calibrated": calibrated}
    for step in ("front to back", "encode"):
        if step in session.windows:
            found[step.replace(" ", "_")] = session.windows[step]
    return found


def _protocol(session: Session) -> dict[str, Any]:
    if session.calibration is None:
        return {}
    source = session.calibration.metadata["source"]
    held_out, reported = (len(calibrations.domains(session.calibration, s)) for s in ("held_out", "report"))
    return {
        "windows_that_choose": held_out,
        "windows_that_report": reported or held_out,
        "seq_len": source.get("seq_len"),
        "scored": "the last half of every window"
        if session.calibration.metadata["language"]
        else "pooled outputs",
        "arithmetic": "float32",
    }


def _files_bytes(session: Session) -> int:
    return sum(min(len(c), len(zlib.compress(c, 9))) for c in session.checkpoint.files().values())
