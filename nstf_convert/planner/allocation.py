"""The multiple-choice knapsack: one option per unit, least total loss, total bytes within the budget.

The Lagrangian relaxation (Shoham and Gersho 1988) gives the optimum over the convex hulls up to one unit's step;
an integer program over the options near it spends the last bytes exactly.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from nstf_convert.planner.hull import Option, lower_hull, pareto

# Units whose hull step is this close to the multiplier (as a ratio of slopes) may still change in the exact finish.
WINDOW = 16.0

# Where the integer program stops: the relaxation is already within one unit's step of the optimum.
NODES = 200
GAP = 5e-4
# A choice by bytes alone that takes so many times the seconds there are is not finished by the program.
FAR = 1.02
_ONE_PROGRAM = threading.Lock()


class Infeasible(ValueError):
    """No choice fits; `smallest_bytes` is the least total."""

    def __init__(self, smallest_bytes: int, budget_bytes: int) -> None:
        super().__init__(f"the smallest choice takes {smallest_bytes} bytes, the budget is {budget_bytes}")
        self.smallest_bytes = smallest_bytes


class TooSlow(ValueError):
    """No choice within the bytes found is fast enough; `fastest_seconds` is the least time that one takes."""

    def __init__(self, fastest_seconds: float, bound_seconds: float) -> None:
        super().__init__(
            f"the fastest choice takes {fastest_seconds:.3g} s, the bound is {bound_seconds:.3g} s"
        )
        self.fastest_seconds = fastest_seconds


@dataclass(frozen=True)
class Allocation:
    """choice: an option's index per unit. multiplier: loss per byte at the Lagrangian optimum. seconds: of a token."""

    choice: tuple[int, ...]
    size_bytes: int
    loss: float
    multiplier: float
    seconds: float = 0.0


def allocate(
    units: Sequence[Sequence[Option]],
    budget_bytes: int,
    exact: bool = True,
    bound_seconds: float | None = None,
    hulls: Sequence[Sequence[int]] | None = None,
) -> Allocation:
    """The best choice within `budget_bytes` and, where that is given, within `bound_seconds`.

    exact: spend the last bytes by the integer program; without it the Lagrangian choice is returned. hulls: `lower_hull` of
    each unit's options, where it is known.
    Raises Infeasible, TooSlow, and ValueError for a unit without options.
    """
    if any(not options for options in units):
        raise ValueError("a unit has no options")
    hulls = hulls or [lower_hull(options) for options in units]
    smallest = sum(options[hull[0]].size_bytes for options, hull in zip(units, hulls, strict=True))
    if smallest > budget_bytes:
        raise Infeasible(smallest, budget_bytes)
    choice, multiplier = _lagrangian(units, hulls, budget_bytes)
    found = _allocation(units, choice, multiplier)
    # What is far too slow stays so: the program changes few units.
    if exact and (bound_seconds is None or found.seconds <= FAR * bound_seconds):
        found = _allocation(units, _exact(units, choice, multiplier, budget_bytes), multiplier)
    if bound_seconds is None:
        return found
    if (
        found.seconds <= bound_seconds
        and found.loss - _least_loss(units, multiplier, budget_bytes) <= GAP * found.loss
    ):
        return found
    from nstf_convert.planner.timed import choose

    # Its integer program may choose among more options, and is at times better where the bound does not bind.
    within = _allocation(units, *choose(units, budget_bytes, bound_seconds, exact))
    return found if found.seconds <= bound_seconds and found.loss <= within.loss else within


def _allocation(units: Sequence[Sequence[Option]], choice: Sequence[int], multiplier: float) -> Allocation:
    chosen = [options[i] for options, i in zip(units, choice, strict=True)]
    return Allocation(
        tuple(choice),
        sum(o.size_bytes for o in chosen),
        float(sum(o.loss for o in chosen)),
        multiplier,
        float(sum(o.seconds for o in chosen)),
    )


def _lagrangian(
    units: Sequence[Sequence[Option]], hulls: Sequence[Sequence[int]], budget_bytes: int
) -> tuple[list[int], float]:
    """Walks every hull's steps from the steepest down while they fit: the Lagrangian sweep in one pass."""
    steps = []
    for u, (options, hull) in enumerate(zip(units, hulls, strict=True)):
        for k in range(1, len(hull)):
            a, b = options[hull[k - 1]], options[hull[k]]
            slope = (a.loss - b.loss) / max(1, b.size_bytes - a.size_bytes)
            steps.append((-slope, u, k, b.size_bytes - a.size_bytes))
    steps.sort()
    position = [0] * len(units)
    left = budget_bytes - sum(options[hull[0]].size_bytes for options, hull in zip(units, hulls, strict=True))
    multiplier = 0.0
    for negative_slope, u, k, extra in steps:
        if position[u] == k - 1 and extra <= left:
            position[u] = k
            left -= extra
        elif multiplier == 0.0:
            multiplier = -negative_slope
    return [hull[p] for hull, p in zip(hulls, position, strict=True)], multiplier


def _exact(
    units: Sequence[Sequence[Option]], choice: list[int], multiplier: float, budget_bytes: int
) -> list[int]:
    """Re-decides the units near the multiplier by an integer program (HiGHS); never worse than `choice`."""
    if multiplier <= 0.0:
        return choice
    free = _worth_asking(units, choice, multiplier, budget_bytes)
    if all(len(f) <= 1 for f in free):
        return choice
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_matrix

    variables = [(u, i) for u, options in enumerate(free) for i in options]
    sizes = np.array([units[u][i].size_bytes for u, i in variables], dtype=np.float64)
    losses = np.array([units[u][i].loss for u, i in variables], dtype=np.float64)
    one_each = coo_matrix(
        (np.ones(len(variables)), ([u for u, _ in variables], range(len(variables)))),
        shape=(len(units), len(variables)),
    )
    scale = max(float(losses.sum()), 1e-300)
    with contained_highs():
        result = milp(
            losses / scale * len(variables),
            constraints=[
                LinearConstraint(one_each.tocsr(), 1, 1),
                LinearConstraint(sizes[None, :] / budget_bytes, -np.inf, 1.0),
            ],
            integrality=np.ones(len(variables)),
            bounds=Bounds(0, 1),
            # A limit on nodes, not on time: the same answer on a slow machine.
            options={"node_limit": NODES, "mip_rel_gap": GAP},
        )
    if result.x is None:
        return choice
    better = list(choice)
    for (u, i), taken in zip(variables, result.x, strict=True):
        if taken > 0.5:
            better[u] = i
    old, new = _allocation(units, choice, multiplier), _allocation(units, better, multiplier)
    return better if new.size_bytes <= budget_bytes and new.loss < old.loss else choice


@contextmanager
def contained_highs() -> Iterator[None]:
    """HiGHS leaves nothing behind but its result: no lines on stdout, where results belong, and no threads. Both are the
    process's, so programs of several threads take turns."""
    with _ONE_PROGRAM:
        try:
            with _silent_stdout():
                yield
        finally:
            _end_threads()


def _end_threads() -> None:
    """HiGHS keeps its threads for the next program, where a forked process, which has none of them, waits without end."""
    with contextlib.suppress(ImportError, AttributeError):  # scipy makes no promise of it
        from scipy.optimize._highspy import _core

        _core._Highs.resetGlobalScheduler(True)


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """Sends what C++ code prints to nowhere."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:
        yield  # stdout is closed: nothing can be printed
        return
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(null)


def _worth_asking(
    units: Sequence[Sequence[Option]], choice: Sequence[int], multiplier: float, budget_bytes: int
) -> list[list[int]]:
    """The options of each unit that a better choice may have; those of `choice` alone where none is better by `GAP`.

    A better choice has no option whose loss and price are farther from its unit's least than `choice` is from `_least_loss`.
    """
    loss = sum(options[i].loss for options, i in zip(units, choice, strict=True))
    rest = loss - _least_loss(units, multiplier, budget_bytes)
    if rest <= GAP * loss:
        return [[i] for i in choice]
    out = []
    for options, now in zip(units, choice, strict=True):
        costs = [o.loss + multiplier * o.size_bytes for o in options]
        least = min(costs)
        out.append([i for i in _near(options, now, multiplier) if i == now or costs[i] - least <= rest])
    return out


def _least_loss(units: Sequence[Sequence[Option]], multiplier: float, budget_bytes: int) -> float:
    """What no choice within the budget goes below, at any multiplier (Everett 1963)."""
    costs = (min(o.loss + multiplier * o.size_bytes for o in options) for options in units)
    return sum(costs) - multiplier * budget_bytes


def _near(options: Sequence[Option], current: int, multiplier: float) -> list[int]:
    """The Pareto options reachable from the current one at a price per byte near the multiplier, itself included."""
    now = options[current]
    out = []
    for i in pareto(options):
        extra = options[i].size_bytes - now.size_bytes
        gain = now.loss - options[i].loss
        if i == current or (extra != 0 and multiplier / WINDOW <= gain / extra <= multiplier * WINDOW):
            out.append(i)
    return out if current in out else [*out, current]
