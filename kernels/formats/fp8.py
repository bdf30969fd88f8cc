"""`fp8`: 8-bit floating point (E4M3) with one scale per row or group.

`e4m3fn` is the OCP type (bias 7, largest value 448, NaN at 0x7f and 0xff). `e4m3fnuz` is AMD's CDNA3 type
(bias 8, largest value 240, no negative zero, NaN at 0x80 only): the same byte stands for half the value.
"""

from __future__ import annotations

from nstf.kernels.formats.scales import (
    check_group,
    check_lead,
    check_scale_bits,
    cut_groups,
    grain_of_groups,
    group_count,
    matrix_shape,
    narrow,
    per_column,
    read_scales,
    scale_specs,
    scaled,
    store_scales,
)
from nstf.kernels.formats.shards import Span
from nstf.kernels.formats.tree import ArraySpec, Shape
from nstf.kernels.lazy import torch
from nstf.kernels.records import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch import Tensor

KIND = "fp8"

LARGEST = {"e4m3fn": 448.0, "e4m3fnuz": 240.0}


@frozen
class Params:
    """`variant` e4m3fn or e4m3fnuz; `group` columns share a scale (0: the whole row); `scale_bits` 16
    (float16) or 32 (float32); `lead` axes make the rows.
    """

    variant: str = "e4m3fn"
    group: int = 0
    scale_bits: int = 16
    lead: int = 1

    def __post_init__(self) -> None:
        if self.variant not in LARGEST:
            raise ValueError(f"variant must be one of {', '.join(LARGEST)}, not {self.variant[:40]!r}")
        check_group(self.group)
        check_scale_bits(self.scale_bits, (16, 32))
        check_lead(self.lead)


def arrays(params: Params, shape: Shape) -> dict[str, ArraySpec]:
    """`codes` u8 [rows, cols] (the bits of the fp8 value) and `scale` [rows, groups]."""
    rows, cols = matrix_shape(shape, params.lead)
    groups = group_count(cols, params.group)
    return {"codes": ArraySpec("uint8", (rows, cols)), **scale_specs(rows, groups, params.scale_bits)}


def children(params: Params, shape: Shape) -> dict[str, Shape]:
    return {}


def code_bits(params: Params, shape: Shape) -> int:
    rows, cols = matrix_shape(shape, params.lead)
    return rows * cols * 8


def torch_dtype(variant: str) -> torch.dtype:
    """torch's dtype of a variant."""
    return torch.float8_e4m3fn if variant == "e4m3fn" else torch.float8_e4m3fnuz


def values_of_codes(variant: str) -> Tensor:
    """The value of every byte: float32 [256], NaN where the type says so."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(torch_dtype(variant)).float()


def decode(params: Params, shape: Shape, arrays: dict[str, Tensor], children: dict[str, Tensor]) -> Tensor:
    """scale * fp8 value, float32 of `shape`."""
    _, cols = matrix_shape(shape, params.lead)
    values = arrays["codes"].view(torch_dtype(params.variant)).float()
    values *= per_column(read_scales(arrays, params.scale_bits), params.group, cols)
    return values.reshape(shape)


def fixed(params: Params, shape: Shape, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """What tuning leaves alone: the fp8 values at scale 1."""
    return {"units": narrow(arrays["codes"].view(torch_dtype(params.variant)).float())}


def tunable(params: Params, shape: Shape, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The scales [rows, groups]."""
    return {"scale": read_scales(arrays, params.scale_bits)}


def retuned(
    params: Params, shape: Shape, arrays: dict[str, Tensor], values: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The arrays with other scales, rounded to what they are stored as."""
    return {**arrays, **store_scales(values["scale"], params.scale_bits)}


def decode_tuned(
    params: Params,
    shape: Shape,
    fixed: dict[str, Tensor],
    values: dict[str, Tensor],
    children: dict[str, Tensor],
) -> Tensor:
    """`decode` with the scales of `values`, differentiable in them."""
    return scaled(values["scale"], fixed["units"], params.group).reshape(shape)


def grain(params: Params, shape: Shape, axis: int) -> int | None:
    """Rows anywhere, columns by groups."""
    return grain_of_groups(shape, params.lead, axis, params.group)


def cut(
    params: Params, shape: Shape, arrays: dict[str, Tensor], span: Span
) -> tuple[Params, dict[str, Tensor]]:
    """The codes and scales of the part."""
    return params, cut_groups(arrays, shape, params.lead, span, params.group, 8)
