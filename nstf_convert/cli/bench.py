"""`nstf bench`: tokens per second of an artifact on this CPU or GPU, and how near memory's limit that is."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nstf.errors import UsageError
from nstf_convert.cli import options
from nstf_convert.cli.inspect import ArtifactPath
from nstf_convert.cli.output import print_json, print_pairs
from nstf_convert.cli.sizes import format_bytes

if TYPE_CHECKING:
    from nstf.runtime.engine_bench import Speed
    from nstf.runtime.graph_bench import GpuSpeed


def bench(
    artifact: ArtifactPath,
    prompt: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of the prompt (512, or as many as the model's context leaves)."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode after it.")] = 64,
    repetitions: Annotated[int, typer.Option(min=1, help="Runs; medians are printed.")] = 3,
    exact: Annotated[bool, typer.Option("--exact", help="No int8 activations on the CPU.")] = False,
    kv_cache: options.KvCache = "float16",
    attention: options.Attention = "full",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 and so on (ROCm is called cuda).")] = "cpu",
    batch: Annotated[int, typer.Option(min=1, help="Sequences decoded together, on a GPU.")] = 1,
    kernels: Annotated[
        Path | None,
        typer.Option(
            help="A file of `nstf compile` for this GPU; its code runs there, so one that you trust."
        ),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="First measure the tiles of products on this GPU, and keep the best."),
    ] = False,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Measure prefill and decode speed on this CPU or on a GPU.

    Example: nstf bench model.nstf --prompt 512 --tokens 128 --threads 2
    """
    options.check_file(artifact)
    options.check_kv_cache(kv_cache)
    options.check_attention(attention, kv_cache)
    from nstf.runtime.artifact import open_artifact

    if device.partition(":")[0] == "cpu":
        if tune or kernels is not None or batch != 1:
            raise UsageError("--tune, --kernels and --batch are for a GPU: add --device cuda")
        from nstf.runtime.engine_bench import measure

        with open_artifact(artifact) as opened:
            found = measure(opened, prompt, tokens, repetitions, exact, threads, kv_cache, attention)
        if json:
            print_json(found.to_json())
        else:
            show(artifact, found)
        return
    from nstf.runtime import graph_bench

    place = options.check_device(device)
    options.refuse_cpu_options(exact, kv_cache)
    if tune:
        tune_tiles(artifact, place, kernels)
    speed = graph_bench.measure(artifact, place, prompt, tokens, repetitions, batch, kernels, attention)
    if json:
        print_json(speed.to_json())
    else:
        show_gpu(artifact, speed)


def tune_tiles(artifact: Path, device: str, kernels: Path | None = None) -> None:
    """Measures the tiles and says where they are kept: not in the place of the compiled kernels that were given."""
    import torch

    from nstf.kernels.triton.aot import DTYPES, target_here
    from nstf.runtime.artifact import open_artifact
    from nstf.runtime.tiles import tiles_path, tune
    from nstf_convert.cli.compile import dtype_of
    from nstf_convert.inputs import keep_inputs

    with open_artifact(artifact) as opened, torch.cuda.device(device):
        target = target_here()
        if kernels is not None and target is not None:
            keep_inputs(tiles_path(artifact, target), [kernels], "--tune")
        path = tune(
            opened, DTYPES[dtype_of(opened, None)], lambda line: typer.echo(f"tiles: {line}", err=True)
        )
    typer.echo(f"tiles written to {path}", err=True)


def show(path: Path, found: "Speed") -> None:
    """The figures of a CPU as text."""
    print_pairs(
        f"{path}, {found.threads} threads",
        [
            ("path", "the CPU engine, as generate uses it; `nstf profile` times the modules one by one"),
            ("load", f"{found.load_seconds:.2f} s"),
            ("prefill", f"{found.prefill_rate:.1f} tokens a second, {found.prompt_tokens} tokens"),
            ("decode", f"{found.decode_rate:.1f} tokens a second, {found.new_tokens} tokens after them"),
            ("bytes per token", format_bytes(found.bytes_per_token)),
            ("read bandwidth measured", f"{found.bandwidth / 1e9:.1f} GB/s"),
            ("share of it that decoding reached", f"{found.share_of_bandwidth:.2f}"),
            (
                "share of the kernels' own speed",
                f"{found.share_of_compute:.2f}, where the caches hold a matrix",
            ),
            ("instruction set", found.isa),
            ("kernels", ", ".join(f"{n} {k}" for k, n in sorted(found.kernels.items()))),
        ],
    )


def show_gpu(path: Path, found: "GpuSpeed") -> None:
    """The figures of a GPU as text."""
    print_pairs(
        f"{path}, {found.device}, {found.batch} at once",
        [
            ("path", "captured graphs, as generate uses them; `nstf profile` times the modules one by one"),
            ("load", f"{found.load_seconds:.2f} s"),
            ("prefill", f"{found.prefill_rate:.1f} tokens a second, {found.prompt_tokens} tokens"),
            ("decode", f"{found.decode_rate:.1f} tokens a second, {found.new_tokens} tokens after them"),
            ("bytes per step", format_bytes(found.bytes_per_token)),
            ("read bandwidth measured", f"{found.bandwidth / 1e9:.1f} GB/s"),
            ("share of it that decoding reached", f"{found.share_of_bandwidth:.2f}"),
            ("memory at the peak", format_bytes(found.peak_bytes)),
        ],
    )
