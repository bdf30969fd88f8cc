"""`nstf generate`: streams text from an artifact."""

import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from nstf.errors import UnsupportedError, UsageError
from nstf_convert.cli import options
from nstf_convert.cli.inspect import ArtifactPath
from nstf_convert.cli.output import print_json
from nstf_convert.cli.ranks import as_ranks


def generate(
    artifact: ArtifactPath,
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    temperature: options.Temperature = 0.0,
    top_k: Annotated[
        int | None,
        typer.Option(min=0, help="Draw from this many likeliest tokens, 0 for all; the model's, else 50."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Draw from the likeliest tokens with this share together; the model's, else 1.",
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Draw from tokens with this share of the likeliest one's, 0 for all; the model's, else 0.",
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=100.0,
            help="Above 1: tokens that occurred become less likely; the model's, else 1.",
        ),
    ] = None,
    stop: options.Stop = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")
    ] = False,
    seed: options.Seed = 0,
    attention: options.Attention = "full",
    exact: Annotated[
        bool, typer.Option("--exact", help="No int8 activations on the CPU: slower, as the file decodes.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 and so on (ROCm is called cuda).")] = "cpu",
    kernels: Annotated[
        Path | None,
        typer.Option(
            help="A file of `nstf compile` for this GPU; its code runs there, so one that you trust."
        ),
    ] = None,
    kv_cache: options.KvCache = "float16",
    threads: options.Threads = None,
    tensor_parallel: options.TensorParallel = 1,
    json: options.Json = False,
) -> None:
    """Generate text with an artifact.

    Example: nstf generate model.nstf "The capital of France is" --max-new-tokens 20
    """
    options.check_file(artifact)
    options.check_kv_cache(kv_cache)
    options.check_kernels(kernels, device)
    options.check_attention(attention, kv_cache)
    if prompt == "-" and os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise UsageError(
            "a prompt of - reads stdin, which torchrun gives to no rank: write the prompt itself"
        )
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.isprintable() and any("\ud800" <= c <= "\udfff" for c in text):
        raise UsageError("the prompt is not UTF-8 text")
    if not text.strip():
        raise UsageError("the prompt is empty: give some text to continue")
    if device.partition(":")[0] != "cpu":
        if tensor_parallel == 1:  # ranks have devices of their own
            options.check_device(device)
        options.refuse_cpu_options(exact, kv_cache)
    # What is not stated is the file's own; what is, replaces it, 0 and 1 too.
    stated = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty}
    sampling: dict[str, Any] = {"temperature": temperature}
    sampling |= {k: v for k, v in stated.items() if v is not None}
    stops = options.check_stops(stop)
    if temperature == 0 and (min_p or {"top_k", "top_p"} & set(sampling)):
        raise UsageError("--top-k, --top-p and --min-p are for draws: add --temperature 0.8, say")
    rest = (
        artifact,
        text,
        max_new_tokens,
        chat,
        seed,
        attention,
        exact,
        device,
        kernels,
        threads,
        kv_cache,
        sampling,
        stops,
    )
    if tensor_parallel > 1:
        check_options(tensor_parallel, device, attention, kv_cache)
        as_ranks(tensor_parallel, _divided, tensor_parallel, json, *rest, own_cores=device == "cpu")
        return
    plain = device == "cpu" and not (chat or kernels)
    start = time.monotonic()
    made = (
        _by_engine(
            artifact,
            text,
            max_new_tokens,
            exact,
            threads,
            kv_cache,
            sampling | {"seed": seed},
            stops,
            attention,
        )
        if plain
        else None
    )
    _show(text, _by_transformers(1, *rest) if made is None else made, start, json)


def _show(prompt: str, made: Iterator[str], start: float, json: bool) -> None:
    """Prints pieces as they come, or all at the end as JSON."""
    pieces = []
    for piece in made:
        pieces.append(piece)
        if not json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    seconds = time.monotonic() - start
    if json:
        print_json({"prompt": prompt, "text": "".join(pieces), "seconds": seconds})
    else:
        typer.echo("")


def _divided(ranks: int, json: bool, *rest: Any) -> None:
    """What each rank does."""
    _show(rest[1], _by_transformers(ranks, *rest), time.monotonic(), json)


def check_options(ranks: int, device: str, attention: str, kv_cache: str) -> None:
    """Raises UsageError for options that do not go with --tensor-parallel."""
    if attention != "full" or kv_cache != "float16":
        raise UsageError(
            "--attention planned and --kv-cache do not go with --tensor-parallel: leave them out"
        )
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device {device}: with --tensor-parallel give cpu, or cuda for a GPU each")
    if device == "cuda":
        import torch

        if ranks > torch.cuda.device_count() and "RANK" not in os.environ:
            raise UsageError(f"--tensor-parallel {ranks}: there are {torch.cuda.device_count()} GPUs")


def _by_engine(
    artifact: Path,
    prompt: str,
    max_new_tokens: int,
    exact: bool,
    threads: int | None,
    kv_cache: str,
    sampling: dict[str, Any],
    stops: list[str],
    attention: str,
) -> Iterator[str] | None:
    """The text without torch and transformers, or None for a file that needs them."""
    from nstf.runtime import engine_text

    pieces = engine_text.stream(
        artifact, prompt, max_new_tokens, exact, threads, kv_cache=kv_cache, sampling=sampling, stops=stops,
        attention=attention,
    )  # fmt: skip
    try:
        first = next(pieces, "")
    except UnsupportedError:
        return None
    return itertools.chain([first], pieces)


def _by_transformers(
    tensor_parallel: int,
    artifact: Path,
    prompt: str,
    max_new_tokens: int,
    chat: bool,
    seed: int,
    attention: str,
    exact: bool,
    device: str,
    kernels: Path | None,
    threads: int | None,
    kv_cache: str,
    sampling: dict[str, Any],
    stops: list[str],
) -> Iterator[str]:
    import torch

    import nstf.runtime

    if threads is not None:
        torch.set_num_threads(threads)
    model: Any = nstf.runtime.load(
        artifact,
        device=device if tensor_parallel > 1 else options.check_device(device),
        tensor_parallel=tensor_parallel,
        attention=attention,
        engine="exact" if exact else "auto",
        kernels=kernels,
        kv_cache=kv_cache,
    )
    tokenizer = nstf.runtime.load_tokenizer(artifact)
    yield from nstf.runtime.stream(
        model, tokenizer, prompt, max_new_tokens, chat=chat, seed=seed, stops=stops, **sampling
    )
