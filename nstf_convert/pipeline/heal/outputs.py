"""Healing of models that are no language models: images, speech, text encoders.

The loss is the squared error of the outputs (logits, or the last hidden states) as a share of their energy: what the
windows that choose are scored by. Such models are small beside language models, so the codes of integers are tuned too,
those of factors among them: they stay whole numbers in every step, and the gradient passes the rounding (Bengio et al.
2013). A factor that was rounded after it was fitted learns to make up for the rounding and for what it left out.

A step goes through its inputs in parts of one shape each, as many at a time as their activations fit in ACTIVATION_BYTES
or in what the memory bound leaves; the gradients add up. One input is the least.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nstf_convert.measure import compare_outputs
from nstf_convert.pipeline.calibrate.one_input import Storages, never
from nstf_convert.pipeline.calibrate.text import Batch
from nstf_convert.pipeline.heal.run import HealingRun, Settings
from nstf_convert.pipeline.heal.sizes import ACTIVATION_BYTES, INPUTS, LARGEST_CODES
from nstf_convert.pipeline.mix import Loader, Measured
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.session import Session

log = logging.getLogger("nstf")

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
        # Bytes that one input of a shape keeps for its backward pass.
        self._kept: dict[Shape, int] = {}
        self._said_fewer = False

    @staticmethod
    def _inputs(batches: Sequence[Any]) -> list[Any]:
        return list(batches)

    def _read(self) -> dict[str, int]:
        return {"inputs": self.per_step * self.step}

    def _windows(self) -> list[Any]:
        return self.fit

    def _pass_over(self, windows: Sequence[Any]) -> None:
        """Nothing: a step's targets are computed by themselves."""

    def _one_step(self, batch: Any, ahead: Any = (), take: bool = True) -> float:
        self.optimiser.zero_grad(set_to_none=True)
        parts = [part for group in alike(batch) for part in self._parts(group)]
        with torch.no_grad():
            targets = [self.teacher.outputs(**part) for part in parts]
        energy = torch.stack([t.square().sum() for t in targets]).sum().clamp_min(1e-30)
        found = 0.0
        for part, target in zip(parts, targets, strict=True):
            self.student.set_values(self.values.current())
            loss = (self.student.outputs(**part) - target).square().sum() / energy
            loss.backward()  # type: ignore[no-untyped-call]
            found += float(loss.detach())
        if take and math.isfinite(found):
            self.optimiser.step()
        return found

    def _parts(self, group: Sequence[Batch]) -> Iterator[Batch]:
        """Inputs of one shape, joined as far as their activations fit."""
        room = min(ACTIVATION_BYTES, self.session.machine.activation_bytes)
        together = len(group)
        if together > 1:
            each = max(1, self._bytes_of(group[0]))
            together = max(1, room // each)
            if together < min(len(group), ACTIVATION_BYTES // each) and self.session.machine.short:
                self._say_fewer(together, room)
        for start in range(0, len(group), together):
            some = group[start : start + together]
            yield {n: torch.cat([b[n] for b in some]) for n in group[0]}

    def _say_fewer(self, together: int, room: int) -> None:
        if not self._said_fewer:
            self._said_fewer = True
            log.warning(
                "healing: %d inputs at a time fit %.1f GiB of activations, less than there is room for usually: gradients "
                "are added in another order than with more memory, and the file may differ",
                together, room / 2**30,
            )  # fmt: skip

    def _bytes_of(self, one: Batch) -> int:
        """What the backward pass of another input like this one needs: that of two, less that of one, which has the weights
        as well."""
        shape = shape_of(one)
        if shape not in self._kept:
            room = self.session.machine.activation_bytes
            alone, weights = self._saved(one), 4 * sum(u.elements for u in self.session.units.values())
            if alone - weights > min(ACTIVATION_BYTES, room) // 2:
                self._kept[shape] = alone - weights  # no two fit: a pair is not even tried
            else:
                pair = {n: torch.cat([v, v]) for n, v in one.items()}
                self._kept[shape] = max(0, self._saved(pair) - alone)
            if self._kept[shape] > room:
                log.warning(
                    "healing: one input keeps %.1f GiB of activations, where the memory bound leaves %.1f GiB",
                    self._kept[shape] / 2**30, room / 2**30,
                )  # fmt: skip
        return self._kept[shape]

    def _saved(self, given: Batch) -> int:
        self.student.set_values(self.values.current())
        return saved_bytes(lambda: self.student.outputs(**given))

    def _score(self, index: int, target: Tensor) -> float:
        out = self.student.outputs(**self.held[index])
        out = out.mean(dim=1) if out.ndim == 3 else out
        return float(compare_outputs(target.to(out.device)[None], out)[1].mean())

    def _recomputing(self) -> AbstractContextManager[Any]:
        return nullcontext()


# Names, shapes and dtypes of an input's arrays.
Shape = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def shape_of(one: Batch) -> Shape:
    """What inputs must have in common to go through a model together."""
    return tuple(sorted((n, tuple(v.shape[1:]), v.dtype) for n, v in one.items()))


def alike(batch: Sequence[Batch]) -> list[list[Batch]]:
    """The inputs by names and shapes, in the order in which each first comes."""
    found: dict[Shape, list[Batch]] = {}
    for one in batch:
        found.setdefault(shape_of(one), []).append(one)
    return list(found.values())


def saved_bytes(run: Callable[[], Tensor]) -> int:
    """Bytes that autograd would keep for the backward pass of what `run` computes; here it keeps nothing."""
    kept = Storages()
    with torch.autograd.graph.saved_tensors_hooks(kept.add, never):
        run()
    return kept.size_bytes
