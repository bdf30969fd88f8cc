"""Rounding rows to trellis codes with LDLQ: which rows go together, and what becomes of their blocks of 16 columns.

Rows do not influence each other. On a GPU those of each rate are searched side by side, so that the way back of one search
is hidden behind the others' ways forward; on a CPU a search takes all cores by itself.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from nstf.kernels.formats import trellis as form
from nstf.kernels.streams import side_by_side
from nstf.kernels.trellis_encode import TileSearch, side_by_side_pays
from nstf.quantizers.rounding.block_ldlq import BLOCK, BlockFactor, Lane, block_ldlq

# Bytes that the searches of a batch may take together.
SEARCH_ROOM = 2 << 30
# On a GPU rows of one rate go side by side in parts of about so many tiles (a multiprocessor searches one at a time), but
# not in more parts than that.
LANE_TILES = 132
MOST_LANES = 4


def search(
    part: Tensor, scale: Tensor, metrics: Sequence[BlockFactor | None], tiles: dict[int, list[int]]
) -> tuple[dict[int, Tensor], Tensor]:
    """Codes [row tiles, column tiles, 8 q] by rate, and values like `part`: [metrics, rows, cols].

    tiles: by rate, which tiles of 16 rows (of all metrics, one after another) have it; the others stay zero.
    """
    cols, device = part.shape[2], part.device
    codes = {
        q: torch.empty(len(own), cols // BLOCK, 8 * q, dtype=torch.uint8, device=device)
        for q, own in tiles.items()
    }
    inverse = torch.where(scale > 0, 1 / scale, 0.0)[..., None]
    known = [metric.feedback for metric in metrics if metric is not None]
    if len(metrics) > 1:
        lanes = [_mixed_lane(scale[..., None], inverse, tiles, codes)]
        return codes, block_ldlq(part, torch.stack(known) if known else None, lanes)
    lanes = _lanes(scale[0, :, None], inverse[0], tiles, codes)
    return codes, block_ldlq(part[0], known[0] if known else None, lanes)[None]


def _lanes(
    scale: Tensor, inverse: Tensor, tiles: dict[int, list[int]], codes: dict[int, Tensor]
) -> list[Lane]:
    """The rows of each rate, on a GPU in some parts: one's way back is then hidden behind the others' searches."""
    device, number = scale.device, len(scale) // BLOCK
    lanes = []
    for q, own in tiles.items():
        most = MOST_LANES if side_by_side_pays(device, q) else 1
        count = min(most, max(1, round(len(own) / LANE_TILES)))
        for i in range(count):
            first = len(own) * i // count
            size = len(own) * (i + 1) // count - first
            rows = slice((own[0] + first) * BLOCK, (own[0] + first + size) * BLOCK)
            found = TileSearch(size, q, device, _room(number) * size // number)
            lanes.append(_lane(rows, found, scale[rows], inverse[rows], codes[q][first : first + size]))
    return lanes


def _lane(rows: slice, search: TileSearch, scale: Tensor, inverse: Tensor, codes: Tensor) -> Lane:
    """Rows of one rate."""

    def round_block(target: Tensor) -> tuple[Tensor, ...]:
        code, values = search((target * inverse).reshape(-1, form.TILE))
        return values.view(target.shape) * scale, code

    def keep(columns: slice, found: Sequence[Tensor]) -> None:
        codes[:, columns.start // BLOCK : columns.stop // BLOCK] = found[0].transpose(0, 1)

    return Lane(rows, round_block, keep, search.allocates_nothing)


def _mixed_lane(
    scale: Tensor, inverse: Tensor, tiles: dict[int, list[int]], codes: dict[int, Tensor]
) -> Lane:
    """The rows of several metrics at once: each block of columns is a search for every rate."""
    device, number = scale.device, scale.shape[0] * scale.shape[1] // BLOCK
    where = {q: torch.tensor(own, device=device) for q, own in tiles.items()}
    searches = {
        q: TileSearch(len(own), q, device, _room(number) * len(own) // number) for q, own in tiles.items()
    }

    def round_block(target: Tensor) -> tuple[Tensor, ...]:
        wanted = (target * inverse).reshape(-1, form.TILE)
        values = torch.zeros_like(wanted)
        found = side_by_side([partial(searches[q], wanted[own]) for q, own in where.items()], device)
        for own, (_, became) in zip(where.values(), found, strict=True):
            values[own] = became
        return values.view(target.shape) * scale, *(code for code, _ in found)

    def keep(columns: slice, found: Sequence[Tensor]) -> None:
        for q, code in zip(where, found, strict=True):
            codes[q][:, columns.start // BLOCK : columns.stop // BLOCK] = code.transpose(0, 1)

    return Lane(slice(None), round_block, keep, all(s.allocates_nothing for s in searches.values()))


def _room(tiles: int) -> int:
    """Bytes that the searches of a batch may take together: all of its tiles need 1 to 2 MiB each on a GPU."""
    return min(SEARCH_ROOM, tiles << 21)


def refit(part: Tensor, rounded: Tensor, metric: BlockFactor | None) -> Tensor:
    """The factor on each row's scale that is best for its codes, q H w / q H q: float32 [rows]."""
    along = rounded if metric is None else rounded @ metric.hessian
    least = (along * rounded).sum(1)
    best = (along * part).sum(1) / least.clamp_min(1e-30)
    return torch.where((least > 0) & (best > 0), best, 1.0)
