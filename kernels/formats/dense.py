"""`dense`: the tensor itself, in a stated dtype."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nstf.kernels.formats.tree import ArraySpec, Shape

KIND = "dense"

DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Params:
    """`dtype`: the stored dtype by its torch name, for example `bfloat16`."""

    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype[:40]!r} is not one of {', '.join(DTYPES)}")


def arrays(params: Params, shape: Shape) -> dict[str, ArraySpec]:
    """`values`: the tensor, in its own shape."""
    return {"values": ArraySpec(DTYPES[params.dtype], shape)}


def children(params: Params, shape: Shape) -> dict[str, Shape]:
    return {}


def code_bits(params: Params, shape: Shape) -> int:
    return math.prod(shape) * DTYPES[params.dtype].itemsize * 8


def decode(params: Params, shape: Shape, arrays: dict[str, Tensor], children: dict[str, Tensor]) -> Tensor:
    """The values; integers stay integers, every floating type becomes float32 (float64 stays)."""
    values = arrays["values"]
    if values.dtype in (torch.float16, torch.bfloat16):
        return values.to(torch.float32)
    return values


def fixed(params: Params, shape: Shape, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """What tuning leaves alone: nothing, or integers."""
    return {} if DTYPES[params.dtype].is_floating_point else {"values": arrays["values"]}


def tunable(params: Params, shape: Shape, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values; {} when they are integers."""
    return {"values": arrays["values"].float()} if DTYPES[params.dtype].is_floating_point else {}


def retuned(
    params: Params, shape: Shape, arrays: dict[str, Tensor], values: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The arrays with other values, rounded to the stored dtype."""
    return {"values": values["values"].to(DTYPES[params.dtype])} if "values" in values else arrays


def decode_tuned(
    params: Params,
    shape: Shape,
    fixed: dict[str, Tensor],
    values: dict[str, Tensor],
    children: dict[str, Tensor],
) -> Tensor:
    """The values themselves."""
    return values["values"] if "values" in values else fixed["values"]
