"""Encoding a mix front to back: every layer is rounded for the inputs its already compressed predecessors give it.

The calibration's Hessians are of the original model's inputs. When the mix is final, the fit batches run once more
through a model whose weights are the encoded ones: all batches stop before a group of weights that read the same
input, the second moment of that input is taken, the group is encoded with it, and the batches go on through the
decoded weights (the order of Frantar et al., GPTQ, 2022, weight group by weight group instead of layer by layer).

With `correction` the original model runs in step and the target of the rounding moves from W to the weight that maps
the compressed prefix's inputs x~ to what W makes of the original's inputs x:

    W* = W + correction * W (E[x x~^T] - H~) (H~ + damping)^{-1}        H~ = E[x~ x~^T]

which for correction = 1 minimises E|W x - W* x~|^2 (Li et al., GPTAQ, 2025, solved in closed form).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nstf import __version__
from nstf.analyzers.moments import mean_outer, rows_of
from nstf.analyzers.turnstile import call_order, run_in_step
from nstf.kernels.formats import EncodedTensor, decode, node_from_json, node_to_json
from nstf.quantizers.stats import Stats, loss
from nstf_convert.pipeline import recipe as recipes
from nstf_convert.pipeline.calibration import (
    PROBE_TOKENS,
    TOKENS_PER_BATCH,
    fit_batches,
    merge_batches,
    model_output,
)
from nstf_convert.pipeline.data import Batch, Data
from nstf_convert.pipeline.encoded import ALGORITHMS, Result
from nstf_convert.pipeline.job import Job
from nstf_convert.pipeline.recipe import Recipe
from nstf_convert.pipeline.units import Unit
from nstf_convert.pipeline.workdir import content_key
from nstf_convert.streamed import StreamedModel


@dataclass(frozen=True)
class PrefixOptions:
    """original: share of the original model's Hessian in the blend with the compressed prefix's. diagonal: share of
    the blend's diagonal. correction: how far the target moves towards what the original makes of its own inputs;
    damping: of that, relative to the mean diagonal.
    """

    original: float = 0.0
    diagonal: float = 0.0
    correction: float = 0.0
    damping: float = 0.01


@dataclass(frozen=True)
class Group:
    """Weights that read one input. key: the calibration's; module: the path of the first one that runs."""

    key: str
    module: str
    weights: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Prefixed:
    """A mix encoded front to back; `load` and `kept` as the Encoder's. results: by name, as from `encode_all`."""

    job: Job
    results: dict[str, Result]
    keys: Mapping[str, str] = field(default_factory=dict)

    def load(self, unit: Unit, recipe: Recipe) -> EncodedTensor:
        """The encoded tensor of the mix."""
        if unit.name not in self.keys:
            return self.job.encoder.load(unit, recipe)
        found = self.job.work.find(self.keys[unit.name])
        if found is None:
            raise RuntimeError(f"{unit.name}: the work directory lost a result while it was in use")
        arrays, metadata = found
        return EncodedTensor(node_from_json(metadata["tree"]), unit.shape, arrays)

    def kept(self, unit: Unit) -> EncodedTensor:
        """The tensor as it is in the checkpoint."""
        return self.job.encoder.kept(unit)


def encode_in_prefix(
    job: Job,
    mix: Mapping[str, Recipe],
    progress: Callable[[Unit], None],
    options: PrefixOptions | None = None,
) -> Prefixed:
    """Encodes a mix front to back. What the scheme does not cover is encoded with the calibration's statistics, first:
    tables, expert stacks, weights of modules that run several times, tensors the data says nothing about.
    """
    options = options or PrefixOptions()
    batches = [] if job.calibration is None else fit_batches(job.calibration)
    groups = _groups(job, mix, batches) if batches else []
    keys = _keys(job, mix, groups, options)
    free = [(job.units[n], r) for n, r in mix.items() if n not in keys]
    results = job.encoder.encode_all(free, progress)
    prefixed = Prefixed(job, results, keys)
    if any(job.work.find_metadata(key) is None for key in keys.values()):
        workers = torch.get_num_threads()
        try:
            # Sums whose order depends on the number of threads would make the bytes depend on it.
            torch.set_num_threads(1)
            _Pass(prefixed, mix, groups, options, progress, workers).run(batches)
        finally:
            torch.set_num_threads(workers)
    for name, key in keys.items():
        results.setdefault(name, Result(_stored_loss(job, name, key), 0.0))
    return prefixed


def _stored_loss(job: Job, name: str, key: str) -> float:
    found = job.work.find_metadata(key)
    if found is None:
        raise RuntimeError(f"{name}: the work directory lost a result while it was in use")
    return float(found["loss"])


def _keys(
    job: Job, mix: Mapping[str, Recipe], groups: Sequence[Group], options: PrefixOptions
) -> dict[str, str]:
    """Names in the work directory: everything before a tensor decides about it, so the whole mix is part of each."""
    digest = content_key(mix={n: r.to_json() for n, r in sorted(mix.items())}, options=asdict(options))
    return {
        name: content_key(
            kind="prefix",
            version=[__version__, ALGORITHMS],
            checkpoint=job.checkpoint.fingerprint(),
            calibration=job.calibration_fingerprint(),
            mix=digest,
            name=name,
        )
        for group in groups
        for name in group.weights
    }


def _groups(job: Job, mix: Mapping[str, Recipe], batches: Sequence[Batch]) -> list[Group]:
    """The groups a gate can stand before, in the order in which they run."""
    model, file = job.reference(), job.calibration
    if file is None:
        return []
    modules: dict[str, list[str]] = {}
    for path, _, weight in model.linear_modules():
        modules.setdefault(weight, []).append(path)
    data = _data(job)
    probe = {n: v[:, :PROBE_TOKENS] if data.language and v.ndim == 2 else v for n, v in batches[0].items()}
    by_path = {p: m for p, m, _ in model.linear_modules()}
    calls = call_order(by_path.values(), lambda: model_output(model, data, probe))
    once = {p for p, m in by_path.items() if calls.count(m) == 1}

    def covered(name: str) -> bool:
        unit = job.units[name]
        paths = modules.get(name, [])
        if name not in mix or len(paths) != 1 or unit.lead != 1 or len(unit.uses) != 1:
            return False
        return paths[0] in once or (data.language and by_path[paths[0]] is model.head)

    path_of = {id(m): p for p, m in by_path.items()}
    position = {path_of[id(m)]: i for i, m in enumerate(calls)}
    groups = []
    for key, entry in file.metadata["hessians"].items():
        weights = tuple(w for w in entry["weights"] if covered(w))
        if data.language and key == "head":
            if weights:
                groups.append((len(calls), Group(key, "", weights)))
        elif weights and key in once:
            groups.append((position[key], Group(key, key, weights)))
    return [g for _, g in sorted(groups, key=lambda pair: pair[0])]


def _data(job: Job) -> Data:
    if job.calibration is None:
        raise ValueError("there is no calibration")
    return Data(bool(job.calibration.metadata["language"]), (), (), {})


class _Pass:
    """One run of the fit batches through the model that is being encoded."""

    def __init__(
        self,
        prefixed: Prefixed,
        mix: Mapping[str, Recipe],
        groups: Sequence[Group],
        options: PrefixOptions,
        progress: Callable[[Unit], None],
        workers: int,
    ) -> None:
        self.prefixed, self.job, self.mix = prefixed, prefixed.job, mix
        self.groups, self.options, self.progress, self.workers = groups, options, progress, workers
        self.ready = {name for name in mix if name not in prefixed.keys}
        self.decoded: dict[str, Tensor] = {}
        self.lock = threading.Lock()
        self.model = StreamedModel(self.job.reference().config, self.source, self.job.checkpoint.ties)
        self.modules = dict(self.model.module.named_modules())
        self.by_weight: dict[str, list[nn.Module]] = {}
        for _, module, weight in self.model.linear_modules():
            self.by_weight.setdefault(weight, []).append(module)

    def source(self, name: str) -> Tensor:
        """The weight as the model under way has it: decoded once it is encoded, the original before."""
        with self.lock:
            if name not in self.ready:
                return self.job.source(name)
            if name not in self.decoded:
                unit = self.job.units[name]
                self.decoded[name] = decode(self.prefixed.load(unit, self.mix[name]), torch.float32)
            return self.decoded[name]

    def run(self, batches: Sequence[Batch]) -> None:
        data = _data(self.job)
        merged = list(merge_batches(batches, TOKENS_PER_BATCH))
        runs = [self._run(self.model, data, b) for b in merged]
        gates = [[self.modules[g.module]] for g in self.groups if g.module]
        self.split = len(runs)
        if self.options.correction:
            original = self.job.reference()
            runs += [self._run(original, data, b) for b in merged]
            paths = dict(original.module.named_modules())
            gates = [[m, paths[g.module]] for g, (m,) in zip(self.groups, gates, strict=False)]
        run_in_step(gates, runs, self._at_gate, self.workers)

    def _run(self, model: StreamedModel, data: Data, batch: Batch) -> Callable[[], Tensor]:
        return lambda: model_output(model, data, batch)

    def _at_gate(self, index: int, inputs: list[Any]) -> None:
        self.decoded.clear()
        if index >= len(self.groups):
            return
        group = self.groups[index]
        start = time.perf_counter()
        if any(self.job.work.find_metadata(self.prefixed.keys[n]) is None for n in group.weights):
            hessian, moved = self._statistics(group, inputs)
            stats = Stats(hessian)
            with ThreadPoolExecutor(self.workers) as pool:
                list(pool.map(lambda n: self._encode(n, stats, moved), group.weights))
        for name in group.weights:
            seconds = time.perf_counter() - start
            loss = _stored_loss(self.job, name, self.prefixed.keys[name])
            self.prefixed.results[name] = Result(loss, seconds / len(group.weights))
            self.progress(self.job.units[name])
            self.ready.add(name)
            for module in self.by_weight[name]:
                # Small weights stay loaded: what is there is still the original.
                if not module.weight.is_meta:  # type: ignore[union-attr]
                    module.weight = nn.Parameter(self.source(name), requires_grad=False)

    def _statistics(self, group: Group, inputs: list[Any]) -> tuple[Tensor, Tensor | None]:
        """(the Hessian to encode with, what the target moves by as a factor on the right: [in, in], or None)."""
        module = self.modules[group.module] if group.module else nn.Identity()
        given = [(x[0] if isinstance(x, tuple) else x) for x in inputs]
        rows = [rows_of(module, x) for x in given[: self.split] if x is not None]
        weights = self._token_weights(group, rows)
        hessian = mean_outer(rows, rows, weights, self.workers)
        moved = None
        if self.options.correction:
            originals = [rows_of(module, x) for x in given[self.split :] if x is not None]
            cross = mean_outer(originals, rows, weights, self.workers)
            moved = correction(cross, hessian, self.options.damping).mul_(self.options.correction)
        if self.options.original and self.job.calibration is not None:
            known = self.job.calibration.get(f"hessian:{group.key}")
            hessian = hessian.lerp(known, self.options.original)
        if self.options.diagonal:
            hessian = hessian.lerp(torch.diag(hessian.diagonal()), self.options.diagonal)
        return hessian, moved

    def _token_weights(self, group: Group, rows: Sequence[Tensor]) -> list[Tensor] | None:
        file = self.job.calibration
        found = None if file is None else file.find(f"token_weight:{group.key}")
        if found is None or found.numel() != sum(r.shape[0] for r in rows):
            return None
        return list(found.reshape(-1).split([r.shape[0] for r in rows]))

    def _encode(self, name: str, stats: Stats, moved: Tensor | None) -> None:
        key = self.prefixed.keys[name]
        if self.job.work.find_metadata(key) is not None:
            return
        unit, recipe = self.job.units[name], self.mix[name]
        inner, known = self.job.encoder.inputs(unit)
        if moved is not None:
            matrix = inner.reshape(inner.shape[0], -1)
            inner = (matrix + matrix @ moved).reshape(inner.shape)
        stats = stats.for_rows(known.row_weight)
        encoded = recipes.encode(recipe, inner, stats, unit.lead)
        lost = loss(inner, decode(encoded).reshape(inner.shape), stats, unit.lead)
        if unit.permute is not None:
            encoded = recipes.permuted(encoded, unit.permute, unit.shape)
        self.job.work.put(key, dict(encoded.arrays), {"tree": node_to_json(encoded.tree), "loss": lost})


def correction(cross: Tensor, hessian: Tensor, damping: float) -> Tensor:
    """(E[x x~^T] - H~) (H~ + damping * mean diagonal * I)^{-1}: [in, in] float32, from cross and H~ [in, in]."""
    h = hessian.double()
    damped = h + damping * h.diagonal().mean() * torch.eye(h.shape[0], dtype=torch.float64)
    return torch.linalg.solve(damped, (cross.double() - h).T).T.float()
