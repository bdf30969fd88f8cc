"""What passes over the layers have in common: where their results are, and what a group's statistics are made of."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nstf.kernels.formats import EncodedTensor, node_from_json, stored_bytes
from nstf.quantizers.stats import Stats, loss
from nstf_convert.pipeline.improve.groups import Group
from nstf_convert.pipeline.mix import NamedLoader, tree_of
from nstf_convert.pipeline.propose import recipe as recipes
from nstf_convert.pipeline.propose.decoded import decoded
from nstf_convert.pipeline.propose.encoder import Result
from nstf_convert.pipeline.propose.recipe import Recipe
from nstf_convert.pipeline.propose.units import Unit
from nstf_convert.pipeline.session import Session
from nstf_convert.pipeline.store.workdir import content_key


@dataclass(frozen=True, eq=False)
class InPass:
    """A mix encoded in a pass over the layers; `load` and `kept` as the Encoder's. results: by name, as from `encode_all`;
    keys: of what the pass covers, in the work directory."""

    session: Session
    results: dict[str, Result]
    keys: Mapping[str, str] = field(default_factory=dict)

    def load(self, unit: Unit, recipe: Recipe) -> EncodedTensor:
        """The encoded tensor of the mix."""
        if unit.name not in self.keys:
            return self.session.encoder.load(unit, recipe)
        found = self.session.work.find(self.keys[unit.name])
        if found is None:
            raise RuntimeError(f"{unit.name}: the work directory lost a result while it was in use")
        arrays, metadata = found
        return EncodedTensor(node_from_json(metadata["tree"]), unit.shape, arrays)

    def kept(self, unit: Unit) -> EncodedTensor:
        """The tensor as it is in the checkpoint."""
        return self.session.encoder.kept(unit)

    def loader(self) -> NamedLoader:
        """What gives the tensors of the mix when a file is written or measured."""

        def load(unit: Unit, recipe: Recipe | None) -> EncodedTensor:
            return self.kept(unit) if recipe is None else self.load(unit, recipe)

        return NamedLoader(load, content_key(kind="in a pass", keys=dict(self.keys)))


def all_there(session: Session, keys: Sequence[str]) -> bool:
    """Whether all results are in the work directory, undamaged: all of them are read, on all cores."""
    if any(session.work.find_metadata(key) is None for key in keys):
        return False
    with ThreadPoolExecutor(session.threads) as pool:
        return all(pool.map(session.work.has, keys))


def stored_loss(session: Session, name: str, key: str) -> float:
    """The loss of a tensor that a pass has encoded."""
    found = session.work.find_metadata(key)
    if found is None:
        raise RuntimeError(f"{name}: the work directory lost a result while it was in use")
    return float(found["loss"])


def bits_of(session: Session, mix: Mapping[str, Recipe]) -> float:
    """Bits per weight of the tensors of a mix, scales included."""
    units = [session.units[n] for n in mix]
    stored = sum(stored_bytes(tree_of(u, mix[u.name]), u.shape) for u in units)
    return 8 * stored / max(1, sum(u.elements for u in units))


def shrinkage(session: Session, group: Group) -> float:
    """As much as the calibration's Hessian of that input was shrunk."""
    file = session.calibration
    return 0.0 if file is None else float(file.metadata["hessians"][group.key].get("shrinkage", 0.0))


def token_weights(
    session: Session, group: Group, rows: Sequence[Tensor], batches: int
) -> list[Tensor] | None:
    """What each of a group's rows counts, by batch; None: all the same. batches: of the pass."""
    file = session.calibration
    found = None if file is None else file.find(f"token_weight:{group.key}")
    sizes = [r.shape[0] for r in rows]
    # The windows that fit the memory are the first ones; a layer that some batches skip has no order of its own.
    if found is None or len(rows) < batches or found.numel() < sum(sizes):
        return None
    return list(torch.split(found.reshape(-1)[: sum(sizes)], sizes))


def outcome(
    unit: Unit, inner: Tensor, encoded: EncodedTensor, stats: Stats
) -> tuple[EncodedTensor, Tensor, float]:
    """Of a tensor and how it was encoded: (that in the model's order of axes, decoded in its own, what it loses)."""
    became = decoded(encoded, inner.device).reshape(inner.shape)
    lost = loss(inner, became, stats, unit.lead)
    if unit.permute is not None:
        encoded = recipes.permuted(encoded, unit.permute, unit.shape)
    return encoded, became, lost
