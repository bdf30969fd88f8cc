"""Seconds that a token spends on any stored tree, on one target or several."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from nstf.kernels.formats import Node
from nstf.kernels.formats.tree import Shape
from nstf_convert.speed import cache, convolutions, measure, model
from nstf_convert.speed.atoms import Atom, atoms_of
from nstf_convert.speed.convolutions import Layer
from nstf_convert.speed.targets import Target

log = logging.getLogger("nstf")

# The load of a core, beside one program's own, from which other programs are said to be at work.
BUSY = 1.5
# One tensor: its tree, its shape, and how many leading axes make the rows.
Stored = tuple[Node, Shape, int]


class Kept(Protocol):
    """Where a conversion's own results are kept by key: `nstf_convert.pipeline.store`."""

    def find_metadata(self, key: str) -> dict[str, Any] | None:
        """What was put under a key, or None."""

    def put(self, key: str, tensors: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Keeps a result."""


class Prices:
    """What products cost on some targets: measured where one is here, by the model of its architecture elsewhere."""

    def __init__(
        self, targets: Sequence[Target], threads: int, size_bytes: int, own: Kept | None = None
    ) -> None:
        """threads: of the CPU; size_bytes: of the whole file, which decides what caches hold. own: the conversion's work
        directory. What it was planned with stays there, so that one that is resumed has the same prices and makes the same
        plan, whatever the user's cache has become."""
        self.targets = tuple(targets)
        self.threads, self.size_bytes, self._own = threads, size_bytes, own
        self._settled: set[tuple[str, str]] = set()
        self._caches = {
            t.isa: cache.SpeedCache(cache.identity(t.isa, threads), cache.folder())
            for t in targets
            if t.is_cpu and t.here
        }
        self._known: dict[tuple[str, int, Atom], float] = {}
        self.warned = False

    def seconds(self, stored: Stored, batch: int = 1) -> tuple[float, ...]:
        """The time of a product with one tensor on each target. batch: rows of activations (more than one only where the
        target is here)."""
        return tuple(self._of(t, stored, batch) for t in self.targets)

    def prepare(self, many: Iterable[Stored], batch: int = 1) -> None:
        """Measures what these will need, all of it in turn."""
        atoms = [atom for stored in many for atom, _ in atoms_of(*stored)]
        for target in self.targets:
            self._learn(target, atoms, batch)

    def convolution(self, layer: Layer, tree: Node) -> tuple[float, ...]:
        """The time of a convolution of one image on each target."""
        return tuple(self._convolution(t, layer, tree) for t in self.targets)

    def prepare_convolutions(self, many: Iterable[tuple[Layer, Node]]) -> None:
        """Measures what these will need, the formats of a layer in turn."""
        trees: dict[Layer, list[Node]] = {}
        for layer, tree in many:
            trees.setdefault(layer, []).append(tree)
        for target in self.targets:
            if target.is_cpu and target.here:
                for layer, own in trees.items():
                    self._measure_convolutions(target, layer, own)

    def whole(self, target: Target, key: str, measured: Callable[[], float]) -> float:
        """Seconds of something larger than a product on a target that is here, kept as prices are. key: what it is."""
        self._settle(target, [key], lambda missing: {key: measured()})
        return self._caches[target.isa].seconds[key]

    def _convolution(self, target: Target, layer: Layer, tree: Node) -> float:
        if not (target.is_cpu and target.here):
            return convolutions.modelled(layer, tree, self._of(target, (tree, layer.shape, 1), 1))
        self._measure_convolutions(target, layer, [tree])
        return self._caches[target.isa].seconds[convolutions.pool_key(layer, tree, self.size_bytes)]

    def _measure_convolutions(self, target: Target, layer: Layer, trees: Sequence[Node]) -> None:
        keys = {convolutions.pool_key(layer, tree, self.size_bytes): tree for tree in trees}

        def measured(missing: Sequence[str]) -> Mapping[str, float]:
            own = [keys[key] for key in missing]
            found = convolutions.measure(layer, own, target.isa, self.threads, self.size_bytes)
            return dict(zip(missing, found, strict=True))

        self._settle(target, list(keys), measured)

    def _of(self, target: Target, stored: Stored, batch: int) -> float:
        parts = list(atoms_of(*stored))
        self._learn(target, [atom for atom, _ in parts], batch)
        return sum(self._known[target.name, batch, atom] * times for atom, times in parts)

    def _learn(self, target: Target, atoms: Iterable[Atom], batch: int) -> None:
        new = [a for a in dict.fromkeys(atoms) if (target.name, batch, a) not in self._known]
        if not new:
            return
        if not (target.is_cpu and target.here):
            found = {a: model.seconds(target, a) for a in new}
        else:
            found = self._measured(target, new, batch)
        self._known |= {(target.name, batch, a): value for a, value in found.items()}

    def _measured(self, target: Target, atoms: Sequence[Atom], batch: int) -> dict[Atom, float]:
        pool = measure.pool_bytes(self.size_bytes)
        samples = {a: a.sample for a in atoms}
        keys = {s: f"{pool} {batch} {s.key}" for s in samples.values()}

        def measured(missing: Sequence[str]) -> Mapping[str, float]:
            wanted = [s for s, key in keys.items() if key in missing]
            found = measure.measure(wanted, target.isa, self.threads, self.size_bytes, batch)
            return {keys[s]: value for s, value in found.items()}

        self._settle(target, list(keys.values()), measured)
        seconds = self._caches[target.isa].seconds
        return {a: seconds[keys[s]] * a.rows / s.rows for a, s in samples.items()}

    def _settle(
        self, target: Target, keys: Sequence[str], measured: Callable[[Sequence[str]], Mapping[str, float]]
    ) -> None:
        """Brings prices into `self._caches`: those of this conversion's earlier run, else the user's, else `measured`."""
        kept = self._caches[target.isa]
        keys = [key for key in dict.fromkeys(keys) if (target.isa, key) not in self._settled]
        if not keys:
            return
        name = cache.digest({**cache.identity(target.isa, self.threads), "wanted": sorted(keys)})
        earlier = None if self._own is None else self._own.find_metadata(name)
        if earlier is not None:
            kept.seconds |= earlier["seconds"]
        elif missing := [key for key in keys if key not in kept.seconds]:
            _warn_where_busy(self)
            kept.add(measured(missing))
        if earlier is None and self._own is not None:
            self._own.put(name, {}, {"seconds": {key: kept.seconds[key] for key in keys}})
        self._settled |= {(target.isa, key) for key in keys}


def _warn_where_busy(prices: Prices) -> None:
    """Says once that other programs are at work, which slow some formats more than others: the prices stay for later."""
    if prices.warned or not hasattr(os, "getloadavg"):
        return
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY * cores + 1:
        prices.warned = True
        log.warning(
            "kernels are timed on a busy machine (a load of %.1f on %d cores): formats may be misjudged; on an idle one "
            "remove %s, and the work directory if it was kept, and convert again",
            load, cores, cache.folder() or "the cache",
        )  # fmt: skip
