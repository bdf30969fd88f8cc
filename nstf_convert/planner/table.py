"""The options of all units as arrays, for choices under two bounds: bytes and seconds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nstf_convert.planner.hull import Option

Array = NDArray[np.float64]
Choice = NDArray[np.int64]


@dataclass(frozen=True)
class Table:
    """Options as arrays [units, most options]; where a unit has fewer, entries are infinite. Losses and seconds are
    divided by their scale, so that multipliers are comparable; sizes are bytes."""

    size: Array
    loss: Array
    seconds: Array
    budget: float
    bound: float

    def totals(self, choice: Choice) -> tuple[float, float, float]:
        """(bytes, loss, seconds) of a choice [units]."""
        at = np.arange(len(choice)), choice
        return float(self.size[at].sum()), float(self.loss[at].sum()), float(self.seconds[at].sum())

    def fits(self, choice: Choice) -> bool:
        size, _, seconds = self.totals(choice)
        return size <= self.budget and seconds <= self.bound


def table_of(units: Sequence[Sequence[Option]], budget: int, bound: float) -> tuple[Table, float]:
    """The options as arrays, and what losses were divided by. Seconds are divided by their bound."""
    most = max(len(options) for options in units)

    def padded(get: str) -> Array:
        out = np.full((len(units), most), np.inf)
        for u, options in enumerate(units):
            out[u, : len(options)] = [getattr(o, get) for o in options]
        return out

    loss = padded("loss")
    scale = max(float(loss[np.isfinite(loss)].sum()), 1e-300)
    bound = max(bound, 1e-30)
    return Table(padded("size_bytes"), loss / scale, padded("seconds") / bound, float(budget), 1.0), scale


def better(table: Table, old: Choice, new: Choice) -> Choice:
    """The choice of less loss that keeps both bounds; `old` does."""
    return new if table.fits(new) and table.totals(new)[1] < table.totals(old)[1] else old


def reduced_costs(table: Table, a: float, b: float) -> tuple[Array, float]:
    """(how far the reduced cost of each option [units, options] is from the least of its unit; the loss that no choice
    within both bounds goes below: Lagrange). a: the price of a byte; b: of the bound on seconds, in the table's losses.

    So a choice that is better than another by that other's distance from the bound has no option farther than this.
    """
    with np.errstate(invalid="ignore"):  # where there is no option: infinite sizes at no price
        cost = table.loss + a * table.size + b * table.seconds
    cost = np.where(np.isfinite(cost), cost, np.inf)
    least = cost.min(axis=1)
    return cost - least[:, None], float(least.sum()) - a * table.budget - b * table.bound
