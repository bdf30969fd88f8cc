"""`--tp`: only formats of which every rank can hold a part, and what that costs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nstf.errors import UsageError
from nstf.kernels.formats import FormatError, Node, rotated
from nstf.kernels.formats.dense import Params as Dense
from nstf.kernels.formats.trellis import SIDE
from nstf.quantizers.rounding.sections import dealt_out
from nstf.runtime.tensor_parallel import Division
from nstf_convert.pipeline.propose.candidates import Candidate, price
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.table import Table
from nstf_convert.pipeline.propose.units import Unit

# Ranks have parts of different sizes where those of the same size lose so many times as much.
EVEN = 1.02
# What candidates of a tensor, all of one method, are expected to lose, by a closed form.
Losses = Callable[[Unit, Sequence[Recipe]], Sequence[float]]


class Divisions:
    """What several numbers of ranks allow. config: the content of the model's config.json.

    Raises UsageError for a model that cannot be divided among them in any format, UnsupportedError where that is unknown.
    """

    def __init__(
        self, config: Mapping[str, Any], units: Mapping[str, Unit], ranks: Sequence[int], losses: Losses
    ) -> None:
        self._losses = losses
        self._all = [Division(config, n) for n in ranks]
        for name, unit in sorted(units.items()):
            for division in self._all:
                try:
                    division.spans(name, Node("dense", Dense("float32")), unit.shape)
                except FormatError as error:
                    raise UsageError(
                        f"`tp` {division.ranks}: {name} of shape {list(unit.shape)} cannot be divided: {error}"
                    ) from error

    def kept(self, unit: Unit, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those of a tensor that can be divided among all numbers of ranks.

        Where rows with rates of their own are cut, as candidates whose rates are dealt out within each rank's rows: as many
        tiles of each rate for every rank, so that none holds more bytes than another, or only whole tiles where that would
        lose more (EVEN): the rows that matter most may all be those of one rank, as frequent words in a vocabulary are.
        Where a rank's columns are no whole blocks of a rotation, in smaller blocks.
        """
        found = [(c, self._kept(unit, c)) for c in candidates]
        losses: dict[tuple[int, int], float] = {}
        for method in dict.fromkeys(c.recipe.method for c, _ in found):
            places = [
                at
                for at, (c, own) in enumerate(found)
                if c.recipe.method == method and own and own != [c.recipe]
            ]
            wanted = [(at, i, r) for at in places for i, r in enumerate([found[at][0].recipe, *found[at][1]])]
            if wanted:
                made = self._losses(unit, [recipe for *_, recipe in wanted])
                losses |= {(at, i): lost for (at, i, _), lost in zip(wanted, made, strict=True)}
        out = []
        for at, (candidate, own) in enumerate(found):
            if own == [candidate.recipe]:
                out.append(candidate)
            elif own:
                free, lost = losses[at, 0], [losses[at, i] for i in range(1, len(own) + 1)]
                best = next(i for i, each in enumerate(lost) if each <= EVEN * min(lost))
                grown = lost[best] / free if free > 0 else 1.0
                out.append(Candidate(own[best], *price(unit, own[best]), candidate.loss * grown))
        return out

    def _kept(self, unit: Unit, candidate: Candidate) -> list[Recipe]:
        """The candidate's own recipe, or others in its place, the preferred one first: with rates that are dealt out, or
        with smaller blocks. [] where there is none."""
        recipe = candidate.recipe
        if self._held(unit, candidate.tree):
            return [recipe]
        if candidate.tree.kind == rotated.KIND:
            for block in (b for b in rotated.BLOCKS if b < candidate.tree.params.block_in):
                turned = Recipe(recipe.method, {**recipe.params, "block": block})
                if self._held(unit, price(unit, turned)[0]):
                    return [turned]
        if recipe.method != "trellis" or "sections" not in recipe.params or unit.permute is not None:
            return []
        ranges = math.lcm(*(d.ranks for d in self._all))
        each, left = divmod(unit.shape[0], ranges)
        try:
            spans = [s for d in self._all for s in d.spans(unit.name, candidate.tree, unit.shape) or ()]
        except FormatError:
            return []
        if left or each % SIDE or any(s.axis or s.start % each or s.stop % each for s in spans):
            return []
        free = [(int(q), int(n)) for q, n in recipe.params["sections"]]
        # One rate for all rows is a candidate of its own.
        even = [sections for sections in [dealt_out(free, ranges)] if len(sections) > 1]
        made: list[dict[str, Any]] = [{"sections": [list(s) for s in sections]} for sections in even]
        made += [{"even": False}] if all(n % SIDE == 0 for _, n in free) else []
        return [Recipe(recipe.method, {**recipe.params, **own, "ranges": ranges}) for own in made]

    def _held(self, unit: Unit, tree: Node) -> bool:
        """Whether a tensor stored so can be divided among all numbers of ranks."""
        return all(d.holds(unit.name, tree, unit.shape) for d in self._all)

    def table(self, table: Table, units: Mapping[str, Unit]) -> Table:
        """The table with these alone; a tensor's own values can always be divided."""
        return replace(
            table, candidates={n: self.kept(units[n], found) for n, found in table.candidates.items()}
        )
