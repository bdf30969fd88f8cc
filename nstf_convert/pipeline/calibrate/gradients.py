"""One backward pass over the fit batches: what every output, every token and every embedding row matters.

The label of a token is drawn from the model's own prediction, LABELS times: the mean of their gradients has the same
covariance as that of one and a far lighter tail, and costs one backward pass. Layers are recomputed in it, so that
the activations of one layer are in memory; matrix products may use the CPU's bfloat16 units (see `fast_products`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nstf.analyzers.heap import give_back
from nstf.analyzers.sensitivity import OutputSensitivity, checkpoint_layers, sampled_gradient
from nstf.analyzers.token_weights import TokenGradients, temper
from nstf.analyzers.turnstile import layer_list
from nstf_convert.pipeline.calibrate.batches import merge_batches, model_output, prepared
from nstf_convert.pipeline.calibrate.text import Batch, Data
from nstf_convert.pipeline.products import fast_products
from nstf_convert.streamed import StreamedModel

# Labels drawn per token.
LABELS = 16
# Logits in memory at a time: 25 MiB, several times, on a CPU; 256 MiB on a GPU.
HEAD_ELEMENTS = {"cpu": 128 * 49152, "cuda": 1 << 26}
# Share of the look-ups spread evenly over all rows, so that rows the text does not use still count.
FREQUENCY_SMOOTHING = 0.2
# What is done to the tails of the token weights: as they are, the inputs of q, k and v of some layers would have a
# Hessian of 50 tokens out of 16384 (attention sinks). Measured as SHRINKAGE, without shrinkage: power 1 -12 -11 %,
# power 1 capped at 4 -9 -15 %, power 0.5 -14 -10 %.
WEIGHT_POWER = 0.5
WEIGHT_CAP = 16.0


@dataclass(frozen=True, eq=False)
class Gradients:
    """sensitivity: by `sensitivity:<weight>` or `sensitivity_in:<table>`, [features]. frequency: by table, [rows].
    token_weight: by the key of a Hessian, [fit tokens], mean 1."""

    sensitivity: dict[str, Tensor]
    frequency: dict[str, Tensor]
    token_weight: dict[str, Tensor] = field(default_factory=dict)


def end_loss_gradients(
    model: StreamedModel,
    data: Data,
    seed: int,
    tick: Callable[[float], None] = lambda share: None,
    tokens_per_batch: int = 0,
) -> Gradients:
    """Gradients of the end loss over all fit batches. tick: is told the share of the work that a batch was;
    tokens_per_batch: windows are put together up to so many."""
    rows, tokens = OutputSensitivity(), TokenGradients()
    counts: dict[str, Tensor] = {}
    scales: dict[str, float] = {}
    handles = []
    for path, module, weight in model.linear_modules():
        if module is not model.head or not data.language:
            handles.append(rows.watch(f"sensitivity:{weight}", module))
            if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
                handles.append(tokens.watch(path, module))
    for path, module in model.expert_modules():
        handles.append(rows.watch(f"sensitivity:{model.stored_name(f'{path}.down_proj')}", module))
    for path, module in model.module.named_modules():
        if isinstance(module, nn.Embedding):
            name = model.stored_name(f"{path}.weight")
            handles.append(module.register_forward_hook(_start_gradients))
            handles.append(module.register_forward_hook(_counter(name, module.num_embeddings, counts)))
            handles.append(rows.watch(f"sensitivity_in:{name}", module))
            scales[f"sensitivity_in:{name}"] = _embedding_scale(module)
    undo = checkpoint_layers(layer_list(model.module)[1])
    loss = _Loss(model, data.language, torch.Generator(model.device).manual_seed(seed))
    try:
        with fast_products():
            merged = list(merge_batches(data.fit, tokens_per_batch)) if tokens_per_batch else list(data.fit)
            for batch in merged:
                loss.backward(model_output(model, data, prepared(batch)))
                give_back()
                tick(1 / len(merged))
    finally:
        undo()
        for handle in handles:
            handle.remove()
    found = {n: v * scales.get(n, 1.0) ** 2 for n, v in sorted(rows.per_unit(loss.units).items())}
    weights = tokens.weights(_rows(data.fit))
    if data.language and model.head is not None:
        head = next(p for p, module in model.module.named_modules() if module is model.head)
        found[f"sensitivity:{model.stored_name(f'{head}.weight')}"] = loss.head_rows()
        weights["head"] = torch.cat(loss.spread)
    return Gradients(
        found,
        {n: _frequency(v) for n, v in sorted(counts.items())},
        {n: temper(w, WEIGHT_POWER, WEIGHT_CAP) for n, w in weights.items()},
    )


class _Loss:
    """Sends gradients back from a model's outputs, and counts what the outputs say themselves."""

    def __init__(self, model: StreamedModel, language: bool, generator: torch.Generator) -> None:
        self._model, self._language, self._generator = model, language, generator
        self._head_total = torch.zeros((), device=model.device)
        self.units = 0
        self.spread: list[Tensor] = []

    def backward(self, out: Tensor) -> None:
        """out: hidden states [b, t, d] of a language model, else outputs [b, ...]."""
        if not self._language:
            flat = out.reshape(out.shape[0], -1)
            noise = torch.randn(flat.shape, generator=self._generator, device=flat.device)
            loss = (flat * noise / flat.detach().norm(dim=1, keepdim=True).clamp_min(1e-12)).sum()
            self.units += flat.shape[0]
            loss.backward()  # type: ignore[no-untyped-call]
            return
        flat = out.reshape(-1, out.shape[-1])
        gradient = torch.empty_like(flat)
        with self._model.holding(self._model.head):
            vocabulary = self._model.module.config.get_text_config().vocab_size
            step = max(1, HEAD_ELEMENTS[flat.device.type] // vocabulary)
            for start in range(0, flat.shape[0], step):
                rows = slice(start, start + step)
                leaf = flat[rows].detach().requires_grad_()
                logits = self._model.logits(leaf)
                sample, spread = sampled_gradient(logits.detach(), self._generator, LABELS)
                self._head_total = self._head_total + spread.sum(dim=0)
                self.spread.append(spread.sum(dim=1))
                gradient[rows] = torch.autograd.grad(logits, leaf, sample)[0]
        self.units += flat.shape[0]
        flat.backward(gradient)  # type: ignore[no-untyped-call]

    def head_rows(self) -> Tensor:
        """The Fisher diagonal at the logits, mean over tokens, [vocabulary]."""
        return (self._head_total / self.units).to(torch.float32)


def _rows(batches: tuple[Batch, ...]) -> int:
    """Tokens in all; 0 for inputs that are no tokens."""
    ids = [b.get("input_ids") for b in batches]
    return sum(math.prod(i.shape) for i in ids if i is not None)


def _frequency(counts: Tensor) -> Tensor:
    share = counts / counts.sum().clamp_min(1)
    smooth = FREQUENCY_SMOOTHING / share.numel()
    return ((1 - FREQUENCY_SMOOTHING) * share + smooth).to(torch.float32)


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
        found = torch.bincount(ids.reshape(-1), minlength=rows).double().cpu()
        counts[name] = counts.get(name, torch.zeros(rows, dtype=torch.float64)) + found

    return hook


def _finds_rows_itself(module: nn.Module) -> bool:
    """Whether an embedding computes the rows it looks up from something else, as learned positions do."""
    return type(module) is not nn.Embedding and "Position" in type(module).__name__


def _embedding_scale(module: nn.Module) -> float:
    """What an embedding multiplies its rows by (Gemma, BART): an error of a row grows by it."""
    scale = getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", None))
    return float(scale) if isinstance(scale, int | float) else 1.0
