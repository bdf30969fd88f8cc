"""The report of a conversion as plain data: everything that was decided and measured, and what was rejected.

`report.json` is `build(...)` written as JSON. Sizes are bytes, times seconds, divergences nats, losses the
expected end loss 1/2 tr(dW H dW^T) weighted by the tensor's sensitivity. What was not measured is null. Bytes of a tensor
and of what was rejected for it are those of its arrays; the header is a section of its own.

    {"version": 1,
     "tool": {"name": "nstf", "version": "0.1.0", "command": "nstf convert ..."},
     "model": {"name", "architecture", "format", "fingerprint", "parameters", "tensor_bytes", "tensors", "notes"},
     "budget": {"kind", "value", "bytes"},
     "file": {"size_bytes", "bits_per_weight", "nominal_bits_per_weight", "ratio",
              "sections": [{"name", "size_bytes", "source_bytes"}]},
     "accuracy": {"protocol": {...}, "chosen": "mix" | "uniform",
                  "final": {Accuracy or Similarity}, "domains": {dataset: mean KLD}, "selection": score,
                  "uniform": {"encoding", "size_bytes", "accuracy", "selection", "domains"} | null,
                  "stopped": [{"encoding", "size_bytes", "share", "part", "mix_part", "mix", "expected"}],
                  "tried": [{"name", "size_bytes", "mean_kl", "expected_loss"}],
                  "search": {"minutes", "steps_allowed", "steps", "accepted", "seconds", "ended", "moves"} | null,
                  "steps": [{"step", "before", "after", "kept"}], "healing": {...} | null,
                  "structure": [{"factor", "size_bytes", "seconds", "score", "promise", "healed_steps", "kept"}]},
     "families": [{"family", "tensors", "candidates", "exact", "won", "chosen", "median_ratio", "best_ratio",
                   "ruled_out": tensors that a bound kept it from, "bound_ratio": the least bound there; of one matrix
                   for all experts both go by an estimate}],
     "tensors": [{"name", "role", "layer", "shape", "dtype", "method", "encoding", "tree", "nominal_bits", "disk_bits",
                  "size_bytes", "source_bytes", "expected_loss", "calibrated", "note", "signature": {...},
                  "rejected": [{"encoding", "size_bytes", "expected_loss"}],
                  "not_tried": [{"method", "reason", "size_bytes", "bound_ratio": null where the reason is no bound}]}],
     "attention": {the attention plan} | null,
     "calibration": {"source", "self_generated", "windows", "tokens", "held_out_tokens", "seed",
                     "experts": [{"name", "tokens": [one count per expert]}]} | null,
     "stages": [{"name", "seconds", "peak_memory_bytes"}],
     "resources": {"devices", "threads", "host_bound_bytes", "host_peak_bytes", "gpu_bound_bytes", "gpu_peak_bytes",
                   "peaks": [{"device", "host_bytes", "gpu_bytes"}],
                   "memory_short", "windows": {"asked", "calibrated", "front_to_back" or "encode"} | null,
                   "effort", "predicted_seconds", "seconds", "predicted_host_bytes", "predicted_gpu_bytes"} | null,
     "speed": {"prefer", "min_speed", "bound": why, "bound_seconds", "threads",
               "targets": [{"target", "isa", "prices": "measured" | "modelled", "products_seconds", "predicted_rate",
                            "predicted_prefill_rate", "measured_rate"}]} | null,
     "tensor_parallel": {"ranks", "expected_loss", "expected_loss_free"}, with --tp alone,
     "roofline": {...} | null}

A conversion without a stated bound takes standard amounts of memory; `memory_short`: less was free, fewer windows
fitted, and the file differs from one made with more. With several GPUs `peaks` has an entry for each one's process;
`host_peak_bytes` is their sum (files that both have mapped count twice), `gpu_peak_bytes` the largest.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nstf import __version__
from nstf.kernels.formats import Node, leaf_code_bits, node_to_json, stored_bytes
from nstf_convert.report.describe import compact

VERSION = 1

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block|stages)\.(\d+)\.")
_GROUPS = (
    ("attention", ("q", "k", "v", "o", "qkv")),
    ("feed-forward", ("gate", "up", "down", "gate_up")),
    ("experts", ("expert_stack", "expert", "router")),
    ("embedding and head", ("embedding", "head")),
    ("convolutions", ("conv",)),
    ("norms and biases", ("norm", "bias", "vector")),
)


@dataclass(frozen=True)
class ModelFacts:
    """What was converted. `parameters`: elements of all stored tensors; `tensor_bytes`: the budget's base; `notes`: what was
    left out of the checkpoint, and what else its reading showed."""

    name: str
    architecture: str
    format: str
    fingerprint: str
    parameters: int
    tensor_bytes: int
    tensors: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Alternative:
    """An encoding that was priced and not taken."""

    tree: Node
    expected_loss: float


@dataclass(frozen=True)
class NotTried:
    """A method of the conversion of which a tensor has no candidate. size_bytes, bound_ratio: where a bound ruled it out,
    the bytes at which that was closest, and how many times what has to be beaten there is lost at least."""

    method: str
    reason: str
    size_bytes: int | None = None
    bound_ratio: float | None = None


@dataclass(frozen=True)
class TensorReport:
    """One tensor of the file. `method`: what encoded it, by the name of `--formats`. `note` says why, for instance
    "copied: 576 values" or "expert saw 3 tokens"."""

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    tree: Node
    source_bytes: int
    expected_loss: float | None = None
    calibrated: bool = False
    note: str = ""
    signature: Mapping[str, Any] = field(default_factory=dict)
    method: str = "dense"
    rejected: Sequence[Alternative] = ()
    not_tried: Sequence[NotTried] = ()


@dataclass(frozen=True)
class ExpertTokens:
    """Calibration tokens that each expert of one stack saw."""

    name: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class CalibrationFacts:
    """The text the statistics come from. `source`: a path, a hub name, or words that say it."""

    source: str
    self_generated: bool
    windows: int
    tokens: int
    held_out_tokens: int
    seed: int
    experts: Sequence[ExpertTokens] = ()


@dataclass(frozen=True)
class Stage:
    """Time and peak resident memory of one stage of the conversion."""

    name: str
    seconds: float
    peak_memory_bytes: int


@dataclass(frozen=True)
class Uniform:
    """The best file of a single format at the same size, and what it lost."""

    encoding: str
    size_bytes: int
    accuracy: Mapping[str, Any]
    selection: float | None = None
    domains: Mapping[str, float] | None = None


@dataclass(frozen=True)
class AccuracyFacts:
    """final: `to_json()` of the written file's Accuracy or Similarity, on windows that chose nothing; domains: mean
    KLD (or relative L2 error) by dataset, on the same windows; selection: the score on the windows that chose.
    chosen: "mix" | "uniform". stopped: single formats that were given up when a share of their weights was encoded: what
    these lost, and those of the mix, what the whole mix lost and what the format was then expected to lose, on the windows
    that choose. search, steps: what the search and the last steps did. structure: mixes with decompositions that had to keep
    a promise (nstf_convert.pipeline.improve.pays.Round).
    """

    final: Mapping[str, Any] | None
    protocol: Mapping[str, Any] = field(default_factory=dict)
    chosen: str = "mix"
    uniform: Uniform | None = None
    stopped: Sequence[Mapping[str, Any]] = ()
    tried: Sequence[Mapping[str, Any]] = ()
    domains: Mapping[str, float] | None = None
    selection: float | None = None
    search: Mapping[str, Any] | None = None
    steps: Sequence[Mapping[str, Any]] = ()
    healing: Mapping[str, Any] | None = None
    structure: Sequence[Mapping[str, Any]] = ()


def build(
    *,
    model: ModelFacts,
    budget: Mapping[str, Any],
    size_bytes: int,
    tensors: Sequence[TensorReport],
    accuracy: AccuracyFacts,
    files_bytes: int = 0,
    attention: Mapping[str, Any] | None = None,
    calibration: CalibrationFacts | None = None,
    stages: Sequence[Stage] = (),
    roofline: Mapping[str, Any] | None = None,
    families: Sequence[Mapping[str, Any]] = (),
    resources: Mapping[str, Any] | None = None,
    speed: Mapping[str, Any] | None = None,
    tensor_parallel: Mapping[str, Any] | None = None,
    command: str = "",
) -> dict[str, Any]:
    """The report. budget: {"kind", "value", "bytes"}; size_bytes: of the whole file; files_bytes: of config,
    tokenizer and other files as stored. The header's bytes are what remains.
    """
    rows = [_tensor(t) for t in tensors]
    codes_bits = sum(leaf_code_bits(t.tree, t.shape) for t in tensors)
    report: dict[str, Any] = _plain(
        {
            "version": VERSION,
            "tool": {"name": "nstf", "version": __version__, "command": command},
            "model": asdict(model),
            "budget": dict(budget),
            "file": {
                "size_bytes": size_bytes,
                "bits_per_weight": _ratio(8 * size_bytes, model.parameters),
                "nominal_bits_per_weight": _ratio(codes_bits, model.parameters),
                "ratio": _ratio(size_bytes, model.tensor_bytes),
                "sections": _sections(rows, size_bytes, files_bytes),
            },
            "accuracy": asdict(accuracy),
            "tensors": rows,
            "attention": attention,
            "calibration": None if calibration is None else asdict(calibration),
            "families": [dict(f) for f in families],
            "stages": [asdict(stage) for stage in stages],
            "resources": resources,
            "speed": speed,
            **({} if tensor_parallel is None else {"tensor_parallel": tensor_parallel}),
            "roofline": roofline,
        }
    )
    return report


def layer_of(name: str) -> int | None:
    """The number of the layer a parameter belongs to, from its name; None outside the layers."""
    match = _LAYER.search(name)
    return int(match.group(1)) if match else None


def section_of(role: str) -> str:
    """The line of the "where the bytes went" table a role counts in."""
    return next((name for name, roles in _GROUPS if role in roles), "other tensors")


def _tensor(t: TensorReport) -> dict[str, Any]:
    numel = math.prod(t.shape)
    size = stored_bytes(t.tree, t.shape)
    # Of the arrays alone, as the tensor's own: the header has a section of its own.
    rejected = [(stored_bytes(a.tree, t.shape), a) for a in t.rejected]
    return {
        "name": t.name,
        "role": t.role,
        "layer": layer_of(t.name),
        "shape": list(t.shape),
        "dtype": t.dtype,
        "method": t.method,
        "encoding": compact(t.tree),
        "tree": node_to_json(t.tree),
        "nominal_bits": leaf_code_bits(t.tree, t.shape) / numel,
        "disk_bits": 8 * size / numel,
        "size_bytes": size,
        "source_bytes": t.source_bytes,
        "expected_loss": t.expected_loss,
        "calibrated": t.calibrated,
        "note": t.note,
        "signature": dict(t.signature),
        "not_tried": [asdict(n) for n in t.not_tried],
        "rejected": [
            {"encoding": compact(a.tree), "size_bytes": size_bytes, "expected_loss": a.expected_loss}
            for size_bytes, a in sorted(rejected, key=lambda r: (r[0], r[1].expected_loss))
        ],
    }


def _sections(rows: Sequence[Mapping[str, Any]], size_bytes: int, files_bytes: int) -> list[dict[str, Any]]:
    totals: dict[str, list[int]] = {}
    for row in rows:
        entry = totals.setdefault(section_of(row["role"]), [0, 0])
        entry[0] += row["size_bytes"]
        entry[1] += row["source_bytes"]
    largest_first = sorted(totals.items(), key=lambda item: -item[1][0])
    sections: list[dict[str, Any]] = [
        {"name": name, "size_bytes": stored, "source_bytes": source}
        for name, (stored, source) in largest_first
    ]
    header = size_bytes - files_bytes - sum(stored for stored, _ in totals.values())
    sections.append({"name": "config and tokenizer", "size_bytes": files_bytes, "source_bytes": 0})
    sections.append({"name": "header, plan and checksums", "size_bytes": header, "source_bytes": 0})
    return sections


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def _plain(value: Any) -> Any:
    """Lists instead of tuples, and null instead of numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
