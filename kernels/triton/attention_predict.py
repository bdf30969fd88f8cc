# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Which key blocks a block of 128 queries computes: antidiagonal sums (XAttention, Xu et al. 2025) as a matrix product.

The definition is runtime/kv_formats.py's `predicted_mass` and `chosen_blocks`. Groups of `stride` queries in reverse order
times groups of `stride` keys are a product with inner dimension stride x size: 1 / (2 stride) of attention's work.
The kernel leaves, for each group of queries and block of keys, the logarithm of the sum of exponentials; the softmax over
blocks, the mean over groups and the choice are a few torch functions of fixed shapes (they can be captured).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.triton.launching import launch
from nstf.kernels.triton.spec import KernelSpec, pointer_type, remembered

BLOCK = 128
LOG2E = 1.4426950408889634
# Blocks of queries whose sums are held at a time: 64 MiB of them for 32 heads at 128k and groups of 16.
AT_ONCE = 64


@triton.jit
def sums_kernel(
    q,  # [heads, blocks 128, SIZE]: whole blocks of queries from block `first` on
    far,  # [KV, far_rows, SIZE]: row p is position p
    near,  # [KV, near_rows, SIZE]: positions near_start ..
    members,  # i32 [kept, 2]: head and KV head of each
    sums,  # f32 [kept, groups of queries, most]: logarithms of sums of exponentials; -inf beyond the diagonal
    first,
    blocks,
    near_start,
    far_rows,
    near_rows,
    most,
    head_stride,
    row_stride,
    near_head_stride,
    scale,  # of q k, times log2(e) / stride
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    M: tl.constexpr,  # groups of queries of a program
    N: tl.constexpr,  # groups of keys of a program
    WIDE: tl.constexpr,
):
    PER: tl.constexpr = 128 // STRIDE  # groups of a block
    head = tl.load(members + tl.program_id(2) * 2)
    kv = tl.load(members + tl.program_id(2) * 2 + 1)
    begin = tl.program_id(0) * M
    key_block = tl.program_id(1) * (N // PER)
    m = begin + tl.arange(0, M)
    b = tl.arange(0, N // PER)
    groups = blocks * PER
    into = sums + (tl.program_id(2).to(tl.int64) * groups + m)[:, None] * most + (key_block + b)[None, :]
    keep = (m < groups)[:, None] & (key_block + b < most)[None, :]
    # Of the last block of queries here; nothing of keys beyond its diagonal is computed.
    highest = first + tl.minimum((begin + M - 1) // PER, blocks - 1)
    if key_block > highest:
        tl.store(into, tl.full([M, N // PER], float("-inf"), tl.float32), mask=keep)
        return
    u = tl.program_id(1) * N + tl.arange(0, N)
    d = tl.arange(0, SIZE)
    from_q = q + head.to(tl.int64) * head_stride
    from_far = far + kv.to(tl.int64) * far_rows * SIZE
    from_near = near + kv.to(tl.int64) * near_head_stride
    row = (
        from_q
        + (tl.minimum(m, groups - 1) * STRIDE + STRIDE - 1).to(tl.int64)[:, None] * row_stride
        + d[None, :]
    )
    # A group of keys lies in one page: a query reads all of it in one form.
    mine = first + m // PER
    old = (u * STRIDE)[None, :] < mine[:, None] * 128 - 64
    any_old = key_block * 128 < highest * 128 - 64
    any_new = (key_block + N // PER) * 128 > (first + begin // PER) * 128 - 64
    acc = tl.zeros([M, N], tl.float32)
    # Places that are not there stand for others, whose sums are not looked at.
    for r in range(tl.where(any_old, STRIDE, 0)):
        x = tl.load(row - r * row_stride)
        at = tl.minimum(u * STRIDE + r, far_rows - 1)
        y = tl.load(from_far + at.to(tl.int64)[:, None] * SIZE + d[None, :])
        if WIDE:
            x = x.to(tl.float32)
            y = y.to(tl.float32)
        acc = tl.dot(x, tl.trans(y), acc, input_precision="ieee")
    if any_new:
        new = tl.zeros([M, N], tl.float32)
        for r in tl.range(0, STRIDE, num_stages=1):
            a = tl.load(row - r * row_stride)
            at_near = tl.minimum(tl.maximum(u * STRIDE + r - near_start, 0), near_rows - 1)
            b_near = tl.load(from_near + at_near.to(tl.int64)[:, None] * SIZE + d[None, :])
            if WIDE:
                a = a.to(tl.float32)
                b_near = b_near.to(tl.float32)
            new = tl.dot(a, tl.trans(b_near), new, input_precision="ieee")
        acc = tl.where(old, acc, new)
    parts = tl.reshape(acc * scale, [M, N // PER, PER])
    top = tl.max(parts, axis=2)
    level = (top + tl.log2(tl.sum(tl.exp2(parts - top[:, :, None]), axis=2))) * 0.6931471805599453
    below = (key_block + b)[None, :] <= (first + m // PER)[:, None]
    tl.store(into, tl.where(below, level, float("-inf")), mask=keep)


@remembered
def sums_spec(
    dtype: torch.dtype,
    size: int,
    stride: int,
    kept: int,
    blocks: int,
    most: int,
    arch: str,
    tile: dict[str, int] | None = None,
) -> KernelSpec:
    """kept: heads; blocks: of queries; most: blocks of keys. `tile` overrides the choice of groups, warps and stages."""
    tile = _tile(arch) | (tile or {})
    kind = pointer_type(dtype)
    per = BLOCK // stride
    types = {"q": kind, "far": kind, "near": kind, "members": "*i32", "sums": "*fp32", "scale": "fp32"}
    constants = {
        "SIZE": size,
        "STRIDE": stride,
        "M": tile["M"],
        "N": tile["N"],
        "WIDE": dtype == torch.bfloat16 and triton.knobs.runtime.interpret,
    }
    names = [name for name in sums_kernel.arg_names if name not in constants]
    return KernelSpec(
        name=f"attention_sums_{kind[1:]}_{size}_{stride}",
        fn=sums_kernel,
        signature={name: types.get(name, "i32") for name in names},
        constants=constants,
        divisible=("q", "far", "near", "members", "sums", "head_stride", "row_stride", "near_head_stride"),
        num_warps=tile["WARPS"],
        num_stages=tile["STAGES"],
        kind="attention_sums",
        grid=(triton.cdiv(blocks * per, tile["M"]), triton.cdiv(most * per, tile["N"]), kept),
    )


def _tile(arch: str) -> dict[str, int]:
    """Not tuned on a card yet: what compiles without spills and fits local memory."""
    if arch.startswith("sm_"):
        return {"M": 128, "N": 128, "WARPS": 8, "STAGES": 3}
    if arch.startswith(("gfx11", "gfx12")):
        return {"M": 64, "N": 64, "WARPS": 8, "STAGES": 1}
    return {"M": 64, "N": 64, "WARPS": 4, "STAGES": 1}


def choose(mass: Tensor, diagonal: Tensor, thresholds: Tensor) -> Tensor:
    """[kept, blocks, most] bool: the fewest key blocks whose mass reaches each head's threshold, the first and the diagonal.

    mass: f32 [kept, blocks, most], 0 beyond the diagonal; diagonal: int64 [blocks]; thresholds: f32 [kept]. Ties go to the
    lower block. Nothing here depends on values on the host.
    """
    ranked, order = mass.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(-1) - ranked
    keep = torch.zeros_like(mass, dtype=torch.bool)
    keep.scatter_(-1, order, before < thresholds[:, None, None])
    keep[..., 0] = True
    at = torch.arange(mass.shape[-1], device=mass.device)
    keep |= at == diagonal[:, None]
    return keep & (at <= diagonal[:, None])


def listed(keep: Tensor) -> tuple[Tensor, Tensor]:
    """(blocks int32 [kept, tiles, most + 1] in order, counts int32 [kept, tiles]) of what `choose` kept.

    What was not kept is written to the last place: of 32 heads at 128k a sort takes milliseconds.
    """
    most = keep.shape[-1]
    number = keep.cumsum(-1, dtype=torch.int32)
    blocks = torch.full((*keep.shape[:-1], most + 1), most, dtype=torch.int32, device=keep.device)
    at = torch.arange(most, device=keep.device, dtype=torch.int32).expand(keep.shape)
    blocks.scatter_(-1, torch.where(keep, number - 1, most).long(), at)
    return blocks, number[..., -1].contiguous()


def predict(
    q: Tensor,
    far: Tensor,
    near: Tensor,
    members: Tensor,
    thresholds: Tensor,
    lengths: Tensor,
    stride: int,
    start: int,
    near_start: int,
    scale: float,
    arch: str,
    tile: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The lists of key blocks for attention_prefill.prefill: (blocks, counts), a tile of 128 queries each.

    q: [heads, count, size], the positions from `start` on; far, near, members, near_start: as for `prefill`, keys of one
    sequence. thresholds: f32 [kept]; lengths: int64 [kept], min_length of each head. Tiles that are no whole block of 128
    queries, or begin before min_length, list all their blocks.
    """
    count = q.shape[1]
    end, kept = start + count, len(members)
    begin, most = start // BLOCK, (end - 1) // BLOCK + 1
    tiles = most - begin
    at = torch.arange(most, device=q.device)
    keep = (at <= (begin + at[:tiles])[:, None]).expand(kept, tiles, most).clone()
    whole, past = -(-start // BLOCK), end // BLOCK
    for first in range(whole, past, AT_ONCE):
        blocks = min(AT_ONCE, past - first)
        # Keys beyond the last of these queries are not looked at.
        seen = first + blocks
        sums = torch.empty(kept, blocks * (BLOCK // stride), seen, device=q.device)
        rows = q[:, first * BLOCK - start :]
        spec = sums_spec(q.dtype, q.shape[-1], stride, kept, blocks, seen, arch, tile)
        launch(
            spec, rows, far, near, members, sums, first, blocks, near_start, far.shape[1], near.shape[1], seen,
            q.stride(0), q.stride(1), near.stride(0), scale * LOG2E / stride,
        )  # fmt: skip
        mass = sums.softmax(-1).view(kept, blocks, -1, seen).mean(2)
        diagonal = at[first:seen]
        chosen = choose(mass, diagonal, thresholds)
        chosen |= ((diagonal * BLOCK + 1)[:, None] < lengths[:, None, None]) & (
            at[:seen] <= diagonal[:, None]
        )
        keep[:, first - begin : seen - begin, :seen] = chosen
    return listed(keep)
