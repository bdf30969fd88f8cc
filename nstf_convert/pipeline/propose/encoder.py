"""Encoded tensors and tables of estimates, made once and kept in the work directory by content address."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from nstf import __version__
from nstf.analyzers.heap import give_back
from nstf.analyzers.signatures import Signature, summary
from nstf.decomposers.remembered import FORGETFUL, Remembered
from nstf.decomposers.views import views
from nstf.kernels.formats import EncodedTensor, dense, node_from_json, node_to_json
from nstf.kernels.trellis_encode import search_threads
from nstf.proposals import Look, Room, Target
from nstf.quantizers.stats import Stats, loss
from nstf_convert.checkpoint import memory
from nstf_convert.pipeline.machine import Machine, each_of, torch_threads
from nstf_convert.pipeline.propose import candidates as cand
from nstf_convert.pipeline.propose import methods as registry
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.pipeline.propose import structure
from nstf_convert.pipeline.propose.candidates import Candidate
from nstf_convert.pipeline.propose.decoded import lost
from nstf_convert.pipeline.propose.methods import versions
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import Statistics, Unit, working_bytes
from nstf_convert.pipeline.store.workdir import Store, content_key

# Bumped when an algorithm changes what it gives for the same input: old results are then not found.
ALGORITHMS = 12

# What encoding a tensor of this size leaves behind is worth returning to the system.
LARGE_ELEMENTS = 1 << 19
# Why nothing of what a method proposed is a candidate.
LOOKED_AT = "looked at: others of no more bytes are expected to lose less"

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
        work: Store,
        source: Callable[[str], Tensor],
        statistics: Statistics,
        identity: str,
        config: dict[str, Any] | None,
        machine: Machine,
        few: bool = False,
        timed: bool = False,
        bits: float | None = None,
    ) -> None:
        """source: name -> the original tensor. identity: digest of checkpoint and calibration. few: only forms that may win
        are proposed, timed: and those that are fast (`candidates.plain_recipes`). bits: a weight of the whole file, None
        where its size is not known."""
        self._few, self._timed, self._bits = few, timed, bits
        self._machine = machine
        self._asked: dict[str, dict[str, Any]] = {}  # what was found at the bits of a first plan, by tensor
        self._work = work
        self._read: dict[str, dict[str, Any]] = {}  # what was read of the work directory's tables, by key
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
        with memory.for_gpu(device) if self._machine.on_gpu else nullcontext():
            return unit.inner(memory.to_device(self._source(unit.name), device))

    def encode(
        self,
        unit: Unit,
        recipe: Recipe,
        known: Signature | None = None,
        remembered: Remembered = FORGETFUL,
    ) -> Result:
        """Makes sure the encoded tensor is in the work directory. known: its signature, if there is one; remembered: what
        decompositions of the same found."""
        key = self._encoded_key(unit, recipe)
        found = self._work.find_metadata(key)
        if found is not None:
            return Result(found["loss"], 0.0)
        start = time.perf_counter()
        inner, stats = self.inputs(unit) if known is None else (known.weight, known.stats)
        encoded = recipes.encode(recipe, inner, stats, unit.lead, remembered)
        true = lost(inner, encoded, stats, unit.lead)
        if unit.permute is not None:
            encoded = recipes.permuted(encoded, unit.permute, unit.shape)
        self._work.put(key, dict(encoded.arrays), {"tree": node_to_json(encoded.tree), "loss": true})
        if unit.elements >= LARGE_ELEMENTS:
            give_back()
        return Result(true, time.perf_counter() - start)

    def _measured_by(self, unit: Unit, known: Signature) -> structure.Measure:
        """Makes forms of a tensor, which share what their decompositions find out."""
        remembered = recipes.remembered(known.weight, known.stats, unit.lead)
        return lambda recipe: self.encode(unit, recipe, known, remembered).loss

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
            torch.set_num_threads(1 if self._machine.core_each else threads)
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
        """Every quantised, dense and decomposed candidate of a tensor: the first two with expected losses, decompositions
        with measured ones; where time counts, also decompositions that take fewer multiplications."""
        made = self._explored(unit, allowed)["made"]
        out = [self._candidate(unit, data, v) for data, v in self._estimated(unit, allowed)["plain"]]
        out += [self._candidate(unit, data, v, exact=True) for data, v in made]
        if self._timed and not self._few:
            known = [c.recipe for c in out]
            out += [
                self._candidate(unit, r, v, exact=True)
                for r, v in self._faster(unit, allowed)["made"]
                if _recipe(r) not in known
            ]
        return out

    def _faster(self, unit: Unit, allowed: set[str]) -> dict[str, Any]:
        """Forms of a convolution that take fewer multiplications, with measured losses, and the looks that ruled others
        out."""
        if unit.role != "conv":
            return {"made": [], "looks": []}
        methods = sorted(allowed)
        key = self._key("faster", unit, methods=methods, versions=versions(methods))
        found = self._work.find_metadata(key)
        if found is None:
            factors = tuple(f for f in structure.row_forms() if f.recipe.method in allowed)
            room = replace(self._room(unit, allowed), faster=True, factors=factors)
            known = self._learnt(unit)
            wanted = registry.structured(known, Target(self._timed), room)
            measure = self._measured_by(unit, known)
            found = {
                "made": [[r.to_json(), measure(r)] for r in wanted],
                "looks": [_look(k) for k in room.looks],
            }
            self._work.put(key, {}, found)
        return found

    def expected(self, unit: Unit, wanted: Sequence[Recipe]) -> list[float]:
        """What forms of one method are expected to lose beside each other: all inputs count alike, rows as they do. Says by
        how much one loses more than another also where the Hessian was not kept."""
        inner = self.inner(unit)
        known = self.statistics.has_hessian(unit)
        rows = self.statistics.of(unit, inner).row_weight if known else self.statistics.row_weight(unit)
        return recipes.estimate_many(wanted, inner, Stats(None, rows), unit.lead)

    def looks(self, unit: Unit, allowed: set[str]) -> list[Look]:
        """Why methods were not tried: of every method that a bound ruled out the look that came closest to plain formats;
        after these the reasons of the others."""
        found = [*self._explored(unit, allowed)["looks"], *self._estimated(unit, allowed)["looks"]]
        if self._timed and not self._few:
            found += self._faster(unit, allowed)["looks"]
        # What methods answered when they were asked once more stands for what they said before.
        again = self._asked.get(unit.name, {"losses": [], "looks": []})
        answered = {data["method"] for data, _ in again["losses"]} | {k[0] for k in again["looks"]}
        looks = [Look(*k) for k in [*(k for k in found if k[0] not in answered), *again["looks"]]]
        return [k for k in looks if not k.reason] + [k for k in looks if k.reason]

    def at_few_bits(self, unit: Unit, allowed: set[str], bits: float) -> list[Candidate]:
        """What methods propose once a plan gives a tensor so many bits a weight, such as corrections and forms around that
        rate, with expected losses; nothing that was proposed before."""
        rivals = self.candidates(unit, allowed)
        methods, planned = sorted(allowed), round(4 * bits) / 4
        key = self._key(
            "few bits", unit, methods=methods, versions=versions(methods), bits=planned,
            few=self._few, timed=self._timed, bits_of_file=self._bits_of(unit),
        )  # fmt: skip
        found = self._work.find_metadata(key)
        if found is None:
            known = self._learnt(unit)
            points = [(cand.arrays_bytes(unit, c.recipe), c.loss) for c in rivals]
            signal = self._explored(unit, allowed).get("signal")
            signal = known.signal if signal is None else signal
            room = replace(
                self._room(unit, allowed), planned=planned, rival=structure.rival_of(points, signal)
            )
            there = {c.recipe for c in rivals}
            plain = cand.plain_recipes(known, allowed, self._few, self._timed, room.looks, planned)
            more = [r for r in plain if r not in there]
            losses = list(zip(more, cand.estimates(known, more), strict=True))
            wanted = [r for r in registry.structured(known, Target(self._timed), room) if r not in there]
            losses += registry.losses(
                known, wanted, cand.tools(unit, known, rivals), self._measured_by(unit, known)
            )
            # Of what a method proposes no bound ruled out all.
            proposed = {r.method for r in (*more, *wanted)}
            looks = [k for k in room.looks if k.method not in proposed]
            kept = {r.method for r, _ in losses}
            for method in sorted({r.method for r in wanted} - kept):
                looks.append(Look(method, reason=LOOKED_AT))
            found = {"losses": [[r.to_json(), v] for r, v in losses], "looks": [_look(k) for k in looks]}
            self._work.put(key, {}, found)
        self._asked[unit.name] = found
        return [self._candidate(unit, data, v) for data, v in found["losses"]]

    def beside(self, unit: Unit, allowed: set[str], chosen: Recipe) -> list[Candidate]:
        """The next ranks of a form of fewer multiplications that a plan took, with measured losses."""
        methods = allowed & {chosen.method}
        room = replace(self._room(unit, methods), faster=True, factors=structure.row_forms(), near=chosen)
        known = self._learnt(unit)
        wanted = registry.structured(known, Target(self._timed), room)
        measure = self._measured_by(unit, known)
        return [self._candidate(unit, r.to_json(), measure(r), exact=True) for r in wanted]

    def grown(self, unit: Unit, allowed: set[str], chosen: Candidate, price: float) -> list[Candidate]:
        """Other ranks of a decomposition that a plan took, made while they pay at its price of a byte (nats)."""
        known = self._learnt(unit)
        made = structure.grow(
            known, Target(self._timed), self._room(unit, allowed), (chosen.recipe, chosen.loss),
            price, self._measured_by(unit, known),
        )  # fmt: skip
        return [replace(self._candidate(unit, r.to_json(), v), exact=True) for r, v in made]

    def _candidate(self, unit: Unit, data: dict[str, Any], value: float, exact: bool = False) -> Candidate:
        recipe = _recipe(data)
        tree, size = cand.price(unit, recipe)
        return Candidate(recipe, tree, size, value, exact)

    def _learnt(self, unit: Unit) -> Signature:
        inner, stats = self.inputs(unit)
        return Signature(inner, stats, unit.lead, unit.role, unit.dtype, self._config, unit.stride)

    def _room(self, unit: Unit, allowed: set[str]) -> Room:
        return Room(
            methods=frozenset(allowed),
            bits=self._bits_of(unit),
            quick=self._few,
            size_of=lambda recipe: cand.arrays_bytes(unit, recipe),
        )

    def _bits_of(self, unit: Unit) -> float | None:
        """The bits a weight that a plan gives about. Not where time counts for more than the bytes of products: convolutions
        and stacks may then be stored in forms of fewer multiplications that lose more."""
        return None if self._timed and len(unit.inner_shape) > 2 else self._bits

    def _estimated(self, unit: Unit, allowed: set[str], learnt: Signature | None = None) -> dict[str, Any]:
        """The plain forms of a tensor with expected losses, and the loss of erasing it. learnt: its signature, if known."""
        methods = sorted(allowed)
        key = self._key(
            "plain", unit, methods=methods, versions=versions(methods), few=self._few, timed=self._timed
        )
        if (found := self._found(key)) is not None:
            return found
        known = learnt or self._learnt(unit)
        inner, stats = known.weight, known.stats
        looks: list[Look] = []
        simple = cand.plain_recipes(known, allowed, self._few, self._timed, looks)
        losses = cand.estimates(known, simple)
        rows, sampled, lead = inner, stats, unit.lead
        if self._few:
            rows, sampled = cand.sample_rows(inner, stats, unit.lead)
            lead = 1
        signal = loss(rows, torch.zeros((), device=inner.device).expand(rows.shape), sampled, lead)
        table = {
            "plain": [[r.to_json(), v] for r, v in zip(simple, losses, strict=True)],
            "signal": signal,
            "looks": [_look(k) for k in looks],
        }
        self._work.put(key, {}, table)
        self._read[key] = table
        return table

    def _found(self, key: str) -> dict[str, Any] | None:
        """What the work directory has of a tensor's forms. They are asked for several times over, and a file costs more to
        open and check than they take in memory."""
        if key not in self._read and (found := self._work.find_metadata(key)) is not None:
            self._read[key] = found
        return self._read.get(key)

    def _explored(self, unit: Unit, allowed: set[str]) -> dict[str, Any]:
        """The decompositions of a tensor with measured losses, and the looks that ruled the others out. The budget decides
        what is tried, so its bits are part of the name."""
        methods = sorted(allowed)
        key = self._key(
            "structure", unit, methods=methods, versions=versions(methods), few=self._few, timed=self._timed,
            bits=self._bits_of(unit),
        )  # fmt: skip
        if (found := self._found(key)) is not None:
            return found
        known = self._learnt(unit)
        plain = self._estimated(unit, allowed, known)["plain"]
        points = [(cand.arrays_bytes(unit, _recipe(data)), v) for data, v in plain]
        made = structure.explore(
            known, Target(self._timed), self._room(unit, allowed), points, self._measured_by(unit, known)
        )
        table = {
            "made": [[r.to_json(), v] for r, v in made.made],
            "looks": [_look(k) for k in made.looks],
            "signal": made.signal,
        }
        self._work.put(key, {}, table)
        self._read[key] = table
        return table

    def signatures(self, units: Sequence[Unit]) -> dict[str, dict[str, Any]]:
        """What was learnt about each tensor before changing it (nstf.analyzers.signatures), as JSON, by name; nothing of
        those that are kept.

        Eigenproblems of this size are a processor's: one core for each tensor, also where a GPU encodes.
        """
        units = [unit for unit in units if unit.kept is None]
        keys = {unit.name: self._key("signature", unit) for unit in units}
        workers = self._machine.workers_on_host(max(map(working_bytes, units), default=1))
        begun: deque[tuple[Unit, Future[dict[str, Any]]]] = deque()

        def end_one() -> None:
            unit, found = begun.popleft()
            self._work.put(keys[unit.name], {}, found.result())

        with torch_threads(1), ThreadPoolExecutor(workers) as pool:
            for unit in sorted(units, key=lambda u: (self.statistics.group_of(u), u.name)):
                if self._work.find_metadata(keys[unit.name]) is not None:
                    continue
                begun.append((unit, pool.submit(_summary, unit.name, *self._measured(unit))))
                while len(begun) > workers:
                    end_one()
            while begun:
                end_one()
        self.statistics.forget()
        return {unit.name: self._work.find_metadata(keys[unit.name]) or {} for unit in units}

    def _measured(self, unit: Unit) -> tuple[Tensor, Tensor | None, list[tuple[int, ...]]]:
        """(the tensor and its Hessian in host memory, the reshapes to look at) of a signature."""
        inner, hessian = self.inner(unit), None
        if unit.lead == 1 and self.statistics.has_hessian(unit):
            known = self.statistics.of(unit, inner).hessian
            hessian = None if known is None else known.cpu()
        reshapes = [v.dims for v in views(unit.role, unit.inner_shape, self._config) if len(v.dims) > 2]
        return inner.cpu(), hessian, reshapes

    def signal(self, unit: Unit, allowed: set[str]) -> float:
        """The loss of erasing the tensor: what errors are relative to."""
        return float(self._estimated(unit, allowed)["signal"])


def _summary(
    name: str, weight: Tensor, hessian: Tensor | None, reshapes: list[tuple[int, ...]]
) -> dict[str, Any]:
    return summary(name, weight, hessian, reshapes=reshapes).to_json()


def _look(look: Look) -> list[Any]:
    return [look.method, look.size_bytes, look.least, look.rival, look.reason]


def _recipe(data: dict[str, Any]) -> Recipe:
    return Recipe(data["method"], data["params"], {n: _recipe(p) for n, p in data.get("parts", {}).items()})
