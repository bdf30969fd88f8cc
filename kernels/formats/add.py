"""`add`: the sum of two encodings of the same shape, for instance a 2-bit grid and a low-rank correction."""

from __future__ import annotations

from nstf.kernels.formats.shards import Place, Places, Span
from nstf.kernels.formats.tree import ArraySpec, Shape
from nstf.kernels.lazy import torch
from nstf.kernels.records import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch import Tensor

KIND = "add"


@frozen
class Params:
    """No parameters."""


def arrays(params: Params, shape: Shape) -> dict[str, ArraySpec]:
    return {}


def children(params: Params, shape: Shape) -> dict[str, Shape]:
    """`x` and `y`, both of the tensor's own shape."""
    return {"x": shape, "y": shape}


def decode(params: Params, shape: Shape, arrays: dict[str, Tensor], children: dict[str, Tensor]) -> Tensor:
    """X + Y in float32."""
    return children["x"].to(torch.float32) + children["y"].to(torch.float32)


def places(params: Params, shape: Shape, axis: int) -> Places | None:
    """Both are cut where the sum is."""
    return Places(1, {"x": Place(axis), "y": Place(axis)})


def narrowed(params: Params, shape: Shape, span: Span) -> Params:
    return params
