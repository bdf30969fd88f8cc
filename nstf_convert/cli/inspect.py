"""`nstf inspect`: what is in a file, from its header alone."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nstf_convert import stated
from nstf_convert.cli import options
from nstf_convert.cli.attention import kv_pairs, kv_summary, windows_in
from nstf_convert.cli.convert import accuracy_pairs
from nstf_convert.cli.output import print_json, print_pairs, print_table
from nstf_convert.cli.plan import number
from nstf_convert.cli.sizes import format_bytes

if TYPE_CHECKING:
    from nstf.runtime.artifact import Artifact

ENGINE_NOTE = (
    "int8 activations cost 0.0001 (trellis) to 0.001 nats of KLD a token and 0.002 in a prompt, "
    "measured on a model of 135 M parameters (docs/cpu.md); --exact turns them off"
)
ArtifactPath = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="An .nstf file.")]


def inspect(
    artifact: ArtifactPath,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Also say which kernel runs each tensor here.")
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="Rows of activations the kernels are chosen for.")] = 1,
    device: Annotated[str, typer.Option(help="Device the kernels are chosen for.")] = "cpu",
    tp: Annotated[
        int | None, typer.Option("--tp", metavar="N", help="Also say whether N ranks can share it.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Print the plan of an artifact: encoding, bits, bytes and expected loss of every tensor.

    Example: nstf inspect model.nstf --kernels
    """
    options.check_file(artifact)
    from nstf.runtime.artifact import open_artifact

    with open_artifact(artifact) as opened:
        rows = [describe_tensor(opened, name, device if kernels else None, batch) for name in opened.names()]
        summary = summarise(opened, rows)
        engine = engine_kernels(opened) if kernels and device == "cpu" else None
        parallel = None if tp is None else divided(opened, tp)
    if engine is not None:
        for row in rows:
            row["engine"] = engine.get(row["tensor"], "-")
    if json:
        extra = {} if parallel is None else {"tensor_parallel": {"ranks": tp, "problems": parallel}}
        print_json({"summary": summary, "tensors": rows, **extra})
        return
    columns = ["tensor", "role", "encoding", "shape", "nominal", "on disk", "bytes", "loss"]
    left = 4
    if kernels:
        columns.insert(left, "kernel")
        left += 1
        if engine:
            columns.insert(left, "engine")
            left += 1
    print_table(columns, [[row_cell(row, c) for c in columns] for row in rows], left=left)
    typer.echo("")
    show_summary(artifact, summary)
    if engine is not None:
        typer.echo(ENGINE_NOTE if engine else "the CPU engine does not run this model; its modules do")
    if parallel is not None:
        if not parallel:
            typer.echo(f"every tensor can be divided among {tp} ranks")
        for name, problem in parallel.items():
            typer.echo(f"{name} cannot be divided among {tp} ranks: {problem}")


def divided(artifact: "Artifact", ranks: int) -> dict[str, str]:
    """Why tensors cannot be divided among so many ranks, by name; {} where all can."""
    from nstf.runtime.tensor_parallel import tensor_parts

    parts = tensor_parts(artifact, ranks)
    return {name: found.problem for name, found in parts.items() if found.problem is not None}


def engine_kernels(artifact: "Artifact") -> dict[str, str]:
    """The CPU engine's kernel of every matrix, by tensor name; {} for a model it does not run."""
    from nstf.errors import UnsupportedError
    from nstf.runtime.engine import Engine

    try:
        return Engine(artifact).kernels
    except UnsupportedError:
        return {}


def describe_tensor(artifact: "Artifact", name: str, device: str | None, batch: int) -> dict[str, Any]:
    """One row: how a tensor is stored. `device` None leaves the kernel out."""
    from nstf.kernels.formats import stored_bytes
    from nstf_convert.report.describe import compact, disk_bits, nominal_bits

    record, stored = artifact.record(name), artifact.stored_name(name)
    plan = artifact.manifest.plan
    shared = stored != name
    row: dict[str, Any] = {
        "tensor": name,
        "role": stated.role(plan, name),
        "encoding": "shared" if shared else compact(record.tree),
        "shared_with": stored if shared else None,
        "shape": list(record.shape),
        "dtype": record.dtype,
        "nominal_bits": 0.0 if shared else nominal_bits(record.tree, record.shape),
        "disk_bits": 0.0 if shared else disk_bits(record.tree, record.shape),
        "size_bytes": 0 if shared else stored_bytes(record.tree, record.shape),
        "expected_loss": stated.expected_loss(plan, name),
    }
    if device is not None:
        row["kernel"] = kernel_name(artifact, name, device, batch)
    return row


def kernel_name(artifact: "Artifact", name: str, device: str, batch: int) -> str:
    """The kernel that would run a matrix; `decode` for a tensor that is no matrix."""
    import torch

    from nstf.errors import UsageError
    from nstf.kernels.registry import describe

    encoded = artifact.encoded(name)
    if len(encoded.shape) != 2:
        return "decode"
    try:
        return describe(encoded, torch.device(device), batch)
    except RuntimeError as error:
        raise UsageError(f"--device {device}: {str(error).splitlines()[0]}") from error


def summarise(artifact: "Artifact", rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The header's facts: model, budget, size, accuracy, source."""
    import math

    manifest = artifact.manifest
    config = artifact.object("config.json") if "config.json" in manifest.files else {}
    classes = config.get("architectures")
    parameters = sum(math.prod(r["shape"]) for r in rows if r["shared_with"] is None)
    return {
        "format_version": manifest.version,
        "model_type": config.get("model_type"),
        "architecture": classes[0] if isinstance(classes, list) and classes else None,
        "size_bytes": artifact.size_bytes,
        "parameters": parameters,
        "bits_per_weight": 8 * artifact.size_bytes / max(1, parameters),
        "tensors": len(rows),
        "files": artifact.file_names(),
        "budget": manifest.plan.get("budget"),
        "accuracy": manifest.report.get("accuracy"),
        "provenance": dict(manifest.provenance),
        "attention_plan": bool(manifest.attention),
        "kv_cache": kv_summary(manifest.attention, windows_in(config)) if manifest.attention else None,
    }


def show_summary(path: Path, summary: dict[str, Any]) -> None:
    """The summary as text."""
    size = summary["size_bytes"]
    pairs: list[tuple[str, object]] = [
        (
            "model",
            f"{summary['architecture'] or 'unknown architecture'} ({summary['model_type'] or 'no config'})",
        ),
        ("size", f"{size} bytes ({format_bytes(size)})"),
        ("bits per weight", f"{summary['bits_per_weight']:.3f}, everything counted"),
    ]
    budget = summary["budget"]
    if isinstance(budget, dict):
        pairs.append(("budget", f"{budget.get('kind')} {budget.get('value')}"))
    pairs += accuracy_pairs(stated.accuracy(summary))
    pairs += [(k, v) for k, v in sorted(summary["provenance"].items()) if isinstance(v, str | int | float)]
    pairs.append(("attention plan", "inside" if summary["attention_plan"] else "none"))
    if summary["kv_cache"] is not None:
        pairs += kv_pairs(summary["kv_cache"])
    pairs.append(("files", ", ".join(summary["files"]) or "none"))
    print_pairs(str(path), pairs)


def row_cell(row: dict[str, Any], column: str) -> object:
    """The text of one cell of the table."""
    if column == "shape":
        return "x".join(str(n) for n in row["shape"]) or "scalar"
    if column in ("nominal", "on disk"):
        return number(row["nominal_bits" if column == "nominal" else "disk_bits"], ".3f")
    if column == "loss":
        return number(row["expected_loss"], ".3g")
    return {"bytes": row["size_bytes"], "role": row["role"] or "-"}.get(column, row.get(column))
