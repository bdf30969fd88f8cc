"""`convolve`: images times an encoded convolution weight.

    int, grid, shuffle    from the codes (kernels/cpu/convolution.py, kernels/triton/convolution.py)
    low_rank              the kernel of the right factor, then 1x1
    tucker                1x1, the core, 1x1 (Tucker-2 of Kim et al. 2016; axes of the kernel that have factors too)
    cp                    1x1, one depthwise convolution for each axis of the kernel, 1x1 (Lebedev et al. 2015)
    tensor_train and others of 1x1   a product with every pixel, by the registry's kernels
    add                   both, added

Everything else is decoded, some output channels at a time, for the library's convolution: formats that no kernel reads,
gradients, and where `exact` activations are asked for. A chain that needs more multiplications than the dense weight is
decoded as well.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nstf.kernels.cpu import convolution as cpu
from nstf.kernels.cpu import ext
from nstf.kernels.cpu.convolution import After
from nstf.kernels.formats.tree import EncodedTensor, Node, decode, format_of
from nstf.kernels.linear import linear
from nstf.kernels.memo import per_encoded
from nstf.kernels.torch.rows import children_of, decode_rows, row_wise

# Elements of a weight that are decoded at a time: 64 MiB in float32.
BLOCK_NUMEL = 1 << 24


@dataclass(frozen=True)
class Geometry:
    """How a kernel meets the image. padding: rows before, rows after, columns before, columns after."""

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def pointwise(self) -> bool:
        """Whether a 1x1 kernel of this geometry is a product with every pixel."""
        return self.stride == (1, 1) and self.padding == (0, 0, 0, 0) and self.groups == 1


def convolve(
    x: Tensor,
    encoded: EncodedTensor,
    bias: Tensor | None = None,
    geometry: Geometry = Geometry(),
    exact: bool = False,
    after: After = After(),
) -> Tensor:
    """The convolution of images with an encoded weight, in x's dtype and layout.

    x: [n, channels, h, w]. encoded: [out, channels / groups, kh, kw]. bias: [out]. exact: no int8 activations. after: what
    is done besides adding the bias; the C++ kernels do it as they write.
    Raises ValueError when the shapes do not fit.
    """
    if len(encoded.shape) != 4 or x.dim() != 4 or x.shape[1] != encoded.shape[1] * geometry.groups:
        raise ValueError(f"images {list(x.shape)} do not fit an encoded convolution {list(encoded.shape)}")
    y = _from_codes(x, encoded, geometry, bias, exact, after)
    if y is None:
        y = _chain(x, encoded, geometry, bias, exact, after)
    if y is None:
        # A gain comes before the bias.
        own = bias if after.gain is None else None
        y = after.apply(_decoded(x, encoded, own, geometry), None if own is bias else bias)
    return y


def _from_codes(
    x: Tensor, encoded: EncodedTensor, geometry: Geometry, bias: Tensor | None, exact: bool, after: After
) -> Tensor | None:
    if x.device.type == "cuda":
        from nstf.kernels.triton import linear

        if not linear.usable(x.device):
            return None
        from nstf.kernels.triton import convolution as triton

        own = bias if after.gain is None else None
        with torch.cuda.device(x.device):
            y = triton.convolve(
                x, encoded, own, geometry.stride, geometry.padding, geometry.dilation, geometry.groups
            )
        return None if y is None else after.apply(y, None if own is bias else bias)
    if exact or not cpu.available():
        return None
    return cpu.convolve(
        x, encoded, bias, geometry.stride, geometry.padding, geometry.dilation, geometry.groups, after
    )


def _decoded(x: Tensor, encoded: EncodedTensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Blocks of output channels, decoded for the time of their convolution."""
    x, padding = _padded(x, geometry)
    rest = (geometry.stride, padding, geometry.dilation)
    out, numel = encoded.shape[0], math.prod(encoded.shape[1:])
    rows = max(1, BLOCK_NUMEL // numel)
    if rows >= out or geometry.groups > 1 or not row_wise(encoded):
        return F.conv2d(x, decode(encoded, x.dtype), bias, *rest, geometry.groups)
    return torch.cat(
        [
            F.conv2d(
                x,
                decode_rows(encoded, slice(start, min(out, start + rows)), x.dtype),
                None if bias is None else bias[start : start + rows],
                *rest,
            )
            for start in range(0, out, rows)
        ],
        1,
    )


def _padded(x: Tensor, geometry: Geometry) -> tuple[Tensor, tuple[int, int]]:
    """(images, padding left to the library), which knows no more on one side than on the other."""
    top, bottom, left, right = geometry.padding
    if top == bottom and left == right:
        return x, (top, left)
    return F.pad(x, (left, right, top, bottom)), (0, 0)


def _chain(
    x: Tensor, encoded: EncodedTensor, geometry: Geometry, bias: Tensor | None, exact: bool, after: After
) -> Tensor | None:
    """The convolution through the parts of a tree, or None where it is decoded."""
    kind, params = encoded.tree.kind, encoded.tree.params
    if geometry.groups != 1:
        return None
    if kind == "add":
        parts = children_of(encoded)
        both = convolve(x, parts["x"], None, geometry, exact)
        return after.apply(both.add_(convolve(x, parts["y"], None, geometry, exact)), bias)
    # Parts that no kernel reads as they are stored are rounded to 8 bits once more: not where the result is to be exact.
    if exact and kind in ("tucker", "cp"):
        return None
    if kind in _STAGES and not exact and after == After() and x.device.type == "cpu" and cpu.available():
        # In one call: what a stage finds of its results the next one need not look for, and there is no Python in between.
        together = _in_turn(encoded, geometry)
        y = None if together is None or not x.numel() else together.run(x, bias)
        if y is not None:
            return y
    if kind in _STAGES and multiplications(encoded.tree, encoded.shape, geometry.stride) <= math.prod(
        encoded.shape
    ):
        stages = _STAGES[kind](encoded)
        if stages is not None:
            for stage in stages[:-1]:
                x = _stage(x, stage, geometry, exact)
            return _stage(x, stages[-1], geometry, exact, bias, after)
    if (
        encoded.shape[2:] == (1, 1)
        and geometry.pointwise
        and kind not in ("dense", "fp8", "mxfp4", "trellis")
    ):
        if getattr(params, "lead", 1) != 1 or kind in ("permute", "rotated"):
            return None
        matrix = _as_matrix(encoded)
        return after.apply(linear(x.permute(0, 2, 3, 1), matrix).permute(0, 3, 1, 2), bias)
    return None


def stages(encoded: EncodedTensor, geometry: Geometry) -> list[Any] | None:
    """The extension's convolutions that an encoded one is made of, one for codes and several for a chain; None where one of
    them has no kernel there. What `convolve` does with int8 activations, on a CPU."""
    kind = encoded.tree.kind
    if kind in cpu.FORMATS:
        made = cpu.compiled(encoded, geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
        return None if made is None else [made]
    dense = math.prod(encoded.shape)
    if (
        kind not in _STAGES
        or geometry.groups != 1
        or multiplications(encoded.tree, encoded.shape, geometry.stride) > dense
    ):
        return None
    found: list[Any] = []
    for stage in _STAGES[kind](encoded) or ():
        own = None
        if isinstance(stage.weight, EncodedTensor):
            own = stages(stage.weight, _own(stage, geometry))
        if own is None:
            return None
        found += own
    return found or None


def _in_turn(encoded: EncodedTensor, geometry: Geometry) -> cpu.InTurn | None:
    """A chain's stages in one call of the extension, or None where one of them has no kernel there."""
    known, key = _chains(encoded), (ext.isa(), geometry)
    if key not in known:
        made = stages(encoded, geometry)
        known[key] = None if made is None else cpu.in_turn(made)
    return known[key]


@per_encoded
def _chains(encoded: EncodedTensor) -> dict[tuple[str, Geometry], cpu.InTurn | None]:
    """What `_in_turn` made, by instruction set and geometry."""
    return {}


@dataclass(frozen=True)
class _Stage:
    """One convolution of a chain. rows, columns: whether it takes the stride, padding and dilation of that side."""

    weight: EncodedTensor | Tensor  # [out, in / groups, kh, kw]; a tensor where it is a handful of values
    rows: bool = False
    columns: bool = False
    groups: int = 1


def _stage(
    x: Tensor,
    stage: _Stage,
    geometry: Geometry,
    exact: bool,
    bias: Tensor | None = None,
    after: After = After(),
) -> Tensor:
    own = _own(stage, geometry)
    if isinstance(stage.weight, EncodedTensor):
        return convolve(x, stage.weight, bias, own, exact, after)
    x, symmetric = _padded(x, own)
    y = F.conv2d(x, stage.weight.to(x.dtype), None, own.stride, symmetric, own.dilation, stage.groups)
    return after.apply(y, bias)


def _own(stage: _Stage, geometry: Geometry) -> Geometry:
    """What of a convolution's geometry is this stage's."""
    sides = (stage.rows, stage.columns)
    stride, dilation = (
        (values[0] if sides[0] else 1, values[1] if sides[1] else 1)
        for values in (geometry.stride, geometry.dilation)
    )
    padding = tuple(p if sides[i // 2] else 0 for i, p in enumerate(geometry.padding))
    return Geometry(stride, padding, dilation, stage.groups)  # type: ignore[arg-type]


@per_encoded
def _low_rank(encoded: EncodedTensor) -> list[_Stage] | None:
    if encoded.tree.params.lead != 1:
        return None
    parts = children_of(encoded)
    right = _part(parts["b"], (encoded.tree.params.rank, *encoded.shape[1:]))
    left = _part(parts["a"], (encoded.shape[0], encoded.tree.params.rank, 1, 1))
    return [_Stage(right, True, True), _Stage(left)]


@per_encoded
def _tucker(encoded: EncodedTensor) -> list[_Stage] | None:
    params, shape = encoded.tree.params, encoded.shape
    if params.view[:2] != shape[:2] or math.prod(params.view[2:]) != shape[2] * shape[3]:
        return None
    parts = children_of(encoded)
    out, width = params.ranks[:2]
    stages = []
    if "factor1" in parts:
        stages.append(_Stage(rounded(decode(parts["factor1"]).T[:, :, None, None])))
    if params.ranks[2:] == params.view[2:]:
        core = _part(parts["core"], (out, width, *shape[2:]))
    else:
        # Factors of the kernel's own axes are a few numbers: the core takes them in.
        whole = format_of("tucker").decode(
            replace(params, view=(out, width, *params.view[2:])),
            (out, width, *shape[2:]),
            {},
            {n: decode(p) for n, p in parts.items() if n not in ("factor0", "factor1")},
        )
        core = rounded(whole)
    stages.append(_Stage(core, True, True))
    if "factor0" in parts:
        stages.append(_Stage(_part(parts["factor0"], (shape[0], out, 1, 1))))
    return stages


@per_encoded
def _cp(encoded: EncodedTensor) -> list[_Stage] | None:
    params, shape = encoded.tree.params, encoded.shape
    if params.view[:2] != shape[:2] or params.view[2:] not in ((shape[2] * shape[3],), shape[2:]):
        return None
    parts, rank = children_of(encoded), params.rank
    stages = [_Stage(rounded(decode(parts["factor1"]).T[:, :, None, None]))]
    if len(params.view) == 3:
        stages.append(_Stage(decode(parts["factor2"]).T.reshape(rank, 1, *shape[2:]), True, True, rank))
    else:
        stages.append(_Stage(decode(parts["factor2"]).T.reshape(rank, 1, -1, 1), True, False, rank))
        stages.append(_Stage(decode(parts["factor3"]).T.reshape(rank, 1, 1, -1), False, True, rank))
    return [*stages, _Stage(_part(parts["factor0"], (shape[0], rank, 1, 1)))]


_STAGES: dict[str, Any] = {"low_rank": _low_rank, "tucker": _tucker, "cp": _cp}


def multiplications(tree: Node, shape: tuple[int, ...], stride: tuple[int, int] = (1, 1)) -> int:
    """Multiplications for one pixel of the result, a chain's own where there is one: a stage in front of the stride sees so
    many times as many pixels."""
    dense, params = math.prod(shape), tree.params
    before = stride[0] * stride[1]
    if tree.kind == "low_rank":
        return int(params.rank * (shape[0] + math.prod(shape[1:])))
    if tree.kind in ("tucker", "cp") and params.view[:2] == shape[:2]:
        out, width = params.view[:2]
        taps = math.prod(shape[2:])
        if tree.kind == "cp":
            own = taps if len(params.view) == 3 else params.view[2] * stride[1] + params.view[3]
            return int(params.rank * (out + before * width + own))
        kept_out, kept_in = params.ranks[:2]
        cost = kept_out * kept_in * taps
        cost += before * kept_in * width if kept_in < width else 0
        return int(cost + (kept_out * out if kept_out < out else 0))
    if tree.kind == "add":
        return sum(multiplications(child, shape, stride) for child in tree.children.values())
    if tree.kind == "permute":
        inner = format_of("permute").children(params, shape)["x"]
        return multiplications(tree.children["x"], inner, stride)
    return dense


def rounded(weight: Tensor) -> EncodedTensor:
    """A part of a chain that no kernel reads as it is stored, as 8-bit integers with a scale for each row: factors whose
    stored rows are the columns of their product, cores whose rows are not their first axis.

    Made once and kept as long as the tensor that it is part of: a byte for each of its weights.
    """
    rows = weight.reshape(len(weight), -1).to(torch.float32)
    scale = rows.abs().amax(1, keepdim=True).div(127).clamp_min(6e-8).to(torch.float16)
    codes = torch.round(rows / scale.to(torch.float32)).clamp_(-128, 127).add_(128).to(torch.uint8)
    node = Node("int", format_of("int").Params(bits=8, group=0, symmetric=True, scale_bits=16))
    return EncodedTensor(node, tuple(weight.shape), {"codes": codes, "scale": scale})


def _part(encoded: EncodedTensor, shape: tuple[int, ...]) -> EncodedTensor:
    """A part of a chain in the shape of its convolution: as it is stored where its rows are the first axis of that."""
    kind = encoded.tree.kind
    if kind == "dense":
        return EncodedTensor(encoded.tree, shape, {"values": encoded.arrays["values"].reshape(shape)})
    if kind in cpu.FORMATS and encoded.tree.params.lead == 1 and encoded.shape[0] == shape[0]:
        return EncodedTensor(encoded.tree, shape, encoded.arrays)
    return rounded(decode(encoded).reshape(shape))


@per_encoded
def _as_matrix(encoded: EncodedTensor) -> EncodedTensor:
    """The weight of a 1x1 convolution as [out, in]."""
    return EncodedTensor(encoded.tree, encoded.shape[:2], encoded.arrays)
