"""`nstf bench`: tokens per second of an artifact on this CPU, and how near memory's limit that is."""

from typing import TYPE_CHECKING, Annotated

import typer

from nstf_convert.cli import options
from nstf_convert.cli.inspect import ArtifactPath
from nstf_convert.cli.output import print_json, print_pairs
from nstf_convert.cli.sizes import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from nstf.runtime.engine_bench import Speed


def bench(
    artifact: ArtifactPath,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 512,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode after it.")] = 64,
    repetitions: Annotated[int, typer.Option(min=1, help="Runs; medians are printed.")] = 3,
    exact: Annotated[bool, typer.Option("--exact", help="No int8 activations.")] = False,
    kv_cache: options.KvCache = "float16",
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Measure prefill and decode speed on this CPU.

    Example: nstf bench model.nstf --prompt 512 --tokens 128 --threads 2
    """
    options.check_file(artifact)
    options.check_kv_cache(kv_cache)
    from nstf.runtime.artifact import open_artifact
    from nstf.runtime.engine_bench import measure

    with open_artifact(artifact) as opened:
        found = measure(opened, prompt, tokens, repetitions, exact, threads, kv_cache)
    if json:
        print_json(found.to_json())
        return
    show(artifact, found)


def show(path: "Path", found: "Speed") -> None:
    """The figures as text."""
    print_pairs(
        f"{path}, {found.threads} threads",
        [
            ("load", f"{found.load_seconds:.2f} s"),
            ("prefill", f"{found.prefill_rate:.1f} tokens a second, {found.prompt_tokens} tokens"),
            ("decode", f"{found.decode_rate:.1f} tokens a second, {found.new_tokens} tokens after them"),
            ("bytes per token", format_bytes(found.bytes_per_token)),
            ("read bandwidth measured", f"{found.bandwidth / 1e9:.1f} GB/s"),
            ("share of it that decoding reached", f"{found.share_of_bandwidth:.2f}"),
            ("instruction set", found.isa),
            ("kernels", ", ".join(f"{n} {k}" for k, n in sorted(found.kernels.items()))),
        ],
    )
