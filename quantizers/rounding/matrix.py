"""Rounding of a whole tensor in row chunks, and its expected loss without encoding it.

Memory: a chunk is at most 2**22 weights (about 100 MiB with everything the sweep needs), however large the
table is.
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
from nstf.quantizers.stats import Stats, row_loss

ROUNDINGS = ("nearest", "ldlq")
CHUNK = 1 << 22  # weights
# Weights `expected_loss` looks at. Losses of independently rounded rows vary more: their errors add up in the few
# directions in which all inputs are large.
SAMPLE = {"nearest": 1 << 18, "ldlq": 1 << 16}


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
) -> dict[str, Tensor]:
    """The arrays that `pack` makes of every chunk of rows, joined along the rows, on the CPU.

    Raises ValueError on an empty or non-floating tensor, on non-finite weights and on statistics of another
    shape.
    """
    stats = stats or Stats()
    matrix = matrix_view(weight, lead)
    stats.check(*matrix.shape)
    parts: list[dict[str, Tensor]] = []
    for start, end in chunks(*matrix.shape):
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


def expected_loss(
    weight: Tensor, lead: int, levels: Levels, group: int, rounding: Rounding, stats: Stats | None
) -> float:
    """The loss `encode` will leave, from a sample of evenly spaced rows, without encoding.

    The sampled rows are rounded as `encode` would round them and their loss is measured; its sum is carried
    over to all rows by sum_j row_weight_j sum_i h_i w_ji^2, h being the Hessian's diagonal (the LDL
    diagonal under ldlq). On SmolLM2-135M this is closer than 1/2 sum_i D_i (w_i - nearest(w_i))^2, which
    ignores what feedback adds to the targets and counts the damping: 10 % low at 4 bits, 18 % at 2 bits,
    twice too high where one input dominates.
    """
    stats = stats or Stats()
    matrix = matrix_view(weight, lead)
    rows, cols = matrix.shape
    stats.check(rows, cols)
    weights = torch.ones(rows) if stats.row_weight is None else stats.row_weight.reshape(-1).float().cpu()
    diagonal = importance(stats, cols, rounding.damping, matrix.device)
    if rounding.method == "ldlq" and stats.hessian is not None:
        diagonal = stats.ldl(rounding.damping, rounding.act_order).importance
    energy = torch.cat([matrix[s:e].float().square() @ diagonal for s, e in chunks(rows, cols)]) * weights
    if not bool(torch.isfinite(energy).all()):
        raise ValueError("weights or row weights are NaN or infinite")
    step = max(1, rows * cols // SAMPLE[rounding.method])
    picked = torch.arange(step // 2, rows, step)
    part = matrix[picked].float().contiguous()
    rounded = round_matrix(part, levels, group, rounding, stats)
    lost = row_loss(part - rounded.decode(levels), stats.hessian)
    sampled = float(energy[picked].sum())
    return float((lost * weights[picked]).sum()) * (float(energy.sum()) / sampled if sampled > 0 else 1.0)


def matrix_view(weight: Tensor, lead: int) -> Tensor:
    """`weight` as [rows, cols]."""
    if not weight.is_floating_point():
        raise ValueError(f"only floating-point tensors can be quantised, not {weight.dtype}")
    return weight.detach().reshape(matrix_shape(tuple(weight.shape), lead))


def chunks(rows: int, cols: int) -> list[tuple[int, int]]:
    """Row ranges of at most 2**22 weights each."""
    step = max(1, CHUNK // cols)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]
