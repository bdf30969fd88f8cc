"""What a conversion says about itself: report.json, and the small part that goes into the artifact."""

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nstf import __version__
from nstf_convert.measure import Accuracy
from nstf_convert.pipeline import calibration as calibrations
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.candidates import Candidate
from nstf_convert.planner import Option, pareto
from nstf_convert.report import build as schema
from nstf_convert.report import families

if TYPE_CHECKING:
    from nstf_convert.pipeline.finish import Final
    from nstf_convert.pipeline.job import Job
    from nstf_convert.pipeline.mix import Measured
    from nstf_convert.pipeline.steps import Run

# Floats in the artifact have six digits, so that its size is known before they are.
DIGITS = 6
LONGEST_FLOAT = 0.000123457


class Meta:
    """The artifact's plan, provenance, attention and report, in full or with every number at its longest."""

    def __init__(self, job: "Job", attention: dict[str, Any] | None) -> None:
        self._job = job
        self.attention = attention

    def widest(self) -> dict[str, Any]:
        """Takes at least as many bytes as `final` will."""
        job = self._job
        losses = dict.fromkeys((n for n, u in job.units.items() if u.kept is None), LONGEST_FLOAT)
        accuracy: dict[str, Any] = {}
        domains: dict[str, float] = {}
        if job.calibration is not None and job.calibration.metadata["language"]:
            names = Accuracy.__dataclass_fields__
            accuracy = {n: LONGEST_FLOAT if f.type is not int else 1234567890 for n, f in names.items()}
        elif job.calibration is not None:
            accuracy = dict.fromkeys(("mean_cosine", "min_cosine", "relative_l2"), LONGEST_FLOAT)
            accuracy["outputs"] = 1234567890
        if job.calibration is not None:
            splits = [calibrations.domains(job.calibration, s) for s in ("held_out", "report")]
            domains = dict.fromkeys((d for s in splits for d in s), LONGEST_FLOAT)
        uniform = {"encoding": "x" * 60, "size_bytes": 10**12, "accuracy": accuracy, "domains": domains}
        return self._meta(
            losses, {"chosen": "uniform", "final": accuracy, "domains": domains, "uniform": uniform}
        )

    def final(self, run: "Run", final: "Final") -> dict[str, Any]:
        """The real thing; floats rounded to six digits."""
        losses = {n: _expected(run, final, n) for n in final.planned.mix}
        accuracy = {
            "chosen": _chosen_word(final),
            "final": _accuracy(final.reported),
            "domains": _domains(final.reported),
            "uniform": None,
        }
        if final.uniform is not None:
            accuracy["uniform"] = {
                "encoding": final.uniform.planned.label[:60],
                "size_bytes": final.uniform.planned.size_bytes,
                "accuracy": _accuracy(final.uniform_reported),
                "domains": _domains(final.uniform_reported),
            }
        return self._meta(losses, accuracy)

    def _meta(self, losses: Mapping[str, float], accuracy: dict[str, Any]) -> dict[str, Any]:
        job = self._job
        budget = job.options.budget
        facts = _calibration(job)
        meta: dict[str, Any] = {
            "plan": {
                "budget": {"kind": budget.kind, "value": budget.value},
                "expected_loss": {mixes.file_name(n): v for n, v in sorted(losses.items())},
                "roles": {mixes.file_name(n): u.role for n, u in sorted(job.units.items())},
            },
            "provenance": {
                "tool": f"nstf {__version__}",
                "model_type": str((job.config or {}).get("model_type", "unknown")),
                "format": job.checkpoint.kind,
                "checkpoint": job.checkpoint.fingerprint(),
                "tensor_bytes": job.checkpoint.total_bytes,
                "parameters": sum(u.elements for u in job.units.values()),
                "calibration": job.calibration_fingerprint(),
                "calibration_source": facts.source if facts else "none",
                "seed": job.options.seed,
            },
            "report": {"accuracy": accuracy},
        }
        if self.attention is not None:
            meta["attention"] = self.attention
        return _rounded(meta)  # type: ignore[no-any-return]


def build(run: "Run", final: "Final", size_bytes: int) -> dict[str, Any]:
    """report.json as data (its schema is nstf_convert.report.build)."""
    job = run.job
    job.encoder.each([u for u in job.units.values() if u.kept is None], job.encoder.signature, lambda u: None)
    tensors = [_tensor(run, final, name) for name in sorted(job.units)]
    uniform = None
    if final.uniform is not None:
        planned = final.uniform.planned
        reported = _accuracy(final.uniform_reported) or {}
        uniform = schema.Uniform(
            planned.label, planned.size_bytes, reported, final.uniform.score, _domains(final.uniform_reported)
        )
    accuracy = schema.AccuracyFacts(
        final=_accuracy(final.reported),
        domains=_domains(final.reported),
        selection=None if final.measured is None else final.measured.score,
        protocol=_protocol(job),
        chosen=_chosen_word(final),
        uniform=uniform,
        tried=tuple(run.tried),
        probes=[p.to_json() for p in final.probes],
        search=None if final.search is None else final.search.to_json(),
        steps=final.steps,
        healing=final.healing,
    )
    options = job.options
    return schema.build(
        model=schema.ModelFacts(
            name=options.model,
            architecture=str(((job.config or {}).get("architectures") or ["unknown"])[0]),
            format=job.checkpoint.kind,
            fingerprint=job.checkpoint.fingerprint(),
            parameters=sum(u.elements for u in job.units.values()),
            tensor_bytes=job.checkpoint.total_bytes,
            tensors=len(job.units),
        ),
        budget={
            "kind": options.budget.kind,
            "value": options.budget.value,
            "bytes": options.budget.size_bytes(
                job.checkpoint.total_bytes, sum(u.elements for u in job.units.values())
            ),
        },
        size_bytes=size_bytes,
        tensors=tensors,
        accuracy=accuracy,
        files_bytes=_files_bytes(job),
        attention=run.meta.attention,
        calibration=_calibration(job),
        stages=job.stages.done,
        families=families.compare(_priced(run, final)),
    )


def _priced(run: "Run", final: "Final") -> list[families.Tensor]:
    """Every tensor's candidates by family, with the true losses of those that were encoded."""
    out = []
    for name, options in sorted(run.table.candidates.items()):
        priced = []
        for c in options:
            true = run.find_true_loss(name, c.recipe)
            value = c.loss if true is None else true * run.table.factor(name)
            priced.append(families.Priced(c.tree, c.size_bytes, value, c.exact or true is not None))
        chosen = mixes.tree_of(run.job.units[name], final.planned.mix.get(name))
        out.append(families.Tensor(name, tuple(priced), chosen))
    return out


def _tensor(run: "Run", final: "Final", name: str) -> schema.TensorReport:
    job = run.job
    unit = job.units[name]
    recipe = final.planned.mix.get(name)
    note = f"copied: {unit.kept}" if unit.kept else ""
    options = run.table.candidates.get(name, ())
    rejected = [
        schema.Alternative(c.tree, c.size_bytes, c.loss) for c in worth_showing(options) if c.recipe != recipe
    ]
    return schema.TensorReport(
        name=name,
        role=unit.role,
        shape=unit.shape,
        dtype=unit.dtype,
        tree=mixes.tree_of(unit, recipe),
        source_bytes=job.checkpoint.info(name).size_bytes,
        expected_loss=None if recipe is None else _expected(run, final, name),
        calibrated=job.statistics.calibrated(unit),
        note=note,
        signature=job.encoder.signature(unit),
        rejected=rejected,
    )


def worth_showing(options: "tuple[Candidate, ...] | list[Candidate] | Any") -> list[Candidate]:
    """The Pareto front of every method: by family alone, CP would vanish behind a better Tucker."""
    out = []
    for method in sorted({c.recipe.method for c in options}):
        members = [c for c in options if c.recipe.method == method]
        front = pareto([Option(c.size_bytes, c.loss) for c in members])
        out += [members[i] for i in front]
    return out


def _expected(run: "Run", final: "Final", name: str) -> float:
    """The loss found by encoding, or the planner's estimate where nothing was encoded; with the probes' factor."""
    recipe = final.planned.mix[name]
    true = (final.losses or {}).get(name, run.find_true_loss(name, recipe))
    if true is not None:
        return true * run.table.factor(name)
    found = run.table.find(name, recipe)
    if found is None:
        raise ValueError(f"{name}: no candidate is stored as {recipe}")
    return found.loss


def _accuracy(measured: "Measured | None") -> dict[str, Any] | None:
    return None if measured is None else measured.accuracy.to_json()


def _domains(measured: "Measured | None") -> dict[str, float] | None:
    return None if measured is None else measured.by_domain()


def _chosen_word(final: "Final") -> str:
    return "uniform" if final.is_uniform else "mix"


def _protocol(job: "Job") -> dict[str, Any]:
    if job.calibration is None:
        return {}
    source = job.calibration.metadata["source"]
    held_out, reported = (len(calibrations.domains(job.calibration, s)) for s in ("held_out", "report"))
    return {
        "windows_that_choose": held_out,
        "windows_that_report": reported or held_out,
        "seq_len": source.get("seq_len"),
        "scored": "the last half of every window"
        if job.calibration.metadata["language"]
        else "pooled outputs",
        "arithmetic": "float32",
    }


def _calibration(job: "Job") -> schema.CalibrationFacts | None:
    if job.calibration is None:
        return None
    metadata = job.calibration.metadata
    source = metadata["source"]
    words = {
        "dataset": ", ".join(source.get("datasets", [])),
        "model": "sampled from the model itself",
        "documentation": "the Python manual",
        "noise": "1/f noise",
    }
    return schema.CalibrationFacts(
        source=words[source["origin"]],
        self_generated=source["origin"] == "model",
        windows=source["fit_windows"],
        tokens=metadata["fit_tokens"],
        held_out_tokens=metadata["held_out_tokens"],
        seed=metadata["seed"],
        experts=[schema.ExpertTokens(n, tuple(t)) for n, t in job.statistics.expert_tokens().items()],
    )


def _files_bytes(job: "Job") -> int:
    return sum(min(len(c), len(zlib.compress(c, 9))) for c in job.checkpoint.files().values())


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
