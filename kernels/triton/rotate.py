# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Activations into the randomised Hadamard basis of a `rotated` matrix, and results out of it.

One small launch before the product and, for matrices whose rows are rotated too, one after. The transform is computed in
float32 with signs hashed from the index, so nothing is read but the activations. For a trellis the turned activations are
left in the order its kernel reads them in: column c of every tile of 16 beside those of the other tiles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.formats.rotated import Params
from nstf.kernels.triton.launching import launch
from nstf.kernels.triton.spec import KernelSpec, pointer_type

_AT_ONCE = 1024


@triton.jit
def _signs(at, seed, SIDE: tl.constexpr):
    """The +-1 of `formats.rotated.signs`: an integer hash of index, seed and side, modulo 2^32."""
    v = at.to(tl.uint32) * 0x9E3779B1 + (2 * seed + SIDE + 1).to(tl.uint32) * 0x632BE5AB
    v = (v ^ (v >> 16)) * 0x21F0AAAD
    v = v ^ (v >> 15)
    v = (v ^ (v >> 16)) * 0x735A2D97
    v = v ^ (v >> 15)
    return 1.0 - 2.0 * ((v >> 16) & 1).to(tl.float32)


@triton.jit(do_not_specialize=["seed"])
def rotate_kernel(
    x,  # [batch, size]
    y,  # [batch, size], or f32 [batch, 16, padded / 16]
    size,
    padded,
    seed,
    BLOCK: tl.constexpr,  # of the transform; 0: none
    SIDE: tl.constexpr,  # 0: signs, then the transform; 1: the transform, then signs
    TILED: tl.constexpr,
    SCALE: tl.constexpr,  # 1 / sqrt(BLOCK)
    AT_ONCE: tl.constexpr,
):
    line = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    v = tl.load(x + line * size + at, mask=at < size, other=0.0).to(tl.float32)
    if BLOCK > 0:
        sign = _signs(at, seed, SIDE)
        if SIDE == 0:
            v *= sign
        BITS: tl.constexpr = (
            (BLOCK > 1) + (BLOCK > 2) + (BLOCK > 4) + (BLOCK > 8) + (BLOCK > 16) + (BLOCK > 32) + (BLOCK > 64)
        )
        for _ in tl.static_range(BITS):
            # The highest bit of the place in a block is transformed and becomes the lowest; after BITS turns all are back.
            a, b = tl.split(tl.permute(tl.reshape(v, [AT_ONCE // BLOCK, 2, BLOCK // 2]), (0, 2, 1)))
            v = tl.reshape(tl.join(a + b, a - b), [AT_ONCE])
        v *= SCALE
        if SIDE == 1:
            v *= sign
    if TILED:
        tl.store(y + line * padded + (at % 16) * (padded // 16) + at // 16, v, mask=at < padded)
    else:
        tl.store(y + line * size + at, v.to(y.dtype.element_ty), mask=at < size)


def rotate_spec(
    batch: int, size: int, block: int, side: int, inside: torch.dtype, out: torch.dtype, tiled: bool
) -> KernelSpec:
    """The launch for activations [batch, size] of dtype `inside`; float32 in tiles of 16 columns when `tiled`."""
    padded = -(-size // 16) * 16
    name = f"rotate{block}_{side}_{pointer_type(inside)[1:]}_{pointer_type(out)[1:]}"
    return KernelSpec(
        name=name + ("t" if tiled else ""),
        fn=rotate_kernel,
        signature={
            "x": pointer_type(inside),
            "y": pointer_type(out),
            "size": "i32",
            "padded": "i32",
            "seed": "i32",
        },
        constants={
            "BLOCK": block,
            "SIDE": side,
            "TILED": tiled,
            "SCALE": block**-0.5 if block else 1.0,
            "AT_ONCE": _AT_ONCE,
        },
        divisible=("x", "y", "padded", *(("size",) if size % 16 == 0 else ())),
        num_warps=4,
        num_stages=1,
        batch=batch,
        kind="rotate",
        grid=(triton.cdiv(padded, _AT_ONCE), batch, 1),
    )


def rotate(x: Tensor, params: Params | None, side: int, dtype: torch.dtype, tiled: bool = False) -> Tensor:
    """x [batch, size] turned by `params` (None: not at all) on its input (0) or output (1) side, as `dtype`.

    tiled: float32 [batch, 16, tiles], the order of the trellis kernels.
    """
    batch, size = x.shape
    block = 0 if params is None else (params.block_out if side else params.block_in)
    spec = rotate_spec(batch, size, block, side, x.dtype, dtype, tiled)
    padded = -(-size // 16) * 16
    y = torch.empty((batch, 16, padded // 16) if tiled else (batch, size), dtype=dtype, device=x.device)
    launch(spec, x, y, size, padded, 0 if params is None else params.seed)
    return y
