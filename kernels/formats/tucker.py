"""`tucker`: a small core multiplied by a matrix along some axes of a stated reshape, W = G x_1 U1 x_2 U2 ...

Tucker 1966; an axis whose rank is its full size has no factor (partial Tucker, "Tucker-2" for convolutions).
"""

from __future__ import annotations

from nstf.kernels.formats.cp import check_view, check_view_of
from nstf.kernels.formats.shards import Places, Span, narrowed_view, view_place
from nstf.kernels.formats.tree import ArraySpec, Shape
from nstf.kernels.lazy import torch
from nstf.kernels.records import changed, frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch import Tensor

KIND = "tucker"


@frozen
class Params:
    """`ranks`: size of the core along each axis of `view`; an axis has a factor if rank < size."""

    ranks: tuple[int, ...]
    view: tuple[int, ...]

    def __post_init__(self) -> None:
        check_view(self.view)
        if not isinstance(self.ranks, tuple) or len(self.ranks) != len(self.view):
            raise ValueError(f"ranks must name one rank for each of the {len(self.view)} axes of the view")
        for axis, (rank, size) in enumerate(zip(self.ranks, self.view, strict=True)):
            if type(rank) is not int or not 1 <= rank <= size:
                raise ValueError(f"rank {str(rank)[:40]} of axis {axis} is not between 1 and {size}")


def arrays(params: Params, shape: Shape) -> dict[str, ArraySpec]:
    return {}


def children(params: Params, shape: Shape) -> dict[str, Shape]:
    """`core`: [ranks...], and `factor{i}`: [view[i], ranks[i]] for every axis with ranks[i] < view[i]."""
    check_view_of(params.view, shape)
    pairs = enumerate(zip(params.view, params.ranks, strict=True))
    factors = {f"factor{i}": (size, rank) for i, (size, rank) in pairs if rank < size}
    return {"core": params.ranks, **factors}


def decode(params: Params, shape: Shape, arrays: dict[str, Tensor], children: dict[str, Tensor]) -> Tensor:
    """The core times the factors in float32, of `shape`; no intermediate has more elements than that."""
    out = children["core"].to(torch.float32).reshape(params.ranks)
    for axis in range(len(params.view)):
        factor = children.get(f"factor{axis}")
        if factor is not None:
            left = out.shape[:axis].numel()
            unfolded = out.reshape(left, params.ranks[axis], -1)
            grown = torch.einsum("dr,lrm->ldm", factor.to(torch.float32), unfolded)
            out = grown.reshape(*params.view[: axis + 1], *params.ranks[axis + 1 :])
    return out.reshape(shape)


def places(params: Params, shape: Shape, axis: int) -> Places | None:
    """The factor of the view's axis that starts where the cut axis does, or the core along it where it has none."""
    place = view_place(params.view, shape, axis)
    if place is None:
        return None
    if params.ranks[place.axis] == params.view[place.axis]:
        return Places(1, {"core": place})
    return Places(1, {f"factor{place.axis}": changed(place, axis=0)})


def narrowed(params: Params, shape: Shape, span: Span) -> Params:
    """Raises ValueError for a part that is no larger than the rank of its axis."""
    view, ranks = narrowed_view(params.view, shape, span), list(params.ranks)
    for at, (size, before) in enumerate(zip(view, params.view, strict=True)):
        if ranks[at] == before:
            ranks[at] = size
        elif ranks[at] >= size:
            raise ValueError(f"rank {ranks[at]} of axis {at} is not below its size of {size}")
    return Params(tuple(ranks), view)
