"""Decoding as autograd functions that keep the codes as they are for the way back, not their float32 values."""

from typing import Any

import torch
from torch import Tensor

from nstf.kernels.formats.scales import group_size, per_column, per_group


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: Tensor, units: Tensor, group: int) -> Tensor:
        ctx.save_for_backward(units)
        ctx.group, ctx.groups, ctx.dtype = group, scale.shape[1], scale.dtype
        work = units.dtype if units.dtype == torch.bfloat16 else torch.float32
        rows, cols = units.shape
        size, scale = group_size(cols, group), scale.to(work)
        if size * ctx.groups != cols:
            return units.to(work) * per_column(scale, group, cols)
        return (units.to(work).view(rows, ctx.groups, size) * scale.unsqueeze(2)).view(rows, cols)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (units,) = ctx.saved_tensors
        work = units.dtype if units.dtype == torch.bfloat16 else torch.float32
        product = grad.to(work) * units.to(work)
        return per_group(product, ctx.group, ctx.groups).to(ctx.dtype), None, None


class ScaledTable(torch.autograd.Function):
    """scale * table[code]; the graph keeps the codes only."""

    @staticmethod
    def forward(ctx: Any, scale: Tensor, table: Tensor, codes: Tensor, group: int) -> Tensor:
        ctx.save_for_backward(scale, table, codes)
        ctx.group = group
        return table[codes.int()] * per_column(scale, group, codes.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        scale, table, codes = ctx.saved_tensors
        grad = grad.float()
        for_scale = per_group(grad * table[codes.int()], ctx.group, scale.shape[1])
        weighted = (grad * per_column(scale, ctx.group, codes.shape[1])).reshape(-1)
        for_table = torch.bincount(codes.reshape(-1).int(), weighted, minlength=len(table))
        return for_scale, for_table.to(table.dtype), None, None
