"""`dense`: the tensor itself, in a stated dtype."""

from __future__ import annotations

import math

from nstf.kernels.formats.pieces import own
from nstf.kernels.formats.shards import Span
from nstf.kernels.formats.tree import ITEM_BYTES, ArraySpec, Shape
from nstf.kernels.lazy import torch
from nstf.kernels.records import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch import Tensor

KIND = "dense"

DTYPES = tuple(ITEM_BYTES)


@frozen
class Params:
    """`dtype`: the stored dtype by its torch name, for example `bfloat16`."""

    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype[:40]!r} is not one of {', '.join(DTYPES)}")


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of a stored one. Raises ValueError for another name."""
    if name not in DTYPES:
        raise ValueError(f"dtype {name[:40]!r} is not one of {', '.join(DTYPES)}")
    found: torch.dtype = getattr(torch, name)
    return found


def arrays(params: Params, shape: Shape) -> dict[str, ArraySpec]:
    """`values`: the tensor, in its own shape."""
    return {"values": ArraySpec(params.dtype, shape)}


def children(params: Params, shape: Shape) -> dict[str, Shape]:
    return {}


def code_bits(params: Params, shape: Shape) -> int:
    return math.prod(shape) * ITEM_BYTES[params.dtype] * 8


def decode(params: Params, shape: Shape, arrays: dict[str, Tensor], children: dict[str, Tensor]) -> Tensor:
    """The values; integers stay integers, every floating type becomes float32 (float64 stays)."""
    values = arrays["values"]
    if values.dtype in (torch.float16, torch.bfloat16):
        return values.to(torch.float32)
    return values


def fixed(params: Params, shape: Shape, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """What tuning leaves alone: nothing, or integers."""
    return {} if torch_dtype(params.dtype).is_floating_point else {"values": arrays["values"]}


def tunable(params: Params, shape: Shape, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values; {} when they are integers."""
    return {"values": arrays["values"].float()} if torch_dtype(params.dtype).is_floating_point else {}


def retuned(
    params: Params, shape: Shape, arrays: dict[str, Tensor], values: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The arrays with other values, rounded to the stored dtype."""
    return {"values": values["values"].to(torch_dtype(params.dtype))} if "values" in values else arrays


def decode_tuned(
    params: Params,
    shape: Shape,
    fixed: dict[str, Tensor],
    values: dict[str, Tensor],
    children: dict[str, Tensor],
) -> Tensor:
    """The values themselves."""
    return values["values"] if "values" in values else fixed["values"]


def grain(params: Params, shape: Shape, axis: int) -> int | None:
    """Anywhere."""
    return 1


def cut(
    params: Params, shape: Shape, arrays: dict[str, Tensor], span: Span
) -> tuple[Params, dict[str, Tensor]]:
    """The values of the part."""
    return params, {"values": own(arrays["values"].narrow(span.axis, span.start, span.size))}
