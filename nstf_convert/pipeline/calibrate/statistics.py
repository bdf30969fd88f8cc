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

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nstf.analyzers.moments import ExpertMoments, InputMoments, Moment
from nstf.analyzers.shrinkage import effective_tokens, sampling_share, shrunk
from nstf.analyzers.turnstile import calls_per_layer, layer_list, run_layer_by_layer
from nstf_convert.pipeline.calibrate.batches import (
    TOKENS_PER_BATCH,
    digest,
    domains,
    fit_batches,
    held_out_batches,
    merge_batches,
    model_output,
    prepared,
    report_batches,
    within,
)
from nstf_convert.pipeline.calibrate.gradients import end_loss_gradients
from nstf_convert.pipeline.calibrate.text import Batch, Data
from nstf_convert.pipeline.products import exact_products, fast_products
from nstf_convert.pipeline.store.tensorfile import TensorFileWriter
from nstf_convert.streamed import StreamedModel

log = logging.getLogger("nstf")

# Tokens of the forward pass that counts how often each layer is called.
PROBE_TOKENS = 8
# Batches that are fitted on are kept for passes that need them again (Hessians under a quantised prefix).
FIT_BYTES = 64 << 20
# Off-diagonal entries of a Hessian lose at least this share: new text is not from where the sample is. Sampling adds
# what `sampling_share` finds. A third of SmolLM2-135M's layers at 3 bits (int, group 64), 32 windows, change of the
# KLD on other kinds of text and on held-out text of the same kind, in per cent, standard error 3 to 8: without token
# weights 0.1 -23 -13, 0.25 -26 -13, 0.5 -27 -5; with them 0 -14 -10, 0.1 -30 -22, 0.25 -29 -15.
# Encoded front to back at 3 bits with trellis codes a quarter was better: 0.109 and 0.392 (other text) against 0.115 and
# 0.528 at a tenth; on a model of 29 M parameters neither was.
SHRINKAGE = 0.25

__all__ = [
    "PROBE_TOKENS", "TOKENS_PER_BATCH", "calibrate_model", "digest", "domains", "fit_batches", "held_out_batches",
    "merge_batches", "model_output", "report_batches",
]  # fmt: skip


@dataclass
class Gathered:
    """What a calibration under way has found so far, read like the file that it becomes."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any] = field(default_factory=dict)

    def names(self) -> set[str]:
        return set(self.tensors)

    def get(self, name: str) -> Tensor:
        return self.tensors[name]

    def find(self, name: str) -> Tensor | None:
        return self.tensors.get(name)


# Takes what is known and the keys of new Hessians; gives back the keys of those that need not be stored.
Consumer = Callable[[Gathered, list[str]], set[str]]
# Is told what share of the whole a step was.
Tick = Callable[[float], None]
# What the backward pass takes of a calibration, about.
GRADIENT_SHARE = 0.6


def calibrate_model(
    model: StreamedModel,
    data: Data,
    path: Path,
    metadata: dict[str, Any],
    seed: int,
    tokens_per_batch: int = TOKENS_PER_BATCH,
    consume: Consumer | None = None,
    tick: Tick = lambda share: None,
) -> None:
    """Runs the calibration of `model` on `data` and writes it to `path`. Progress on stderr.

    consume: is shown the Hessians of every layer as they are finished; those it answers with are not stored.
    tick: is told the share of the work that a step was.
    """
    with TensorFileWriter(path) as writer:
        members: dict[str, Any] = {}
        gradients = end_loss_gradients(
            model, data, seed, lambda share: tick(GRADIENT_SHARE * share), tokens_per_batch
        )
        gathered = Gathered(dict(gradients.sensitivity))
        gathered.tensors |= {f"frequency:{name}": value for name, value in gradients.frequency.items()}
        for name, value in gathered.tensors.items():
            writer.add(name, value)
        gathered.metadata["hessians"] = members
        experts = _write_hessians(
            model, data, writer, gathered, gradients.token_weight, tokens_per_batch, consume, tick
        )
        for key in sorted(members.keys() & gradients.token_weight):
            writer.add(f"token_weight:{key}", gradients.token_weight[key])
        for name, counts in experts.tokens.items():
            writer.add(f"experts:{name}", counts.to(torch.float32))
        fit = within(data.fit, FIT_BYTES)
        for split, batches in (("fit", fit), ("held_out", data.held_out), ("report", data.report)):
            for i, batch in enumerate(batches):
                for name, value in batch.items():
                    writer.add(f"{split}:{i}:{name}", value)
        for i, reference in enumerate(reference_outputs(model, data, data.held_out, tokens_per_batch)):
            writer.add(f"reference:{i}", reference)
        for i, reference in enumerate(reference_outputs(model, data, data.report, tokens_per_batch)):
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
    model: StreamedModel,
    data: Data,
    writer: TensorFileWriter,
    gathered: Gathered,
    token_weights: dict[str, Tensor],
    tokens_per_batch: int,
    consume: Consumer | None,
    tick: Tick,
) -> ExpertMoments:
    members = gathered.metadata["hessians"]
    prefix, layers = layer_list(model.module)
    probe = prepared(data.fit[0], PROBE_TOKENS if data.language else None)
    if any(n > 1 for n in calls_per_layer(layers, lambda: model_output(model, data, probe))):
        # ALBERT runs one layer many times: its Hessians are complete at the end only, and are needed again.
        layers, consume = [], None
    moments = InputMoments(token_weights)
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
            known = token_weights.get(key)
            tokens = float(moment.tokens) if known is None else effective_tokens(known)
            share = SHRINKAGE + (1 - SHRINKAGE) * sampling_share(moment.hessian, tokens)
            gathered.tensors[f"hessian:{key}"] = shrunk(moment.hessian, share)
            members[key] = {
                "tokens": moment.tokens,
                "shrinkage": share,
                "weights": sorted({weight_of[m] for m in moment.members}),
            }
        with exact_products():
            dropped = consume(gathered, list(found)) if consume is not None else set()
        for key in found:
            hessian = gathered.tensors.pop(f"hessian:{key}")
            if key not in dropped:
                writer.add(f"hessian:{key}", hessian)

    batches = list(merge_batches(data.fit, tokens_per_batch))
    head_moments = InputMoments(token_weights)

    def run(batch: Batch) -> None:
        out = model_output(model, data, batch)
        if data.language:
            head_moments.add("head", out.reshape(-1, out.shape[-1]))

    def after_layer(index: int) -> None:
        tick((1 - GRADIENT_SHARE) / (len(layers) + 1))
        if index >= 0:
            write(moments.pop([n for n in weight_of if n.startswith(f"{prefix}.{index}.")]))

    try:
        with fast_products(), torch.no_grad():
            if layers:
                run_layer_by_layer(layers, [lambda b=b: run(b) for b in batches], after_layer)  # type: ignore[misc]
            else:
                for batch in batches:
                    run(batch)
        write(moments.pop())
        if data.language and model.head is not None:
            weight_of["head"] = model.stored_name(_path_of(model.module, model.head) + ".weight")
            write(head_moments.pop())
    finally:
        for handle in handles:
            handle.remove()
    return experts


def reference_outputs(
    model: StreamedModel, data: Data, batches: Sequence[Batch], tokens_per_batch: int = TOKENS_PER_BATCH
) -> Iterator[Tensor]:
    """What `batches` give: hidden states [tokens, hidden] of a language model, else pooled outputs."""
    with torch.no_grad():
        for group in merge_batches(batches, tokens_per_batch):
            yield from model_output(model, data, group).unbind(0)


def _path_of(root: nn.Module, wanted: nn.Module) -> str:
    found: str = next(path for path, module in root.named_modules() if module is wanted)
    return found
