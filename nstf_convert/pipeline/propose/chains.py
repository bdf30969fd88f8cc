"""Decompositions of convolutions that take fewer multiplications than the dense weight, whatever their bytes.

Where a plan bounds time, what structure gains is time: a low rank (a kernel with fewer outputs, then 1x1) and Tucker-2 (1x1,
a smaller kernel, 1x1) at stated shares of the dense weight's multiplications. The planner weighs their loss, bytes and
measured seconds against those of codes alone.

What cannot win is not made. A form at a share of the multiplications must lose less than mixing the erased tensor with the
whole one at that share would, and Tucker less than the low rank of as many multiplications: what a low rank loses is known
from one spectrum, what Tucker loses at least from two (nstf.decomposers.bounds).
"""

import math

from nstf.kernels.formats.tree import Shape
from nstf.proposals import Recipe, Signature
from nstf_convert.pipeline.propose.units import Unit

# Shares of the dense weight's multiplications: on a trained ResNet-18 most kernels of 256 outputs took Tucker's small ones.
SHARES = (0.55, 0.45, 0.35, 0.28, 0.2, 0.14, 0.1)
TUCKER_SHARES = (0.35, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05)
# One scale a row: sums of small groups are scaled so often that it takes time.
FACTORS = (
    Recipe("int_grid", {"bits": 6, "group": 0, "symmetric": True, "scale_bits": 16}),
    Recipe("int_grid", {"bits": 4, "group": 64, "symmetric": True, "scale_bits": 8}),
)
# Low ranks of this share and above have factors of both kinds: of fewer numbers the bytes hardly count.
SEVERAL_FACTORS = 0.35
# Tucker's bases are found in turns, which takes minutes for larger weights: theirs are those of the unfoldings.
LARGEST_TUCKER = 1 << 20
# A chain has two or three convolutions to start and its results to write: smaller weights gain nothing.
SMALLEST = 1 << 14


def recipes(unit: Unit, allowed: set[str], known: Signature | None = None) -> list[Recipe]:
    """Chains of a convolution over two axes, of the methods that are allowed. known: what is learnt about the tensor, which
    rules some out; without it all are given."""
    shape = unit.inner_shape
    if unit.role != "conv" or len(shape) != 4 or unit.elements < SMALLEST or "int_grid" not in allowed:
        return []
    out = []
    for share in SHARES if "svd" in allowed else ():
        params = parameters("svd", shape, share, unit.stride)
        if params is not None and (
            known is None or _low_rank_loss(known, shape, share) < (1 - share) * known.signal
        ):
            factors = FACTORS if share >= SEVERAL_FACTORS else FACTORS[:1]
            made = [Recipe("svd", params, {"factor": factor}) for factor in factors]
            out += [recipe for recipe in made if recipe not in out]  # small weights have few ranks
    for share in TUCKER_SHARES if "tucker" in allowed else ():
        params = parameters("tucker", shape, share, unit.stride)
        if params is None or (known is not None and not _tucker_may_win(known, shape, params, share)):
            continue
        if unit.elements > LARGEST_TUCKER or share < TUCKER_SHARES[0]:
            params = {**params, "iterations": 0}
        recipe = Recipe("tucker", params, {"factor": FACTORS[0]})
        if recipe not in out:
            out.append(recipe)
    return out


def _low_rank_loss(known: Signature, shape: Shape, share: float) -> float:
    """What the low rank with that share of the multiplications loses, but for the rounding of its factors."""
    known.matrix.sharpen()
    out, width = shape[0], math.prod(shape[1:])
    return known.matrix.left_out(int(share * out * width / (out + width)))


def _tucker_may_win(known: Signature, shape: Shape, params: dict[str, object], share: float) -> bool:
    """Whether Tucker-2 of these ranks may lose less than the low rank of as many multiplications."""
    view, ranks = (*shape[:2], math.prod(shape[2:])), params["ranks"]
    assert isinstance(ranks, list)
    sides = [known.unfolding(view, (axis,)) for axis in (0, 1)]
    for side in sides:
        side.sharpen()
    least = max(side.left_out(rank) for side, rank in zip(sides, ranks, strict=False))
    return least < min(_low_rank_loss(known, shape, share), (1 - share) * known.signal)


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
