"""Whether a single format can still win, from the first part of its layers.

A pass of a single format takes as long as that of the mix, and it rarely wins. So its first part is encoded alone, and
measured with the rest of the model as it was; the same tensors of the mix are measured in the same way. For the rest the
format is expected to lose what the mix lost there, times the ratio of their expected losses: the loss model errs alike for
both, and where the first part shows that it errs against the format, the ratio is corrected, never the other way.
docs/conversion.md has the files that the margin was chosen by.
"""

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.allocate import plan as plans
from nstf_convert.pipeline.calibrate import statistics as calibrations
from nstf_convert.pipeline.mix import Loader
from nstf_convert.pipeline.outcome import Planned, Trial
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.table import Table
from nstf_convert.pipeline.session import Session
from nstf_convert.report.build import layer_of

log = logging.getLogger("nstf")

# Layers that single formats are compared on, spread over the depth: a quarter of them, at most this many. The model's other
# tensors stay as they are.
FEW_LAYERS = 3
# Windows that parts of a model are measured on, at least.
FEWEST_WINDOWS = 4
# When a format is looked at: the share of the weights that are encoded front to back, and how many times what the mix lost
# it may be expected to lose. Of 21 pairs of files that were finished (docs/conversion.md) the expectation was at most 1.09
# times what the format then measured, and mostly less: formats that are stopped lose 1.15 times what the mix does, or more.
LOOKS = ((1 / 6, 1.3), (1 / 3, 1.25))
# How many times what the mix lost a format may be expected to lose by a few layers: where Hessians are kept some of all
# depths, whose tensors are encoded on their own, else so large a share of the weights, the first ones of the pass.
FIRST_LOOK = 2.0
FIRST_SHARE = 1 / 12


@dataclass(frozen=True)
class Stopped:
    """A single format that was given up. share: of the weights, those encoded; part, mix_part: what it and the mix lost
    with these alone, on the windows that choose; mix: what the whole mix lost there; expected: what the whole would lose."""

    encoding: str
    size_bytes: int
    share: float
    part: float
    mix_part: float
    mix: float
    expected: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def looks(session: Session) -> Sequence[tuple[float, float]]:
    """`LOOKS`, before them the first look where it has to be taken in the pass."""
    return LOOKS if session.keeps_hessians else ((FIRST_SHARE, FIRST_LOOK), *LOOKS)


def few_layers(names: Iterable[str]) -> list[str]:
    """The tensors of a quarter of the layers, at most FEW_LAYERS, each from the middle of its part of the depth; all
    tensors where there are no layers to choose from."""
    names = list(names)
    layers = sorted({layer for n in names if (layer := layer_of(n)) is not None})
    if len(layers) < 2:
        return names
    count = min(FEW_LAYERS, max(1, len(layers) // 4))
    kept = {layers[(2 * i + 1) * len(layers) // (2 * count)] for i in range(count)}
    return [n for n in names if layer_of(n) in kept]


def by_few_layers(
    session: Session,
    rival: Planned,
    mix: Trial,
    few: Collection[str],
    own: tuple[float, float],
    of_mix: tuple[float, float],
) -> Stopped | None:
    """Why a single format cannot win beside a finished mix, by the tensors `few`, or None where it may.

    own, of_mix: (what the format and the mix lose when these alone are encoded, each on its own; what that lets expect of
    all).
    """
    (part, whole), (mix_part, whole_mix) = own, of_mix
    if not (math.isfinite(mix.score) and math.isfinite(whole_mix)) or whole_mix <= 0.0:
        return None  # nothing to compare with: the format is finished
    total = sum(session.units[n].elements for n in rival.mix)
    share = sum(session.units[n].elements for n in few) / max(1, total)
    expected = mix.score * whole / whole_mix
    log.info(
        "%s: %.6g by a few layers, the mix %.6g; about %.6g in the end", rival.label, part, mix_part, expected
    )
    if expected <= FIRST_LOOK * mix.score:
        return None
    return Stopped(rival.label, rival.size_bytes, share, part, mix_part, mix.score, expected)


def compared(
    session: Session, table: Table, rival: Planned, load: Loader, mix: Trial, names: Collection[str]
) -> Stopped:
    """What a single format is expected to lose, of which the tensors `names` are encoded (`load` gives them). mix: a
    finished one."""
    part = part_score(session, rival.mix, names, load)
    mix_part = part_score(session, mix.planned.mix, names, mix.load or mixes.encoder_loader(session))
    whole = mix.measured.on(few_windows(session))
    own, others = _split(table, rival.mix, names), _split(table, mix.planned.mix, names)
    expected = expected_score(part, mix_part, whole, own, others) * (
        mix.score / whole if whole > 0.0 else 1.0
    )
    total = sum(session.units[n].elements for n in rival.mix)
    share = sum(session.units[n].elements for n in names) / max(1, total)
    return Stopped(rival.label, rival.size_bytes, share, part, mix_part, mix.score, expected)


def expected_score(
    part: float, mix_part: float, mix: float, losses: tuple[float, float], mix_losses: tuple[float, float]
) -> float:
    """What the rival of a mix will measure. part, mix_part: what both measure with their first tensors; mix: with all;
    losses, mix_losses: (of the first tensors, of the rest), as the loss model expects them."""
    (first, rest), (mix_first, mix_rest) = losses, mix_losses
    if mix_rest <= 0.0 or mix_first <= 0.0:
        return part
    ratio = rest / mix_rest
    if first > 0.0 and mix_part > 0.0:
        ratio *= min(1.0, (part / mix_part) / (first / mix_first))
    return part + max(0.0, mix - mix_part) * ratio


def part_score(
    session: Session, mix: Mapping[str, Recipe], names: Collection[str], load: Loader | None = None
) -> float:
    """What is lost on a few of the windows that choose when only these tensors of a mix are encoded. load: gives them (None:
    each as encoded on its own)."""
    plain = load.load if isinstance(load, mixes.NamedLoader) else load  # the name is that of the whole mix
    part = {n: mix[n] for n in names if n in mix}
    return mixes.measure_part(session, part, few_windows(session), plain)


def few_windows(session: Session) -> int:
    """How many windows parts of a model are measured on: half of those that choose tell formats apart far below the margins
    here. The first ones, which are of all datasets in turn: at least one of each."""
    file = session.calibration
    if file is None:
        return 0
    domains = calibrations.domains(file, "held_out")
    return max(FEWEST_WINDOWS, len(set(domains)), len(domains) // 2)


def _split(table: Table, mix: Mapping[str, Recipe], names: Collection[str]) -> tuple[float, float]:
    """(expected loss of some tensors, of the others)."""
    first = {n: r for n, r in mix.items() if n in names}
    rest = {n: r for n, r in mix.items() if n not in names}
    return plans.expected_loss(table, first), plans.expected_loss(table, rest)
