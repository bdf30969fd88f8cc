"""Healing while encoding: layers are encoded one after another, and what is not encoded yet learns to make up for it.

After each layer's weights are fixed at their decoded values, all weights of later layers, norms and biases take some
steps on KL(original || model) over the fit text; the next layer is then encoded as it has become, for the inputs it
really gets. So one layer's error is answered by millions of weights before they have codes, not by the scales of
codes that cannot move. (Fine-tuning during quantisation: Tseng et al., QuIP#, 2024, section 5, there within a block
and once over the whole model; here over everything that is left, all the way down.)

It is not the default: on a model of 29 M parameters at 2.7 bits, 640 steps of one window left 9 % less KLD than the plain
mix, encoding front to back (`sequential`) 13 % less.

The trees and so the bytes stay those of the mix. It needs the model, its gradients and AdamW's two moments in memory,
16 bytes a weight, and so runs on a GPU, or on a CPU for small models.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nstf import __version__
from nstf.analyzers.moments import InputMoments
from nstf.analyzers.shrinkage import shrunk
from nstf.analyzers.turnstile import layer_list
from nstf.errors import CorruptError
from nstf.kernels.formats import EncodedTensor, decode, node_from_json, node_to_json
from nstf.kernels.formats.tuning import retuned
from nstf.quantizers.stats import Stats
from nstf_convert.pipeline import calibration as calibrations
from nstf_convert.pipeline import recipe as recipes
from nstf_convert.pipeline.batches import TOKENS_PER_BATCH, merge_batches
from nstf_convert.pipeline.encoded import ALGORITHMS
from nstf_convert.pipeline.groups import Group, find_groups
from nstf_convert.pipeline.heal_model import FreeModel, backward_of_divergence, reference_on
from nstf_convert.pipeline.heal_run import (
    CHECKPOINT_SECONDS,
    LOGIT_ELEMENTS,
    MAX_STEPS,
    SMALLEST_FOR_BFLOAT16,
    recomputing,
)
from nstf_convert.pipeline.heal_teacher import Targets, batch_of
from nstf_convert.pipeline.heal_text import healing_windows
from nstf_convert.pipeline.heal_values import tuned_paths
from nstf_convert.pipeline.job import Job
from nstf_convert.pipeline.mix import Loader
from nstf_convert.pipeline.recipe import Recipe
from nstf_convert.pipeline.stages import bars_off
from nstf_convert.pipeline.tensorfile import TensorFile, write_tensors
from nstf_convert.pipeline.workdir import content_key

log = logging.getLogger("nstf")

# Weights, gradients, two moments of AdamW.
BYTES_PER_WEIGHT = 16
# What it may take on a CPU, and the share of a GPU's free memory.
CPU_BYTES = 2 << 30
GPU_SHARE = 0.6
# Share of what a GPU then has left that activations may take before they are recomputed.
ACTIVATION_SHARE = 0.4
# Fewer steps a layer than this teach nothing worth the encoding.
MIN_STEPS_PER_STAGE = 4
WINDOWS = {"cpu": 1, "cuda": 8}
TEACHER_CACHE_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}


@dataclass(frozen=True)
class Settings:
    """rate: AdamW's, relative to a tensor's root mean square; windows: per step (0: what suits the device)."""

    rate: float = 1e-3
    beta2: float = 0.95
    windows: int = 0
    warm_up: int = 10


@dataclass(frozen=True)
class Progressed:
    """encoded: the tensors that differ from what the mix had, by name. facts: for the report."""

    encoded: Mapping[str, EncodedTensor]
    facts: dict[str, Any]

    def loader(self, load: Loader) -> Loader:
        """`load` with these tensors in place of what they replace."""
        return lambda unit, recipe: self.encoded.get(unit.name) or load(unit, recipe)


def affordable(job: Job) -> bool:
    """Whether the model and what training needs fit the memory there is."""
    needed = BYTES_PER_WEIGHT * sum(u.elements for u in job.units.values())
    if torch.cuda.is_available():
        return needed <= GPU_SHARE * torch.cuda.mem_get_info()[0]
    return needed <= CPU_BYTES


def encode_progressively(
    job: Job,
    mix: Mapping[str, Recipe],
    load: Loader,
    minutes: float,
    score: float,
    steps: int | None = None,
    settings: Settings | None = None,
) -> Progressed | None:
    """Encodes a mix layer by layer with training in between, in about `minutes`, or with `steps` steps in all.

    load: the mix's tensors so far; those that are not the weight of a layer stay. score: the mix's divergence. Returns
    None where the time is too short or no layer can be reached; an interrupted run goes on at its last saved layer.
    """
    run = _Run(job, mix, load, minutes, score, steps, settings or Settings())
    if not run.stages:
        return None
    with torch.enable_grad():
        finished = run.learn()
    return Progressed(run.tensors(), run.facts()) if finished else None


class _Run:
    def __init__(
        self,
        job: Job,
        mix: Mapping[str, Recipe],
        load: Loader,
        minutes: float,
        score: float,
        steps: int | None,
        settings: Settings,
    ) -> None:
        self.job, self.mix, self.load, self.settings = job, mix, load, settings
        self.seconds, self.given_steps = minutes * 60, steps
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        kind = self.device.type
        self.per_step = settings.windows or WINDOWS[kind]
        self.bfloat16 = kind == "cuda" and score >= SMALLEST_FOR_BFLOAT16
        self.workers = torch.get_num_threads()
        file = job.calibration
        self.fit = [] if file is None else calibrations.fit_batches(file)
        groups = find_groups(job, mix, self.fit) if self.fit else []
        self.teacher = reference_on(
            device := self.device, job.reference().config, job.source, job.checkpoint.ties
        )
        self.stages = _by_layer(groups, self.teacher.module)
        self.student = FreeModel(job.reference().config, self._start(), job.checkpoint.ties, device)
        self.modules = dict(self.student.module.named_modules())
        self.optimiser = torch.optim.AdamW(
            _parameter_groups(self.student.weights.values(), settings.rate),
            betas=(0.9, settings.beta2), weight_decay=0.0,
        )  # fmt: skip
        self.rates = [g["lr"] for g in self.optimiser.param_groups]
        self.targets = Targets(self.teacher, device, self._arithmetic, TEACHER_CACHE_BYTES[kind])
        self.encoded: dict[str, EncodedTensor] = {}
        self.stage, self.step, self.elapsed = 0, 0, 0.0
        self.step_seconds: float | None = None
        self.curve: list[dict[str, Any]] = []
        self.key = content_key(
            kind="progressive", version=[__version__, ALGORITHMS], calibration=job.calibration_fingerprint(),
            checkpoint=job.checkpoint.fingerprint(), mix={n: r.to_json() for n, r in mix.items()}, score=repr(score),
            settings=dataclasses.asdict(settings), seconds=self.seconds, steps=steps, device=kind,
        )  # fmt: skip
        self.path = job.work.path / f"progressive-{self.key[:16]}.safetensors"

    def _start(self) -> dict[str, nn.Parameter]:
        """Weights to train: the original's. Those that no stage encodes: as the mix has them."""
        later = {w for stage in self.stages for g in stage for w in g.weights}
        model, out = self.teacher, {}
        for name in {model.stored_name(n) for n, _ in model.module.named_parameters(remove_duplicate=False)}:
            unit = self.job.units[name]
            if name in later:
                out[name] = nn.Parameter(self.job.source(name).to(self.device, torch.float32).clone())
                continue
            encoded = self.load(unit, self.mix.get(name))  # type: ignore[arg-type]
            free = name not in self.mix and tuned_paths(unit, encoded) == ["values"]
            value = decode(encoded, torch.float32).to(self.device).clone()
            out[name] = nn.Parameter(value, requires_grad=free)
        return out

    def learn(self) -> bool:
        """Runs from where the work directory says to the end; False when the time is too short for it."""
        self._resume()
        started, saved, first = time.monotonic() - self.elapsed, time.monotonic(), self.stage
        windows, encoding = self._windows(), 0.0
        bar = tqdm(
            total=len(self.stages), initial=self.stage, desc="heal layers", unit="layer", disable=bars_off(), leave=False
        )  # fmt: skip
        with bar, self._recomputing():
            while self.stage < len(self.stages):
                begun = time.monotonic()
                self._encode(self.stages[self.stage])
                encoding += time.monotonic() - begun
                self.stage += 1
                bar.update()
                left = len(self.stages) - self.stage
                if left:
                    later = left * encoding / (self.stage - first)
                    steps = self._steps(self.seconds - (time.monotonic() - started) - later, left, windows)
                    if steps < MIN_STEPS_PER_STAGE and self.given_steps is None and self.stage == 1:
                        log.info("healing while encoding: %g minutes are too short for it", self.seconds / 60)
                        return False
                    self._train(windows, steps)
                self.elapsed = time.monotonic() - started
                if time.monotonic() - saved > CHECKPOINT_SECONDS or not left:
                    self._save()
                    saved = time.monotonic()
        return True

    def _windows(self) -> list[Tensor]:
        """The text to learn from: that of the statistics, and more where the dataset has it and steps can use it."""
        fit = [b["input_ids"] for b in self.fit]
        wanted = (MAX_STEPS if self.given_steps is None else self.given_steps) * self.per_step
        return fit if wanted <= len(fit) else healing_windows(self.job, fit, wanted)

    def _steps(self, seconds: float, stages: int, windows: Sequence[Tensor]) -> int:
        """Steps of each of the next stages, within the time that is left for all of them; a stage reads a text once."""
        if self.given_steps is not None:
            return max(0, self.given_steps - self.step) // stages
        if self.step_seconds is None:
            self._one_step(windows, take=False)
            start = time.monotonic()
            self._one_step(windows, take=False)
            self.step_seconds = time.monotonic() - start
        fitting = int(min(MAX_STEPS, max(0.0, seconds / self.step_seconds)) / stages)
        return min(fitting, max(MIN_STEPS_PER_STAGE, len(windows) // self.per_step))

    def _train(self, windows: Sequence[Tensor], steps: int) -> None:
        """Every stage starts with new moments, so that a run that goes on after a stop is the same run."""
        self.optimiser.state.clear()
        losses = []
        start = time.monotonic()
        for number in range(steps):
            warm = min(1.0, (number + 1) / min(self.settings.warm_up, max(1, steps // 4)))
            for group, rate in zip(self.optimiser.param_groups, self.rates, strict=True):
                group["lr"] = rate * warm
            losses.append(self._one_step(windows))
            self.step += 1
        if steps:
            self.step_seconds = (time.monotonic() - start) / steps
            self.curve.append({"layers": self.stage, "step": self.step, "fit": sum(losses) / steps})
            log.info(
                "healing while encoding: %d of %d layers, step %d, fit %.5g",
                self.stage, len(self.stages), self.step, self.curve[-1]["fit"],
            )  # fmt: skip

    def _one_step(self, windows: Sequence[Tensor], take: bool = True) -> float:
        self.optimiser.zero_grad(set_to_none=True)
        batch = batch_of(windows, self.job.options.seed, self.step, self.per_step)
        target = self.targets.of(batch)
        with self._arithmetic():
            hidden = self.student.hidden(torch.cat(list(batch)).to(self.device)).flatten(0, 1)
            vocabulary = self.teacher.module.config.get_text_config().vocab_size
            rows = max(1, LOGIT_ELEMENTS[self.device.type] // vocabulary)
            total = float(backward_of_divergence(self.teacher, target, self.student, hidden, rows))
        if take and math.isfinite(total):
            self.optimiser.step()
        return total

    def _encode(self, stage: Sequence[Group]) -> None:
        """Encodes the weights of a stage as they are now, for the inputs they get now, and fixes them."""
        hessians = self._hessians(stage)
        # One Stats a group: q, k and v share the factors of their Hessian.
        stats_of = {g.key: Stats(hessians[g.key]) for g in stage}
        work = [(name, stats_of[g.key]) for g in stage for name in g.weights]

        def one(item: tuple[str, Stats]) -> tuple[str, EncodedTensor]:
            name, stats = item
            unit = self.job.units[name]
            inner = unit.inner(self.student.weights[name].detach().cpu())
            known = self.job.statistics.of(unit, inner)
            encoded = recipes.encode(self.mix[name], inner, stats.for_rows(known.row_weight), unit.lead)
            if unit.permute is not None:
                encoded = recipes.permuted(encoded, unit.permute, unit.shape)
            return name, EncodedTensor(encoded.tree, unit.shape, encoded.arrays)

        try:
            torch.set_num_threads(1)
            with ThreadPoolExecutor(self.workers) as pool:
                done = list(pool.map(one, work))
        finally:
            torch.set_num_threads(self.workers)
        for name, encoded in done:
            self.encoded[name] = encoded
            self.job.work.put(self._name_of(name), dict(encoded.arrays), {"tree": node_to_json(encoded.tree)})
            self.student.fix(name, decode(encoded, torch.float32).to(self.device))

    @torch.no_grad()
    def _hessians(self, stage: Sequence[Group]) -> dict[str, Tensor]:
        """E[x x^T] of every group of a stage, over the fit batches, shrunk as the calibration's is: on the CPU."""
        file = self.job.calibration
        assert file is not None
        entries = file.metadata["hessians"]
        weights = {g.key: file.find(f"token_weight:{g.key}") for g in stage}
        moments = InputMoments({k: w.reshape(-1) for k, w in weights.items() if w is not None})
        handles = [moments.watch(g.key, self.modules[g.module]) for g in stage if g.module]
        try:
            for batch in merge_batches(self.fit, TOKENS_PER_BATCH):
                out = self.student.hidden(batch["input_ids"].to(self.device))
                for g in stage:
                    if not g.module:
                        moments.add(g.key, out.flatten(0, 1))
        finally:
            for handle in handles:
                handle.remove()
        return {
            key: shrunk(moment.hessian.cpu(), float(entries[key].get("shrinkage", 0.0)))
            for key, moment in moments.pop().items()
        }

    def tensors(self) -> dict[str, EncodedTensor]:
        """What was encoded, and the vectors that were trained, as the file holds them."""
        out = dict(self.encoded)
        for name, value in self.student.weights.items():
            if value.requires_grad:
                before = self.load(self.job.units[name], None)  # type: ignore[arg-type]
                out[name] = retuned(before, {"values": value.detach().cpu().float()})
        return out

    def facts(self) -> dict[str, Any]:
        """What the report says about the run."""
        return {
            "layers": len(self.stages),
            "steps": self.step,
            "minutes": round(self.elapsed / 60, 3),
            "tokens": self.step * self.per_step * self.fit[0]["input_ids"].shape[1],
            "parameters": sum(self.job.units[n].elements for n in self.encoded),
            "arithmetic": "bfloat16" if self.bfloat16 else "float32",
            "curve": self.curve,
        }

    def _recomputing(self) -> AbstractContextManager[Any]:
        tokens = self.fit[0]["input_ids"].shape[1] * self.per_step
        most = CPU_BYTES / 2
        if self.device.type == "cuda":
            most = ACTIVATION_SHARE * torch.cuda.mem_get_info()[0]
        return recomputing(self.student, tokens, 2 if self.bfloat16 else 4, most)

    def _arithmetic(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bfloat16 else nullcontext()

    def _name_of(self, name: str) -> str:
        return content_key(kind="progressive tensor", run=self.key, name=name)

    def _save(self) -> None:
        free = {f"weight.{n}": p.detach().cpu() for n, p in self.student.weights.items() if p.requires_grad}
        facts = {n: getattr(self, n) for n in ("stage", "step", "elapsed", "curve")}
        write_tensors(self.path, free, facts)

    def _resume(self) -> None:
        """Goes on at the last saved layer."""
        if not self.path.exists():
            return
        try:
            file = TensorFile(self.path)
        except CorruptError:
            self.path.unlink()
            return
        done = [n for stage in self.stages[: file.metadata["stage"]] for g in stage for n in g.weights]
        found = {n: self.job.work.find(self._name_of(n)) for n in done}
        if any(f is None for f in found.values()):
            return
        for name, value in file.metadata.items():
            setattr(self, name, value)
        for name, known in found.items():
            arrays, metadata = known  # type: ignore[misc]
            tree = node_from_json(metadata["tree"])
            self.encoded[name] = EncodedTensor(tree, self.job.units[name].shape, arrays)
            self.student.fix(name, decode(self.encoded[name], torch.float32).to(self.device))
        with torch.no_grad():
            for name in file.names():
                self.student.weights[name.removeprefix("weight.")].copy_(file.get(name))
        log.info("healing while encoding: goes on after layer %d of %d", self.stage, len(self.stages))


def _parameter_groups(weights: Iterable[nn.Parameter], rate: float) -> list[dict[str, Any]]:
    """What is trained, with learning rates relative to its size: tensors of about the same size share a group."""
    groups: dict[int, list[nn.Parameter]] = {}
    for weight in weights:
        size = float(weight.detach().square().mean().sqrt())
        if weight.requires_grad and size > 0.0:
            groups.setdefault(round(math.log2(size)), []).append(weight)
    return [{"params": members, "lr": rate * 2.0**power} for power, members in sorted(groups.items())]


def _by_layer(groups: Sequence[Group], module: nn.Module) -> list[list[Group]]:
    """Consecutive groups of one layer together; a group outside the stack of layers is a stage of its own."""
    path, _ = layer_list(module)
    stages: list[list[Group]] = []
    last: str | None = None
    for group in groups:
        inside = bool(path) and group.module.startswith(path + ".")
        layer = group.module[len(path) + 1 :].split(".")[0] if inside else None
        if layer is None or layer != last:
            stages.append([])
        stages[-1].append(group)
        last = layer
    return stages
