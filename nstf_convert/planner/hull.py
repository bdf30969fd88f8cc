"""The options of one tensor, and those among them that any budget could want."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """One way to store a unit: its price in bytes on disk, its expected loss (nats of KLD, or relative error), and the
    seconds a token spends on it (0 where nobody asked)."""

    size_bytes: int
    loss: float
    seconds: float = 0.0


def pareto(options: Sequence[Option]) -> list[int]:
    """Indices of the options no other beats in both size and loss, by size; ties keep the first given."""
    order = sorted(range(len(options)), key=lambda i: (options[i].size_bytes, options[i].loss, i))
    kept: list[int] = []
    best = float("inf")
    for i in order:
        if options[i].loss < best:
            kept.append(i)
            best = options[i].loss
    return kept


def lower_hull(options: Sequence[Option]) -> list[int]:
    """Indices on the lower convex hull of (size, loss), by size.

    These are the only options a Lagrangian `loss + lambda * bytes` can choose (Shoham and Gersho 1988).
    """
    hull: list[int] = []
    for i in pareto(options):
        while len(hull) >= 2 and _above(options[hull[-2]], options[hull[-1]], options[i]):
            hull.pop()
        hull.append(i)
    return hull


def _above(a: Option, b: Option, c: Option) -> bool:
    """True when b lies on or above the line from a to c."""
    return (b.loss - a.loss) * (c.size_bytes - a.size_bytes) >= (c.loss - a.loss) * (
        b.size_bytes - a.size_bytes
    )
