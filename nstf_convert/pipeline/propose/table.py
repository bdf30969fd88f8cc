"""The candidates of all tensors, with what is known of their losses."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nstf_convert.pipeline.calibrate.share import CANDIDATES, FEW_BITS, NEEDED, Pieces, SharedStep, Sharer
from nstf_convert.pipeline.propose.candidates import Candidate
from nstf_convert.pipeline.propose.methods import is_slow, method_families
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import Unit, fused_groups
from nstf_convert.pipeline.session import Session
from nstf_convert.pipeline.store.workdir import content_key

__all__ = [
    "Table",
    "at_few_bits",
    "build_table",
    "is_slow",
    "key_of",
    "leave_at_few_bits",
    "leave_candidates",
]

Work = Callable[[Unit], Sequence[Candidate]]


@dataclass(frozen=True)
class Table:
    """The candidates of every tensor that may change, by name. fused: the group of tensors that must be stored alike.
    known: what plans have made of the table, by what it was made for."""

    candidates: Mapping[str, Sequence[Candidate]]
    fused: Mapping[str, str] = field(default_factory=dict)
    known: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    _by_recipe: dict[str, dict[Recipe, Candidate]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def with_more(self, name: str, extra: Sequence[Candidate]) -> "Table":
        """The table with further candidates for one tensor."""
        return replace(self, candidates={**self.candidates, name: [*self.candidates[name], *extra]})

    def replaced(self, losses: Mapping[str, tuple[Recipe, float]]) -> "Table":
        """The table with the expected loss of some candidates replaced by the one found by encoding."""
        out = dict(self.candidates)
        for name, (recipe, value) in losses.items():
            out[name] = [
                replace(c, loss=value, exact=True) if c.recipe == recipe else c for c in self.candidates[name]
            ]
        return replace(self, candidates=out)

    def find(self, name: str, recipe: Recipe) -> Candidate | None:
        """The candidate of a tensor with this recipe."""
        if name not in self._by_recipe:  # of equal recipes the first
            self._by_recipe[name] = {c.recipe: c for c in reversed(self.candidates[name])}
        return self._by_recipe[name].get(recipe)


def build_table(session: Session, allowed: set[str], progress: Any) -> Table:
    """Candidates of every tensor; calibrated ones first, since they set the scale for the others."""
    units = [u for u in session.units.values() if u.kept is None]
    known = [u for u in units if session.statistics.calibrated(u)]
    found = _shared(
        session, known, allowed, CANDIDATES, {}, lambda u: session.encoder.candidates(u, allowed), progress
    )
    # Methods are asked once more when a plan is made, where the effort is not the least.
    if not session.options.level.thorough:
        session.beside.keep_one()
    signals = sorted(session.encoder.signal(u, allowed) for u in known)
    if signals:
        session.statistics.set_typical(signals[len(signals) // 2])
    rest = [u for u in units if u.name not in found]
    found |= session.encoder.each(rest, lambda u: session.encoder.candidates(u, allowed), progress)
    return Table(found, fused_groups(units) if session.options.fuse else {})


def at_few_bits(
    session: Session, units: Sequence[Unit], allowed: set[str], bits: Mapping[str, float]
) -> dict[str, Sequence[Candidate]]:
    """What methods propose once a plan gives tensors so few bits (`Encoder.at_few_bits`), by name."""

    def work(unit: Unit) -> Sequence[Candidate]:
        return session.encoder.at_few_bits(unit, allowed, bits[unit.name])

    given = {u.name: bits[u.name] for u in units}
    known = [u for u in units if session.statistics.calibrated(u)]
    found = _shared(session, known, allowed, FEW_BITS, given, work, lambda unit: None)
    return found | session.encoder.each([u for u in units if u.name not in found], work, lambda unit: None)


def _shared(
    session: Session,
    units: Sequence[Unit],
    allowed: set[str],
    step: str,
    facts: Mapping[str, Any],
    work: Work,
    progress: Any,
) -> dict[str, Sequence[Candidate]]:
    """`work` for calibrated tensors; where all Hessians are at hand, helpers do a part. facts: what the step needs."""
    encoder, found = session.encoder, dict[str, Sequence[Candidate]]()
    helpers = session.helpers if session.helpers.any else session.beside
    # By the time of a plan other devices may be at whole mixes, which nothing so short waits for.
    free = helpers.any and (step == CANDIDATES or not helpers.busy)
    if units and free and session.keeps_hessians:
        identity = content_key(calibration=session.calibration_fingerprint(), facts=dict(facts))
        tokens = session.tokens_per_batch
        sharing = Sharer(session.work, identity, tokens, allowed, helpers.start_all, helpers.wait)
        pieces = sharing.begin(step, {}, dict(facts))
        found |= _taken(session, units, work, pieces, progress)
        session.beside.shut_out(pieces)
        if len(found) < len(units):
            pieces.wait()
        session.beside.keep_ready()  # the others' memory is this process's again
    # What was worked out elsewhere is found.
    found |= encoder.each([u for u in units if u.name not in found], work, progress)
    return dict(sorted(found.items()))


def leave_candidates(session: Session, shared: SharedStep) -> None:
    """In a helper's process: works out candidates of calibrated tensors."""
    allowed = method_families(session.options.formats, session.options.bounds_time)
    pieces = Pieces(session.work, shared, allowed)
    units = [u for u in session.units.values() if u.kept is None and session.statistics.calibrated(u)]
    if not shared.door or pieces.take(shared.door):
        _taken(session, units, lambda u: session.encoder.candidates(u, allowed), pieces, lambda unit: None)


def leave_at_few_bits(session: Session, shared: SharedStep) -> None:
    """In a helper's process: works out what methods propose at the bits of a first plan."""
    allowed = method_families(session.options.formats, session.options.bounds_time)
    pieces = Pieces(session.work, shared, allowed)
    needed = pieces.find(NEEDED)
    if needed is None or (shared.door and not pieces.take(shared.door)):
        return
    bits = needed[1]
    units = [u for u in session.units.values() if u.name in bits and session.statistics.calibrated(u)]
    _taken(
        session,
        units,
        lambda u: session.encoder.at_few_bits(u, allowed, bits[u.name]),
        pieces,
        lambda unit: None,
    )


def _taken(
    session: Session, units: Sequence[Unit], work: Work, pieces: Pieces, progress: Any
) -> dict[str, Sequence[Candidate]]:
    """What this process has worked out, by tensor: of the Hessians that it took."""
    own: dict[str, bool] = {}  # a Hessian is the work of one thread

    def taken(unit: Unit) -> Sequence[Candidate] | None:
        group = session.statistics.group_of(unit)
        if group not in own:
            own[group] = pieces.take(group)
        return work(unit) if own[group] else None

    def done(unit: Unit) -> None:
        if own[session.statistics.group_of(unit)]:
            progress(unit)

    found = session.encoder.each(units, taken, done)
    return {name: candidates for name, candidates in found.items() if candidates is not None}


def key_of(recipe: Recipe) -> str:
    """A recipe as a dictionary key."""
    return recipe.key
