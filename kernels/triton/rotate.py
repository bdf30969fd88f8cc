# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""Activations into the randomised Hadamard basis of a `rotated` matrix, and results out of it.

One small launch before the product and, for matrices whose rows are rotated too, one after. The transform is computed in
float32 with signs hashed from the index, so nothing is read but the activations. For a trellis the turned activations may be
left in the order its kernel for one column after another reads them in: column c of every tile of 16 beside those of the
other tiles.

A warp of 32 lanes has 128 neighbours, the largest block, four in each lane: what differs by up to 16 in the index is
exchanged between lanes, what differs by 32 or 64 lies in one. So nothing passes through local memory, and nobody waits.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.formats.rotated import Params
from nstf.kernels.triton.launching import hardware_of, launch, multiples, overlap_options, overlaps
from nstf.kernels.triton.spec import KernelSpec, pointer_type

# Numbers of a lane.
RUNS = tl.constexpr(4)
# Of a program: two warps.
_AT_ONCE = 256
# Rows of a launch: the limit of a CUDA grid's second axis.
_MOST_ROWS = 65535


@triton.jit
def _signs(at, seed, SIDE: tl.constexpr):
    """The +-1 of `formats.rotated.signs`: an integer hash of index, seed and side, modulo 2^32."""
    v = at.to(tl.uint32) * 0x9E3779B1 + (2 * seed + SIDE + 1).to(tl.uint32) * 0x632BE5AB
    v = (v ^ (v >> 16)) * 0x21F0AAAD
    v = v ^ (v >> 15)
    v = (v ^ (v >> 16)) * 0x735A2D97
    v = v ^ (v >> 15)
    return 1.0 - 2.0 * ((v >> 16) & 1).to(tl.float32)


@triton.jit
def _exchanged(x, M: tl.constexpr, N: tl.constexpr, HARDWARE: tl.constexpr):
    """x [N], a number of each lane: what the lane has whose place differs by M."""
    if HARDWARE == 1:
        return tl.inline_asm_elementwise(
            "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r", [x, M], tl.float32, True, 1
        )
    else:
        low, high = tl.split(tl.permute(tl.reshape(x, [N // (2 * M), 2, M]), (0, 2, 1)))
        return tl.reshape(tl.permute(tl.join(high, low), (0, 2, 1)), [N])


@triton.jit
def _place_of(N: tl.constexpr):
    """[N]: where the first of the four numbers of each lane stands; the others follow 32 apart."""
    i = tl.arange(0, N)
    return i // 32 * 128 + i % 32


@triton.jit
def _turned(
    v, at, seed, BLOCK: tl.constexpr, SIDE: tl.constexpr, SCALE: tl.constexpr, N: tl.constexpr, HARDWARE: tl.constexpr
):  # fmt: skip
    """Four float32 [N] each, whose indices are at, at + 32, at + 64 and at + 96, in another basis.

    SIDE 0: signs, then the transform; 1: the transform, then signs; 2: the inverse of 0, the transform and then its signs.
    BLOCK: of the transform, 32, 64 or 128; SCALE: 1 / its root.
    """
    lane = tl.arange(0, N) % 32
    signs = ()
    for r in tl.static_range(4):
        signs = signs + (_signs(at + 32 * r, seed, SIDE % 2) * SCALE,)
    if SIDE == 0:
        v = (v[0] * signs[0], v[1] * signs[1], v[2] * signs[2], v[3] * signs[3])
    if BLOCK > 32:
        v = (v[0] + v[1], v[0] - v[1], v[2] + v[3], v[2] - v[3])
    if BLOCK > 64:
        v = (v[0] + v[2], v[1] + v[3], v[0] - v[2], v[1] - v[3])
    for b in tl.static_range(5):
        own = tl.where((lane >> b) & 1 == 1, -1.0, 1.0)
        found = ()
        for r in tl.static_range(4):
            found = found + (v[r] * own + _exchanged(v[r], 1 << b, N, HARDWARE),)
        v = found
    if SIDE > 0:
        v = (v[0] * signs[0], v[1] * signs[1], v[2] * signs[2], v[3] * signs[3])
    return v


@triton.jit(do_not_specialize=["seed"])
def rotate_kernel(
    x,  # [batch, size]
    y,  # [batch, size], or f32 [batch, 16, padded / 16]
    size,
    padded,
    seed,
    BLOCK: tl.constexpr,  # of the transform; 0: none
    SIDE: tl.constexpr,
    TILED: tl.constexpr,
    SCALE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HARDWARE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    N: tl.constexpr = AT_ONCE // 4
    line = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * AT_ONCE + _place_of(N)
    if PDL:
        tl.extra.cuda.gdc_wait()
    v = ()
    for r in tl.static_range(4):
        v = v + (tl.load(x + line * size + at + 32 * r, mask=at + 32 * r < size, other=0.0).to(tl.float32),)
    if BLOCK > 0:
        v = _turned(v, at, seed, BLOCK, SIDE, SCALE, N, HARDWARE)
    for r in tl.static_range(4):
        k = at + 32 * r
        if TILED:
            tl.store(y + line * padded + (k % 16) * (padded // 16) + k // 16, v[r], mask=k < padded)
        else:
            tl.store(y + line * size + k, v[r].to(y.dtype.element_ty), mask=k < size)


@lru_cache(maxsize=1024)
def rotate_spec(
    batch: int,
    size: int,
    block: int,
    side: int,
    inside: torch.dtype,
    out: torch.dtype,
    tiled: bool,
    arch: str,
) -> KernelSpec:
    """The launch for activations [batch, size] of dtype `inside`; float32 in tiles of 16 columns when `tiled`."""
    padded = -(-size // 16) * 16
    name = f"rotate{block}_{side}_{pointer_type(inside)[1:]}_{pointer_type(out)[1:]}"
    sizes = {"size": size, "padded": padded}
    return KernelSpec(
        name=name + ("t" if tiled else ""),
        fn=rotate_kernel,
        signature={
            "x": pointer_type(inside),
            "y": pointer_type(out),
            **dict.fromkeys(sizes, "i32"),
            "seed": "i32",
        },
        constants={
            "BLOCK": block,
            "SIDE": side,
            "TILED": tiled,
            "SCALE": block**-0.5 if block else 1.0,
            "AT_ONCE": _AT_ONCE,
            "HARDWARE": hardware_of(arch),
            "PDL": overlaps(arch),
        },
        divisible=("x", "y", *multiples(sizes)),
        num_warps=_AT_ONCE // 128,
        num_stages=1,
        options=overlap_options(arch),
        batch=batch,
        kind="rotate",
        grid=(triton.cdiv(padded, _AT_ONCE), batch, 1),
    )


def rotate(
    x: Tensor, params: Params | None, side: int, dtype: torch.dtype, arch: str, tiled: bool = False
) -> Tensor:
    """x [batch, size] turned by `params` (None: not at all) on its input (0) or output (1) side, as `dtype`. Side 2 takes
    rows of the stored matrix back into the basis of the dense one (`formats.rotated.from_basis`).

    tiled: float32 [batch, 16, tiles], the order of the trellis kernels.
    """
    if len(x) > _MOST_ROWS:
        return torch.cat([rotate(part, params, side, dtype, arch, tiled) for part in x.split(_MOST_ROWS)])
    batch, size = x.shape
    block = 0 if params is None else (params.block_out if side == 1 else params.block_in)
    spec = rotate_spec(batch, size, block, side, x.dtype, dtype, tiled, arch)
    padded = -(-size // 16) * 16
    y = torch.empty((batch, 16, padded // 16) if tiled else (batch, size), dtype=dtype, device=x.device)
    launch(spec, x, y, size, padded, 0 if params is None else params.seed)
    return y
