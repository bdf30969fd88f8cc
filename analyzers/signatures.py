"""The signature of a tensor: everything measured about it before a format is chosen."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nstf.analyzers.multilinear import Evidence, evidence, natural_reshapes
from nstf.analyzers.outliers import Outliers, outliers
from nstf.analyzers.roles import layer_of, role_of
from nstf.analyzers.spectrum import Spectrum, spectrum

ROW_LIMIT = 8192
"""Rows beyond this are sampled evenly for the spectra."""
SIDE_LIMIT = 2048
"""So are rows beyond this when the columns are more than this too: the eigenproblem would take minutes."""
MULTILINEAR_LIMIT = 1 << 24
"""Elements up to which reshapes are tried."""


@dataclass(frozen=True)
class Signature:
    """One tensor. rows_used: rows of the matrix view the spectra saw, fewer than `rows` when it was sampled.

    spectrum, whitened: None for vectors, and for `whitened` without a Hessian. multilinear: per natural
    reshape.
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
    multilinear: tuple[Evidence, ...]

    @property
    def sampled(self) -> bool:
        """Whether a part of the tensor stands for all of it somewhere."""
        return self.rows_used < self.rows or self.outliers.elements_used < math.prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers."""
        plain: dict[str, Any] = _plain({**dataclasses.asdict(self), "sampled": self.sampled})
        return plain


def signature(
    name: str,
    weight: Tensor,
    hessian: Tensor | None = None,
    config: Mapping[str, Any] | None = None,
    module_type: str | None = None,
) -> Signature:
    """Measures one tensor. weight: [out, in], [experts, out, in], [out, in, kernel...] or a vector.

    hessian: [n, n], n = in, or in * kernel, or for a convolution the channels. Raises ValueError for another
    size,
    NaN or infinity.
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
        return Signature(name, role, layer, shape, dtype, rows, cols, rows, tails, None, None, ())
    matrix = sample_rows(values.reshape(rows, cols)).to(torch.float32)
    plain = spectrum(matrix)
    whitened = None if hessian is None else spectrum(matrix, _for_columns(hessian, shape, cols))
    found = []
    if weight.numel() <= MULTILINEAR_LIMIT:
        for reshape, dims in natural_reshapes(role, shape, config).items():
            found.append(evidence(values, reshape, dims))
    return Signature(
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
