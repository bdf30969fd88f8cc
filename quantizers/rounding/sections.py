"""Rows at rates of their own: which rows share one, what that is best, and how ranks get equal parts of each."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nstf.kernels.formats import trellis as form
from nstf.quantizers.stats import Stats

# A section's tiles are searched 16 at a time: smaller ones cost encoding time for hardly any gain.
SMALLEST_SECTION = 64
_CHUNK = 1 << 22  # weights at a time where only sums over rows are wanted


def best_sections(
    energy: Tensor, losses: dict[int, float], cols: int, prices: Sequence[float]
) -> list[tuple[tuple[int, int], ...]]:
    """For each price of a byte (in units of loss) the sections ((quarter bits, rows), ...) that then lose least.

    energy: [rows], see `row_energy`. losses: quarter bits -> `unit_loss`. Sections are whole tiles of rows but the last.
    Reverse water-filling (Cover and Thomas, Elements of Information Theory, 10.3.3) over the rates there are.
    """
    rates = sorted(losses, reverse=True)
    order = torch.sort(energy.double().cpu(), descending=True, stable=True).values
    tiles = torch.nn.functional.pad(order, (0, -len(order) % form.SIDE)).reshape(-1, form.SIDE).sum(1)
    bytes_of = tiles.new_tensor([cols * q / 32 * form.SIDE for q in rates])
    lost = tiles[:, None] * tiles.new_tensor([losses[q] for q in rates])
    costs = lost + tiles.new_tensor(prices)[:, None, None] * bytes_of
    chosen = costs.argmin(2).cummax(1).values  # rows that matter less never get more bits
    counts = torch.nn.functional.one_hot(chosen, len(rates)).sum(1).tolist()
    found = []
    for cost, tiles_of in zip(costs, counts, strict=True):
        merged = _merged([[i, n] for i, n in enumerate(tiles_of) if n], cost)
        sections = [(rates[i], n * form.SIDE) for i, n in merged]
        q, rows = sections[-1]
        found.append((*sections[:-1], (q, rows - (-len(order) % form.SIDE))))
    return found


def _merged(found: list[list[int]], cost: Tensor) -> list[list[int]]:
    """[rate, tiles] of sections, those that are too small joined to the neighbour that costs least. cost: [tiles, rates]."""
    if len(found) == 1 or min(n for _, n in found) >= SMALLEST_SECTION // form.SIDE:
        return found
    cumulative = np.pad(np.cumsum(cost.numpy(), 0), ((1, 0), (0, 0))).tolist()
    while len(found) > 1 and min(n for _, n in found) < SMALLEST_SECTION // form.SIDE:
        at = min(range(len(found)), key=lambda i: found[i][1])
        start = sum(n for _, n in found[:at])
        end = start + found[at][1]
        near = [i for i in (at - 1, at + 1) if 0 <= i < len(found)]
        into = min(near, key=lambda i: cumulative[end][found[i][0]] - cumulative[start][found[i][0]])
        found[into][1] += found[at][1]
        del found[at]
    return found


def dealt_out(sections: Sequence[tuple[int, int]], ranges: int) -> tuple[tuple[int, int], ...]:
    """The sections with as many whole tiles of 16 rows in each of `ranges` equal parts of the rows, their ends moved by as
    little as that takes: then the parts take equally many bytes. Sections that have no tile left are dropped.

    Raises ValueError where the rows do not make whole tiles of each part.
    """
    step, rows = ranges * form.SIDE, sum(n for _, n in sections)
    if ranges < 1 or rows % step:
        raise ValueError(f"{rows} rows are not {ranges} ranges of whole tiles of {form.SIDE}")
    found, at, before = [], 0, 0
    for q, n in sections:
        at += n
        end = min(rows, (at + step // 2) // step * step) if at < rows else rows
        if end > before:
            found.append((q, end - before))
            before = end
    return tuple(found)


def row_order(energy: Tensor, ranges: int, sections: Sequence[tuple[int, int]], even: bool = True) -> Tensor:
    """The rows from those whose errors matter most to those that matter least, int64 [rows].

    With several ranges they are sorted within each, and go in turn, a tile of 16 rows of each range: every section then has
    as many tiles of one range as of another, and ranks that each hold one take equally many bytes, however much more the
    rows of one matter. Not so if `even` is false: then the tiles go by how much they matter, and every range has whole
    tiles of each section, one more than another. Raises ValueError where rows or sections do not make whole tiles (of each).
    """
    if ranges == 1:
        return torch.argsort(energy, descending=True, stable=True)
    rows = len(energy)
    if ranges < 1 or rows % (ranges * form.SIDE):
        raise ValueError(f"{rows} rows are not {ranges} ranges of whole tiles of {form.SIDE}")
    uneven = [n for _, n in sections if n % ((ranges if even else 1) * form.SIDE)]
    if uneven:
        each = f" of each of {ranges} ranges" if even else ""
        raise ValueError(f"a section of {uneven[0]} rows has no whole tiles of {form.SIDE}{each}")
    found, within = torch.sort(energy.view(ranges, -1), dim=1, descending=True, stable=True)
    first = torch.arange(ranges, device=energy.device)[:, None] * (rows // ranges)
    tiles = (within + first).view(ranges, -1, form.SIDE).transpose(0, 1).reshape(-1, form.SIDE)
    if not even:
        # In turn at first: of tiles that matter alike those of all ranges have the same chance.
        matters = found.view(ranges, -1, form.SIDE).sum(2).T.reshape(-1)
        tiles = tiles[torch.argsort(matters, descending=True, stable=True)]
    return tiles.reshape(-1)


def mean_square(matrix: Tensor) -> Tensor:
    """Of each row, float64 [rows]."""
    step = max(1, _CHUNK // matrix.shape[1])
    return torch.cat([part.double().square().mean(1) for part in torch.split(matrix, step)])


def weighted(energy: Tensor, stats: Stats) -> Tensor:
    """Times what an error of each row counts."""
    return energy if stats.row_weight is None else energy * stats.row_weight.reshape(-1)
