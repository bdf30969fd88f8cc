"""Ways to divide a model over devices: tensor parallel, a pipeline of layers, experts, and their products.

A layout has `stages` of layers one after the other. A stage is `replicas` groups of `ranks` devices: the devices of a group
share every matrix (tensor parallel), and each replica has its share of the sequences (only for mixtures of experts, whose
experts are then dealt out over all devices of the stage). Experts are cut like other matrices (`slices`) or dealt out whole
(`whole`, expert parallel). Matrices are cut evenly, as our runtime and vLLM do; layers go to stages unevenly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from nstf_convert.place.costs import Model
from nstf_convert.place.fabric import Fabric

Experts = Literal["none", "slices", "whole"]
# Devices among which every choice is tried, and choices of one layout at most.
MOST_CHOSEN = 8
MOST_ARRANGEMENTS = 5000
# Of up to so many devices every number of stages and of ranks is tried; of more, powers of two.
MOST_NUMBERS = 16
Group = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How a model is divided, whatever the devices."""

    stages: int = 1
    ranks: int = 1
    replicas: int = 1
    experts: Experts = "none"

    @property
    def devices(self) -> int:
        return self.stages * self.ranks * self.replicas

    @property
    def name(self) -> str:
        """In words: `tensor 4 x pipeline 2`."""
        words = []
        if self.ranks > 1:
            words.append(f"tensor {self.ranks}")
        if self.experts == "whole":
            words.append(f"experts {self.ranks * self.replicas}")
        if self.stages > 1:
            words.append(f"pipeline {self.stages}")
        return " x ".join(words) or "one device"


@dataclass(frozen=True)
class Stage:
    """groups: numbers of devices, a group for each replica. first, stop: its layers."""

    groups: tuple[Group, ...]
    first: int
    stop: int

    @property
    def devices(self) -> Group:
        return tuple(i for group in self.groups for i in group)


@dataclass(frozen=True)
class Plan:
    """A layout on devices. microbatches: how many parts of the batch go through the stages one after the other."""

    layout: Layout
    stages: tuple[Stage, ...]
    microbatches: int = 1

    @property
    def devices(self) -> Group:
        return tuple(i for stage in self.stages for i in stage.devices)


def layouts(model: Model, devices: int, batch: int) -> tuple[list[Layout], dict[int, str]]:
    """(the layouts that the model allows on up to so many devices, why numbers of ranks are not among them)."""
    found, refused = [], {}
    experts = model.facts.experts
    ranks_known = [n for n in _numbers(devices, devices) if n == 1 or model.problem(n) is None]
    for n in _powers(devices):
        if n not in ranks_known:
            refused[n] = str(model.problem(n))
    for stages in _numbers(min(devices, model.facts.layers), devices):
        for ranks in ranks_known:
            if stages * ranks > devices:
                break
            if not experts:
                found.append(Layout(stages, ranks))
                continue
            if ranks == 1:
                found.append(Layout(stages))
            elif model.slices(ranks) is None:
                found.append(Layout(stages, ranks, 1, "slices"))
            for replicas in _powers(devices // (stages * ranks)):
                total = ranks * replicas
                if 1 < total <= experts and experts % total == 0 and batch >= replicas:
                    found.append(Layout(stages, ranks, replicas, "whole"))
    return found, refused


def arrangements(fabric: Fabric, layout: Layout) -> Iterator[tuple[tuple[Group, ...], ...]]:
    """Devices for the groups of every stage. Up to 8 devices all choices that differ are tried; of more, neighbours in the
    order of hosts, from each place where such a run may begin."""
    count = len(fabric.machine.devices)
    order = sorted(
        range(count), key=lambda i: (fabric.machine.devices[i].host, fabric.machine.devices[i].numa, i)
    )
    if count <= MOST_CHOSEN:
        chosen: Iterator[Sequence[int]] = itertools.islice(
            _different(fabric, layout.devices, layout.ranks * layout.replicas), MOST_ARRANGEMENTS
        )
    else:
        starts = range(0, count - layout.devices + 1, layout.devices)
        chosen = _without_alike(fabric, [order[s : s + layout.devices] for s in starts])
    for devices in chosen:
        width = layout.ranks * layout.replicas
        yield tuple(
            tuple(
                tuple(devices[s * width + r * layout.ranks + i] for i in range(layout.ranks))
                for r in range(layout.replicas)
            )
            for s in range(layout.stages)
        )


def microbatches(layout: Layout, batch: int) -> list[int]:
    """Numbers of parts that a batch of sequences is worth dividing into."""
    if layout.stages == 1:
        return [1]
    most = max(1, min(batch // layout.replicas, 4 * layout.stages))
    return sorted({*_powers(most), *(n for n in (layout.stages, 2 * layout.stages) if n <= most)})


def _different(fabric: Fabric, count: int, width: int) -> Iterator[tuple[int, ...]]:
    """Ordered choices of devices that differ by more than names: of those whose kind and ways to the chosen ones are the
    same, one is taken. Within a stage devices are in ascending order."""
    likes = [d.like for d in fabric.machine.devices]
    total = len(likes)
    ways = [[() if a == b else _way(fabric, a, b) for b in range(total)] for a in range(total)]
    colours = _colours(likes, ways)

    def go(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(chosen) == count:
            yield chosen
            return
        seen = set()
        begun = len(chosen) % width
        for i in range(total):
            if i in chosen or (begun and i < chosen[-1]):
                continue
            profile = (colours[i], tuple(ways[i][j] for j in chosen))
            # Which of two alike devices comes first matters only for the order inside the stage.
            if (profile, begun) in seen and not begun:
                continue
            seen.add((profile, begun))
            yield from go((*chosen, i))

    profiles = set()
    for chosen in go(()):
        shape = (
            tuple(colours[i] for i in chosen),
            tuple(ways[a][b] for n, a in enumerate(chosen) for b in chosen[:n]),
        )
        if shape not in profiles:
            profiles.add(shape)
            yield chosen


def _way(fabric: Fabric, source: int, target: int) -> tuple[float, ...]:
    """What a way is like: latency and the rates of its links."""
    latency, edges = fabric.route(source, target)
    return (latency, *(fabric.machine.links[number].rate for number, _ in edges))


def _colours(likes: Sequence[object], ways: Sequence[Sequence[object]]) -> list[int]:
    """Classes of devices that look alike from everywhere: kinds refined by the ways to others, until nothing changes."""
    names: dict[object, int] = {}
    found = [names.setdefault(like, len(names)) for like in likes]
    for _ in likes:
        names = {}
        further = [
            names.setdefault(
                (found[i], tuple(sorted((found[j], w) for j, w in enumerate(row) if j != i))), len(names)
            )  # type: ignore[arg-type,misc]
            for i, row in enumerate(ways)
        ]
        if len(set(further)) == len(set(found)):
            break
        found = further
    return found


def _without_alike(fabric: Fabric, runs: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
    """Runs of devices of which no two have the same kinds in the same places of their hosts."""
    seen = set()
    for run in runs:
        hosts: dict[int, int] = {}
        devices = [fabric.machine.devices[i] for i in run]
        shape = tuple((d.like, hosts.setdefault(d.host, len(hosts))) for d in devices)
        if shape not in seen:
            seen.add(shape)
            yield run


def _numbers(most: int, devices: int) -> list[int]:
    """The numbers of stages or ranks that are tried on so many devices."""
    return _powers(most) if devices > MOST_NUMBERS else list(range(1, most + 1))


def _powers(most: int) -> list[int]:
    """1, 2, 4 and so on, up to `most`."""
    return [1 << i for i in range(int(math.log2(most)) + 1)] if most >= 1 else []
