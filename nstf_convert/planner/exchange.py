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
    """Changes of one unit each, and one that changes nothing (unit -1), by rising loss. loss: what is added to it; likewise
    bytes and seconds."""

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
    order = np.argsort(loss, kind="stable")
    unit, option = np.append(unit, -1)[order], np.append(option, -1)[order]
    return _Changes(unit, option, size[order], loss[order], seconds[order])


def _best_pair(table: Table, choice: Choice, reduced: Array, rest: float) -> Choice:
    """The choice after the change of one unit or two that lowers the loss most; itself where none does."""
    found = _changes(table, choice, reduced, rest, _MOST_IN_PAIRS)
    size, _, seconds = table.totals(choice)
    best, at = 0.0, None
    for first, loss in enumerate(found.loss):
        # Losses rise: beside this change only those up to `end` would beat what is known, the first that fits by most.
        end = int(np.searchsorted(found.loss, best - loss))
        if end <= first + 1:
            break
        others = slice(first + 1, end)
        fits = (size + found.size[first] + found.size[others] <= table.budget) & (
            seconds + found.seconds[first] + found.seconds[others] <= table.bound
        )
        fits &= found.unit[others] != found.unit[first]
        second = int(np.argmax(fits))
        if fits[second]:
            best, at = float(loss + found.loss[others][second]), (first, first + 1 + second)
    return choice if at is None else found.applied(table, choice, at)


def _best_triple(table: Table, choice: Choice, reduced: Array, rest: float) -> Choice:
    """The same of three units."""
    found = _changes(table, choice, reduced, rest, _MOST_IN_TRIPLES)
    size, _, seconds = table.totals(choice)
    first, second = np.nonzero(found.unit[:, None] < found.unit)
    order = np.argsort(found.loss[first] + found.loss[second], kind="stable")
    first, second = first[order], second[order]
    sizes, losses, slower = (part[first] + part[second] for part in (found.size, found.loss, found.seconds))
    sizes, slower = size + sizes, seconds + slower
    best, at = 0.0, None
    for third, loss in enumerate(found.loss):
        end = int(np.searchsorted(losses, best - loss))
        if end == 0:
            break
        fits = (sizes[:end] + found.size[third] <= table.budget) & (
            slower[:end] + found.seconds[third] <= table.bound
        )
        fits &= (found.unit[first[:end]] != found.unit[third]) & (
            found.unit[second[:end]] != found.unit[third]
        )
        pair = int(np.argmax(fits))
        if fits[pair]:
            best, at = float(losses[pair] + loss), (int(first[pair]), int(second[pair]), third)
    return choice if at is None else found.applied(table, choice, at)
