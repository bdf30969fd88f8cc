"""`nstf plan`: what `convert` would do, without writing the file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nstf.errors import UsageError
from nstf_convert.cli import options
from nstf_convert.cli.output import print_json, print_pairs, print_table
from nstf_convert.cli.schema import with_options
from nstf_convert.cli.sizes import format_bytes


@with_options(
    "datasets", "calibration", "samples", "seq_len", "seed", "effort", "device", "memory", "gpu_memory", "threads",
    "work_dir", "formats", "fuse",
)  # fmt: skip
def plan(
    model: options.Model,
    budget: options.BudgetText = None,
    target_size: options.TargetSize = None,
    target_bpw: options.TargetBpw = None,
    max_kl: options.MaxKl = None,
    json: options.Json = False,
    *,
    settings: Mapping[str, Any],
) -> None:
    """Show which encoding each tensor would get, the bytes and the expected loss.

    Example: nstf plan ./model --budget 0.5
    """
    if max_kl is not None and not (budget or target_size or target_bpw):
        raise UsageError(
            "--max-kl: a bound on the measured divergence needs a conversion, plan with a size such as --budget 0.5"
        )
    chosen = options.build_options(
        model, Path("model.nstf"), (budget, target_size, target_bpw, max_kl), settings, force=True
    )
    from nstf_convert import pipeline

    result = pipeline.plan(chosen)
    if json:
        print_json(result)
    else:
        show(result)


def show(result: dict[str, Any]) -> None:
    """The plan as text: one row a tensor, then the totals."""
    rows = [
        (
            t["name"],
            t.get("role", "-"),
            t.get("encoding", "-"),
            number(t.get("disk_bits"), ".3f"),
            t.get("size_bytes", "-"),
            number(t.get("expected_loss"), ".3g"),
        )
        for t in result.get("tensors", [])
    ]
    if rows:
        print_table(("tensor", "role", "encoding", "bits", "bytes", "expected loss"), rows, left=3)
    file, budget = result["file"], result["budget"]
    losses = [t["expected_loss"] for t in result["tensors"] if t["expected_loss"] is not None]
    stages = result.get("stages") or []
    pairs: list[tuple[str, object]] = [
        ("size", f"{file['size_bytes']} bytes ({format_bytes(file['size_bytes'])})"),
        ("budget", f"{budget['bytes']} bytes" if budget.get("bytes") is not None else f"{budget['kind']}"),
        ("bits per weight", f"{number(file['bits_per_weight'], '.3f')} everything counted"),
        ("expected loss", f"{sum(losses):.4g} over {len(losses)} tensors, a prediction: convert measures"),
    ]
    resources = result.get("resources") or {}
    if resources.get("predicted_seconds") is not None:
        from nstf_convert.pipeline.session import minutes

        pairs.append(("convert takes about", minutes(resources["predicted_seconds"])))
        peak = resources["predicted_gpu_bytes"] or resources["predicted_host_bytes"]
        pairs.append(("and memory of about", format_bytes(peak)))
    if stages:
        pairs.append(("time so far", f"{sum(s['seconds'] for s in stages):.1f} s"))
        pairs.append(("peak memory", format_bytes(max(s["peak_memory_bytes"] for s in stages))))
    print_pairs("", pairs)


def number(value: object, form: str) -> str:
    """`value` formatted, or `-` when it was not measured."""
    return format(value, form) if isinstance(value, int | float) else "-"
