"""Layers to the stages of a pipeline: the division with the least time of a step, within memory, exactly.

A step with m microbatches takes max(sum of the stages' times, m * the slowest stage): one microbatch runs through all
stages, or the slowest stage is never idle. Both depend on the division where devices are unlike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate

Numbers = Sequence[float]
# How near to the least the slowest stage is brought.
_PRECISION = 1e-9


def step_seconds(stages: Numbers, between: Numbers, microbatches: int) -> float:
    """stages: seconds of each with one microbatch; between: of handing it on to the next, after each stage but the last."""
    one = [s + (between[i] if i < len(between) else 0.0) for i, s in enumerate(stages)]
    return max(sum(one), microbatches * max(one))


def split(
    times: Sequence[Numbers], fixed: Numbers, sizes: Sequence[Numbers], rooms: Numbers, microbatches: int
) -> tuple[int, ...] | None:
    """The stops of all stages, or None where no division fits.

    times[s][l], sizes[s][l]: seconds and bytes of layer l on stage s. fixed[s]: seconds of the stage beside its layers
    (table, head, handing on); rooms[s]: bytes for layers. Every stage has a layer at least.
    """
    count, layers = len(times), len(times[0])
    if count > layers:
        return None
    spent = [[0.0, *accumulate(row)] for row in times]
    held = [[0.0, *accumulate(row)] for row in sizes]
    if all(row == times[0] for row in times):
        if min(times[0]) == max(times[0]) and all(min(row) == max(row) for row in sizes):
            return _counted(times[0][0], fixed, [row[0] for row in sizes], rooms, layers)
        return _alike(spent, fixed, held, rooms, layers)
    return _unlike(spent, fixed, held, rooms, layers, microbatches)


def _counted(
    seconds: float, fixed: Numbers, sizes: Numbers, rooms: Numbers, layers: int
) -> tuple[int, ...] | None:
    """The same where layers are all alike, too: each goes to the stage that is done first with it."""
    most = [int(room // size) if room >= 0 else -1 for room, size in zip(rooms, sizes, strict=True)]
    if min(most) < 1 or sum(most) < layers:
        return None
    counts = [1] * len(fixed)
    waiting = [(2 * seconds + own, s) for s, own in enumerate(fixed) if most[s] > 1]
    heapify(waiting)
    for _ in range(layers - len(fixed)):
        _, s = heappop(waiting)
        counts[s] += 1
        if counts[s] < most[s]:
            heappush(waiting, ((counts[s] + 1) * seconds + fixed[s], s))
    return tuple(accumulate(counts))


def _alike(
    spent: Sequence[Numbers], fixed: Numbers, held: Sequence[Numbers], rooms: Numbers, layers: int
) -> tuple[int, ...] | None:
    """Of devices of one kind the sum is the same for every division, so the slowest stage decides: the least bound under
    which stages that take all they can hold all layers."""
    low, high = (spent[0][layers] + sum(fixed)) / len(spent), spent[0][layers] + max(fixed)
    best = _filled(spent, fixed, held, rooms, layers, high)
    if best is None or len(spent) == 1:
        return best
    even = _filled(spent, fixed, held, rooms, layers, low)
    if even is not None:
        return even
    for _ in range(60):
        middle = (low + high) / 2
        found = _filled(spent, fixed, held, rooms, layers, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
        if high - low <= _PRECISION * high:
            break
    return best


def _filled(
    spent: Sequence[Numbers],
    fixed: Numbers,
    held: Sequence[Numbers],
    rooms: Numbers,
    layers: int,
    bound: float,
) -> tuple[int, ...] | None:
    """Stops under which no stage takes longer than the bound or holds more than its memory, or None.

    From stage to stage, where the layers done may end; for each such place, where the stage before began.
    """
    begun: list[dict[int, int]] = []
    places = [0]
    for s in range(len(spent)):
        most, found = layers - (len(spent) - 1 - s), {}
        reached = 0
        for at in places:
            by_time = bisect_right(spent[s], spent[s][at] + max(0.0, bound * (1 + 1e-12) - fixed[s])) - 1
            by_size = bisect_right(held[s], held[s][at] + rooms[s]) - 1
            for stop in range(max(at, reached) + 1, min(most, by_time, by_size) + 1):
                found[stop] = at
                reached = stop
        if not found:
            return None
        begun.append(found)
        places = sorted(found)
    if layers not in begun[-1]:
        return None
    stops = [layers]
    for found in reversed(begun[1:]):
        stops.append(found[stops[-1]])
    return tuple(reversed(stops))


def _unlike(
    spent: Sequence[Numbers],
    fixed: Numbers,
    held: Sequence[Numbers],
    rooms: Numbers,
    layers: int,
    microbatches: int,
) -> tuple[int, ...] | None:
    """By stage and layers done, the pairs (sum, slowest) that no other pair beats in both: the best is among the last."""
    fronts: dict[int, list[tuple[float, float, tuple[int, ...]]]] = {0: [(0.0, 0.0, ())]}
    for s in range(len(spent)):
        further: dict[int, list[tuple[float, float, tuple[int, ...]]]] = {}
        for at, front in fronts.items():
            for stop in range(at + 1, layers - (len(spent) - 1 - s) + 1):
                if held[s][stop] - held[s][at] > rooms[s]:
                    break
                if s == len(spent) - 1 and stop < layers:
                    continue
                own = spent[s][stop] - spent[s][at] + fixed[s]
                further.setdefault(stop, []).extend((a + own, max(b, own), (*c, stop)) for a, b, c in front)
        fronts = {stop: _front(found) for stop, found in further.items()}
    last = fronts.get(layers)
    if not last:
        return None
    return min(last, key=lambda p: (max(p[0], microbatches * p[1]), p[0]))[2]


def _front(points: list[tuple[float, float, tuple[int, ...]]]) -> list[tuple[float, float, tuple[int, ...]]]:
    kept: list[tuple[float, float, tuple[int, ...]]] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept
