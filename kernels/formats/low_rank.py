"""`low_rank`: a matrix as the product of two thin ones, W = A B."""

from __future__ import annotations

import math

from nstf.kernels.formats.shards import Place, Places, Span
from nstf.kernels.formats.tree import ArraySpec, Shape
from nstf.kernels.lazy import torch
from nstf.kernels.records import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch import Tensor

KIND = "low_rank"


@frozen
class Params:
    """`rank`: inner dimension. `lead`: number of leading axes of the tensor that make the rows."""

    rank: int
    lead: int = 1

    def __post_init__(self) -> None:
        for name, value in (("rank", self.rank), ("lead", self.lead)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {str(value)[:40]!r}")


def arrays(params: Params, shape: Shape) -> dict[str, ArraySpec]:
    return {}


def children(params: Params, shape: Shape) -> dict[str, Shape]:
    """`a`: [rows, rank], `b`: [rank, cols]. Raises ValueError for a rank above min(rows, cols)."""
    if params.lead >= len(shape):
        raise ValueError(f"lead {params.lead} leaves no columns in shape {list(shape)}")
    rows, cols = math.prod(shape[: params.lead]), math.prod(shape[params.lead :])
    if params.rank > min(rows, cols):
        raise ValueError(f"rank {params.rank} is above min(rows, cols) of the {rows} x {cols} matrix")
    return {"a": (rows, params.rank), "b": (params.rank, cols)}


def decode(params: Params, shape: Shape, arrays: dict[str, Tensor], children: dict[str, Tensor]) -> Tensor:
    """A B in float32, of `shape`."""
    return (children["a"].to(torch.float32) @ children["b"].to(torch.float32)).reshape(shape)


def places(params: Params, shape: Shape, axis: int) -> Places | None:
    """Rows are cut in A, columns in B: the other factor stays whole."""
    by_rows = axis < params.lead
    first, end = (0, params.lead) if by_rows else (params.lead, len(shape))
    if math.prod(shape[first:axis]) > 1:  # positions in several pieces are no range of rows or columns
        return None
    times = math.prod(shape[axis + 1 : end])
    return Places(1, {"a": Place(0, times)} if by_rows else {"b": Place(1, times)})


def narrowed(params: Params, shape: Shape, span: Span) -> Params:
    return params
