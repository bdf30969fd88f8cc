"""What a conversion stores about itself in the artifact, in full or with every number at its longest."""

from collections.abc import Mapping
from typing import Any

from nstf import __version__
from nstf_convert.measure import Accuracy
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.calibrate import statistics as calibrations
from nstf_convert.pipeline.mix import Measured
from nstf_convert.pipeline.outcome import Final
from nstf_convert.pipeline.session import Session
from nstf_convert.report import build as schema

# Floats in the artifact have six digits, so that its size is known before they are.
DIGITS = 6
LONGEST_FLOAT = 0.000123457


class Meta:
    """The artifact's plan, provenance, attention and report, in full or with every number at its longest."""

    def __init__(self, session: Session, attention: dict[str, Any] | None) -> None:
        self._session = session
        self.attention = attention
        # What the report says beside the plan.
        self.attention_facts: dict[str, Any] | None = None

    def widest(self) -> dict[str, Any]:
        """Takes at least as many bytes as `final` will."""
        session = self._session
        losses = dict.fromkeys((n for n, u in session.units.items() if u.kept is None), LONGEST_FLOAT)
        figures: dict[str, Any] = {}
        by_domain: dict[str, float] = {}
        if session.calibration is not None and session.calibration.metadata["language"]:
            names = Accuracy.__dataclass_fields__
            figures = {n: LONGEST_FLOAT if f.type is not int else 1234567890 for n, f in names.items()}
        elif session.calibration is not None:
            figures = dict.fromkeys(("mean_cosine", "min_cosine", "relative_l2"), LONGEST_FLOAT)
            figures["outputs"] = 1234567890
        if session.calibration is not None:
            splits = [calibrations.domains(session.calibration, s) for s in ("held_out", "report")]
            by_domain = dict.fromkeys((d for s in splits for d in s), LONGEST_FLOAT)
        uniform = {"encoding": "x" * 60, "size_bytes": 10**12, "accuracy": figures, "domains": by_domain}
        return self._meta(
            losses, {"chosen": "uniform", "final": figures, "domains": by_domain, "uniform": uniform}
        )

    def final(self, losses: Mapping[str, float], final: Final) -> dict[str, Any]:
        """The real thing; floats rounded to six digits. losses: expected, by tensor."""
        found: dict[str, Any] = {
            "chosen": chosen_word(final),
            "final": accuracy(final.reported),
            "domains": domains(final.reported),
            "uniform": None,
        }
        if final.uniform is not None:
            found["uniform"] = {
                "encoding": final.uniform.planned.label[:60],
                "size_bytes": final.uniform.planned.size_bytes,
                "accuracy": accuracy(final.uniform_reported),
                "domains": domains(final.uniform_reported),
            }
        return self._meta(losses, found)

    def _meta(self, losses: Mapping[str, float], accuracy_facts: dict[str, Any]) -> dict[str, Any]:
        session = self._session
        budget = session.options.budget
        facts = calibration(session)
        meta: dict[str, Any] = {
            "plan": {
                "budget": {"kind": budget.kind, "value": budget.value},
                "expected_loss": {mixes.file_name(n): v for n, v in sorted(losses.items())},
                "roles": {mixes.file_name(n): u.role for n, u in sorted(session.units.items())},
            },
            "provenance": {
                "tool": f"nstf {__version__}",
                "model_type": str((session.config or {}).get("model_type", "unknown")),
                "format": session.checkpoint.kind,
                "checkpoint": session.checkpoint.fingerprint(),
                "tensor_bytes": session.checkpoint.total_bytes,
                "parameters": sum(u.elements for u in session.units.values()),
                "calibration": session.calibration_fingerprint(),
                "calibration_source": facts.source if facts else "none",
                "seed": session.options.seed,
            },
            "report": {"accuracy": accuracy_facts},
        }
        if self.attention is not None:
            meta["attention"] = self.attention
        return _rounded(meta)  # type: ignore[no-any-return]


def accuracy(measured: Measured | None) -> dict[str, Any] | None:
    """The figures of a measurement as stored, or None."""
    return None if measured is None else measured.accuracy.to_json()


def domains(measured: Measured | None) -> dict[str, float] | None:
    """The mean loss by dataset, or None."""
    return None if measured is None else measured.by_domain()


def chosen_word(final: Final) -> str:
    """`mix` or `uniform`."""
    return "uniform" if final.is_uniform else "mix"


def calibration(session: Session) -> schema.CalibrationFacts | None:
    """Where the statistics came from, or None without data."""
    if session.calibration is None:
        return None
    metadata = session.calibration.metadata
    source = metadata["source"]
    words = {
        "dataset": ", ".join(source.get("datasets", [])),
        "model": "sampled from the model itself",
        "mixed": "documentation, code and prose that come with nstf and Python",
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
        experts=[schema.ExpertTokens(n, tuple(t)) for n, t in session.statistics.expert_tokens().items()],
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
