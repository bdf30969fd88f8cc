"""Rounding of a whole tensor in row chunks.

Memory: a chunk is at most 2**22 weights (about 100 MiB with everything the sweep needs), however large the
table is, or what fits the scratch that a caller allows: a sweep goes from column to column, so a GPU is given many rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nstf.kernels.formats.scales import matrix_shape
from nstf.quantizers.rounding.ldlq import ldlq
from nstf.quantizers.rounding.levels import Levels
from nstf.quantizers.rounding.nearest import nearest
from nstf.quantizers.rounding.sweep import Rounded
from nstf.quantizers.stats import Stats

ROUNDINGS = ("nearest", "ldlq")
CHUNK = 1 << 22  # weights
SCRATCH_BYTES = 64  # for a weight, with everything that the sweep and the refit of its scales need


@dataclass(frozen=True)
class Rounding:
    """`method` nearest or ldlq; `damping` of the Hessian relative to its mean diagonal; `act_order`: round
    the columns by descending Hessian diagonal (ldlq only; 12 to 30 % less loss on SmolLM2-135M). Without a
    Hessian ldlq is nearest.
    """

    method: str = "nearest"
    damping: float = 0.01
    act_order: bool = True

    def __post_init__(self) -> None:
        if self.method not in ROUNDINGS:
            raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}, not {self.method[:40]!r}")
        if not 0 < self.damping <= 1:
            raise ValueError(f"damping must be above 0 and at most 1, not {self.damping}")


def encode_rows(
    weight: Tensor,
    lead: int,
    levels: Levels,
    group: int,
    rounding: Rounding,
    stats: Stats | None,
    pack: Callable[[Rounded], dict[str, Tensor]],
    scratch: int = 0,
) -> dict[str, Tensor]:
    """The arrays that `pack` makes of every chunk of rows, joined along the rows, on the CPU. scratch: bytes that a chunk
    may take, where that is more than CHUNK weights do.

    Raises ValueError on an empty or non-floating tensor, on non-finite weights and on statistics of another
    shape.
    """
    stats = stats or Stats()
    matrix = matrix_view(weight, lead)
    stats.check(*matrix.shape)
    parts: list[dict[str, Tensor]] = []
    rows, cols = matrix.shape
    for start, end in chunks(rows, cols, max(CHUNK, scratch // SCRATCH_BYTES)):
        part = matrix[start:end].float()
        count = int((~torch.isfinite(part)).sum())
        if count:
            raise ValueError(f"{count} weights in rows {start} to {end - 1} are NaN or infinite")
        parts.append(pack(round_matrix(part.contiguous(), levels, group, rounding, stats)))
    return {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}


def round_matrix(part: Tensor, levels: Levels, group: int, rounding: Rounding, stats: Stats) -> Rounded:
    """Codes and scales of some rows, float32 [rows, cols]."""
    if rounding.method == "ldlq" and stats.hessian is not None:
        return ldlq(part, levels, group, stats.ldl(rounding.damping, rounding.act_order))
    return nearest(part, levels, group, importance(stats, part.shape[1], rounding.damping, part.device))


def importance(stats: Stats, cols: int, damping: float, device: torch.device) -> Tensor:
    """The damped diagonal of the Hessian, float32 [cols]; ones without one. Always positive and finite."""
    if stats.hessian is None:
        return torch.ones(cols, device=device)
    diagonal = stats.hessian.diagonal().detach().float()
    good = torch.isfinite(diagonal) & (diagonal > 0)
    mean = torch.where(good, diagonal, 0.0).sum() / good.sum().clamp_min(1)
    return torch.where(good, diagonal, 0.0) + damping * torch.where(mean > 0, mean, 1.0)


def matrix_view(weight: Tensor, lead: int) -> Tensor:
    """`weight` as [rows, cols]."""
    if not weight.is_floating_point():
        raise ValueError(f"only floating-point tensors can be quantised, not {weight.dtype}")
    return weight.detach().reshape(matrix_shape(tuple(weight.shape), lead))


def chunks(rows: int, cols: int, most: int | None = None) -> list[tuple[int, int]]:
    """Row ranges of at most so many weights each; None: CHUNK."""
    step = max(1, (most or CHUNK) // cols)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]
