"""Batches of model inputs: put together, run, and read back from a calibration file."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nstf_convert.pipeline.calibrate.text import Batch, Data
from nstf_convert.pipeline.products import layers_in
from nstf_convert.pipeline.store.tensorfile import TensorFile
from nstf_convert.streamed import StreamedModel

# Tokens one forward call takes during calibration: bounds the activations in memory.
TOKENS_PER_BATCH = 2048
# Tokens of a forward pass that looks at nothing but which modules are called.
PROBE_TOKENS = 8


def model_output(model: StreamedModel, data: Data, batch: Batch) -> Tensor:
    """Hidden states [b, t, d] of a language model; other models: outputs, tokens mean-pooled to [b, d]."""
    if data.language:
        ids = batch["input_ids"]
        with layers_in(model.module, ids.numel()):
            return model.hidden(ids)
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


def even_tokens(batches: Sequence[Batch], most: int) -> int:
    """The tokens of a call, at most `most`, with which all calls get about as many windows of text as each other."""
    ids = batches[0].get("input_ids") if batches else None
    if ids is None:
        return most
    together = max(1, most // ids.shape[-1])
    calls = -(-len(batches) // together)
    return -(-len(batches) // calls) * int(ids.shape[-1])


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
    return split_batches(file, "fit")


def held_out_batches(file: TensorFile) -> list[Batch]:
    """The batches that choose between mixes; their references are `reference:<i>`."""
    return split_batches(file, "held_out")


def report_batches(file: TensorFile) -> list[Batch]:
    """The batches that are only reported on; their references are `report_reference:<i>`."""
    return split_batches(file, "report")


def domains(file: TensorFile, split: str) -> list[str]:
    """The dataset each batch of `split` (`fit`, `held_out` or `report`) came from."""
    return list(file.metadata["domains"][split])


def split_batches(file: TensorFile, split: str) -> list[Batch]:
    """The batches of `split` (`fit`, `held_out` or `report`) that the file holds."""
    batches: list[Batch] = [{} for _ in range(int(file.metadata[split]))]
    for name in sorted(file.names()):
        if name.startswith(f"{split}:"):
            _, index, key = name.split(":", 2)
            batches[int(index)][key] = file.get(name)
    return batches


def within(batches: Sequence[Batch], size_bytes: int) -> list[Batch]:
    """The first batches that take at most `size_bytes` in all."""
    out = []
    for batch in batches:
        size_bytes -= sum(v.numel() * v.element_size() for v in batch.values())
        if size_bytes < 0:
            break
        out.append(batch)
    return out


def prepared(batch: Batch, tokens: int | None = None) -> Batch:
    """A batch gradients can flow to: float inputs require them. tokens: only the first ones of every window."""
    out = {}
    for name, value in batch.items():
        value = value[:, :tokens] if tokens is not None and value.ndim == 2 else value
        out[name] = value.clone().requires_grad_() if value.is_floating_point() else value
    return out


def start_gradients(module: nn.Module, args: Any, out: Any) -> Any:
    """A hook behind an embedding, whose ids no gradient can flow to: it starts at the embedding's output, as a copy that a
    model may write into (BLIP adds positions there). ProphetNet's positions give their numbers beside it."""
    if isinstance(out, tuple):
        return (start_gradients(module, args, out[0]), *out[1:])
    return out if out.requires_grad or not torch.is_grad_enabled() else out.requires_grad_().clone()
