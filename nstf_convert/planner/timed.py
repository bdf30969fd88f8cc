"""One choice per unit under two bounds, bytes and seconds: a Lagrangian with two multipliers, then an exact finish.

For multipliers a and b every unit takes the option of least  loss + a bytes + b seconds  (Everett 1963). For a given b
the least a that keeps the bytes is found by bisection, and so is the least b whose choice keeps the seconds. What both
bounds leave over goes to the steps that gain most for their price; then up to three units at a time change, where that
gains. Of few units what is still far from the bound that the multipliers prove is decided anew, among the options of
least reduced cost, by an integer program with both bounds as rows.
"""

from collections.abc import Sequence

import numpy as np

from nstf_convert.planner.allocation import NODES, TooSlow, contained_highs
from nstf_convert.planner.exchange import exchanged
from nstf_convert.planner.hull import Option
from nstf_convert.planner.table import Array, Choice, Table, better, reduced_costs, table_of

# Halvings of a multiplier's logarithm: the last changes it by less than a millionth.
_ROUNDS_BYTES = 40
_ROUNDS_SECONDS = 24
# Options of each unit that the integer program chooses among, by reduced cost.
_FREE = 12
# Where the integer program stops. It is not asked within a thousandth of what no choice goes below, nor about many units: of
# the models that were tried it took seconds to gain 1 to 6 ten-thousandths, and losses are known to a tenth.
_GAP, _NEAR, _MANY_UNITS = 5e-4, 1e-3, 64


def choose(
    units: Sequence[Sequence[Option]], budget_bytes: int, bound_seconds: float, exact: bool
) -> tuple[list[int], float]:
    """(an option's index per unit, loss per byte) of the least loss found within both bounds. Raises TooSlow.

    The caller has checked that the bytes suffice.
    """
    table, scale = table_of(units, budget_bytes, bound_seconds)
    fastest, _ = _within_bytes(table, table.seconds)
    fastest = _filled(table, fastest, table.seconds, check_time=False)
    if not table.fits(fastest):
        raise TooSlow(table.totals(fastest)[2] * bound_seconds, bound_seconds)
    best, a, b = _within_both(table, fastest)
    best = better(table, best, _filled(table, best, table.loss))
    best = better(table, best, _filled(table, fastest, table.loss))
    if exact:
        best = exchanged(table, best, a, b)
        reduced, bound = reduced_costs(table, a, b)
        loss = table.totals(best)[1]
        if len(units) <= _MANY_UNITS and loss - bound > _NEAR * loss:
            best = better(table, best, _program(table, best, reduced, loss - bound))
    return [int(i) for i in best], float(a * scale)


def _within_bytes(table: Table, cost: Array) -> tuple[Choice, float]:
    """(the choice of least `cost` [units, options] within the bytes up to one unit's step, the price of a byte)."""
    choice = _least(cost, table.size)
    if table.totals(choice)[0] <= table.budget:
        return choice, 0.0
    cheapest = _least(table.size, cost)
    finite = cost[np.isfinite(cost)]
    spread = max(float(finite.max() - finite.min()), 1e-30)
    low, high = np.log(spread * 1e-16 / table.budget), np.log(spread * 1e6)
    best, large = cheapest, None  # `large`: the last choice that did not fit
    within = False
    # A unit that takes one option at both ends of the bisection takes it in between: the others alone are asked again.
    open_units, sizes, costs, settled = np.arange(len(choice)), table.size, cost, 0.0
    for _ in range(_ROUNDS_BYTES):
        middle = (low + high) / 2
        asked = np.argmin(costs + np.exp(middle) * sizes, axis=1)
        fits = settled + float(sizes[np.arange(len(asked)), asked].sum()) <= table.budget
        choice = choice.copy()
        choice[open_units] = asked
        if fits:
            high, best, within = middle, choice, True
        else:
            low, large = middle, choice
        if within and large is not None:
            same = best[open_units] == large[open_units]
            if same.any():
                kept = open_units[same]
                settled += float(table.size[kept, best[kept]].sum())
                choice, open_units = best, open_units[~same]
                sizes, costs = table.size[open_units], cost[open_units]
    return best, float(np.exp(high))


def _least(cost: Array, other: Array) -> Choice:
    """The option of least `cost` of each unit [units, options]; of several that of least `other`, the first of those."""
    found: Choice = np.argmin(np.where(cost == cost.min(axis=1, keepdims=True), other, np.inf), axis=1)
    return found


def _within_both(table: Table, fastest: Choice) -> tuple[Choice, float, float]:
    """(the best choice within both bounds, price of a byte, price of a second)."""
    low, high = -40.0, 10.0
    best = fastest
    a = b = 0.0
    for _ in range(_ROUNDS_SECONDS):
        middle = (low + high) / 2
        choice, price = _within_bytes(table, table.loss + np.exp(middle) * table.seconds)
        if table.totals(choice)[2] <= table.bound:
            high = middle
            best, a, b = better(table, best, choice), price, float(np.exp(middle))
        else:
            low = middle
    return best, a, b


def _filled(table: Table, choice: Choice, cost: Array, check_time: bool = True) -> Choice:
    """The choice after every change of one unit that lowers `cost` and fits what is left, the best for its price first."""
    choice, every = choice.copy(), np.arange(len(choice))

    def changes(units: Choice) -> tuple[Array, Array, Array]:
        """(bytes more, seconds more, gain for their price; none where nothing is gained) of each option of some units."""
        now = units, choice[units]
        gain = np.maximum(cost[now][:, None] - cost[units], -1.0)  # finite also where there is no option
        more = table.size[units] - table.size[now][:, None]
        slower = table.seconds[units] - table.seconds[now][:, None]
        price = np.maximum(more, 0) / table.budget
        if check_time:
            price = price + np.maximum(slower, 0) / table.bound
        return more, slower, np.where(gain > 0, gain / np.maximum(price, 1e-12), -np.inf)

    more, slower, worth = changes(every)
    for _ in range(4 * len(choice)):
        size, _, seconds = table.totals(choice)
        fits = (worth > -np.inf) & (size + more <= table.budget)
        if check_time:
            fits &= seconds + slower <= table.bound
        if not fits.any():
            break
        u, i = np.unravel_index(int(np.argmax(np.where(fits, worth, -np.inf))), worth.shape)
        choice[u] = i
        # The others' changes are still what they were.
        more[u], slower[u], worth[u] = (part[0] for part in changes(every[u : u + 1]))
    return choice


def _program(table: Table, choice: Choice, reduced: Array, rest: float) -> Choice:
    """The integer program (HiGHS) over the options of least reduced cost, both bounds as rows; `choice` where it ends
    without an answer. rest: how far the choice is from what no choice goes below."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_matrix

    order = np.argsort(reduced, axis=1, kind="stable")[:, :_FREE]
    pairs = {(u, int(i)) for u, i in enumerate(choice)}
    for u in range(len(choice)):
        pairs |= {(u, int(i)) for i in order[u] if reduced[u, i] <= rest}
    at = sorted(pairs)
    rows, options = np.array([u for u, _ in at]), np.array([i for _, i in at])
    ones = coo_matrix((np.ones(len(at)), (rows, range(len(at)))), shape=(len(choice), len(at)))
    losses = table.loss[rows, options]
    with contained_highs():
        result = milp(
            losses / max(float(losses.sum()), 1e-300) * len(at),
            constraints=[
                LinearConstraint(ones.tocsr(), 1, 1),
                LinearConstraint(table.size[rows, options][None, :] / table.budget, -np.inf, 1.0),
                LinearConstraint(table.seconds[rows, options][None, :], -np.inf, table.bound),
            ],
            integrality=np.ones(len(at)),
            bounds=Bounds(0, 1),
            options={"node_limit": NODES, "mip_rel_gap": _GAP},
        )
    if result.x is None:
        return choice
    found = choice.copy()
    for u, i, taken in zip(rows, options, result.x, strict=True):
        if taken > 0.5:
            found[u] = i
    return found
