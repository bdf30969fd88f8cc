"""One run of healing: the student, the original it learns from, the optimiser, and where it all stands.

Activations of a step, the codes and one layer's weights are what takes memory: 1.9 GiB in all for 135 M parameters and
windows of 512 tokens. Above ACTIVATION_BYTES layers are recomputed in the backward pass.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from nstf import __version__
from nstf.analyzers.sensitivity import checkpoint_layers
from nstf.analyzers.turnstile import layer_list
from nstf.kernels.formats import EncodedTensor
from nstf.kernels.formats.tuning import prepare
from nstf_convert.measure import score_window
from nstf_convert.pipeline import mix as mixes
from nstf_convert.pipeline.calibrate import statistics as calibrations
from nstf_convert.pipeline.heal.model import TunedModel, backward_of_divergence, reference_on
from nstf_convert.pipeline.heal.sizes import (
    ACTIVATION_BYTES,
    EVALUATIONS,
    LOGIT_ELEMENTS,
    WINDOWS,
    layer_bytes,
)
from nstf_convert.pipeline.heal.teacher import Batch, Targets, batch_of
from nstf_convert.pipeline.heal.text import healing_windows
from nstf_convert.pipeline.heal.values import TunedValues
from nstf_convert.pipeline.mix import Loader, Measured
from nstf_convert.pipeline.progress import bars_off
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import Unit
from nstf_convert.pipeline.session import Session
from nstf_convert.pipeline.store.tensorfile import write_tensors
from nstf_convert.pipeline.store.workdir import content_key, undamaged
from nstf_convert.streamed import StreamedModel

log = logging.getLogger("nstf")

# A text is read at most this often: then more steps fit it and no other.
MAX_EPOCHS = 6
# bfloat16 arithmetic costs about 0.001 nats: below this divergence it would drown what is to be learnt.
SMALLEST_FOR_BFLOAT16 = 0.01
CHECKPOINT_SECONDS = 60.0
# Steps whose text the original reads in one go.
TEACHER_AHEAD = 3
# How far over its time a run may go before it is cut short, where steps turn out slower than those measured.
OVERTIME = 1.25
MAX_STEPS = 20_000


@dataclass(frozen=True)
class Settings:
    """How healing learns. Rates are relative to the values (of scales: per unit of their logarithm).

    windows: per step. evaluations: of the windows that choose, evenly over the run. 0: what suits the device. patience:
    evaluations in a row without a new best after which the run ends. decay: of AdamW, towards the values healing
    started from.
    """

    scale_rate: float = 1e-3
    row_rate: float = 1e-3
    value_rate: float = 2e-3
    code_rate: float = 0.0
    decay: float = 0.01
    beta2: float = 0.98
    windows: int = 0
    warm_up: int = 8
    evaluations: int = 0
    patience: int = 2


class HealingRun:
    """One run: models, values and optimiser, and where it stands."""

    def __init__(
        self,
        session: Session,
        mix: Mapping[str, Recipe],
        load: Loader,
        minutes: float,
        steps: int | None,
        settings: Settings,
        before: Measured,
    ) -> None:
        self.session, self.settings, self.before = session, settings, before
        self.seconds, self.given_steps = minutes * 60.0, steps
        self.device = session.device
        kind = self.device.type
        self.per_step = settings.windows or WINDOWS[kind]
        self.evaluations = settings.evaluations or EVALUATIONS[kind]
        fast = self.device.type == "cuda" or bool(torch.cpu.get_capabilities().get("amx_bf16"))
        self.bfloat16 = fast and before.score >= SMALLEST_FOR_BFLOAT16
        config = session.reference().config
        checkpoint = session.checkpoint
        self.teacher = reference_on(self.device, config, session.source, checkpoint.ties, checkpoint.names())
        encoded = {n: load(u, mix.get(n)) for n, u in _read_units(session, self.teacher)}
        buffers = set(self.teacher.stored_buffers())
        self.values = TunedValues(
            session.units, encoded, self.device, codes=settings.code_rate > 0, constant=buffers
        )
        dtype = torch.bfloat16 if self.bfloat16 else torch.float32
        weights = {n: prepare(e, self.device, dtype) for n, e in encoded.items()}
        self.student = TunedModel(config, weights, checkpoint.ties, self.device, dtype)
        self.optimiser = torch.optim.AdamW(
            self.values.groups(
                settings.scale_rate, settings.row_rate, settings.value_rate, settings.code_rate
            ),
            betas=(0.9, settings.beta2), weight_decay=settings.decay,
        )  # fmt: skip
        self.rates = [g["lr"] for g in self.optimiser.param_groups]
        assert session.calibration is not None
        self.fit = self._inputs(calibrations.fit_batches(session.calibration))
        self.held = self._inputs(calibrations.held_out_batches(session.calibration))
        self.targets = Targets(self.teacher, self.device, self._arithmetic)
        self.step, self.total, self.elapsed = 0, 0, 0.0
        self.losses: list[float] = []
        self.curve: list[dict[str, Any]] = []
        self.best_score, self.best = before.score, self.values.state()
        self.path = session.work.path / f"heal-{self._key(mix)[:16]}.safetensors"

    def _key(self, mix: Mapping[str, Recipe]) -> str:
        return content_key(
            kind="healing", version=__version__, calibration=self.session.calibration_fingerprint(),
            mix={n: r.to_json() for n, r in mix.items()}, before=repr(self.before.score),
            settings=dataclasses.asdict(self.settings), seconds=self.seconds, steps=self.given_steps,
            device=self.device.type, bfloat16=self.bfloat16,
        )  # fmt: skip

    @staticmethod
    def _inputs(batches: Sequence[Any]) -> list[Any]:
        """What a step reads of the calibration's batches: token ids [1, tokens]."""
        return [b["input_ids"] for b in batches]

    def learn(self) -> None:
        """Runs from where the work directory says to the end."""
        with torch.enable_grad(), self._recomputing():
            resumed = self._resume()
            started = time.monotonic() - self.elapsed
            if not resumed:
                self.total = self._steps_that_fit() if self.given_steps is None else self.given_steps
            windows = self._windows()
            if not resumed and self.given_steps is None:
                self.total = min(self.total, max(1, MAX_EPOCHS * len(windows) // self.per_step))
            saved = time.monotonic()
            every = max(1, math.ceil(self.total / self.evaluations))
            bar = tqdm(
                total=self.total, initial=self.step, desc="heal", unit="step", disable=bars_off(), leave=False
            )
            with bar:
                self._pass_over(windows)
                while self.step < self.total and not self._hopeless():
                    self._set_rates()
                    self.losses.append(self._one_step(*self._batch_and_next(windows, self.step)))
                    self.step += 1
                    bar.update()
                    self.elapsed = time.monotonic() - started
                    late = self.given_steps is None and self.elapsed > OVERTIME * self.seconds
                    if self.step % every == 0 or self.step == self.total or late:
                        self._evaluate()
                    if late:
                        break
                    if time.monotonic() - saved > CHECKPOINT_SECONDS:
                        self._save()
                        saved = time.monotonic()
            self.elapsed = time.monotonic() - started
            self._save()

    def best_tensors(self) -> dict[str, EncodedTensor]:
        """The tensors at the best state; {} when no state was better than the start."""
        if self.best_score >= self.before.score:
            return {}
        self.values.load(self.best)
        return self.values.encoded()

    def facts(self) -> dict[str, Any]:
        """What the report says about the run."""
        return {
            "steps": self.step,
            "planned_steps": self.total,
            "minutes": round(self.elapsed / 60, 3),
            **self._read(),
            "parameters": self.values.count,
            "device": self.device.type,
            "arithmetic": "bfloat16" if self.bfloat16 else "float32",
            "curve": self.curve,
        }

    def _read(self) -> dict[str, int]:
        return {"tokens": self.fit[0].shape[1] * self.per_step * self.step}

    def _steps_that_fit(self) -> int:
        """Steps within the time, from two that are made and not taken; evaluations take their share."""
        windows = self._windows()
        self._one_step(self._batch(windows, 0), take=False)
        start = time.monotonic()
        for number in range(2):
            self._one_step(self._batch(windows, number), self._batch(windows, 1), take=False)
        step = (time.monotonic() - start) / 2
        start = time.monotonic()
        self._evaluate()
        evaluation = time.monotonic() - start
        left = self.seconds - self.evaluations * evaluation - 3 * step
        return max(self.evaluations, min(MAX_STEPS, int(left / max(step, 1e-6))))

    def _windows(self) -> list[Tensor]:
        wanted = self.total * self.per_step
        if wanted <= len(self.fit):
            return self.fit
        return healing_windows(self.session, self.fit, wanted)

    def _pass_over(self, windows: Sequence[Tensor]) -> None:
        """Notes what the steps that an interrupted run has made have computed together."""
        for step in range(self.step):
            self.targets.pass_over(*self._batch_and_next(windows, step))

    def _batch_and_next(self, windows: Sequence[Tensor], step: int) -> tuple[Batch, Batch]:
        """The windows of a step, and those whose targets are computed with theirs."""
        ahead = min(TEACHER_AHEAD, self.total - step - 1)
        return self._batch(windows, step), self._batch(windows, step + 1, ahead)

    def _batch(self, windows: Sequence[Tensor], step: int, steps: int = 1) -> Batch:
        return batch_of(windows, self.session.options.seed, step, self.per_step, steps)

    def _one_step(self, batch: Batch, ahead: Batch = (), take: bool = True) -> float:
        """The mean divergence of the batch; the values move unless `take` is False. ahead: what comes next."""
        self.optimiser.zero_grad(set_to_none=True)
        self.student.set_values(self.values.current())
        total = 0.0
        ids = torch.cat(list(batch)).to(self.device)
        targets = self.targets.of(batch, ahead)
        with self._arithmetic():
            with self.student.forgetting_weights():
                hidden = self.student.hidden(ids).flatten(0, 1)
            rows = max(
                1, LOGIT_ELEMENTS[self.device.type] // self.teacher.module.config.get_text_config().vocab_size
            )
            total = float(backward_of_divergence(self.teacher, targets, self.student, hidden, rows))
        if take and math.isfinite(total):
            self.optimiser.step()
        return total

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Measures the windows that choose with the values as they would be stored, in float32."""
        file = self.session.calibration
        assert file is not None
        with self.student.in_dtype(torch.float32):
            self.student.set_values(self.values.current())
            scores = [self._score(i, file.get(f"reference:{i}")) for i in range(len(self.held))]
        by_domain: dict[str, list[float]] = {}
        for value, domain in zip(scores, calibrations.domains(file, "held_out"), strict=True):
            by_domain.setdefault(domain, []).append(value)
        score_now = mixes.mean([mixes.mean(v) for v in by_domain.values()])
        recent = self.losses[-max(1, self.total // self.evaluations) :] if self.losses else []
        entry = {"step": self.step, "fit": mixes.mean(recent) if recent else None, "held_out": score_now}
        if not any(e["step"] == self.step for e in self.curve):
            self.curve.append(entry)
            log.info("healing: step %d of %d, held-out %.6g", self.step, self.total, score_now)
        if self.step and score_now < self.best_score:
            self.best_score, self.best = score_now, self.values.state()

    def _score(self, index: int, target: Tensor) -> float:
        """The mean divergence of a window that chooses. target: what the original's head reads there."""
        ids = self.held[index].to(self.device)
        hidden = self.student.hidden(ids)[0]
        with self.teacher.holding(self.teacher.head), self.student.holding(self.student.head):
            score = score_window(self.teacher, target.to(self.device), self.student, hidden, ids[0])
        return float(score.kl.mean())

    def _hopeless(self) -> bool:
        """Whether the last evaluations brought nothing new."""
        scores = [e["held_out"] for e in self.curve]
        patience = self.settings.patience
        return len(scores) > patience and min(scores[-patience:]) > 1.02 * min(scores[:-patience])

    def _set_rates(self) -> None:
        """Linear warm-up, then a cosine down to zero at the end."""
        warm = min(1.0, (self.step + 1) / min(self.settings.warm_up, max(1, self.total // 4)))
        cosine = 0.5 * (1 + math.cos(math.pi * self.step / max(1, self.total)))
        for group, rate in zip(self.optimiser.param_groups, self.rates, strict=True):
            group["lr"] = rate * warm * cosine

    def _arithmetic(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bfloat16 else nullcontext()

    def _recomputing(self) -> AbstractContextManager[Any]:
        tokens = self.fit[0].shape[1] * self.per_step
        return recomputing(self.student, tokens, 2 if self.bfloat16 else 4, ACTIVATION_BYTES)

    def _save(self) -> None:
        tensors = {f"now.{k}": v for k, v in self.values.state().items()}
        tensors |= {f"best.{k}": v for k, v in self.best.items()}
        for number, parameter in enumerate(self.values.parameters()):
            for key, value in self.optimiser.state.get(parameter, {}).items():
                tensors[f"adam.{number}.{key}"] = value.detach().cpu()
        facts = {n: getattr(self, n) for n in ("step", "total", "elapsed", "losses", "curve", "best_score")}
        write_tensors(self.path, tensors, {"key": self.path.name, "of": facts})

    def _resume(self) -> bool:
        """Takes over the state of an interrupted run; False when there is none."""
        file = undamaged(self.path, key=self.path.name)
        if file is None:
            return False
        for name, value in file.metadata["of"].items():
            setattr(self, name, value)
        stored = {n: file.get(n).clone() for n in file.names()}
        self.values.load({k.removeprefix("now."): v for k, v in stored.items() if k.startswith("now.")})
        self.best = {k.removeprefix("best."): v for k, v in stored.items() if k.startswith("best.")}
        for number, parameter in enumerate(self.values.parameters()):
            state = {k.split(".", 2)[2]: v for k, v in stored.items() if k.startswith(f"adam.{number}.")}
            if state:
                self.optimiser.state[parameter] = {
                    k: v if k == "step" else v.to(self.device) for k, v in state.items()
                }
        log.info("healing: goes on at step %d of %d", self.step, self.total)
        return True


def _read_units(session: Session, model: StreamedModel) -> Iterator[tuple[str, Unit]]:
    """The tensors the model reads: (name, unit)."""
    read = {model.stored_name(n) for n, _ in model.module.named_parameters(remove_duplicate=False)}
    read |= set(model.stored_buffers())
    for name, unit in session.units.items():
        if name in read:
            yield name, unit


def activation_bytes(model: StreamedModel, tokens: int, size: int) -> int:
    """About what the layers keep for a backward pass over `tokens` tokens in numbers of `size` bytes."""
    config = model.module.config.get_text_config()
    inner: int = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return len(layer_list(model.module)[1]) * layer_bytes(tokens, int(config.hidden_size), inner, size)


def recomputing(
    model: StreamedModel, tokens: int, size: int, most_bytes: float
) -> AbstractContextManager[Any]:
    """Layers are recomputed in the backward pass where their activations would take more than `most_bytes`."""
    if activation_bytes(model, tokens, size) <= most_bytes:
        return nullcontext()
    return _undone(checkpoint_layers(layer_list(model.module)[1]))


class _undone(AbstractContextManager[None]):
    """Calls `undo` at the end of a block."""

    def __init__(self, undo: Any) -> None:
        self._undo = undo

    def __exit__(self, *_: object) -> None:
        self._undo()
