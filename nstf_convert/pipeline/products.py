"""How exactly float32 matrix products are computed in a part of a conversion."""

import platform
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nstf.quantizers.rounding.products import precision

# Mixes of more bits a weight lose so little that rounded products would drown it: exact ones gave 5 % less divergence at 8
# bits (sample LLaMA).
EXACT_BITS = 5.0
# Rows below which casting costs more than it saves.
FEWEST_ROWS = 64
# Whether layers round in a block of exact products.
_layers_round = False
# `rounding` models whose layers work in bfloat16 (`layers_in`).
_in_bfloat16: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


@contextmanager
def fast_products() -> Iterator[None]:
    """Products may round their inputs: to TF32 on a GPU, to bfloat16 on a CPU with units for that (AMX: 2.5 times faster).
    The layers of `rounding` models use a CPU's bfloat16 products themselves, results rounded too.

    For statistics of inputs and gradients: 0.4 % per product, with random signs, are far below what a sample of text leaves
    open, and a second moment of rounded inputs is still positive semi-definite. Not for anything that is reported, and not
    for what turns positions into angles: torch rounds those too (`rounded_layers`).
    """
    with precision("medium"):
        yield


@contextmanager
def rounded_layers(device: torch.device, language: bool = True) -> Iterator[None]:
    """The layers of `rounding` models round as in a block of `fast_products`, and nothing else does, whatever another thread
    computes meanwhile. Where they cannot (`rounds_alone`) the block is one of `fast_products`.

    torch's own setting holds for every product of the process: with AMX it rounds the positions that rotary embeddings
    multiply, so that beyond 256 tokens angles are off by up to the position's last bits.
    """
    global _layers_round
    if not rounds_alone(device, language):
        with fast_products():
            yield
        return
    before, _layers_round = _layers_round, True
    try:
        with exact_products():
            yield
    finally:
        _layers_round = before


def rounds_alone(device: torch.device, language: bool = True) -> bool:
    """Whether the layers of `rounding` models on a device round without torch's help, so that other products beside them may
    be exact. language: whether they read text; the convolutions of others are rounded by torch alone, if at all."""
    return device.type == "cpu" and (not rounded_by_torch() or (language and _own_products()))


@contextmanager
def layers_in(model: nn.Module, rows: int) -> Iterator[None]:
    """What a thread runs a model in. In a block of `rounded_layers` or `fast_products` a `rounding` model that bears it
    works in bfloat16 between its linear layers and attention, too. rows: tokens. What looks on has to leave that for
    products of its own (torch.autocast, enabled=False)."""
    if model not in _in_bfloat16 or not _layer_rounds(rows):
        yield
        return
    # Weights are decoded anew, or are read from a mapped file: nothing cast stays.
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        yield


@contextmanager
def exact_products() -> Iterator[None]:
    """Products are computed in float32 inside a block of `fast_products`. In one of `rounded_layers` layers still round."""
    with precision("highest"):
        yield


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """What is computed inside has the same bits every time, on one GPU or another of its kind.

    The backward pass of attention on a GPU adds its parts up in the order in which they happen to be there, unless it is
    told strictly not to: where only warnings are asked for it goes on as before. Raises RuntimeError at an operation that
    has no repeatable form.
    """
    if device.type != "cuda":
        yield
        return
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    settings: Any = torch.utils.deterministic  # a property of the module, which its types do not name
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Filling what `torch.empty` gives would only find faults of ours, at the cost of a write.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled


def rounding(module: nn.Module, head: nn.Module | None) -> None:
    """From now on the linear layers of a model on a CPU, but for its head, round to bfloat16 in a block of `fast_products`
    or `rounded_layers`; with AMX what is between them too, where a model is made of linear layers, norms and attention.

    Only where this CPU multiplies such numbers faster. Linear layers alone: AVX512-BF16 1.4 to 2.8 times. A layer of the
    135 M model with AMX, forwards and with its gradient, beside torch's own rounding of float32 products: linear layers and
    attention 1.3 and 1.25 times, all of it 1.9 and 1.6. Logits are differences of large numbers, and stay as they are.
    """
    if not _own_products():
        return
    if rounded_by_torch() and _is_plain(module):
        _in_bfloat16.add(module)
        return
    for part in module.modules():
        if type(part) is nn.Linear and part is not head:
            part.forward = MethodType(_linear, part)  # type: ignore[method-assign]


def _is_plain(module: nn.Module) -> bool:
    """Whether a model has no other weights than tables, linear layers and norms, and attends by transformers' interface."""
    kinds = {type(p) for p in module.modules() if next(p.parameters(recurse=False), None) is not None}
    plain = all(k in (nn.Linear, nn.Embedding) or "Norm" in k.__name__ for k in kinds)
    return plain and bool(getattr(module, "_supports_attention_backend", False))


def outer(left: Tensor, right: Tensor) -> Tensor:
    """left^T right of [n, features] each, float32; in a block of `fast_products` rounded as by `rounding` models.

    Not for a second moment: rounding the result may make that indefinite.
    """
    if left.device.type == "cpu" and _own_products() and not rounded_by_torch() and _rounds(left.shape[0]):
        return (left.bfloat16().T @ right.bfloat16()).float()
    return left.T @ right


def _rounds(rows: int) -> bool:
    return torch.get_float32_matmul_precision() != "highest" and rows >= FEWEST_ROWS


def _layer_rounds(rows: int) -> bool:
    return _rounds(rows) or (_layers_round and rows >= FEWEST_ROWS)


def rounded_by_torch() -> bool:
    """Whether torch's own products on this CPU round their inputs in a block of `fast_products`."""
    # On ARM what torch does at a lower precision depends on its build.
    return _has("amx_tile") or platform.machine().lower() in ("aarch64", "arm64")


def layers_may_round() -> bool:
    """Whether this CPU multiplies bfloat16 numbers faster, so that layers round where they may (`rounding`)."""
    return _own_products()


@cache
def _own_products() -> bool:
    return _has("avx512_bf16")


def _has(name: str) -> bool:
    check = getattr(torch.cpu, f"_is_{name}_supported", None)
    return check is not None and bool(check())


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    weight, rows = module.weight, x.numel() // max(1, x.shape[-1])
    if not _layer_rounds(rows) or x.dtype != torch.float32 or weight.requires_grad:
        return functional.linear(x, weight, module.bias)
    y: Tensor = _Rounded.apply(x, weight)  # type: ignore[no-untyped-call]
    return y if module.bias is None else y + module.bias


class _Rounded(torch.autograd.Function):
    """x W^T in bfloat16, differentiable in x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return functional.linear(x.bfloat16(), weight.bfloat16()).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return (gradients[0].bfloat16() @ weight.bfloat16()).float(), None
