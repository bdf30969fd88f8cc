"""What every stage of a conversion does with a mix: plan it, encode it, measure it, and keep the score."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from nstf_convert.pipeline import choose
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.choose import Planned, Table, key_of
from nstf_convert.pipeline.job import Job
from nstf_convert.pipeline.mix import Measured
from nstf_convert.pipeline.recipe import Recipe
from nstf_convert.pipeline.reporting import Meta
from nstf_convert.pipeline.stages import bars_off
from nstf_convert.pipeline.units import Unit

log = logging.getLogger("nstf")

# Decompositions the plan takes on an estimate are worked out, and the plan made again, at most this often.
CONFIRM_ROUNDS = 4


@dataclass(frozen=True)
class Trial:
    """A mix that was encoded and measured on the windows that choose."""

    planned: Planned
    measured: Measured

    @property
    def score(self) -> float:
        return self.measured.score


@dataclass
class Run:
    """A conversion under way. table: the candidates with what is known of their losses; it grows while plans are
    made. true_losses: found by encoding, by tensor and recipe. tried: every mix measured so far, for the report."""

    job: Job
    meta: Meta
    table: Table
    allowed: set[str]
    true_losses: dict[tuple[str, str], float] = field(default_factory=dict)
    tried: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, tuple[float, int]] = field(default_factory=dict)

    def plan(
        self, budget_bytes: int, weights: Mapping[str, float] | None = None, exact: bool = True
    ) -> Planned:
        """The best plan within a budget, with hybrids added where it gives few bits. Raises BudgetError."""
        job, widest = self.job, self.meta.widest()
        with job.stages.stage("plan"):
            planned = choose.plan_mix(job, self.table, budget_bytes, widest, weights, exact=False)
            if "add" in self.allowed:
                low = [u for u in choose.low_bit_units(job, planned) if not self._has_hybrids(u)]
                found = job.encoder.each(low, lambda u: job.encoder.hybrids(u, self.allowed), lambda u: None)
                for name, more in found.items():
                    self.table = self.table.with_more(name, more)
            planned = choose.plan_mix(job, self.table, budget_bytes, widest, weights, exact)
        for _ in range(CONFIRM_ROUNDS):
            doubtful = choose.unconfirmed(self.table, planned)
            if not doubtful:
                break
            self.encode(Planned(doubtful, 0.0, 0, "decompositions"))
            with job.stages.stage("plan"):
                planned = choose.plan_mix(job, self.table, budget_bytes, widest, weights, exact)
        return planned

    def encode(self, planned: Planned) -> None:
        """Makes sure every tensor of a plan is in the work directory, and learns its true loss.

        Of decompositions and hybrids the table takes over the true loss: their estimates are the rough ones.
        """
        job = self.job
        chosen = [(job.units[n], r) for n, r in planned.mix.items()]
        with job.stages.stage("encode"), bar(job, f"encode {planned.label}") as progress:
            results = job.encoder.encode_all(chosen, progress)
        rough = {}
        for name, result in results.items():
            recipe = planned.mix[name]
            self.true_losses[(name, key_of(recipe))] = result.loss
            if recipe.family in ("decomposed", "hybrid"):
                rough[name] = (recipe, result.loss)
            if result.seconds > 0.0:
                before = self.seconds.get(recipe.method, (0.0, 0))
                elements = before[1] + job.units[name].elements
                self.seconds[recipe.method] = (before[0] + result.seconds, elements)
        if rough:
            self.table = self.table.replaced(rough)

    def measure(self, planned: Planned) -> Trial:
        """Encodes and measures a plan, and notes it as tried."""
        self.encode(planned)
        with self.job.stages.stage("measure"):
            measured = mixes.measure(self.job, planned.mix)
        log.info("%s: %d bytes, score %.6g", planned.label, planned.size_bytes, measured.score)
        trial = Trial(planned, measured)
        self.tried.append(trial_json(trial))
        return trial

    def best_uniform(self, budget_bytes: int, mix_loss: float) -> Trial | None:
        """The single format that measures best within a budget, or None when none fits. mix_loss: the mix's expected
        loss."""
        with self.job.stages.stage("plan"):
            plans = choose.best_uniforms(self.job, self.table, budget_bytes, self.meta.widest(), mix_loss)
        return min([self.measure(p) for p in plans], key=lambda t: t.score, default=None)

    def true_loss(self, name: str, recipe: Recipe) -> float:
        """The loss of an encoding that was made, in the loss model's own terms. Raises KeyError before that."""
        return self.true_losses[(name, key_of(recipe))]

    def find_true_loss(self, name: str, recipe: Recipe) -> float | None:
        """`true_loss`, or None for an encoding that was not made."""
        return self.true_losses.get((name, key_of(recipe)))

    def seconds_to_encode(self, units: Mapping[str, Recipe]) -> float:
        """About how long encoding would take, from what was encoded so far; 0 for methods not seen yet."""
        total = 0.0
        for name, recipe in units.items():
            spent, elements = self.seconds.get(recipe.method, (0.0, 1))
            if (name, key_of(recipe)) not in self.true_losses:
                total += spent / elements * self.job.units[name].elements
        return total / (self.job.options.threads or 1)

    def _has_hybrids(self, unit: Unit) -> bool:
        return any(c.recipe.method == "add" for c in self.table.candidates[unit.name])


def trial_json(trial: Trial) -> dict[str, Any]:
    """A measured mix as the report lists it."""
    key = "mean_kl" if hasattr(trial.measured.accuracy, "mean_kl") else "relative_l2"
    return {
        "name": trial.planned.label,
        "size_bytes": trial.planned.size_bytes,
        key: trial.score,
        "expected_loss": trial.planned.expected_loss,
    }


@contextmanager
def bar(job: Job, what: str) -> Iterator[Any]:
    """A progress bar over the weights; gives the function that is called with every unit that is done."""
    total = sum(u.elements for u in job.units.values() if u.kept is None)
    with tqdm(
        total=total, desc=what, unit="weight", unit_scale=True, disable=bars_off(), leave=False
    ) as shown:
        yield lambda unit: shown.update(unit.elements)
