"""`nstf plan`: what `convert` would do, without writing the file."""

from pathlib import Path
from typing import Any

from nstf_convert.cli import options
from nstf_convert.cli.output import print_json, print_pairs, print_table
from nstf_convert.cli.sizes import format_bytes


def plan(
    model: options.Model,
    budget: options.BudgetText = None,
    target_size: options.TargetSize = None,
    target_bpw: options.TargetBpw = None,
    max_kl: options.MaxKl = None,
    dataset: options.Datasets = None,
    calibration: options.Calibration = None,
    work_dir: options.WorkDir = None,
    seed: options.Seed = 0,
    samples: options.Samples = None,
    seq_len: options.SeqLen = 512,
    formats: options.Formats = None,
    fuse: options.Fuse = False,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Show which encoding each tensor would get, the bytes and the expected loss.

    Example: nstf plan ./model --budget 0.5
    """
    chosen = options.build_options(
        model, Path("model.nstf"), (budget, target_size, target_bpw, max_kl), datasets=dataset,
        calibration=calibration, work_dir=work_dir, seed=seed, samples=samples, seq_len=seq_len,
        formats=formats, search=False, fuse=fuse, threads=threads, force=True,
    )  # fmt: skip
    from nstf_convert import pipeline

    result = pipeline.plan(chosen)
    if json:
        print_json(result)
    else:
        show(result)


def show(result: dict[str, Any]) -> None:
    """The plan as text: one row a tensor, then everything else the pipeline put in it."""
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
    pairs = [(k.replace("_", " "), text(k, v)) for k, v in result.items() if k != "tensors"]
    print_pairs("", pairs)


def number(value: object, form: str) -> str:
    """`value` formatted, or `-` when it was not measured."""
    return format(value, form) if isinstance(value, int | float) else "-"


def text(key: str, value: object) -> str:
    """A value of the plan in words; bytes get a readable size beside the exact one."""
    if isinstance(value, dict):
        return ", ".join(f"{k} {text(k, v)}" for k, v in value.items())
    if key.endswith("bytes") and isinstance(value, int):
        return f"{value} ({format_bytes(value)})"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
