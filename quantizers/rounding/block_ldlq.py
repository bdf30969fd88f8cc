"""LDLQ in blocks of 16 columns: each block is rounded as a whole, with feedback from the blocks before it.

Tseng et al., QuIP#, 2024 (block LDLQ); QTIP, 2024 (trellis codes as the rounding of a block). With
H = (U + I) D (U + I)^T, U strictly upper triangular in blocks and D block diagonal, the loss of an error dW is
tr(eta D eta^T) with eta = dW (U + I): a block's target is its weights plus dW of the blocks before it times U.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nstf.kernels.streams import Replayed, side_by_side
from nstf.quantizers.rounding.factor import Factor, gains
from nstf.quantizers.rounding.products import products_of_errors

BLOCK = 16
SPAN = 256  # columns between the large products: inside a span a block's product looks back no further
_CHUNK = 1024  # columns of the factor that are made at a time
# On a GPU a matrix of at most so many columns is one captured block, replayed; a wider one a captured span of columns. Of a
# span the first two are launched by Python, a dozen launches a block: of 576 columns all there are.
NARROW = 2048


@dataclass(frozen=True, eq=False)
class BlockFactor:
    """`feedback`: U, float32 [n, n], zero on and below the diagonal blocks; `importance`: the diagonal of D, float32 [n];
    `hessian`: the damped matrix, float32 [n, n]; `trace`: the loss of white errors eta of variance 1 (twice, a row),
    tr D - damping |K|^2 with K = (U + I)^-1; `growth`: the variance that their feedback adds to a target, |I - K|^2 / n.
    n is a multiple of 16."""

    feedback: Tensor
    importance: Tensor
    hessian: Tensor
    trace: float
    growth: float


def block_factor(factor: Factor) -> BlockFactor:
    """The block factor from the scalar one, in the columns' own order.

    H = R R^T with R = (u + I) d^1/2 upper triangular; a block column of U + I is R's block column times the inverse of
    R's diagonal block, and a block of D is that diagonal block times its transpose. Raises ValueError for a factor in
    another order or a size that is no multiple of 16.
    """
    n = len(factor.diagonal)
    if factor.order is not None or n % BLOCK:
        raise ValueError(
            "a block factor needs a factor in the columns' own order and a multiple of 16 columns"
        )
    feedback = torch.zeros_like(factor.feedback)
    importance = torch.empty_like(factor.diagonal)
    for start in range(0, n, _CHUNK):
        part = slice(start, min(start + _CHUNK, n))
        feedback[: part.stop, part], importance[part] = _block_columns(factor, part)
    kept, added = gains(feedback)
    sums = torch.stack([importance.sum(), kept.sum(), added.sum()]).tolist()
    trace = sums[0] - factor.damping * factor.mean * sums[1]
    return BlockFactor(feedback, importance, factor.hessian, trace, sums[2] / n)


def _block_columns(factor: Factor, part: slice) -> tuple[Tensor, Tensor]:
    """Some columns of U down to their own rows, and of the diagonal of D. A root's d^1/2 cancels in U."""
    at, end = part.start, part.stop
    unit = factor.feedback[:end, part].double()
    unit[at:].fill_diagonal_(1)
    count = (end - at) // BLOCK
    blocks = unit[at:].view(count, BLOCK, count, BLOCK).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    importance = blocks.square() @ factor.diagonal[part].double().view(count, BLOCK, 1)
    eye = torch.eye(BLOCK, dtype=torch.float64, device=unit.device)
    inverse = torch.linalg.solve_triangular(blocks.contiguous(), eye, upper=True)
    found = (unit.view(end, count, BLOCK).transpose(0, 1) @ inverse).transpose(0, 1).reshape(end, end - at)
    block = torch.arange(end - at, device=unit.device) // BLOCK
    found[at:] *= block[:, None] < block
    return found.float(), importance.reshape(-1).float()


@dataclass(frozen=True, eq=False)
class Lane:
    """Rows that do not wait for those of other lanes.

    round_block(target [..., rows, 16]) gives what the columns become and any codes of them. keep(columns, codes): is handed
    the codes of a span of columns, those of its blocks stacked along the first axis; it must copy them. capture: whether
    round_block may be part of a graph.
    """

    rows: slice
    round_block: Callable[[Tensor], tuple[Tensor, ...]]
    keep: Callable[[slice, Sequence[Tensor]], None] = lambda columns, codes: None
    capture: bool = True


def block_ldlq(weight: Tensor, feedback: Tensor | None, lanes: Sequence[Lane]) -> Tensor:
    """The rounded weights, float32 [..., rows, cols] (cols a multiple of 16).

    weight: [..., rows, cols]. feedback: U [..., cols, cols] on the same device, or None for plain rounding. lanes: all rows,
    in order. On a GPU they run side by side, and a block or a span of columns is one captured graph.
    """
    narrow = weight.is_cuda and weight.shape[-1] <= NARROW and all(lane.capture for lane in lanes)
    with products_of_errors(weight.device, weight.shape[-1]):
        return (_by_blocks if narrow else _by_spans)(weight, feedback, lanes)


def _by_spans(weight: Tensor, feedback: Tensor | None, lanes: Sequence[Lane]) -> Tensor:
    """`block_ldlq` with one step for each span of columns."""
    rows, cols = weight.shape[-2:]
    rounded = torch.empty_like(weight)
    # Errors are kept transposed: the products then read them in order.
    errors = weight.new_zeros(*weight.shape[:-2], cols, rows)

    def round_span(own: Tensor, base: Tensor, *among: Tensor) -> tuple[Tensor, ...]:
        jobs = [
            partial(_round_span, own[..., i.rows, :], base[..., i.rows, :], among, i.round_block)
            for i in lanes
        ]
        became, left, codes = zip(*side_by_side(jobs, own.device), strict=True)
        return torch.cat(became, -2), torch.cat(left, -1), *(code for lane in codes for code in lane)

    step = Replayed(round_span, cols // SPAN if all(lane.capture for lane in lanes) else 0)
    for top in range(0, cols, SPAN):
        span = slice(top, min(top + SPAN, cols))
        own = base = weight[..., span]
        among = () if feedback is None else (feedback[..., span, span],)
        if feedback is not None and top > 0:
            base = base + (feedback[..., :top, span].mT @ errors[..., :top, :]).mT
        rounded[..., span], errors[..., span, :], *codes = step(own, base, *among)
        # Every lane has as many kinds of codes.
        each = len(codes) // len(lanes)
        for i, lane in enumerate(lanes):
            lane.keep(span, codes[i * each : (i + 1) * each])
    return rounded


def _by_blocks(weight: Tensor, feedback: Tensor | None, lanes: Sequence[Lane]) -> Tensor:
    """`block_ldlq` with one step for each block, of the same shapes for all: it looks back over a whole span, of which what
    is still to come has no feedback."""
    rows, cols = weight.shape[-2:]
    back = min(SPAN, cols)
    rounded = torch.empty_like(weight)
    errors = weight.new_zeros(*weight.shape[:-2], cols, rows)

    def round_block(own: Tensor, base: Tensor, *known: Tensor) -> tuple[Tensor, ...]:
        jobs = [partial(_round_block, base, known, lane) for lane in lanes]
        became, codes = zip(*side_by_side(jobs, own.device), strict=True)
        found = torch.cat(became, -2)
        return found, (own - found).mT, *(code for lane in codes for code in lane)

    step = Replayed(round_block, cols // BLOCK)
    for top in range(0, cols, SPAN):
        span = slice(top, min(top + SPAN, cols))
        own = base = weight[..., span]
        left = weight.new_zeros(*weight.shape[:-2], back, rows)
        width = span.stop - top
        if feedback is not None:
            among = torch.nn.functional.pad(feedback[..., span, span], (0, 0, 0, back - width))
            if top > 0:
                base = base + (feedback[..., :top, span].mT @ errors[..., :top, :]).mT
        blocks = []
        for at in range(0, width, BLOCK):
            part = slice(at, at + BLOCK)
            known = () if feedback is None else (among[..., part], left)
            rounded[..., top + at : top + at + BLOCK], lost, *codes = step(
                own[..., part], base[..., part], *known
            )
            left[..., part, :] = lost
            blocks.append([code.clone() for code in codes])
        errors[..., span, :] = left[..., :width, :]
        kinds = [torch.stack(found) for found in zip(*blocks, strict=True)]
        each = len(kinds) // len(lanes)
        for i, lane in enumerate(lanes):
            lane.keep(span, kinds[i * each : (i + 1) * each])
    return rounded


def _round_block(base: Tensor, known: Sequence[Tensor], lane: Lane) -> tuple[Tensor, Sequence[Tensor]]:
    """(what a lane's rows of a block become, their codes). known: U from the span to the block, and the span's errors
    transposed; nothing without feedback."""
    target = base[..., lane.rows, :]
    if known:
        among, left = known
        target = target + (among.mT @ left[..., lane.rows]).mT
    became, *codes = lane.round_block(target)
    return became, codes


def _round_span(
    own: Tensor, base: Tensor, among: Sequence[Tensor], round_block: Callable[[Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(what the columns become, their errors transposed, their codes). among: U inside the span, if there is feedback."""
    width = own.shape[-1]
    became, left = torch.empty_like(own), own.new_empty(*own.shape[:-2], width, own.shape[-2])
    found = []
    for at in range(0, width, BLOCK):
        part = slice(at, at + BLOCK)
        target = base[..., part]
        for u in among if at else ():
            target = target + (u[..., :at, part].mT @ left[..., :at, :]).mT
        became[..., part], *codes = round_block(target)
        left[..., part, :] = (own[..., part] - became[..., part]).mT
        found.append(codes)
    return became, left, [torch.stack(blocks) for blocks in zip(*found, strict=True)]
