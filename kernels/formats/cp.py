"""`cp`: a sum of rank-one tensors over a stated reshape, W = sum_r a_r (x) b_r (x) c_r ...

Canonical polyadic decomposition (Hitchcock 1927); the weights of the terms are folded into the factors.
"""

from __future__ import annotations

import math

from nstf.kernels.formats.shards import Places, Span, narrowed_view, view_place
from nstf.kernels.formats.tree import MAX_DIMS, ArraySpec, Shape, check_shape
from nstf.kernels.lazy import torch
from nstf.kernels.records import changed, frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch import Tensor

KIND = "cp"


@frozen
class Params:
    """`rank`: number of rank-one terms. `view`: the shape the tensor is read in (same number of elements)."""

    rank: int
    view: tuple[int, ...]

    def __post_init__(self) -> None:
        check_view(self.view)
        most = math.prod(self.view) // max(self.view)
        if type(self.rank) is not int or not 1 <= self.rank <= most:
            raise ValueError(f"rank {str(self.rank)[:40]} is not in 1..{most} for view {list(self.view)}")


def check_view(view: Shape) -> None:
    """Raises ValueError unless `view` is 2 to 8 positive sizes in a tuple. Tucker and TT use it too."""
    if not isinstance(view, tuple) or not 2 <= len(view) <= MAX_DIMS:
        raise ValueError(f"a view must have between 2 and {MAX_DIMS} axes")
    check_shape(view)


def check_view_of(view: Shape, shape: Shape) -> None:
    """Raises ValueError unless `view` has as many elements as `shape`."""
    if math.prod(view) != math.prod(shape):
        raise ValueError(f"view {list(view)} does not have the number of elements of shape {list(shape)}")


def arrays(params: Params, shape: Shape) -> dict[str, ArraySpec]:
    return {}


def children(params: Params, shape: Shape) -> dict[str, Shape]:
    """`factor0` .. `factorN-1`: [view[i], rank]."""
    check_view_of(params.view, shape)
    return {f"factor{i}": (size, params.rank) for i, size in enumerate(params.view)}


def decode(params: Params, shape: Shape, arrays: dict[str, Tensor], children: dict[str, Tensor]) -> Tensor:
    """The sum of the terms in float32, of `shape`.

    Computed as (Khatri-Rao product of the first axes) x (that of the last ones)^T, some terms at a time, so
    that no intermediate has more elements than the tensor.
    """
    factors = [children[f"factor{i}"].to(torch.float32) for i in range(len(params.view))]
    split = _balanced_split(params.view)
    rows, cols = math.prod(params.view[:split]), math.prod(params.view[split:])
    chunk = min(rows, cols)
    out = factors[0].new_zeros(rows, cols)
    for start in range(0, params.rank, chunk):
        part = [f[:, start : start + chunk] for f in factors]
        out.addmm_(_khatri_rao(part[:split]), _khatri_rao(part[split:]).T)
    return out.reshape(shape)


def _balanced_split(view: Shape) -> int:
    """The number of leading axes whose product is nearest to that of the others."""
    return min(range(1, len(view)), key=lambda k: max(math.prod(view[:k]), math.prod(view[k:])))


def _khatri_rao(factors: list[Tensor]) -> Tensor:
    """Column-wise Kronecker product. factors: [d_i, rank] -> [prod d_i, rank]."""
    out = factors[0]
    for factor in factors[1:]:
        out = torch.einsum("ir,jr->ijr", out, factor).reshape(-1, factor.shape[1])
    return out


def places(params: Params, shape: Shape, axis: int) -> Places | None:
    """The factor of the view's axis that starts where the cut axis does."""
    place = view_place(params.view, shape, axis)
    return None if place is None else Places(1, {f"factor{place.axis}": changed(place, axis=0)})


def narrowed(params: Params, shape: Shape, span: Span) -> Params:
    return Params(params.rank, narrowed_view(params.view, shape, span))
