"""`nstf plan`: what `convert` would do, without writing the file."""

import hashlib
import json as json_module
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from nstf.errors import UsageError
from nstf_convert.cli import options
from nstf_convert.cli.output import print_json, print_pairs, print_table
from nstf_convert.cli.schema import with_options
from nstf_convert.cli.sizes import format_bytes
from nstf_convert.cli.unused import before_imports
from nstf_convert.inputs import check_place, keep_apart, keep_inputs


@with_options(
    "datasets", "calibration", "samples", "seq_len", "seed", "effort", "device", "memory", "gpu_memory", "threads",
    "work_dir", "formats", "fuse", "target", "prefer", "min_speed", "image_size", "tp", "restart",
)  # fmt: skip
def plan(
    model: options.Model,
    budget: options.BudgetText = None,
    target_size: options.TargetSize = None,
    target_bpw: options.TargetBpw = None,
    max_kl: options.MaxKl = None,
    frontier: Annotated[
        bool,
        typer.Option(
            "--frontier", help="Bytes, predicted speed and expected loss at many sizes; takes no budget."
        ),
    ] = False,
    svg: Annotated[
        Path | None,
        typer.Option(
            parser=options.file_path, metavar="FILE", help="With --frontier: also draw it into this file."
        ),
    ] = None,
    json: options.Json = False,
    *,
    settings: Mapping[str, Any],
) -> None:
    """Show which encoding each tensor would get, the bytes and the expected loss.

    Example: nstf plan ./model --budget 0.5, or nstf plan ./model --frontier --target avx2,sm_90
    """
    budget_texts = (budget, target_size, target_bpw, max_kl)
    if frontier:
        show_frontier(model, budget_texts, settings, svg, json)
        return
    if svg is not None:
        raise UsageError("--svg draws the frontier: add --frontier")
    if max_kl is not None and not (budget or target_size or target_bpw):
        raise UsageError(
            "--max-kl: a bound on the measured divergence needs a conversion, plan with a size such as --budget 0.5"
        )
    chosen = options.build_options(model, unwritten(model, settings), budget_texts, settings, force=True)
    before_imports(model, chosen)
    from nstf_convert import pipeline

    result = pipeline.plan(chosen)
    if json:
        print_json(result)
    else:
        show(result)


def unwritten(model: str, settings: Mapping[str, Any]) -> Path:
    """A name for the output, which is not written but names the work directory: neither that of a conversion, whose results
    would go with it, nor that of a plan with other settings. The same command finds what it left when it was interrupted."""
    asked = {name: value for name, value in settings.items() if name not in ("work_dir", "restart")}
    text = json_module.dumps([model, asked], sort_keys=True, default=str)
    return Path(f"nstf-plan-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json")


def show_frontier(
    model: str,
    budget: tuple[str | None, str | None, str | None, str | None],
    settings: Mapping[str, Any],
    svg: Path | None,
    json: bool,
) -> None:
    """Prints the frontier, and draws it where a file is named."""
    if any(text is not None for text in budget):
        raise UsageError("--frontier shows many sizes: leave the budget out")
    if svg is not None:
        if not svg.parent.is_dir():
            raise UsageError(f"--svg {svg}: the folder {svg.parent} does not exist")
        keep_inputs(svg, [model, *(settings["datasets"] or []), settings["calibration"]], "--svg")
        keep_apart(settings["work_dir"], [svg])
        check_place(svg)
    chosen = options.build_options(model, unwritten(model, settings), None, settings, force=True)
    before_imports(model, chosen)
    from nstf.runtime.artifact.atomic_file import write_whole
    from nstf_convert import pipeline
    from nstf_convert.report import frontier as report

    found = pipeline.frontier(chosen)
    if svg is not None:
        write_whole(svg, report.figure(found).encode("utf-8", errors="backslashreplace"))
    if json:
        print_json(found)
        return
    header = [*report.HEADER]
    header[3] = f"tokens/s, {', '.join(found['targets'])}"
    print_table(tuple(header), report.rows(found), left=1)
    if svg is not None:
        typer.echo(f"drawn: {svg}")


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
    from nstf_convert.report import speed

    pairs += speed.pairs(result.get("speed"))
    if stages:
        pairs.append(("time so far", f"{sum(s['seconds'] for s in stages):.1f} s"))
        pairs.append(("peak memory", format_bytes(max(s["peak_memory_bytes"] for s in stages))))
    print_pairs("", pairs)


def number(value: object, form: str) -> str:
    """`value` formatted, or `-` when it was not measured."""
    return format(value, form) if isinstance(value, int | float) else "-"
