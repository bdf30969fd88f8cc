"""The conversion side of nstf: command line, checkpoint readers, pipeline, planner, gates and reports.

import nstf

result = nstf.convert("./model", budget=0.5, dataset="docs/", output="model.nstf")
print(result.size_bytes, result.report["accuracy"]["final"])
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Any, Unpack

    from nstf_convert.keywords import ConvertKeywords
    from nstf_convert.options import ConvertResult

__all__ = ["convert"]


def convert(
    model: str | Path,
    *,
    output: str | Path | None = None,
    budget: float | None = None,
    target_size: int | None = None,
    target_bpw: float | None = None,
    max_kl: float | None = None,
    dataset: str | Path | Sequence[str | Path] = (),
    **options: Unpack[ConvertKeywords],
) -> ConvertResult:
    """Converts a model into one .nstf file that is never larger than the budget; gives back its path and report.

    model: a Hugging Face folder, a GGUF or ONNX file, or a hub name. output: by default the model's name with .nstf, in
    the current folder. Exactly one of: budget (share of the checkpoint's tensor bytes, 0..1), target_size (bytes of the
    file), target_bpw (bits per weight, the whole file counted), max_kl (mean KL divergence in nats on held-out text).
    dataset: texts to calibrate on. options: further fields of nstf_convert.options.ConvertOptions, such as
    effort="fast", device="cpu", memory=6 << 30, force=True (docs/api.md lists them).

    Raises nstf.errors: UsageError, BudgetError (with the smallest size that can be), CorruptError, UnsupportedError.
    """
    import os
    from pathlib import Path

    from nstf.errors import UsageError
    from nstf.runtime.artifact.header import short
    from nstf_convert.budget import Budget, Kind
    from nstf_convert.checkpoint.paths import check_path
    from nstf_convert.options import ConvertOptions

    kinds: dict[Kind, float | None] = {
        "ratio": budget, "bytes": target_size, "bpw": target_bpw, "max_kl": max_kl,
    }  # fmt: skip
    given = [(kind, value) for kind, value in kinds.items() if value is not None]
    if len(given) != 1:
        raise UsageError("give exactly one of budget, target_size, target_bpw and max_kl")
    kind, size = given[0]
    if isinstance(size, bool) or not isinstance(size, int | float) or not abs(size) < 1e300:
        raise UsageError(f"the {'budget' if kind == 'ratio' else kind} {short(size, 40)} is no number")
    for path in (model, output, *(dataset if isinstance(dataset, list | tuple) else (dataset,))):
        if not isinstance(path, str | Path | None) or model is None:
            raise UsageError(f"{short(path, 40)} is no path: give a text or a Path")
    texts = [dataset] if isinstance(dataset, str | Path) else list(dataset or ())
    check_path(model)
    if isinstance(output, str) and output.endswith(os.sep):  # Path forgets that
        raise UsageError(f"the output {output} is a folder: give the name of a file in it")
    target = Path(output) if output is not None else _default_output(model)
    known = sorted(set(ConvertOptions.__dataclass_fields__) - {"model", "output", "budget", "datasets"})
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UsageError(f"unknown option {unknown[0]!r}: there are {', '.join(known)}")
    settings: dict[str, Any] = dict(options)
    chosen = ConvertOptions(
        model=str(model),
        output=target,
        budget=Budget(kind, float(size)),
        datasets=tuple(map(str, texts)),
        **settings,
    )
    from nstf_convert import pipeline

    return pipeline.convert(chosen)


def _default_output(model: str | Path) -> Path:
    from nstf_convert.cli.options import default_output

    return default_output(str(model))
