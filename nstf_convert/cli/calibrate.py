"""`nstf calibrate`: the statistics a conversion needs, once, for many budgets."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from nstf_convert.cli import options
from nstf_convert.cli.output import print_json, print_pairs
from nstf_convert.cli.schema import with_options
from nstf_convert.cli.sizes import format_bytes
from nstf_convert.cli.unused import leave_out_unused


@with_options(
    "datasets",
    "samples",
    "seq_len",
    "seed",
    "context",
    "effort",
    "device",
    "memory",
    "gpu_memory",
    "threads",
    "work_dir",
    "restart",
    "force",
)
def calibrate(
    model: options.Model,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", parser=options.file_path, metavar="PATH", help="The calibration file to write."
        ),
    ],
    json: options.Json = False,
    *,
    settings: Mapping[str, Any],
) -> None:
    """Measure a model on text: Hessians, sensitivities, reference logits.

    With --context also what every attention head and KV group bears at that length.

    Example: nstf calibrate ./model --dataset notes.txt -o model.calibration
    """
    options.check_output(output, [model, *(settings["datasets"] or [])], settings["force"])
    chosen = options.build_options(model, output, None, settings)
    leave_out_unused(model)
    from nstf_convert import pipeline

    path = Path(pipeline.calibrate(chosen))
    size = path.stat().st_size
    if json:
        print_json({"output": str(path), "size_bytes": size})
        return
    print_pairs("", [("written", path), ("size", format_bytes(size))])
    typer.echo(
        f"next: nstf convert {shlex.quote(model)} --calibration {shlex.quote(str(path))} --budget 0.5 -o model.nstf"
    )
