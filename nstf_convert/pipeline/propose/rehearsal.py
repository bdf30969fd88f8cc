"""Makes a process ready for candidates before there is a calibration: kernels compiled and loaded, libraries opened."""

from typing import Any

import torch
from torch import Tensor

from nstf_convert.pipeline.calibrate.hessians import Gathered
from nstf_convert.pipeline.propose.methods import method_families
from nstf_convert.pipeline.propose.units import Statistics, Unit
from nstf_convert.pipeline.session import Session

# Larger tensors take long, and need no kernels of their own.
MOST_ELEMENTS = 1 << 24


class Forgetful:
    """Takes the place of a work directory, and keeps nothing."""

    def find(self, key: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Nothing."""

    def find_metadata(self, key: str) -> dict[str, Any] | None:
        """Nothing."""

    def put(self, key: str, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
        """Drops a result."""


def rehearse(session: Session) -> list[str]:
    """Works out the candidates of a matrix of every shape for made-up statistics, and drops them. The names of these
    matrices."""
    session.source, session.units = session.checkpoint.get, session.found_units()
    chosen = list({u.inner_shape: u for u in session.units.values() if _fits(u)}.values())
    session.statistics = Statistics(_made_up(chosen, session.device), session.device)
    encoder = session.encoder_for("rehearsal", Forgetful())
    allowed = method_families(session.options.formats, session.options.bounds_time)
    return list(encoder.each(chosen, lambda u: encoder.candidates(u, allowed), lambda u: None))


def _fits(unit: Unit) -> bool:
    linear = tuple(unit.uses) == ("linear",) and unit.lead == 1
    return unit.kept is None and linear and unit.elements <= MOST_ELEMENTS


def _made_up(units: list[Unit], device: torch.device) -> Gathered:
    """Statistics of matrices: inputs of unlike size that know little of each other."""
    tensors, entries = {}, {}
    for unit in units:
        rows, cols = unit.inner_shape[0], unit.elements // unit.inner_shape[0]
        inputs = torch.linspace(0.1, 1.0, cols, device=device)
        tensors[f"hessian:{unit.name}"] = torch.diag(inputs) + 0.01 * torch.outer(inputs, inputs)
        tensors[f"sensitivity:{unit.name}"] = torch.linspace(0.5, 1.0, rows, device=device)
        entries[unit.name] = {"weights": [unit.name]}
    return Gathered(tensors, {"hessians": entries})
