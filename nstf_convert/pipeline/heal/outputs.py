"""Healing of models that are no language models: images, speech, text encoders.

The loss is the squared error of the outputs (logits, or the last hidden states) as a share of their energy: what the
windows that choose are scored by. Such models are small beside language models, so the codes of integers are tuned too,
those of factors among them: they stay whole numbers in every step, and the gradient passes the rounding (Bengio et al.
2013). A factor that was rounded after it was fitted learns to make up for the rounding and for what it left out.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nstf_convert.measure import compare_outputs
from nstf_convert.pipeline.calibrate.text import Batch
from nstf_convert.pipeline.heal.run import HealingRun, Settings
from nstf_convert.pipeline.mix import Loader, Measured
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.session import Session

# Inputs of a step. One image says little about the others.
INPUTS = 32
# Models of more weights keep their codes: each tuned one takes 24 bytes.
LARGEST_CODES = 1 << 26
# Of codes: steps of their grid. At 0.1 a small network learnt its inputs by heart, and others lost by it.
RATES = Settings(scale_rate=2e-3, row_rate=2e-3, value_rate=5e-3, code_rate=0.03, windows=INPUTS, patience=3)


class OutputRun(HealingRun):
    """One run on a model's outputs."""

    def __init__(
        self,
        session: Session,
        mix: Mapping[str, Recipe],
        load: Loader,
        minutes: float,
        steps: int | None,
        settings: Settings | None,
        before: Measured,
    ) -> None:
        chosen = settings or RATES
        if sum(u.elements for u in session.units.values()) > LARGEST_CODES:
            chosen = replace(chosen, code_rate=0.0)
        super().__init__(session, mix, load, minutes, steps, chosen, before)
        self.bfloat16, self.student.dtype = False, torch.float32

    @staticmethod
    def _inputs(batches: Sequence[Any]) -> list[Any]:
        return list(batches)

    def _read(self) -> dict[str, int]:
        return {"inputs": self.per_step * self.step}

    def _windows(self) -> list[Any]:
        return self.fit

    def _one_step(self, batch: Any, ahead: Any = (), take: bool = True) -> float:
        self.optimiser.zero_grad(set_to_none=True)
        self.student.set_values(self.values.current())
        given = joined(batch)
        with torch.no_grad():
            target = self.teacher.outputs(**given)
        loss = (self.student.outputs(**given) - target).square().sum() / target.square().sum().clamp_min(
            1e-30
        )
        loss.backward()  # type: ignore[no-untyped-call]
        found = float(loss.detach())
        if take and math.isfinite(found):
            self.optimiser.step()
        return found

    def _score(self, index: int, target: Tensor) -> float:
        out = self.student.outputs(**self.held[index])
        out = out.mean(dim=1) if out.ndim == 3 else out
        return float(compare_outputs(target.to(out.device)[None], out)[1].mean())

    def _recomputing(self) -> AbstractContextManager[Any]:
        return nullcontext()


def joined(batches: Sequence[Batch]) -> Batch:
    """Inputs of one shape as one batch; those of other shapes than the first are left out."""
    first = batches[0]
    alike = [b for b in batches if all(b[n].shape[1:] == v.shape[1:] for n, v in first.items())]
    return {n: torch.cat([b[n] for b in alike]) for n in first}
