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
        tiles of each rate for every rank, so that none holds more bytes than another. Their expected loss grows by what that
        takes from the rows that matter most, which may all be those of one rank. Where a rank's columns are no whole blocks
        of a rotation, in smaller blocks.
        """
        found = [(c, self._kept(unit, c)) for c in candidates]
        moved = [at for at, (c, k) in enumerate(found) if k is not None and k is not c.recipe]
        grown: dict[int, float] = {}
        for method in dict.fromkeys(found[at][0].recipe.method for at in moved):
            places = [at for at in moved if found[at][0].recipe.method == method]
            wanted = [r for at in places for r in (found[at][0].recipe, found[at][1]) if r is not None]
            losses = self._losses(unit, wanted)
            grown |= {at: _ratio(*losses[2 * i : 2 * i + 2]) for i, at in enumerate(places)}
        out = []
        for at, (candidate, recipe) in enumerate(found):
            if recipe is not None and recipe is not candidate.recipe:
                candidate = Candidate(recipe, *price(unit, recipe), candidate.loss * grown[at])
            if recipe is not None:
                out.append(candidate)
        return out

    def _kept(self, unit: Unit, candidate: Candidate) -> Recipe | None:
        """The candidate's own recipe, one with rates that are dealt out or with smaller blocks, or None."""
        recipe = candidate.recipe
        if self._held(unit, candidate.tree):
            return recipe
        if candidate.tree.kind == rotated.KIND:
            for block in (b for b in rotated.BLOCKS if b < candidate.tree.params.block_in):
                turned = Recipe(recipe.method, {**recipe.params, "block": block})
                if self._held(unit, price(unit, turned)[0]):
                    return turned
        if recipe.method != "trellis" or "sections" not in recipe.params or unit.permute is not None:
            return None
        ranges = math.lcm(*(d.ranks for d in self._all))
        each, left = divmod(unit.shape[0], ranges)
        try:
            spans = [s for d in self._all for s in d.spans(unit.name, candidate.tree, unit.shape) or ()]
        except FormatError:
            return None
        if left or each % SIDE or any(s.axis or s.start % each or s.stop % each for s in spans):
            return None
        sections = dealt_out([(int(q), int(n)) for q, n in recipe.params["sections"]], ranges)
        if len(sections) == 1:
            return None  # one rate for all rows is a candidate of its own
        dealt = {"sections": [list(section) for section in sections], "ranges": ranges}
        return Recipe(recipe.method, {**recipe.params, **dealt})

    def _held(self, unit: Unit, tree: Node) -> bool:
        """Whether a tensor stored so can be divided among all numbers of ranks."""
        return all(d.holds(unit.name, tree, unit.shape) for d in self._all)

    def table(self, table: Table, units: Mapping[str, Unit]) -> Table:
        """The table with these alone; a tensor's own values can always be divided."""
        return replace(
            table, candidates={n: self.kept(units[n], found) for n, found in table.candidates.items()}
        )


def _ratio(free: float, ranked: float) -> float:
    """By what the expected loss grows."""
    return ranked / free if free > 0 else 1.0
