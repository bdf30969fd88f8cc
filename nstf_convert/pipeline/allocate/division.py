"""`--tp`: only formats of which every rank can hold a part, and what that costs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nstf.errors import UsageError
from nstf.kernels.formats import FormatError, Node
from nstf.kernels.formats.dense import Params as Dense
from nstf.runtime.tensor_parallel import Division
from nstf_convert.pipeline.propose.candidates import Candidate
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
        """Those of a tensor that can be divided among all numbers of ranks."""
        return [c for c in candidates if all(d.holds(unit.name, c.tree, unit.shape) for d in self._all)]

    def table(self, table: Table, units: Mapping[str, Unit]) -> Table:
        """The table with these alone; a tensor's own values can always be divided."""
        return replace(
            table, candidates={n: self.kept(units[n], found) for n, found in table.candidates.items()}
        )
