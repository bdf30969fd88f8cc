"""Factorised matrices applied factor by factor: the dense matrix is never formed.

    low_rank            y = (x B^T) A^T, both products through the registry (so a factor may be packed)
    add                 y = x X^T + x Y^T
    permute (1, 0)      y = x X, from blocks of X's rows; (0, 1) is X itself
    rotated             y = S_o H_o (X (H_i S_i x)): the activations are turned, not the matrix
    cp, tucker, tensor_train   x is contracted with the factors of the input axes, then grown by those of
    the output

A view [o1, .., ok, i1, .., im] belongs to a matrix [out, in] when its first k axes make up `out`. A chain of
factors can cost more than the dense product when its ranks are high and the batch is large: `supports`
counts the multiplications of both ways and leaves such cases to the reference.
"""

import math
from typing import Any

import torch
from torch import Tensor

from nstf.kernels.formats import rotated
from nstf.kernels.formats.tree import EncodedTensor, Shape, decode
from nstf.kernels.linear import linear
from nstf.kernels.torch.rows import children_of, decode_rows, leading_axes, row_wise

NAME = "torch.structured"
FORMATS = ("add", "cp", "low_rank", "permute", "rotated", "tensor_train", "tucker")

BLOCK_NUMEL = 1 << 22


def available() -> bool:
    return True


def supports(encoded: EncodedTensor, device: torch.device, batch: int) -> bool:
    """Whether this way needs no more multiplications than decoding the matrix and multiplying by it."""
    kind, params = encoded.tree.kind, encoded.tree.params
    if kind == "add":
        return True
    if kind == "permute":
        return params.dims == (0, 1) or row_wise(children_of(encoded)["x"])
    if kind == "rotated":
        return bool(params.lead == 1)
    out, width = encoded.shape
    if kind == "low_rank":
        return bool(
            params.lead == 1 and batch * params.rank * (out + width) <= out * width * (params.rank + batch)
        )
    split = leading_axes(params.view, (out,))
    if split is None:
        return False
    return batch * _chain_cost(kind, params, split) <= batch * out * width + _decode_cost(kind, params)


def matmul(x: Tensor, encoded: EncodedTensor) -> Tensor:
    """x: [batch, in] -> [batch, out]."""
    kind = encoded.tree.kind
    children = children_of(encoded)
    if kind == "low_rank":
        return linear(linear(x, children["b"]), children["a"])
    if kind == "add":
        return linear(x, children["x"]) + linear(x, children["y"])
    if kind == "rotated":
        # In float32: the transform mixes 64 values, which would lose what 8 bits of mantissa cannot hold.
        turned = rotated.rotate_inputs(encoded.tree.params, x.to(torch.float32))
        return rotated.rotate_outputs(encoded.tree.params, linear(turned, children["x"])).to(x.dtype)
    if kind == "permute":
        same = encoded.tree.params.dims == (0, 1)
        return linear(x, children["x"]) if same else _transposed(x, children["x"])
    split = leading_axes(encoded.tree.params.view, encoded.shape[:1])
    if split is None:
        raise ValueError(f"view {list(encoded.tree.params.view)} does not split at {list(encoded.shape)}")
    contract = {"cp": _cp, "tucker": _tucker, "tensor_train": _tensor_train}[kind]
    # In float32: what lies between the factors has no bound, and float16 ends at 65504.
    y = contract(x.to(torch.float32), encoded.tree.params.view, split, _factors(encoded))
    return y.reshape(len(x), -1).to(x.dtype)


def _factors(encoded: EncodedTensor) -> dict[str, Tensor]:
    """The decoded factors, made anew at each call: they are small beside the matrix, but they are dense."""
    return {name: decode(child) for name, child in children_of(encoded).items()}


def _transposed(x: Tensor, child: EncodedTensor) -> Tensor:
    """x @ X for X [in, out], some rows of X at a time. x: [batch, in]."""
    width, out = child.shape
    rows = max(1, BLOCK_NUMEL // out)
    y = x[:, :rows] @ decode_rows(child, slice(0, min(rows, width)), x.dtype)
    for start in range(rows, width, rows):
        stop = min(width, start + rows)
        y += x[:, start:stop] @ decode_rows(child, slice(start, stop), x.dtype)
    return y


def _cp(x: Tensor, view: Shape, split: int, factors: dict[str, Tensor]) -> Tensor:
    """t[b, r] = sum over the input axes of x times their factors; y = t times the output axes' factors."""
    last = len(view) - 1
    t = x.reshape(-1, *view[split:])
    t = torch.tensordot(t, factors[f"factor{last}"], 1)
    for axis in range(last - 1, split - 1, -1):
        t = torch.einsum("...nr,nr->...r", t, factors[f"factor{axis}"])
    for axis in range(split - 1):
        t = torch.einsum("...r,nr->...nr", t, factors[f"factor{axis}"])
    return t @ factors[f"factor{split - 1}"].T


def _tucker(x: Tensor, view: Shape, split: int, factors: dict[str, Tensor]) -> Tensor:
    """x into the core's input space, through the core, out of its output space."""
    core = factors["core"]
    t = x.reshape(-1, *view[split:])
    for axis in range(split, len(view)):
        if f"factor{axis}" in factors:
            at = axis - split + 1
            t = torch.tensordot(t, factors[f"factor{axis}"], ([at], [0])).movedim(-1, at)
    t = t.reshape(len(x), -1) @ core.reshape(math.prod(core.shape[:split]), -1).T
    t = t.reshape(-1, *core.shape[:split])
    for axis in range(split):
        if f"factor{axis}" in factors:
            t = torch.tensordot(t, factors[f"factor{axis}"], ([axis + 1], [1])).movedim(-1, axis + 1)
    return t


def _tensor_train(x: Tensor, view: Shape, split: int, factors: dict[str, Tensor]) -> Tensor:
    """x contracted with the input cores from the last to the first, then grown by the output cores."""
    last = len(view) - 1
    t = x.reshape(-1, *view[split:], 1)
    for axis in range(last, split - 1, -1):
        t = torch.tensordot(t, factors[f"core{axis}"], ([-2, -1], [1, 2]))
    # t: [batch, bond]. Each output axis goes in front of those already there: they come last to first.
    for axis in range(split - 1, -1, -1):
        t = torch.einsum("b...s,rns->bn...r", t, factors[f"core{axis}"])
    return t.squeeze(-1)


def _chain_cost(kind: str, params: Any, split: int) -> int:
    """Multiplications for one row of activations, factor by factor as `matmul` does it."""
    view = params.view
    if kind == "cp":
        ins = sum(math.prod(view[split : axis + 1]) for axis in range(split, len(view)))
        outs = sum(math.prod(view[: axis + 1]) for axis in range(split))
        return int(params.rank * (ins + outs))
    if kind == "tucker":
        return _tucker_cost(params, split)
    bonds = (1, *params.ranks, 1)
    ins = sum(math.prod(view[split : i + 1]) * bonds[i] * bonds[i + 1] for i in range(split, len(view)))
    outs = sum(math.prod(view[i:split]) * bonds[i] * bonds[i + 1] for i in range(split))
    return int(ins + outs)


def _tucker_cost(params: Any, split: int) -> int:
    view, ranks = params.view, params.ranks
    cost, size = math.prod(ranks), math.prod(view[split:])
    for axis in range(split, len(view)):
        if ranks[axis] < view[axis]:
            cost += size * ranks[axis]
        size = size // view[axis] * ranks[axis]
    size = math.prod(ranks[:split])
    for axis in range(split):
        size = size // ranks[axis] * view[axis]
        if ranks[axis] < view[axis]:
            cost += size * ranks[axis]
    return int(cost)


def _decode_cost(kind: str, params: Any) -> int:
    """Multiplications to form the dense matrix: its last step, which every element takes part in."""
    rank = params.rank if kind == "cp" else params.ranks[-1]
    return int(math.prod(params.view) * rank)
