"""The signature of a tensor: what is learnt about it before a format is chosen.

`Signature` is what methods are asked with (nstf.proposals): spectra are found when they are first asked for. `Summary` is
what the report says about a tensor.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nstf.analyzers.multilinear import Metric, Unfolding
from nstf.analyzers.outliers import Outliers, outliers
from nstf.analyzers.roles import layer_of, role_of
from nstf.analyzers.spectrum import Spectrum, spectrum

Shape = tuple[int, ...]
ROW_LIMIT = 8192
"""Rows beyond this are sampled evenly for the spectra."""
SIDE_LIMIT = 2048
"""So are rows beyond this when the columns are more than this too: the eigenproblem would take minutes."""
MULTILINEAR_LIMIT = 1 << 24
"""Elements up to which reshapes are looked at."""


class Signature:
    """What methods are told about one tensor; see nstf.proposals.Signature."""

    def __init__(
        self,
        weight: Tensor,
        stats: Any,
        lead: int = 1,
        role: str = "other",
        dtype: str = "float32",
        config: Mapping[str, Any] | None = None,
        stride: tuple[int, ...] = (),
    ) -> None:
        """weight: the tensor that is encoded. stats: `hessian` and `row_weight`, each None where nothing is known."""
        self.stride = stride
        self.weight, self.stats, self.lead, self.role, self.dtype = weight, stats, lead, role, dtype
        self.config: Mapping[str, Any] = config or {}
        self.shape = tuple(weight.shape)
        self.rows, self.cols = math.prod(self.shape[:lead]), math.prod(self.shape[lead:])
        row_weight = None if stats.row_weight is None else stats.row_weight.reshape(-1)
        matrix = weight.detach().reshape(self.rows, self.cols)
        self._metric = Metric(matrix, stats.hessian, row_weight, derived=getattr(stats, "derived", None))
        self._found: dict[tuple[Shape, tuple[int, ...]], Unfolding] = {}

    @property
    def signal(self) -> float:
        """The loss of erasing the tensor."""
        return self.matrix.left_out(0)

    @property
    def matrix(self) -> Unfolding:
        """The tensor as the matrix that it is stored as."""
        return self.unfolding((self.rows, self.cols), (0,))

    @cached_property
    def plain(self) -> Unfolding:
        """The matrix with the weights of its rows but without the inputs' second moment."""
        metric = Metric(self._metric.weight, None, self._metric.row_weight)
        return metric.unfolding((self.rows, self.cols), (0,))

    def unfolding(self, dims: Shape, axes: tuple[int, ...]) -> Unfolding:
        """That of the view `dims` with `axes` as rows, made once. Raises ValueError for what is no unfolding."""
        first = next((k for k in range(1, len(dims)) if math.prod(dims[:k]) == self.rows), 0)
        others = tuple(a for a in range(len(dims)) if a not in axes)
        inside = min(tuple(sorted(axes)), others, key=lambda side: (len(side), side))
        if tuple(range(first)) in (tuple(sorted(axes)), others):
            dims, inside = (self.rows, self.cols), (0,)  # every view has the matrix among its unfoldings
        key = dims, inside
        if key not in self._found:
            self._found[key] = self._unfolded(dims, inside)
        return self._found[key]

    def _unfolded(self, dims: Shape, axes: tuple[int, ...]) -> Unfolding:
        """Of a large stack of experts the first ones stand for all, in the views that keep experts apart."""
        experts = self.shape[0]
        some = max(2, experts * MULTILINEAR_LIMIT // self.weight.numel())
        if self.lead != 2 or len(dims) < 3 or dims[0] != experts or some >= experts:
            return self._metric.unfolding(dims, axes)
        rows = some * self.rows // experts
        weights = None if self._metric.row_weight is None else self._metric.row_weight[:rows]
        whole = self._metric
        part = Metric(whole.weight[:rows], whole.hessian, weights, experts / some, whole.derived)
        return part.unfolding((some, *dims[1:]), axes)


@dataclass(frozen=True)
class View:
    """A view's unfoldings along its axes. effective_ranks: of each (nstf.analyzers.multilinear), in the norm of the loss."""

    dims: Shape
    effective_ranks: tuple[float, ...]


@dataclass(frozen=True)
class Summary:
    """One tensor. rows_used: rows of the matrix view the spectra saw, fewer than `rows` when it was sampled.

    spectrum, whitened: None for vectors, and for `whitened` without a Hessian. views: the reshapes that decompositions
    are looked for in.
    """

    name: str
    role: str
    layer: int | None
    shape: tuple[int, ...]
    dtype: str
    rows: int
    cols: int
    rows_used: int
    outliers: Outliers
    spectrum: Spectrum | None
    whitened: Spectrum | None
    views: tuple[View, ...]

    @property
    def sampled(self) -> bool:
        """Whether a part of the tensor stands for all of it somewhere."""
        return self.rows_used < self.rows or self.outliers.elements_used < math.prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers."""
        plain: dict[str, Any] = _plain({**dataclasses.asdict(self), "sampled": self.sampled})
        return plain


def summary(
    name: str,
    weight: Tensor,
    hessian: Tensor | None = None,
    module_type: str | None = None,
    reshapes: Iterable[Shape] = (),
) -> Summary:
    """Measures one tensor. weight: [out, in], [experts, out, in], [out, in, kernel...] or a vector.

    hessian: [n, n], n = in, or in * kernel, or for a convolution the channels. reshapes: of three axes or more that are
    looked at. Raises ValueError for another size, NaN or infinity.
    """
    shape = tuple(weight.shape)
    role = role_of(name, shape, module_type)
    lead = 2 if role == "expert_stack" and len(shape) == 3 else 1
    rows, cols = (
        (math.prod(shape[:lead]), math.prod(shape[lead:])) if len(shape) > 1 else (1, math.prod(shape))
    )
    values = weight.detach()
    tails = outliers(values)
    dtype = str(weight.dtype).removeprefix("torch.")
    layer = layer_of(name)
    if len(shape) < 2:
        return Summary(name, role, layer, shape, dtype, rows, cols, rows, tails, None, None, ())
    matrix = sample_rows(values.reshape(rows, cols)).to(torch.float32)
    plain = spectrum(matrix)
    known = None if hessian is None else _for_columns(hessian, shape, cols)
    whitened = None if known is None else spectrum(matrix, known)
    found = []
    if weight.numel() <= MULTILINEAR_LIMIT:
        metric = Metric(values.reshape(rows, cols), known, None)
        for dims in reshapes:
            each = (metric.unfolding(dims, (axis,)).effective_rank for axis in range(len(dims)))
            found.append(View(dims, tuple(each)))
    return Summary(
        name, role, layer, shape, dtype, rows, cols, matrix.shape[0], tails, plain, whitened, tuple(found)
    )


def sample_rows(matrix: Tensor) -> Tensor:
    """The matrix, or evenly spaced rows of it when it is beyond the limits. matrix: [rows, cols]."""
    rows, cols = matrix.shape
    limit = SIDE_LIMIT if cols > SIDE_LIMIT else ROW_LIMIT
    if rows <= limit:
        return matrix
    return matrix[torch.arange(limit) * rows // limit]


def _for_columns(hessian: Tensor, shape: tuple[int, ...], cols: int) -> Tensor:
    """The Hessian of the columns: that of a convolution's channels stands for every tap of its kernel."""
    if len(shape) > 2 and hessian.shape[0] == shape[1] != cols:
        return torch.kron(hessian, torch.eye(cols // shape[1], dtype=hessian.dtype))
    return hessian


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
