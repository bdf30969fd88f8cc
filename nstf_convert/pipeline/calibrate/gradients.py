"""One backward pass over the fit batches: what every output, every token and every embedding row matters.

The label of a token is drawn from the model's own prediction, LABELS times: the mean of their gradients has the same
covariance as that of one and a far lighter tail, and costs one backward pass. Layers are recomputed in it, so that
the activations of one layer are in memory; layers may use the CPU's bfloat16 units (see `rounded_layers`).

Batches know nothing of each other: each has labels of its own seed, and what it says is added up in the order of the
batches. So several processes may share them, and the sums are the same for any number of processes.
"""

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from nstf.analyzers.by_thread import ByThread
from nstf.analyzers.heap import give_back_much, share_one_arena
from nstf.analyzers.sensitivity import OutputSensitivity, checkpoint_layers, sampled_gradient
from nstf.analyzers.token_weights import TokenGradients, TokenSquares, temper, token_weights
from nstf.analyzers.turnstile import layer_list
from nstf.errors import UnsupportedError
from nstf_convert.pipeline.calibrate.batches import merge_batches, model_output, prepared, start_gradients
from nstf_convert.pipeline.calibrate.lookups import counter, frequency, of_all
from nstf_convert.pipeline.calibrate.share import Pieces
from nstf_convert.pipeline.calibrate.text import Batch, Data
from nstf_convert.pipeline.products import repeatable, rounded_layers
from nstf_convert.streamed import StreamedModel

log = logging.getLogger("nstf")

HOST = torch.device("cpu")
# Labels drawn per token.
LABELS = 16
# Logits in memory at a time: 25 MiB, several times, on a CPU; 256 MiB on a GPU.
HEAD_ELEMENTS = {"cpu": 128 * 49152, "cuda": 1 << 26}
# Activations of a batch that are kept on a CPU in place of computing a layer again: this many copies of the stream and of
# the feed-forward's inner width.
KEPT_BYTES, KEPT_WIDTHS = 256 << 20, 10
# What is done to the tails of the token weights: as they are, the inputs of q, k and v of some layers would have a
# Hessian of 50 tokens out of 16384 (attention sinks). Measured as SHRINKAGE, without shrinkage: power 1 -12 -11 %,
# power 1 capped at 4 -9 -15 %, power 0.5 -14 -10 %.
WEIGHT_POWER = 0.5
WEIGHT_CAP = 16.0


@dataclass(frozen=True, eq=False)
class Gradients:
    """sensitivity: by `sensitivity:<weight>` or `sensitivity_in:<table>`, [features]. frequency: by table, [rows].
    token_weight: by the key of a Hessian, [fit tokens], mean 1. repeats: some layer runs several times in a pass."""

    sensitivity: dict[str, Tensor]
    frequency: dict[str, Tensor]
    token_weight: dict[str, Tensor] = field(default_factory=dict)
    repeats: bool = False

    def stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON, from which `from_stored` makes the same."""
        parts = {"frequency": self.frequency, "token_weight": self.token_weight}
        tensors = {f"{kind}:{n}": v for kind, part in parts.items() for n, v in part.items()}
        return {**self.sensitivity, **tensors}, {"repeats": self.repeats}

    @classmethod
    def from_stored(cls, tensors: dict[str, Tensor], facts: dict[str, Any], device: torch.device) -> Self:
        """What another process has stored; on the device where it was computed, since sums are rounded there."""
        found: dict[str, dict[str, Tensor]] = {"sensitivity": {}, "frequency": {}, "token_weight": {}}
        for name, value in tensors.items():
            kind, _, rest = name.partition(":")
            if kind == "frequency":
                found[kind][rest] = value
            elif kind == "token_weight":
                found[kind][rest] = value.to(device)
            else:
                found["sensitivity"][name] = value.to(device)
        return cls(found["sensitivity"], found["frequency"], found["token_weight"], facts["repeats"])


@dataclass(frozen=True, eq=False)
class BatchSums:
    """What one batch says, on the model's device.

    sums: by the names of `Gradients.sensitivity`, [features] float64, squared gradients; tokens: each token's; counts: by
    table, [rows] float64, how often a row was looked up; head: [vocabulary] float64, the sum of the Fisher diagonals at the
    logits, and spread: [tokens] float32, what they are in all; units: tokens (samples of another model); repeats: as in
    `Gradients`.
    """

    sums: dict[str, Tensor]
    tokens: TokenSquares
    counts: dict[str, Tensor]
    head: Tensor | None
    spread: Tensor | None
    units: int
    repeats: bool

    def stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON, from which `from_stored` makes the same sums."""
        parts = {"sum": self.sums, "token": self.tokens.squares, "count": self.counts}
        tensors = {f"{kind}:{n}": v for kind, part in parts.items() for n, v in part.items()}
        if self.head is not None and self.spread is not None:
            tensors |= {"head": self.head, "spread": self.spread}
        facts = {"features": self.tokens.features, "key_of": self.tokens.key_of}
        return tensors, {**facts, "units": self.units, "repeats": self.repeats}

    def on(self, device: torch.device) -> Self:
        """The same on another device; counts stay where they are."""
        return self.from_stored(*self.stored(), device)

    @classmethod
    def from_stored(cls, tensors: dict[str, Tensor], facts: dict[str, Any], device: torch.device) -> Self:
        """The sums another process has stored."""
        parts: dict[str, dict[str, Tensor]] = {"sum": {}, "token": {}, "count": {}}
        for name, value in tensors.items():
            kind, _, rest = name.partition(":")
            if rest:
                parts[kind][rest] = value if kind == "count" else value.to(device)
        tokens = TokenSquares(parts["token"], facts["features"], dict(facts["key_of"]))
        head, spread = (tensors[n].to(device) if n in tensors else None for n in ("head", "spread"))
        return cls(parts["sum"], tokens, parts["count"], head, spread, facts["units"], facts["repeats"])


def end_loss_gradients(
    model: StreamedModel,
    data: Data,
    seed: int,
    tick: Callable[[float], None] = lambda share: None,
    tokens_per_batch: int = 0,
    pieces: Pieces | None = None,
    workers: int = 1,
) -> Gradients:
    """Gradients of the end loss over the fit batches, or the first ones of them (`Data.read`), which leave tokens without
    weights. tick: is told the share of the work that a batch was;
    tokens_per_batch: windows are put together up to so many; pieces: batches are shared with other processes; workers:
    batches that run side by side, which changes nothing."""
    merged = _merged(data, tokens_per_batch)
    total: BatchSums | None = None
    tokens: list[TokenSquares] = []
    spread: list[Tensor] = []
    with _Backward(model, data, seed, tokens_per_batch) as backward:
        scales = backward.scales
        for sums in _in_order(backward, merged, pieces, lambda: tick(1 / len(merged)), workers):
            tokens.append(sums.tokens)
            if sums.spread is not None:
                spread.append(sums.spread)
            total = sums if total is None else _sum(total, sums)
    if total is None:
        raise ValueError("there is no batch to fit on")
    units = total.units
    found = {
        n: (v / units).to(torch.float32) * scales.get(n, 1.0) ** 2 for n, v in sorted(total.sums.items())
    }
    weights = token_weights(tokens, _rows(data.to_read))
    if total.head is not None and model.head is not None:
        head = next(p for p, module in model.module.named_modules() if module is model.head)
        found[f"sensitivity:{model.stored_name(f'{head}.weight')}"] = (total.head / units).to(torch.float32)
        weights["head"] = torch.cat(spread)
    counts = total.counts
    if len(data.to_read) < len(data.fit):
        weights = {}
        counts = {n: of_all(v, data) for n, v in counts.items()}
    return Gradients(
        found,
        {n: frequency(v) for n, v in sorted(counts.items())},
        {n: temper(w, WEIGHT_POWER, WEIGHT_CAP) for n, w in weights.items()},
        total.repeats,
    )


def leave_gradients(
    model: StreamedModel, data: Data, seed: int, tokens_per_batch: int, pieces: Pieces
) -> None:
    """What another process does of `end_loss_gradients`: takes batches and leaves what they say."""
    merged = _merged(data, tokens_per_batch)
    if not pieces.left(map(str, range(len(merged)))):
        return
    with _Backward(model, data, seed, tokens_per_batch) as backward:
        for index, batch in enumerate(merged):
            if pieces.take(str(index)):
                pieces.put(str(index), *backward.sums(index, batch).stored())


def _merged(data: Data, tokens_per_batch: int) -> list[Batch]:
    return list(merge_batches(data.to_read, tokens_per_batch)) if tokens_per_batch else list(data.to_read)


def _in_order(
    backward: "_Backward",
    merged: Sequence[Batch],
    pieces: Pieces | None,
    done: Callable[[], None],
    workers: int,
) -> Iterator[BatchSums]:
    """The sums of all batches in their order, whoever has run them. done: is called when there is one more."""

    def run(i: int) -> BatchSums:
        sums = backward.sums(i, merged[i])
        done()
        return sums

    if pieces is None and workers > 1:
        share_one_arena()
        with ThreadPoolExecutor(workers, initializer=backward.separate) as pool:
            yield from pool.map(run, range(len(merged)))
        return
    if pieces is None:
        yield from map(run, range(len(merged)))
        return
    # What waits for the batches of others waits in the host's memory.
    own = {i: run(i).on(HOST) for i in range(len(merged)) if pieces.take(str(i))}
    if len(own) < len(merged):
        pieces.wait()
    for i in range(len(merged)):
        sums = own.pop(i, None)
        if sums is None and (found := pieces.find(str(i))) is not None:
            sums = BatchSums.from_stored(*found, backward.device)
            done()
        yield run(i) if sums is None else sums.on(backward.device)


def _sum(a: BatchSums, b: BatchSums) -> BatchSums:
    """The sums of two batches; what they say token by token is kept apart."""
    head = a.head if a.head is None or b.head is None else a.head + b.head
    units, repeats = a.units + b.units, a.repeats or b.repeats
    return BatchSums(_added(a.sums, b.sums), b.tokens, _added(a.counts, b.counts), head, None, units, repeats)


def _added(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: a[n] + b[n] if n in a and n in b else a.get(n, b.get(n)) for n in {**a, **b}}  # type: ignore[misc]


class _Backward:
    """A model whose modules are watched, run forwards and backwards a batch at a time. Use as a context manager."""

    def __init__(self, model: StreamedModel, data: Data, seed: int, tokens_per_batch: int = 0) -> None:
        self._tokens_per_batch = tokens_per_batch
        self.device = model.device
        self.scales: dict[str, float] = {}
        self._model, self._data, self._seed = model, data, seed
        self._sums, self._tokens = OutputSensitivity(), TokenGradients()
        self._counts: ByThread[dict[str, Tensor]] = ByThread(dict)
        self._calls: ByThread[Counter[nn.Module]] = ByThread(Counter)
        self._precision = ExitStack()
        self._repeatable = data.language and self.device.type == "cuda"

    def __enter__(self) -> Self:
        model, data, sums = self._model, self._data, self._sums
        layers = layer_list(model.module)[1]
        self._handles = [layer.register_forward_pre_hook(self._count_call) for layer in dict.fromkeys(layers)]
        for path, module, weight in model.linear_modules():
            if module is not model.head or not data.language:
                self._handles.append(sums.watch(f"sensitivity:{weight}", module))
                if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
                    self._handles.append(self._tokens.watch(path, module))
        for path, module in model.expert_modules():
            name = model.stored_name(f"{path}.down_proj")
            self._handles.append(sums.watch(f"sensitivity:{name}", module))
        for path, module in model.module.named_modules():
            if isinstance(module, nn.Embedding):
                name = model.stored_name(f"{path}.weight")
                self._handles.append(module.register_forward_hook(start_gradients))
                self._handles.append(
                    module.register_forward_hook(counter(name, module.num_embeddings, self._counts))
                )
                self._handles.append(sums.watch(f"sensitivity_in:{name}", module))
                self.scales[f"sensitivity_in:{name}"] = _embedding_scale(module)
        # Without it a pass of the 135 M model had up to 3.6 GB of freed pieces in the heap, and 0.6 GB in use.
        between = give_back_much if self.device.type == "cpu" else None
        self._undo = checkpoint_layers([] if self._keeps_activations(len(layers)) else layers, between)
        model.settle()  # one thread at a time may
        self._precision.enter_context(rounded_layers(self.device, data.language))
        return self

    def __exit__(self, *_: object) -> None:
        self._precision.close()
        self._undo()
        for handle in self._handles:
            handle.remove()

    def _keeps_activations(self, layers: int) -> bool:
        """Whether what the layers of a batch compute is so little that it need not be computed again. A GPU would keep the
        weights as well."""
        config = self._model.module.config.get_text_config()
        found = (getattr(config, name, None) for name in ("hidden_size", "intermediate_size"))
        widths = [width for width in found if isinstance(width, int)]
        ids = [b["input_ids"] for b in self._data.to_read if "input_ids" in b]
        if self.device.type != "cpu" or not self._data.language or not ids or len(widths) < 2:
            return False
        tokens = max(self._tokens_per_batch, max(i.numel() for i in ids))
        return 4 * layers * tokens * KEPT_WIDTHS * sum(widths) <= KEPT_BYTES

    def separate(self) -> None:
        """From now on batches that the calling thread runs are gathered apart from those of others."""
        for part in (self._sums, self._tokens, self._counts, self._calls):
            part.separate()

    def _count_call(self, module: nn.Module, args: Any) -> None:
        self._calls.value[module] += 1

    def sums(self, index: int, batch: Batch) -> BatchSums:
        """What a batch says; index: its place among all, which is part of its labels' seed."""
        try:
            return self._sums_of(index, batch)
        except (AssertionError, NotImplementedError) as error:  # Reformer's reversible layers
            said = " ".join(str(error).split())[:200]
            raise UnsupportedError(f"the model has no gradients outside of training ({said})") from error
        except RuntimeError as error:
            if not self._repeatable or "deterministic" not in str(error):
                raise
            # The operation is one of the model's, so that it fails in every batch and every process.
            log.debug("the backward pass may differ from run to run: %s", error)
            self._repeatable = False
            self._sums.take()
            self._tokens.take()
            self._counts.take()
            return self._sums_of(index, batch)

    def _sums_of(self, index: int, batch: Batch) -> BatchSums:
        self._calls.take()
        generator = torch.Generator(self.device).manual_seed(_seed_of(self._seed, index))
        out = model_output(self._model, self._data, prepared(batch))
        _check_reached(out)
        if self._data.language:
            gradient, head, spread = gradient_from_logits(self._model, out, generator)
            self._back(out, gradient)
            units = spread.numel()
        else:
            units, head, spread = _back_from_outputs(out, generator), None, None
        give_back_much(unknown=True)
        repeats = any(n > 1 for n in self._calls.take().values())
        sums, tokens, counts = self._sums.take(), self._tokens.take(), self._counts.take()
        return BatchSums(sums, tokens, counts, head, spread, units, repeats)

    def _back(self, out: Tensor, gradient: Tensor) -> None:
        """Sends a gradient back, with the same bits every time where that was not given up."""
        with repeatable(self.device) if self._repeatable else nullcontext():
            out.backward(gradient)  # type: ignore[no-untyped-call]


def _check_reached(out: Tensor) -> None:
    """Raises UnsupportedError where the outputs hang on no weight that is measured: I-BERT has layers of its own."""
    if not out.requires_grad:
        raise UnsupportedError(
            "the model's outputs come from none of the layers that nstf knows (linear, convolution, embedding, experts): "
            "its weights cannot be measured"
        )


def _back_from_outputs(out: Tensor, generator: torch.Generator) -> int:
    """Sends random gradients back from outputs [b, ...] that are no logits; how many samples there were."""
    flat = out.reshape(out.shape[0], -1)
    noise = torch.randn(flat.shape, generator=generator, device=flat.device)
    loss = (flat * noise / flat.detach().norm(dim=1, keepdim=True).clamp_min(1e-12)).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return flat.shape[0]


def gradient_from_logits(
    model: StreamedModel, out: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """(the gradient of sampled labels at hidden states [b, t, d], sum over the tokens of the Fisher diagonal at the logits
    [vocabulary] float64, its sum over the vocabulary [tokens])."""
    flat = out.reshape(-1, out.shape[-1])
    gradient = torch.empty_like(flat)
    parts, total = [], torch.zeros((), dtype=torch.float64, device=model.device)
    with model.holding(model.head):
        vocabulary = model.module.config.get_text_config().vocab_size
        step = max(1, HEAD_ELEMENTS[flat.device.type] // vocabulary)
        for start in range(0, flat.shape[0], step):
            rows = slice(start, start + step)
            leaf = flat[rows].detach().requires_grad_()
            logits = model.logits(leaf)
            sample, spread = sampled_gradient(logits.detach(), generator, LABELS)
            total = total + spread.sum(dim=0).double()
            parts.append(spread.sum(dim=1))
            gradient[rows] = torch.autograd.grad(logits, leaf, sample)[0]
    return gradient.view(out.shape), total, torch.cat(parts)


def _seed_of(seed: int, index: int) -> int:
    """A seed of its own for every batch."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{index}".encode()).digest()[:7], "little")


def _rows(batches: tuple[Batch, ...]) -> int:
    """Tokens in all; 0 for inputs that are no tokens."""
    ids = [b.get("input_ids") for b in batches]
    return sum(math.prod(i.shape) for i in ids if i is not None)


def _embedding_scale(module: nn.Module) -> float:
    """What an embedding multiplies its rows by (Gemma, BART): an error of a row grows by it."""
    scale = getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", None))
    return float(scale) if isinstance(scale, int | float) else 1.0
