"""Encoding a mix for the inputs of the original model, where its Hessians were too large to be kept.

The fit batches run through the original model once more. They stop before each group of weights that read one input, and
the second moment of that input is taken. No group waits for another, as it does front to back: so on a GPU several groups
wait together, as many as fit the memory, and what gains from that is encoded at the same time (`ACROSS` in
nstf.quantizers). A result depends on its own group alone, so that neither the memory nor an interruption changes a byte,
and another mix that stores a group in the same way finds it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nstf import __version__
from nstf.analyzers.moments import rows_of
from nstf.analyzers.shrinkage import shrunk
from nstf.analyzers.turnstile import run_in_step
from nstf.kernels.formats import EncodedTensor, node_to_json
from nstf.kernels.trellis_encode import search_threads
from nstf.quantizers.stats import Stats
from nstf_convert.pipeline.calibrate.batches import even_tokens, fit_batches, merge_batches, model_output
from nstf_convert.pipeline.calibrate.text import Batch
from nstf_convert.pipeline.improve import together
from nstf_convert.pipeline.improve.groups import (
    Group,
    affordable,
    find_groups,
    first_groups,
    inputs,
    run_data,
    waiting_bytes,
)
from nstf_convert.pipeline.improve.in_pass import (
    InPass,
    all_there,
    bits_of,
    outcome,
    shrinkage,
    stored_loss,
    token_weights,
)
from nstf_convert.pipeline.improve.target import Rows, moments
from nstf_convert.pipeline.machine import each_of
from nstf_convert.pipeline.products import EXACT_BITS, exact_products, fast_products, rounded_layers
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.pipeline.propose.encoder import ALGORITHMS, Result
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import Unit, working_bytes
from nstf_convert.pipeline.session import Session
from nstf_convert.pipeline.store.workdir import content_key

# Bumped when the same mix gives other bytes.
VERSION = 2


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A group before which all batches have stood. names: its weights that are to be encoded; seconds: that its moment
    took."""

    group: Group
    names: tuple[str, ...]
    stats: Stats
    seconds: float


class _Enough(Exception):
    """Ends a pass: what comes after the last group changes nothing."""


def encode_for_originals(
    session: Session, mix: Mapping[str, Recipe], progress: Callable[[Unit], None], share: float = 1.0
) -> InPass:
    """Encodes a mix. What the scheme does not cover (`front_to_back.encode_in_prefix` says what) is encoded with the
    calibration's statistics, first. share: of the weights it covers, only the first ones; `results` then has no others."""
    batches = [] if session.calibration is None else fit_batches(session.calibration)
    groups = find_groups(session, mix, batches) if batches else []
    batches = affordable(session, groups, batches, "encode", 1)
    keys = _keys(session, mix, groups, len(batches))
    groups = first_groups(session, groups, share)
    wanted = {name: keys[name] for group in groups for name in group.weights}
    free = [(session.units[n], r) for n, r in mix.items() if n not in keys]
    found = InPass(session, session.encoder.encode_all(free, progress), keys)
    if not all_there(session, list(wanted.values())):
        workers = session.machine.workers(max(working_bytes(session.units[n]) for n in wanted))
        threads = torch.get_num_threads()
        try:
            # Sums whose order depends on the number of threads would make the bytes depend on it.
            torch.set_num_threads(1)
            _Pass(found, mix, groups, progress, workers).run(batches)
        finally:
            torch.set_num_threads(threads)
    for name, key in wanted.items():
        if name not in found.results:
            found.results[name] = Result(stored_loss(session, name, key), 0.0)
    return found


def _keys(
    session: Session, mix: Mapping[str, Recipe], groups: Sequence[Group], windows: int
) -> dict[str, str]:
    """Names in the work directory. Of a group that is encoded together all recipes decide."""
    known: dict[str, Any] = {
        "kind": "original inputs",
        "version": [__version__, ALGORITHMS, VERSION],
        "checkpoint": session.checkpoint.fingerprint(),
        "calibration": session.calibration_fingerprint(),
        "windows": windows,
        "rounded": _rounds(session, mix),
        # How work is put together decides how sums are rounded.
        "together": [session.tokens_per_batch, session.machine.scratch_bytes],
    }
    found = {}
    for group in groups:
        for name in group.weights:
            beside = group.weights if session.machine.on_gpu else (name,)
            found[name] = content_key(
                **known, group=group.key, name=name, recipes={n: mix[n].to_json() for n in beside}
            )
    return found


def _rounds(session: Session, mix: Mapping[str, Recipe]) -> bool:
    """Whether products of layers and moments may be rounded: where a mix loses far more than that."""
    return bits_of(session, mix) < EXACT_BITS


def size_of(session: Session, group: Group) -> tuple[int, int]:
    """(inputs, weights) of a group."""
    return inputs(session, group), sum(session.units[n].elements for n in group.weights)


class _Pass:
    """One run of the fit batches through the original model."""

    def __init__(
        self,
        found: InPass,
        mix: Mapping[str, Recipe],
        groups: Sequence[Group],
        progress: Callable[[Unit], None],
        workers: int,
    ) -> None:
        self.found, self.session, self.mix = found, found.session, mix
        self.groups, self.progress, self.workers = groups, progress, workers
        self.room = together.room_bytes(self.session.machine, waiting_bytes(self.session, groups))
        self.rounds = _rounds(self.session, mix)
        self.model = self.session.reference()
        self.modules = dict(self.model.module.named_modules())
        self.waiting: list[_Waiting] = []
        self.writing: list[Future[None]] = []
        self.count = 0

    def run(self, batches: Sequence[Batch]) -> None:
        """Runs the fit batches to the last group; every group is then in the work directory."""
        data, model = run_data(self.session), self.model
        merged = list(merge_batches(batches, even_tokens(batches, self.session.tokens_per_batch)))
        self.count = len(merged)

        def forward(batch: Batch) -> Callable[[], Tensor]:
            return lambda: model_output(model, data, batch)

        gates = [[self.modules[g.module]] for g in self.groups if g.module]
        rounded = rounded_layers(self.session.device, data.language) if self.rounds else exact_products()
        # Results are written while the next group is under way. The workers stay for the whole pass: torch takes
        # milliseconds to set a new thread up.
        with ThreadPoolExecutor(1) as self.writer, each_of(self.workers) as self.each:
            with rounded, suppress(_Enough):
                run_in_step(gates, [forward(b) for b in merged], self._at_gate, self.workers)
            for writing in self.writing:
                writing.result()

    def _at_gate(self, index: int, inputs: list[Any]) -> None:
        group = self.groups[index]
        missing = [n for n in group.weights if not self.session.work.has(self.found.keys[n])]
        # On a GPU those that were encoded together are so again.
        names = group.weights if missing and self.session.machine.on_gpu else tuple(missing)
        if names:
            self._take(group, names, inputs)
        for name in set(group.weights) - set(names):
            self.progress(self.session.units[name])
        if index == len(self.groups) - 1:
            self._encode_waiting()
            raise _Enough

    def _take(self, group: Group, names: tuple[str, ...], inputs: list[Any]) -> None:
        """Takes the moment of a group's input; the groups that wait are encoded before one more would be too many."""
        sizes = [size_of(self.session, g) for g in (*(w.group for w in self.waiting), group)]
        if together.taken_bytes(sizes) > self.room:
            self._encode_waiting()
        start = time.perf_counter()
        module = self.modules[group.module] if group.module else nn.Identity()
        given = [x[0] if isinstance(x, tuple) else x for x in inputs if x is not None]
        rows = [rows_of(module, x) for x in given]
        weights = token_weights(self.session, group, rows, self.count)
        with fast_products() if self.rounds else nullcontext():
            (known,) = moments([Rows(rows, weights=weights)], self.workers, self.each)
        stats = Stats(shrunk(known.hessian, shrinkage(self.session, group)))
        known_group = _Waiting(group, names, stats, time.perf_counter() - start)
        if self.room and any(recipes.across(self.mix[n]) for n in names):
            self.waiting.append(known_group)
        else:
            self._encode_all([known_group])

    def _encode_waiting(self) -> None:
        """Encodes the groups that wait."""
        waiting, self.waiting = self.waiting, []
        if waiting:
            self._encode_all(waiting)

    def _encode_all(self, waiting: Sequence[_Waiting]) -> None:
        for writing in self.writing:
            writing.result()
        self.writing.clear()
        with exact_products():
            self._encode(waiting)

    def _encode(self, waiting: Sequence[_Waiting]) -> None:
        try:
            self._encode_together(waiting)
        except torch.OutOfMemoryError:
            if len(waiting) == 1:
                raise
        else:
            return
        # Only now is what the failure held free again.
        half = len(waiting) // 2
        self._encode(waiting[:half])
        self._encode(waiting[half:])

    def _encode_together(self, waiting: Sequence[_Waiting]) -> None:
        start = time.perf_counter()
        statistics = self.session.statistics
        units = [self.session.units[n] for w in waiting for n in w.names]
        of_group = [i for i, w in enumerate(waiting) for _ in w.names]
        items = [
            (
                self.mix[u.name],
                self.session.encoder.inner(u),
                waiting[i].stats.for_rows(statistics.row_weight(u)),
                u.lead,
            )
            for u, i in zip(units, of_group, strict=True)
        ]

        def encode(at: Sequence[int]) -> None:
            # All that waits fits the memory by what a weight takes.
            room = self.room if len(waiting) > 1 else None
            done = recipes.encode_many([items[i] for i in at], self.session.machine.scratch_bytes, room)
            for i, encoded in zip(at, done, strict=True):
                self._keep(units[i], items[i][1], encoded, items[i][2])

        if self.session.machine.on_gpu:
            for part in _parts(items, of_group):
                encode(part)
        else:
            # A thread that is left over helps with the search of the others' tiles.
            inner = max(1, self.workers // len(items))

            def alone(index: int) -> None:
                with search_threads(inner):
                    encode([index])

            list(self.each(alone, range(len(items))))
        seconds = sum(w.seconds for w in waiting) + time.perf_counter() - start
        for unit in units:
            result = self.found.results[unit.name]
            self.found.results[unit.name] = Result(result.loss, seconds / len(units))
            self.progress(unit)

    def _keep(self, unit: Unit, inner: Tensor, encoded: EncodedTensor, stats: Stats) -> None:
        stored, _, lost = outcome(unit, inner, encoded, stats)
        self.found.results[unit.name] = Result(lost, 0.0)
        metadata = {"tree": node_to_json(stored.tree), "loss": lost}
        put = self.session.work.put
        self.writing.append(
            self.writer.submit(put, self.found.keys[unit.name], dict(stored.arrays), metadata)
        )


def _parts(items: Sequence[tuple[Recipe, Any, Any, int]], of_group: Sequence[int]) -> list[list[int]]:
    """Which items are encoded in one call: those that gain from it across groups, and of each group the others."""
    parts: dict[int, list[int]] = {}
    for i, (item, group) in enumerate(zip(items, of_group, strict=True)):
        parts.setdefault(-1 if recipes.across(item[0]) else group, []).append(i)
    return list(parts.values())
