"""A mix: one recipe per tensor. Its size, and what it loses when it is run."""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from nstf import __version__
from nstf.analyzers.heap import give_back
from nstf.kernels.formats import EncodedTensor, Node
from nstf.kernels.formats import dense as dense_format
from nstf.runtime.artifact import Shared, Source
from nstf_convert.measure import (
    Accuracy,
    Similarity,
    TokenScores,
    compare_outputs,
    score_window,
    summarise,
    summarise_outputs,
)
from nstf_convert.pipeline.calibrate import statistics as calibrations
from nstf_convert.pipeline.calibrate.text import Batch
from nstf_convert.pipeline.propose.candidates import price
from nstf_convert.pipeline.propose.decoded import decoded
from nstf_convert.pipeline.propose.encoder import ALGORITHMS
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import Unit
from nstf_convert.pipeline.session import Session
from nstf_convert.pipeline.store.workdir import content_key
from nstf_convert.streamed import StreamedModel

# Gives the stored form of a tensor: its recipe carried out, or (None) the tensor as it is.
Loader = Callable[[Unit, Recipe | None], EncodedTensor]


@dataclass(frozen=True)
class NamedLoader:
    """A loader whose encodings have a name, the content key of all that decides about them: what they measure is kept."""

    load: Loader
    name: str

    def __call__(self, unit: Unit, recipe: Recipe | None) -> EncodedTensor:
        return self.load(unit, recipe)


# Bumped when a measurement of the same mix gives other figures.
MEASUREMENTS = 4
# The splits of a calibration that are measured on, and what their references are called.
REFERENCES = {"held_out": "reference", "report": "report_reference"}


@dataclass(frozen=True)
class Measured:
    """What a mix lost against the original on one split of the calibration.

    windows: mean KLD of every window, or the relative L2 error of every output. domains: where each came from.
    """

    accuracy: Accuracy | Similarity
    windows: tuple[float, ...]
    domains: tuple[str, ...]

    @property
    def score(self) -> float:
        """What is minimised: mean KLD (or relative L2 error), every domain counting the same."""
        return mean(list(self.by_domain().values()))

    def on(self, count: int) -> float:
        """The score on the first windows alone."""
        return replace(self, windows=self.windows[:count], domains=self.domains[:count]).score

    def by_domain(self) -> dict[str, float]:
        """The mean of each domain's windows."""
        out: dict[str, list[float]] = {}
        for value, domain in zip(self.windows, self.domains, strict=True):
            out.setdefault(domain, []).append(value)
        return {d: mean(v) for d, v in sorted(out.items())}


def mean(values: Sequence[float]) -> float:
    """The plain mean."""
    return sum(values) / len(values)


def tree_of(unit: Unit, recipe: Recipe | None) -> Node:
    """The stored tree of a tensor; None: kept as it is."""
    if recipe is None:
        return Node(dense_format.KIND, dense_format.Params(unit.dtype))
    return price(unit, recipe)[0]


def entries(session: Session, mix: Mapping[str, Recipe]) -> dict[str, tuple[Node, tuple[int, ...], str]]:
    """What `artifact_size` wants: (tree, shape, dtype) by the name in the file."""
    return {file_name(n): (tree_of(u, mix.get(n)), u.shape, u.dtype) for n, u in session.units.items()}


def encoder_loader(session: Session) -> Loader:
    """Every tensor encoded on its own, from the work directory."""
    return lambda u, recipe: session.encoder.kept(u) if recipe is None else session.encoder.load(u, recipe)


def sources(
    session: Session, mix: Mapping[str, Recipe], load: Loader | None = None
) -> dict[str, EncodedTensor | Source | Shared]:
    """What `write_artifact` wants: every tensor, loaded when its turn comes, and the tied names."""
    loader = load or encoder_loader(session)

    def one(unit: Unit) -> Source:
        recipe = mix.get(unit.name)
        return Source(tree_of(unit, recipe), unit.shape, unit.dtype, lambda: loader(unit, recipe))

    out: dict[str, EncodedTensor | Source | Shared] = {file_name(n): one(u) for n, u in session.units.items()}
    out |= {file_name(a): Shared(file_name(s)) for a, s in shared_names(session).items()}
    return out


def shared_names(session: Session) -> dict[str, str]:
    """Tied names: alias -> stored."""
    return dict(session.checkpoint.ties)


@lru_cache(1 << 14)
def file_name(name: str) -> str:
    """A tensor's name in the artifact: ONNX names may be paths or hold colons, which are percent-encoded there."""
    from urllib.parse import quote

    return quote(name, safe="._-[]+=@() ")


def measure(
    session: Session, mix: Mapping[str, Recipe], split: str = "held_out", load: Loader | None = None
) -> Measured:
    """Runs the mix on a split of the calibration and compares it with the original.

    Results are kept in the work directory, unless `load` gives other encodings than the recipes' own without a name. A
    loader with a name is that of a final mix, which is decoded once for all splits.
    """
    splits, made = [split], None
    if isinstance(load, NamedLoader):
        splits, made = _splits(session), load.name
    if load is not None and made is None:
        return _measured(session, mix, splits, load)[split]
    key = _key(session, mix, split, made)
    found = session.work.find_metadata(key)
    if found is not None:
        kind = Accuracy if found["language"] else Similarity
        return Measured(kind(**found["accuracy"]), tuple(found["windows"]), tuple(found["domains"]))
    all_measured = _measured(session, mix, splits, load)
    for name, measured in all_measured.items():
        if math.isfinite(measured.score):
            language = isinstance(measured.accuracy, Accuracy)
            facts = {"windows": measured.windows, "domains": measured.domains, "language": language}
            accuracy = asdict(measured.accuracy)
            session.work.put(_key(session, mix, name, made), {}, {**facts, "accuracy": accuracy})
    return all_measured[split]


def measure_part(
    session: Session, mix: Mapping[str, Recipe], windows: int, load: Loader | None = None
) -> float:
    """What a part of a mix loses on the first windows that choose, the other tensors as they were. Kept in the work
    directory unless `load` gives other encodings than the recipes' own."""
    key = _key(session, mix, f"held_out[:{windows}]", None)
    found = session.work.find_metadata(key) if load is None else None
    if found is not None:
        return float(found["score"])
    score = _measured(session, mix, ["held_out"], load, windows)["held_out"].score
    if load is None and math.isfinite(score):
        session.work.put(key, {}, {"score": score})
    return score


def _splits(session: Session) -> list[str]:
    """The splits of the calibration that have windows."""
    file = session.calibration
    return [] if file is None else [s for s in REFERENCES if calibrations.domains(file, s)]


def _measured(
    session: Session,
    mix: Mapping[str, Recipe],
    splits: Sequence[str],
    load: Loader | None,
    windows: int | None = None,
) -> dict[str, Measured]:
    # What encoding has left on the heap would be on top of the heads and the logits.
    give_back()
    model = session.streamed(weights_of(session, mix, load))
    measured = measure_splits(session, model, splits, windows)
    # The model and its hooks refer to each other. Without its weights it takes little; to look for it takes 0.2 s.
    model.weights.clear()
    if session.machine.on_gpu:
        gc.collect()
    return measured


def weights_of(
    session: Session, mix: Mapping[str, Recipe], load: Loader | None = None
) -> Callable[[str], Tensor]:
    """name -> the weight a mix stands for, float32 on the session's device. load: gives its tensors (None: each as
    encoded on its own, and those that are kept from the checkpoint)."""
    loader = load or encoder_loader(session)

    def source(name: str) -> Tensor:
        if load is None and name not in mix:
            return session.source(name)
        encoded = loader(session.units[name], mix.get(name))
        return decoded(encoded, session.device)

    return source


def _key(session: Session, mix: Mapping[str, Recipe], split: str, made: str | None) -> str:
    named = {} if made is None else {"made": made}
    return content_key(
        kind="measured",
        version=[__version__, ALGORITHMS, MEASUREMENTS],
        checkpoint=session.checkpoint.fingerprint(),
        calibration=session.calibration_fingerprint(),
        mix={n: r.to_json() for n, r in mix.items()},
        split=split,
        **named,
    )


@torch.no_grad()
def measure_splits(
    session: Session, test: StreamedModel, splits: Sequence[str], windows: int | None = None
) -> dict[str, Measured]:
    """Compares any model with the original on splits of the calibration, by name: `held_out` chooses, `report` reports. The
    windows of all of them go through the model together, as many as fit. windows: only so many of each, the first."""
    file = session.calibration
    if file is None:
        raise ValueError("there is no held-out data")
    batches = {s: getattr(calibrations, f"{s}_batches")(file)[:windows] for s in splits}
    places = [(s, f"{REFERENCES[s]}:{i}") for s, own in batches.items() for i in range(len(own))]
    every = [batch for own in batches.values() for batch in own]
    # Of a few windows smaller groups, so that there is one for each of some cores.
    tokens = session.machine.tokens_per_batch // (1 if windows is None else 2)
    groups = list(calibrations.merge_batches(every, tokens))
    language = bool(file.metadata["language"])
    references = [partial(file.get, name) for _, name in places]
    compared = _scores if language else _similarities
    scores: dict[str, list[Any]] = {s: [] for s in splits}
    for (split, _), score in zip(places, compared(session, test, groups, references), strict=True):
        scores[split].append(score)
    return {
        s: _summarised(found, tuple(calibrations.domains(file, s)[:windows]), language)
        for s, found in scores.items()
    }


def _scores(
    session: Session, test: StreamedModel, groups: Sequence[Batch], references: Sequence[Callable[[], Tensor]]
) -> list[TokenScores]:
    """The scores of every window of some batches, a core of a CPU each where there are enough: of small models the
    operations between the products gain nothing from several. references: what gives the original's hidden states, by
    window."""
    reference = session.reference()
    windows = [row for group in groups for row in group["input_ids"]]

    def score(index: int) -> TokenScores:
        ids, out = windows[index], hidden[index]
        return score_window(reference, references[index]().to(out.device), test, out, ids.to(out.device))

    for model in (reference, test):
        model.settle()  # one thread at a time may
    machine = session.machine
    with machine.one_core_each() if len(groups) >= machine.threads else nullcontext(map) as each:
        hidden = [row for out in each(lambda group: test.hidden(group["input_ids"]), groups) for row in out]
    give_back()
    with machine.one_core_each() as each:
        with reference.holding(reference.head), test.holding(test.head):
            return list(each(score, range(len(windows))))


def _similarities(
    session: Session, test: StreamedModel, groups: Sequence[Batch], references: Sequence[Callable[[], Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """Cosine and error of every output of some batches of a model that is no language model."""
    out = [test.outputs(**group) for group in groups]
    rows = [row[None] for o in out for row in (o.mean(dim=1) if o.ndim == 3 else o)]
    return [compare_outputs(get().to(o.device)[None], o) for get, o in zip(references, rows, strict=True)]


def _summarised(scores: Sequence[Any], domains: tuple[str, ...], language: bool) -> Measured:
    if language:
        return Measured(summarise(scores), tuple(float(s.kl.mean()) for s in scores), domains)
    cosine, errors = torch.cat([c for c, _ in scores]), torch.cat([e for _, e in scores])
    return Measured(summarise_outputs(cosine, errors), tuple(errors.tolist()), domains)
