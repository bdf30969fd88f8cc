"""A model's skeleton cut to what one rank holds, and the modules that put the ranks' results together.

Which part of every tensor it is says runtime/tensor_parallel.py; runtime/loading.py fills the skeleton from the file.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nstf.errors import CorruptError, UnsupportedError, UsageError
from nstf.kernels.formats import EncodedTensor, FormatError
from nstf.kernels.formats.shards import Span, shard
from nstf.runtime.artifact import Artifact
from nstf.runtime.divided_modules import (
    AheadLinear,
    DividedEmbedding,
    DividedExperts,
    DividedHead,
    DividedNorm,
    SummedLinear,
    derive,
)
from nstf.runtime.ranks import Ranks
from nstf.runtime.tensor_parallel import NORMS, Division, vocabulary_part


class DividedModel:
    """The parts of one rank of a model in an artifact.

    Raises UnsupportedError for an architecture that transformers has no plan for, UsageError for too many ranks.
    """

    def __init__(self, artifact: Artifact, ranks: Ranks, device: torch.device) -> None:
        self.artifact, self.ranks, self.device = artifact, ranks, device
        self._division = Division(artifact.config(), ranks.size)
        # Takes this rank's pieces of arrays that are exchanged to its device.
        self.copy: Callable[[Tensor], Tensor] = lambda piece: piece.to(device)
        self._own: dict[str, Span | None] = {}
        # What one host's ranks read of one file is in memory once: exchanging it takes twice as long as cutting it.
        self._exchanged = device.type == "cuda" or len(set(ranks.tell(_copy_of(artifact)))) > 1

    def narrow(self, model: nn.Module, sources: Mapping[str, str]) -> None:
        """Gives every parameter of a skeleton the shape of this rank's part. sources: name in the model -> stored name.

        Raises UnsupportedError for a tensor that cannot be cut, or a module that is not known divided; CorruptError for
        one of another shape than the model's.
        """
        narrowed: dict[int, nn.Parameter] = {}
        for name, source in sources.items():
            owner, _, leaf = name.rpartition(".")
            module: Any = model.get_submodule(owner)
            whole = module._parameters[leaf]
            if id(whole) not in narrowed and tuple(whole.shape) != self.artifact.record(source).shape:
                raise CorruptError(
                    f"{self.artifact.path}: tensor {source!r} has shape {list(self.artifact.record(source).shape)}, "
                    f"but its config.json asks for {list(whole.shape)}"
                )
            span = self._span(source)
            self._check(name, module, span)
            if span is None:
                continue
            # Tied parameters stay one object: that is how they are recognised.
            if id(whole) not in narrowed:
                part = torch.empty(span.of(tuple(whole.shape)), dtype=whole.dtype, device="meta")
                narrowed[id(whole)] = nn.Parameter(part, requires_grad=False)
            module._parameters[leaf] = narrowed[id(whole)]

    def encoded(self, source: str) -> EncodedTensor:
        """This rank's part of a stored tensor: a view of the file where it lies in one piece.

        Columns are a little of every page: ranks with a copy of the file each, or a GPU each, read such a tensor together,
        so that none reads more than its share.
        All must ask for the same tensors in one order.
        """
        whole, span = self.artifact.encoded(source), self._span(source)
        if self._exchanged and span is not None and span.axis > 0:
            arrays = self.ranks.read_together(whole.arrays, self.copy)
            whole = EncodedTensor(whole.tree, whole.shape, arrays)
        try:
            return whole if span is None else shard(whole, span)
        except FormatError as error:
            raise self._refusal(source, error) from error

    def connect(self, model: Any, sources: Mapping[str, str]) -> None:
        """Makes the modules of a filled model put the ranks' results together."""
        spans = {name: span for name, source in sources.items() if (span := self._span(source)) is not None}
        for name, span in spans.items():
            owner, _, leaf = name.rpartition(".")
            whole = self.artifact.record(sources[name]).shape[span.axis]
            self._connect(owner, leaf, model.get_submodule(owner), span, whole)
        for owner in {name.rpartition(".")[0].rpartition(".")[0] for name in spans if ".q_proj." in name}:
            _share_heads(model.get_submodule(owner))
        _look_ahead(model)

    def _connect(self, owner: str, leaf: str, module: Any, span: Span, whole: int) -> None:
        """whole: the tensor's size along the axis that is cut."""
        ranks = self.ranks
        if "experts" in owner.split("."):
            if not isinstance(module, DividedExperts):
                derive(module, DividedExperts, ranks=ranks, first=span.start, num_experts=span.size)
        elif isinstance(module, nn.Embedding):
            module.padding_idx = None  # of the whole table
            derive(module, DividedEmbedding, ranks=ranks, first=span.start, rows=span.size, vocabulary=whole)
        elif owner.endswith(NORMS):
            derive(module, DividedNorm, ranks=ranks, whole=whole, copies=ranks.size * span.size / whole)
        elif owner.endswith("lm_head"):
            if leaf == "weight":
                width = vocabulary_part(whole, ranks.size)
                derive(module, DividedHead, ranks=ranks, width=width, vocabulary=whole)
        elif span.axis == 1:
            module.in_features = span.size
            derive(module, SummedLinear, ranks=ranks, following=())
        else:
            module.out_features = span.size

    def _check(self, name: str, module: Any, span: Span | None) -> None:
        """Raises UnsupportedError for a module whose results are not put together here."""
        owner, _, leaf = name.rpartition(".")
        style = self._division.style(name)
        if "experts" in owner.split("."):
            known = hasattr(module, "num_experts") and span is not None and span.axis == 0
        elif span is None:
            known = True
        elif owner.endswith(("embed_tokens", "lm_head")):
            known = isinstance(module, nn.Embedding | nn.Linear) and span.axis == 0
        elif owner.endswith(NORMS):
            known = hasattr(module, "variance_epsilon") and list(module._parameters) == ["weight"]
        else:
            known = isinstance(module, nn.Linear)
        if not known:
            raise UnsupportedError(
                f"{self.artifact.path}: {type(module).__name__}.{leaf} ({name}, {style} in transformers' plan) does not run "
                "divided; load without tensor_parallel"
            )

    def _span(self, source: str) -> Span | None:
        if source not in self._own:
            record = self.artifact.record(source)
            try:
                found = self._division.spans(source, record.tree, record.shape)
            except FormatError as error:
                raise self._refusal(source, error) from error
            self._own[source] = None if found is None else found[self.ranks.rank]
        return self._own[source]

    def _refusal(self, source: str, error: FormatError) -> UnsupportedError:
        return UnsupportedError(
            f"{self.artifact.path}: {source} cannot be divided among {self.ranks.size} ranks: {error}; "
            f"`nstf inspect --tp {self.ranks.size}` lists what cannot"
        )


def _copy_of(artifact: Artifact) -> bytes:
    """The same for all ranks whose arrays lie in the memory of one host, or each in its own: those need no exchange."""
    if artifact.state is None:
        return b"read"
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        host = socket.gethostname()
    return hashlib.sha256(f"{host} {artifact.state}".encode()).digest()


def _share_heads(attention: Any) -> None:
    """How many query heads a key head of this rank serves."""
    groups = attention.q_proj.out_features // attention.k_proj.out_features
    if not hasattr(attention, "num_key_value_groups"):
        raise UnsupportedError(f"{type(attention).__name__} does not run divided: it counts its heads itself")
    attention.num_key_value_groups = groups


def _look_ahead(model: Any) -> None:
    """Tells every product whose results are summed which encoded products come next."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if not isinstance(module, SummedLinear):
            continue
        layer, _, kind = name.rpartition(".")[0].rpartition(".")
        if kind == "self_attn":
            following = [f"{layer}.mlp.{leaf}" for leaf in ("gate_proj", "up_proj")]
        else:
            stack, _, number = layer.rpartition(".")
            after = f"{stack}.{int(number) + 1}" if number.isdecimal() else ""
            following = [f"{after}.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj")]
        found = [modules[n] for n in following if n in modules and "weight_encoded" in modules[n]._modules]
        module.following = tuple(m.weight_encoded for m in found)
        for after_it in found:
            if not isinstance(after_it, AheadLinear):
                derive(after_it, AheadLinear)


def check_options(attention: str, kv_cache: str) -> None:
    """Raises UsageError for what a divided model does not do."""
    if attention != "full":
        raise UsageError("an attention plan does not run divided: leave out attention, or tensor_parallel")
    if kv_cache != "float16":
        raise UsageError(f"kv_cache {kv_cache!r} does not run divided: leave it out")
