"""The groups of weights that are encoded together in a pass: those that read one input, in the order they run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from nstf.analyzers.residual import residual_writers
from nstf.analyzers.turnstile import call_order
from nstf_convert.pipeline.calibrate.batches import model_output
from nstf_convert.pipeline.calibrate.statistics import PROBE_TOKENS
from nstf_convert.pipeline.calibrate.text import Batch, Data
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.session import Session

# Fewer batches than this leave nothing to hold out.
MIN_BATCHES = 4


@dataclass(frozen=True)
class Group:
    """Weights that read one input. key: the calibration's; module: the path of the first one that runs (empty: the
    head of a language model); norm: the norm whose input is the residual stream that the weight's output is added to.
    """

    key: str
    module: str
    weights: tuple[str, ...]
    norm: str | None = None


def find_groups(session: Session, mix: Mapping[str, Recipe], batches: Sequence[Batch]) -> list[Group]:
    """The groups a gate can stand before, in the order in which they run."""
    model, file = session.reference(), session.calibration
    if file is None:
        return []
    modules: dict[str, list[str]] = {}
    for path, _, weight in model.linear_modules():
        modules.setdefault(weight, []).append(path)
    data = run_data(session)
    by_path = {p: m for p, m, _ in model.linear_modules()}
    calls, writers = _probed(session, by_path, data, batches[0])
    once = {p for p, m in by_path.items() if calls.count(m) == 1}

    def covered(name: str) -> bool:
        unit = session.units[name]
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
            # What a gate there sees are the last hidden states.
            if weights and not model.transforms:
                groups.append((len(calls), Group(key, "", weights)))
        elif weights and key in once:
            # The stream behind a convolution has its channels in the middle, and its rows are patches.
            rowwise = not isinstance(by_path[key], nn.modules.conv._ConvNd)
            norm = writers.get(key) if len(weights) == 1 and rowwise else None
            groups.append((position[key], Group(key, key, weights, norm)))
    return [g for _, g in sorted(groups, key=lambda pair: pair[0])]


def first_groups(session: Session, groups: Sequence[Group], share: float) -> list[Group]:
    """The first groups, until they have a share of the weights of all."""
    sizes = [sum(session.units[n].elements for n in g.weights) for g in groups]
    before = [sum(sizes[:i]) for i in range(len(groups))]
    return [g for g, size in zip(groups, before, strict=True) if size < share * sum(sizes)]


def _probed(
    session: Session, by_path: Mapping[str, nn.Module], data: Data, batch: Batch
) -> tuple[list[nn.Module], dict[str, str]]:
    """(the calls of the linear modules in order, `residual_writers` of them), from one pass of a few tokens for all mixes:
    of a large model it reads every weight."""
    if session.probed is None:
        model, writers = session.reference(), {}
        tokens = {n: v[:, :PROBE_TOKENS] if data.language and v.ndim == 2 else v for n, v in batch.items()}

        def run() -> None:
            writers.update(residual_writers(model.module, by_path, lambda: model_output(model, data, tokens)))

        session.probed = call_order(by_path.values(), run), writers
    return session.probed


def run_data(session: Session) -> Data:
    if session.calibration is None:
        raise ValueError("there is no calibration")
    return Data(bool(session.calibration.metadata["language"]), (), (), {})


def affordable(
    session: Session, groups: Sequence[Group], batches: Sequence[Batch], step: str, models: int
) -> list[Batch]:
    """The first batches whose activations, waiting before the widest group in `models` models, fit the machine's bound.
    step: what the report calls it.

    A waiting batch holds the input of its group and about as much again (the stream, queries, keys and values).
    """
    if not groups:
        return list(batches)
    widest = models * waiting_bytes(session, groups)
    kept = session.fitting(step, len(batches), -(-widest // len(batches)), MIN_BATCHES)
    return list(batches[:kept])


def waiting_bytes(session: Session, groups: Sequence[Group]) -> int:
    """What all batches hold while they wait before the widest group, in one model."""
    file = session.calibration
    entries = {} if file is None else file.metadata["hessians"]
    return max((entries[g.key]["tokens"] * inputs(session, g) for g in groups), default=0) * 4 * 2


def inputs(session: Session, group: Group) -> int:
    unit = session.units[group.weights[0]]
    return unit.elements // unit.inner_shape[0]
