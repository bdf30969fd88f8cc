"""Encoded tensors and tables of estimates, made once and kept in the work directory by content address."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from nstf import __version__
from nstf.analyzers.heap import give_back
from nstf.analyzers.signatures import signature
from nstf.kernels.formats import EncodedTensor, dense, node_from_json, node_to_json
from nstf.kernels.trellis_encode import search_threads
from nstf.quantizers.stats import Stats, loss
from nstf_convert.checkpoint import memory
from nstf_convert.pipeline.machine import Machine, each_of
from nstf_convert.pipeline.propose import candidates as cand
from nstf_convert.pipeline.propose import chains, hybrids
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.pipeline.propose.candidates import Candidate
from nstf_convert.pipeline.propose.decoded import lost
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import LARGE_TABLE, Statistics, Unit
from nstf_convert.pipeline.store.workdir import WorkDir, content_key

# Bumped when an algorithm changes what it gives for the same input: old results are then not found.
ALGORITHMS = 6

# What encoding a tensor of this size leaves behind is worth returning to the system.
LARGE_ELEMENTS = 1 << 19
# What a weight of a large table takes beyond the rows that are worked on: 4 bytes as it is, up to 2 encoded, twice.
LARGE_BYTES = 8

T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """A tensor that was really encoded: its true loss (in `Stats` terms) and the seconds it took (0 when found)."""

    loss: float
    seconds: float


class Encoder:
    """Encodes tensors of one model under one calibration, through the work directory."""

    def __init__(
        self,
        work: WorkDir,
        source: Callable[[str], Tensor],
        statistics: Statistics,
        identity: str,
        config: dict[str, Any] | None,
        machine: Machine,
        few: bool = False,
        timed: bool = False,
    ) -> None:
        """source: name -> the original tensor. identity: digest of checkpoint and calibration. few: only forms that may win
        are proposed, timed: and those that are fast (`simple_recipes`)."""
        self._few, self._timed = few, timed
        self._machine = machine
        self._work = work
        self._source = source
        self.statistics = statistics
        self._identity = identity
        self._config = config

    def _key(self, kind: str, unit: Unit, **parts: Any) -> str:
        return content_key(
            kind=kind,
            version=[__version__, ALGORITHMS],
            identity=self._identity,
            unit=[unit.name, unit.lead, list(unit.permute or ())],
            **parts,
        )

    def _encoded_key(self, unit: Unit, recipe: Recipe) -> str:
        return self._key("encoded", unit, recipe=recipe.to_json())

    def inputs(self, unit: Unit) -> tuple[Tensor, Stats]:
        """(the tensor to encode, its statistics)."""
        inner = self.inner(unit)
        return inner, self.statistics.of(unit, inner)

    def inner(self, unit: Unit) -> Tensor:
        """The tensor to encode (`Unit.inner`), on the device that computes."""
        device = self._machine.device
        with memory.for_gpu() if self._machine.on_gpu else nullcontext():
            return unit.inner(memory.to_device(self._source(unit.name), device))

    def encode(self, unit: Unit, recipe: Recipe) -> Result:
        """Makes sure the encoded tensor is in the work directory."""
        key = self._encoded_key(unit, recipe)
        found = self._work.find_metadata(key)
        if found is not None:
            return Result(found["loss"], 0.0)
        start = time.perf_counter()
        inner, stats = self.inputs(unit)
        encoded = recipes.encode(recipe, inner, stats, unit.lead)
        true = lost(inner, encoded, stats, unit.lead)
        if unit.permute is not None:
            encoded = recipes.permuted(encoded, unit.permute, unit.shape)
        self._work.put(key, dict(encoded.arrays), {"tree": node_to_json(encoded.tree), "loss": true})
        if unit.elements >= LARGE_ELEMENTS:
            give_back()
        return Result(true, time.perf_counter() - start)

    def encode_all(
        self, chosen: Sequence[tuple[Unit, Recipe]], progress: Callable[[Unit], None]
    ) -> dict[str, Result]:
        """Encodes many, those that share a Hessian in turn. Results by name."""
        recipes_of = {unit.name: recipe for unit, recipe in chosen}
        return self.each([u for u, _ in chosen], lambda u: self.encode(u, recipes_of[u.name]), progress)

    def each(
        self, units: Sequence[Unit], work: Callable[[Unit], T], progress: Callable[[Unit], None]
    ) -> dict[str, T]:
        """Does `work` for every unit, on all cores: one thread a Hessian, one core a thread. Results by name.

        Tensors are independent, and small matrices gain little from torch's own threads; results do not depend
        on how many workers there are. Threads that are left over help with searches.
        """
        groups: dict[str, list[Unit]] = {}
        for unit in sorted(units, key=lambda u: u.name):
            groups.setdefault(self.statistics.group_of(unit), []).append(unit)

        def run(members: list[Unit]) -> list[tuple[str, T]]:
            out = []
            for unit in members:
                with search_threads(inner):
                    out.append((unit.name, work(unit)))
                progress(unit)
            self.statistics.forget()
            return out

        threads = torch.get_num_threads()
        workers = self._machine.workers(max((working_bytes(u) for u in units if u.kept is None), default=1))
        inner = max(1, workers // max(1, len(groups)))
        # The largest first, so that no core is left with the embedding table at the end.
        order = sorted(groups.values(), key=lambda g: -sum(u.elements for u in g))
        try:
            torch.set_num_threads(1 if workers > 1 else threads)
            with each_of(workers) as each:
                done = [pair for part in each(run, order) for pair in part]
        finally:
            torch.set_num_threads(threads)
        return dict(sorted(done))

    def load(self, unit: Unit, recipe: Recipe) -> EncodedTensor:
        """The encoded tensor; encodes it first when the work directory does not have it."""
        key = self._encoded_key(unit, recipe)
        self.encode(unit, recipe)
        found = self._work.find(key)
        if found is None:  # it was there, and damaged
            self.encode(unit, recipe)
            found = self._work.find(key)
        if found is None:
            raise RuntimeError(f"{unit.name}: the work directory lost a result while it was in use")
        arrays, metadata = found
        return EncodedTensor(node_from_json(metadata["tree"]), unit.shape, arrays)

    def kept(self, unit: Unit) -> EncodedTensor:
        """The tensor as it is in the checkpoint."""
        value = self._source(unit.name).to(dense.torch_dtype(unit.dtype))
        return recipes.encode(
            Recipe("dense", {"dtype": unit.dtype}), value, Stats(), max(1, len(unit.shape) - 1)
        )

    def candidates(self, unit: Unit, allowed: set[str]) -> list[Candidate]:
        """Every quantised, dense and decomposed candidate of a tensor, with expected losses."""
        simple = cand.simple_recipes(unit, allowed, self._few, self._timed)
        table = self._estimated(unit, simple, self._tries_low_rank(allowed))
        out = [self._candidate(unit, r, v) for r, v in zip(simple, table["losses"], strict=True)]
        if "trellis" in allowed:
            out += [self._candidate(unit, _recipe(data), value) for data, value in table["trellis"]]
        for data, value in table["low_rank"]:
            out.append(self._candidate(unit, _recipe(data), value))
        structured = allowed & {"cp", "tucker", "tensor_train"}
        if structured and unit.role in ("conv", "expert_stack"):
            for r, value in self._structured(unit, structured, allowed, out, float(table["signal"])):
                out.append(self._candidate(unit, r, value, exact=True))
        if self._timed:
            known = [c.recipe for c in out]
            for r in chains.recipes(unit, allowed):
                if r not in known:
                    out.append(self._candidate(unit, r, self.encode(unit, r).loss, exact=True))
        return out

    def hybrids(self, unit: Unit, allowed: set[str]) -> list[Candidate]:
        """Low-bit bases with low-rank corrections, expected losses with the corrections really made."""
        from nstf.decomposers import svd

        largest = min(_matrix(unit)) // 4
        wanted = [r for r in hybrids.all_recipes(allowed) if r.parts["correction"].params["rank"] <= largest]
        if not wanted:
            return []
        rivals = self.candidates(unit, allowed - {"add"})
        key = self._key("hybrids", unit, recipes=[r.to_json() for r in wanted], allowed=sorted(allowed))
        found = self._work.find_metadata(key)
        if found is None:
            inner, stats = self.inputs(unit)
            possible = hybrids.that_may_win(unit, wanted, inner, stats, rivals)
            losses = []
            if possible:
                prepared = svd.prepare(inner, stats.hessian, stats.row_weight, unit.lead)
                losses = hybrids.losses(unit, possible, inner, stats, prepared, rivals)
            found = {"losses": [[r.to_json(), v] for r, v in losses]}
            self._work.put(key, {}, found)
        return [self._candidate(unit, _recipe(data), v) for data, v in found["losses"]]

    def _candidate(self, unit: Unit, recipe: Recipe, value: float, exact: bool = False) -> Candidate:
        tree, size = cand.price(unit, recipe)
        return Candidate(recipe, tree, size, value, exact)

    def _estimated(self, unit: Unit, simple: Sequence[Recipe], low_rank: bool) -> dict[str, Any]:
        key = self._key(
            "estimates", unit, recipes=[r.to_json() for r in simple], low_rank=low_rank, few=self._few
        )
        found = self._work.find_metadata(key)
        if found is not None:
            return found
        inner, stats = self.inputs(unit)
        losses = cand.estimates(unit, inner, stats, simple)
        paths = cand.trellis_recipes(unit, inner, stats)
        rows, sampled, lead = inner, stats, unit.lead
        if self._few:
            rows, sampled = cand.sample_rows(unit, inner, stats)
            lead = 1
        signal = loss(rows, torch.zeros((), device=inner.device).expand(rows.shape), sampled, lead)
        rivals = [*zip(simple, losses, strict=True), *paths]
        wanted = cand.low_rank_that_may_win(unit, inner, stats, rivals) if low_rank else []
        factors: list[tuple[Recipe, float]] = []
        if wanted:
            factors = cand.low_rank_recipes(wanted, cand.low_rank_losses(unit, inner, stats))
        table = {
            "losses": losses,
            "low_rank": [[r.to_json(), v] for r, v in factors],
            "trellis": [[r.to_json(), v] for r, v in paths],
            "signal": signal,
        }
        self._work.put(key, {}, table)
        return table

    def signature(self, unit: Unit) -> dict[str, Any]:
        """What was learnt about the tensor before changing it (nstf.analyzers.signatures), as JSON."""
        if unit.kept is not None:
            return {}
        key = self._key("signature", unit)
        found = self._work.find_metadata(key)
        if found is None:
            inner, hessian = self.inner(unit), None
            if unit.lead == 1 and self.statistics.has_hessian(unit):
                known = self.statistics.of(unit, inner).hessian
                hessian = None if known is None else known.cpu()
            inner = inner.cpu()
            found = signature(unit.name, inner, hessian, self._config).to_json()
            self._work.put(key, {}, found)
        return found

    def signal(self, unit: Unit, allowed: set[str]) -> float:
        """The loss of erasing the tensor: what errors are relative to."""
        simple = cand.simple_recipes(unit, allowed, self._few, self._timed)
        return float(self._estimated(unit, simple, self._tries_low_rank(allowed))["signal"])

    def _tries_low_rank(self, allowed: set[str]) -> bool:
        """Whether matrices of low rank are proposed; no trained language model was seen to have any that trellis codes do
        not beat."""
        return "svd" in allowed and not (self._few and "trellis" in allowed)

    def _structured(
        self, unit: Unit, methods: set[str], allowed: set[str], rivals: Sequence[Candidate], signal: float
    ) -> Iterable[tuple[Recipe, float]]:
        # The rivals follow from what is allowed.
        key = self._key("structured", unit, methods=sorted(methods), allowed=sorted(allowed))
        found = self._work.find_metadata(key)
        if found is None:
            inner, stats = self.inputs(unit)
            wanted = cand.structured_recipes(unit, inner, stats, self._config, rivals, signal)
            found = {"recipes": [r.to_json() for r in wanted if r.method in methods]}
            self._work.put(key, {}, found)
        for recipe in map(_recipe, found["recipes"]):
            yield recipe, self.encode(unit, recipe).loss


def working_bytes(unit: Unit) -> int:
    """What encoding a tensor takes at most: it a few times over in float32, its Hessian in float64 with copies.

    Of a large table this is some rows at a time; the whole is there as the checkpoint gives it, and encoded, twice over
    while its parts are joined.
    """
    some = LARGE_TABLE if unit.large_table else unit.elements
    return 4 * 6 * some + LARGE_BYTES * (unit.elements - some) + 8 * 6 * _matrix(unit)[1] ** 2


def _matrix(unit: Unit) -> tuple[int, int]:
    rows = 1
    for size in unit.inner_shape[: unit.lead]:
        rows *= size
    return rows, unit.elements // rows


def _recipe(data: dict[str, Any]) -> Recipe:
    return Recipe(data["method"], data["params"], {n: _recipe(p) for n, p in data.get("parts", {}).items()})
