"""`grid`: 4-bit codes into a table of 16 values per tensor, with one scale per group of a row."""

from __future__ import annotations

from nstf.kernels.formats import bitpack
from nstf.kernels.formats.scales import (
    check_group,
    check_lead,
    check_scale_bits,
    cut_groups,
    grain_of_groups,
    group_count,
    matrix_shape,
    per_column,
    read_scales,
    scale_specs,
    store_scales,
)
from nstf.kernels.formats.shards import Span
from nstf.kernels.formats.tree import ArraySpec, Shape
from nstf.kernels.records import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch import Tensor

KIND = "grid"


@frozen
class Params:
    """`levels` of the table (16); `group` columns share a scale (0: the whole row); `scale_bits` 16 or 8;
    `lead`."""

    levels: int = 16
    group: int = 64
    scale_bits: int = 16
    lead: int = 1

    def __post_init__(self) -> None:
        if self.levels != 16:
            raise ValueError(f"levels must be 16, not {self.levels}")
        check_group(self.group)
        check_scale_bits(self.scale_bits, (8, 16))
        check_lead(self.lead)


def arrays(params: Params, shape: Shape) -> dict[str, ArraySpec]:
    """`table` f16 [16], `codes` u8 [rows, ceil(cols/2)], and the scales."""
    rows, cols = matrix_shape(shape, params.lead)
    return {
        "table": ArraySpec("float16", (params.levels,)),
        "codes": ArraySpec("uint8", (rows, bitpack.packed_bytes(cols, 4))),
        **scale_specs(rows, group_count(cols, params.group), params.scale_bits),
    }


def children(params: Params, shape: Shape) -> dict[str, Shape]:
    return {}


def code_bits(params: Params, shape: Shape) -> int:
    rows, cols = matrix_shape(shape, params.lead)
    return rows * cols * 4


def decode(params: Params, shape: Shape, arrays: dict[str, Tensor], children: dict[str, Tensor]) -> Tensor:
    """scale * table[code], float32 of `shape`."""
    _, cols = matrix_shape(shape, params.lead)
    values = arrays["table"].float()[bitpack.unpack(arrays["codes"], 4, cols).int()]
    values *= per_column(read_scales(arrays, params.scale_bits), params.group, cols)
    return values.reshape(shape)


def fixed(params: Params, shape: Shape, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """What tuning leaves alone: the codes, uint8 [rows, cols]."""
    _, cols = matrix_shape(shape, params.lead)
    return {"codes": bitpack.unpack(arrays["codes"], 4, cols)}


def tunable(params: Params, shape: Shape, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The scales [rows, groups] and the table [16]."""
    return {"scale": read_scales(arrays, params.scale_bits), "table": arrays["table"].float()}


def retuned(
    params: Params, shape: Shape, arrays: dict[str, Tensor], values: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The arrays with other scales and levels, rounded to what they are stored as."""
    table = values["table"].half()
    return {**arrays, "table": table, **store_scales(values["scale"], params.scale_bits)}


def decode_tuned(
    params: Params,
    shape: Shape,
    fixed: dict[str, Tensor],
    values: dict[str, Tensor],
    children: dict[str, Tensor],
) -> Tensor:
    """`decode` with the scales and levels of `values`, differentiable in both."""
    from nstf.kernels.gradients import ScaledTable  # a class of torch's: defining it imports torch

    out: Tensor = ScaledTable.apply(values["scale"], values["table"], fixed["codes"], params.group)  # type: ignore[no-untyped-call]
    return out.reshape(shape)


def grain(params: Params, shape: Shape, axis: int) -> int | None:
    """Rows anywhere, columns by groups."""
    return grain_of_groups(shape, params.lead, axis, params.group)


def cut(
    params: Params, shape: Shape, arrays: dict[str, Tensor], span: Span
) -> tuple[Params, dict[str, Tensor]]:
    """The codes and scales of the part, and the whole table."""
    own = {name: array for name, array in arrays.items() if name != "table"}
    return params, {"table": arrays["table"], **cut_groups(own, shape, params.lead, span, params.group, 4)}
