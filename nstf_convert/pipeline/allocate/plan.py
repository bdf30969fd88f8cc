"""From candidates to a mix under a budget: the planner's options, the best uniform mix, and the exact size."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from nstf.errors import BudgetError
from nstf.runtime.artifact import artifact_size
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.outcome import Planned
from nstf_convert.pipeline.propose import candidates as cand
from nstf_convert.pipeline.propose.candidates import Candidate
from nstf_convert.pipeline.propose.recipe import Recipe, describe, tree_of
from nstf_convert.pipeline.propose.table import Table
from nstf_convert.pipeline.session import Session
from nstf_convert.planner import Infeasible, Option, TooSlow, allocate, lower_hull

# (tensor, candidate) -> seconds that a token spends on it.
Seconds = Callable[[str, Candidate], float]
# (tensors, the recipe of all) -> seconds that a token saves where they run as one.
Saved = Callable[[Sequence[str], Recipe], float]

# Bytes of the budget a plan may leave unspent without being made again.
SPARE_BYTES = 512


def plan_mix(
    session: Session,
    table: Table,
    budget_bytes: int,
    meta: Mapping[str, Any],
    weights: Mapping[str, float] | None = None,
    exact: bool = True,
    seconds: Seconds | None = None,
    bound_seconds: float | None = None,
    saved: Saved | None = None,
) -> Planned:
    """The allocation under a budget for the whole file. weights: factors on the losses of single tensors.
    exact: see `allocate`; without it the plan is quick and leaves some bytes unspent. seconds: of a tensor with a
    candidate; bound_seconds: what all tensors may take together; saved: seconds less where several are stored alike.

    Raises BudgetError with the smallest file that can be written, TooSlow where none is fast enough.
    """
    choices = _choices(table, weights, seconds, saved)
    groups, options, picks = choices.groups, choices.options, choices.picks
    fixed = exact_size(session, {}, meta, skip=set(table.candidates))
    target = budget_bytes - fixed
    best: Planned | None = None
    best_loss = math.inf
    for step in range(5):
        # The first round only learns by how much the prices overstate the header.
        finish = exact and step > 0
        try:
            allocation = allocate(options, max(0, target), finish, bound_seconds, choices.hulls)
        except TooSlow:
            if best is not None:
                break
            if step > 0:
                raise
            # Prices overstate the header: what they do so by may be what a faster choice needs.
            smaller = allocate(options, target, exact=False, hulls=choices.hulls)
            priced = fixed + smaller.size_bytes
            target += max(0, priced - exact_size(session, _mix(groups, picks, smaller.choice), meta) - 32)
            continue
        except Infeasible as error:
            if best is not None:
                break
            smallest = exact_size(session, _mix(groups, picks, _smallest(options)), meta)
            if smallest <= budget_bytes:
                # The header's prices are upper bounds: the smallest mix may fit all the same.
                target = error.smallest_bytes
                continue
            raise BudgetError(
                f"the budget of {budget_bytes} bytes cannot be met: the smallest file is {smallest} bytes "
                f"({smallest / max(1, session.checkpoint.total_bytes):.4f} of the checkpoint)",
                smallest,
            ) from error
        mix = _mix(groups, picks, allocation.choice)
        size = exact_size(session, mix, meta)
        if size <= budget_bytes and (best is None or allocation.loss < best_loss):
            best_loss = allocation.loss  # with `weights`, which the plan's own figure is without
            best = Planned(mix, expected_loss(table, mix), size, "mix", allocation.multiplier)
        spare = budget_bytes - size
        # What the finish itself left over is too little for any step; another round would find the same.
        left_over = target - allocation.size_bytes
        if (finish and 0 <= spare < SPARE_BYTES + 2 * left_over) or (not exact and spare >= 0):
            break
        # Prices overstate the header by a few bytes a tensor; hand those back, or take back what is too much. Counted from
        # what was chosen: bytes that the choice left over are no price, and would take the next rounds past the budget or
        # back to the same choice.
        target = allocation.size_bytes + spare - (0 if spare < 0 else 32)
    if best is None and not table.candidates:
        raise _impossible(session, budget_bytes, fixed)
    if best is None:
        raise BudgetError(
            f"the budget of {budget_bytes} bytes cannot be met exactly; try a few kilobytes more",
            budget_bytes + 4096,
        )
    return best


def _impossible(session: Session, budget_bytes: int, smallest: int) -> BudgetError:
    share = smallest / max(1, session.checkpoint.total_bytes)
    return BudgetError(
        f"the budget of {budget_bytes} bytes cannot be met: the smallest file is {smallest} bytes "
        f"({share:.4f} of the checkpoint)",
        smallest,
    )


def uniforms(
    session: Session,
    table: Table,
    budget_bytes: int,
    meta: Mapping[str, Any],
    fits: Callable[[Mapping[str, Recipe]], bool] = lambda mix: True,
) -> list[Planned]:
    """Of every family of formats the single format for all tensors that fits and expects the least loss, in the order of
    these losses. fits: whether a mix keeps whatever else is asked of it."""
    found = []
    for recipe in _uniform_recipes(table):
        mix = {n: recipe for n in table.candidates if table.find(n, recipe) is not None}
        if len(mix) == len(table.candidates):
            found.append((expected_loss(table, mix), mix, recipe))
    found.sort(key=lambda f: f[0])
    out: dict[str, Planned] = {}
    for expected, mix, recipe in found:
        if (
            recipe.method in out
            or sum(cand.least_bytes(session.units[n], recipe) for n in mix) > budget_bytes
        ):
            continue  # most are too large, which is found sooner than how fast they are
        if not fits(mix):
            continue
        size = exact_size(session, mix, meta)
        if size <= budget_bytes:
            some = session.units[next(iter(mix))]
            label = describe(tree_of(recipe, some.inner_shape, some.lead))
            out[recipe.method] = Planned(mix, expected, size, f"uniform {label}")
    return list(out.values())


def _uniform_recipes(table: Table) -> list[Recipe]:
    """Recipes that any tensor of the table could have and that do not depend on it."""
    some = min(table.candidates.values(), key=len, default=())
    return [c.recipe for c in some if c.recipe.family in ("quantised", "dense")]


def exact_size(
    session: Session, mix: Mapping[str, Recipe], meta: Mapping[str, Any], skip: set[str] | None = None
) -> int:
    """The exact size of the file in bytes. skip: names left out, to find what everything else takes. Whether a reader would
    accept the file is asked of a session's first one, and again when one is written."""
    checked = not skip and not session.layout_checked
    left_out = {mixes.file_name(n) for n in skip or ()}
    wanted = {n: e for n, e in mixes.entries(session, mix).items() if n not in left_out}
    shared = {mixes.file_name(a): mixes.file_name(s) for a, s in mixes.shared_names(session).items()}
    shared = {a: s for a, s in shared.items() if s in wanted}
    size = artifact_size(wanted, shared, session.checkpoint.files(), dict(meta), checked)
    session.layout_checked |= checked
    return size


def unconfirmed(table: Table, planned: Planned) -> dict[str, Recipe]:
    """Decompositions and hybrids in the plan whose loss is only estimated, by name."""
    out = {}
    for name, recipe in planned.mix.items():
        found = table.find(name, recipe)
        if recipe.family in ("decomposed", "hybrid") and found is not None and not found.exact:
            out[name] = recipe
    return out


def planned_bits(session: Session, planned: Planned) -> dict[str, float]:
    """Bits a weight on disk that a plan gives each quantised matrix, tables that are looked up left out."""
    out = {}
    for name, recipe in planned.mix.items():
        unit = session.units[name]
        if (
            recipe.family == "quantised"
            and unit.lead == 1
            and len(unit.shape) == 2
            and "embedding" not in unit.uses
        ):
            out[name] = cand.bits_of(unit, mixes.tree_of(unit, recipe))[1]
    return out


def _groups(table: Table) -> list[tuple[str, ...]]:
    members: dict[str, list[str]] = {}
    for name in sorted(table.candidates):
        members.setdefault(table.fused.get(name, name), []).append(name)
    return [tuple(v) for _, v in sorted(members.items())]


@dataclass(frozen=True)
class _Choices:
    """What a plan chooses among. options, picks: of each group of tensors that are stored alike, prices and recipes; hulls:
    of options, which any number of bytes could want."""

    groups: list[tuple[str, ...]]
    options: list[list[Option]]
    picks: list[list[dict[str, Recipe]]]

    @cached_property
    def hulls(self) -> list[list[int]]:
        return [lower_hull(options) for options in self.options]


def _choices(
    table: Table, weights: Mapping[str, float] | None, seconds: Seconds | None, saved: Saved | None
) -> _Choices:
    """Those of a table, made once where no tensor has a weight of its own: a bound on time takes a dozen plans."""
    key = "choices", seconds, saved
    if not weights and key in table.known:
        return cast(_Choices, table.known[key])
    groups = _groups(table)
    shared = [_shared_options(table, names, weights or {}, seconds, saved) for names in groups]
    found = _Choices(
        groups, [[o for o, _ in each] for each in shared], [[p for _, p in each] for each in shared]
    )
    if not weights:
        table.known[key] = found
    return found


def _shared_options(
    table: Table,
    names: tuple[str, ...],
    weights: Mapping[str, float],
    seconds: Seconds | None = None,
    saved: Saved | None = None,
) -> list[tuple[Option, dict[str, Recipe]]]:
    """Options of tensors that must get one recipe; for a single tensor simply its candidates."""
    first = table.candidates[names[0]]
    out = []
    for candidate in first:
        size, total, time, picked = 0, 0.0, 0.0, {}
        for name in names:
            match = candidate if len(names) == 1 else table.find(name, candidate.recipe)
            if match is None:
                break
            size += match.size_bytes
            total += match.loss * weights.get(name, 1.0)
            time += 0.0 if seconds is None else seconds(name, match)
            picked[name] = match.recipe
        if len(picked) == len(names):
            if saved is not None and len(names) > 1:
                time -= saved(names, candidate.recipe)
            out.append((Option(size, total, time), picked))
    return out


def _mix(
    groups: Sequence[tuple[str, ...]], picks: Sequence[Sequence[dict[str, Recipe]]], choice: Sequence[int]
) -> dict[str, Recipe]:
    mix: dict[str, Recipe] = {}
    for options, index in zip(picks, choice, strict=True):
        mix |= options[index]
    return mix


def _smallest(options: Sequence[Sequence[Option]]) -> list[int]:
    return [min(range(len(o)), key=lambda i: (o[i].size_bytes, o[i].loss)) for o in options]


def expected_loss(table: Table, mix: Mapping[str, Recipe]) -> float:
    """The sum of a mix's expected losses."""
    total = 0.0
    for name, recipe in mix.items():
        found = table.find(name, recipe)
        if found is None:
            raise ValueError(f"{name}: no candidate is stored as {recipe}")
        total += found.loss
    return total
