"""`nstf export`: an artifact back to a plain Hugging Face safetensors folder."""

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from nstf.errors import UsageError
from nstf_convert.cli import options
from nstf_convert.cli.inspect import ArtifactPath
from nstf_convert.cli.output import print_json, print_pairs
from nstf_convert.cli.sizes import format_bytes, parse_bytes

TARGETS = ("hf", "transformers")
DTYPES = ("original", "bfloat16", "float16", "float32")


def export(
    artifact: ArtifactPath,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder to write; must be new or empty.")
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="hf: decoded weights, for any tool. transformers: the encoded form, which from_pretrained loads after "
            "`import nstf.integrations.transformers`.",
        ),
    ] = "hf",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}: of decoded weights.")] = "original",
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest file.")] = "5GB",
    json: options.Json = False,
) -> None:
    """Write a folder that transformers loads: decoded, without nstf, or in the encoded form, with it.

    Example: nstf export model.nstf -o model-decoded
    """
    options.check_file(artifact)
    if to not in TARGETS:
        raise UsageError(f"--to {to!r}: choose one of {', '.join(TARGETS)}")
    if to == "transformers" and dtype != "original":
        raise UsageError("--dtype is for decoded weights: leave it out with --to transformers")
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    limit = parse_bytes(shard_size, "--shard-size")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"the output {output} exists: give a new or empty folder")
    if not output.absolute().parent.is_dir():
        raise UsageError(
            f"the folder {output.absolute().parent} does not exist: create it, or give another -o"
        )
    if to == "transformers":
        from nstf.integrations.transformers import export_encoded

        written = export_encoded(artifact, output, limit)
    else:
        from nstf_convert.export_folder import export_folder

        written = export_folder(artifact, output, None if dtype == "original" else dtype, limit)
    total = sum(size for _, size in written)
    if json:
        print_json({"output": str(output), "size_bytes": total, "files": dict(written)})
        return
    print_pairs(f"wrote {output}", [(name, format_bytes(size)) for name, size in written])
    first = "import nstf.integrations.transformers, then " if to == "transformers" else ""
    typer.echo(f"next: {first}{next_step(output)}")


def next_step(folder: Path) -> str:
    """The call that loads an exported folder as the class its config names."""
    try:
        names = json_module.loads((folder / "config.json").read_bytes()).get("architectures") or []
    except (OSError, ValueError):
        return f"safetensors.torch.load_file reads the files; {folder} has no config.json for transformers"
    return f"transformers.{names[0] if names else 'AutoModel'}.from_pretrained('{folder}')"
