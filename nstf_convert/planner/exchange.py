"""Changes of a few units at a time that make a choice under two bounds better (`timed.choose`).

What the multipliers choose leaves some bytes and some seconds over. One step of one unit that fits into both is soon found;
what is left takes two or three steps that make room for each other. An integer program finds these too, in seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nstf_convert.planner.table import Array, Choice, Table, better, reduced_costs

# Changes of a unit that are looked at in pairs (a table of 16 MB) and in threes, by reduced cost.
_MOST_IN_PAIRS, _MOST_IN_TRIPLES = 1448, 300
# Each gains something; models took up to ten.
_MOST_ROUNDS = 100


def exchanged(table: Table, choice: Choice, a: float, b: float) -> Choice:
    """The choice [units], which keeps both bounds, after every change of up to three units that lowers its loss within them.

    a, b: the prices of bytes and seconds, as in `reduced_costs`.
    """
    reduced, bound = reduced_costs(table, a, b)
    for _ in range(_MOST_ROUNDS):
        rest = table.totals(choice)[1] - bound
        changed = _best_pair(table, choice, reduced, rest)
        if changed is choice:
            changed = _best_triple(table, choice, reduced, rest)
        if changed is choice:
            break
        choice = changed
    return choice


@dataclass(frozen=True)
class _Changes:
    """Changes of one unit each, and a last one that changes nothing (unit -1). loss: what is added to it; likewise bytes and
    seconds."""

    unit: Choice
    option: Choice
    size: Array
    loss: Array
    seconds: Array

    def applied(self, table: Table, choice: Choice, at: Sequence[int]) -> Choice:
        """The choice after some of them. Sums come out in another order: one that is no better stays as it is."""
        changed = choice.copy()
        for k in at:
            if self.unit[k] >= 0:
                changed[self.unit[k]] = self.option[k]
        return better(table, choice, changed)


def _changes(table: Table, choice: Choice, reduced: Array, rest: float, most: int) -> _Changes:
    """The changes that a better choice may have, the nearest by reduced cost. rest: how far the choice is from the bound of
    `reduced_costs`."""
    unit, option = np.nonzero(reduced <= rest)
    other = option != choice[unit]
    unit, option = unit[other], option[other]
    nearest = np.argsort(reduced[unit, option] - reduced[unit, choice[unit]], kind="stable")[:most]
    unit, option = unit[nearest], option[nearest]
    size, loss, seconds = (
        np.append(part[unit, option] - part[unit, choice[unit]], 0.0)
        for part in (table.size, table.loss, table.seconds)
    )
    return _Changes(np.append(unit, -1), np.append(option, -1), size, loss, seconds)


def _best_pair(table: Table, choice: Choice, reduced: Array, rest: float) -> Choice:
    """The choice after the change of one unit or two that lowers the loss most; itself where none does."""
    found = _changes(table, choice, reduced, rest, _MOST_IN_PAIRS)
    size, _, seconds = table.totals(choice)
    fits = (size + found.size[:, None] + found.size <= table.budget) & (found.unit[:, None] != found.unit)
    fits &= seconds + found.seconds[:, None] + found.seconds <= table.bound
    added = np.where(fits, found.loss[:, None] + found.loss, 0.0)
    at = divmod(int(np.argmin(added)), len(found.unit))
    return found.applied(table, choice, at) if added[at] < 0.0 else choice


def _best_triple(table: Table, choice: Choice, reduced: Array, rest: float) -> Choice:
    """The same of three units."""
    found = _changes(table, choice, reduced, rest, _MOST_IN_TRIPLES)
    size, _, seconds = table.totals(choice)
    first, second = np.nonzero(found.unit[:, None] < found.unit)
    sizes, losses, slower = (part[first] + part[second] for part in (found.size, found.loss, found.seconds))
    best, at = 0.0, None
    for third in range(len(found.unit)):
        fits = (losses + found.loss[third] < best) & (size + sizes + found.size[third] <= table.budget)
        fits &= seconds + slower + found.seconds[third] <= table.bound
        fits &= (found.unit[first] != found.unit[third]) & (found.unit[second] != found.unit[third])
        some = np.nonzero(fits)[0]
        if some.size:
            pair = some[np.argmin(losses[some])]
            best, at = float(losses[pair] + found.loss[third]), (int(first[pair]), int(second[pair]), third)
    return choice if at is None else found.applied(table, choice, at)
