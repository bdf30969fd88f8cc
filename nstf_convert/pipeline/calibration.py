"""The calibration of a model: Hessians, sensitivities and the held-out reference, in one file.

Tensors of the file (a safetensors file whose metadata says which layers share a Hessian):

    hessian:<layer>         [in, in] float32, mean of x x^T over tokens
    sensitivity:<weight>    [out] float32, sum of squared end-loss gradients at the output per token (or sample)
    frequency:<table>       [rows] float32, how often each row of an embedding is looked up
    experts:<stack>         [experts] float32, tokens each expert saw
    fit:<i>:<input>         the batches the statistics come from (the first FIT_BYTES of them)
    held_out:<i>:<input>    the batches that choose between mixes, no token of which was fitted on
    reference:<i>           hidden states the head reads [tokens, hidden] (language), or the outputs
    report:<i>:<input>      the batches that are reported on: they neither fit nor choose
    report_reference:<i>    as `reference`, for these

Reference logits are stored as hidden states: the head turns them into logits at 1/85 of the bytes.
The metadata's `domains` gives the dataset every batch of the three splits came from.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nstf.analyzers.moments import ExpertMoments, InputMoments, Moment
from nstf.analyzers.sensitivity import OutputSensitivity, checkpoint_layers, head_sensitivity, sampled_loss
from nstf.analyzers.turnstile import calls_per_layer, layer_list, run_layer_by_layer
from nstf_convert.pipeline.data import Batch, Data
from nstf_convert.pipeline.stages import bars_off
from nstf_convert.pipeline.tensorfile import TensorFile, TensorFileWriter
from nstf_convert.streamed import StreamedModel

log = logging.getLogger("nstf")

# Tokens one forward call takes during calibration: bounds the activations in memory.
TOKENS_PER_BATCH = 2048
# The Fisher diagonal is a mean of squares: a few thousand tokens give every row within a few per cent.
SENSITIVITY_WINDOWS = 6
SENSITIVITY_TOKENS = 256
# Tokens of the forward pass that counts how often each layer is called.
PROBE_TOKENS = 8
# Batches that are fitted on are kept for passes that need them again (Hessians under a quantised prefix).
FIT_BYTES = 64 << 20
# Share of the look-ups spread evenly over all rows, so that rows the text does not use still count.
FREQUENCY_SMOOTHING = 0.2


def calibrate_model(
    model: StreamedModel, data: Data, path: Path, metadata: dict[str, Any], seed: int
) -> None:
    """Runs the calibration of `model` on `data` and writes it to `path`. Progress on stderr."""
    with TensorFileWriter(path) as writer:
        members: dict[str, Any] = {}
        experts = _write_hessians(model, data, writer, members)
        _write_sensitivities(model, data, writer, seed)
        for name, counts in experts.tokens.items():
            writer.add(f"experts:{name}", counts.to(torch.float32))
        fit = _within(data.fit, FIT_BYTES)
        for split, batches in (("fit", fit), ("held_out", data.held_out), ("report", data.report)):
            for i, batch in enumerate(batches):
                for name, value in batch.items():
                    writer.add(f"{split}:{i}:{name}", value)
        for i, reference in enumerate(reference_outputs(model, data, data.held_out)):
            writer.add(f"reference:{i}", reference)
        for i, reference in enumerate(reference_outputs(model, data, data.report)):
            writer.add(f"report_reference:{i}", reference)
        writer.metadata = {
            **metadata,
            "language": data.language,
            "source": data.source,
            "hessians": members,
            "fit": len(fit),
            "held_out": len(data.held_out),
            "report": len(data.report),
            "domains": {n: list(v) for n, v in data.domains.items()},
            "held_out_digest": digest(data.held_out),
        }


def _write_hessians(
    model: StreamedModel, data: Data, writer: TensorFileWriter, members: dict[str, Any]
) -> ExpertMoments:
    prefix, layers = layer_list(model.module)
    probe = _prepared(data.fit[0], PROBE_TOKENS if data.language else None)
    if any(n > 1 for n in calls_per_layer(layers, lambda: model_output(model, data, probe))):
        layers = []  # ALBERT runs one layer many times: its Hessians are complete at the end only
    moments = InputMoments()
    experts = ExpertMoments(moments)
    weight_of = {}
    handles = []
    for path, module, weight in model.linear_modules():
        if getattr(module, "groups", 1) == 1 and not (data.language and module is model.head):
            weight_of[path] = weight
            handles.append(moments.watch(path, module))
    for path, module in model.expert_modules():
        weight_of |= {f"{path}.{n}": model.stored_name(f"{path}.{n}") for n in ("gate_up_proj", "down_proj")}
        handles.append(experts.watch(path, module))

    def write(found: dict[str, Moment]) -> None:
        for key, moment in found.items():
            writer.add(f"hessian:{key}", moment.hessian)
            members[key] = {
                "tokens": moment.tokens,
                "weights": sorted({weight_of[m] for m in moment.members}),
            }

    batches = list(merge_batches(data.fit, TOKENS_PER_BATCH))
    head_moments = InputMoments()

    def run(batch: Batch) -> None:
        out = model_output(model, data, batch)
        if data.language:
            head_moments.add("head", out.reshape(-1, out.shape[-1]))

    bar = tqdm(total=len(layers) + 1, desc="calibrate", unit="layer", disable=bars_off(), leave=False)

    def after_layer(index: int) -> None:
        bar.update()
        if index >= 0:
            write(moments.pop([n for n in weight_of if n.startswith(f"{prefix}.{index}.")]))

    try:
        if layers:
            run_layer_by_layer(layers, [lambda b=b: run(b) for b in batches], after_layer)  # type: ignore[misc]
        else:
            with torch.no_grad():
                for batch in batches:
                    run(batch)
        write(moments.pop())
        if data.language and model.head is not None:
            weight_of["head"] = model.stored_name(_path_of(model.module, model.head) + ".weight")
            write(head_moments.pop())
    finally:
        bar.close()
        for handle in handles:
            handle.remove()
    return experts


def _write_sensitivities(model: StreamedModel, data: Data, writer: TensorFileWriter, seed: int) -> None:
    gather = OutputSensitivity()
    counts: dict[str, Tensor] = {}
    scales: dict[str, float] = {}
    handles = []
    for _path, module, weight in model.linear_modules():
        if module is not model.head or not data.language:
            handles.append(gather.watch(f"sensitivity:{weight}", module))
    for path, module in model.expert_modules():
        handles.append(gather.watch(f"sensitivity:{model.stored_name(f'{path}.down_proj')}", module))
    for path, module in model.module.named_modules():
        if isinstance(module, nn.Embedding):
            name = model.stored_name(f"{path}.weight")
            handles.append(module.register_forward_hook(_start_gradients))
            handles.append(module.register_forward_hook(_counter(name, module.num_embeddings, counts)))
            handles.append(gather.watch(f"sensitivity_in:{name}", module))
            scales[f"sensitivity_in:{name}"] = _embedding_scale(module)
    undo = checkpoint_layers(layer_list(model.module)[1])
    generator = torch.Generator().manual_seed(seed)
    head_total = torch.zeros(())
    units = 0
    windows = data.fit[:SENSITIVITY_WINDOWS] if data.language else data.fit[: 2 * SENSITIVITY_WINDOWS]
    try:
        for batch in tqdm(windows, desc="sensitivity", unit="window", disable=bars_off(), leave=False):
            batch = _prepared(batch, SENSITIVITY_TOKENS if data.language else None)
            out = model_output(model, data, batch)
            if data.language:
                flat = out.reshape(-1, out.shape[-1])
                logits = model.logits(flat)
                with torch.no_grad():
                    head_total = head_total + head_sensitivity(logits) * flat.shape[0]
                loss = sampled_loss(logits, generator)
                units += flat.shape[0]
            else:
                flat = out.reshape(out.shape[0], -1)
                noise = torch.randn(flat.shape, generator=generator)
                loss = (flat * noise / flat.detach().norm(dim=1, keepdim=True).clamp_min(1e-12)).sum()
                units += flat.shape[0]
            loss.backward()  # type: ignore[no-untyped-call]
    finally:
        undo()
        for handle in handles:
            handle.remove()
    for name, value in sorted(gather.per_unit(units).items()):
        writer.add(name, value * scales.get(name, 1.0) ** 2)
    if data.language and model.head is not None:
        head = model.stored_name(_path_of(model.module, model.head) + ".weight")
        writer.add(f"sensitivity:{head}", (head_total / units).to(torch.float32))
    for name, value in sorted(counts.items()):
        share = value / value.sum().clamp_min(1)
        smooth = FREQUENCY_SMOOTHING / share.numel()
        writer.add(f"frequency:{name}", ((1 - FREQUENCY_SMOOTHING) * share + smooth).to(torch.float32))


def reference_outputs(model: StreamedModel, data: Data, batches: Sequence[Batch]) -> Iterator[Tensor]:
    """What `batches` give: hidden states [tokens, hidden] of a language model, else pooled outputs."""
    with torch.no_grad():
        for group in merge_batches(batches, TOKENS_PER_BATCH):
            out = model_output(model, data, group)
            yield from out.unbind(0)


def model_output(model: StreamedModel, data: Data, batch: Batch) -> Tensor:
    """Hidden states [b, t, d] of a language model; other models: outputs, tokens mean-pooled to [b, d]."""
    if data.language:
        return model.hidden(batch["input_ids"])
    out = model.outputs(**batch)
    return out.mean(dim=1) if out.ndim == 3 else out


def merge_batches(batches: Sequence[Batch], tokens: int) -> Iterator[Batch]:
    """Consecutive batches of equal shape joined along the first axis, up to `tokens` tokens (or 8 images)."""
    group: list[Batch] = []

    def size(batch: Batch) -> int:
        first = next(iter(batch.values()))
        return first.shape[-1] if first.ndim == 2 and not first.is_floating_point() else tokens // 8

    def shapes(batch: Batch) -> list[Any]:
        return [(n, v.shape[1:]) for n, v in batch.items()]

    for batch in batches:
        if group and (shapes(batch) != shapes(group[0]) or (len(group) + 1) * size(batch) > tokens):
            yield {n: torch.cat([b[n] for b in group]) for n in group[0]}
            group = []
        group.append(batch)
    if group:
        yield {n: torch.cat([b[n] for b in group]) for n in group[0]}


def digest(batches: Sequence[Batch]) -> str:
    """The SHA-256 of the batches' contents."""
    sha = hashlib.sha256()
    for batch in batches:
        for name, value in sorted(batch.items()):
            sha.update(name.encode() + str(tuple(value.shape)).encode())
            sha.update(value.contiguous().view(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def fit_batches(file: TensorFile) -> list[Batch]:
    """The batches the statistics came from; of large inputs (images) the first FIT_BYTES."""
    return _batches(file, "fit")


def held_out_batches(file: TensorFile) -> list[Batch]:
    """The batches that choose between mixes; their references are `reference:<i>`."""
    return _batches(file, "held_out")


def report_batches(file: TensorFile) -> list[Batch]:
    """The batches that are only reported on; their references are `report_reference:<i>`."""
    return _batches(file, "report")


def domains(file: TensorFile, split: str) -> list[str]:
    """The dataset each batch of `split` (`fit`, `held_out` or `report`) came from."""
    return list(file.metadata["domains"][split])


def _batches(file: TensorFile, split: str) -> list[Batch]:
    batches: list[Batch] = [{} for _ in range(int(file.metadata[split]))]
    for name in sorted(file.names()):
        if name.startswith(f"{split}:"):
            _, index, key = name.split(":", 2)
            batches[int(index)][key] = file.get(name)
    return batches


def _within(batches: Sequence[Batch], size_bytes: int) -> list[Batch]:
    """The first batches that take at most `size_bytes` in all."""
    out = []
    for batch in batches:
        size_bytes -= sum(v.numel() * v.element_size() for v in batch.values())
        if size_bytes < 0:
            break
        out.append(batch)
    return out


def _prepared(batch: Batch, tokens: int | None) -> Batch:
    out = {}
    for name, value in batch.items():
        value = value[:, :tokens] if tokens is not None and value.ndim == 2 else value
        out[name] = value.clone().requires_grad_() if value.is_floating_point() else value
    return out


def _start_gradients(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out if out.requires_grad or not torch.is_grad_enabled() else out.requires_grad_()


def _counter(name: str, rows: int, counts: dict[str, Tensor]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        ids = args[0] if args else None
        # Position tables of OPT take a mask, those of Whisper the tokens: what they look up is not in the arguments.
        if not isinstance(ids, Tensor) or ids.is_floating_point() or out.shape != (*ids.shape, out.shape[-1]):
            return
        if ids.numel() == 0 or int(ids.min()) < 0 or int(ids.max()) >= rows or _finds_rows_itself(module):
            return
        found = torch.bincount(ids.reshape(-1), minlength=rows).double()
        counts[name] = counts.get(name, torch.zeros(rows, dtype=torch.float64)) + found

    return hook


def _finds_rows_itself(module: nn.Module) -> bool:
    """Whether an embedding computes the rows it looks up from something else, as learned positions do."""
    return type(module) is not nn.Embedding and "Position" in type(module).__name__


def _embedding_scale(module: nn.Module) -> float:
    """What an embedding multiplies its rows by (Gemma, BART): an error of a row grows by it."""
    scale = getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", None))
    return float(scale) if isinstance(scale, int | float) else 1.0


def _path_of(root: nn.Module, wanted: nn.Module) -> str:
    found: str = next(path for path, module in root.named_modules() if module is wanted)
    return found
