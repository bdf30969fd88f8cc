"""Decompositions of convolutions that take fewer multiplications than the dense weight, whatever their bytes.

Where a plan bounds time, what structure gains is time: a low rank (a kernel with fewer outputs, then 1x1) and Tucker-2 (1x1,
a smaller kernel, 1x1) at stated shares of the dense weight's multiplications, with factors of few and of many bits. The
planner weighs their loss, bytes and measured seconds against those of codes alone.
"""

import math

from nstf.kernels.formats.tree import Shape
from nstf.proposals import Recipe
from nstf_convert.pipeline.propose.units import Unit

# Shares of the dense weight's multiplications.
SHARES = (0.55, 0.35)
FACTORS = (
    Recipe("int_grid", {"bits": 6, "group": 64, "symmetric": True, "scale_bits": 8}),
    Recipe("int_grid", {"bits": 4, "group": 64, "symmetric": True, "scale_bits": 8}),
)
# Tucker's bases are found in turns, which takes minutes for larger weights; and so at one share, with one kind of factor.
LARGEST_TUCKER = 1 << 20
# A chain has two or three convolutions to start and its results to write: smaller weights gain nothing.
SMALLEST = 1 << 14


def recipes(unit: Unit, allowed: set[str]) -> list[Recipe]:
    """Chains of a convolution over two axes, of the methods that are allowed."""
    shape = unit.inner_shape
    if unit.role != "conv" or len(shape) != 4 or unit.elements < SMALLEST or "int_grid" not in allowed:
        return []
    out = []
    for share in SHARES:
        params = parameters("svd", shape, share, unit.stride)
        if "svd" in allowed and params is not None:
            out += [Recipe("svd", params, {"factor": factor}) for factor in FACTORS]
    params = parameters("tucker", shape, SHARES[-1], unit.stride)
    if "tucker" in allowed and params is not None and unit.elements <= LARGEST_TUCKER:
        out.append(Recipe("tucker", params, {"factor": FACTORS[0]}))
    return out


def parameters(
    method: str, shape: Shape, share: float, stride: tuple[int, ...] = ()
) -> dict[str, object] | None:
    """Ranks of `svd` or `tucker` with which a convolution takes that share of its multiplications, or None."""
    return _low_rank(shape, share) if method == "svd" else _tucker(shape, share, math.prod(stride))


def _low_rank(shape: Shape, share: float) -> dict[str, object] | None:
    """The rank r of which r (out + in k) is that share of out in k."""
    out, width = shape[0], math.prod(shape[1:])
    return {"rank": rank} if (rank := _whole(share * out * width / (out + width))) < min(out, width) else None


def _tucker(shape: Shape, share: float, before: int) -> dict[str, object] | None:
    """Equal shares of both channels such that before r_in in + r_out r_in k + r_out out is that share of out in k. before:
    pixels that the first stage, in front of the stride, sees for each of the result."""
    out, width, taps = shape[0], shape[1], math.prod(shape[2:])
    if taps == 1:
        return None
    linear, whole = (out * out + before * width * width) / (out * width * taps), 1.0
    part = (-linear + math.sqrt(linear * linear + 4 * whole * share)) / (2 * whole)
    ranks = [_whole(part * out), _whole(part * width)]
    if ranks[0] >= out or ranks[1] >= width:
        return None
    return {"ranks": [*ranks, *shape[2:]], "view": list(shape)}


def _whole(rank: float) -> int:
    """The nearest multiple of 8, so that no kernel has a few rows or columns left over; at least one."""
    return max(8, round(rank / 8) * 8)
