"""Measured sensitivities: groups of tensors are perturbed one group at a time, and their expected losses corrected.

The loss model (half of tr(dW H dW^T), weighted) is right about the tensors of one kind, and wrong by a different
factor for each kind: it sees second order only, and the sensitivities are of few tokens. A probe stores one group
coarsely, everything else as it is, and measures the KLD. measured / expected is then the group's factor, shrunk
towards the factor all groups share by what its standard error is worth (DerSimonian and Laird, 1986, on logarithms).
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.choose import Planned, Table
from nstf_convert.pipeline.recipe import Recipe, describe
from nstf_convert.pipeline.steps import Run
from nstf_convert.pipeline.units import Unit
from nstf_convert.report.build import layer_of

log = logging.getLogger("nstf")

# A perturbation of this many nats is far above rounding noise and still where losses add up.
TARGET_NATS = 0.03
# The same for models whose loss is a squared relative error.
TARGET_SQUARED_ERROR = 0.003
# A probe costs one pass over the windows that choose.
MAX_PROBES = 16
# Probes must be quick to encode.
METHODS = ("int_grid",)

CLASSES = {
    "q": "q and k", "k": "q and k", "v": "v and o", "o": "v and o", "qkv": "attention",
    "gate": "gate and up", "up": "gate and up", "gate_up": "gate and up", "down": "down",
}  # fmt: skip


@dataclass(frozen=True)
class Probe:
    """One group's probe. expected: by the loss model, of the probe's own encoding; measured: nats (or squared relative
    error); windows: the same by window; error: relative standard error of `measured`, see `paired`; factor: what the
    group's losses are multiplied by.
    """

    group: str
    members: tuple[str, ...]
    encoding: str
    expected: float
    measured: float
    error: float
    factor: float = 1.0
    windows: tuple[float, ...] = ()

    @property
    def ratio(self) -> float:
        return self.measured / self.expected

    def to_json(self) -> dict[str, Any]:
        """As the report lists it: how many tensors instead of their names."""
        facts = {**asdict(self), "members": len(self.members), "ratio": self.ratio}
        del facts["windows"]
        return facts


def class_of(unit: Unit) -> str:
    """The tensors whose losses the model misjudges alike: tables, attention, feed-forward, other roles by name."""
    if "embedding" in unit.uses or "head" in unit.uses:
        return "table"
    if unit.role in ("gate", "up", "down", "gate_up", "expert_stack"):
        return "feed-forward"
    if unit.role in ("q", "k", "v", "o", "qkv"):
        return "attention"
    return unit.role


def groups(units: Sequence[Unit], most: int = MAX_PROBES) -> dict[str, tuple[str, ...]]:
    """The finest of a few partitions with at most `most` groups (or the coarsest): group -> names of tensors."""
    depth = 1 + max((layer_of(u.name) or 0 for u in units), default=0)

    def third(unit: Unit) -> str:
        layer = layer_of(unit.name)
        if layer is None:
            return ""
        part = 3 * layer // depth
        first, last = -(-part * depth // 3), -(-(part + 1) * depth // 3) - 1
        return f", layers {first}-{last}" if first < last else f", layer {first}"

    def kind(unit: Unit) -> str:
        return CLASSES.get(unit.role, unit.role) if class_of(unit) != "table" else unit.role

    schemes: tuple[Callable[[Unit], str], ...] = (
        lambda u: u.name,
        lambda u: f"{u.role}{third(u)}",
        lambda u: f"{kind(u)}{third(u)}",
        lambda u: f"{class_of(u)}{third(u)}",
        class_of,
    )
    found: dict[str, tuple[str, ...]] = {}
    for scheme in schemes:
        members: dict[str, list[str]] = {}
        for unit in sorted(units, key=lambda u: u.name):
            members.setdefault(scheme(unit), []).append(unit.name)
        found = {n: tuple(m) for n, m in sorted(members.items())}
        if len(found) <= most:
            break
    return found


def run_probes(run: Run) -> tuple[Probe, ...]:
    """Measures every group and corrects the run's table. Nothing is done for models that cannot be run."""
    job = run.job
    if job.model is None or job.calibration is None:
        return ()
    target = TARGET_NATS if job.calibration.metadata["language"] else TARGET_SQUARED_ERROR
    members = groups([job.units[n] for n in run.table.candidates])
    with job.stages.stage("probes"):
        found = [p for n, m in members.items() if (p := _probe(run, n, m, target)) is not None]
    probes = shrunk(paired(found))
    run.table = run.table.calibrated({n: p.factor for p in probes for n in p.members})
    for p in probes:
        log.info(
            "probe of %s: expected %.4g, measured %.4g, factor %.3f",
            p.group,
            p.expected,
            p.measured,
            p.factor,
        )
    return probes


def _probe(run: Run, group: str, members: tuple[str, ...], target: float) -> Probe | None:
    """The measurement of one group; None when no format perturbs it measurably."""
    recipe = probe_recipe(run.table, members, target)
    if recipe is None:
        return None
    mix = dict.fromkeys(members, recipe)
    run.encode(Planned(mix, 0.0, 0, f"probe of {group}"))
    expected = sum(run.true_loss(n, recipe) for n in members)
    measured = mixes.measure(run.job, mix)
    if not (expected > 0.0 and measured.loss > 0.0 and math.isfinite(expected * measured.loss)):
        return None
    first = run.job.units[members[0]]
    encoding = describe(mixes.tree_of(first, recipe))
    return Probe(
        group, members, encoding, expected, measured.loss, measured.loss_error, windows=tuple(measured.losses)
    )


def probe_recipe(table: Table, members: Sequence[str], target: float) -> Recipe | None:
    """The quick format every member has whose expected loss is nearest to the target, as a ratio."""
    best: tuple[float, Recipe] | None = None
    for candidate in table.candidates[members[0]]:
        recipe = candidate.recipe
        found = [table.find(n, recipe) for n in members]
        total = sum(c.loss for c in found if c is not None)
        if recipe.method not in METHODS or None in found or total <= 0.0:
            continue
        distance = abs(math.log(total / target))
        if best is None or distance < best[0]:
            best = (distance, recipe)
    return None if best is None else best[1]


def paired(probes: Sequence[Probe]) -> list[Probe]:
    """The probes with the errors that matter between groups: what is left when every window's difficulty is taken out.

    A window's difficulty is the mean over groups of its loss in units of the group's own mean. Hard windows are hard
    for all groups, which is most of the variance between windows and nothing about the groups.
    """
    count = len(probes[0].windows) if probes else 0
    if len(probes) < 2 or count < 2 or any(len(p.windows) != count for p in probes):
        return list(probes)
    shares = [[v / p.measured for v in p.windows] for p in probes]
    difficulty = [sum(column) / len(shares) for column in zip(*shares, strict=True)]
    out = []
    for probe, share in zip(probes, shares, strict=True):
        rest = sum((s - d) ** 2 for s, d in zip(share, difficulty, strict=True)) / (count - 1)
        # The group's own part in the mean hides that share of its residual.
        own = len(probes) / (len(probes) - 1)
        out.append(replace(probe, error=own * math.sqrt(rest / count)))
    return out


def shrunk(probes: Sequence[Probe]) -> tuple[Probe, ...]:
    """The probes with their factors: each ratio moved towards the common one by its share of the noise."""
    if not probes:
        return ()
    logs = [math.log(p.ratio) for p in probes]
    precision = [1.0 / max(p.error, 1e-3) ** 2 for p in probes]
    total = sum(precision)
    common = sum(w * v for w, v in zip(precision, logs, strict=True)) / total
    spread = sum(w * (v - common) ** 2 for w, v in zip(precision, logs, strict=True))
    scale = total - sum(w * w for w in precision) / total
    between = max(0.0, (spread - (len(logs) - 1)) / scale) if scale > 0 else 0.0
    # The common factor again, now that the groups are known to differ.
    weight = [1.0 / (between + 1.0 / w) for w in precision]
    common = sum(w * v for w, v in zip(weight, logs, strict=True)) / sum(weight)
    out = []
    for probe, value, w in zip(probes, logs, precision, strict=True):
        own = between / (between + 1.0 / w)
        out.append(replace(probe, factor=math.exp(own * value + (1 - own) * common)))
    return tuple(out)
