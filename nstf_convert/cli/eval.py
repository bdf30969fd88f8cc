"""`nstf eval`: measures an artifact against its reference and judges it by gates."""

import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nstf.errors import GateFailed, UsageError
from nstf_convert.cli import options
from nstf_convert.cli.convert import accuracy_pairs
from nstf_convert.cli.eval_tasks import measure_tasks, print_tasks
from nstf_convert.cli.inspect import ArtifactPath
from nstf_convert.cli.output import print_json, print_pairs
from nstf_convert.cli.schema import with_flags
from nstf_convert.inputs import check_place, keep_inputs

if TYPE_CHECKING:
    from nstf_convert.gates.evaluate import Check
    from nstf_convert.measure import Accuracy, Similarity

TASKS = "Multiple choice"


def eval(
    artifact: ArtifactPath,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference", "-r", callback=options.at_home, help="The model the artifact was made from."
        ),
    ] = None,
    dataset: Annotated[
        Path | None, typer.Option(help="Held-out text: .txt, .jsonl, .parquet or a folder.")
    ] = None,
    max_kl: Annotated[float | None, typer.Option(help="Largest mean KL divergence, nats.")] = None,
    max_p99_kl: Annotated[float | None, typer.Option(help="Largest 99th percentile of it, nats.")] = None,
    min_top1: Annotated[
        float | None, typer.Option(help="Smallest share of equal top tokens, 0 to 1.")
    ] = None,
    max_ppl_ratio: Annotated[
        float | None, typer.Option(help="Largest perplexity over the reference's.")
    ] = None,
    min_cosine: Annotated[float | None, typer.Option(help="Smallest cosine of outputs (encoders).")] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(
            help="Multiple-choice questions as JSON lines (context, choices, answer): accuracy by log-likelihood, and "
            "with --reference the answers that flip.",
            rich_help_panel=TASKS,
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only so many questions of --tasks.", rich_help_panel=TASKS)
    ] = None,
    min_accuracy: Annotated[
        float | None,
        typer.Option(help="Smallest share of questions answered right, 0 to 1.", rich_help_panel=TASKS),
    ] = None,
    min_accuracy_norm: Annotated[
        float | None,
        typer.Option(help="The same, choices compared by score per character.", rich_help_panel=TASKS),
    ] = None,
    max_flips: Annotated[
        float | None,
        typer.Option(
            help="Largest share of questions answered otherwise than by the reference.", rich_help_panel=TASKS
        ),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of text, or inputs of an encoder.")] = 16,
    seq_len: options.SeqLen = 512,
    threads: options.Threads = None,
    junit: Annotated[
        Path | None,
        typer.Option(parser=options.file_path, metavar="FILE", help="Also write the verdict as JUnit XML."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Measure what an artifact lost, and fail (exit code 4) when it lost more than a gate allows.

    Example: nstf eval model.nstf --reference ./model --dataset held-out.txt --max-kl 0.01 --junit gates.xml
    """
    options.check_file(artifact)
    if reference is not None:
        options.check_model(reference)
    options.check_datasets(None if dataset is None else [str(dataset)])
    check_asked(reference, dataset, tasks, limit, min_accuracy, min_accuracy_norm, max_flips)
    for option, value, high in (("--max-kl", max_kl, math.inf), ("--max-p99-kl", max_p99_kl, math.inf),
                                ("--min-top1", min_top1, 1.0), ("--max-ppl-ratio", max_ppl_ratio, math.inf),
                                ("--min-cosine", min_cosine, 1.0)):  # fmt: skip
        check_bound(option, value, high)
    if junit is not None:
        if not junit.parent.is_dir():
            raise UsageError(f"--junit {junit}: the folder {junit.parent} does not exist")
        keep_inputs(junit, [artifact, reference, dataset, tasks], "--junit")
        check_place(junit)
    from nstf_convert.gates.evaluate import Gates, TaskGates, check, check_tasks
    from nstf_convert.gates.junit import junit_xml, write_junit

    start = time.monotonic()
    checks: list[Check] = []
    figures: dict[str, Any] = {}
    gates = Gates(max_kl, max_p99_kl, min_top1, max_ppl_ratio, min_cosine)
    result: dict[str, Any] = {"artifact": str(artifact), "reference": reference}
    # Questions first: a bad line in their file is found before anything long begins.
    if tasks is not None:
        answered = measure_tasks(artifact, reference, tasks, limit, threads)
        checks += check_tasks(TaskGates(min_accuracy, min_accuracy_norm, max_flips), answered.groups[""])
        result["tasks"] = answered.to_json()
        figures |= {f"tasks_{key}": value for key, value in answered.figures().items()}
    if reference is not None and (tasks is None or dataset is not None or gates != Gates()):
        measured, protocol = measure(artifact, reference, dataset, windows, seq_len, threads)
        checks += check(gates, measured)
        result |= {"measured": measured.to_json(), "protocol": protocol}
        figures |= measured.to_json() | protocol
    elif gates != Gates():
        raise UsageError("gates on the divergence compare with a reference: name it with --reference")
    if junit is not None:
        write_junit(junit, junit_xml(str(artifact), checks, figures, time.monotonic() - start, with_flags))
    if json:
        print_json(
            result | {"gates": [gate_json(c) for c in checks], "passed": all(c.passed for c in checks)}
        )
    else:
        if "measured" in result:
            print_pairs(f"{artifact} against {reference}", accuracy_pairs(result["measured"]))
        if tasks is not None:
            print_tasks(answered)
        for c in checks:
            typer.echo(f"  {'pass' if c.passed else 'FAIL'}  {with_flags(c.message())}")
    failed = [c.message() for c in checks if not c.passed]
    if failed:
        raise GateFailed(f"{len(failed)} of {len(checks)} gates failed: {'; '.join(failed)}")


def check_asked(
    reference: str | None,
    dataset: Path | None,
    tasks: Path | None,
    limit: int | None,
    min_accuracy: float | None,
    min_accuracy_norm: float | None,
    max_flips: float | None,
) -> None:
    """Raises UsageError for options that ask for nothing together, or that need another one."""
    if reference is None and (tasks is None or dataset is not None):
        raise UsageError(
            "--reference is missing: name the model the artifact was made from, or give --tasks alone"
        )
    bounds = (
        ("--min-accuracy", min_accuracy), ("--min-accuracy-norm", min_accuracy_norm), ("--max-flips", max_flips),
    )  # fmt: skip
    for option, value in bounds:
        check_bound(option, value, 1.0)
    if tasks is None:
        for option, given in (*bounds, ("--limit", limit)):
            if given is not None:
                raise UsageError(f"{option} is about multiple choice: give the questions with --tasks FILE")
    elif not tasks.is_file():
        there = os.path.lexists(tasks)
        raise UsageError(f"--tasks: {f'{tasks} is no regular file' if there else f'no such file: {tasks}'}")
    if max_flips is not None and reference is None:
        raise UsageError("--max-flips compares with the reference's answers: name it with --reference")


def gate_json(check: "Check") -> dict[str, Any]:
    """One gate's verdict."""
    return {
        "gate": check.gate.replace("_", "-"),
        "value": check.value,
        "bound": check.bound,
        "passed": check.passed,
    }


def check_bound(option: str, value: float | None, high: float) -> None:
    """Raises UsageError for a bound that no measurement can be held against."""
    if value is None:
        return
    if not math.isfinite(value) or value < 0 or value > high:
        limits = "a number of at least 0" if high == math.inf else "a number from 0 to 1"
        raise UsageError(f"{option} {value:g}: give {limits}")


def measure(
    artifact: Path, reference: str, dataset: Path | None, windows: int, seq_len: int, threads: int | None
) -> "tuple[Accuracy | Similarity, dict[str, Any]]":
    """The figures and the protocol they were measured by. Raises NstfError of every kind."""
    import torch

    from nstf_convert.gates import measuring
    from nstf_convert.gates.sides import open_side, warn_about_source

    if threads is not None:
        torch.set_num_threads(threads)
    # Gates decide what is shipped: a damaged file must not pass because the damage is small.
    with open_side(str(artifact), artifact=True) as test, open_side(reference) as before:
        if before.config is None:
            raise UsageError(f"the reference {reference} has no config.json: it cannot be run")
        warn_about_source(test, before)
        return measuring.measure(before, test, dataset, windows, seq_len)
