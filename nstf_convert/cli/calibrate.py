"""`nstf calibrate`: the statistics a conversion needs, once, for many budgets."""

from pathlib import Path
from typing import Annotated

import typer

from nstf_convert.cli import options
from nstf_convert.cli.output import print_json, print_pairs
from nstf_convert.cli.sizes import format_bytes


def calibrate(
    model: options.Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="The calibration file to write.")],
    dataset: options.Datasets = None,
    work_dir: options.WorkDir = None,
    seed: options.Seed = 0,
    samples: options.Samples = None,
    seq_len: options.SeqLen = 512,
    attention_plan: options.AttentionPlan = True,
    threads: options.Threads = None,
    force: options.Force = False,
    json: options.Json = False,
) -> None:
    """Measure a model on text: Hessians, sensitivities, attention, reference logits.

    Example: nstf calibrate ./model --dataset notes.txt -o model.calibration
    """
    options.check_output(output, [model, *(dataset or [])], force)
    chosen = options.build_options(
        model, output, None, datasets=dataset, work_dir=work_dir, seed=seed, samples=samples, seq_len=seq_len,
        attention_plan=attention_plan, threads=threads, force=force,
    )  # fmt: skip
    from nstf_convert import pipeline

    path = Path(pipeline.calibrate(chosen))
    size = path.stat().st_size
    if json:
        print_json({"output": str(path), "size_bytes": size})
        return
    print_pairs("", [("written", path), ("size", format_bytes(size))])
    typer.echo(f"next: nstf convert {model} --calibration {path} --budget 0.5 -o model.nstf")
