"""Integer leaves in the form in which other engines' types are compared: signed codes and one scale a group."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nstf.kernels.formats import EncodedTensor, Node, bitpack
from nstf.kernels.formats.scales import group_count, matrix_shape, read_scales
from nstf.kernels.formats.tree import Shape


@dataclass(frozen=True)
class Integers:
    """value = scale * unit. units: int16 [rows, cols] (code less zero point); scale: float32 [rows, groups]."""

    units: Tensor
    scale: Tensor
    group: int

    def scales(self, size: int) -> Tensor:
        """A scale for every `size` columns, which divide the group: float32 [rows, cols / size]."""
        return self.scale.repeat_interleave(self.group // size, dim=1)[:, : self.units.shape[1] // size]


def read(encoded: EncodedTensor) -> Integers:
    """An `int` leaf taken apart; whole rows are one group."""
    params = encoded.tree.params
    _, cols = matrix_shape(encoded.shape, params.lead)
    units = bitpack.unpack(encoded.arrays["codes"], params.bits, cols).to(torch.int16)
    if params.symmetric:
        units -= 1 << (params.bits - 1)
    else:
        units -= zeros(encoded).to(torch.int16).repeat_interleave(width(params, cols), dim=1)[:, :cols]
    return Integers(units, read_scales(dict(encoded.arrays), params.scale_bits), width(params, cols))


def zeros(encoded: EncodedTensor) -> Tensor:
    """The zero points of an asymmetric leaf, uint8 [rows, groups]."""
    params = encoded.tree.params
    _, cols = matrix_shape(encoded.shape, params.lead)
    return bitpack.unpack(encoded.arrays["zeros"], params.bits, group_count(cols, params.group))


def width(params: object, cols: int) -> int:
    """Columns of a group; for whole rows all, rounded up to 32 so that blocks divide it."""
    group = int(params.group)  # type: ignore[attr-defined]
    return group or math.ceil(cols / 32) * 32


def signed_bits(tree: Node) -> int:
    """The narrowest signed width that holds every code less its zero point."""
    # An asymmetric code less its zero point is between -(2^b - 1) and 2^b - 1.
    return int(tree.params.bits) + (0 if tree.params.symmetric else 1)


def is_matrix(tree: Node, shape: Shape, block: int) -> bool:
    """Whether rows are whole blocks of `block` columns and no group is cut by one."""
    _, cols = matrix_shape(shape, tree.params.lead)
    return len(shape) >= 2 and cols == shape[-1] and cols % block == 0 and tree.params.group % block == 0


def scales_fit(encoded: EncodedTensor, dtype: torch.dtype) -> bool:
    """Whether a 16-bit type holds every scale as it is."""
    scale = read_scales(dict(encoded.arrays), encoded.tree.params.scale_bits)
    return bool((scale.to(dtype).float() == scale).all())
