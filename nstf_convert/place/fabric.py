"""What transfers and collectives take on a machine's graph.

A set of transfers that run at the same time takes the longest latency among their routes and, for each byte, what the most
loaded link takes: links that several transfers share are slower for each, as on a PCIe tree. From that follow the
collectives over n ranks with S bytes (Thakur, Rabenseifner, Gropp 2005; Patarasuk, Yuan 2009; NCCL's double binary tree:
Sanders, Speck, Traff 2009):

    ring           2 (n - 1) steps of S / n to the neighbour
    tree           2 ceil(log2 n) steps of latency; two trees carry half of S each, up and down
    direct         all to all at once: S in one step, or S / n in two, whichever is less
    hierarchical   reduce-scatter within a host, all-reduce of the parts between hosts, all-gather within

On links of one latency L and bandwidth B, a ring takes 2 (n - 1) (L + S / (n B)).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nstf.errors import UsageError
from nstf_convert.place.machine import Link, Machine

# Bytes for which routes are chosen: where a short route is narrow, large messages take the wide one.
_TYPICAL_BYTES = 1 << 18
# Beyond so many ranks nobody sends to all at once: rings, trees and hierarchies are what libraries use.
_MOST_DIRECT = 64
Flow = tuple[int, int]
# Directed use of a link: its number, and which way (one way for links that both directions share).
_Edge = tuple[int, int]


@dataclass(frozen=True)
class Line:
    """seconds = latency_s + per_byte_s * bytes."""

    latency_s: float
    per_byte_s: float

    def at(self, size_bytes: float) -> float:
        return self.latency_s + self.per_byte_s * size_bytes

    def __add__(self, other: Line) -> Line:
        return Line(self.latency_s + other.latency_s, self.per_byte_s + other.per_byte_s)

    def times(self, count: float, share: float = 1.0) -> Line:
        """So many in a row, each with this share of the bytes."""
        return Line(count * self.latency_s, count * share * self.per_byte_s)


NOTHING = Line(0.0, 0.0)


class Fabric:
    """A machine's links. Groups are numbers of devices, in the order of the ranks."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._number = {d.name: i for i, d in enumerate(machine.devices)}
        self._near: dict[str, list[tuple[str, int, int]]] = {d.name: [] for d in machine.devices}
        for i, link in enumerate(machine.links):
            back = 0 if link.duplex == "half" else 1
            self._near.setdefault(link.a, []).append((link.b, i, 0))
            self._near.setdefault(link.b, []).append((link.a, i, back))
        self._routes: dict[int, dict[int, tuple[float, tuple[_Edge, ...]]]] = {}
        self._lines: dict[tuple[str, tuple[int, ...]], tuple[Line, ...]] = {}

    def route(self, source: int, target: int) -> tuple[float, tuple[_Edge, ...]]:
        """(latency in seconds, links) of the way between two devices. Raises UsageError where there is none."""
        if source not in self._routes:
            self._routes[source] = self._reach(source)
        try:
            return self._routes[source][target]
        except KeyError:
            names = [self.machine.devices[i].name for i in (source, target)]
            raise UsageError(
                f"{self.machine.name}: no links lead from {names[0]!r} to {names[1]!r}"
            ) from None

    def together(self, flows: Iterable[Flow]) -> Line:
        """Transfers of as many bytes each, all at the same time."""
        load: dict[_Edge, int] = {}
        latency = 0.0
        for source, target in flows:
            found, edges = self.route(source, target)
            latency = max(latency, found)
            for edge in edges:
                load[edge] = load.get(edge, 0) + 1
        worst = max((count / self._link(edge).rate for edge, count in load.items()), default=0.0)
        return Line(latency, worst)

    def transfer(self, source: int, target: int, size_bytes: float) -> float:
        """Seconds to send so many bytes from a device to another."""
        return 0.0 if source == target else self.together([(source, target)]).at(size_bytes)

    def handed_on(self, one: Sequence[int], other: Sequence[int], size_bytes: float) -> float:
        """Seconds until the ranks of the next stage have what those of a stage hold: rank by rank, at the same time."""
        count = max(len(one), len(other))
        flows = [(one[i % len(one)], other[i % len(other)]) for i in range(count)]
        # Messages that were measured started in the same way.
        start = 0.0 if self.machine.collectives.measured else self.machine.collectives.start_s
        return start + self.together(f for f in flows if f[0] != f[1]).at(size_bytes)

    def all_reduce(self, group: Sequence[int], size_bytes: float, algorithm: str | None = None) -> float:
        """Seconds of an all-reduce; by the machine's fastest algorithm unless one is named."""
        ranks = len(group)
        if ranks < 2:
            return 0.0
        curve = self.machine.collectives.measured.get(ranks)
        if curve is not None and algorithm is None:
            return interpolated(curve, size_bytes)
        return self.machine.collectives.start_s + min(
            line.at(size_bytes) for line in self._all("all_reduce", tuple(group), algorithm)
        )

    def best_algorithm(self, group: Sequence[int], size_bytes: float) -> str:
        """The algorithm that `all_reduce` takes."""
        known = [a for a in self.machine.collectives.algorithms if self._all("all_reduce", tuple(group), a)]
        return min(known, key=lambda a: self.all_reduce(group, size_bytes, a))

    def all_gather(self, group: Sequence[int], size_bytes: float) -> float:
        """Seconds until each rank has the `size_bytes` of which every rank held an equal part."""
        if len(group) < 2:
            return 0.0
        start = self.machine.collectives.start_s
        return start + min(line.at(size_bytes) for line in self._all("all_gather", tuple(group), None))

    def all_to_all(self, group: Sequence[int], size_bytes: float) -> float:
        """Seconds until each rank has sent `size_bytes`, an equal part of them to each other rank and itself."""
        ranks = len(group)
        if ranks < 2:
            return 0.0
        key = "all_to_all", tuple(group)
        if key not in self._lines:
            flows = self.together((a, b) for a in group for b in group if a != b)
            self._lines[key] = (flows.times(1, 1 / ranks),)
        return self.machine.collectives.start_s + self._lines[key][0].at(size_bytes)

    def _all(self, what: str, group: tuple[int, ...], algorithm: str | None) -> tuple[Line, ...]:
        """The lines of a collective's algorithms. An all-gather is half an all-reduce."""
        named = self.machine.collectives.algorithms if algorithm is None else (algorithm,)
        found: list[Line] = []
        for name in named:
            key = f"{what} {name}", group
            if key not in self._lines:
                self._lines[key] = tuple(self._line(name, group, 2 if what == "all_reduce" else 1))
            found += self._lines[key]
        # One host, and more ranks than reach one another directly: a ring is always there.
        return tuple(found) or (self._ring(group, 2 if what == "all_reduce" else 1),)

    def _line(self, algorithm: str, group: tuple[int, ...], passes: int) -> Iterable[Line]:
        """passes: 2 for reduce-scatter and all-gather, 1 for one of them."""
        if algorithm == "ring":
            yield self._ring(group, passes)
        elif algorithm == "tree":
            yield self._tree(group, passes)
        elif algorithm == "direct" and len(group) <= _MOST_DIRECT:
            every = self.together((a, b) for a in group for b in group if a != b)
            yield every.times(passes, 1 / len(group))
            if passes == 2:
                yield every
        elif algorithm == "hierarchical":
            yield from self._hierarchical(group, passes)

    def _ring(self, group: tuple[int, ...], passes: int) -> Line:
        ranks = len(group)
        step = self.together((group[i], group[(i + 1) % ranks]) for i in range(ranks))
        return step.times(passes * (ranks - 1), 1 / ranks)

    def _tree(self, group: tuple[int, ...], passes: int) -> Line:
        """Two binary trees, the second from the other end: who has children in one has few or none in the other."""
        ranks = len(group)
        pairs = [(i, (i - 1) // 2) for i in range(1, ranks)]
        flows = [(group[a], group[b]) for a, b in pairs]
        flows += [(group[-1 - a], group[-1 - b]) for a, b in pairs]
        one = self.together(flows)
        return Line(passes * math.ceil(math.log2(ranks)) * one.latency_s, passes * one.per_byte_s / 2)

    def _hierarchical(self, group: tuple[int, ...], passes: int) -> Iterable[Line]:
        hosts: dict[int, list[int]] = {}
        for i in group:
            hosts.setdefault(self.machine.devices[i].host, []).append(i)
        sizes = {len(members) for members in hosts.values()}
        if len(hosts) < 2 or len(sizes) != 1 or sizes == {1}:
            return
        each = sizes.pop()
        inner = self._slowest(
            [[self._ring(tuple(m), passes), *self._line("direct", tuple(m), passes)] for m in hosts.values()],
            1.0,
        )
        # All ranks of a host talk to theirs on the other hosts at the same time, each about its part.
        columns = [tuple(members[i] for members in hosts.values()) for i in range(each)]
        count = len(hosts)
        step = self.together((c[i], c[(i + 1) % count]) for c in columns for i in range(count))
        outer = [step.times(passes * (count - 1), 1 / (count * each))]
        pairs = [(i, (i - 1) // 2) for i in range(1, count)]
        tree = [(c[a], c[b]) for c in columns for a, b in pairs]
        tree += [(c[-1 - a], c[-1 - b]) for c in columns for a, b in pairs]
        one = self.together(tree)
        outer.append(
            Line(passes * math.ceil(math.log2(count)) * one.latency_s, passes * one.per_byte_s / 2 / each)
        )
        for within in inner:
            for between in outer:
                yield within + between

    @staticmethod
    def _slowest(hosts: Sequence[Sequence[Line]], share: float) -> list[Line]:
        """By algorithm, the slowest host."""
        return [
            Line(max(line.latency_s for line in lines), share * max(line.per_byte_s for line in lines))
            for lines in zip(*hosts, strict=True)
        ]

    def _link(self, edge: _Edge) -> Link:
        return self.machine.links[edge[0]]

    def _reach(self, source: int) -> dict[int, tuple[float, tuple[_Edge, ...]]]:
        """The fastest way to every device for a message of typical size. Other devices pass nothing on where a switch
        does."""
        first = self.machine.devices[source].name
        best: dict[str, float] = {first: 0.0}
        ways: dict[str, tuple[float, tuple[_Edge, ...]]] = {first: (0.0, ())}
        todo = [(0.0, first)]
        while todo:
            cost, at = heapq.heappop(todo)
            if cost > best[at]:
                continue
            latency, edges = ways[at]
            for name, number, way in self._near[at]:
                link = self.machine.links[number]
                # What a device hands on it has to read and write again.
                through = 2.0 if at != first and at in self._number else 1.0
                further = cost + through * (link.latency_s + _TYPICAL_BYTES / link.rate)
                if further < best.get(name, math.inf):
                    best[name], ways[name] = (
                        further,
                        (latency + through * link.latency_s, (*edges, (number, way))),
                    )
                    heapq.heappush(todo, (further, name))
        return {self._number[name]: way for name, way in ways.items() if name in self._number}


def interpolated(curve: Sequence[tuple[float, float]], size_bytes: float) -> float:
    """Seconds at a number of bytes between measured points; beyond the last as many bytes a second as between the last
    two, below the first as long as the first."""
    if size_bytes <= curve[0][0]:
        return curve[0][1]
    for (low, a), (high, b) in pairwise(curve):
        if size_bytes <= high or (high, b) == curve[-1]:
            return a + (b - a) * (size_bytes - low) / (high - low)
    return curve[-1][1]
