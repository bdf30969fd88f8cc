"""The tensors a plan decides about, with everything known about each: shape, role, how its matrix is read, statistics."""

import math
import threading
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nstf.analyzers.roles import role_of
from nstf.errors import NstfError
from nstf.kernels.formats.tree import Shape
from nstf.quantizers.stats import Stats
from nstf_convert.module_kinds import CONVOLUTIONS, LINEAR_TYPES
from nstf_convert.streamed import StreamedModel

# Smaller tensors, and vectors, are stored as they are: their bytes do not matter and their errors do.
MIN_ELEMENTS = 2048
# Tensors of more weights are not expanded: what reads them takes some rows at a time.
LARGE_TABLE = 1 << 24
# What a weight of a large table takes beyond the rows that are worked on: 4 bytes as it is, up to 2 encoded, twice.
LARGE_BYTES = 8
# Roles whose values steer everything after them for a handful of bytes.
KEPT_ROLES = ("norm", "bias", "router")


@dataclass(frozen=True)
class Unit:
    """One tensor.

    shape: as in the model. permute: axes order that turns the encoded (inner) tensor into the model's, or None.
    lead: leading axes of the inner tensor that make the rows. kept: why the tensor is stored as it is, or None.
    dtype: the checkpoint's. uses: how the model reads it (`linear`, `embedding`, `experts`, `head`). stride: of a
    convolution, one number an axis.
    """

    name: str
    shape: Shape
    dtype: str
    role: str
    lead: int = 1
    permute: tuple[int, ...] | None = None
    kept: str | None = None
    uses: tuple[str, ...] = ()
    stride: tuple[int, ...] = ()

    @property
    def inner_shape(self) -> Shape:
        """The shape of the tensor that is encoded: [out, in, ...]."""
        if self.permute is None:
            return self.shape
        inverse = sorted(range(len(self.permute)), key=self.permute.__getitem__)
        return tuple(self.shape[i] for i in inverse)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def cols(self) -> int:
        """Columns of its matrix."""
        return math.prod(self.inner_shape[self.lead :])

    @property
    def large_table(self) -> bool:
        """Whether it is a table that is encoded some rows at a time; what reads activations is taken whole."""
        return self.lead == 1 and self.elements > LARGE_TABLE and "embedding" in self.uses

    def inner(self, weight: Tensor) -> Tensor:
        """The tensor to encode, contiguous, from the model's: float32, of a large table whatever the checkpoint has, whose
        values are the same."""
        if not self.large_table or weight.dtype == torch.float64:
            weight = weight.to(torch.float32)
        if self.permute is not None:
            inverse = sorted(range(len(self.permute)), key=self.permute.__getitem__)
            weight = weight.permute(inverse)
        return weight.contiguous()


def find_units(infos: Mapping[str, tuple[Shape, str]], model: StreamedModel | None) -> list[Unit]:
    """A unit for every stored tensor, by name. infos: name -> (shape, dtype); model: None for unknown architectures."""
    uses: dict[str, list[str]] = {}
    types: dict[str, nn.Module] = {}
    if model is not None:
        for _path, module, weight in model.linear_modules():
            uses.setdefault(weight, []).append("head" if module is model.head else "linear")
            types.setdefault(weight, module)
        for path, module in model.module.named_modules():
            if isinstance(module, nn.Embedding):
                weight = model.stored_name(f"{path}.weight")
                uses.setdefault(weight, []).append("embedding")
                types.setdefault(weight, module)
        for path, module in model.expert_modules():
            for local in ("gate_up_proj", "down_proj"):
                name = model.stored_name(f"{path}.{local}")
                uses.setdefault(name, []).append("experts")
                types[name] = module
    return [
        _unit(name, shape, dtype, model is not None, tuple(uses.get(name, ())), types.get(name))
        for name, (shape, dtype) in sorted(infos.items())
    ]


def _unit(
    name: str, shape: Shape, dtype: str, known: bool, uses: tuple[str, ...], module: nn.Module | None
) -> Unit:
    role = role_of(name, shape, type(module).__name__ if module is not None else None)
    reason = None
    if dtype not in ("float32", "float16", "bfloat16", "float64"):
        reason = f"{dtype} values are not rounded"
    elif len(shape) < 2 or math.prod(shape) < MIN_ELEMENTS:
        reason = "small"
    elif role in KEPT_ROLES:
        reason = f"a {role}"
    elif known and not uses:
        reason = "not the weight of a layer"
    elif module is not None and getattr(module, "groups", 1) != 1:
        reason = "a grouped convolution"
    if reason is not None:
        return Unit(name, shape, dtype, role, kept=reason, uses=uses)
    lead = 1
    permute: tuple[int, ...] | None = None
    if "experts" in uses or (not known and len(shape) == 3 and role == "expert_stack"):
        lead = 2
        hidden = getattr(getattr(module, "config", None), "hidden_size", None)
        if name.endswith("gate_up_proj") and hidden not in (None, shape[-1]) and shape[1] == hidden:
            permute = (0, 2, 1)
        if name.endswith("down_proj") and hidden is not None and shape[1] != hidden and shape[-1] == hidden:
            permute = (0, 2, 1)
    elif module is not None and "linear" in uses and not isinstance(module, LINEAR_TYPES):
        permute = (1, 0)  # GPT-2's Conv1D keeps [in, out]
    stride = tuple(module.stride) if isinstance(module, CONVOLUTIONS) else ()
    return Unit(name, shape, dtype, role, lead, permute, None, uses, stride)


def working_bytes(unit: Unit) -> int:
    """What encoding a tensor takes at most: it a few times over in float32, its Hessian in float64 with copies.

    Of a large table this is some rows at a time; the whole is there as the checkpoint gives it, and encoded, twice over
    while its parts are joined.
    """
    some = LARGE_TABLE if unit.large_table else unit.elements
    return 4 * 6 * some + LARGE_BYTES * (unit.elements - some) + 8 * 6 * unit.cols**2


class Readable(Protocol):
    """A calibration file, or what becomes one."""

    metadata: dict[str, Any]

    def names(self) -> set[str]: ...

    def get(self, name: str) -> Tensor: ...

    def find(self, name: str) -> Tensor | None: ...


class Statistics:
    """The calibration's numbers by tensor, turned into what quantisers take."""

    def __init__(self, file: Readable | None, device: torch.device | None = None) -> None:
        """file: a calibration file, or None when nothing is known (every error counts relative to its tensor); device:
        where the statistics are wanted (None: the CPU)."""
        self._file, self._device = file, device or torch.device("cpu")
        self._key_of: dict[str, str] = {}
        self._recent = threading.local()
        self._figures: dict[str, dict[Hashable, tuple[float, ...]]] = {}  # of Hessians that were dropped
        self._typical = 1.0
        if file is not None:
            for key, entry in file.metadata["hessians"].items():
                for weight in entry["weights"]:
                    self._key_of[weight] = key

    def group_of(self, unit: Unit) -> str:
        """Units with the same group share a Hessian: handling them in turn factors it once."""
        return self._key_of.get(unit.name, unit.name)

    def calibrated(self, unit: Unit) -> bool:
        """Whether the data says anything about this tensor."""
        return self._file is not None and (
            unit.name in self._key_of or self._find("frequency", unit.name) is not None
        )

    def has_hessian(self, unit: Unit) -> bool:
        """Whether the Hessian of this tensor's inputs is at hand; those of large models are used and dropped."""
        key = self._key_of.get(unit.name)
        return key is None or (self._file is not None and f"hessian:{key}" in self._file.names())

    def set_typical(self, signal: float) -> None:
        """Sets what a data-free tensor counts: the loss, in nats, of erasing a typical calibrated tensor."""
        self._typical = signal

    def of(self, unit: Unit, inner: Tensor) -> Stats:
        """Statistics of one tensor. inner: the tensor to encode (for data-free ones its norm sets the scale)."""
        if self._file is None or not self.calibrated(unit):
            return self._data_free(unit, inner)
        hessian_key = self._key_of.get(unit.name)
        sensitivity = self._find("sensitivity", unit.name)
        frequency = self._find("frequency", unit.name)
        if frequency is None:
            stats = self._shared(hessian_key)
            if unit.lead == 2:
                return stats.for_rows(self._expert_rows(unit, inner, stats))
            known = self.row_weight(unit)
            return stats if known is None else stats.for_rows(known)
        inputs = self._find("sensitivity_in", unit.name)
        look_up = torch.diag(inputs) if inputs is not None else torch.eye(unit.shape[-1], device=self._device)
        if hessian_key is None or sensitivity is None:
            return Stats(look_up, frequency)
        # A tied table errs in two places. Row j loses f_j d diag(g) d^T as an embedding and s_j d H d^T as the head;
        # one Hessian for all rows is their sum over rows, and each row's weight its own share of the trace.
        head = self._file.get(f"hessian:{hessian_key}").to(self._device)
        both = head * float(sensitivity.sum()) + look_up
        trace = float(torch.trace(both))
        weight = (sensitivity * float(torch.trace(head)) + frequency * float(torch.trace(look_up))) / trace
        return Stats(both, weight)

    def row_weight(self, unit: Unit) -> Tensor | None:
        """What an error of each output of a linear layer counts, [out], or None where nothing is known."""
        sensitivity = self._find("sensitivity", unit.name)
        rows = math.prod(unit.inner_shape[: unit.lead])
        return sensitivity if sensitivity is not None and sensitivity.numel() == rows else None

    def expert_tokens(self) -> dict[str, list[int]]:
        """Tokens each expert saw during calibration, by expert module."""
        if self._file is None:
            return {}
        names = [n for n in sorted(self._file.names()) if n.startswith("experts:")]
        return {n.split(":", 1)[1]: [int(v) for v in self._file.get(n)] for n in names}

    def _shared(self, key: str | None) -> Stats:
        if key is None or self._file is None:
            return Stats()
        # One per thread: workers go through tensors group by group, and a group factors its Hessian once.
        if f"hessian:{key}" not in self._file.names():
            raise NstfError(
                f"the Hessian of {key} was not kept with the calibration: remove the work directory and run again"
            )
        if getattr(self._recent, "key", None) != key:
            hessian = self._file.get(f"hessian:{key}").to(self._device)
            self._recent.key = key
            self._recent.stats = Stats(hessian, figures=self._figures.setdefault(key, {}))
        return self._recent.stats  # type: ignore[no-any-return]

    def forget(self) -> None:
        """Drops the Hessian that this thread used last, with its factors."""
        self._recent.key = self._recent.stats = None

    def _expert_rows(self, unit: Unit, inner: Tensor, stats: Stats) -> Tensor:
        """Row weights [experts * out] of a stack: each expert counts by the share of tokens it saw, at least 1 %."""
        experts, out = inner.shape[:2]
        tokens = self._find("experts", unit.name.rpartition(".")[0])
        share = (
            torch.ones(experts, device=self._device) / experts
            if tokens is None
            else tokens / tokens.sum().clamp_min(1)
        )
        share = share.clamp_min(0.01 / experts)
        sensitivity = self._find("sensitivity", unit.name)
        if sensitivity is None or sensitivity.numel() != out:
            # Inside the expert no gradient is seen: a relative error there counts like one at the expert's output.
            down = self._find("sensitivity", unit.name.rpartition(".")[0] + ".down_proj")
            scale = float(down.mean()) if down is not None else 1.0
            sensitivity = torch.full((out,), scale, device=self._device)
        return (share[:, None] * sensitivity[None, :]).reshape(-1)

    def _data_free(self, unit: Unit, inner: Tensor) -> Stats:
        step = max(1, LARGE_TABLE * len(inner) // max(1, inner.numel()))
        energy = sum(float(part.double().square().sum()) for part in torch.split(inner, step))
        rows = math.prod(unit.inner_shape[: unit.lead])
        weight = 2.0 * self._typical / max(energy, 1e-30)
        return Stats(None, torch.full((rows,), weight, device=self._device))

    def _find(self, kind: str, name: str) -> Tensor | None:
        found = None if self._file is None else self._file.find(f"{kind}:{name}")
        return None if found is None else found.to(self._device)


def fused_groups(units: Iterable[Unit]) -> dict[str, str]:
    """Tensors a runtime may run as one: name -> group, for q/k/v and gate/up of the same layer."""
    groups = {}
    for unit in units:
        parent = unit.name.rsplit(".", 2)[0]
        if unit.kept is None and unit.role in ("q", "k", "v"):
            groups[unit.name] = f"{parent}:qkv"
        elif unit.kept is None and unit.role in ("gate", "up"):
            groups[unit.name] = f"{parent}:gate_up"
    return groups
