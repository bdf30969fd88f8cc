"""What a conversion says about itself: report.json, and the small part that goes into the artifact."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nstf import __version__
from nstf_convert.measure import Accuracy
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.candidates import Candidate
from nstf_convert.planner import Option, pareto
from nstf_convert.report import build as schema

if TYPE_CHECKING:
    from nstf_convert.pipeline.choose import Table
    from nstf_convert.pipeline.convert import Chosen
    from nstf_convert.pipeline.job import Job

# Floats in the artifact have six digits, so that its size is known before they are.
DIGITS = 6
LONGEST_FLOAT = 0.000123457


class Meta:
    """The artifact's plan, provenance, attention and report, in full or with every number at its longest."""

    def __init__(self, job: "Job", attention: dict[str, Any] | None) -> None:
        self._job = job
        self.attention = attention
        self.true_losses: dict[str, float] = {}
        self.table: Table | None = None

    def widest(self) -> dict[str, Any]:
        """Takes at least as many bytes as `final` will."""
        job = self._job
        losses = dict.fromkeys((n for n, u in job.units.items() if u.kept is None), LONGEST_FLOAT)
        accuracy: dict[str, Any] = {}
        if job.calibration is not None and job.calibration.metadata["language"]:
            names = Accuracy.__dataclass_fields__
            accuracy = {n: LONGEST_FLOAT if f.type is not int else 1234567890 for n, f in names.items()}
        elif job.calibration is not None:
            accuracy = dict.fromkeys(("mean_cosine", "min_cosine", "relative_l2"), LONGEST_FLOAT)
            accuracy["outputs"] = 1234567890
        uniform = {"encoding": "x" * 60, "size_bytes": 10**12, "accuracy": accuracy}
        return self._meta(losses, {"chosen": "uniform", "final": accuracy, "uniform": uniform})

    def final(self, table: "Table", chosen: "Chosen") -> dict[str, Any]:
        """The real thing; floats rounded to six digits."""
        losses = {n: _expected(table, chosen, self.true_losses, n) for n in chosen.planned.mix}
        uniform = None
        if chosen.uniform is not None:
            planned, measured = chosen.uniform
            uniform = {
                "encoding": planned.label[:60],
                "size_bytes": planned.size_bytes,
                "accuracy": measured.accuracy.to_json(),
            }
        final = None if chosen.measured is None else chosen.measured.accuracy.to_json()
        return self._meta(losses, {"chosen": _chosen_word(chosen), "final": final, "uniform": uniform})

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


def build(job: "Job", table: "Table", chosen: "Chosen", meta: Meta, size_bytes: int) -> dict[str, Any]:
    """report.json as data (its schema is nstf_convert.report.build)."""
    job.encoder.each([u for u in job.units.values() if u.kept is None], job.encoder.signature, lambda u: None)
    tensors = [_tensor(job, table, chosen, meta, name) for name in sorted(job.units)]
    uniform = None
    if chosen.uniform is not None:
        planned, measured = chosen.uniform
        uniform = schema.Uniform(planned.label, planned.size_bytes, measured.accuracy.to_json())
    accuracy = schema.AccuracyFacts(
        final=None if chosen.measured is None else chosen.measured.accuracy.to_json(),
        protocol=_protocol(job),
        chosen=_chosen_word(chosen),
        uniform=uniform,
        tried=chosen.tried,
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
        attention=meta.attention,
        calibration=_calibration(job),
        stages=job.stages.done,
    )


def _tensor(job: "Job", table: "Table", chosen: "Chosen", meta: Meta, name: str) -> schema.TensorReport:
    unit = job.units[name]
    recipe = chosen.planned.mix.get(name)
    note = f"copied: {unit.kept}" if unit.kept else ""
    options = table.candidates.get(name, ())
    rejected = [
        schema.Alternative(c.tree, c.size_bytes, c.loss) for c in worth_showing(options) if c.recipe != recipe
    ]
    expected = None if recipe is None else _expected(table, chosen, meta.true_losses, name)
    return schema.TensorReport(
        name=name,
        role=unit.role,
        shape=unit.shape,
        dtype=unit.dtype,
        tree=mixes.tree_of(unit, recipe),
        source_bytes=job.checkpoint.info(name).size_bytes,
        expected_loss=expected,
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


def _expected(table: "Table", chosen: "Chosen", true_losses: Mapping[str, float], name: str) -> float:
    """The loss found by encoding, or the planner's estimate where nothing was encoded."""
    if name in true_losses and chosen.measured is not None:
        return true_losses[name]
    recipe = chosen.planned.mix[name]
    return next(c.loss for c in table.candidates[name] if c.recipe == recipe)


def _chosen_word(chosen: "Chosen") -> str:
    return "uniform" if chosen.uniform is not None and chosen.planned == chosen.uniform[0] else "mix"


def _protocol(job: "Job") -> dict[str, Any]:
    if job.calibration is None:
        return {}
    source = job.calibration.metadata["source"]
    return {
        "held_out_windows": source.get("held_out_windows"),
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
    import zlib

    return sum(min(len(c), len(zlib.compress(c, 9))) for c in job.checkpoint.files().values())


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
