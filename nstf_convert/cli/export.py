"""`nstf export`: an artifact in the formats of other engines."""

import json as json_module
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nstf.errors import UsageError
from nstf_convert.cli import options
from nstf_convert.cli.inspect import ArtifactPath
from nstf_convert.cli.output import print_json, print_pairs
from nstf_convert.cli.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from nstf_convert.export.plan import ExportPlan

TARGETS = ("hf", "transformers", "compressed-tensors", "gguf", "onnx")
DTYPES = ("original", "bfloat16", "float16", "float32")


def export(
    artifact: ArtifactPath,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="The folder to write, or for gguf and onnx a file; must be new or empty."
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="TARGET",
            help="hf: decoded weights, for any tool. transformers: the encoded form, which from_pretrained loads after "
            "`import nstf.integrations.transformers`. compressed-tensors: for vLLM and transformers. gguf: for llama.cpp. "
            "onnx: for ONNX Runtime.",
        ),
    ] = "hf",
    dtype: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"{', '.join(DTYPES)}: of what is decoded. original: the model's own for hf, float16 for gguf and "
            "compressed-tensors, float32 for onnx.",
        ),
    ] = "original",
    allow_loss: Annotated[
        bool, typer.Option("--allow-loss", help="Round what the target cannot hold exactly.")
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option(
            "--source",
            metavar="FILE",
            help="For onnx: the .onnx that was converted, rewritten with these weights.",
        ),
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="For the model card: the hub name of the original.")
    ] = None,
    licence: Annotated[
        str | None, typer.Option("--license", metavar="NAME", help="For the model card: such as apache-2.0.")
    ] = None,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest file of a folder.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an older export.")] = False,
    json: options.Json = False,
) -> None:
    """Write the model for other engines, with a model card. First says what is exact, and refuses to lose anything.

    Example: nstf export model.nstf --to gguf -o model.gguf
    """
    options.check_file(artifact)
    if to not in TARGETS:
        raise UsageError(f"--to {to!r}: choose one of {', '.join(TARGETS)}")
    if to == "transformers" and dtype != "original":
        raise UsageError("--dtype is for decoded weights: leave it out with --to transformers")
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    if source is not None and to != "onnx":
        raise UsageError("--source is for --to onnx")
    limit = parse_bytes(shard_size, "--shard-size")
    from nstf_convert import export as exports

    facts = {"base_model": base_model, "license": licence}
    request = exports.Request(
        target=to,
        output=output,
        dtype=None if dtype == "original" else dtype,
        shard_bytes=limit,
        allow_loss=allow_loss,
        overwrite=overwrite,
        source=source,
        facts=tuple((key, value) for key, value in facts.items() if value),
        # For the model card, which is published: names of files, not where they lie on this machine.
        command=f"nstf export {shlex.quote(artifact.name)} --to {to}"
        + (f" --dtype {dtype}" if dtype != "original" else "")
        + (f" --source {shlex.quote(source.name)}" if source is not None else "")
        + (" --allow-loss" if allow_loss else ""),
    )
    plan, written = exports.export(artifact, request, None if json else _announce)
    total = sum(size for _, size in written)
    if json:
        print_json(
            {
                "output": str(output),
                "size_bytes": total,
                "files": dict(written),
                "tensors": plan.totals(),
                "types": plan.types(),
                "notes": plan.notes,
            }
        )
        return
    print_pairs(f"wrote {output}", [(name, format_bytes(size)) for name, size in written])
    typer.echo(f"next: {next_step(output, to)}")


def _announce(plan: "ExportPlan") -> None:
    """What will be exact, widened and lossy, before anything is written."""
    pairs = []
    for kind, total in plan.totals().items():
        names = {i.there for i in plan.items if i.kind == kind}
        shown = ", ".join(sorted(names)[:6]) + (" ..." if len(names) > 6 else "")
        here, there = format_bytes(total["bytes_here"]), format_bytes(total["bytes_there"])
        pairs.append((kind, f"{total['tensors']} tensors, {here} here, {there} there: {shown}"))
    print_pairs(f"to {plan.target}", [*pairs, *(("note", note) for note in plan.notes)])


def next_step(output: Path, target: str = "hf") -> str:
    """The call that loads an export."""
    if target == "gguf":
        file = output if output.suffix == ".gguf" else next(iter(output.glob("*.gguf")), output)
        return f"llama-cli -m {shlex.quote(str(file))}, or llama_cpp.Llama({str(file)!r})"
    if target == "onnx":
        file = output if output.suffix == ".onnx" else next(iter(output.glob("*.onnx")), output)
        return f"onnxruntime.InferenceSession({str(file)!r})"
    first = "import nstf.integrations.transformers, then " if target == "transformers" else ""
    try:
        config = json_module.loads((output / "config.json").read_bytes())
    except (OSError, ValueError):
        return f"safetensors.torch.load_file reads the files; {output} has no config.json for transformers"
    from nstf_convert.export.card import class_name

    name = class_name(config if isinstance(config, dict) else {})
    return f"{first}transformers.{name}.from_pretrained({str(output)!r})"
