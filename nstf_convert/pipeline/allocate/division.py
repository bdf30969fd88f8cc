"""`--tp`: only formats of which every rank can hold a part, and what that costs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nstf.errors import UsageError
from nstf.kernels.formats import FormatError, Node
from nstf.kernels.formats.dense import Params as Dense
from nstf.kernels.formats.trellis import SIDE
from nstf.runtime.tensor_parallel import Division
from nstf_convert.pipeline.propose.candidates import Candidate
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.table import Table
from nstf_convert.pipeline.propose.units import Unit


class Divisions:
    """What several numbers of ranks allow. config: the content of the model's config.json.

    Raises UsageError for a model that cannot be divided among them in any format, UnsupportedError where that is unknown.
    """

    def __init__(self, config: Mapping[str, Any], units: Mapping[str, Unit], ranks: Sequence[int]) -> None:
        self._all = [Division(config, n) for n in ranks]
        for name, unit in sorted(units.items()):
            for division in self._all:
                try:
                    division.spans(name, Node("dense", Dense("float32")), unit.shape)
                except FormatError as error:
                    raise UsageError(
                        f"--tp {division.ranks}: {name} of shape {list(unit.shape)} cannot be divided: {error}"
                    ) from error

    def kept(self, unit: Unit, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those of a tensor that can be divided among all numbers of ranks.

        Where rows with rates of their own are cut, as candidates whose rates are dealt out within each rank's rows. Their
        expected loss stays what it was: hundreds of rows of a rank differ among themselves as those of all do.
        """
        return [kept for c in candidates if (kept := self._kept(unit, c)) is not None]

    def _kept(self, unit: Unit, candidate: Candidate) -> Candidate | None:
        if all(d.holds(unit.name, candidate.tree, unit.shape) for d in self._all):
            return candidate
        recipe = candidate.recipe
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
        return replace(candidate, recipe=Recipe(recipe.method, {**recipe.params, "ranges": ranges}))

    def table(self, table: Table, units: Mapping[str, Unit]) -> Table:
        """The table with these alone; a tensor's own values can always be divided."""
        return replace(
            table, candidates={n: self.kept(units[n], found) for n, found in table.candidates.items()}
        )
