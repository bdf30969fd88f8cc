"""What is known about how a weight is used, and the loss that follows from it."""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from nstf.quantizers.rounding.factor import Factor, factor

T = TypeVar("T")

_CHUNK = 1 << 22  # weights per step of `loss`


@dataclass(frozen=True, eq=False)
class Stats:
    """`hessian`: float32 [in, in], mean over tokens of x x^T, None for the identity; `row_weight`: float32
    [out], mean squared gradient of the end loss with respect to each output, None for 1.

    The expected loss of an error dW is 1/2 sum_j row_weight_j dW_j H dW_j^T. All of it lies on the device of the weights it
    is used with, and so does what is derived from it.
    """

    hessian: Tensor | None = None
    row_weight: Tensor | None = None
    _factors: dict[tuple[float, bool], Factor] = field(default_factory=dict, repr=False)
    _derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    figures: dict[Hashable, tuple[float, ...]] = field(default_factory=dict, repr=False)
    """A few numbers of factors by key: they may outlive the Hessian, and answer for it where it is read again."""

    def ldl(self, damping: float = 0.01, act_order: bool = False) -> Factor:
        """The factor of the Hessian, computed once per (damping, act_order). Raises ValueError without
        one."""
        if self.hessian is None:
            raise ValueError("there is no Hessian to factor")
        key = (damping, act_order)
        if key not in self._factors:
            self._factors[key] = factor(self.hessian, damping, act_order)
        return self._factors[key]

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, computed once per key and shared with `for_rows`: other factors of the Hessian."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]  # type: ignore[no-any-return]

    def figure(self, key: Hashable, make: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        """The few numbers that `make` gives, computed once per key; see `figures`."""
        if key not in self.figures:
            self.figures[key] = make()
        return self.figures[key]

    def for_rows(self, row_weight: Tensor | None) -> "Stats":
        """The same Hessian with other row weights; factors are shared (q, k and v see the same inputs)."""
        return replace(self, row_weight=row_weight)

    def check(self, rows: int, cols: int) -> None:
        """Raises ValueError unless the statistics fit a [rows, cols] matrix."""
        if self.hessian is not None and tuple(self.hessian.shape) != (cols, cols):
            raise ValueError(f"the Hessian is {list(self.hessian.shape)}, the weight has {cols} columns")
        if self.row_weight is not None and self.row_weight.numel() != rows:
            raise ValueError(f"{self.row_weight.numel()} row weights for {rows} rows")


def row_loss(error: Tensor, hessian: Tensor | None) -> Tensor:
    """1/2 error_j H error_j^T for every row of `error` [rows, cols], float64 [rows]."""
    if hessian is None:
        return error.double().square().sum(1) / 2
    return ((error @ hessian.to(error)).mul_(error)).sum(1, dtype=torch.float64) / 2


def loss(weight: Tensor, decoded: Tensor, stats: Stats | None = None, lead: int = 1) -> float:
    """Expected loss of replacing `weight` by `decoded` (same shape; the first `lead` axes are rows)."""
    if weight.shape != decoded.shape:
        raise ValueError(f"weight {list(weight.shape)} and decoded {list(decoded.shape)} differ in shape")
    matrix = decoded.reshape(math.prod(weight.shape[:lead]), -1)
    return loss_by_rows(weight, lambda rows: matrix[rows], stats, lead)


def loss_by_rows(
    weight: Tensor, decoded: Callable[[slice], Tensor], stats: Stats | None = None, lead: int = 1
) -> float:
    """`loss` with what replaces `weight` given some rows at a time: decoded(rows) is [n, cols]."""
    stats = stats or Stats()
    rows = math.prod(weight.shape[:lead])
    matrix = weight.reshape(rows, -1)
    stats.check(rows, matrix.shape[1])
    step = max(1, _CHUNK // matrix.shape[1])
    total = torch.zeros((), dtype=torch.float64, device=weight.device)
    for start in range(0, rows, step):
        some = slice(start, min(start + step, rows))
        part = row_loss(matrix[some].float() - decoded(some).float(), stats.hessian)
        if stats.row_weight is not None:
            part = part * stats.row_weight.reshape(-1)[some].to(part)
        total += part.sum()
    return float(total)
