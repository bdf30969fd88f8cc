"""What sizes, speeds and losses there are to choose from: plans at several sizes under every preference, none encoded."""

from dataclasses import replace
from typing import Any

from nstf.errors import BudgetError
from nstf_convert.options import PREFERENCES
from nstf_convert.pipeline.allocate import bounds
from nstf_convert.pipeline.improve.run import Run
from nstf_convert.pipeline.propose.methods import on_request
from nstf_convert.pipeline.propose.table import Table

# Bits per weight, everything in the file counted, at which plans are made.
BITS = (2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0, 7.0, 8.0)


def frontier(run: Run) -> dict[str, Any]:
    """{"targets": [names], "points": [{"prefer", "size_bytes", "bits_per_weight", "expected_loss", "products_seconds",
    "rates"}]}: seconds and tokens a second (None where not known) have one entry a target."""
    session, timing = run.session, run.timing
    if timing is None:
        raise ValueError("a frontier needs prices in time")
    parameters = sum(u.elements for u in session.units.values())
    widest, points = run.meta.widest(), []
    for prefer in PREFERENCES:
        own = timing.preferring(prefer)
        table = run.table if own.bounds_time or session.options.formats else _today(run.table)
        for bits in BITS:
            try:
                planned = bounds.plan(own, table, int(parameters * bits / 8), widest, None, exact=False)
            except BudgetError:
                continue
            points.append(
                {
                    "prefer": prefer,
                    "size_bytes": planned.size_bytes,
                    "bits_per_weight": 8 * planned.size_bytes / parameters,
                    "expected_loss": planned.expected_loss,
                    "products_seconds": own.totals(planned.mix),
                    "rates": own.rates(planned.mix),
                }
            )
    return {"targets": [t.name for t in timing.targets], "points": points}


def _today(table: Table) -> Table:
    """The table without formats that only a bound on time brings in."""
    kept = {n: [c for c in found if not on_request(c.recipe.method)] for n, found in table.candidates.items()}
    return replace(table, candidates=kept)
