"""What the steps of a conversion hand on: a planned mix, a measured one, and the one that is written."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nstf_convert.pipeline.mix import Loader, Measured
from nstf_convert.pipeline.propose.recipe import Recipe


@dataclass(frozen=True)
class Planned:
    """A mix with its expected loss and its size on disk. label: what it is called in the report. price: what a byte more
    would take off the loss, nats; 0 where nothing was planned."""

    mix: Mapping[str, Recipe]
    expected_loss: float
    size_bytes: int
    label: str
    price: float = 0.0


@dataclass(frozen=True)
class Trial:
    """A mix that was encoded and measured on the windows that choose.

    load: gives its tensors (None: each as encoded on its own). losses: by name, of tensors that were encoded for what
    their compressed predecessors give them.
    """

    planned: Planned
    measured: Measured
    load: Loader | None = None
    losses: Mapping[str, float] | None = None

    @property
    def score(self) -> float:
        return self.measured.score

    def to_json(self) -> dict[str, Any]:
        """As the report lists it."""
        key = "mean_kl" if hasattr(self.measured.accuracy, "mean_kl") else "relative_l2"
        return {
            "name": self.planned.label,
            "size_bytes": self.planned.size_bytes,
            key: self.score,
            "expected_loss": self.planned.expected_loss,
        }


@dataclass(frozen=True)
class SearchFacts:
    """What the report says. ended: `no moves are left`, `time`, `steps`, or `not asked for`."""

    minutes: float | None
    steps_allowed: int | None
    steps: int = 0
    accepted: int = 0
    seconds: float = 0.0
    ended: str = "not asked for"
    moves: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Final:
    """The mix that is written.

    load: gives its tensors (None: as the encoder made them). measured: on the windows that choose; reported: on the
    windows that do not. uniform: the best single format, measured and reported on the same windows. steps: what was
    done after the plan, with the score before and after; healing: its facts.
    """

    planned: Planned
    measured: Measured | None = None
    reported: Measured | None = None
    load: Loader | None = None
    uniform: Trial | None = None
    uniform_reported: Measured | None = None
    search: SearchFacts | None = None
    steps: tuple[Mapping[str, Any], ...] = ()
    losses: Mapping[str, float] | None = None
    healing: Mapping[str, Any] | None = None

    @property
    def is_uniform(self) -> bool:
        return self.uniform is not None and self.planned.mix == self.uniform.planned.mix
