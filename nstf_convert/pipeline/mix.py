"""A mix: one recipe per tensor. Its size, and what it loses when it is run."""

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nstf.kernels.formats import EncodedTensor, Node
from nstf.kernels.formats import dense as dense_format
from nstf.runtime.artifact import Shared, Source
from nstf_convert.measure import (
    Accuracy,
    Similarity,
    compare_outputs,
    score_window,
    summarise,
    summarise_outputs,
)
from nstf_convert.pipeline.calibration import TOKENS_PER_BATCH, held_out_batches, merge_batches
from nstf_convert.pipeline.candidates import price
from nstf_convert.pipeline.encoded import decoded_source
from nstf_convert.pipeline.job import Job
from nstf_convert.pipeline.recipe import Recipe
from nstf_convert.pipeline.units import Unit
from nstf_convert.streamed import StreamedModel


@dataclass(frozen=True)
class Measured:
    """accuracy: against the original on held-out data. score: what is minimised, mean KLD or relative L2 error."""

    accuracy: Accuracy | Similarity

    @property
    def score(self) -> float:
        a = self.accuracy
        return a.mean_kl if isinstance(a, Accuracy) else a.relative_l2


def tree_of(unit: Unit, recipe: Recipe | None) -> Node:
    """The stored tree of a tensor; None: kept as it is."""
    if recipe is None:
        return Node(dense_format.KIND, dense_format.Params(unit.dtype))
    return price(unit, recipe)[0]


def entries(job: Job, mix: Mapping[str, Recipe]) -> dict[str, tuple[Node, tuple[int, ...], str]]:
    """What `artifact_size` wants: (tree, shape, dtype) by the name in the file."""
    return {file_name(n): (tree_of(u, mix.get(n)), u.shape, u.dtype) for n, u in job.units.items()}


def sources(job: Job, mix: Mapping[str, Recipe]) -> dict[str, EncodedTensor | Source | Shared]:
    """What `write_artifact` wants: every tensor, loaded when its turn comes, and the tied names."""

    def one(unit: Unit) -> Source:
        recipe = mix.get(unit.name)

        def load() -> EncodedTensor:
            return job.encoder.kept(unit) if recipe is None else job.encoder.load(unit, recipe)

        return Source(tree_of(unit, recipe), unit.shape, unit.dtype, load)

    out: dict[str, EncodedTensor | Source | Shared] = {file_name(n): one(u) for n, u in job.units.items()}
    out |= {file_name(a): Shared(file_name(s)) for a, s in shared_names(job).items()}
    return out


def shared_names(job: Job) -> dict[str, str]:
    """Tied names: alias -> stored."""
    return dict(job.checkpoint.ties)


def file_name(name: str) -> str:
    """A tensor's name in the artifact: ONNX names may be paths or hold colons, which are percent-encoded there."""
    from urllib.parse import quote

    return quote(name, safe="._-[]+=@() ")


def measure(job: Job, mix: Mapping[str, Recipe]) -> Measured:
    """Runs the mix on the held-out data and compares it with the original."""
    source = decoded_source(job.encoder, job.units, dict(mix), job.source)
    measured = measure_model(job, StreamedModel(job.reference().config, source, job.checkpoint.ties))
    gc.collect()  # the model and its hooks refer to each other
    return measured


@torch.no_grad()
def measure_model(job: Job, test: StreamedModel) -> Measured:
    """Compares any model with the original on the held-out data of the calibration."""
    reference, file = job.reference(), job.calibration
    if file is None:
        raise ValueError("there is no held-out data")
    batches = held_out_batches(file)
    language = bool(file.metadata["language"])
    index = 0
    scores: list[Any] = []
    for group in merge_batches(batches, TOKENS_PER_BATCH):
        if language:
            ids = group["input_ids"]
            hidden = test.hidden(ids)
            with reference.holding(reference.head), test.holding(test.head):
                for row in range(ids.shape[0]):
                    ref = file.get(f"reference:{index + row}")
                    scores.append(score_window(reference, ref, test, hidden[row], ids[row]))
        else:
            out = test.outputs(**group)
            out = out.mean(dim=1) if out.ndim == 3 else out
            ref = torch.stack([file.get(f"reference:{index + row}") for row in range(out.shape[0])])
            scores.append(compare_outputs(ref, out))
        index += next(iter(group.values())).shape[0]
    if language:
        return Measured(summarise(scores))
    return Measured(summarise_outputs(torch.cat([c for c, _ in scores]), torch.cat([e for _, e in scores])))
