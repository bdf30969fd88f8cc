"""`rotated`: a matrix stored in a randomised Hadamard basis, in which its entries are close to Gaussian.

Tseng et al., QuIP#, 2024 (incoherence by randomised Hadamard transforms). W = S_o H_o X H_i S_i with the stored X, block
diagonal matrices H of orthonormal Hadamard blocks (symmetric, their own inverses) and diagonal random signs S. Blocks
need only divide the axis, so that widths such as 576 = 9 x 64 work.
"""

from __future__ import annotations

import math
from functools import lru_cache

from nstf.kernels.formats.scales import check_lead, matrix_shape
from nstf.kernels.formats.shards import MatrixCut, Place, Places, Span, column_grain, row_grain
from nstf.kernels.formats.tree import ArraySpec, EncodedTensor, Node, Shape
from nstf.kernels.lazy import torch
from nstf.kernels.records import changed, frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch import Tensor

KIND = "rotated"

BLOCKS = (128, 64, 32)
# Of the hash of (index, seed, side) that makes the signs, modulo 2^32.
_INDEX_STEP = 0x9E3779B1
_SEED_STEP = 0x632BE5AB


@frozen
class Params:
    """`block_in`, `block_out`: size of the Hadamard blocks along the columns and the rows, 32, 64 or 128, 0 for none;
    `seed` of the signs; `lead` axes make the rows."""

    block_in: int = 64
    block_out: int = 0
    seed: int = 0
    lead: int = 1

    def __post_init__(self) -> None:
        for name, value in (("block_in", self.block_in), ("block_out", self.block_out)):
            if type(value) is not int or value not in (0, *BLOCKS):
                raise ValueError(f"{name} must be 0, 32, 64 or 128, not {str(value)[:40]}")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 31:
            raise ValueError(f"seed must be 0 to 2**31 - 1, not {str(self.seed)[:40]}")
        check_lead(self.lead)


def arrays(params: Params, shape: Shape) -> dict[str, ArraySpec]:
    return {}


def children(params: Params, shape: Shape) -> dict[str, Shape]:
    """`x`: the matrix in the other basis, of the same shape. Raises ValueError when blocks do not divide the axes."""
    rows, cols = matrix_shape(shape, params.lead)
    for what, size, block in (("columns", cols, params.block_in), ("rows", rows, params.block_out)):
        if block and size % block:
            raise ValueError(f"{size} {what} are not a multiple of the block of {block}")
    return {"x": shape}


def decode(params: Params, shape: Shape, arrays: dict[str, Tensor], children: dict[str, Tensor]) -> Tensor:
    """S_o H_o X H_i S_i, float32 of `shape`."""
    rows, cols = matrix_shape(shape, params.lead)
    return from_basis(params, children["x"].reshape(rows, cols)).reshape(shape)


def from_basis(params: Params, x: Tensor) -> Tensor:
    """W = S_o H_o X H_i S_i for a matrix [rows, cols]."""
    w = hadamard(x.float(), params.block_in) * signs(x.shape[1], params.seed, 0, x.device, params.block_in)
    if params.block_out:
        w = (hadamard(w.T, params.block_out) * signs(x.shape[0], params.seed, 1, x.device)).T
    return w


def to_basis(params: Params, w: Tensor) -> Tensor:
    """X = H_o S_o W S_i H_i: what is stored for a matrix [rows, cols]."""
    x = rotate_inputs(params, w.float())
    if params.block_out:
        x = hadamard(x.T * signs(w.shape[0], params.seed, 1, w.device), params.block_out).T
    return x.contiguous()


def rotate_inputs(params: Params, x: Tensor) -> Tensor:
    """H_i S_i applied to activations [..., cols]: W x = S_o H_o (X (H_i S_i x))."""
    if not params.block_in:
        return x
    return hadamard(x * signs(x.shape[-1], params.seed, 0, x.device).to(x.dtype), params.block_in)


def rotate_outputs(params: Params, y: Tensor) -> Tensor:
    """S_o H_o applied to what the stored matrix gave, [..., rows]."""
    if not params.block_out:
        return y
    return hadamard(y, params.block_out) * signs(y.shape[-1], params.seed, 1, y.device).to(y.dtype)


def rotate_hessian(params: Params, hessian: Tensor) -> Tensor:
    """H_i S_i H S_i H_i: the second moment of the rotated inputs, [cols, cols]."""
    half = rotate_inputs(params, hessian)
    return rotate_inputs(params, half.T.contiguous()).T.contiguous()


def block_for(size: int) -> int:
    """The largest block that divides an axis, 0 when none does."""
    return next((b for b in BLOCKS if size % b == 0), 0)


def hadamard(x: Tensor, block: int) -> Tensor:
    """x [..., n] times the block diagonal orthonormal Hadamard matrix; block 0: x itself."""
    if not block:
        return x
    h: Tensor = _hadamard_matrix(block).to(x.device, x.dtype)
    return (x.reshape(-1, block) @ h).reshape(x.shape)


def signs(
    size: int, seed: int, side: int, device: torch.device | str = "cpu", block: int | None = None
) -> Tensor:
    """size random signs, float32 +-1, the same on every machine; all +1 for block 0."""
    if block == 0:
        return torch.ones(size, dtype=torch.float32, device=device)
    found: Tensor = _signs(size, seed, side).to(device)
    return found


@lru_cache(maxsize=64)
def _hadamard_matrix(block: int) -> Tensor:
    """Sylvester's construction, divided by sqrt(block): float32 [block, block]."""
    with torch.inference_mode(False):  # what is kept may be used where gradients are wanted
        h = torch.ones(1, 1, dtype=torch.float64, device="cpu")
        while len(h) < block:
            h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
        return (h / math.sqrt(block)).to(torch.float32)


@lru_cache(maxsize=64)
def _signs(size: int, seed: int, side: int) -> Tensor:
    """A bit of an integer hash of (index, seed, side): multiply and xorshift, modulo 2^32."""
    with torch.inference_mode(False):
        x = (
            torch.arange(size, dtype=torch.int64, device="cpu") * _INDEX_STEP
            + (2 * seed + side + 1) * _SEED_STEP
        )
        for multiplier in (0x21F0AAAD, 0x735A2D97):
            x = x & 0xFFFFFFFF
            x = ((x ^ (x >> 16)) * multiplier) & 0xFFFFFFFF
            x = x ^ (x >> 15)
        return 1.0 - 2.0 * ((x >> 16) & 1).to(torch.float32)


def places(params: Params, shape: Shape, axis: int) -> Places | None:
    """Whole blocks of the axis that is transformed."""
    by_rows = axis < params.lead
    block = params.block_out if by_rows else params.block_in
    grain = row_grain if by_rows else column_grain
    step = grain(shape, params.lead, axis, block or 1)
    if step is None or (by_rows and block and math.prod(shape[:axis]) > 1):
        return None  # blocks, or the signs, would not follow one another
    return Places(step, {"x": Place(axis)})


def narrowed(params: Params, shape: Shape, span: Span) -> Params:
    """The rotation of the part: a start further along the signs is another seed, since index and seed enter their hash
    as a sum: (index + first) A + (2 seed + side + 1) B = index A + (2 seed' + side + 1) B modulo 2^32, B being odd and
    `first`, a multiple of a block, even."""
    part = MatrixCut(shape, params.lead, span)
    if part.by_rows:
        first = span.start * math.prod(shape[span.axis + 1 : params.lead]) if params.block_out else 0
    else:
        first = part.columns[0] if params.block_in else 0
    moved = first // 2 * _INDEX_STEP * pow(_SEED_STEP, -1, 1 << 32)
    return changed(params, seed=(params.seed + moved) % (1 << 31))


def separated(encoded: EncodedTensor) -> EncodedTensor:
    """The same tensor with its two transforms in nodes of their own, so that each can have its own seed."""
    params: Params = encoded.tree.params
    if not params.block_in or not params.block_out:
        return encoded
    inner = Node(KIND, changed(params, block_out=0), encoded.tree.children)
    tree = Node(KIND, changed(params, block_in=0), {"x": inner})
    return EncodedTensor(tree, encoded.shape, {f"x.{name}": array for name, array in encoded.arrays.items()})
