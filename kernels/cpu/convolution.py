"""Convolutions from codes in the C++ extension: an implicit product with int8 activations, the weight is never decoded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nstf.kernels.cpu import engine_matrix, ext
from nstf.kernels.formats.tree import EncodedTensor
from nstf.kernels.memo import per_encoded

FORMATS = ("grid", "int", "shuffle")
# Bytes that an image may have with its padding: the kernel counts them in 32 bits, rounded up in several directions.
LARGEST = 1 << 30


class After(NamedTuple):
    """What becomes of a convolution's products before they are written: gain * (W x) + bias + added, between two bounds.

    gain: [out], float32: a batch normalisation's. added: of the result's shape. least, most: 0 and infinity for a ReLU.
    """

    gain: Tensor | None = None
    added: Tensor | None = None
    least: float = -math.inf
    most: float = math.inf

    def apply(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """The same to products that are written already, in their place."""
        if self.gain is not None:
            y = y.mul_(self.gain.to(y.dtype)[:, None, None])
        if bias is not None:
            y = y.add_(bias.to(y.dtype)[:, None, None])
        if self.added is not None:
            y = y.add_(self.added) if self.added.shape == y.shape else y + self.added
        return y if (self.least, self.most) == (-math.inf, math.inf) else y.clamp_(self.least, self.most)


def available() -> bool:
    """Whether the extension holds the kernels."""
    return hasattr(ext, "Convolution")


def convolve(
    x: Tensor,
    encoded: EncodedTensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    groups: int,
    after: After = After(),
) -> Tensor | None:
    """The convolution of images [n, channels, h, w] with a weight [out, channels / groups, kh, kw], or None where there is
    no kernel for it: other formats, instruction sets without int8 products.

    Activations are rounded to int8, with one scale and zero point for each image; sums are exact. The result has x's layout
    in memory (channels last or not) and dtype. padding: rows before, rows after, columns before, columns after.
    """
    if encoded.tree.kind not in FORMATS or x.device.type != "cpu" or len(encoded.shape) != 4:
        return None
    count, channels, high, wide = x.shape
    around = (high + padding[0] + padding[1]) * (wide + padding[2] + padding[3])
    if not high * wide or channels * around >= LARGEST:
        return None
    made = _made(encoded).get(channels, stride, padding, dilation, groups)
    if made is None:
        return None
    layout = _layout(x)
    images = _float(x).contiguous(memory_format=layout)
    taps = encoded.shape[2:]
    height = (high + padding[0] + padding[1] - dilation[0] * (taps[0] - 1) - 1) // stride[0] + 1
    width = (wide + padding[2] + padding[3] - dilation[1] * (taps[1] - 1) - 1) // stride[1] + 1
    if height < 1 or width < 1:
        raise ValueError(f"images of {high} x {wide} are smaller than the kernel {list(taps)}")
    size = count, encoded.shape[0], height, width
    y = torch.empty(size, dtype=torch.float32, device="cpu", memory_format=layout)
    later, broadcast = After(), after.added is not None and after.added.shape != y.shape
    if broadcast:
        after, later = After(after.gain), after._replace(gain=None)
    # Kept until the kernel is done with them.
    gain, shift = (None if v is None else _float(v).contiguous() for v in (after.gain, bias))
    added = None if after.added is None else _float(after.added).contiguous(memory_format=layout)
    if y.numel():
        made.run_at(
            images.data_ptr(),
            count,
            high,
            wide,
            *(0 if v is None else v.data_ptr() for v in (gain, shift, added)),
            after.least,
            after.most,
            y.data_ptr(),
            layout is torch.channels_last,
            torch.get_num_threads(),
        )
    y = later.apply(y, None) if broadcast else y
    return y if x.dtype == torch.float32 else y.to(x.dtype)


def compiled(
    encoded: EncodedTensor,
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    groups: int,
) -> Any:
    """The extension's convolution of a weight in one of FORMATS, or None where there is no kernel for it."""
    if any(a.device.type != "cpu" for a in encoded.arrays.values()):
        return None
    return _made(encoded).get(encoded.shape[1] * groups, stride, padding, dilation, groups)


@dataclass(frozen=True)
class InTurn:
    """The extension's convolutions one after the other in one call, as they are run inside a model whose layers are run
    together. steps: the extension's; count: of them."""

    steps: Any
    count: int

    def run(self, x: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """The last one's result, in x's dtype and layout. x: [n, channels, h, w], not empty; bias: [out]. None for images
        that these convolutions are not for."""
        count, channels, height, width = x.shape
        size = channels, height, width
        found = self.steps.sizes(*size)
        if found is None:
            return None
        layout = _layout(x)
        images = _float(x).contiguous(memory_format=layout)
        y = torch.empty(count, *found, dtype=torch.float32, device="cpu", memory_format=layout)
        numbers = [0] * (5 * self.count)
        shift = None if bias is None else _float(bias).contiguous()
        numbers[-1] = 0 if shift is None else shift.data_ptr()
        threads = torch.get_num_threads()
        last = layout is torch.channels_last
        self.steps.run_at(
            images.data_ptr(), count, size, numbers, [0.0] * self.count, y.data_ptr(), last, threads
        )
        return y if x.dtype == torch.float32 else y.to(x.dtype)


def in_turn(stages: Sequence[Any]) -> InTurn:
    """The extension's convolutions, each on the result of the one before."""
    steps = ext.ImageSteps()
    for i, stage in enumerate(stages):
        steps.add(stage, 0 if i == 0 else 2 - i % 2, 1 + i % 2, -1, -math.inf, math.inf)
    return InTurn(steps, len(stages))


def _layout(x: Tensor) -> torch.memory_format:
    """How images lie. Of one channel or one pixel both layouts hold; the usual one is then taken."""
    last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _float(x: Tensor) -> Tensor:
    """In float32. A call of `to` takes a microsecond where there is nothing to do."""
    return x if x.dtype == torch.float32 else x.to(torch.float32)


class _Made:
    """The convolutions made of one weight: by geometry, and by the instruction set they were made for."""

    def __init__(self, encoded: EncodedTensor) -> None:
        self.kernel = (encoded.shape[2], encoded.shape[3])
        shape = (encoded.shape[0], math.prod(encoded.shape[1:]))
        self.matrix = EncodedTensor(encoded.tree, shape, encoded.arrays)
        self.known: dict[Any, Any] = {}

    def get(
        self,
        channels: int,
        stride: tuple[int, int],
        padding: tuple[int, int, int, int],
        dilation: tuple[int, int],
        groups: int,
    ) -> Any:
        key = ext.isa(), channels, stride, padding, dilation, groups
        if key not in self.known:
            try:
                self.known[key] = ext.Convolution(
                    engine_matrix.compile_matrix(self.matrix),
                    channels,
                    self.kernel,
                    stride,
                    (padding[0], padding[2]),
                    (padding[1], padding[3]),
                    dilation,
                    groups,
                )
            except ValueError:  # no kernel reads it as it is stored
                self.known[key] = None
        return self.known[key]


@per_encoded
def _made(encoded: EncodedTensor) -> _Made:
    return _Made(encoded)
