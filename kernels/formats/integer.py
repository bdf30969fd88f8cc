"""`int`: integer codes on a uniform grid with one scale (and zero point) per group of a row."""

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
    narrow,
    per_column,
    read_scales,
    scale_specs,
    scaled,
    store_scales,
)
from nstf.kernels.formats.shards import MatrixCut, Span
from nstf.kernels.formats.tree import ArraySpec, Shape
from nstf.kernels.records import frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch import Tensor

KIND = "int"


@frozen
class Params:
    """`bits` 2..8 per code; `group` columns share a scale (0: the whole row); `symmetric`: zero is
    2**(bits-1); `scale_bits` 16 (float16) or 8 (8-bit codes under one float16 per row); `lead` axes make
    the rows. A float16 scale may be negative: the grid then reaches one step further on the positive side.
    """

    bits: int = 4
    group: int = 64
    symmetric: bool = True
    scale_bits: int = 16
    lead: int = 1

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits must be 2 to 8, not {self.bits}")
        check_group(self.group)
        check_scale_bits(self.scale_bits, (8, 16))
        check_lead(self.lead)


def arrays(params: Params, shape: Shape) -> dict[str, ArraySpec]:
    """`codes` u8 [rows, ceil(cols*bits/8)], the scales, and `zeros` (bit-packed like codes) when
    asymmetric."""
    rows, cols = matrix_shape(shape, params.lead)
    groups = group_count(cols, params.group)
    specs = {"codes": ArraySpec("uint8", (rows, bitpack.packed_bytes(cols, params.bits)))}
    specs |= scale_specs(rows, groups, params.scale_bits)
    if not params.symmetric:
        specs["zeros"] = ArraySpec("uint8", (rows, bitpack.packed_bytes(groups, params.bits)))
    return specs


def children(params: Params, shape: Shape) -> dict[str, Shape]:
    return {}


def code_bits(params: Params, shape: Shape) -> int:
    rows, cols = matrix_shape(shape, params.lead)
    return rows * cols * params.bits


def decode(params: Params, shape: Shape, arrays: dict[str, Tensor], children: dict[str, Tensor]) -> Tensor:
    """scale * (code - zero), float32 of `shape`."""
    _, cols = matrix_shape(shape, params.lead)
    values = _units(params, arrays, cols)
    values *= per_column(read_scales(arrays, params.scale_bits), params.group, cols)
    return values.reshape(shape)


def fixed(params: Params, shape: Shape, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """What tuning leaves alone: the codes less their zero points, at scale 1."""
    _, cols = matrix_shape(shape, params.lead)
    return {"units": narrow(_units(params, arrays, cols))}


def tunable(params: Params, shape: Shape, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The scales [rows, groups]."""
    return {"scale": read_scales(arrays, params.scale_bits)}


def retuned(
    params: Params, shape: Shape, arrays: dict[str, Tensor], values: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The arrays with other scales, rounded to what they are stored as. Where the first half of the 8-bit steps is enough,
    it stays enough: GGUF's Q6_K holds no others."""
    half = params.scale_bits == 8 and not bool((arrays["scale_codes"] > 127).any())
    return {**arrays, **store_scales(values["scale"], params.scale_bits, 128 if half else 256)}


def decode_tuned(
    params: Params,
    shape: Shape,
    fixed: dict[str, Tensor],
    values: dict[str, Tensor],
    children: dict[str, Tensor],
) -> Tensor:
    """`decode` with the scales of `values`, and with its units where it has any; differentiable in both."""
    if "units" in values:
        _, cols = matrix_shape(shape, params.lead)
        return (values["units"] * per_column(values["scale"], params.group, cols)).reshape(shape)
    return scaled(values["scale"], fixed["units"], params.group).reshape(shape)


def units(params: Params, shape: Shape, arrays: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(code - zero, its least possible value), float32 [rows, cols]: the largest is 2**bits - 1 above."""
    _, cols = matrix_shape(shape, params.lead)
    found = _units(params, arrays, cols)
    return found, found - bitpack.unpack(arrays["codes"], params.bits, cols).float()


def with_units(params: Params, shape: Shape, arrays: dict[str, Tensor], units: Tensor) -> dict[str, Tensor]:
    """The arrays with other codes: whole numbers within their range, [rows, cols]."""
    _, cols = matrix_shape(shape, params.lead)
    codes = bitpack.unpack(arrays["codes"], params.bits, cols).float()
    moved = codes + (units - _units(params, arrays, cols))
    return {**arrays, "codes": bitpack.pack(moved.round().to(arrays["codes"].dtype), params.bits)}


def _units(params: Params, arrays: dict[str, Tensor], cols: int) -> Tensor:
    """code - zero, float32 [rows, cols]."""
    values = bitpack.unpack(arrays["codes"], params.bits, cols).float()
    if params.symmetric:
        values -= 1 << (params.bits - 1)
    else:
        zeros = bitpack.unpack(arrays["zeros"], params.bits, group_count(cols, params.group))
        values -= per_column(zeros.float(), params.group, cols)
    return values


def grain(params: Params, shape: Shape, axis: int) -> int | None:
    """Rows anywhere, columns by groups."""
    return grain_of_groups(shape, params.lead, axis, params.group)


def cut(
    params: Params, shape: Shape, arrays: dict[str, Tensor], span: Span
) -> tuple[Params, dict[str, Tensor]]:
    """The codes and scales of the part."""
    part = cut_groups(arrays, shape, params.lead, span, params.group, params.bits)
    if not params.symmetric and span.axis >= params.lead:
        _, cols = matrix_shape(shape, params.lead)
        groups = group_count(cols, params.group)
        if groups > 1:  # zero points of several groups share bytes
            first, last = MatrixCut(shape, params.lead, span).columns
            zeros = bitpack.unpack(arrays["zeros"], params.bits, groups)
            zeros = zeros[:, first // params.group : group_count(last, params.group)]
            part["zeros"] = bitpack.pack(zeros.contiguous(), params.bits)
    return params, part
