"""The two sides of a factored matrix, W = A B: what the low-rank kernels and the library's products multiply by.

The axes of a CP, Tucker or tensor-train matrix are its rows' first and its columns' after, so the factors of either side
contract to one matrix: A [rows, bond] and B [bond, cols], where the sides meet. That is exact algebra, done once in float32
when a matrix is first used; both sides are then kept in the dtype of the activations, which takes bond (rows + cols)
numbers beside the stored factors. Where that is not less than rows x cols, W itself is kept. A bond's values of A and B are
brought to the same size by a power of two, so that float16 holds them.

Packed factors of a `low_rank` node are decoded once in the same way, dense ones are taken as they are stored.
"""

import functools
import math

import torch
from torch import Tensor

from nstf.kernels.formats.dense import torch_dtype
from nstf.kernels.formats.tree import EncodedTensor, decode
from nstf.kernels.memo import per_encoded
from nstf.kernels.torch.rows import children_of, leading_axes

CHAINS = ("cp", "tensor_train", "tucker")
KINDS = (*CHAINS, "low_rank")
LARGEST_RANK = 256
LARGEST_BATCH = 8  # rows of activations for one launch


def bond_of(encoded: EncodedTensor) -> int | None:
    """Size of the bond between rows and columns; None where no axis of the view begins the columns."""
    params = encoded.tree.params
    if encoded.tree.kind == "low_rank":
        return int(params.rank) if params.lead == 1 else None
    split = leading_axes(params.view, encoded.shape[:1])
    if split is None:
        return None
    if encoded.tree.kind == "cp":
        return int(params.rank)
    if encoded.tree.kind == "tensor_train":
        return int(params.ranks[split - 1])
    return min(int(math.prod(params.ranks[:split])), int(math.prod(params.ranks[split:])))


def known(encoded: EncodedTensor) -> bool:
    """Whether a matrix [rows, cols] is multiplied by as two sides (or as W).

    Packed factors of a larger rank than LARGEST_RANK are left to the packed kernels: decoded, they would be most of what
    the matrix takes in memory.
    """
    bond = bond_of(encoded)
    if bond is None or encoded.tree.kind in CHAINS:
        return bond is not None
    return bond <= LARGEST_RANK or stored_dtype(encoded) is not None


def is_pair(encoded: EncodedTensor) -> bool:
    """False for a chain whose sides would take no less memory than W."""
    rows, cols = encoded.shape
    bond = bond_of(encoded)
    return encoded.tree.kind == "low_rank" or (bond is not None and bond * (rows + cols) < rows * cols)


def in_one_launch(encoded: EncodedTensor, batch: int) -> bool:
    """Whether `low_rank.py` multiplies `batch` rows of activations by both sides; else the library does, one by one."""
    bond = bond_of(encoded)
    return bond is not None and is_pair(encoded) and batch <= LARGEST_BATCH and bond <= LARGEST_RANK


def stored_dtype(encoded: EncodedTensor) -> torch.dtype | None:
    """The dtype of a `low_rank` node's factors when both are stored as the same dense floats."""
    children = encoded.tree.children.values()
    names = {child.params.dtype if child.kind == "dense" else "" for child in children}
    if encoded.tree.kind != "low_rank" or len(names) != 1 or not names <= {"bfloat16", "float16", "float32"}:
        return None
    return torch_dtype(names.pop())


def sides_dtype(encoded: EncodedTensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype of `sides` for activations of `dtype`."""
    return stored_dtype(encoded) or dtype


def sides(encoded: EncodedTensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(A [rows, bond], B [bond, cols]) of `sides_dtype`, contiguous, kept as long as the tensor lives."""
    made = _sides(encoded)
    if dtype not in made:
        if stored_dtype(encoded) is not None:
            left, right = (children_of(encoded)[name].arrays["values"] for name in ("a", "b"))
        else:
            left, right = (side.to(dtype) for side in _balanced(*_contracted(encoded)))
        made[dtype] = left.contiguous(), right.contiguous()
        if right.is_cuda and not torch.cuda.is_current_stream_capturing():
            # Kernels ask for A before the launch in front of them has ended: it must not be the one that writes it.
            torch.cuda.current_stream(right.device).synchronize()
    return made[dtype]


def whole(encoded: EncodedTensor, dtype: torch.dtype) -> Tensor:
    """W [rows, cols] as `dtype`, kept as long as the tensor lives."""
    made = _whole(encoded)
    if dtype not in made:
        made[dtype] = decode(encoded, dtype)
    return made[dtype]


@per_encoded
def _sides(encoded: EncodedTensor) -> dict[torch.dtype, tuple[Tensor, Tensor]]:
    return {}


@per_encoded
def _whole(encoded: EncodedTensor) -> dict[torch.dtype, Tensor]:
    return {}


def _contracted(encoded: EncodedTensor) -> tuple[Tensor, Tensor]:
    """A and B in float32."""
    kind, params, (rows, cols) = encoded.tree.kind, encoded.tree.params, encoded.shape
    parts = {name: decode(child) for name, child in children_of(encoded).items()}
    if kind == "low_rank":
        return parts["a"], parts["b"]
    split = leading_axes(params.view, (rows,))
    assert split is not None
    count = len(params.view)
    if kind == "cp":
        left, right = (
            _khatri_rao([parts[f"factor{i}"] for i in axes]) for axes in (range(split), range(split, count))
        )
        return left, right.T
    if kind == "tensor_train":
        cores = [parts[f"core{i}"] for i in range(count)]
        left = functools.reduce(_next_core, cores[:split])
        return left.reshape(rows, -1), functools.reduce(_next_core, cores[split:]).reshape(-1, cols)
    inner, outer = params.ranks[:split], params.ranks[split:]
    core = parts["core"].reshape(math.prod(inner), math.prod(outer))
    eye = torch.eye(min(core.shape), device=core.device)
    # The core goes to the side where its larger dimension is.
    left, right = (eye, core) if len(eye) == len(core) else (core, eye)
    left = _grown(left.reshape(*inner, -1), [parts.get(f"factor{i}") for i in range(split)], 0)
    right = _grown(right.reshape(-1, *outer), [parts.get(f"factor{i}") for i in range(split, count)], 1)
    return left.reshape(rows, -1), right.reshape(-1, cols)


def _khatri_rao(factors: list[Tensor]) -> Tensor:
    """Factors [d_i, rank] -> their column-wise Kronecker product [prod d_i, rank]."""
    out = factors[0]
    for factor in factors[1:]:
        out = (out[:, None] * factor).reshape(-1, factor.shape[1])
    return out


def _next_core(left: Tensor, core: Tensor) -> Tensor:
    """[q, n, r] and [r, m, s] -> [q, n m, s]."""
    out: Tensor = torch.tensordot(left, core, 1).reshape(len(left), -1, core.shape[2])
    return out


def _grown(core: Tensor, factors: list[Tensor | None], first: int) -> Tensor:
    """A core with a factor [size, rank], where there is one, multiplied along each axis from `first` on."""
    for axis, factor in enumerate(factors, first):
        if factor is not None:
            core = torch.tensordot(core, factor, ([axis], [1])).movedim(-1, axis)
    return core


def _balanced(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The same product, with the largest numbers of a bond's column of A and row of B less than a factor of 4 apart."""
    tiny = torch.finfo(torch.float32).tiny
    high = [side.abs().amax(dim).clamp_min(tiny).log2() for side, dim in ((left, 0), (right, 1))]
    shift = torch.exp2(((high[1] - high[0]) / 2).round())
    return left * shift, right / shift[:, None]
