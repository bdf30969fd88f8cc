"""How exactly float32 matrix products are computed in a part of a conversion."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Rows below which casting costs more than it saves.
FEWEST_ROWS = 64
# Whether linear layers round in a block of exact products.
_layers_round = False


@contextmanager
def fast_products() -> Iterator[None]:
    """Products may round their inputs: to TF32 on a GPU, to bfloat16 on a CPU with units for that (AMX: 2.5 times faster).
    Where a CPU has bfloat16 products but no AMX, the linear layers of `rounding` models use them, results rounded too.

    For statistics of inputs and gradients: 0.4 % per product, with random signs, are far below what a sample of text leaves
    open, and a second moment of rounded inputs is still positive semi-definite. Not for anything that is reported.
    """
    with _precision("medium"):
        yield


@contextmanager
def exact_products() -> Iterator[None]:
    """Products are computed in float32 inside a block of `fast_products`."""
    with _precision("highest"):
        yield


@contextmanager
def exact_beside_layers() -> Iterator[None]:
    """As `exact_products`, but the linear layers of `rounding` models go on rounding in a block of `fast_products`: another
    thread may run them meanwhile. Not where torch itself rounds (`rounded_by_torch`): those would not."""
    global _layers_round
    before = _layers_round
    _layers_round = before or torch.get_float32_matmul_precision() != "highest"
    try:
        with exact_products():
            yield
    finally:
        _layers_round = before


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


@contextmanager
def _precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def rounding(module: nn.Module, head: nn.Module | None) -> None:
    """From now on the linear layers of a model on a CPU, but for its head, round to bfloat16 in a block of `fast_products`.

    Only where this CPU multiplies such numbers faster and torch does not do it by itself (AVX512-BF16 without AMX: 1.4 to
    2.8 times). Logits are differences of large numbers, and stay as they are.
    """
    if _own_products():
        for part in module.modules():
            if type(part) is nn.Linear and part is not head:
                part.forward = MethodType(_linear, part)  # type: ignore[method-assign]


def outer(left: Tensor, right: Tensor) -> Tensor:
    """left^T right of [n, features] each, float32; in a block of `fast_products` rounded as by `rounding` models.

    Not for a second moment: rounding the result may make that indefinite.
    """
    if left.device.type == "cpu" and _own_products() and _rounds(left.shape[0]):
        return (left.bfloat16().T @ right.bfloat16()).float()
    return left.T @ right


def _rounds(rows: int) -> bool:
    return torch.get_float32_matmul_precision() != "highest" and rows >= FEWEST_ROWS


def rounded_by_torch() -> bool:
    """Whether torch's own products on this CPU round their inputs in a block of `fast_products`."""
    # On ARM what torch does at a lower precision depends on its build.
    return _has("amx_tile") or platform.machine().lower() in ("aarch64", "arm64")


@cache
def _own_products() -> bool:
    return _has("avx512_bf16") and not _has("amx_tile")


def _has(name: str) -> bool:
    check = getattr(torch.cpu, f"_is_{name}_supported", None)
    return check is not None and bool(check())


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    weight, rows = module.weight, x.numel() // max(1, x.shape[-1])
    rounds = _rounds(rows) or (_layers_round and rows >= FEWEST_ROWS)
    if not rounds or x.dtype != torch.float32 or weight.requires_grad:
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
