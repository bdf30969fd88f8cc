"""`mxfp4`: OCP Microscaling FP4 (MX specification 1.0, 2023): blocks of 32 along the columns.

An element is E2M1 (sign, 2 exponent bits, 1 mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives);
a block's scale is E8M0, 2**(code - 127), with 255 for NaN. Codes are packed low nibble first.
"""

from __future__ import annotations

from nstf.kernels.formats import bitpack
from nstf.kernels.formats.scales import (
    check_lead,
    cut_groups,
    grain_of_groups,
    group_count,
    matrix_shape,
    per_column,
)
from nstf.kernels.formats.shards import Span
from nstf.kernels.formats.tree import ArraySpec, Shape
from nstf.kernels.lazy import torch
from nstf.kernels.records import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch import Tensor

KIND = "mxfp4"

BLOCK = 32
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = _POSITIVE + tuple(-v for v in _POSITIVE)


@frozen
class Params:
    """`lead` axes make the rows; the block size and the element type are the standard's."""

    lead: int = 1

    def __post_init__(self) -> None:
        check_lead(self.lead)


def arrays(params: Params, shape: Shape) -> dict[str, ArraySpec]:
    """`codes` u8 [rows, ceil(cols/2)] and `scale` u8 [rows, ceil(cols/32)]."""
    rows, cols = matrix_shape(shape, params.lead)
    return {
        "codes": ArraySpec("uint8", (rows, bitpack.packed_bytes(cols, 4))),
        "scale": ArraySpec("uint8", (rows, group_count(cols, BLOCK))),
    }


def children(params: Params, shape: Shape) -> dict[str, Shape]:
    return {}


def code_bits(params: Params, shape: Shape) -> int:
    rows, cols = matrix_shape(shape, params.lead)
    return rows * cols * 4


def scale_value(code: Tensor) -> Tensor:
    """2**(code - 127) as float32; 255 is NaN. The smallest, 2**-127, is a subnormal float32."""
    value = torch.ldexp(torch.ones_like(code, dtype=torch.float64), code.to(torch.int32) - 127).float()
    return value.masked_fill(code == 255, float("nan"))


def decode(params: Params, shape: Shape, arrays: dict[str, Tensor], children: dict[str, Tensor]) -> Tensor:
    """scale * element, float32 of `shape`."""
    _, cols = matrix_shape(shape, params.lead)
    table = torch.tensor(E2M1, dtype=torch.float32, device=arrays["codes"].device)
    values = table[bitpack.unpack(arrays["codes"], 4, cols).int()]
    values *= per_column(scale_value(arrays["scale"]), BLOCK, cols)
    return values.reshape(shape)


def grain(params: Params, shape: Shape, axis: int) -> int | None:
    """Rows anywhere, columns by blocks."""
    return grain_of_groups(shape, params.lead, axis, BLOCK)


def cut(
    params: Params, shape: Shape, arrays: dict[str, Tensor], span: Span
) -> tuple[Params, dict[str, Tensor]]:
    """The codes and scales of the part."""
    return params, cut_groups(arrays, shape, params.lead, span, BLOCK, 4)
