# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Convolutions from packed codes (int, grid, fp8, mxfp4): an implicit product, for kernels of any size, 1x1 among them.

A program makes BM pixels of BN output channels. It goes through the columns of the weight 32 at a time: each is a channel
and a place in the kernel, so that the activations of a tile are read from the image where its patches lie, and the weight's
numbers are made from the codes in registers. Nothing is laid out in memory beforehand.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.formats.tree import EncodedTensor
from nstf.kernels.memo import per_encoded
from nstf.kernels.triton.aot import target_here
from nstf.kernels.triton.launching import (
    even_sizes,
    launch,
    layout_constants,
    layout_name,
    leaf_arguments,
    scale_type,
)
from nstf.kernels.triton.numbers import codes_at, numbers32, scale_value
from nstf.kernels.triton.packed import FORMATS, LANES, Layout, Packed, as_matrix, pack_leaf
from nstf.kernels.triton.spec import KernelSpec, pointer_type, remembered

# Pixels and output channels of a program; of fewer pixels on RDNA, whose registers would not hold the places of more.
_PIXELS, _ROWS = 64, 64
_RDNA_PIXELS = 32
# Places within an image and its results are 32-bit numbers.
_MOST = 1 << 31


@triton.jit
def convolution_kernel(
    x,  # the images, by their strides
    words,
    scale,
    zeros,
    row_scale,
    table,
    y,  # likewise
    pixels,  # of all results
    rows,
    cols,
    padded,
    height,
    width,
    out_height,
    out_width,
    x_image,
    x_channel,
    x_row,
    x_column,
    y_image,
    y_channel,
    y_row,
    y_column,
    PLANES: tl.constexpr,
    SHIFTS: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALES: tl.constexpr,
    MODE: tl.constexpr,
    EXPONENT: tl.constexpr,
    BIAS: tl.constexpr,
    KERNEL: tl.constexpr,  # rows, columns
    STRIDE: tl.constexpr,
    BEFORE: tl.constexpr,
    DILATION: tl.constexpr,
    WIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    LANES: tl.constexpr,
):
    RUN: tl.constexpr = 2 * LANES
    J: tl.constexpr = 16 // PLANES[len(PLANES) - 1]
    N0: tl.constexpr = 16 // PLANES[0]
    N1: tl.constexpr = 16 // PLANES[1] if len(PLANES) > 1 else 1
    N2: tl.constexpr = 16 // PLANES[2] if len(PLANES) > 2 else 1
    TAPS: tl.constexpr = KERNEL[0] * KERNEL[1]
    pixel = tl.program_id(0) * BM + tl.arange(0, BM)
    row = tl.program_id(1) * BN + tl.arange(0, BN)
    pixel_ok = pixel < pixels
    row_ok = row < rows
    # Rows and pixels that do not exist read the first ones, and are not stored.
    safe = tl.where(row_ok, row, 0)
    at = tl.where(pixel_ok, pixel, 0)
    out_x = at % out_width
    out_y = at // out_width % out_height
    image = at // (out_width * out_height)
    from_y = out_y * STRIDE[0] - BEFORE[0]
    from_x = out_x * STRIDE[1] - BEFORE[1]
    word = tl.arange(0, LANES)
    run = tl.arange(0, RUN)
    at0 = safe[:, None] * (padded // (RUN * N0) * LANES) + word[None, :]
    at1 = at0
    at2 = at0
    if len(PLANES) > 1:
        at1 = (safe[:, None] * PLANES[1] + rows * SHIFTS[1]) * (padded // 32) + word[None, :]
    if len(PLANES) > 2:
        at2 = (safe[:, None] * PLANES[2] + rows * SHIFTS[2]) * (padded // 32) + word[None, :]
    total = tl.zeros([BM, BN], tl.float32)
    for chunk in range(padded // (RUN * J)):
        for j in tl.static_range(J):
            if j % N0 == 0:
                w0 = tl.load(words + at0 + (chunk * (J // N0) + j // N0) * LANES)
                if j == 0:
                    w1 = w0
                    w2 = w0
            if len(PLANES) > 1:
                if j % N1 == 0:
                    w1 = tl.load(words + at1 + (chunk * (J // N1) + j // N1) * LANES)
            if len(PLANES) > 2:
                if j % N2 == 0:
                    w2 = tl.load(words + at2 + (chunk * (J // N2) + j // N2) * LANES)
            k = (chunk * J + j) * RUN + run
            channel = k // TAPS
            tap = k % TAPS
            in_y = from_y[:, None] + (tap // KERNEL[1] * DILATION[0])[None, :]
            in_x = from_x[:, None] + (tap % KERNEL[1] * DILATION[1])[None, :]
            there = (in_y >= 0) & (in_y < height) & (in_x >= 0) & (in_x < width) & (k < cols)[None, :]
            where = image[:, None] * x_image + channel[None, :] * x_channel + in_y * x_row + in_x * x_column
            patch = tl.load(x + where, mask=there, other=0.0)

            t = codes_at(w0, w1, w2, j, PLANES, SHIFTS)
            stored = safe[:, None] * GROUPS + tl.minimum(k // GROUP, GROUPS - 1)[None, :]
            zero = tl.full([1, 1], ZERO if ZERO > 0 else 0, tl.float32)
            low = numbers32(t & 0xFFFF, table, zero, MODE, BITS, EXPONENT, BIAS)
            high = numbers32((t >> 16) & 0xFFFF, table, zero, MODE, BITS, EXPONENT, BIAS)
            numbers = tl.reshape(tl.join(low, high), [BN, RUN])
            if ZERO < 0:
                numbers -= tl.load(zeros + stored).to(tl.float32)
            numbers *= scale_value(tl.load(scale + stored), SCALES)
            if WIDE:
                total = tl.dot(patch.to(tl.float32), tl.trans(numbers), total, input_precision="ieee")
            else:
                total = tl.dot(patch, tl.trans(numbers.to(patch.dtype)), total, input_precision="ieee")
    if SCALES == 1:
        total *= tl.load(row_scale + safe)[None, :]
    to = (image * y_image + out_y * y_row + out_x * y_column)[:, None] + row[None, :] * y_channel
    tl.store(y + to, total.to(y.dtype.element_ty), mask=pixel_ok[:, None] & row_ok[None, :])


@remembered
def convolution_specs(
    layout: Layout,
    dtype: torch.dtype,
    pixels: int,
    kernel: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    before: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    arch: str = "sm_90",
) -> list[KernelSpec]:
    """The launch for results of `pixels` pixels in all. before: rows and columns of padding in front."""
    rdna = arch.startswith(("gfx10", "gfx11", "gfx12"))
    across = _RDNA_PIXELS if rdna else _PIXELS
    wide = dtype == torch.float32 or (dtype == torch.bfloat16 and triton.knobs.runtime.interpret)
    sizes = (
        *("pixels", "rows", "cols", "padded", "height", "width", "out_height", "out_width"),
        *("x_image", "x_channel", "x_row", "x_column", "y_image", "y_channel", "y_row", "y_column"),
    )
    shape = "_".join(f"{a}x{b}" for a, b in (kernel, stride, before, dilation))
    return [
        KernelSpec(
            name=f"convolution_{layout_name(layout)}_{pointer_type(dtype)[1:]}_{layout.groups}x{layout.group}_{shape}",
            fn=convolution_kernel,
            signature={
                "x": pointer_type(dtype),
                "words": "*i32",
                "scale": scale_type(layout),
                "zeros": "*u8",
                "row_scale": "*fp32",
                "table": "*fp16",
                "y": pointer_type(dtype),
                **dict.fromkeys(sizes, "i32"),
            },
            constants={
                **layout_constants(layout),
                "KERNEL": kernel,
                "STRIDE": stride,
                "BEFORE": before,
                "DILATION": dilation,
                "WIDE": wide,
                "BM": across,
                "BN": _ROWS,
                "LANES": LANES,
            },
            divisible=("x", "words", "scale", "zeros", "row_scale", "table", "y", *even_sizes(layout)),
            num_warps=8 if rdna else 4,
            kind="convolution",
            grid=(triton.cdiv(pixels, across), triton.cdiv(layout.rows, _ROWS), 1),
        )
    ]


@per_encoded
def _packed(encoded: EncodedTensor) -> Packed | None:
    """The weight as a matrix in the kernels' order; `compact` has left it the words that are used here."""
    return pack_leaf(as_matrix(encoded))


def convolve(
    x: Tensor,
    encoded: EncodedTensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    groups: int,
) -> Tensor | None:
    """The convolution of images [n, channels, h, w] with a weight [out, channels, kh, kw], or None where the kernel does not
    read its format or it has groups. In x's dtype and layout; sums in float32. padding: rows before, rows after, columns
    before, columns after."""
    if encoded.tree.kind not in FORMATS or groups != 1 or x.dtype == torch.float64:
        return None
    packed = _packed(encoded)
    kernel = encoded.shape[2:]
    height, width = (
        (x.shape[2 + i] + padding[2 * i] + padding[2 * i + 1] - dilation[i] * (kernel[i] - 1) - 1)
        // stride[i]
        + 1
        for i in (0, 1)
    )
    pixels = len(x) * height * width
    if packed is None or max(x.numel(), pixels * encoded.shape[0]) >= _MOST or pixels <= 0:
        return None
    last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last else torch.contiguous_format
    x = x.contiguous(memory_format=layout)
    y = torch.empty(
        len(x), encoded.shape[0], height, width, dtype=x.dtype, device=x.device, memory_format=layout
    )
    spec = convolution_specs(
        packed.layout,
        x.dtype,
        pixels,
        (kernel[0], kernel[1]),
        stride,
        (padding[0], padding[2]),
        dilation,
        target_here() or "sm_90",
    )[0]
    sizes = (pixels, packed.layout.rows, packed.layout.cols, packed.layout.padded)
    launch(
        spec,
        x,
        *leaf_arguments(packed),
        y,
        *sizes,
        x.shape[2],
        x.shape[3],
        height,
        width,
        *x.stride(),
        *y.stride(),
    )
    return y if bias is None else y.add_(bias.to(y.dtype)[:, None, None])
