"""Rounding to shuffle codes: the compiled search on a CPU, Triton's on a GPU, or torch's where there is neither.

All give the same codes, but for the last bits of a GPU's float sums.
"""

import torch
from torch import Tensor

from nstf.kernels import triton
from nstf.kernels.cpu import ext
from nstf.kernels.formats import shuffle
from nstf.kernels.torch import shuffle_search

BLOCK = shuffle_search.BLOCK


def round_columns(
    target: Tensor,
    weight: Tensor,
    level: Tensor,
    importance: Tensor,
    feedback: Tensor | None,
    quarter_bits: int,
    which: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(rounded [rows, 16], codes u8 [rows / 32, 2 q, 8]) where the targets are: see kernels/torch/shuffle_search.py.

    feedback: [16, 16], or [matrices, 16, 16] of matrices under one another; which: then the matrix of each segment of 256
    rows, int32 on the targets' device. On a CPU it takes torch's number of threads.
    """
    if target.is_cuda and triton.AVAILABLE:
        from nstf.kernels.triton import shuffle_search as on_gpu

        return on_gpu.round_columns(target, weight, level, importance, feedback, quarter_bits, which)
    if which is not None and feedback is not None:
        return _matrix_by_matrix(target, weight, level, importance, feedback, quarter_bits, which.tolist())
    device, tables = target.device, shuffle_search.float_tables(quarter_bits)
    wanted, weight, level, importance = (
        t.to("cpu", torch.float32).contiguous() for t in (target, weight, level, importance)
    )
    own = torch.zeros(BLOCK, BLOCK) if feedback is None else feedback.to("cpu", torch.float32).contiguous()
    if not hasattr(ext, "shuffle_round"):
        found = shuffle_search.round_columns(wanted, weight, level, importance, own, quarter_bits, tables)
        return found[0].to(device), found[1].to(device)
    rows = len(wanted)
    rounded = torch.empty(rows, BLOCK)
    codes = torch.empty(rows // shuffle.GROUP, 2 * quarter_bits, BLOCK // 2, dtype=torch.uint8)
    costs = shuffle_search.costs_of(importance, quarter_bits)
    threads = torch.get_num_threads()
    ext.shuffle_round(wanted, weight, level, costs, own, quarter_bits, tables, rounded, codes, threads)
    return rounded.to(device), codes.to(device)


def _matrix_by_matrix(
    target: Tensor,
    weight: Tensor,
    level: Tensor,
    importance: Tensor,
    feedback: Tensor,
    quarter_bits: int,
    which: list[int],
) -> tuple[Tensor, Tensor]:
    """Each run of segments of one matrix for itself: side by side they gain nothing on a CPU."""
    starts = [i for i, matrix in enumerate(which) if i == 0 or matrix != which[i - 1]]
    found = []
    for start, end in zip(starts, [*starts[1:], len(which)], strict=True):
        rows = slice(start * shuffle.SEGMENT, end * shuffle.SEGMENT)
        own = feedback[which[start]]
        found.append(
            round_columns(target[rows], weight[rows], level[rows], importance[rows], own, quarter_bits)
        )
    return torch.cat([rounded for rounded, _ in found]), torch.cat([codes for _, codes in found])
