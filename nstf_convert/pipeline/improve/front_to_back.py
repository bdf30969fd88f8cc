"""Encoding a mix front to back: every layer is rounded for the inputs its already compressed predecessors give it.

The calibration's Hessians are of the original model's inputs. When the mix is final, the fit batches run once more
through a model whose weights are the encoded ones: all batches stop before a group of weights that read the same
input, the second moment of that input is taken, the group is encoded with it, and the batches go on through the
decoded weights (the order of Frantar et al., GPTQ, 2022, weight group by weight group instead of layer by layer).

To correct a layer for what its predecessors lost the original model runs in step (nstf_convert.pipeline.improve.target).
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nstf import __version__
from nstf.analyzers.moments import rows_of
from nstf.analyzers.shrinkage import shrunk
from nstf.analyzers.turnstile import run_in_step
from nstf.kernels.formats import node_to_json
from nstf.kernels.trellis_encode import search_threads
from nstf.quantizers.rounding.products import products_of_errors
from nstf.quantizers.stats import Stats
from nstf_convert.pipeline.calibrate.batches import even_tokens, fit_batches, merge_batches, model_output
from nstf_convert.pipeline.calibrate.text import Batch, Data
from nstf_convert.pipeline.improve import groups as grouping
from nstf_convert.pipeline.improve.groups import Group, affordable, find_groups, first_groups
from nstf_convert.pipeline.improve.in_pass import (
    InPass,
    all_there,
    bits_of,
    outcome,
    shrinkage,
    stored_loss,
    token_weights,
)
from nstf_convert.pipeline.improve.target import Moments, Rows, moments, targets
from nstf_convert.pipeline.machine import each_of
from nstf_convert.pipeline.products import (
    EXACT_BITS,
    exact_products,
    fast_products,
    rounded_layers,
    rounds_alone,
)
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.pipeline.propose.decoded import decoded
from nstf_convert.pipeline.propose.encoder import ALGORITHMS, Result
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import Unit, working_bytes
from nstf_convert.pipeline.session import Session
from nstf_convert.pipeline.store.workdir import content_key
from nstf_convert.streamed import StreamedModel

# Bumped when the same mix gives other bytes.
VERSION = 5
# Of the weight's correction: damping, relative to the Hessian's mean diagonal, and the share of the batches that decide how
# far it goes.
DAMPING = 0.01
HELD_OUT = 0.25


def encode_in_prefix(
    session: Session,
    mix: Mapping[str, Recipe],
    progress: Callable[[Unit], None],
    share: float = 1.0,
) -> InPass:
    """Encodes a mix front to back. What the scheme does not cover is encoded with the calibration's statistics, first:
    tables, expert stacks, weights of modules that run several times, tensors the data says nothing about.

    Rounded is what makes up for the predecessors' errors, in the residual stream where a layer writes to one. share: of the
    weights it covers, only the first ones; `results` then has no others.
    """
    batches = [] if session.calibration is None else fit_batches(session.calibration)
    groups = find_groups(session, mix, batches) if batches else []
    batches = affordable(session, groups, batches, "front to back", 2)
    keys = _keys(session, mix, groups, len(batches))
    groups = first_groups(session, groups, share)
    wanted = {name: keys[name] for group in groups for name in group.weights}
    free = [(session.units[n], r) for n, r in mix.items() if n not in keys]
    results = session.encoder.encode_all(free, progress)
    prefixed = InPass(session, results, keys)
    if not all_there(session, list(wanted.values())):
        workers = session.machine.workers(max(working_bytes(session.units[n]) for n in wanted))
        threads = torch.get_num_threads()
        try:
            # Sums whose order depends on the number of threads would make the bytes depend on it.
            torch.set_num_threads(1)
            _Pass(prefixed, mix, groups, progress, workers).run(batches)
        finally:
            torch.set_num_threads(threads)
    for name, key in wanted.items():
        results.setdefault(name, Result(stored_loss(session, name, key), 0.0))
    return prefixed


class _Enough(Exception):
    """Ends a pass: what comes after the last group changes nothing."""


def _keys(
    session: Session, mix: Mapping[str, Recipe], groups: Sequence[Group], windows: int
) -> dict[str, str]:
    """Names in the work directory: everything before a tensor decides about it, so the whole mix is part of each, and
    the number of windows that fit the memory."""
    digest = content_key(mix={n: r.to_json() for n, r in sorted(mix.items())})
    return {
        name: content_key(
            kind="prefix",
            version=[__version__, ALGORITHMS, VERSION],
            checkpoint=session.checkpoint.fingerprint(),
            calibration=session.calibration_fingerprint(),
            mix=digest,
            windows=windows,
            # How work is put together decides how sums are rounded.
            together=[session.tokens_per_batch, session.machine.scratch_bytes],
            name=name,
        )
        for group in groups
        for name in group.weights
    }


class _Pass:
    """One run of the fit batches through the model that is being encoded."""

    def __init__(
        self,
        prefixed: InPass,
        mix: Mapping[str, Recipe],
        groups: Sequence[Group],
        progress: Callable[[Unit], None],
        workers: int,
    ) -> None:
        self.prefixed, self.session, self.mix = prefixed, prefixed.session, mix
        self.groups, self.progress, self.workers = groups, progress, workers
        self.ready = {name for name in mix if name not in prefixed.keys}
        self.decoded: dict[str, Tensor] = {}
        self.lock = threading.Lock()
        self.running = threading.local()
        self.streams: dict[int, Tensor] = {}
        self.losses: dict[str, float] = {}
        self.writing: dict[str, Future[None]] = {}
        self.count = 0
        self.fast = bits_of(self.session, mix) < EXACT_BITS
        self.model = self.session.streamed(self.source)
        self.modules = dict(self.model.module.named_modules())
        self.by_weight: dict[str, list[nn.Module]] = {}
        for _, module, weight in self.model.linear_modules():
            self.by_weight.setdefault(weight, []).append(module)

    def source(self, name: str) -> Tensor:
        """The weight as the model under way has it: decoded once it is encoded, the original before."""
        if name not in self.ready:
            return self.session.source(name)
        with self.lock:
            if name not in self.decoded:
                unit, writing = self.session.units[name], self.writing.get(name)
                if writing is not None:
                    writing.result()
                self.decoded[name] = decoded(self.prefixed.load(unit, self.mix[name]), self.session.device)
            return self.decoded[name]

    def run(self, batches: Sequence[Batch]) -> None:
        """Runs the fit batches to the end; every group is then in the work directory."""
        data = grouping.run_data(self.session)
        merged = list(merge_batches(batches, even_tokens(batches, self.session.tokens_per_batch)))
        if len(merged) < grouping.MIN_BATCHES:
            merged = list(batches)  # some are held out
        models = [self.model, self.session.reference()]
        paths = [dict(m.module.named_modules()) for m in models]
        self.count = len(merged)
        runs = [
            self._run(m, data, b, len(merged) * i + j)
            for i, m in enumerate(models)
            for j, b in enumerate(merged)
        ]
        gates = [[p[g.module] for p in paths] for g in self.groups if g.module]
        norms = {g.norm for g in self.groups if g.norm is not None}
        handles = [p[n].register_forward_pre_hook(self._keep_stream) for p in paths for n in sorted(norms)]
        try:
            # Results are written while the next group is under way. The workers stay for the whole pass: torch takes
            # milliseconds to set a new thread up.
            with ThreadPoolExecutor(1) as self.writer, each_of(self.workers) as self.each:
                device = self.session.device
                # The original runs on while a group is encoded, much of which is one core's work.
                alone = device.type != "cpu" or (self.fast and not rounds_alone(device, data.language))
                ahead = () if alone else range(len(merged), len(runs))
                rounded = rounded_layers(device, data.language) if self.fast else exact_products()
                with rounded, suppress(_Enough):
                    run_in_step(gates, runs, self._at_gate, self.workers, ahead=ahead)
                for writing in self.writing.values():
                    writing.result()
        finally:
            for handle in handles:
                handle.remove()
            # The model and its hooks refer to each other: without this its weights stay until they are collected.
            self.model.weights.clear()
            self.streams.clear()
            self.decoded.clear()

    def _run(self, model: StreamedModel, data: Data, batch: Batch, index: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            self.running.index = index
            return model_output(model, data, batch)

        return run

    def _keep_stream(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.streams[self.running.index] = args[0]

    def _at_gate(self, index: int, inputs: list[Any]) -> Callable[[], None] | None:
        """Takes the moments of a group's inputs; what is then to be done does not concern the original."""
        self.decoded.clear()
        for writing in self.writing.values():
            writing.result()
        self.writing.clear()
        group = self.groups[index]
        start = time.perf_counter()
        known: list[Moments] = []
        if not all(self.session.work.has(self.prefixed.keys[n]) for n in group.weights):
            # No batch runs meanwhile.
            with fast_products() if self.fast else nullcontext():
                known = self._moments(group, inputs)
        if index < len(self.groups) - 1:
            return partial(self._finish_group, group, known, start)
        self._finish_group(group, known, start)
        raise _Enough

    def _finish_group(self, group: Group, known: list[Moments], start: float) -> None:
        """Encodes a group, if it is not yet, and puts it into the model. known: its moments if so, used up; start: when
        they were begun."""
        if known:
            with exact_products():
                self._encode_group(group, known)
        for name in group.weights:
            seconds = time.perf_counter() - start
            loss = self.losses.get(name)
            if loss is None:
                loss = stored_loss(self.session, name, self.prefixed.keys[name])
            self.prefixed.results[name] = Result(loss, seconds / len(group.weights))
            self.progress(self.session.units[name])
            self.ready.add(name)
            self.model.weights.drop(name)
            for module in self.by_weight[name]:
                # Small weights stay loaded: what is there is still the original.
                if not module.weight.is_meta:  # type: ignore[union-attr]
                    module.weight = nn.Parameter(self.source(name), requires_grad=False)

    def _moments(self, group: Group, inputs: list[Any]) -> list[Moments]:
        """What is known of a group's inputs: from the batches that fit, and from those held out for the target if any."""
        module = self.modules[group.module] if group.module else nn.Identity()
        given = [x[0] if isinstance(x, tuple) else x for x in inputs]
        here = [i for i in range(self.count) if given[i] is not None]
        rows = [rows_of(module, given[i]) for i in here]
        weights = self._token_weights(group, rows)
        originals = [rows_of(module, given[self.count + i]) for i in here]
        lag: list[Tensor] = []
        if group.norm is not None:
            lag = [(self.streams[self.count + i] - self.streams[i]).flatten(0, -2) for i in here]
        data = Rows(rows, originals, lag, weights)
        kept = max(1, round(len(rows) * HELD_OUT))
        fit, held_out = data.part(slice(None, -kept)), data.part(slice(-kept, None))
        if not fit.rows:
            return moments([data], self.workers, self.each)
        return moments([fit, held_out], self.workers, self.each)

    def _token_weights(self, group: Group, rows: Sequence[Tensor]) -> list[Tensor] | None:
        return token_weights(self.session, group, rows, self.count)

    def _encode_group(self, group: Group, known: list[Moments]) -> None:
        """Encodes the weights of a group: together on a GPU, a thread each on a CPU. known: is used up."""
        wanted = list(group.weights)
        if not self.session.machine.on_gpu:  # there those that were encoded together are so again
            wanted = [n for n in wanted if not self.session.work.has(self.prefixed.keys[n])]
        # A thread that is left over helps with the search of the others' tiles.
        inner = max(1, self.workers // len(wanted))
        weights, shares, hessian = self._targets(wanted, known, self.each)
        stats = Stats(shrunk(hessian, shrinkage(self.session, group)))
        del hessian
        if self.session.machine.on_gpu:
            self._encode(wanted, weights, shares, stats)
            return

        def one(index: int) -> None:
            part = slice(index, index + 1)
            with search_threads(inner):
                self._encode(wanted[part], weights[part], shares[part], stats)

        list(self.each(one, range(len(wanted))))

    def _targets(
        self, names: Sequence[str], known: list[Moments], each: Callable[..., Iterable[Any]]
    ) -> tuple[list[Tensor], list[float], Tensor]:
        """(what is rounded instead of each weight, the shares of their corrections, the Hessian of all tokens)."""
        encoder, statistics = self.session.encoder, self.session.statistics
        units = [self.session.units[n] for n in names]
        inners = [encoder.inner(u) for u in units]
        if len(known) == 1:
            return inners, [0.0] * len(inners), known.pop().hessian
        matrices = [
            (w.reshape(w.shape[0], -1), statistics.row_weight(u)) for u, w in zip(units, inners, strict=True)
        ]
        machine = self.session.machine
        found, both = targets(
            matrices,
            known,
            DAMPING,
            map if len(names) == 1 else each,
            machine.scratch_bytes if machine.on_gpu else 0,
            partial(products_of_errors, machine.device, len(known[0].hessian)),
        )
        return (
            [m.reshape(w.shape) for (m, _), w in zip(found, inners, strict=True)],
            [share for _, share in found],
            both.hessian,
        )

    def _encode(
        self, names: Sequence[str], weights: Sequence[Tensor], shares: Sequence[float], stats: Stats
    ) -> None:
        units = [self.session.units[n] for n in names]
        own = [stats.for_rows(self.session.statistics.row_weight(u)) for u in units]
        items = [(self.mix[u.name], w, s, u.lead) for u, w, s in zip(units, weights, own, strict=True)]
        done = recipes.encode_many(items, self.session.machine.scratch_bytes)
        for unit, (_, inner, known, _), share, encoded in zip(units, items, shares, done, strict=True):
            stored, became, lost = outcome(unit, inner, encoded, known)
            self.losses[unit.name] = lost
            if unit.permute is None:
                self.decoded[unit.name] = became.reshape(unit.shape)
            metadata = {"tree": node_to_json(stored.tree), "loss": lost, "share": share}
            self.writing[unit.name] = self.writer.submit(
                self.session.work.put, self.prefixed.keys[unit.name], dict(stored.arrays), metadata
            )
