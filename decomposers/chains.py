"""Decompositions of convolutions that take fewer multiplications than the dense weight, whatever their bytes.

Where a plan bounds time, what structure gains is time: a low rank (a kernel with fewer outputs, then 1x1) and Tucker-2 (1x1,
a smaller kernel, 1x1) at stated shares of the dense weight's multiplications. `svd` and `tucker` propose them when
`room.faster` asks; the planner weighs their loss, bytes and measured seconds against those of codes alone.

What cannot win is not made. A form at a share of the multiplications must lose less than mixing the erased tensor with the
whole one at that share would, and Tucker less than the low rank of as many multiplications: what a low rank loses is known
from one spectrum, what Tucker loses at least from two (nstf.decomposers.bounds).
"""

import math
from dataclasses import replace
from typing import Any

from nstf.kernels.formats.tree import Shape
from nstf.proposals import Recipe, Room, Signature

# Shares of the dense weight's multiplications: on a trained ResNet-18 most kernels of 256 outputs took Tucker's small ones.
SHARES = (0.55, 0.45, 0.35, 0.28, 0.2, 0.14, 0.1)
TUCKER_SHARES = (0.35, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05)
# Steps of a rank that a plan took: between neighbouring shares there are about two.
NEXT = 1.125
# Low ranks of this share and above have factors of all kinds: of fewer numbers the bytes hardly count.
SEVERAL_FACTORS = 0.35
# Tucker's bases are found in turns, which takes minutes for larger weights: theirs are those of the unfoldings.
LARGEST_TUCKER = 1 << 20
# A chain has two or three convolutions to start and its results to write: smaller weights gain nothing.
SMALLEST = 1 << 14


def low_ranks(signature: Signature, room: Room) -> list[Recipe]:
    """Low ranks of a convolution at each of SHARES, where its spectrum does not rule them out."""
    if not _suits("svd", signature, room):
        return []
    if room.near is not None:
        most = min(signature.shape[0], math.prod(signature.shape[1:]))
        found = [r for r in _beside(int(room.near.params["rank"])) if r < most]
        return [replace(room.near, params={**room.near.params, "rank": r}) for r in found]
    out: list[Recipe] = []
    for share in SHARES:
        params = low_rank_params(signature.shape, share)
        if params is None:
            continue
        factors = room.factors if share >= SEVERAL_FACTORS else room.factors[:1]
        made = [Recipe("svd", params, {"factor": factor.recipe}) for factor in factors]
        if made and room.beats(
            "svd", room.size_of(made[0]), _low_rank_loss(signature, share), _mixed(signature, share)
        ):
            out += [recipe for recipe in made if recipe not in out]  # small weights have few ranks
    return out


def tuckers(signature: Signature, room: Room) -> list[Recipe]:
    """Tucker-2 of a convolution at each of TUCKER_SHARES, where its spectra do not rule it out."""
    if not _suits("tucker", signature, room):
        return []
    if math.prod(signature.shape[2:]) == 1:
        room.skip("tucker", "a 1x1 kernel in three stages takes no fewer multiplications than in two")
        return []
    if room.near is not None:
        (out_rank, in_rank, *whole), sizes = room.near.params["ranks"], signature.shape
        pairs = zip(_beside(out_rank), _beside(in_rank), strict=False)
        kept = [[a, b, *whole] for a, b in pairs if a < sizes[0] and b < sizes[1]]
        return [replace(room.near, params={**room.near.params, "ranks": ranks}) for ranks in kept]
    out: list[Recipe] = []
    for share in TUCKER_SHARES:
        params = tucker_params(signature.shape, share, signature.stride)
        if params is None or not room.factors:
            continue
        if math.prod(signature.shape) > LARGEST_TUCKER or share < TUCKER_SHARES[0]:
            params = {**params, "iterations": 0}
        recipe = Recipe("tucker", params, {"factor": room.factors[0].recipe})
        rival = min(_low_rank_loss(signature, share), _mixed(signature, share))
        least = _tucker_loss(signature, params["ranks"])
        if recipe not in out and room.beats("tucker", room.size_of(recipe), least, rival):
            out.append(recipe)
    return out


def low_rank_params(shape: Shape, share: float) -> dict[str, Any] | None:
    """The rank r of which r (out + in k) is that share of out in k; None where it is no low rank."""
    out, width = shape[0], math.prod(shape[1:])
    return {"rank": rank} if (rank := _whole(share * out * width / (out + width))) < min(out, width) else None


def tucker_params(shape: Shape, share: float, stride: tuple[int, ...] = ()) -> dict[str, Any] | None:
    """Equal shares of both channels such that s r_in in + r_out r_in k + r_out out is that share of out in k; s: pixels that
    the first stage, in front of the stride, sees for each of the result. None for 1x1 kernels and ranks that are none."""
    out, width, taps = shape[0], shape[1], math.prod(shape[2:])
    if taps == 1:
        return None
    linear = (out * out + math.prod(stride) * width * width) / (out * width * taps)
    part = (-linear + math.sqrt(linear * linear + 4 * share)) / 2
    ranks = [_whole(part * out), _whole(part * width)]
    if ranks[0] >= out or ranks[1] >= width:
        return None
    return {"ranks": [*ranks, *shape[2:]], "view": list(shape)}


def _suits(method: str, signature: Signature, room: Room) -> bool:
    """Whether chains of a tensor are looked for at all."""
    elements = math.prod(signature.shape)
    if signature.role != "conv" or len(signature.shape) != 4:
        room.skip(method, "as a chain it is proposed for convolutions over two axes alone")
    elif elements < SMALLEST:
        room.skip(method, f"{elements} weights: below {SMALLEST} a chain gains no time")
    elif not room.factors:
        room.skip(method, "no integers for its factors are among the methods")
    else:
        return True
    return False


def _mixed(signature: Signature, share: float) -> float:
    """What mixing the whole tensor with the erased one at that share of the multiplications loses."""
    return (1 - share) * signature.signal


def _low_rank_loss(signature: Signature, share: float) -> float:
    """What the low rank with that share of the multiplications loses, but for the rounding of its factors."""
    signature.matrix.sharpen()
    out, width = signature.shape[0], math.prod(signature.shape[1:])
    return signature.matrix.left_out(int(share * out * width / (out + width)))


def _tucker_loss(signature: Signature, ranks: list[int]) -> float:
    """What Tucker-2 of these ranks loses at least."""
    view = (*signature.shape[:2], math.prod(signature.shape[2:]))
    sides = [signature.unfolding(view, (axis,)) for axis in (0, 1)]
    for side in sides:
        side.sharpen()
    return max(side.left_out(rank) for side, rank in zip(sides, ranks, strict=False))


def _beside(rank: int) -> list[int]:
    """The next multiples of 8 that are about an eighth away, the larger one first."""
    return [
        r
        for r in dict.fromkeys((_whole(max(rank + 8, rank * NEXT)), _whole(min(rank - 8, rank / NEXT))))
        if r != rank
    ]


def _whole(rank: float) -> int:
    """The nearest multiple of 8, so that no kernel has a few rows or columns left over; at least one."""
    return max(8, round(rank / 8) * 8)
