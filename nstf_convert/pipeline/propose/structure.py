"""Decompositions of one tensor: which are worth working out, and their ranks by what they measure.

Every method bounds from below what it loses at a size (nstf.analyzers.multilinear, nstf.decomposers.bounds); what plain
formats of the same bytes beat is not tried. Of the rest the one that promises most is really made, with rounded factors,
and its measured loss joins what the next ones must beat. How far a method fell short of its bound is expected of its
other ranks too, so a rank grows, in steps of the sizes here, as long as it may buy more than the same bytes spent on
bits. A byte has one price in all tensors of a plan: a budget says about which, and what loses more than it saves at any
such price cannot be chosen, so it is not tried either (`rival_of`). Where a method found structure its ranks are then
adapted by what each step measures: to the price of a byte in this tensor's plain formats, and once a plan knows what a
byte buys in the other tensors, to that price (`grow`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from nstf import decomposers
from nstf.decomposers.factors import unique
from nstf.proposals import FactorForm, Look, Recipe, Room, Signature, Target
from nstf_convert.pipeline.propose import methods
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.planner.hull import Option, lower_hull

# Bits per weight at which structure is compared with plain formats: low ranks take a fraction of a bit.
BITS = (0.03, 0.06, 0.12, 0.25, 0.5, 0.75, 1.0, 1.5, 2.25, 3.25, 4.25, 6.25, 8.25)
QUICK_BITS = 2.25
# Recipes that are made for one tensor at most.
MOST = 6
# By how much a method falls short of its bound before anything of it was made.
SHORTFALL = 1.0
# Smaller than every plain format, where no plan can go otherwise, a form is worth making that loses so much of what
# erasing a part of the tensor would: bounds in a skewed norm are loose, and real structure shows by more than this.
PROMISE = 0.1
# A plan gives a tensor between so many times the budget's bits a weight: four times the loss or a quarter for each bit.
LEAST_SHARE, MOST_SHARE = 0.5, 2.0
# Steps of a rank's size when it is adapted to a price, the coarse one first, and how often each is taken.
STEPS = (1.25, 1.08)
MOST_STEPS = 4

# Why a method that no bound ruled out has no form among the candidates, and one that was compared at no size.
NOT_MADE = (
    f"a bound leaves it possible; forms of others promised more, and at most {MOST} of a tensor are made"
)
NOTHING_THERE = "no form of as many bytes as a plain format has, or plain formats lose nothing there"

# Recipe -> its measured loss.
Measure = Callable[[Recipe], float]


@cache
def factor_forms() -> tuple[FactorForm, ...]:
    """How factors may be stored: 8-bit integers by row, 4-bit ones in groups of 32. A Gaussian's range is about 4.5 standard
    deviations in a row, 2.6 in 32 values; rounding errors are uniform."""
    found = []
    for bits, group, extra, reach in ((8, 0, {}, 4.5), (4, 32, {"scale_bits": 8}, 2.6)):
        recipe = Recipe("int_grid", {"bits": bits, "group": group, "symmetric": True, **extra})
        noise = (reach / (2 ** (bits - 1) - 1)) ** 2 / 12
        found.append(FactorForm(recipe, recipes.bytes_of(recipe), float(bits), noise))
    return tuple(found)


@cache
def row_forms() -> tuple[FactorForm, ...]:
    """How factors of what is to be fast may be stored: with one scale a row in 5 bits, since sums of small groups are scaled
    so often that it takes time (and with AVX2 6 bits take 1.1 times as long), and in 4 bits in groups of 64."""
    found = []
    for bits, group, scale_bits, reach in ((5, 0, 16, 4.5), (4, 64, 8, 3.0)):
        params = {"bits": bits, "group": group, "symmetric": True, "scale_bits": scale_bits}
        recipe = Recipe("int_grid", params)
        noise = (reach / (2 ** (bits - 1) - 1)) ** 2 / 12
        found.append(FactorForm(recipe, recipes.bytes_of(recipe), float(bits), noise))
    return tuple(found)


@dataclass(frozen=True)
class Found:
    """made: recipes with measured losses. looks: of each method that bounds ruled out at every size the closest one, and the
    reasons of those of which nothing was looked at. signal: the loss of erasing the tensor, None where nobody asked."""

    made: list[tuple[Recipe, float]] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    signal: float | None = None


def rival_of(
    points: Sequence[tuple[int, float]], signal: float, given: tuple[float, float] | None = None
) -> Callable[[int], float]:
    """Bytes of the arrays -> the loss that a form of so many bytes has to be below.

    That is what mixing some forms gives there; below the smallest it is PROMISE of what mixing that one with erasing the
    tensor would lose. given: the fewest and most bytes that a plan may give the tensor, or None. What a form saves beside
    the plan's own choice buys no more elsewhere than a byte is worth there, and what it takes more than it costs no less:
    outside of `given` the tangents of that curve at its ends take its place where they are lower.
    """
    options = [Option(0, signal), *(Option(size, loss) for size, loss in points)]
    hull = [options[i] for i in lower_hull(options)]
    sizes, losses = [float(o.size_bytes) for o in hull], [o.loss for o in hull]
    smallest = sizes[1] if len(sizes) > 1 else 0.0
    low, high = _ends(sizes, given)
    steepest = _slope(sizes, losses, low)
    flattest = _slope(sizes, losses, high + 1) if high + 1 < len(sizes) else 0.0
    # It is asked thousands of times: lists would be made arrays of each time.
    places, heights = np.array(sizes), np.array(losses)

    def rival(size_bytes: int) -> float:
        mixed = float(np.interp(size_bytes, places, heights)) * (1.0 if size_bytes >= smallest else PROMISE)
        if given is not None and size_bytes < sizes[low]:
            mixed = min(mixed, losses[low] + steepest * (size_bytes - sizes[low]))
        elif given is not None and size_bytes > sizes[high]:
            mixed = min(mixed, losses[high] + flattest * (size_bytes - sizes[high]))
        return max(0.0, mixed)

    return rival


def _ends(sizes: Sequence[float], given: tuple[float, float] | None) -> tuple[int, int]:
    """The forms of a hull between which a plan chooses, by their places: the smallest is none, it is the erased tensor."""
    if given is None:
        return min(1, len(sizes) - 1), len(sizes) - 1
    low = int(np.searchsorted(sizes, given[0], side="right")) - 1
    high = int(np.searchsorted(sizes, given[1], side="left"))
    return min(max(1, low), len(sizes) - 1), min(high, len(sizes) - 1)


def _slope(sizes: Sequence[float], losses: Sequence[float], at: int) -> float:
    """By how much the loss changes with a byte just below a form of the hull."""
    return (losses[at] - losses[at - 1]) / (sizes[at] - sizes[at - 1]) if at > 0 else 0.0


def given_bytes(elements: int, bits: float | None) -> tuple[float, float] | None:
    """The fewest and most bytes that a plan of so many bits a weight may give a tensor; None where no size is known."""
    return None if bits is None else (LEAST_SHARE * bits * elements / 8, MOST_SHARE * bits * elements / 8)


def explore(
    known: Signature, target: Target, room: Room, plain: Sequence[tuple[int, float]], measure: Measure
) -> Found:
    """Decompositions worth having. room: its methods and what it says of the effort. plain: (bytes of the arrays, expected
    loss) of the quantised and dense forms. measure: makes a recipe."""
    wanted_methods = [m for m in decomposers.METHODS if m in room.methods]
    if not wanted_methods or (room.quick and len(known.shape) == 2):  # without the products that spectra take
        return _not_looked_at(wanted_methods, "the effort looks at no decompositions of matrices")
    # Before a spectrum sharpens it in the last digits.
    signal = known.signal
    if signal <= 0.0:
        return _not_looked_at(wanted_methods, "erasing the tensor loses nothing")
    elements = math.prod(known.shape)
    # Where little is looked at, what outputs count comes from a few windows: too little to leave most of a tensor out.
    wanted_bits = [bits for bits in BITS if not room.quick or bits >= QUICK_BITS]
    sizes = tuple(dict.fromkeys(max(8, int(elements * bits / 8)) for bits in wanted_bits))
    points, found = list(plain), Found()
    given = given_bytes(elements, room.bits)
    short: dict[tuple[str, str], float] = {}
    factors = room.factors or factor_forms()
    noise = {str(f.recipe): f.noise for f in factors}
    alone = rival_of(plain, known.signal, given)
    while len(found.made) < MOST:
        rival = rival_of(points, known.signal, given)
        now = replace(room, sizes=sizes, factors=factors, rival=rival, plain=alone, looks=[])
        wanted = methods.structured(known, target, now)
        if not found.made:
            # What a bound left over at some size was not ruled out, though nothing of it may be made below.
            left = {recipe.method for recipe in wanted}
            out = [look for look in now.looks if look.method not in left]
            found.looks.extend(_closest(out, min((size for size, _ in plain), default=0)))
            possible = left - {look.method for look in found.looks}
            found.looks.extend(Look(m, reason=NOT_MADE) for m in sorted(possible))
        best: tuple[float, Recipe] | None = None
        for recipe in wanted:
            if any(recipe == made for made, _ in found.made):
                continue
            expected = _floor(recipe, noise, known.signal) * short.get(_kind(recipe), SHORTFALL)
            share = expected / max(now.rival(now.size_of(recipe)), 1e-300)
            if share < 1.0 and (best is None or share < best[0]):
                best = share, recipe
        if best is None:
            break
        loss = measure(best[1])
        found.made.append((best[1], loss))
        points.append((room.size_of(best[1]), loss))
        short[_kind(best[1])] = max(1.0, loss / max(_floor(best[1], noise, known.signal), 1e-300))
    if target.timed:
        found.made.extend(_faster(known, room, found.made, lambda r: alone(room.size_of(r)), measure))
    for made in _structure(found.made, lambda r: alone(room.size_of(r))):
        price = _price(room.size_of(made[0]), made[1], plain, known.signal)
        found.made.extend(
            grow(known, target, replace(room, factors=factors), made, price, measure, STEPS[:1])
        )
    return Found(list({str(r): (r, v) for r, v in found.made}.values()), found.looks, signal)


def _not_looked_at(names: Sequence[str], reason: str) -> Found:
    return Found(looks=[Look(method, reason=reason) for method in names])


def _faster(
    known: Signature,
    room: Room,
    made: Sequence[tuple[Recipe, float]],
    rival: Callable[[Recipe], float],
    measure: Measure,
) -> list[tuple[Recipe, float]]:
    """Of what beats plain formats the same in codes whose products are faster, with measured losses. A plan that counts time
    weighs both: at their bytes they lose more than what was made, so that no bound on the loss would let them in."""
    better = [r for r, v in made if v < rival(r)]
    twins = [twin for r in better if (twin := methods.faster(r, known)) is not None]
    return [(r, measure(r)) for r in unique(twins) if all(p.method in room.methods for p in r.parts.values())]


def _structure(
    made: Sequence[tuple[Recipe, float]], rival: Callable[[Recipe], float]
) -> list[tuple[Recipe, float]]:
    """Of each method what beats plain formats most."""
    best: dict[str, tuple[float, tuple[Recipe, float]]] = {}
    for recipe, loss in made:
        share = loss / max(rival(recipe), 1e-300)
        if share < 1.0 and share < best.get(recipe.method, (math.inf, None))[0]:
            best[recipe.method] = share, (recipe, loss)
    return [found for _, found in best.values()]


def _price(size_bytes: int, loss: float, plain: Sequence[tuple[int, float]], signal: float) -> float:
    """The most that a byte more takes off a loss by going over to a plain format."""
    slopes = [
        (loss - other) / (size - size_bytes) for size, other in plain if size > size_bytes and other < loss
    ]
    return max(slopes, default=0.0) or 1e-6 * signal / size_bytes


def grow(
    known: Signature,
    target: Target,
    room: Room,
    chosen: tuple[Recipe, float],
    price: float,
    measure: Measure,
    steps: Sequence[float] = STEPS,
) -> list[tuple[Recipe, float]]:
    """Other ranks of a chosen decomposition, as long as each step lowers loss + price x bytes: up while a larger rank
    buys more than the same bytes do elsewhere, down while a smaller one loses less than they save. With measured
    losses."""
    factors = tuple(f for f in room.factors or factor_forms() if f.recipe == chosen[0].parts.get("factor"))
    only = replace(room, methods=frozenset((chosen[0].method,)), factors=factors, rival=lambda size: math.inf)
    best, made = chosen, {}
    for step in steps:
        for direction in (step, 1 / step):
            for _ in range(MOST_STEPS):
                size = room.size_of(best[0])
                wanted = methods.structured(
                    known, target, replace(only, sizes=(round(size * direction),), looks=[])
                )
                same = [
                    r for r in wanted if _kind(r) == _kind(best[0]) and r != best[0] and str(r) not in made
                ]
                if not same:
                    break
                loss = measure(same[0])
                made[str(same[0])] = same[0], loss
                if loss + price * room.size_of(same[0]) >= best[1] + price * size:
                    break
                best = same[0], loss
    return list(made.values())


def _floor(recipe: Recipe, noise: dict[str, float], signal: float) -> float:
    """The bound of a recipe with the rounding of one factor."""
    share = noise.get(str(recipe.parts.get("factor")), 0.0)
    return recipe.least + share * max(0.0, signal - recipe.least)


def _kind(recipe: Recipe) -> tuple[str, str]:
    """Recipes of one kind differ in their ranks alone."""
    view = {k: v for k, v in recipe.params.items() if k not in ("rank", "ranks")}
    return recipe.method, f"{view} {recipe.parts}"


def _closest(looks: Sequence[Look], smallest: int) -> list[Look]:
    """Of every method the look that came closest to its rival, among those of as many bytes as a plain format has: with
    next to none everything loses as much as erasing the tensor. Of a method without one a reason."""
    best: dict[str, Look] = {}
    # Where plain formats lose nothing there is nothing to compare with: zeros, a constant, three levels.
    for look in (k for k in looks if not k.reason and k.size_bytes >= smallest and k.rival > 0.0):
        if (
            look.method not in best
            or look.least / look.rival < best[look.method].least / best[look.method].rival
        ):
            best[look.method] = look
    for look in looks:
        if look.method not in best:
            best[look.method] = look if look.reason else Look(look.method, reason=NOTHING_THERE)
    return list(best.values())
