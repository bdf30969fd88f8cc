"""How two files of one model differ, tensor by tensor: encodings, bytes and errors."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from nstf_convert.gates.sides import Side

# Elements of one tensor that are compared at a time, in float64.
BLOCK = 1 << 22


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that both have. first, second: their encodings; relative_error: |A - B| / |A| by Frobenius norms;
    largest_error: the largest absolute difference of a value. Both are NaN when the shapes differ. Values that are not
    finite differ by nothing where both have the same one, and by NaN or infinity elsewhere."""

    name: str
    shape: tuple[int, ...]
    second_shape: tuple[int, ...]
    first: str
    second: str
    first_bytes: int
    second_bytes: int
    relative_error: float
    largest_error: float
    squared_error: float
    squared_norm: float

    @property
    def comparable(self) -> bool:
        """Whether both have the same shape."""
        return self.shape == self.second_shape

    @property
    def equal(self) -> bool:
        """Whether both have the same values, infinities and NaN included."""
        return self.comparable and self.largest_error == 0

    @property
    def finite(self) -> bool:
        """Whether the sums over the values, and so the relative error, are numbers."""
        return math.isfinite(self.squared_error) and math.isfinite(self.squared_norm)


@dataclass(frozen=True)
class Difference:
    """All tensors that both have, in the order of their names, and those that only one has."""

    tensors: tuple[TensorDifference, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]

    @property
    def relative_error(self) -> float:
        """|A - B| / |A| over all values of the tensors of one shape that are finite; NaN where there is none."""
        known = [t for t in self.tensors if t.comparable and t.finite]
        if not known:
            return 0.0 if self.equal else math.nan
        return _ratio(sum(t.squared_error for t in known), sum(t.squared_norm for t in known))

    @property
    def of_other_shapes(self) -> int:
        """How many tensors of one name have unlike shapes, so that their values are not compared."""
        return sum(not t.comparable for t in self.tensors)

    @property
    def equal(self) -> int:
        """How many tensors have equal values."""
        return sum(t.equal for t in self.tensors)

    @property
    def not_finite(self) -> int:
        """How many tensors of one shape differ and have infinities or NaN, so that their error is no number."""
        return sum(t.comparable and not t.equal and not t.finite for t in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        hidden = ("squared_error", "squared_norm")
        rows = [{k: v for k, v in asdict(t).items() if k not in hidden} for t in self.tensors]
        return {
            "tensors": rows,
            "only_first": list(self.only_first),
            "only_second": list(self.only_second),
            "relative_error": self.relative_error,
            "equal_tensors": self.equal,
            "tensors_of_other_shapes": self.of_other_shapes,
            "tensors_not_finite": self.not_finite,
            "first_bytes": sum(t.first_bytes for t in self.tensors),
            "second_bytes": sum(t.second_bytes for t in self.tensors),
        }


def compare_sides(first: Side, second: Side) -> Difference:
    """The difference of two open files; one tensor of each is in memory at a time. Raises CorruptError."""
    ours, theirs = first.tensors(), second.tensors()
    rows = []
    for name in sorted(set(ours) & set(theirs)):
        a, b = ours[name], theirs[name]
        if a != name and b != name:
            continue  # tied in both: compared under the name it is stored by
        rows.append(_compare(name, first, a, second, b))
    return Difference(
        tuple(rows), tuple(sorted(set(ours) - set(theirs))), tuple(sorted(set(theirs) - set(ours)))
    )


def _compare(name: str, first: Side, a: str, second: Side, b: str) -> TensorDifference:
    shape, second_shape = first.shape(a), second.shape(b)
    error, norm, largest = math.nan, math.nan, math.nan
    if shape == second_shape:
        error, norm, largest = _errors(first.get(a), second.get(b))
    return TensorDifference(
        name,
        shape,
        second_shape,
        "tied" if a != name else first.encoding(a),
        "tied" if b != name else second.encoding(b),
        0 if a != name else first.size_bytes(a),
        0 if b != name else second.size_bytes(b),
        _ratio(error, norm),
        largest,
        error,
        norm,
    )


def _errors(a: Tensor, b: Tensor) -> tuple[float, float, float]:
    """(sum of squared differences, sum of squares of a, largest difference) of two tensors of one shape. NaN is kept."""
    error, norm, largest = 0.0, 0.0, 0.0
    for x, y in _blocks(a, b):
        # inf - inf and NaN - NaN are NaN: the same bits on both sides are no difference.
        same = (x == y) | (x.view(torch.int64) == y.view(torch.int64))
        difference = (x - y).abs().masked_fill_(same, 0.0)
        error += float(difference.square().sum())
        norm += float(x.square().sum())
        highest = float(difference.max())
        # max(0.0, nan) is 0.0, and any comparison with NaN is False: NaN has to be asked for.
        largest = highest if math.isnan(highest) or highest > largest else largest
    return error, norm, largest


def _blocks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = a.reshape(-1), b.reshape(-1)
    for start in range(0, x.numel(), BLOCK):
        yield x[start : start + BLOCK].to(torch.float64), y[start : start + BLOCK].to(torch.float64)


def _ratio(error: float, norm: float) -> float:
    """The relative error: infinite where something differs from zeros, NaN where something differs and the sums are no
    numbers."""
    if error == 0:
        return 0.0
    if norm == 0:
        return math.inf
    return math.sqrt(error / norm) if math.isfinite(norm) else math.nan
