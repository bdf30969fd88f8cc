"""`nstf convert`: a checkpoint and a budget in, one measured .nstf file out."""

import json as json_module
import logging
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from nstf.errors import NstfError, UsageError
from nstf.runtime.artifact.atomic_file import AppearedError
from nstf.runtime.imports import uncollected
from nstf_convert.cli import options
from nstf_convert.cli.attention import chosen_pairs
from nstf_convert.cli.messages import explain
from nstf_convert.cli.output import print_json, print_pairs
from nstf_convert.cli.schema import FIELDS, with_options
from nstf_convert.cli.sizes import format_bytes
from nstf_convert.cli.unused import before_imports
from nstf_convert.inputs import check_artifact_name, check_place, holds, keep_apart, keep_inputs
from nstf_convert.options import ConvertResult

log = logging.getLogger(__name__)

# Short: on a slow machine the timing must stay small beside the conversion.
ROOFLINE_TOKENS = 32
REPORT_SUFFIXES = (".html", ".json")


@with_options(*FIELDS)
def convert(
    model: options.Model,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            parser=options.file_path,
            metavar="PATH",
            help="The .nstf file to write; by default the model's name, here.",
        ),
    ] = None,
    budget: options.BudgetText = None,
    target_size: options.TargetSize = None,
    target_bpw: options.TargetBpw = None,
    max_kl: options.MaxKl = None,
    report: Annotated[
        list[Path] | None,
        typer.Option(help="Also write the report: a .html page or a .json file; repeatable."),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile/--no-profile", help="Time the result for the .html report's roofline.")
    ] = True,
    json: options.Json = False,
    *,
    settings: Mapping[str, Any],
) -> None:
    """Convert a model into one .nstf file that is never larger than the budget.

    Example: nstf convert ./model --budget 0.5 -o model.nstf --report model.html
    """
    output = output or options.default_output(model)
    inputs = [model, *(settings["datasets"] or []), *map(str, filter(None, [settings["calibration"]]))]
    options.check_output(output, inputs, settings["force"])
    check_artifact_name(output)
    check_reports(report or [], output, inputs, settings["force"])
    keep_apart(settings["work_dir"], report or [])
    work_dir = output.with_name(f"{output.name}.work").resolve()
    for path in report or [] if settings["work_dir"] is None else []:
        if holds(work_dir, path):
            raise UsageError(
                f"--report {path} lies in the work directory, which goes at the end: put it elsewhere"
            )
    chosen = options.build_options(
        model, output, (budget, target_size, target_bpw, max_kl), settings, signatures=bool(report)
    )
    before_imports(model, chosen)
    with uncollected():
        from nstf_convert import pipeline

    data: dict[str, Any] = {}
    written: list[Path] = []
    taken: list[Path] = []

    def write_reports(result: ConvertResult) -> None:
        """While the work directory is there: without it the command would begin anew where this is interrupted."""
        data.update(result.report)
        if isinstance(data.get("tool"), dict):
            data["tool"] = {**data["tool"], "command": shlex.join(["nstf", *sys.argv[1:]])}
        if data.get("roofline") is None and any(path.suffix.lower() == ".html" for path in report or []):
            data["roofline"] = measure_roofline(result.output) if profile else None
        for path in {path.resolve(): path for path in report or []}.values():  # one file, however spelled
            if os.path.lexists(path) and not settings["force"]:
                taken.append(path)
            else:
                write_report(path, data)
                written.append(path)

    before = _identity(output)
    try:
        result = pipeline.convert(chosen, write_reports)
    except (KeyboardInterrupt, OSError, NstfError) as error:
        # Nor is it complete where something else took its name, or took it away.
        if _identity(output) == before or not output.is_file() or isinstance(error, AppearedError):
            raise
        raise _complete(output, error, bool(report)) from error
    if json:
        print_json({"output": str(result.output), "size_bytes": result.size_bytes,
                    "budget_bytes": result.budget_bytes, "report": data})  # fmt: skip
    else:
        print_summary(result.output, result.size_bytes, result.budget_bytes, data)
        for path in written:
            typer.echo(f"report: {path}")
        typer.echo(
            f"next: nstf inspect {shlex.quote(str(result.output))}, or {next_step(result.output, data)}"
        )
    if taken:
        raise NstfError(
            f"--report {taken[0]} was written by something else meanwhile, and stays: this report is left out, "
            f"{result.output} is complete"
        )


def _identity(path: Path) -> tuple[int, int, int] | None:
    """What tells one file of a name from the next; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _complete(output: Path, error: BaseException, reported: bool) -> NstfError:
    """What is said of an error that comes when the file has its name: the same command would find it in its way."""
    code, why = explain(error, [])
    rest = ", its report is not: the same command with --force writes it" if reported else ""
    found = NstfError(f"{why}; {output} is complete{rest}")
    found.exit_code = code
    return found


def next_step(output: Path, report: Mapping[str, Any]) -> str:
    """What to try with a new file: text of a language model, outputs of any other."""
    accuracy = (report.get("accuracy") or {}).get("final") or {}
    if "mean_kl" in accuracy:
        return f"nstf generate {shlex.quote(str(output))} 'Once upon a time'"
    if not accuracy:
        return f"nstf.runtime.load_tensors({str(output)!r}) in Python"
    return f"nstf.runtime.load({str(output)!r}) in Python"


def check_reports(reports: list[Path], output: Path, inputs: list[str], force: bool) -> None:
    """Raises UsageError for a report that cannot be written without losing anything, before hours of work."""
    for path in reports:
        if path.suffix.lower() not in REPORT_SUFFIXES:
            raise UsageError(f"--report {path}: the name must end in .html or .json")
        if path.resolve() == output.resolve():
            raise UsageError(f"--report {path} is the output itself: give another name")
        keep_inputs(path, inputs, "--report")
        if not path.parent.is_dir():
            raise UsageError(f"--report {path}: the folder {path.parent} does not exist")
        if os.path.lexists(path) and not force:
            raise UsageError(f"--report {path} exists: give another name, or --force to replace it")
        check_place(path)


def measure_roofline(artifact: Path) -> dict[str, Any] | None:
    """The profile of a finished artifact, or None (said in the log) for a model that cannot be run here.

    The artifact is written by then: whatever goes wrong while it is timed must not fail the conversion.
    """
    import torch

    from nstf_convert.cli.profile import measure

    try:
        return measure(str(artifact), ROOFLINE_TOKENS, 1, torch.device("cpu"), None).to_json()
    except Exception as error:
        log.warning("the report has no roofline: %s: %s", type(error).__name__, error)
        return None


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Writes a report as a page or as JSON, by the name's ending; a reader never sees half of it."""
    if path.suffix.lower() == ".json":
        content = json_module.dumps(report, sort_keys=True, indent=1) + "\n"
    else:
        from nstf_convert.report.html import render

        content = render(report)
    from nstf.runtime.artifact.atomic_file import write_whole

    # The names of files may be of other bytes.
    write_whole(path, content.encode("utf-8", errors="backslashreplace"))


def print_summary(output: Path, size_bytes: int, budget_bytes: int | None, report: Mapping[str, Any]) -> None:
    """What the user asked and got: size against budget, accuracy, where the bytes went."""
    pairs: list[tuple[str, object]] = [("size", f"{size_bytes} bytes ({format_bytes(size_bytes)})")]
    if budget_bytes is not None:
        share = f"{100 * size_bytes / budget_bytes:.2f} % used" if budget_bytes else ""
        pairs.append(("budget", f"{budget_bytes} bytes ({format_bytes(budget_bytes)}), {share}"))
    file = report.get("file") or {}
    if file.get("bits_per_weight") is not None:
        nominal = file.get("nominal_bits_per_weight")
        codes = f" ({nominal:.3f} nominal, codes alone)" if nominal is not None else ""
        pairs.append(("bits per weight", f"{file['bits_per_weight']:.3f} everything counted{codes}"))
    accuracy = report.get("accuracy") or {}
    pairs += accuracy_pairs(accuracy.get("final"))
    pairs += step_pairs(accuracy)
    if uniform := accuracy.get("uniform"):
        kl = (uniform.get("accuracy") or {}).get("mean_kl")
        kept = "; kept, since the mix was not better" if accuracy.get("chosen") == "uniform" else ""
        value = f"{kl:.5f} nats, " if kl is not None else ""
        encoding = uniform["encoding"].removeprefix("uniform ")
        pairs.append(("best uniform file", f"{value}{encoding}, {uniform['size_bytes']} bytes{kept}"))
    for found in accuracy.get("stopped") or ():
        times = found["expected"] / max(found["mix"], 1e-30)
        lost = f"its first layers lost {found['part']:.2g}, the mix's {found['mix_part']:.2g}"
        pairs.append(("given up", f"{found['encoding']}: {lost}; about {times:.1f} times the mix in the end"))
    if report.get("attention"):
        pairs += chosen_pairs(report["attention"])
    from nstf_convert.report import resources, speed

    pairs += speed.pairs(report.get("speed"))
    if divided := report.get("tensor_parallel"):
        times = divided["expected_loss"] / max(divided["expected_loss_free"], 1e-30)
        ranks = ", ".join(str(n) for n in divided["ranks"])
        pairs.append(
            ("can be divided among", f"{ranks} ranks; expected loss {times:.3f} times a free plan's")
        )
    pairs += resources.pairs(report.get("resources") or {})
    print_pairs(f"wrote {output}", pairs)
    sections = file.get("sections", [])
    if sections:
        typer.echo("where the bytes went")
    width = max((len(s["name"]) for s in sections), default=0)
    for section in sections:
        share = 100 * section["size_bytes"] / max(1, size_bytes)
        typer.echo(f"  {section['name']:<{width}}  {section['size_bytes']:>12} bytes  {share:5.1f} %")
    if report.get("families"):
        from nstf_convert.report.families import lines

        typer.echo("families of encodings")
        for line in lines(report["families"]):
            typer.echo(f"  {line}")


def step_pairs(accuracy: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Lines about how the mix was found: domains, search, what came after it."""
    pairs: list[tuple[str, object]] = []
    domains = accuracy.get("domains") or {}
    if len(domains) > 1:
        pairs.append(("by dataset", ", ".join(f"{n} {_f(v, '.5f')}" for n, v in domains.items())))
    search = accuracy.get("search") or {}
    if search.get("steps"):
        accepted = f"{search['accepted']} of {search['steps']} moves accepted in {search['seconds']:.0f} s"
        pairs.append(("search", f"{accepted}, ended by: {search['ended']}"))
    for step in accuracy.get("steps") or []:
        kept = "kept" if step["kept"] else "not kept"
        pairs.append((step["step"], f"{_f(step['before'], '.5f')} -> {_f(step['after'], '.5f')}, {kept}"))
    return pairs


def accuracy_pairs(accuracy: Mapping[str, Any] | None) -> list[tuple[str, object]]:
    """Lines about an accuracy record of the report (a language model's or an encoder's)."""
    if not accuracy:
        return [("accuracy", "not measured")]
    if "mean_cosine" in accuracy:
        return [
            (
                "cosine similarity",
                f"mean {_f(accuracy['mean_cosine'], '.6f')}, minimum {_f(accuracy.get('min_cosine'), '.6f')}",
            ),
            ("relative L2 error", _f(accuracy.get("relative_l2"), ".5f")),
        ]
    tail = (
        f"median {_f(accuracy.get('median_kl'), '.5f')}, 99th percentile {_f(accuracy.get('p99_kl'), '.5f')}"
    )
    perplexity = f"{_pm(accuracy, 'ppl', '.4f')}, reference {_pm(accuracy, 'ppl_reference', '.4f')}"
    return [
        ("mean KLD", f"{_pm(accuracy, 'mean_kl', '.5f')} nats ({tail})"),
        ("same top token", _pm(accuracy, "top1", ".5f")),
        ("perplexity", f"{perplexity}, ratio {_pm(accuracy, 'ppl_ratio', '.5f')}"),
        ("measured on", f"{accuracy.get('tokens', '-')} tokens of {accuracy.get('windows', '-')} windows"),
    ]


def _f(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else "-"


def _pm(accuracy: Mapping[str, Any], key: str, form: str) -> str:
    from nstf_convert.report.parts import measured

    value, error = measured(accuracy.get(key), accuracy.get(f"{key}_se"), form)
    return f"{value} ± {error}" if error else value
