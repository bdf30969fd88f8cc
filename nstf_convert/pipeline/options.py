"""What a user asks of a conversion, and what comes back."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nstf_convert.pipeline.budget import Budget


@dataclass(frozen=True)
class ConvertOptions:
    """One conversion.

    model: a Hugging Face folder, a GGUF or ONNX file, or a hub name. datasets: texts to calibrate on (empty: text
    sampled from the model itself). calibration: a file written by `nstf calibrate`. work_dir: where results are kept
    between runs (None: `<output>.work`, removed after success). samples: calibration windows of `seq_len` tokens
    (None: 64). formats: methods the planner may use (None: all). probes: expected losses are corrected by measuring
    groups of tensors. search: measured local search after the plan, at most `search_minutes` long (where it stops then
    depends on the machine) and `search_steps` moves; with neither a few. prefix: the final mix is encoded front to
    back, each layer for what its compressed predecessors give it, when that measures better. heal_minutes: what is
    continuous about the finished mix is tuned against the original for that long, or for `heal_steps` steps (the same
    file every time); heal_layers: most of that goes to encoding layer by layer while what is left learns. fuse: q/k/v
    and gate/up get one format. threads: CPU threads (None: all cores).
    """

    model: str
    output: Path
    budget: Budget
    datasets: tuple[str, ...] = ()
    calibration: Path | None = None
    work_dir: Path | None = None
    seed: int = 0
    samples: int | None = None
    seq_len: int = 512
    formats: tuple[str, ...] | None = None
    probes: bool = True
    search: bool = True
    search_minutes: float | None = None
    search_steps: int | None = None
    prefix: bool = True
    heal_minutes: float = 0.0
    heal_steps: int | None = None
    heal_layers: bool = False
    attention_plan: bool = True
    fuse: bool = False
    threads: int | None = None
    force: bool = False


@dataclass(frozen=True)
class ConvertResult:
    """The file that was written and the report about it (nstf_convert.report.build describes its fields)."""

    output: Path
    size_bytes: int
    budget_bytes: int | None
    report: dict[str, Any]
