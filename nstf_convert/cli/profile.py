"""`nstf profile`: FLOPs, bytes, intensity, roofline class and time of every operator of a model."""

import inspect
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nstf.errors import UsageError
from nstf_convert.cli import options
from nstf_convert.cli.output import print_json, print_pairs, print_table
from nstf_convert.cli.sizes import format_bytes

if TYPE_CHECKING:
    from nstf.analyzers.roofline import Phase, Profile


log = logging.getLogger(__name__)


def profile(
    model: Annotated[
        str, typer.Argument(callback=options.at_home, help="An .nstf file, or a model as for convert.")
    ],
    tokens: Annotated[int, typer.Option(min=1, max=1 << 27, help="Tokens of the prefill pass.")] = 128,
    batch: Annotated[int, typer.Option(min=1, max=1 << 20, help="Sequences at a time.")] = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 and so on (ROCm is called cuda).")] = "cpu",
    device_peak: Annotated[
        str | None,
        typer.Option(
            metavar="GFLOPS,GBS", help="Peaks to judge by instead of measured ones, e.g. 1307000,5300."
        ),
    ] = None,
    top: Annotated[
        int, typer.Option(min=0, help="Operators to list per phase, slowest first; 0 lists all.")
    ] = 12,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Measure where the time of a forward pass goes, and whether memory or arithmetic limits it.

    Example: nstf profile model.nstf --tokens 128
    """
    options.check_model(model)
    peaks = parse_peak(device_peak)
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    result = measure(model, tokens, batch, torch.device(options.check_device(device)), peaks)
    if json:
        print_json(result.to_json())
        return
    show(result, top)


def parse_peak(text: str | None) -> tuple[float, float] | None:
    """(FLOPs per second, bytes per second) from `GFLOPS,GBS`. Raises UsageError."""
    if text is None:
        return None
    try:
        flops, bandwidth = (float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--device-peak {text!r}: give GFLOP/s and GB/s such as 1307000,5300") from error
    if not all(math.isfinite(x) and x > 0 for x in (flops, bandwidth)):
        raise UsageError(f"--device-peak {text!r}: both numbers must be positive")
    return flops * 1e9, bandwidth * 1e9


def measure(model: str, tokens: int, batch: int, place: Any, peaks: tuple[float, float] | None) -> "Profile":
    """Loads the model whole, runs a prefill and (for language models) a decode pass, and profiles both."""
    import torch

    from nstf.analyzers.roofline import SLOW_S, Device, least_seconds, measure_device
    from nstf.analyzers.roofline import profile as profile_module
    from nstf.runtime.generate import of_the_model

    module = load(model, place)
    parameter = next((p for p in module.parameters() if p.is_floating_point()), None)
    dtype = torch.float32 if parameter is None else parameter.dtype
    peak: Device
    if peaks is None:
        peak = measure_device(place, dtype)
    else:
        peak = Device(str(place), peaks[0], peaks[1], "given")
    if (seconds := least_seconds(module, peak, tokens * batch)) > SLOW_S:
        log.warning(
            "a pass over %d x %d tokens takes %.0f s or more here, and at least three are made: a smaller --batch or "
            "fewer --tokens take less",
            batch,
            tokens,
            seconds,
        )
    try:
        prefill, decode = passes(module, tokens, batch, place)
        return profile_module(module, prefill, decode, peak, tokens=tokens, batch=batch)
    except Exception as error:
        if (said := of_the_model(error, module)) is not error:
            raise said from error
        raise


def load(model: str, place: Any) -> Any:
    """The module: an artifact with its layers encoded, or a checkpoint's dense weights in float32 (CPU)."""
    import torch

    if Path(model).is_file() and not model.endswith((".gguf", ".onnx", ".safetensors", ".bin")):
        import nstf.runtime

        return nstf.runtime.load(model, device=place)
    from nstf.runtime.skeleton import build_skeleton
    from nstf_convert.checkpoint import open_checkpoint

    with open_checkpoint(model) as checkpoint:
        checkpoint.say_notes(model)
        if checkpoint.config is None:
            raise UsageError(f"{model} has no config.json: it cannot be run, so it cannot be profiled")
        module = build_skeleton(checkpoint.config, checkpoint.architecture, limits=checkpoint.limits)
        dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
        known: dict[str, Any] = {}
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            stored = checkpoint.ties.get(name, name)
            if stored not in known:
                known[stored] = torch.nn.Parameter(
                    checkpoint.get(stored).to(place, dtype), requires_grad=False
                )
            owner, _, leaf = name.rpartition(".")
            if known[stored].shape != parameter.shape:
                raise UsageError(f"{model}: tensor {name!r} does not have the shape its config asks for")
            module.get_submodule(owner)._parameters[leaf] = known[stored]
    return module.to(place)


def passes(module: Any, tokens: int, batch: int, place: Any) -> tuple[Any, Any]:
    """(prefill, decode) closures; decode is None for a model that does not generate, or not by a cache, or as an answer."""
    import torch

    from nstf.runtime.generate import stated_context
    from nstf_convert.gates.evaluate import synthetic_batches
    from nstf_convert.own_forward import needs_images

    config = module.config.get_text_config() if hasattr(module.config, "get_text_config") else module.config
    vocabulary = getattr(config, "vocab_size", None)
    # Speech models have a vocabulary for their answers alone.
    two_sided = getattr(module.config, "is_encoder_decoder", False)
    reads_text = "input_ids" in inspect.signature(module.forward).parameters
    other = getattr(module, "main_input_name", "input_ids") != "input_ids"
    # BEiT states a vocabulary, too, of pieces of images.
    if not (vocabulary and reads_text) or (two_sided and other) or needs_images(module):
        inputs = {
            k: v.to(place) for k, v in synthetic_batches(module.config.to_dict(), batch, seed=0)[0].items()
        }
        return (lambda: _of_made_up(module, inputs)), None
    limit = stated_context(module) if two_sided else getattr(config, "max_position_embeddings", None)
    if limit and tokens >= limit > 0:  # XLNet states -1: it has none
        raise UsageError(f"--tokens {tokens}: this model handles at most {limit - 1}")
    if two_sided:  # either side may have words of its own (FSMT)
        tables = [m.num_embeddings for m in module.modules() if isinstance(m, torch.nn.Embedding)]
        vocabulary = min([vocabulary, *tables])
    ids = torch.randint(vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(0)).to(place)
    if two_sided:  # prompt and answer in one pass, each of so many tokens
        return (lambda: module(input_ids=ids, decoder_input_ids=ids)), None
    if not module.can_generate():  # of those some read more than a text (CLIP), or several at once
        return (lambda: _of_made_up(module, {"input_ids": ids})), None
    return (lambda: module(input_ids=ids, use_cache=True)), _decode(module, ids)


def _of_made_up(module: Any, inputs: dict[str, Any]) -> None:
    """Runs a model that writes no text. Raises UsageError where it does not take the inputs that are made for it: that is
    nobody's fault."""
    from nstf.errors import NstfError, out_of_memory

    try:
        module(**inputs)
    except Exception as error:
        if isinstance(error, NstfError) or out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{type(module).__name__} does not run on {', '.join(inputs)} of the size that its config states ({reason}): "
            "nstf profile makes no other inputs"
        ) from error


def _decode(module: Any, ids: Any) -> Any:
    """A pass of one more token after `ids`; None for a model that does not give its cache out as attention does (Mamba)."""

    def begun() -> Any:
        return getattr(module(input_ids=ids, use_cache=True), "past_key_values", None)

    def decode() -> None:
        module(input_ids=step, past_key_values=cache, use_cache=True)
        if goes_back:
            cache.crop(-1)  # every pass sees the same context

    step, cache, goes_back = ids[:, -1:], begun(), False
    if not hasattr(cache, "crop"):
        return None
    decode()
    try:
        cache.crop(-1)
        goes_back = True
    except RuntimeError:
        # Windows that are full and states cost the same at every pass: no other is taken back where they are not.
        cache = begun()
    return decode


def show(result: "Profile", top: int) -> None:
    """The profile as text."""
    device = result.device
    print_pairs("", [
        ("path", "transformers' modules one by one; `nstf bench` times the decoder that generate uses"),
        ("device", f"{device.name}: {device.flops / 1e9:.1f} GFLOP/s, {device.bandwidth / 1e9:.1f} GB/s"),
        ("peaks", f"{device.source}; ridge at {device.ridge:.1f} FLOPs per byte"),
        ("parameters", f"{result.parameters}, {format_bytes(result.weight_bytes)} in memory"),
    ])  # fmt: skip
    for phase in result.phases:
        typer.echo("")
        show_phase(phase, top)


def show_phase(phase: "Phase", top: int) -> None:
    """One phase: a line of totals and its slowest operators."""
    new = phase.tokens * phase.batch
    print_pairs(f"{phase.name}: {phase.batch} x {phase.tokens} tokens", [
        ("time", f"{phase.time_s * 1e3:.2f} ms, {new / phase.time_s:.1f} tokens/s"),
        ("work", f"{phase.flops / new / 1e6:.2f} MFLOP and {format_bytes(phase.bytes / new)} per token"),
        ("used", f"MFU {100 * phase.mfu:.1f} %, bandwidth {100 * phase.bandwidth_used:.1f} %"),
    ])  # fmt: skip
    ranked = sorted(phase.operators, key=lambda o: -o.time_s)
    rows = [
        (o.name, o.kind, o.parameters, f"{o.flops / 1e6:.2f}", format_bytes(o.bytes), f"{o.intensity:.2f}",
         o.bound,
         f"{o.time_s * 1e3:.3f}", f"{o.limit_s * 1e3:.3f}")
        for o in (ranked[:top] if top else ranked)
    ]  # fmt: skip
    columns = ("operator", "kind", "params", "MFLOP", "bytes", "FLOP/byte", "bound", "ms", "limit ms")
    print_table(columns, rows, left=2)
    if top and len(ranked) > top:
        typer.echo(f"  and {len(ranked) - top} more (--top 0 lists all)")
