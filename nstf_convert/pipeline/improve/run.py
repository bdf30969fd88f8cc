"""What every stage of a conversion does with a mix: plan it, encode it, measure it, and keep the score."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nstf.errors import BudgetError
from nstf.proposals import FEW_BITS
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.allocate import bounds
from nstf_convert.pipeline.allocate import plan as plans
from nstf_convert.pipeline.allocate.division import Divisions
from nstf_convert.pipeline.allocate.timing import Timing
from nstf_convert.pipeline.header import Meta
from nstf_convert.pipeline.helpers import Job
from nstf_convert.pipeline.improve import rival
from nstf_convert.pipeline.improve.passes import encode_in_pass, stage_of
from nstf_convert.pipeline.improve.rival import Stopped
from nstf_convert.pipeline.outcome import Planned, Trial
from nstf_convert.pipeline.propose.candidates import Candidate
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.table import Table, at_few_bits, key_of
from nstf_convert.pipeline.propose.units import Unit
from nstf_convert.pipeline.session import Session

log = logging.getLogger("nstf")

# Formats this close to the best, measured on these layers, take all steps; the second margin is for expected losses. One
# that is expected to lose more than the third times the least is not measured.
MEASURED_MARGIN = 1.1
EXPECTED_MARGIN = 2.0
HOPELESS = 10.0
# Decompositions the plan takes on an estimate are worked out, and the plan made again, at most this often.
CONFIRM_ROUNDS = 4
# Families whose losses are estimated roughly until they are made.
ROUGH = ("decomposed", "hybrid")


@dataclass
class Run:
    """A conversion under way. table: the candidates with what is known of their losses; it grows while plans are made.
    true_losses: found by encoding, by tensor and recipe. tried: every mix measured so far, for the report. asked_again:
    tensors for which methods were asked at the bits of a first plan. grown: decompositions whose ranks were adapted.
    timing: what mixes cost in time; without it only bytes count. stopped: single formats that were given up early.
    divisions: what ranks allow, where the file is to be divided among some; free: the table without that. plain_only:
    plans take no decompositions, which measured worse. factor: how many times what is expected
    of them decompositions lose in plans; rounds: of `pays`, for the report."""

    session: Session
    meta: Meta
    table: Table
    allowed: set[str]
    timing: Timing | None = None
    true_losses: dict[tuple[str, str], float] = field(default_factory=dict)
    tried: list[dict[str, Any]] = field(default_factory=list)
    asked_again: set[str] = field(default_factory=set)
    grown: set[tuple[str, str, float]] = field(default_factory=set)
    seconds: dict[str, tuple[float, int]] = field(default_factory=dict)
    stopped: list[Stopped] = field(default_factory=list)
    divisions: Divisions | None = None
    free: Table | None = None
    plain_only: bool = False
    factor: float = 1.0
    rounds: list[Any] = field(default_factory=list)

    def plan(
        self, budget_bytes: int, weights: Mapping[str, float] | None = None, exact: bool = True
    ) -> Planned:
        """The best plan within a budget, with what methods propose for tensors that it gives few bits; what it takes of
        decompositions was made, where the Hessians are at hand. Raises BudgetError."""
        session = self.session
        with session.stages.stage("plan"):
            planned = self.planned(budget_bytes, weights, exact=False)
            if session.options.level.thorough:
                bits = plans.planned_bits(session, planned)
                low = [session.units[n] for n in bits if n not in self.asked_again and bits[n] <= FEW_BITS]
                low = [u for u in low if session.statistics.has_hessian(u)]
                found = at_few_bits(session, low, self.allowed, bits)
                session.beside.keep_one()
                self.asked_again |= found.keys()
                self._add(found)
            planned = self.planned(budget_bytes, weights, exact)
        planned = self._confirmed(planned, budget_bytes, weights, exact)
        return self._with_ranks(planned, budget_bytes, weights, exact)

    def _confirmed(
        self, planned: Planned, budget_bytes: int, weights: Mapping[str, float] | None, exact: bool
    ) -> Planned:
        """A plan whose decompositions and hybrids were made, as far as they can be: what it takes on an estimate is worked
        out and the plan made again, in the end without what is still estimated."""
        session = self.session
        for _ in range(CONFIRM_ROUNDS):
            doubtful = self._doubtful(planned)
            if not doubtful:
                return planned
            self.encode(Planned(doubtful, 0.0, 0, "decompositions"))
            with session.stages.stage("plan"):
                planned = self.planned(budget_bytes, weights, exact)
        if not self._doubtful(planned):
            return planned
        made = {
            n: [c for c in found if c.exact or c.recipe.family not in ROUGH or not self._at_hand(n)]
            for n, found in self.table.candidates.items()
        }
        try:
            with session.stages.stage("plan"):
                return self._planned(replace(self.table, candidates=made), budget_bytes, weights, exact)
        except BudgetError:
            return planned  # only an estimated form is small enough

    def _doubtful(self, planned: Planned) -> dict[str, Recipe]:
        """What a plan takes on an estimate and could be made."""
        return {n: r for n, r in plans.unconfirmed(self.table, planned).items() if self._at_hand(n)}

    def _at_hand(self, name: str) -> bool:
        return self.session.statistics.has_hessian(self.session.units[name])

    def _with_ranks(
        self, planned: Planned, budget_bytes: int, weights: Mapping[str, float] | None, exact: bool
    ) -> Planned:
        """The plan with the ranks of its decompositions adapted: to what a byte buys in the other tensors, and, of
        chains of convolutions in a plan that bounds time, to what their next ranks on both sides lose and take."""
        session = self.session
        chosen = {
            n: found
            for n, r in planned.mix.items()
            if r.family == "decomposed" and (n, key_of(r), self.factor) not in self.grown
            and session.statistics.has_hessian(session.units[n])
            and (found := self.table.find(n, r)) is not None
        }  # fmt: skip
        bounded = self.timing is not None and self.timing.bounds_time
        faster = {n for n in chosen if bounded and session.units[n].role == "conv"}
        if planned.price <= 0.0:
            chosen = {n: c for n, c in chosen.items() if n in faster}
        if not chosen:
            return planned

        def others(unit: Unit) -> list[Candidate]:
            own = chosen[unit.name]
            beside = session.encoder.beside(unit, self.allowed, own.recipe) if unit.name in faster else []
            if beside or planned.price <= 0.0:
                return beside
            # What was measured of decompositions makes a byte of theirs worth less, or more, than their losses say.
            return session.encoder.grown(unit, self.allowed, own, planned.price / self.factor)

        with session.stages.stage("ranks"):
            more = session.encoder.each([session.units[n] for n in chosen], others, lambda u: None)
        self.grown |= {(n, key_of(found.recipe), self.factor) for n, found in chosen.items()}
        self._add(more)
        with session.stages.stage("plan"):
            planned = self.planned(budget_bytes, weights, exact)
        return self._confirmed(planned, budget_bytes, weights, exact)

    def _add(self, found: Mapping[str, Sequence[Candidate]]) -> None:
        """Puts further candidates into the table, by tensor, as far as it lacks them; with ranks to divide among, those that
        can be divided."""
        for name, more in found.items():
            more = [c for c in more if self.table.find(name, c.recipe) is None]
            if self.divisions is not None:
                more = self.divisions.kept(self.session.units[name], more)
            self.table = self.table.with_more(name, more)

    def planned(self, budget_bytes: int, weights: Mapping[str, float] | None, exact: bool) -> Planned:
        """A plan of the table as it is now, within the bound on time where there is one."""
        return self._planned(self.table, budget_bytes, weights, exact)

    def cost_of_division(self, budget_bytes: int) -> dict[str, Any] | None:
        """What dividing the file among ranks costs: the expected losses of quick plans with and without it, in nats."""
        if self.free is None:
            return None
        plain, free = (self._planned(table, budget_bytes, None, False) for table in (self.table, self.free))
        return {
            "ranks": list(self.session.options.tp or ()),
            "expected_loss": plain.expected_loss,
            "expected_loss_free": free.expected_loss,
        }

    def _planned(
        self, table: Table, budget_bytes: int, weights: Mapping[str, float] | None, exact: bool
    ) -> Planned:
        widest, table = self.meta.widest(), self._as_planned(table)
        if self.timing is None or not self.timing.bounds_time:
            return plans.plan_mix(self.session, table, budget_bytes, widest, weights, exact)
        return bounds.plan(self.timing, table, budget_bytes, widest, weights, exact)

    def _as_planned(self, table: Table) -> Table:
        """A table as plans see it."""
        if not self.plain_only and self.factor == 1.0:
            return table
        return replace(table, candidates={n: self.usable(found) for n, found in table.candidates.items()})

    def scaled(self, table: Table) -> Table:
        """A table with what decompositions were measured to lose, also where plans take none."""
        if self.factor == 1.0:
            return table
        found = {
            name: [
                replace(c, loss=self.factor * c.loss) if c.recipe.family == "decomposed" else c
                for c in candidates
            ]
            for name, candidates in table.candidates.items()
        }
        return replace(table, candidates=found)

    def usable(self, found: Sequence[Candidate]) -> list[Candidate]:
        """The candidates that plans may take: no decompositions any more once the file measured better without them, else
        with what they were measured to lose."""
        if self.plain_only:
            return without_decompositions(found)
        return [
            replace(c, loss=self.factor * c.loss) if c.recipe.family == "decomposed" else c for c in found
        ]

    def take_factor(self, factor: float) -> None:
        """Plans from now on expect decompositions to lose so many times as much; what time they may take is found anew."""
        if self.timing is not None and factor != self.factor:
            self.timing.bounds.clear()
        self.factor = factor

    def fast_enough(self, mix: Mapping[str, Recipe], budget_bytes: int) -> bool:
        """Whether a mix keeps the bound on time that holds at a budget."""
        if self.timing is None or not self.timing.bounds_time:
            return True
        bound = bounds.bound(self.timing, self._as_planned(self.table), budget_bytes, self.meta.widest())
        return bound is None or self.timing.of(mix) <= bound.seconds

    def leave_structure(self) -> None:
        """Plans from now on take no decompositions; what time they may take is found anew."""
        self.plain_only, self.factor = True, 1.0
        if self.timing is not None:
            self.timing.bounds.clear()

    def encode(self, planned: Planned) -> None:
        """Makes sure every tensor of a plan is in the work directory, and learns its true loss.

        Of decompositions and hybrids the table takes over the true loss: their estimates are the rough ones.
        """
        session = self.session
        chosen = [(session.units[n], r) for n, r in planned.mix.items()]
        session.compile_for(planned.mix)
        with session.stages.stage("encode"):
            results = session.encoder.encode_all(chosen, counter(session, 2))
        rough = {}
        for name, result in results.items():
            recipe = planned.mix[name]
            self.true_losses[(name, key_of(recipe))] = result.loss
            if recipe.family in ROUGH:
                rough[name] = (recipe, result.loss)
            if result.seconds > 0.0:
                before = self.seconds.get(recipe.method, (0.0, 0))
                elements = before[1] + session.units[name].elements
                self.seconds[recipe.method] = (before[0] + result.seconds, elements)
        if rough:
            self.table = self.table.replaced(rough)

    def measure(self, planned: Planned) -> Trial:
        """Encodes every tensor of a plan on its own, measures the mix, and notes it as tried."""
        self.encode(planned)
        with self.session.stages.stage("measure"):
            measured = mixes.measure(self.session, planned.mix)
        return self._noted(Trial(planned, measured))

    def in_a_pass(self, planned: Planned, done: Collection[str] = ()) -> Trial:
        """The plan encoded in a pass over the layers (front to back, where the options ask for that) and measured. done: the
        tensors that were encoded before."""
        session = self.session
        session.compile_for(planned.mix)
        with session.stages.stage(stage_of(session)):
            found = encode_in_pass(session, planned.mix, self._tick(done))
        with session.stages.stage("measure"):
            measured = mixes.measure(session, planned.mix, load=found.loader())
        losses = {n: r.loss for n, r in found.results.items()}
        return self._noted(Trial(planned, measured, found.loader(), losses))

    def _tick(self, done: Collection[str]) -> Callable[[Unit], None]:
        """Counts the tensors of a pass that were not `done` by an earlier one."""
        tick = counter(self.session, 2)
        return lambda unit: None if unit.name in done else tick(unit)

    def without_structure(self, budget_bytes: int) -> Planned:
        """The plan without decompositions, within the bound on time of plans that may have them. Raises BudgetError."""
        kept = {n: without_decompositions(found) for n, found in self.table.candidates.items()}
        return self._planned(replace(self.table, candidates=kept), budget_bytes, None, True)

    def encoded(self, planned: Planned) -> Trial:
        """The plan by the last steps that the options ask for: in a pass, or every tensor on its own."""
        return self.measure(planned) if self._one_by_one else self.in_a_pass(planned)

    @property
    def _one_by_one(self) -> bool:
        return not self.session.options.front_to_back and self.session.keeps_hessians

    def ahead(self, found: Sequence[Planned]) -> None:
        """Other GPUs, if there are any, begin with the last steps of some plans."""
        self.session.helpers.start([Job(p.mix, not self._one_by_one) for p in found])

    def begin_comparing(self, planned: Planned, budget_bytes: int) -> bool:
        """Whether a process beside this one has begun with the few layers by which single formats are compared with a plan:
        then the plan is encoded first, and the formats are compared when these layers are there."""
        session = self.session
        session.beside.keep_one()
        compares = session.options.level.thorough and not session.options.level.every_family
        found = (
            self._fitting(budget_bytes) if session.beside.any and session.keeps_hessians and compares else []
        )
        found = _hopeful(found)
        if len(found) < 2:
            session.beside.close()
            return False
        few = set(rival.few_layers(found[0].mix))
        session.beside.encode_ahead([{n: r for n, r in p.mix.items() if n in few} for p in (*found, planned)])
        return True

    def rivals(self, budget_bytes: int) -> list[Planned]:
        """The single formats within a budget that are worth all steps; none when none fits.

        They keep the bound on time too. The best effort lets every family take them. Otherwise which family is best is
        measured on a few layers; only the best there, and those close to it, take all steps. An effort that compares none
        takes the one that is expected to lose least.
        """
        found = self._fitting(budget_bytes)
        return self._promising(found) if len(found) > 1 else found

    def _fitting(self, budget_bytes: int) -> list[Planned]:
        """Of every family the single format that fits and is fast enough, those first that are expected to lose least."""
        with self.session.stages.stage("plan"):
            return plans.uniforms(
                self.session, self.table, budget_bytes, self.meta.widest(),
                lambda mix: self.fast_enough(mix, budget_bytes),
            )  # fmt: skip

    def best(self, found: Sequence[Planned], mix: Trial | None = None) -> Trial | None:
        """The one of some plans that measures best, by the same last steps as a mix; None when there is none. mix: the one
        they must beat; a plan whose first layers show that it cannot is given up (`stopped`)."""
        if found and self.session.helpers.busy:
            with self.session.stages.stage("wait for other GPUs"):
                self.session.helpers.wait()
        trials = [trial for p in found if (trial := self._finished(p, mix)) is not None]
        return min(trials, key=lambda t: t.score, default=None)

    def _finished(self, planned: Planned, mix: Trial | None) -> Trial | None:
        """A single format by the same last steps as the mix, or None where it was given up on the way.

        What the work directory has already, from another GPU or an interrupted run, must not decide about that: the first
        layers are looked at in any case.
        """
        session = self.session
        if self._one_by_one or mix is None or mix.losses is None or session.options.level.every_family:
            return self.encoded(planned)
        if (stopped := self._first_look(planned, mix)) is not None:
            self.stopped.append(stopped)
            return None
        session.compile_for(planned.mix)
        names: Collection[str] = ()
        for share, margin in rival.looks(session):
            with session.stages.stage(stage_of(session)):
                part = encode_in_pass(session, planned.mix, self._tick(names), share)
            if len(part.results) == len(names):
                continue  # few layers: no more than at the look before
            names = part.results.keys()
            if len(names) == len(planned.mix):
                break
            with session.stages.stage("measure"):
                found = rival.compared(session, self.scaled(self.table), planned, part.loader(), mix, names)
            log.info(
                "%s: %.6g after %.0f %% of the weights, the mix %.6g; about %.6g in the end",
                planned.label, found.part, 100 * found.share, found.mix_part, found.expected,
            )  # fmt: skip
            if found.expected > margin * mix.score:
                self.stopped.append(found)
                return None
        return self.in_a_pass(planned, names)

    def _first_look(self, planned: Planned, mix: Trial) -> Stopped | None:
        """Why a single format cannot win by a few layers of it and of the mix, or None."""
        if not self.session.keeps_hessians:
            return None  # tensors cannot be encoded on their own
        few = set(rival.few_layers(planned.mix))
        with self.session.stages.stage("compare formats"):
            own, of_mix = self._on_a_few_layers(planned, few), self._on_a_few_layers(mix.planned, few)
        return rival.by_few_layers(self.session, planned, mix, few, own, of_mix)

    def _promising(self, found: list[Planned]) -> list[Planned]:
        """The single formats worth all steps, from what each loses on a few layers.

        Without the Hessians these layers cannot be encoded on their own; then the expected losses say it, by a wide
        margin: both files have one format everywhere, so the loss model errs alike from layer to layer for both.
        """
        session = self.session
        if session.options.level.every_family:
            return found
        found = _hopeful(found)
        if len(found) == 1 or not session.options.level.thorough:
            return found[:1]
        if not session.keeps_hessians:
            log.info("the Hessians were not kept: single formats are compared by their expected losses")
            scores, close = [p.expected_loss for p in found], EXPECTED_MARGIN
        else:
            few = set(rival.few_layers(found[0].mix))
            with session.stages.stage("compare formats"):
                session.beside.wait()
                session.beside.close()
                scores, close = [self._on_a_few_layers(p, few)[1] for p in found], MEASURED_MARGIN
        for planned, score in zip(found, scores, strict=True):
            log.info("%s: about %.6g", planned.label, score)
        return [p for p, s in zip(found, scores, strict=True) if not s > close * min(scores)]

    def _on_a_few_layers(self, planned: Planned, few: set[str]) -> tuple[float, float]:
        """(what a plan measures when the tensors `few` alone are encoded, what it is likely to measure as a whole: its
        expected loss, corrected by that)."""
        part = {n: r for n, r in planned.mix.items() if n in few}
        chosen = [(self.session.units[n], r) for n, r in part.items()]
        self.session.compile_for(part)
        self.session.encoder.encode_all(chosen, lambda unit: None)
        measured = rival.part_score(self.session, part, part)
        expected = plans.expected_loss(self.scaled(self.table), part)
        rest = planned.expected_loss - expected
        return measured, measured + rest * (measured / expected if expected > 0.0 else 1.0)

    def true_loss(self, name: str, recipe: Recipe) -> float | None:
        """The loss of an encoding in the loss model's own terms, or None when it was not made."""
        return self.true_losses.get((name, key_of(recipe)))

    def seconds_to_encode(self, units: Mapping[str, Recipe]) -> float:
        """About how long encoding would take, from what was encoded so far; 0 for methods not seen yet."""
        total = 0.0
        for name, recipe in units.items():
            spent, elements = self.seconds.get(recipe.method, (0.0, 1))
            if (name, key_of(recipe)) not in self.true_losses:
                total += spent / elements * self.session.units[name].elements
        return total / (1 if self.session.machine.on_gpu else self.session.threads)

    def _noted(self, trial: Trial) -> Trial:
        log.info("%s: %d bytes, score %.6g", trial.planned.label, trial.planned.size_bytes, trial.score)
        self.tried.append(trial.to_json())
        return trial


def _hopeful(found: Sequence[Planned]) -> list[Planned]:
    """Those of some plans, the best expected first, that may lose least."""
    return [p for p in found if p.expected_loss <= HOPELESS * found[0].expected_loss]


def without_decompositions(found: Sequence[Candidate]) -> list[Candidate]:
    """Those of some candidates that are stored as bits."""
    return [c for c in found if c.recipe.family != "decomposed"]


def counter(session: Session, times: int = 1) -> Callable[[Unit], None]:
    """What is called with every unit that is done, in a stage that does all units `times` times."""
    total = times * sum(u.elements for u in session.units.values() if u.kept is None)
    return lambda unit: session.stages.tick(unit.elements / max(1, total))
