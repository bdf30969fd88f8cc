"""A low-bit base beside what experts share, or beside a low rank: W ~ Q + A B. Pays where experts are alike, seldom else.

A low-rank correction takes the directions that matter most first; what is left has a smaller range to round (LQER, Zhang et
al. 2024; CALDERA, Saha et al. 2024). Experts that started as copies of one MLP (upcycling, Komatsuzaki et al. 2022) go on
sharing most of it: one matrix for all of a stack, in 4 bits, takes that away, and the base codes what tells them apart.
It has no factors of its own: `compose` makes correction and base in turn.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from nstf.decomposers import svd
from nstf.decomposers.factors import Leaf, unique
from nstf.kernels.formats import add, decode, shuffle, trellis
from nstf.proposals import FEW_BITS, Recipe, Room, Signature, Target, Tools

KIND = add.KIND
PARTS = {"x": "base", "y": "correction"}
"""Children of the node -> the parts of a recipe that they are made by, each for the whole tensor."""
ENERGY_SLACK = 0.95
"""The loss of a base follows the energy that it stores about as well as this."""
BASES = tuple(
    (Recipe("int_grid", {"bits": b, "group": 64, "symmetric": True, "scale_bits": 8}), rank)
    for b in (2, 3, 4)
    for rank in (8, 24)
) + tuple((Recipe("trellis", {"quarter_bits": q}), rank) for q in (6, 8, 10) for rank in (8, 16, 32))
FACTOR = Recipe("int_grid", {"bits": 4, "group": 32, "symmetric": True, "scale_bits": 8})
SHARED = Recipe("int_grid", {"bits": 4, "group": 64, "symmetric": True, "scale_bits": 8})
SHARED_NOISE = 0.013
"""Squared error of `SHARED` on a Gaussian matrix, as a share of its energy."""
EXPERT_BASES = tuple(Recipe("trellis", {"quarter_bits": q}) for q in range(4, 25)) + tuple(
    Recipe("int_grid", {"bits": b, "group": 64, "symmetric": True, "scale_bits": 8}) for b in range(2, 9)
)


def proposals(signature: Signature, target: Target, room: Room) -> list[Recipe]:
    """Corrections of matrices that a plan gives few bits, where the energy that a correction can take away at most does not
    rule them out; and of stacks of experts one matrix that all share, at each of the room's sizes.

    Trellis codes lose in proportion to the energy of what they store. Integers lose by the range of their groups, which a
    correction may narrow by far more, but never less than trellis codes of as many bytes; where these are not among the
    methods no hybrid of integers is ruled out.
    """
    if signature.lead == 2 and len(signature.shape) == 3:
        return _shared(signature, room)
    if signature.lead != 1 or len(signature.shape) != 2 or signature.role in ("embedding", "position"):
        room.skip("add", "corrections are proposed for matrices, a shared one for stacks of experts")
        return []
    if room.planned is None or room.planned > FEW_BITS:
        room.skip("add", f"a correction is looked at where a plan gives at most {FEW_BITS:g} bits a weight")
        return []
    wanted = [
        Recipe("add", {}, {"base": base, "correction": Recipe("svd", {"rank": rank}, {"factor": FACTOR})})
        for base, rank in BASES
        if base.method in room.methods and rank <= min(signature.rows, signature.cols) // 4
    ]
    return [r for r in wanted if _may_win(r, signature, room)]


def _shared(signature: Signature, room: Room) -> list[Recipe]:
    """One matrix for all experts, and codes of the highest rate that fits beside it.

    A rank of one along the experts leaves so much of the energy at least; codes lose of that what plain formats of their
    bytes lose of the whole, an estimate and no bound.
    """
    if not room.sizes or signature.signal <= 0.0:
        return []
    experts = signature.unfolding(signature.shape, (0,))
    # Cut along one axis alone, which needs no sweeps.
    params = {"ranks": [1, *signature.shape[1:]], "view": list(signature.shape), "iterations": 0}
    shared = Recipe("tucker", params, {"factor": SHARED})
    spent, apart = room.size_of(shared), experts.left_out(1)
    left = (apart + SHARED_NOISE * max(0.0, signature.signal - apart)) / signature.signal
    # Of integers nothing is known but that they lose more than trellis codes, where there are any.
    coded = "trellis" in room.methods and signature.cols >= trellis.SIDE
    bases = [
        b
        for b in EXPERT_BASES
        if b.method == ("trellis" if coded else "int_grid") and b.method in room.methods
    ]
    out = []
    for size in room.sizes:
        fits = [base for base in bases if room.size_of(base) <= size - spent]
        if not fits:
            continue
        least = ENERGY_SLACK * room.plain(room.size_of(fits[-1])) * left
        if room.may_win("add", size, least):
            out.append(Recipe("add", {}, {"base": fits[-1], "correction": shared}, least))
    return unique(out)


def compose(recipe: Recipe, weight: Tensor, made: Callable[[str, Tensor], Tensor]) -> None:
    """Makes the parts of a recipe. made: (a part's name, what it is to store) -> the same as it is stored, decoded.

    The correction takes the directions that matter most first; what is left has a smaller range to round.
    """
    made("base", weight - made("correction", weight))


def losses(signature: Signature, wanted: Sequence[Recipe], tools: Tools) -> list[tuple[Recipe, float]]:
    """Those of `proposals` for matrices that may win, with expected losses: their corrections really made and rounded, their
    bases estimated on what is left.

    A correction before its factors are rounded loses less: where another candidate of no more bytes loses less than even
    that, the recipe is left out.
    """
    weight, stats = signature.weight, signature.stats
    prepared = svd.prepare(
        weight, stats.hessian, stats.row_weight, signature.lead, remembered=tools.remembered
    )
    out = []
    for rank in dict.fromkeys(rank_of(recipe) for recipe in wanted):
        own = [r for r in wanted if rank_of(r) == rank]
        left = weight - prepared.truncate(rank).dense()
        possible = [r for r in own if not tools.beaten(r, tools.estimate(r.parts["base"], left))]
        stored: dict[str, Tensor] = {}
        for recipe in possible:
            factor = recipe.parts["correction"].parts["factor"]
            if factor.key not in stored:
                made = prepared.truncate(rank).encode(_leaf(tools, factor))
                stored[factor.key] = decode(made).to(weight.device).reshape(weight.shape)
            out.append((recipe, tools.estimate(recipe.parts["base"], weight - stored[factor.key])))
    return out


def _leaf(tools: Tools, factor: Recipe) -> Leaf:
    return lambda name, value, metric: tools.leaf(factor, value, metric)


def faster(hybrid: Recipe, signature: Signature) -> Recipe | None:
    """A sum of trellis codes and one matrix for all experts with shuffle codes of the same rate, whose products take half as
    long (docs/structure.md); None where there are none: other rates, other sums, experts that end within a path."""
    base = hybrid.parts.get("base")
    if hybrid.method != KIND or base is None or base.method != "trellis" or signature.lead != 2:
        return None
    rate = base.params["quarter_bits"]
    if rate not in shuffle.RATES or signature.shape[1] % shuffle.SEGMENT:
        return None
    parts = {**hybrid.parts, "base": Recipe("shuffle", {"quarter_bits": rate})}
    return Recipe(KIND, hybrid.params, parts)


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
