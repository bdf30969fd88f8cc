"""What the leaf formats share: the matrix view of a tensor, groups along the columns, and stored scales."""

from __future__ import annotations

import math

from nstf.kernels.formats.pieces import own
from nstf.kernels.formats.shards import MatrixCut, Span, column_grain
from nstf.kernels.formats.tree import ArraySpec, Shape
from nstf.kernels.lazy import torch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch import Tensor

F16_MAX = 65504.0


def check_lead(lead: int) -> None:
    if not 0 <= lead <= 8:
        raise ValueError(f"lead must be 0 to 8, not {lead}")


def check_group(group: int) -> None:
    if group < 0 or group % 8 or group > 1 << 20:
        raise ValueError(f"group must be 0 (a whole row) or a multiple of 8 up to 2**20, not {group}")


def check_scale_bits(scale_bits: int, allowed: tuple[int, ...]) -> None:
    if scale_bits not in allowed:
        raise ValueError(f"scale_bits must be one of {', '.join(map(str, allowed))}, not {scale_bits}")


def matrix_shape(shape: Shape, lead: int) -> tuple[int, int]:
    """(rows, cols) of the matrix view: the first `lead` axes make the rows. Raises ValueError on an empty
    tensor."""
    if lead > len(shape):
        raise ValueError(f"lead {lead} is more than the {len(shape)} dimensions of {list(shape)}")
    rows, cols = math.prod(shape[:lead]), math.prod(shape[lead:])
    if rows < 1 or cols < 1:
        raise ValueError(f"a tensor of shape {list(shape)} has no elements")
    return rows, cols


def group_size(cols: int, group: int) -> int:
    """The columns of a full group: `group`, or the whole row for 0."""
    return cols if group == 0 else group


def group_count(cols: int, group: int) -> int:
    """Groups in a row; the last one may be shorter."""
    return -(-cols // group_size(cols, group))


def per_column(values: Tensor, group: int, cols: int) -> Tensor:
    """`values` [rows, groups] repeated to [rows, cols]."""
    if values.shape[1] == 1:
        return values.expand(-1, cols)
    return values.repeat_interleave(group_size(cols, group), dim=1)[:, :cols]


def scale_specs(rows: int, groups: int, scale_bits: int) -> dict[str, ArraySpec]:
    """The arrays of the scales: `scale` (16: float16, 32: float32), or 8-bit codes under one float16 per
    row."""
    if scale_bits == 8:
        return {
            "scale_codes": ArraySpec("uint8", (rows, groups)),
            "scale_super": ArraySpec("float16", (rows,)),
        }
    dtype = "float32" if scale_bits == 32 else "float16"
    return {"scale": ArraySpec(dtype, (rows, groups))}


def read_scales(arrays: dict[str, Tensor], scale_bits: int) -> Tensor:
    """The scales as float32 [rows, groups]; 8-bit ones are super * (code + 1) / 256 (exact in float32)."""
    if scale_bits == 8:
        steps = (arrays["scale_codes"].float() + 1) / 256
        return arrays["scale_super"].float().unsqueeze(1) * steps
    return arrays["scale"].float()


def super_in_steps(largest: Tensor, steps: int) -> Tensor:
    """A super-scale with which `steps` of the 256 steps reach `largest`, and whose 256th part is a float16 as well.

    largest: float32, not negative. GGUF's Q6_K stores that part, and a step in a signed byte.
    """
    smallest = 2.0**-16  # 256 times float16's smallest number
    return ((largest * (256 / steps) / smallest).ceil() * smallest).clamp(max=F16_MAX).half().float()


def store_scales(scales: Tensor, scale_bits: int, steps: int = 256) -> dict[str, Tensor]:
    """The arrays nearest to float32 scales [rows, groups]: the inverse of `read_scales`, rounded.

    Scales beyond float16 are clipped; 8-bit ones must not be negative, and use `steps` of the 256 steps (256 or 128).
    """
    if scale_bits == 32:
        return {"scale": scales.float()}
    if scale_bits == 16:
        return {"scale": scales.clamp(-F16_MAX, F16_MAX).half()}
    top = scales.amax(dim=1).clamp(0, F16_MAX)
    top = top.half() if steps == 256 else super_in_steps(top, steps).half()
    per_step = torch.where(top > 0, 256 / top.float(), torch.zeros_like(top.float())).unsqueeze(1)
    codes = (scales * per_step).round().clamp(1, steps) - 1
    # A row of zeros keeps full codes, as encoders store it.
    codes = torch.where(top.unsqueeze(1) > 0, codes, torch.full_like(codes, steps - 1))
    return {"scale_codes": codes.to(torch.uint8), "scale_super": top}


def narrow(values: Tensor) -> Tensor:
    """The same values in the narrowest of int8, float16 and float32 that holds them to 11 bits.

    What stays fixed while scales are tuned is kept decoded, and this is what makes that a byte or two a weight.
    """
    if bool((values == values.round()).all()) and bool((values.abs() <= 127).all()):
        return values.to(torch.int8)
    half = values.half()
    close = (half.float() - values).abs() <= values.abs() * 2.0**-11
    return half if bool(close.all()) else values.float()


def scaled(scale: Tensor, units: Tensor, group: int) -> Tensor:
    """scale * units [rows, cols], differentiable in `scale` [rows, groups].

    Computed in float32, or for `units` in bfloat16 in that. The graph keeps `units` as it is given, not a float32 copy.
    """
    from nstf.kernels.gradients import Scaled  # a class of torch's: defining it imports torch

    return Scaled.apply(scale, units, group)  # type: ignore[no-any-return, no-untyped-call]


def per_group(values: Tensor, group: int, groups: int) -> Tensor:
    """Sums over the columns of every group, float32: [rows, cols] -> [rows, groups]; the transpose of `per_column`."""
    rows, cols = values.shape
    size = group_size(cols, group)
    if size * groups != cols:
        values = torch.nn.functional.pad(values, (0, size * groups - cols))
    return values.view(rows, groups, size).sum(dim=2, dtype=torch.float32)


def grain_of_groups(shape: Shape, lead: int, axis: int, group: int) -> int | None:
    """Where codes with a scale per group of columns can be cut: rows anywhere, columns by groups. One scale for all
    columns leaves whole bytes of codes, which eight of them make."""
    if axis < lead:
        return 1
    _, cols = matrix_shape(shape, lead)
    return column_grain(shape, lead, axis, group if group_count(cols, group) > 1 else 8)


def cut_groups(
    arrays: dict[str, Tensor], shape: Shape, lead: int, span: Span, group: int, bits: int
) -> dict[str, Tensor]:
    """The part of `codes` [rows, bytes] of so many bits and of scales [rows, groups] or [rows]; other arrays are taken
    as [rows, bytes] of which a cut by columns leaves everything."""
    part = MatrixCut(shape, lead, span)
    if part.by_rows:
        return {name: part.rows(array) for name, array in arrays.items()}
    _, cols = matrix_shape(shape, lead)
    first, last = part.columns
    out = dict(arrays)
    out["codes"] = own(arrays["codes"][:, first * bits // 8 : (last * bits + 7) // 8])
    if group_count(cols, group) > 1:
        for name in ("scale", "scale_codes"):
            if name in arrays:
                out[name] = own(arrays[name][:, first // group : group_count(last, group)])
    return out
