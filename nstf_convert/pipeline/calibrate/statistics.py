"""The calibration of a model: Hessians, sensitivities and the held-out reference, in one file.

Tensors of the file (a safetensors file whose metadata says which layers share a Hessian):

    hessian:<layer>         [in, in] float32, mean over tokens of x x^T, weighted by token_weight, shrunk towards its
                            diagonal by the metadata's `shrinkage` of the layer
    token_weight:<layer>    [fit tokens] float32 with mean 1, what each token's input counts for the end loss
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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nstf.errors import UnsupportedError, UsageError
from nstf_convert.pipeline.calibrate.batches import (
    PROBE_TOKENS,
    TOKENS_PER_BATCH,
    digest,
    domains,
    fit_batches,
    held_out_batches,
    merge_batches,
    model_output,
    report_batches,
    within,
)
from nstf_convert.pipeline.calibrate.gradients import Gradients, end_loss_gradients
from nstf_convert.pipeline.calibrate.hessians import Consumer, gather_hessians
from nstf_convert.pipeline.calibrate.share import GRADIENTS, HESSIANS, Sharer
from nstf_convert.pipeline.calibrate.text import Batch, Data
from nstf_convert.pipeline.machine import each_of, torch_threads
from nstf_convert.pipeline.store.tensorfile import TensorFileWriter
from nstf_convert.streamed import StreamedModel

# Batches that are fitted on are kept for passes that need them again (Hessians under a quantised prefix).
FIT_BYTES = 64 << 20
# What a backward pass over a window takes, about, in passes that only take its moments.
BACKWARD = 1.5
# Is told what share of the whole a step was.
Tick = Callable[[float], None]

__all__ = [
    "PROBE_TOKENS", "TOKENS_PER_BATCH", "calibrate_model", "digest", "domains", "fit_batches", "held_out_batches",
    "merge_batches", "model_output", "report_batches",
]  # fmt: skip


def calibrate_model(
    model: StreamedModel,
    data: Data,
    path: Path,
    metadata: dict[str, Any],
    seed: int,
    tokens_per_batch: int = TOKENS_PER_BATCH,
    consumer: Consumer | None = None,
    tick: Tick = lambda share: None,
    sharing: Sharer | None = None,
    workers: int = 1,
    core_each: bool = False,
) -> None:
    """Runs the calibration of `model` on `data` and writes it to `path`.

    consumer: is shown the Hessians of every layer as they are finished; those it covers are not stored.
    tick: is told the share of the work that a step was. sharing: other processes that do a part of it. workers: batches
    that run side by side on a CPU. core_each: a core each, also where memory leaves room for one batch alone: most
    operations of a forward pass gain little from several.

    Raises UnsupportedError where the model computes no numbers, UsageError where it does so on arrays that were given.
    """
    with (
        _blaming(data),
        TensorFileWriter(path) as writer,
        torch_threads(1) if core_each else nullcontext(),
    ):
        pieces = None if sharing is None else sharing.begin(GRADIENTS, *data_needed(data))
        back = BACKWARD * len(data.to_read) / (BACKWARD * len(data.to_read) + len(data.fit))
        gradients = end_loss_gradients(
            model, data, seed, lambda share: tick(back * share), tokens_per_batch, pieces, workers
        )
        _check_gradients(gradients)
        for name, value in gradients.sensitivity.items():
            writer.add(name, value)
        for name, value in gradients.frequency.items():
            writer.add(f"frequency:{name}", value)
        pieces = None
        if sharing is not None and consumer is not None:
            pieces = sharing.begin(HESSIANS, *gradients.stored())
        found = gather_hessians(
            model, data, gradients, tokens_per_batch, lambda key, h: writer.add(f"hessian:{key}", _sound(key, h)), consumer,
            lambda share: tick((1 - back) * share), pieces, workers,
        )  # fmt: skip
        for key in sorted(found.entries.keys() & gradients.token_weight):
            writer.add(f"token_weight:{key}", gradients.token_weight[key])
        for name, counts in found.expert_tokens.items():
            writer.add(f"experts:{name}", counts.to(torch.float32))
        fit = within(data.fit, FIT_BYTES)
        for split, batches in (("fit", fit), ("held_out", data.held_out), ("report", data.report)):
            for i, batch in enumerate(batches):
                for name, value in batch.items():
                    writer.add(f"{split}:{i}:{name}", value)
        both = reference_outputs(model, data, [*data.held_out, *data.report], tokens_per_batch, workers)
        for i, reference in enumerate(both):
            own = i - len(data.held_out)
            if not bool(reference.isfinite().all()):
                raise UnsupportedError("the model's outputs are not finite" + _DAMAGED)
            writer.add(f"reference:{i}" if own < 0 else f"report_reference:{own}", reference)
        writer.metadata = {
            **metadata,
            "language": data.language,
            "source": data.source,
            "hessians": found.entries,
            "fit": len(fit),
            "held_out": len(data.held_out),
            "report": len(data.report),
            "domains": {n: list(v) for n, v in data.domains.items()},
            "held_out_digest": digest(data.held_out),
        }


@contextmanager
def _blaming(data: Data) -> Iterator[None]:
    """Arrays that were given may be what a model computes no numbers of; a text is made of its own tokens."""
    try:
        yield
    except UnsupportedError as error:
        if data.language or data.source.get("origin") != "dataset" or "damaged" not in str(error):
            raise
        raise UsageError(
            f"of some samples of {data.source['datasets'][0]} {str(error).removesuffix(_DAMAGED)}: their values may be far "
            "from those that it reads, or it is damaged"
        ) from error


_DAMAGED = ": its weights or its config are damaged"


def _check_gradients(gradients: Gradients) -> None:
    """Raises UnsupportedError for a model whose outputs say nothing about its weights: what follows would be made of NaN."""
    found = gradients.sensitivity.values()
    if not all(bool(value.isfinite().all()) for value in [*found, *gradients.token_weight.values()]):
        raise UnsupportedError("the model's gradients are not finite" + _DAMAGED)
    if found and not any(bool((value != 0).any()) for value in found):
        raise UnsupportedError(
            "the model's outputs depend on none of its weights: they or its config are damaged"
        )


def _sound(key: str, hessian: Tensor) -> Tensor:
    """Second moments of inputs. Raises UnsupportedError where they are not finite, or the output layer's are zero."""
    total = hessian.diagonal().sum()
    if not bool(total.isfinite()) or (key == "head" and not bool(total > 0)):
        raise UnsupportedError("the model's activations are zero or not finite" + _DAMAGED)
    return hessian


def data_needed(data: Data) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What another process needs of the data: tensors and JSON, read back by `data_found`."""
    tensors = {f"{i}:{name}": value for i, batch in enumerate(data.fit) for name, value in batch.items()}
    return tensors, {"language": data.language, "fit": len(data.fit), "read": data.read}


def data_found(tensors: dict[str, Tensor], facts: dict[str, Any]) -> Data:
    """The data to fit on that the first process has left."""
    fit: list[Batch] = [{} for _ in range(facts["fit"])]
    for name, value in tensors.items():
        index, _, key = name.partition(":")
        fit[int(index)][key] = value
    return Data(facts["language"], tuple(fit), (), {}, read=facts["read"])


def reference_outputs(
    model: StreamedModel,
    data: Data,
    batches: Sequence[Batch],
    tokens_per_batch: int = TOKENS_PER_BATCH,
    workers: int = 1,
) -> Iterator[Tensor]:
    """What `batches` give: hidden states [tokens, hidden] of a language model, else pooled outputs."""
    model.settle()  # one thread at a time may

    @torch.no_grad()
    def run(group: Batch) -> Tensor:
        return model_output(model, data, group)

    groups = list(merge_batches(batches, tokens_per_batch))
    for first in range(0, len(groups), workers):
        with each_of(workers) as each:
            for out in each(run, groups[first : first + workers]):
                yield from out.unbind(0)
