"""LDLQ in blocks of 16 columns: each block is rounded as a whole, with feedback from the blocks before it.

Tseng et al., QuIP#, 2024 (block LDLQ); QTIP, 2024 (trellis codes as the rounding of a block). With
H = (U + I) D (U + I)^T, U strictly upper triangular in blocks and D block diagonal, the loss of an error dW is
tr(eta D eta^T) with eta = dW (U + I): a block's target is its weights plus dW of the blocks before it times U.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nstf.quantizers.rounding.factor import Factor

BLOCK = 16


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
    root = (factor.feedback.double() + torch.eye(n, dtype=torch.float64)) * factor.diagonal.double().sqrt()
    blocks = torch.stack([root[i : i + BLOCK, i : i + BLOCK] for i in range(0, n, BLOCK)])
    importance = blocks.square().sum(2).reshape(-1)
    inverse = torch.linalg.solve_triangular(blocks, torch.eye(BLOCK, dtype=torch.float64), upper=True)
    feedback = torch.zeros_like(root)
    for i, block in enumerate(inverse):
        at = i * BLOCK
        feedback[:at, at : at + BLOCK] = root[:at, at : at + BLOCK] @ block
    eye = torch.eye(n, dtype=torch.float64)
    inner = torch.linalg.solve_triangular(feedback + eye, eye, upper=True)
    added = factor.damping * factor.mean
    return BlockFactor(
        feedback.float(),
        importance.float(),
        factor.hessian,
        float(importance.sum() - added * inner.square().sum()),
        float((inner - eye).square().sum()) / n,
    )


def block_ldlq(
    weight: Tensor, feedback: Tensor | None, round_block: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """The rounded weights, float32 [rows, cols] (cols a multiple of 16).

    weight: [rows, cols]. feedback: U on the same device, or None for plain rounding. round_block(i, target [rows, 16])
    gives what columns 16 i to 16 i + 15 become.
    """
    rows, cols = weight.shape
    rounded = torch.empty_like(weight)
    # Errors are kept transposed: the block's product then reads them in order.
    errors = torch.zeros(cols, rows, device=weight.device, dtype=weight.dtype)
    for at in range(0, cols, BLOCK):
        part = slice(at, at + BLOCK)
        target = weight[:, part]
        if feedback is not None and at > 0:
            target = target + (feedback[:at, part].T @ errors[:at]).T
        rounded[:, part] = round_block(at // BLOCK, target)
        errors[part] = (weight[:, part] - rounded[:, part]).T
    return rounded
