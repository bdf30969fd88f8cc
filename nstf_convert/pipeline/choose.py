"""From candidates to a mix under a budget: the planner's options, the best uniform mix, and the exact size."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nstf.errors import BudgetError
from nstf.runtime.artifact import artifact_size
from nstf_convert.pipeline import candidates as cand
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.candidates import Candidate
from nstf_convert.pipeline.job import Job
from nstf_convert.pipeline.recipe import Recipe, describe, tree_of
from nstf_convert.pipeline.units import Unit, fused_groups
from nstf_convert.planner import Infeasible, Option, allocate

# Below this many bits per weight on disk, low-rank corrections and low-bit bases are worth trying.
LOW_BITS = 4.0
# Bytes of the budget a plan may leave unspent without being made again.
SPARE_BYTES = 512
# Uniform files that are measured: so many at most, whose expected losses are within this factor of the best one's.
UNIFORMS = 2
UNIFORM_MARGIN = 1.15
# Encoding with these takes minutes, so a uniform file of one is only made when its expected loss is within this
# factor of the mix's: further off than the loss model can err.
SLOW_METHODS = ("trellis",)
SLOW_MARGIN = 1.3


@dataclass(frozen=True)
class Table:
    """The candidates of every tensor that may change, by name.

    factors: what probes found the losses of a tensor to be worth; the candidates' losses are with it.
    """

    candidates: Mapping[str, Sequence[Candidate]]
    fused: Mapping[str, str] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)

    def with_more(self, name: str, extra: Sequence[Candidate]) -> "Table":
        """The table with further candidates for one tensor, whose losses are as the loss model gives them."""
        factor = self.factor(name)
        more = [*self.candidates[name], *(_times(c, factor) for c in extra)]
        return replace(self, candidates={**self.candidates, name: more})

    def replaced(self, losses: Mapping[str, tuple[Recipe, float]]) -> "Table":
        """The table with the expected loss of some candidates replaced by the one found by encoding."""
        out = dict(self.candidates)
        for name, (recipe, value) in losses.items():
            true = value * self.factor(name)
            out[name] = [
                replace(c, loss=true, exact=True) if c.recipe == recipe else c for c in self.candidates[name]
            ]
        return replace(self, candidates=out)

    def calibrated(self, factors: Mapping[str, float]) -> "Table":
        """The table with the losses of some tensors multiplied by what probes found."""
        out = {n: [_times(c, factors.get(n, 1.0)) for c in cs] for n, cs in self.candidates.items()}
        both = {n: self.factor(n) * factors.get(n, 1.0) for n in self.candidates}
        return replace(self, candidates=out, factors=both)

    def factor(self, name: str) -> float:
        """What a loss of the loss model is multiplied by for this tensor; 1 before any probe."""
        return self.factors.get(name, 1.0)

    def find(self, name: str, recipe: Recipe) -> Candidate | None:
        """The candidate of a tensor with this recipe."""
        return next((c for c in self.candidates[name] if c.recipe == recipe), None)


def _times(candidate: Candidate, factor: float) -> Candidate:
    return candidate if factor == 1.0 else replace(candidate, loss=candidate.loss * factor)


@dataclass(frozen=True)
class Planned:
    """A mix with its expected loss and its size on disk. label: what it is called in the report."""

    mix: Mapping[str, Recipe]
    expected_loss: float
    size_bytes: int
    label: str


def build_table(job: Job, allowed: set[str], progress: Any) -> Table:
    """Candidates of every tensor; calibrated ones first, since they set the scale for the others."""
    units = [u for u in job.units.values() if u.kept is None]
    known = [u for u in units if job.statistics.calibrated(u)]
    found = job.encoder.each(known, lambda u: job.encoder.candidates(u, allowed), progress)
    signals = sorted(job.encoder.signal(u, allowed) for u in known)
    if signals:
        job.statistics.set_typical(signals[len(signals) // 2])
    rest = [u for u in units if u.name not in found]
    found |= job.encoder.each(rest, lambda u: job.encoder.candidates(u, allowed), progress)
    return Table(found, fused_groups(units) if job.options.fuse else {})


def plan_mix(
    job: Job,
    table: Table,
    budget_bytes: int,
    meta: Mapping[str, Any],
    weights: Mapping[str, float] | None = None,
    exact: bool = True,
) -> Planned:
    """The allocation under a budget for the whole file. weights: factors on the losses of single tensors.
    exact: see `allocate`; without it the plan is quick and leaves some bytes unspent.

    Raises BudgetError with the smallest file that can be written.
    """
    groups = _groups(table)
    options, picks = [], []
    for names in groups:
        shared = _shared_options(table, names, weights or {})
        options.append([o for o, _ in shared])
        picks.append([p for _, p in shared])
    fixed = exact_size(job, {}, meta, skip=set(table.candidates))
    target = budget_bytes - fixed
    best: Planned | None = None
    best_loss = math.inf
    for step in range(5):
        # The first round only learns by how much the prices overstate the header.
        finish = exact and step > 0
        try:
            allocation = allocate(options, max(0, target), finish)
        except Infeasible as error:
            if best is not None:
                break
            smallest = exact_size(job, _mix(groups, picks, _smallest(options)), meta)
            if smallest <= budget_bytes:
                # The header's prices are upper bounds: the smallest mix may fit all the same.
                target = error.smallest_bytes
                continue
            raise BudgetError(
                f"the budget of {budget_bytes} bytes cannot be met: the smallest file is {smallest} bytes "
                f"({smallest / max(1, job.checkpoint.total_bytes):.4f} of the checkpoint)",
                smallest,
            ) from error
        mix = _mix(groups, picks, allocation.choice)
        size = exact_size(job, mix, meta)
        if size <= budget_bytes and (best is None or allocation.loss < best_loss):
            best_loss = allocation.loss  # with `weights`, which the plan's own figure is without
            best = Planned(mix, expected_loss(table, mix), size, "mix")
        spare = budget_bytes - size
        # What the finish itself left over is too little for any step; another round would find the same.
        left_over = target - allocation.size_bytes
        if (finish and 0 <= spare < SPARE_BYTES + 2 * left_over) or (not exact and spare >= 0):
            break
        # Prices overstate the header by a few bytes a tensor; hand those back, or take back what is too much.
        target += spare - (0 if spare < 0 else 32)
    if best is None:
        raise BudgetError(
            f"the budget of {budget_bytes} bytes cannot be met exactly; try a few kilobytes more",
            budget_bytes + 4096,
        )
    return best


def best_uniforms(
    job: Job, table: Table, budget_bytes: int, meta: Mapping[str, Any], mix_loss: float
) -> list[Planned]:
    """The single formats for all tensors that fit and expect the least loss: the best, and those close to it.

    A slow format is left out when it expects much more than the mix does (`mix_loss`), and beside a better one.
    """
    found = []
    for recipe in _uniform_recipes(table):
        mix = {n: recipe for n in table.candidates if table.find(n, recipe) is not None}
        if len(mix) == len(table.candidates):
            found.append((expected_loss(table, mix), mix, recipe))
    found.sort(key=lambda f: f[0])
    out: list[Planned] = []
    for expected, mix, recipe in found:
        quick = [p for p in out if not is_slow(next(iter(p.mix.values())))]
        if len(quick) == UNIFORMS or (quick and expected > UNIFORM_MARGIN * quick[0].expected_loss):
            break
        if is_slow(recipe) and (out or expected > SLOW_MARGIN * mix_loss):
            continue
        size = exact_size(job, mix, meta)
        if size <= budget_bytes:
            some = job.units[next(iter(mix))]
            label = describe(tree_of(recipe, some.inner_shape, some.lead))
            out.append(Planned(mix, expected, size, f"uniform {label}"))
    return out


def _uniform_recipes(table: Table) -> list[Recipe]:
    """Recipes that any tensor of the table could have and that do not depend on it."""
    some = min(table.candidates.values(), key=len, default=())
    return [c.recipe for c in some if c.recipe.family in ("quantised", "dense")]


def is_slow(recipe: Recipe) -> bool:
    """Whether encoding takes minutes on a large model."""
    return recipe.method in SLOW_METHODS or any(is_slow(p) for p in recipe.parts.values())


def key_of(recipe: Recipe) -> str:
    """A recipe as a dictionary key."""
    return json.dumps(recipe.to_json(), sort_keys=True)


def exact_size(
    job: Job, mix: Mapping[str, Recipe], meta: Mapping[str, Any], skip: set[str] | None = None
) -> int:
    """The exact size of the file in bytes. skip: names left out, to find what everything else takes."""
    left_out = {mixes.file_name(n) for n in skip or ()}
    wanted = {n: e for n, e in mixes.entries(job, mix).items() if n not in left_out}
    shared = {mixes.file_name(a): mixes.file_name(s) for a, s in mixes.shared_names(job).items()}
    shared = {a: s for a, s in shared.items() if s in wanted}
    return artifact_size(wanted, shared, job.checkpoint.files(), dict(meta))


def unconfirmed(table: Table, planned: Planned) -> dict[str, Recipe]:
    """Decompositions and hybrids in the plan whose loss is only estimated, by name."""
    out = {}
    for name, recipe in planned.mix.items():
        found = table.find(name, recipe)
        if recipe.family in ("decomposed", "hybrid") and found is not None and not found.exact:
            out[name] = recipe
    return out


def low_bit_units(job: Job, planned: Planned) -> list[Unit]:
    """Matrices the plan gives few bits, where hybrids are worth a look."""
    out = []
    for name, recipe in planned.mix.items():
        unit = job.units[name]
        if (
            recipe.family == "quantised"
            and unit.lead == 1
            and len(unit.shape) == 2
            and "embedding" not in unit.uses
        ):
            if cand.bits_of(unit, mixes.tree_of(unit, recipe))[1] <= LOW_BITS:
                out.append(unit)
    return out


def _groups(table: Table) -> list[tuple[str, ...]]:
    members: dict[str, list[str]] = {}
    for name in sorted(table.candidates):
        members.setdefault(table.fused.get(name, name), []).append(name)
    return [tuple(v) for _, v in sorted(members.items())]


def _shared_options(
    table: Table, names: tuple[str, ...], weights: Mapping[str, float]
) -> list[tuple[Option, dict[str, Recipe]]]:
    """Options of tensors that must get one recipe; for a single tensor simply its candidates."""
    first = table.candidates[names[0]]
    out = []
    for candidate in first:
        size, total, picked = 0, 0.0, {}
        for name in names:
            match = candidate if len(names) == 1 else table.find(name, candidate.recipe)
            if match is None:
                break
            size += match.size_bytes
            total += match.loss * weights.get(name, 1.0)
            picked[name] = match.recipe
        if len(picked) == len(names):
            out.append((Option(size, total), picked))
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
