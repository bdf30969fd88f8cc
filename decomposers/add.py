"""A low-rank correction with 4-bit factors on a low-bit base: W ~ Q + A B. Pays only at very low rates, if at all.

The correction takes the directions that matter most first; what is left has a smaller range to round (LQER, Zhang et al.
2024; CALDERA, Saha et al. 2024). It has no factors of its own: nstf_convert.pipeline.propose.recipe makes correction and
base in turn.
"""

from nstf.kernels.formats import add
from nstf.proposals import Recipe, Room, Signature, Target

KIND = add.KIND
LOW_BITS = 4.0
"""Bits a weight that a plan gives a tensor up to which a correction is worth a look."""
ENERGY_SLACK = 0.95
"""The loss of a base follows the energy that it stores about as well as this."""
BASES = tuple(
    (Recipe("int_grid", {"bits": b, "group": 64, "symmetric": True, "scale_bits": 8}), rank)
    for b in (2, 3, 4)
    for rank in (8, 24)
) + tuple((Recipe("trellis", {"quarter_bits": q}), rank) for q in (6, 8, 10) for rank in (8, 16, 32))
FACTOR = Recipe("int_grid", {"bits": 4, "group": 32, "symmetric": True, "scale_bits": 8})


def proposals(signature: Signature, target: Target, room: Room) -> list[Recipe]:
    """Corrections of matrices that a plan gives few bits, where the energy that a correction can take away at most does not
    rule them out.

    Trellis codes lose in proportion to the energy of what they store. Integers lose by the range of their groups, which a
    correction may narrow by far more, but never less than trellis codes of as many bytes; where these are not among the
    methods no hybrid of integers is ruled out.
    """
    if room.planned is None or room.planned > LOW_BITS or signature.lead != 1 or len(signature.shape) != 2:
        return []
    if signature.role in ("embedding", "position"):
        return []
    wanted = [
        Recipe("add", {}, {"base": base, "correction": Recipe("svd", {"rank": rank}, {"factor": FACTOR})})
        for base, rank in BASES
        if base.method in room.methods and rank <= signature.matrix.side // 4
    ]
    return [r for r in wanted if _may_win(r, signature, room)]


def rank_of(hybrid: Recipe) -> int:
    """The rank of its correction."""
    return int(hybrid.parts["correction"].params["rank"])


def _may_win(hybrid: Recipe, signature: Signature, room: Room) -> bool:
    # What a base is left with is measured in the weights' own norm: rounding errors are white.
    plain, base = signature.plain, hybrid.parts["base"]
    size, rank = room.size_of(hybrid), rank_of(hybrid)
    known = base.method == "trellis" or "trellis" in room.methods
    lost = ENERGY_SLACK * room.rival(room.size_of(base)) / max(plain.left_out(0), 1e-300) if known else 0.0
    if not room.rules_out(lost * plain.left_out(rank), size):
        plain.sharpen()
    return room.may_win("add", size, lost * plain.left_out(rank))
