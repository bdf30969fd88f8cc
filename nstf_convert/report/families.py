"""How often each family of encodings was tried, and whether it beat the same bytes spent on rate.

A candidate is compared with the lower convex hull of the plain formats (integers, grids, floats, trellis, shuffle) of its
tensor at its own bytes: ratio = its expected loss / the hull's. The hull is what an allocator reaches by mixing plain
formats. A plain family is compared with the hull of the other plain families. Below 1 it wins.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from nstf.kernels.formats import Node
from nstf_convert.planner import Option, lower_hull

# The kind of a tree's node -> (family, plain): formats that spend bytes on rate alone are plain.
_KINDS = {
    "int": ("int", True),
    "grid": ("grid", True),
    "fp8": ("fp8", True),
    "mxfp4": ("mxfp4", True),
    "trellis": ("trellis", True),
    "shuffle": ("shuffle", True),
    "low_rank": ("SVD", False),
    "cp": ("CP", False),
    "tucker": ("Tucker", False),
    "tensor_train": ("tensor train", False),
}
HYBRID = "low rank on low bits"
SHARED = "one matrix for all experts, and low bits"
ORDER = (
    HYBRID,
    SHARED,
    "CP",
    "Tucker",
    "tensor train",
    "SVD",
    "trellis",
    "shuffle",
    "grid",
    "int",
    "fp8",
    "mxfp4",
)


@dataclass(frozen=True)
class Priced:
    """A candidate: its bytes on disk and its expected loss, `exact` when it was encoded."""

    tree: Node
    size_bytes: int
    loss: float
    exact: bool


@dataclass(frozen=True)
class Tensor:
    """One tensor's candidates and the tree it is stored as."""

    name: str
    priced: tuple[Priced, ...]
    chosen: Node


def family_of(tree: Node) -> tuple[str, bool]:
    """(family, plain) of an encoding; ("", False) for a tensor that is stored as it is."""
    if tree.kind == "dense":
        return "", False
    if tree.kind == "add":
        return (SHARED if tree.children["y"].kind == "tucker" else HYBRID), False
    if tree.kind in _KINDS:
        return _KINDS[tree.kind]
    # Wrappers (another order of axes, a rotated basis) belong to what they hold.
    return family_of(tree.children["x"]) if "x" in tree.children else (tree.kind, not tree.children)


def family_of_kind(kind: str, experts: bool = False) -> str:
    """The family of the encodings whose node has a kind. experts: of a stack of experts, which add one matrix for all."""
    if kind == "add":
        return SHARED if experts else HYBRID
    return _KINDS.get(kind, (kind, False))[0]


def compare(
    tensors: Sequence[Tensor], ruled_out: Mapping[str, Sequence[float]] | None = None
) -> list[dict[str, Any]]:
    """A row for every family that was tried: tensors and candidates tried, candidates encoded, tensors on which its
    best ratio is below 1 (`won`), tensors stored so in the file (`chosen`), the best ratio, and the median of the best
    ones at sizes that plain formats have.

    ruled_out: family -> bounds from below of such ratios, of the tensors on which nothing of the family was tried because no
    form of it could win; in the rows their number and the least (`ruled_out`, `bound_ratio`). Those of `SHARED`
    are estimates.
    """
    bounds = ruled_out or {}
    best: dict[str, list[float]] = {}
    equal: dict[str, list[float]] = {}
    tried: dict[str, list[Priced]] = {}
    chosen: dict[str, int] = {}
    seen: dict[str, int] = {}
    for tensor in tensors:
        by_family: dict[str, list[Priced]] = {}
        for priced in tensor.priced:
            by_family.setdefault(family_of(priced.tree)[0], []).append(priced)
        name = family_of(tensor.chosen)[0]
        chosen[name] = chosen.get(name, 0) + 1
        for family, members in by_family.items():
            seen[family] = seen.get(family, 0) + 1
            tried.setdefault(family, []).extend(members)
            others = [p for p in tensor.priced if family_of(p.tree)[1] and family_of(p.tree)[0] != family]
            hull = _hull(others)
            ratios = [(p, r) for p in members if (r := _beside(p, hull)) is not None]
            if ratios:
                best.setdefault(family, []).append(min(r for _, r in ratios))
            # Beyond the plain formats' sizes there is a ratio on one side of 1 alone: the median would lean to it.
            sizes = [o.size_bytes for o in others]
            inside = [r for p, r in ratios if min(sizes) <= p.size_bytes <= max(sizes)]
            if inside:
                equal.setdefault(family, []).append(min(inside))
    known = {*tried, *bounds}
    found = [f for f in ORDER if f in known] + sorted(known - {*ORDER, ""})
    return [
        {
            "family": family,
            "tensors": seen.get(family, 0),
            "candidates": len(tried.get(family, ())),
            "exact": sum(p.exact for p in tried.get(family, ())),
            "won": sum(r < 1.0 for r in best.get(family, [])),
            "chosen": chosen.get(family, 0),
            "median_ratio": median(equal[family]) if family in equal else None,
            "best_ratio": min(best[family]) if family in best else None,
            "ruled_out": len(bounds.get(family, ())),
            "bound_ratio": min(bounds[family]) if bounds.get(family) else None,
        }
        for family in found
    ]


def ratio(priced: Priced, plain: Sequence[Priced]) -> float | None:
    """The candidate's loss over that of the plain hull at its bytes; None where the plain formats have no such size."""
    return _beside(priced, _hull(plain))


def _hull(plain: Sequence[Priced]) -> list[Option]:
    points = [Option(p.size_bytes, p.loss) for p in plain]
    return [points[i] for i in lower_hull(points)]


def _beside(priced: Priced, hull: Sequence[Option]) -> float | None:
    """`ratio` to the plain formats on their hull."""
    if not hull:
        return None
    if priced.size_bytes < hull[0].size_bytes:
        # Fewer bytes than any plain format takes: a win where it loses less all the same.
        return priced.loss / hull[0].loss if priced.loss < hull[0].loss and hull[0].loss > 0.0 else None
    at = hull[-1].loss
    if priced.size_bytes > hull[-1].size_bytes and priced.loss < at:
        # More bytes than any plain format takes: no win. A loss in spite of them is one.
        return None
    for a, b in pairwise(hull):
        if a.size_bytes <= priced.size_bytes <= b.size_bytes:
            share = (priced.size_bytes - a.size_bytes) / max(1, b.size_bytes - a.size_bytes)
            at = a.loss + share * (b.loss - a.loss)
            break
    return priced.loss / at if at > 0.0 else None


def lines(families: Sequence[Mapping[str, Any]]) -> list[str]:
    """The comparison as text, one line a family."""
    return [_line(f) for f in families]


def _line(f: Mapping[str, Any]) -> str:
    out, bound = f.get("ruled_out", 0), _times(f.get("bound_ratio"))
    word = "estimate" if f["family"] == SHARED else "bound"
    if not f["tensors"]:
        return f"{f['family']}: {word} {bound} the loss of the same bytes in rate on the best of {out} tensors; not tried"
    line = (
        f"{f['family']}: tried on {f['tensors']} tensors, won on {f['won']}, chosen for {f['chosen']}; loss against "
        f"the same bytes spent on rate: median {_times(f['median_ratio'])}, best {_times(f['best_ratio'])}"
    )
    return line + (
        f"; not tried on {out} others, where the {word} is {bound} that loss at best" if out else ""
    )


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
