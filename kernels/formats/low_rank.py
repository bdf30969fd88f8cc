"""`low_rank`: a matrix as the product of two thin ones, W = A B."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nstf.kernels.formats.tree import ArraySpec, Shape
from nstf.kernels.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

KIND = "low_rank"


@dataclass(frozen=True)
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
