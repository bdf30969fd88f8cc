"""Choosing several ranks at once, by a byte budget or by an error bound, from the unfoldings' energies."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

Ranks = tuple[int, ...]


def ranks_for_tail(energies: Sequence[Tensor], budget: float) -> Ranks:
    """The smallest ranks, by one threshold for all, whose left-out energies sum to at most `budget`.

    energies: squared singular values of each unfolding, descending. For HOSVD (De Lathauwer 2000) and TT-SVD
    (Oseledets 2011) this sum bounds the squared error of the approximation.
    """
    everything = torch.cat([e.flatten() for e in energies]).sort().values
    dropped = int((everything.cumsum(0) <= budget).sum())
    threshold = float(everything[dropped]) if dropped < everything.numel() else float("inf")
    return tuple(max(1, int((e >= threshold).sum())) for e in energies)


def ranks_for_bytes(
    most: Ranks,
    size_of: Callable[[Ranks], int],
    size_bytes: int,
    energies: Sequence[Tensor] | None = None,
    useful: Callable[[Ranks], Ranks] = lambda ranks: ranks,
) -> Ranks | None:
    """Ranks up to `most` that take at most `size_bytes` of which none can grow; None if none fit.

    With `energies` (each descending) the directions of largest energy are kept first, over all unfoldings together;
    without, all ranks have one common cap, which keeps the short axes whole. useful: lowers ranks that others make
    redundant.
    """
    if energies is None:
        steps = max(most)

        def family(step: int) -> Ranks:
            return useful(tuple(min(m, step) for m in most))
    else:
        # The search asks a dozen times: as operators of torch the few numbers took longer than all else of it.
        rising = [-e[:m].numpy(force=True) for e, m in zip(energies, most, strict=True)]
        levels = np.sort(np.concatenate(rising))
        steps = len(levels)

        def family(step: int) -> Ranks:
            counts = (int(np.searchsorted(e, levels[step - 1], side="right")) for e in rising)
            return useful(tuple(max(1, count) for count in counts))

    low, high = 0, steps
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size_of(family(middle)) <= size_bytes else (low, middle - 1)
    ranks = family(low) if low else tuple(1 for _ in most)
    if size_of(ranks) > size_bytes:
        return None
    growing = True
    while growing:
        growing = False
        for i, limit in enumerate(most):
            larger = (*ranks[:i], ranks[i] + 1, *ranks[i + 1 :])
            if ranks[i] < limit and useful(larger) == larger and size_of(larger) <= size_bytes:
                ranks, growing = larger, True
    return ranks
