"""`permute`: a tensor stored with its axes in another order (Conv1D of GPT-2, [experts, in, out] stacks)."""

from __future__ import annotations

from nstf.kernels.formats.shards import Place, Places, Span
from nstf.kernels.formats.tree import MAX_DIMS, ArraySpec, Shape
from nstf.kernels.records import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch import Tensor

KIND = "permute"


@frozen
class Params:
    """`dims`: as in `torch.permute`: axis i of the tensor is axis dims[i] of the stored child."""

    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.dims, tuple) or not 1 <= len(self.dims) <= MAX_DIMS:
            raise ValueError(f"dims must name between 1 and {MAX_DIMS} axes")
        if any(type(d) is not int for d in self.dims) or sorted(self.dims) != list(range(len(self.dims))):
            raise ValueError(f"dims {list(self.dims)} is not a permutation of 0..{len(self.dims) - 1}")


def arrays(params: Params, shape: Shape) -> dict[str, ArraySpec]:
    return {}


def children(params: Params, shape: Shape) -> dict[str, Shape]:
    """`x`: the stored tensor, whose shape is `shape` with the permutation undone."""
    if len(params.dims) != len(shape):
        raise ValueError(f"dims {list(params.dims)} do not fit shape {list(shape)}")
    stored = [0] * len(shape)
    for axis, source in enumerate(params.dims):
        stored[source] = shape[axis]
    return {"x": tuple(stored)}


def decode(params: Params, shape: Shape, arrays: dict[str, Tensor], children: dict[str, Tensor]) -> Tensor:
    """X with its axes permuted (a view, no copy)."""
    return children["x"].permute(params.dims)


def places(params: Params, shape: Shape, axis: int) -> Places | None:
    """The stored axis that this one is."""
    return Places(1, {"x": Place(params.dims[axis])})


def narrowed(params: Params, shape: Shape, span: Span) -> Params:
    return params
