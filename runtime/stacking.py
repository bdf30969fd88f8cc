"""Encoded matrices that meet the same activations, one above the other: one launch instead of two or three.

The parts stay what they were, as views of the stack, so no codes are held twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nstf.kernels.formats import EncodedTensor, shuffle, trellis
from nstf.kernels.formats.tree import format_of
from nstf.kernels.linear import linear
from nstf.kernels.triton.packed import PackedCodes, layout_of
from nstf.runtime.parameter import EncodedParameter

if TYPE_CHECKING:
    from nstf.kernels.triton.peer_rows import Twins
    from nstf.kernels.triton.peers import Peers

# Of a whole matrix; every other array has a row for each row of it.
_WHOLE = ("table",)
# Formats whose codes are paths down the rows, and of how many rows one is.
_PATHS = {"shuffle": shuffle.SEGMENT, "trellis": trellis.SIDE}


@dataclass(frozen=True)
class Matrix:
    """A projection: an encoded matrix or a dense one, and its bias. Where this rank has a part of it, whole: the product of
    all ranks; peers: what the product's last launch needs to sum over ranks, if GPUs can; twins: what the launch after it
    needs to add rows of a prompt (`SummedLinear`)."""

    encoded: EncodedTensor | None
    dense: Tensor | None
    bias: Tensor | None = None
    whole: Callable[[Tensor], Tensor] | None = None
    peers: Callable[[], "Peers | None"] | None = None
    twins: Callable[[int, torch.dtype], "Twins | None"] | None = None

    @property
    def size_bytes(self) -> int:
        """As it is kept, without the bias."""
        if self.encoded is not None:
            return self.encoded.size_bytes
        return 0 if self.dense is None else self.dense.numel() * self.dense.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        if self.whole is not None:
            return self.whole(x)
        if self.encoded is not None:
            return linear(x, self.encoded, self.bias)
        assert self.dense is not None
        return F.linear(x, self.dense, self.bias)


def together(matrices: tuple[Matrix, ...], x: Tensor) -> Tensor:
    """Their products with x side by side."""
    return matrices[0](x) if len(matrices) == 1 else torch.cat([matrix(x) for matrix in matrices], dim=-1)


def matrix_of(module: Any) -> Matrix:
    """The projection that a linear module is."""
    stored = module._modules.get("weight_encoded")
    bias, whole = module.bias, getattr(module, "product", None)
    if stored is None:
        return Matrix(None, module.weight, bias, whole)
    peers, twins = getattr(module, "peers", None), getattr(module, "twins", None)
    return Matrix(stored.encoded, None, bias, whole, peers, twins)


def stacked(modules: tuple[Any, ...]) -> tuple[Matrix, ...]:
    """The matrices of modules as one where they agree; their biases are left out."""
    stored: list[EncodedParameter | None] = [m._modules.get("weight_encoded") for m in modules]
    encoded = [s.encoded for s in stored if s is not None]
    if not encoded:
        weights = torch.cat([m.weight for m in modules])
        for module, part in zip(modules, torch.split(weights, [len(m.weight) for m in modules]), strict=True):
            module.weight = nn.Parameter(part, requires_grad=False)
        return (Matrix(None, weights),)
    if len(encoded) < len(modules) or (joined := stack(encoded)) is None:
        return tuple(
            Matrix(s.encoded, None) if s is not None else Matrix(None, m.weight)
            for s, m in zip(stored, modules, strict=True)
        )
    whole, parts = joined
    for parameter, view in zip(stored, parts, strict=True):
        if parameter is not None:
            parameter.share(view)
    return (Matrix(whole, None),)


def stack(parts: Sequence[EncodedTensor]) -> tuple[EncodedTensor, list[EncodedTensor]] | None:
    """(the rows of all parts in one matrix, the parts again as views of it), or None where they do not agree.

    They agree when they are packed leaves of one tree, one width and one table, or shuffle or trellis leaves of one rate, or
    rotated ones in one basis; codes of 5 to 7 bits are several planes and do not stack.
    """
    first = parts[0]
    if not agree(parts):
        return None
    if first.tree.kind == "rotated":
        joined = stack([_inner(part) for part in parts])
        if joined is None:
            return None
        return _rotated(first, joined[0]), [_rotated(first, part) for part in joined[1]]
    if first.tree.kind in _PATHS:
        return _stack_paths(parts)
    if any(
        not torch.equal(p.arrays[name], first.arrays[name])
        for p in parts
        for name in _WHOLE
        if name in p.arrays
    ):
        return None
    if len({isinstance(p.arrays["codes"], PackedCodes) for p in parts}) > 1:
        return None
    rows = [p.shape[0] for p in parts]
    shape = (sum(rows), *first.shape[1:])
    arrays = {name: _joined(name, [p.arrays[name] for p in parts]) for name in first.arrays}
    whole = EncodedTensor(first.tree, shape, arrays)
    layout = layout_of(whole)
    codes = arrays["codes"]
    if isinstance(first.arrays["codes"], PackedCodes) and layout is not None:
        whole = EncodedTensor(first.tree, shape, {**arrays, "codes": PackedCodes(codes, layout)})
    return whole, [_part(whole, sum(rows[:i]), p) for i, p in enumerate(parts)]


def agree(parts: Sequence[EncodedTensor]) -> bool:
    """Whether matrices stack, as far as their trees and shapes tell."""
    first = parts[0]
    same = all(p.tree == first.tree and p.shape[1:] == first.shape[1:] for p in parts)
    if first.tree.kind == "rotated":
        # Rows that are turned too have signs by their place in the matrix.
        return same and not first.tree.params.block_out and agree([_inner(part) for part in parts])
    if first.tree.kind in _PATHS:
        # Paths start anew at every segment of the stack, or tile; rows of several rates are sorted by these.
        one_rate = first.tree.kind == "shuffle" or not first.tree.params.rows
        return same and one_rate and all(p.shape[0] % _PATHS[first.tree.kind] == 0 for p in parts[:-1])
    layouts = [layout_of(part) for part in parts]
    return same and all(layout is not None and len(layout.planes) == 1 for layout in layouts)


def _inner(encoded: EncodedTensor) -> EncodedTensor:
    """What a rotated matrix stores."""
    arrays = {path.removeprefix("x."): array for path, array in encoded.arrays.items()}
    return EncodedTensor(encoded.tree.children["x"], encoded.shape, arrays)


def _rotated(like: EncodedTensor, inner: EncodedTensor) -> EncodedTensor:
    """What is stored in the basis of another."""
    tree = replace(like.tree, children={"x": inner.tree})
    return EncodedTensor(tree, inner.shape, {f"x.{path}": array for path, array in inner.arrays.items()})


def _stack_paths(parts: Sequence[EncodedTensor]) -> tuple[EncodedTensor, list[EncodedTensor]]:
    """Shuffle or trellis leaves as one. Its scales are multiplied out, in float32: those of a part are under a factor of its
    own."""
    first = parts[0]
    codes = torch.cat([p.arrays["codes"] for p in parts])
    form = format_of(first.tree.kind)
    scales = torch.cat([form.read_scales(p.tree.params, dict(p.arrays)) for p in parts])
    rows = [p.shape[0] for p in parts]
    tree = replace(first.tree, params=replace(first.tree.params, scale_bits=16))
    arrays = {"codes": codes, "scale": scales, "scale_super": torch.ones(1, device=scales.device)}
    whole = EncodedTensor(tree, (sum(rows), *first.shape[1:]), arrays)
    views = torch.split(codes, [len(p.arrays["codes"]) for p in parts])
    return whole, [
        EncodedTensor(p.tree, p.shape, {**p.arrays, "codes": view})
        for p, view in zip(parts, views, strict=True)
    ]


def _joined(name: str, arrays: list[Tensor]) -> Tensor:
    """The arrays one above the other; of codes that are kept as words, the words."""
    if name in _WHOLE:
        return arrays[0]
    return torch.cat([a.words if isinstance(a, PackedCodes) else a for a in arrays])


def _part(whole: EncodedTensor, first: int, part: EncodedTensor) -> EncodedTensor:
    """The rows from `first` on that `part` is, as views."""
    count = part.shape[0]
    arrays: dict[str, Tensor] = {}
    for name, array in whole.arrays.items():
        if isinstance(array, PackedCodes):
            layout = layout_of(part)
            assert layout is not None
            width = layout.words // count
            arrays[name] = PackedCodes(array.words[first * width : (first + count) * width], layout)
        else:
            arrays[name] = array if name in _WHOLE else array[first : first + count]
    return EncodedTensor(part.tree, part.shape, arrays)
