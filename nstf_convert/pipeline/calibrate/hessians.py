"""The forward pass of the fit batches, layer by layer: second moments of all inputs, shrunk, and what they are used for.

Hessians of large models are used while they are there and not stored. Then the layers can be shared by several processes:
each runs all layers, which is the lesser part of the work, and takes the moments of its own.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nstf.analyzers.moments import ExpertMoments, InputMoments, Moment
from nstf.analyzers.shrinkage import effective_tokens, sampling_share, shrunk
from nstf.analyzers.turnstile import call_order, layer_list, run_layer_by_layer
from nstf.errors import NstfError
from nstf_convert.pipeline.calibrate.batches import PROBE_TOKENS, merge_batches, model_output
from nstf_convert.pipeline.calibrate.gradients import Gradients
from nstf_convert.pipeline.calibrate.share import Pieces
from nstf_convert.pipeline.calibrate.text import Data
from nstf_convert.pipeline.calibrate.turns import Turns
from nstf_convert.pipeline.machine import each_of
from nstf_convert.pipeline.products import exact_products, fast_products, rounded_layers
from nstf_convert.streamed import StreamedModel

# Off-diagonal entries of a Hessian lose at least this share: new text is not from where the sample is. Sampling adds
# what `sampling_share` finds. A third of SmolLM2-135M's layers at 3 bits (int, group 64), 32 windows, change of the
# KLD on other kinds of text and on held-out text of the same kind, in per cent, standard error 3 to 8: without token
# weights 0.1 -23 -13, 0.25 -26 -13, 0.5 -27 -5; with them 0 -14 -10, 0.1 -30 -22, 0.25 -29 -15.
# Encoded front to back at 3 bits with trellis codes a quarter was better: 0.109 and 0.392 (other text) against 0.115 and
# 0.528 at a tenth; on a model of 29 M parameters neither was.
SHRINKAGE = 0.25
# Parts of the pass: a layer by its number, the head, and all modules outside the layers.
HEAD, OUTSIDE = "head", ""


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


@dataclass(frozen=True)
class Consumer:
    """What uses Hessians while they are there. covers: whether a weight needs its Hessian then only; use: is shown what is
    known and the keys of new Hessians that need not be stored."""

    covers: Callable[[str], bool]
    use: Callable[[Gathered, list[str]], None]


# Takes a Hessian that is to be stored.
Store = Callable[[str, Tensor], None]


@dataclass(frozen=True, eq=False)
class Hessians:
    """entries: what the calibration file's metadata says about each, by key; expert_tokens: by expert module, [experts]."""

    entries: dict[str, Any]
    expert_tokens: dict[str, Tensor]


def gather_hessians(
    model: StreamedModel,
    data: Data,
    gradients: Gradients,
    tokens_per_batch: int,
    store: Store,
    consumer: Consumer | None = None,
    tick: Callable[[float], None] = lambda share: None,
    pieces: Pieces | None = None,
    workers: int = 1,
) -> Hessians:
    """Hands every Hessian to the consumer or to `store`. tick: is told the share of the pass that a layer was; pieces:
    layers are shared with other processes; workers: batches that run side by side, which changes nothing."""
    whole = _Pass(model, data, gradients, tokens_per_batch, consumer, store, workers)
    shared = whole.shareable() if pieces is not None else set()
    own: set[str] = set()

    def take(part: str) -> bool:
        if part not in shared or pieces is None:
            return True
        if pieces.take(part):
            own.add(part)
        return part in own

    whole.run(take, tick)
    left = shared - own
    if left and pieces is not None:
        pieces.wait()
        for part in sorted(left):
            found = pieces.find(part)
            if found is not None:
                whole.entries.update(found[1]["hessians"])
                left.discard(part)
    if left:  # whoever took them has failed
        whole.run(lambda part: part in left)
    return Hessians(whole.entries, whole.experts.tokens)


def leave_proposals(
    model: StreamedModel,
    data: Data,
    gradients: Gradients,
    tokens_per_batch: int,
    consumer: Consumer,
    pieces: Pieces,
) -> None:
    """What another process does of `gather_hessians`: shows the consumer the Hessians of the layers that it takes, and
    leaves what the file says about them."""

    def unexpected(key: str, hessian: Tensor) -> None:
        raise NstfError(f"the Hessian of {key} is to be stored, which the first process does")

    whole = _Pass(model, data, gradients, tokens_per_batch, consumer, unexpected)
    shared = whole.shareable()
    if not pieces.left(shared):
        return  # it came late: the pass itself would be for nothing
    whole.run(
        lambda part: part in shared and pieces.take(part),
        done=lambda part, entries: pieces.put(part, {}, {"hessians": entries}),
    )


def weights_of_moments(model: StreamedModel, language: bool) -> dict[str, str]:
    """The weight that reads each input whose second moment is taken, by the key of its Hessian."""
    found = {path: weight for path, (_, weight) in _watched(model, language).items()}
    for path, _ in model.expert_modules():
        found |= {f"{path}.{n}": model.stored_name(f"{path}.{n}") for n in ("gate_up_proj", "down_proj")}
    if language and model.head is not None:
        found[HEAD] = model.stored_name(_path_of(model.module, model.head) + ".weight")
    return found


def _watched(model: StreamedModel, language: bool) -> dict[str, tuple[nn.Module, str]]:
    """The linear modules whose inputs are watched, with the names of their weights, by path."""
    return {
        path: (module, weight)
        for path, module, weight in model.linear_modules()
        if getattr(module, "groups", 1) == 1 and not (language and module is model.head)
    }


class _Pass:
    """The fit batches on their way through the layers. It may run several times, each time for some parts."""

    def __init__(
        self,
        model: StreamedModel,
        data: Data,
        gradients: Gradients,
        tokens_per_batch: int,
        consumer: Consumer | None,
        store: Store,
        workers: int = 1,
    ) -> None:
        self._model, self._data, self._weights, self._store = model, data, gradients.token_weight, store
        self._batches = list(merge_batches(data.fit, tokens_per_batch))
        prefix, self._layers = layer_list(model.module)
        self._consumer = consumer
        if gradients.repeats:
            # ALBERT runs one layer many times: its Hessians are complete at the end only, and are needed again.
            self._layers, self._consumer = [], None
        self.entries: dict[str, Any] = {}
        known = {f"frequency:{name}": value for name, value in gradients.frequency.items()}
        self._gathered = Gathered({**gradients.sensitivity, **known}, {"hessians": self.entries})
        self._taken: set[str] = set()
        self._turns: Turns | None = None
        self._moments = InputMoments(
            self._weights, lambda name: self._part_of[name] in self._taken, self._turn
        )
        self.experts = ExpertMoments(self._moments)
        self._linear = _watched(model, data.language)
        self._stacks = dict(model.expert_modules())
        self._weight_of = weights_of_moments(model, data.language)
        # Whether HEAD is the output layer of a language model; classifiers have layers that are called so.
        self._has_head = HEAD in self._weight_of and HEAD not in self._linear
        numbers = {f"{prefix}.{i}.": str(i) for i in range(len(self._layers))}
        self._part_of = {
            path: next((n for start, n in numbers.items() if path.startswith(start)), OUTSIDE)
            for path in [*self._weight_of, *self._stacks]
            if path != HEAD or path in self._linear
        }
        self._workers = workers if workers > 1 and self._runs_once() else 1

    def _runs_once(self) -> bool:
        """Whether a batch calls every module that is watched exactly once: then it is clear what comes before what."""
        if not self._layers or self._stacks or not self._data.language:
            return False
        modules = [module for module, _ in self._linear.values()]
        few = {n: v[:, :PROBE_TOKENS] if v.ndim == 2 else v for n, v in self._batches[0].items()}
        calls = call_order(modules, lambda: model_output(self._model, self._data, few))
        return len(calls) == len(set(calls)) == len(modules)

    def _turn(self, key: str) -> AbstractContextManager[None]:
        return nullcontext() if self._turns is None else self._turns.turn(key)

    def _layer_of(self, key: str) -> int | None:
        part = self._part_of.get(key, OUTSIDE)
        return None if part == OUTSIDE else int(part)

    def shareable(self) -> set[str]:
        """The parts all of whose Hessians the consumer covers, so that no Hessian needs to go from process to process."""
        if self._consumer is None:
            return set()
        parts = {str(i) for i in range(len(self._layers))} | ({HEAD} if self._has_head else set())
        parts -= {self._part_of[path] for path in self._stacks}
        kept = {path for path, weight in self._weight_of.items() if not self._consumer.covers(weight)}
        return parts - {self._part_of.get(path, HEAD) for path in kept}

    def run(
        self,
        take: Callable[[str], bool],
        tick: Callable[[float], None] = lambda share: None,
        done: Callable[[str, dict[str, Any]], None] = lambda part, entries: None,
    ) -> None:
        """One pass. take: is asked for each part, shortly before the batches come to it, whether to gather it; done: is told
        what the file says about the Hessians of a part that is finished."""
        head = InputMoments(self._weights)
        model, layers = self._model, self._layers

        def run(index: int) -> None:
            with nullcontext() if self._turns is None else self._turns.running(index):
                out = model_output(model, self._data, self._batches[index])
                if HEAD in self._taken:
                    with self._turn(HEAD):
                        head.add(HEAD, model.head_inputs(out.reshape(-1, out.shape[-1])))

        def before(part: str) -> None:
            if (part != HEAD or self._has_head) and take(part):
                self._taken.add(part)

        def after_layer(index: int) -> None:
            if index < 0:
                precision.enter_context(
                    fast_products()
                )  # for the moments; no position is made into an angle any more
            tick(1 / (len(layers) + 1))
            if str(index) in self._taken:
                names = [n for n, part in self._part_of.items() if part == str(index)]
                done(str(index), self._use(self._moments.pop(names)))
                self._taken.discard(str(index))
            if index + 1 < len(layers):
                before(str(index + 1))
            if index + 2 == len(layers):
                before(HEAD)  # whose input the last layer gives

        handles = [self._moments.watch(path, module) for path, (module, _) in self._linear.items()]
        handles += [self.experts.watch(path, module) for path, module in self._stacks.items()]
        if self._workers > 1:
            model.settle()  # one thread at a time may
            self._turns = Turns(layers, self._layer_of)
        indices = range(len(self._batches))
        try:
            before(OUTSIDE)
            with ExitStack() as precision, torch.no_grad():
                precision.enter_context(rounded_layers(model.device, self._data.language and bool(layers)))
                if layers:
                    runs = [partial(run, i) for i in indices]
                    run_layer_by_layer(layers, runs, after_layer, self._workers)
                else:
                    before(HEAD)
                    for index in indices:
                        run(index)
            self._use(self._moments.pop())
            if HEAD in self._taken:
                done(HEAD, self._use(head.pop()))
        finally:
            self._taken.clear()
            if self._turns is not None:
                self._turns.close()
                self._turns = None
            for handle in handles:
                handle.remove()

    def _use(self, found: dict[str, Moment]) -> dict[str, Any]:
        """Shrinks new Hessians, shows them to the consumer, stores the others: what the file says about each."""

        def share_of(key: str, moment: Moment) -> float:
            known = self._weights.get(key)
            tokens = float(moment.tokens) if known is None else effective_tokens(known)
            share = SHRINKAGE + (1 - SHRINKAGE) * sampling_share(moment.hessian, tokens)
            shrunk(moment.hessian, share)
            return share

        with each_of(self._workers) as each:
            shares = list(each(share_of, found, found.values()))
        for (key, moment), share in zip(found.items(), shares, strict=True):
            self._gathered.tensors[f"hessian:{key}"] = moment.hessian
            self.entries[key] = {
                "tokens": moment.tokens,
                "shrinkage": share,
                "weights": sorted({self._weight_of[m] for m in moment.members}),
            }
        covered = self._covered(list(found))
        if covered and self._consumer is not None:
            with exact_products():
                self._consumer.use(self._gathered, covered)
        for key in found:
            hessian = self._gathered.tensors.pop(f"hessian:{key}")
            if key not in covered:
                self._store(key, hessian)
        return {key: self.entries[key] for key in found}

    def _covered(self, keys: Sequence[str]) -> list[str]:
        if self._consumer is None:
            return []
        return [k for k in keys if all(map(self._consumer.covers, self.entries[k]["weights"]))]


def _path_of(root: nn.Module, wanted: nn.Module) -> str:
    found: str = next(path for path, module in root.named_modules() if module is wanted)
    return found
