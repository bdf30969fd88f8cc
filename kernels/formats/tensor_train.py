"""`tensor_train`: a chain of three-way cores over a stated reshape, W[i, j, ...] = G1[i] G2[j] ...

Oseledets 2011, "Tensor-train decomposition".
"""

from __future__ import annotations

import math

from nstf.kernels.formats.cp import check_view, check_view_of
from nstf.kernels.formats.shards import Places, Span, narrowed_view, view_place
from nstf.kernels.formats.tree import ArraySpec, Shape
from nstf.kernels.lazy import torch
from nstf.kernels.records import changed, frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch import Tensor

KIND = "tensor_train"


@frozen
class Params:
    """`ranks`: the N-1 inner bond sizes of the chain over the N axes of `view`."""

    ranks: tuple[int, ...]
    view: tuple[int, ...]

    def __post_init__(self) -> None:
        check_view(self.view)
        if not isinstance(self.ranks, tuple) or len(self.ranks) != len(self.view) - 1:
            raise ValueError(f"ranks must name the {len(self.view) - 1} bonds between the axes of the view")
        for bond, (rank, most) in enumerate(zip(self.ranks, max_ranks(self.view), strict=True)):
            if type(rank) is not int or not 1 <= rank <= most:
                raise ValueError(f"rank {str(rank)[:40]} of bond {bond} is not between 1 and {most}")


def max_ranks(view: Shape) -> tuple[int, ...]:
    """The largest useful size of each bond: the smaller of the products of the axes to its left and right."""
    return tuple(min(math.prod(view[:k]), math.prod(view[k:])) for k in range(1, len(view)))


def arrays(params: Params, shape: Shape) -> dict[str, ArraySpec]:
    return {}


def children(params: Params, shape: Shape) -> dict[str, Shape]:
    """`core0` .. `coreN-1`: [r_i, view[i], r_{i+1}] with r_0 = r_N = 1."""
    check_view_of(params.view, shape)
    bonds = (1, *params.ranks, 1)
    return {f"core{i}": (bonds[i], size, bonds[i + 1]) for i, size in enumerate(params.view)}


def decode(params: Params, shape: Shape, arrays: dict[str, Tensor], children: dict[str, Tensor]) -> Tensor:
    """The contracted chain in float32, of `shape`. No intermediate has more elements than the tensor."""
    out = children["core0"].to(torch.float32).reshape(params.view[0], -1)
    for i in range(1, len(params.view)):
        core = children[f"core{i}"].to(torch.float32)
        out = torch.einsum("ar,rns->ans", out, core).reshape(-1, core.shape[2])
    return out.reshape(shape)


def places(params: Params, shape: Shape, axis: int) -> Places | None:
    """The middle of the core of the view's axis that starts where the cut axis does."""
    place = view_place(params.view, shape, axis)
    return None if place is None else Places(1, {f"core{place.axis}": changed(place, axis=1)})


def narrowed(params: Params, shape: Shape, span: Span) -> Params:
    return Params(params.ranks, narrowed_view(params.view, shape, span))
