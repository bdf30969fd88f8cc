"""The factor of a Hessian in the basis that a matrix is stored in, for the formats that round there."""

import torch
from torch import Tensor

from nstf.kernels.formats import rotated
from nstf.quantizers.rounding.block_ldlq import BlockFactor, block_factor
from nstf.quantizers.rounding.factor import Factor, factor
from nstf.quantizers.stats import Stats


def turned_factor(hessian: Tensor, basis: rotated.Params, damping: float, cols: int) -> Factor:
    """That of `hessian` [n, n] in `basis`, with zeros up to `cols` columns."""
    turned = rotated.rotate_hessian(basis, hessian.float()) if basis.block_in else hessian.float()
    more = cols - len(turned)
    return factor(torch.nn.functional.pad(turned, (0, more, 0, more)) if more else turned, damping)


def shared_factor(stats: Stats, hessian: Tensor, basis: rotated.Params, damping: float, cols: int) -> Factor:
    """`turned_factor` of the Hessian of `stats`, once for all formats that are estimated in this basis."""
    key = "turned", basis.block_in, basis.seed, damping, cols
    found: Factor = stats.derived(key, lambda: turned_factor(hessian, basis, damping, cols))
    return found


def block_metric(stats: Stats, basis: rotated.Params, damping: float, cols: int) -> BlockFactor | None:
    """The block factor of the Hessian, None without one; made once per Hessian and basis."""
    hessian = stats.hessian
    if hessian is None:
        return None
    key = "blocks", basis.block_in, basis.seed, damping, cols
    return stats.derived(key, lambda: block_factor(turned_factor(hessian, basis, damping, cols)))


def block_figures(stats: Stats, basis: rotated.Params, damping: float, cols: int) -> tuple[float, ...] | None:
    """(trace, growth) of `block_metric`, which is not kept: estimates want no more, and want it again of a Hessian that was
    dropped and read anew."""
    hessian = stats.hessian
    if hessian is None:
        return None

    def make() -> tuple[float, ...]:
        found = block_factor(shared_factor(stats, hessian, basis, damping, cols))
        return found.trace, found.growth

    return stats.figure(("blocks", basis.block_in, basis.seed, damping, cols), make)
