"""A decomposition before its factors are stored: which node it is, the dense factors, how to round them."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nstf.kernels.formats import EncodedTensor, Node, dense, join
from nstf.kernels.formats.tree import Shape, decode, format_of
from nstf.proposals import Recipe

Leaf = Callable[[str, Tensor, Tensor | None], EncodedTensor]
"""leaf(child name, dense factor, metric or None) -> the factor encoded. The metric is what `Stats.hessian` is
for a weight: [cols, cols] of the factor read as a matrix with `lead_for(shape)` leading axes as rows."""

Refit = Callable[[str, Mapping[str, Tensor]], tuple[Tensor, Tensor | None] | None]
"""refit(name, current factors) -> (best factor given the others, its metric), or None to keep it as it is."""

BytesOf = Callable[[Shape], int]
"""bytes_of(child shape) -> bytes the stored child takes."""

SHORT_ROW = 16
"""A factor with three or more axes is read in rows of its last axis unless that is shorter than this."""


class Metrics(Mapping[str, Tensor | None]):
    """Metrics that are made when they are asked for: `encode` wants the first factor's, refits give the others."""

    def __init__(self, names: Iterable[str], make: Callable[[str], Tensor | None]) -> None:
        self._names, self._make = tuple(names), cache(make)

    def __getitem__(self, name: str) -> Tensor | None:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class Decomposition:
    """The factors of one tensor. `factors` is in the order in which they should be rounded.

    kind, params: of the node (nstf.kernels.formats). shape: of the dense tensor. metrics: see `Leaf`.
    """

    kind: str
    params: Any
    shape: Shape
    factors: Mapping[str, Tensor]
    metrics: Mapping[str, Tensor | None]
    refit: Refit | None = field(default=None, repr=False, compare=False)

    @property
    def parameters(self) -> int:
        """Number of stored values."""
        return sum(f.numel() for f in self.factors.values())

    def dense(self) -> Tensor:
        """The tensor the unrounded factors stand for, float32."""
        result: Tensor = format_of(self.kind).decode(self.params, self.shape, {}, dict(self.factors))
        return result.reshape(self.shape)

    def encode(self, leaf: Leaf) -> EncodedTensor:
        """The tensor with every factor stored by `leaf`.

        Factors are rounded one after another; each is first re-solved by least squares given those already
        rounded, so that it takes up their rounding error (as in CALDERA, Saha et al. 2024).
        """
        current = dict(self.factors)
        encoded: dict[str, EncodedTensor] = {}
        for name in self.factors:
            again = self.refit(name, current) if encoded and self.refit is not None else None
            factor, metric = again or (current[name], self.metrics.get(name))
            encoded[name] = leaf(name, factor, metric)
            current[name] = decode(encoded[name]).to(factor.device)
        return assemble(self.kind, self.params, self.shape, encoded)


def assemble(kind: str, params: Any, shape: Shape, encoded: Mapping[str, EncodedTensor]) -> EncodedTensor:
    """The encoded tensor of a node from its encoded children. Raises ValueError for a wrong shape."""
    expected = format_of(kind).children(params, shape)
    got = {name: child.shape for name, child in encoded.items()}
    if got != expected:
        raise ValueError(f"{kind}: children of shapes {got}, expected {expected}")
    arrays = {join(n, key): a for n in sorted(encoded) for key, a in encoded[n].arrays.items()}
    return EncodedTensor(Node(kind, params, {n: encoded[n].tree for n in sorted(encoded)}), shape, arrays)


def lead_for(shape: Shape) -> int:
    """The number of leading axes that make the rows when a factor of `shape` is stored as a matrix."""
    return len(shape) - 1 if len(shape) < 3 or shape[-1] >= SHORT_ROW else 1


def dense_leaf(dtype: str = "bfloat16") -> Leaf:
    """A leaf that stores the factor as it is, in `dtype`."""
    params = dense.Params(dtype)

    def leaf(name: str, factor: Tensor, metric: Tensor | None) -> EncodedTensor:
        values = factor.to(dense.torch_dtype(dtype)).contiguous()
        return EncodedTensor(Node(dense.KIND, params), tuple(factor.shape), {"values": values})

    return leaf


def dense_bytes(dtype: str = "bfloat16") -> BytesOf:
    """bytes_of for `dense_leaf(dtype)`."""
    size = dense.torch_dtype(dtype).itemsize
    return lambda shape: math.prod(shape) * size


def largest(fits: Callable[[int], bool], most: int) -> int | None:
    """The largest n in 1..most with fits(n), where `fits` is true up to some n; None if fits(1) is false."""
    if most < 1 or not fits(1):
        return None
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def unique(recipes: Iterable[Recipe]) -> list[Recipe]:
    """Without those that are there already: at neighbouring sizes the ranks may be the same."""
    return list({json.dumps(r.to_json(), sort_keys=True): r for r in recipes}.values())


def check_finite(weight: Tensor, what: str = "weight") -> None:
    """Raises ValueError for NaN or infinity."""
    if not bool(torch.isfinite(weight).all()):
        raise ValueError(f"{what} of shape {list(weight.shape)} holds NaN or infinity")
