"""The models that healing trains: encoded weights decoded differentiably when a module needs them, and not kept.

The backward pass of a linear layer needs its weight again. Kept weights would fill the memory a streamed model saves, so
autograd keeps a note instead (`saved_tensors_hooks`) and the weight is decoded a second time. What stays in memory are
the codes, a byte or two a weight, and the activations.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nstf.kernels.formats.tuning import Prepared
from nstf_convert.module_kinds import buffers_to
from nstf_convert.streamed import StreamedModel

# Weights above this are decoded when their module runs; smaller ones once a step.
SMALL_ELEMENTS = 1 << 16


class TunedModel(StreamedModel):
    """A transformers model whose weights are functions of continuous values that can be tuned.

    weights: stored name -> what decodes it. values: stored name -> its values, tensors of a graph, set before each step.
    """

    def __init__(
        self,
        config: dict[str, Any],
        weights: Mapping[str, Prepared],
        ties: Mapping[str, str],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """dtype: of the large weights; small ones stay float32."""
        self._weights = weights
        self.dtype = dtype
        self._values: Mapping[str, Mapping[str, Tensor]] = {}
        self._live: dict[int, Callable[[], Tensor]] = {}
        self._small: list[Callable[[], None]] = []
        super().__init__(config, self._large, ties, lazy=True, held=weights)
        self.device = device  # where inputs and buffers go; weights are made there
        buffers_to(self.module, device)

    def set_values(self, values: Mapping[str, Mapping[str, Tensor]]) -> None:
        """The values of the next forward passes: name -> path -> tensor."""
        self._values = values
        for settle in self._small:
            settle()

    @contextmanager
    def in_dtype(self, dtype: torch.dtype) -> Iterator[None]:
        """Large weights have another dtype while the block runs."""
        before, self.dtype = self.dtype, dtype
        try:
            yield
        finally:
            self.dtype = before

    @contextmanager
    def forgetting_weights(self) -> Iterator[None]:
        """What is computed in the block keeps notes for the backward pass instead of decoded weights."""

        def pack(saved: Tensor) -> Any:
            again = self._live.get(saved.untyped_storage().data_ptr()) if saved.numel() else None
            if again is None:
                return saved
            return again, saved.size(), saved.stride(), saved.storage_offset()

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            again, size, stride, offset = packed
            with torch.no_grad():
                whole: Tensor = again()
            return whole.as_strided(size, stride, offset)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _value(self, name: str) -> Tensor:
        return self._prepared(name).decode(self._values[name])

    def _prepared(self, name: str) -> Prepared:
        prepared = self._weights[name]
        return prepared.widened() if self.dtype == torch.float32 else prepared

    def _buffer(self, name: str) -> Tensor:
        return self._value(name)

    def _large(self, name: str) -> Tensor:
        return self._value(name).to(self.dtype).contiguous()

    def _attach(self, module: nn.Module, names: dict[str, str]) -> None:
        meta = dict(module.named_parameters(recurse=False))
        small = [n for n, p in meta.items() if p.numel() <= SMALL_ELEMENTS or p.ndim < 2]
        large = [n for n in meta if n not in small]

        def settle() -> None:
            for local in small:
                module._parameters[local] = self._value(names[local]).float()  # type: ignore[assignment]

        self._small.append(settle)
        if not large:
            return
        if type(module) is nn.Embedding and self._weights[names["weight"]].can_slice():
            self._look_up_rows(module, names["weight"])
            return

        def load() -> None:
            for local in large:
                name = names[local]
                weight = self._large(name)
                self._live[weight.untyped_storage().data_ptr()] = lambda name=name: self._large(name)  # type: ignore[misc]
                module._parameters[local] = weight  # type: ignore[assignment]

        def drop() -> None:
            for local in large:
                weight = module._parameters[local]
                if weight is not None and weight.device.type != "meta":
                    self._live.pop(weight.untyped_storage().data_ptr(), None)
                module._parameters[local] = meta[local]

        self._fetchers[module] = (load, drop)
        module.register_forward_pre_hook(lambda *_: None if module in self._held else load())
        module.register_forward_hook(lambda *_: None if module in self._held else drop(), always_call=True)

    def _look_up_rows(self, module: nn.Embedding, name: str) -> None:
        """Makes a table decode the rows it is asked for only."""

        def forward(ids: Tensor) -> Tensor:
            found, where = torch.unique(ids, return_inverse=True)
            rows = self._prepared(name).rows(self._values[name], found)
            return nn.functional.embedding(where, rows.float())

        module.forward = forward  # type: ignore[method-assign, assignment]


def reference_on(
    device: torch.device,
    config: dict[str, Any],
    source: Callable[[str], Tensor],
    ties: Mapping[str, str],
    held: Collection[str],
) -> StreamedModel:
    """The original model with its computation on `device`, its weights where `source` has them, those named in `held`."""
    return StreamedModel(config, source, ties, lazy=True, device=device, held=held)


def backward_of_divergence(
    teacher: StreamedModel, target: Tensor, student: TunedModel, hidden: Tensor, rows: int
) -> Tensor:
    """Mean KL(teacher || student) over tokens, with its gradients added to what `hidden` and the head came from.

    target, hidden: [tokens, hidden], what the heads read. Logits exist for `rows` tokens at a time, in float32: their
    gradient is softmax(student) - softmax(teacher). Returns the divergence in nats, detached.
    """
    tokens = hidden.shape[0]
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    leaf = hidden.detach().requires_grad_()
    head = student.head
    with teacher.holding(teacher.head), student.holding(head), _cast(teacher.head, student.dtype):
        parts = _leaves(head)
        for start in range(0, tokens, rows):
            piece = slice(start, start + rows)
            logits = student.logits(leaf[piece])
            with torch.no_grad():
                log_p = torch.log_softmax(teacher.logits(target[piece]).float(), dim=-1)
                log_q = torch.log_softmax(logits.float(), dim=-1)
                p = log_p.exp()
                total += (p * (log_p - log_q)).sum(dtype=torch.float64)
                gradient = (log_q.exp_() - p) / tokens
            # Small weights of layers between, which are decoded once, are gone through again by the next rows.
            logits.backward(gradient.to(logits.dtype), retain_graph=student.transforms)  # type: ignore[no-untyped-call]
    tensors, gradients = [hidden], [leaf.grad]
    for name, whole, part in parts:
        head._parameters[name] = whole  # type: ignore[union-attr, assignment]
        if part.grad is not None and whole.requires_grad:
            tensors.append(whole)
            gradients.append(part.grad)
    torch.autograd.backward(tensors, gradients)
    return total / tokens


@contextmanager
def _cast(module: nn.Module | None, dtype: torch.dtype) -> Iterator[None]:
    """Weights that are held are cast once while the block runs, instead of at every use under autocast."""
    before = dict(module._parameters) if module is not None else {}
    try:
        for name, value in before.items():
            if value is not None and value.ndim > 1:
                module._parameters[name] = nn.Parameter(value.to(dtype), requires_grad=False)  # type: ignore[union-attr]
        yield
    finally:
        for name, value in before.items():
            module._parameters[name] = value  # type: ignore[union-attr]


def _leaves(head: nn.Module | None) -> list[tuple[str, Tensor, Tensor]]:
    """Replaces the head's weights by leaves that gather gradients over many calls: (name, weight, leaf) of each."""
    out: list[tuple[str, Tensor, Tensor]] = []
    for name, whole in (head._parameters if head is not None else {}).items():
        if whole is not None and whole.requires_grad:
            leaf = whole.detach().requires_grad_()
            head._parameters[name] = leaf  # type: ignore[union-attr, assignment]
            out.append((name, whole, leaf))
    return out
