"""Convolutions from codes in the C++ extension: an implicit product with int8 activations, the weight is never decoded."""

import math
from typing import Any

import torch
from torch import Tensor

from nstf.kernels.cpu import engine_matrix, ext
from nstf.kernels.formats.tree import EncodedTensor
from nstf.kernels.memo import per_encoded

FORMATS = ("grid", "int", "shuffle")
# Bytes that an image may have with its padding: the kernel counts them in 32 bits, rounded up in several directions.
LARGEST = 1 << 30


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
) -> Tensor | None:
    """The convolution of images [n, channels, h, w] with a weight [out, channels / groups, kh, kw], or None where there is
    no kernel for it: other formats, instruction sets without int8 products.

    Activations are rounded to int8, with one scale and zero point for each image; sums are exact. The result has x's layout
    in memory (channels last or not) and dtype. padding: rows before, rows after, columns before, columns after.
    """
    if encoded.tree.kind not in FORMATS or x.device.type != "cpu" or len(encoded.shape) != 4:
        return None
    around = (x.shape[2] + padding[0] + padding[1]) * (x.shape[3] + padding[2] + padding[3])
    if not x.shape[2] * x.shape[3] or x.shape[1] * around >= LARGEST:
        return None
    made = _made(encoded).get(x.shape[1], stride, padding, dilation, groups)
    if made is None:
        return None
    # Of one channel or one pixel both layouts hold; the usual one is then taken.
    last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last else torch.contiguous_format
    images = x.to(torch.float32).contiguous(memory_format=layout)
    height, width = (
        (x.shape[2 + i] + padding[2 * i] + padding[2 * i + 1] - dilation[i] * (encoded.shape[2 + i] - 1) - 1)
        // stride[i]
        + 1
        for i in (0, 1)
    )
    if height < 1 or width < 1:
        raise ValueError(
            f"images of {x.shape[2]} x {x.shape[3]} are smaller than the kernel {list(encoded.shape[2:])}"
        )
    y = torch.empty(len(x), encoded.shape[0], height, width, memory_format=layout)
    added = None if bias is None else bias.to(torch.float32).contiguous()
    if y.numel():
        made.run_at(
            images.data_ptr(),
            len(x),
            x.shape[2],
            x.shape[3],
            0 if added is None else added.data_ptr(),
            y.data_ptr(),
            last,
            torch.get_num_threads(),
        )
    return y.to(x.dtype)


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
