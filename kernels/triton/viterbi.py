# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The Viterbi search of kernels/torch/viterbi.py on a GPU: the same codes, bit for bit.

A program (one thread block) searches TILES tiles at a time, one step after the other. At a step a thread owns groups of
R = 2^KMAX consecutive states s = (group << KMAX) | row, KMAX the largest step: they are reduced over the row to one new
entry of M, or to two (the halves) when the next step shifts out one bit less. So M and the codebook lie in memory as
[row, column]: threads beside each other read numbers beside each other. M stays in the caches; the back-pointers, a
byte for each entry of M, go through device memory once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nstf.kernels.torch.viterbi import SEAM, STATE_BITS, TILE, check

# The share of the free device memory that the back-pointers may take.
SCRATCH_SHARE = 0.5
# Rows whose loads are issued together.
UNROLL = 8


@triton.jit
def _step_bits(t, quarter_bits):
    at = t & 3
    return ((at + 1) * quarter_bits) // 4 - (at * quarter_bits) // 4


@triton.jit
def _nearest_row(
    x,
    codebook,
    m,
    groups: tl.constexpr,
    stride: tl.constexpr,
    count: tl.constexpr,
    shape: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """The least fma(d, d, M) over the next `count` rows, and which of them it is: the lowest on ties."""
    best = tl.full(shape, float("inf"), tl.float32)
    arg = tl.zeros(shape, tl.int32)
    unroll: tl.constexpr = count if count < UNROLL else UNROLL
    for part in range(count // unroll):
        for i in tl.static_range(unroll):
            row = part * unroll + i
            d = x - tl.load(codebook + row * groups, eviction_policy="evict_last")
            known = tl.load(m + row * stride)
            cost = tl.fma(d, d, tl.broadcast_to(known, shape))
            better = cost < best
            best = tl.where(better, cost, best)
            arg = tl.where(better, row, arg)
    return best, arg


@triton.jit
def _previous(state, k, oldest, UNIFORM: tl.constexpr, KMAX: tl.constexpr, BITS: tl.constexpr):
    """s_{t-1} from s_t: [TILES]. k: the bits of step t; oldest: pointers to the back-pointers of its entries of M."""
    group = state & ((1 << (BITS - k)) - 1)
    at = group
    if not UNIFORM:
        if k < KMAX:  # stored as two halves
            at = (group & 1) * (1 << (BITS - KMAX)) + (group >> 1)
    return (group << k) | tl.load(oldest + at).to(tl.int32)


@triton.jit(do_not_specialize=["tiles", "quarter_bits"])
def _search(
    targets,  # f32 [tiles, 256]
    codebook,  # f32 [2^KMAX, 2^(16 - KMAX)]: of state (column << KMAX) | row
    codes,  # u8 [tiles, 2 * quarter_bits * 4]
    costs,  # f32 [programs * TILES, 2, entries of M]
    back,  # u8 [programs * TILES, 255, entries of M]
    states,  # i32 [programs * TILES, 256]
    tiles,
    quarter_bits,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    SEAM: tl.constexpr,
    KMAX: tl.constexpr,  # the largest step
    UNIFORM: tl.constexpr,  # all steps are KMAX; else some are KMAX - 1
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of M at a time
    REUSE: tl.constexpr,  # groups that share a column of M and are done together
    UNROLL: tl.constexpr,
):
    ROWS: tl.constexpr = 1 << KMAX
    GROUPS: tl.constexpr = 1 << (BITS - KMAX)
    ENTRIES: tl.constexpr = GROUPS if UNIFORM else 2 * GROUPS
    STRIDE: tl.constexpr = ENTRIES // ROWS
    CHUNKS: tl.constexpr = GROUPS // (REUSE * BLOCK)
    SHAPE: tl.constexpr = (REUSE, TILES, BLOCK)
    REDUCE: tl.constexpr = 1024
    MAX_BYTES: tl.constexpr = 256
    part = tl.arange(0, REUSE)[:, None, None] * (GROUPS // REUSE)
    slot = tl.arange(0, TILES)
    lane = tl.arange(0, BLOCK)[None, None, :]
    bits_0 = quarter_bits // 4

    first_slot = tl.program_id(0).to(tl.int64) * TILES
    costs += first_slot * (2 * ENTRIES)
    back += first_slot * ((TILE - 1) * ENTRIES)
    states += first_slot * TILE
    slot_costs = slot[None, :, None] * (2 * ENTRIES)
    slot_back = slot.to(tl.int64) * ((TILE - 1) * ENTRIES)
    reduce = tl.arange(0, REDUCE)[None, :]
    reduce_costs = costs + slot[:, None] * (2 * ENTRIES) + reduce

    for block in range(tl.program_id(0), tl.cdiv(tiles, TILES), tl.num_programs(0)):
        tile = tl.minimum(block * TILES + slot, tiles - 1)
        tile_targets = targets + tile.to(tl.int64)[None, :, None] * TILE
        seam = tl.zeros([TILES], tl.int32)
        # First around the seam, from nowhere, to find the state there; then the whole tile from that state.
        for whole in range(2):
            start = (seam >> bits_0)[:, None]
            start = (start & (ROWS - 1)) * STRIDE + (start >> KMAX)
            for i in range(ENTRIES // REDUCE):
                other = tl.where(whole == 1, float("inf"), 0.0)
                tl.store(reduce_costs + i * REDUCE, tl.where(reduce + i * REDUCE == start, 0.0, other))
            tl.debug_barrier()

            first = tl.where(whole == 1, 0, -SEAM)
            steps = tl.where(whole == 1, TILE - 1, 2 * SEAM)
            for step in range(steps):
                t = first + step
                odd = step & 1
                x = tl.load(tile_targets + (t & (TILE - 1)))
                columns = STRIDE
                shorter = False
                if not UNIFORM:
                    columns = 1 << (BITS - KMAX - _step_bits(t, quarter_bits))
                    shorter = _step_bits(t + 1, quarter_bits) < KMAX
                m_from = costs + slot_costs + odd * ENTRIES
                m_to = costs + slot_costs + (1 - odd) * ENTRIES
                oldest = back + slot_back[None, :, None] + step * ENTRIES
                for i in range(CHUNKS):
                    # Back and forth: what was read last is in the cache.
                    chunk = tl.where(odd == 1, CHUNKS - 1 - i, i)
                    base = chunk * BLOCK + lane
                    group = base + part
                    column = tl.max_contiguous(tl.multiple_of(base & (columns - 1), (1, 1, 4)), (1, 1, 4))
                    if UNIFORM:
                        best, arg = _nearest_row(
                            x, codebook + group, m_from + column, GROUPS, STRIDE, ROWS, SHAPE, UNROLL
                        )
                        tl.store(m_to + (group & (ROWS - 1)) * STRIDE + (group >> KMAX), best)
                        tl.store(oldest + group, arg.to(tl.uint8), cache_modifier=".cs")
                    else:
                        HALF: tl.constexpr = ROWS // 2
                        best, arg = _nearest_row(
                            x, codebook + group, m_from + column, GROUPS, STRIDE, HALF, SHAPE, UNROLL
                        )
                        best_2, arg_2 = _nearest_row(
                            x, codebook + group + HALF * GROUPS, m_from + column + HALF * STRIDE,
                            GROUPS, STRIDE, HALF, SHAPE, UNROLL,
                        )  # fmt: skip
                        if shorter:
                            entry = group * 2
                            to = m_to + (entry & (ROWS - 1)) * STRIDE + (entry >> KMAX)
                            tl.store(to, best)
                            tl.store(to + STRIDE, best_2)
                            tl.store(oldest + group, arg.to(tl.uint8), cache_modifier=".cs")
                            tl.store(oldest + GROUPS + group, arg_2.to(tl.uint8), cache_modifier=".cs")
                        else:
                            better = best_2 < best
                            best = tl.where(better, best_2, best)
                            arg = tl.where(better, arg_2 + HALF, arg)
                            tl.store(m_to + (group & (ROWS - 1)) * STRIDE + (group >> KMAX), best)
                            tl.store(oldest + group, arg.to(tl.uint8), cache_modifier=".cs")
                tl.debug_barrier()

            if whole == 0:
                # After 2 * SEAM steps, an even number, M lies in the first buffer.
                best = tl.full([TILES, REDUCE], float("inf"), tl.float32)
                arg = tl.zeros([TILES, REDUCE], tl.int32)
                for i in range(ENTRIES // REDUCE):
                    cost = tl.load(reduce_costs + i * REDUCE)
                    at = reduce + i * REDUCE
                    entry = ((at % STRIDE) << KMAX) | (at // STRIDE)
                    better = (cost < best) | ((cost == best) & (entry < arg))
                    best = tl.where(better, cost, best)
                    arg = tl.where(better, entry, arg)
                least = tl.min(best, 1)
                # The entry stands for the states that share it: the low bits of the state one step later.
                seam = tl.min(tl.where(best == least[:, None], arg, 1 << BITS), 1)
                for i in range(SEAM + 1):
                    oldest = back + slot_back + (2 * SEAM - 1 - i) * ENTRIES
                    seam = _previous(seam, _step_bits(SEAM - i, quarter_bits), oldest, UNIFORM, KMAX, BITS)
                tl.debug_barrier()

        state = seam
        for i in range(TILE - 1):
            t = TILE - 1 - i
            tl.store(states + slot * TILE + t, state)
            state = _previous(
                state, _step_bits(t, quarter_bits), back + slot_back + (t - 1) * ENTRIES, UNIFORM, KMAX, BITS
            )
        tl.store(states + slot * TILE, state)
        tl.debug_barrier()
        # Byte n lies in the state of the first step that ends at or after bit 8 n + 8.
        byte = tl.arange(0, MAX_BYTES)[None, :]
        step = (32 * (byte + 1) + quarter_bits - 1) // quarter_bits - 1
        end = (step + 1) * quarter_bits // 4
        live = (byte < 8 * quarter_bits) & (slot[:, None] < tiles - block * TILES)
        value = tl.load(states + slot[:, None] * TILE + step, mask=live, other=0) >> (8 * byte + BITS - end)
        out = codes + tile.to(tl.int64)[:, None] * (8 * quarter_bits) + byte
        tl.store(out, (value & 255).to(tl.uint8), mask=live)


@dataclass(frozen=True)
class Launch:
    """How the search is laid out on the device. The codes do not depend on it."""

    tiles: int  # searched by one program at a time; they share the reads of the codebook
    block: int  # columns of M at a time
    reuse: int  # groups that share a column of M and are done together
    warps: int
    programs: int  # per multiprocessor


def viterbi(targets: Tensor, quarter_bits: int, codebook: Tensor, launch: Launch | None = None) -> Tensor:
    """Codes of the tail-biting path nearest to each tile: targets [tiles, 256] -> uint8 [tiles, 8 quarter_bits].

    Works in up to SCRATCH_SHARE of the free device memory. Raises ValueError as kernels.torch.viterbi.check does.
    """
    check(targets, quarter_bits, codebook)
    tiles, device = targets.shape[0], targets.device
    codes = torch.empty(tiles, 8 * quarter_bits, dtype=torch.uint8, device=device)
    if tiles == 0:
        return codes
    largest = -(-quarter_bits // 4)
    uniform = quarter_bits % 4 == 0
    entries = (1 << (STATE_BITS - largest)) * (1 if uniform else 2)
    processors, free = 1, 1 << 40
    if targets.is_cuda:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    launch = launch or layout(tiles, quarter_bits, processors)
    if targets.is_cuda:
        free = torch.cuda.mem_get_info(device)[0]
    programs = min(
        -(-tiles // launch.tiles),
        processors * launch.programs,
        max(1, int(SCRATCH_SHARE * free) // (launch.tiles * (TILE - 1) * entries)),
    )
    held = programs * launch.tiles
    _search[(programs,)](
        targets.contiguous(),
        codebook.view(-1, 1 << largest).T.contiguous(),
        codes,
        torch.empty(held, 2, entries, device=device),
        torch.empty(held, TILE - 1, entries, dtype=torch.uint8, device=device),
        torch.empty(held, TILE, dtype=torch.int32, device=device),
        tiles,
        quarter_bits,
        BITS=STATE_BITS,
        TILE=TILE,
        SEAM=SEAM,
        KMAX=largest,
        UNIFORM=uniform,
        TILES=launch.tiles,
        BLOCK=launch.block,
        REUSE=launch.reuse,
        UNROLL=UNROLL,
        num_warps=launch.warps,
        num_stages=1,
    )
    return codes


def layout(tiles: int, quarter_bits: int, processors: int) -> Launch:
    """The fastest launch that was measured."""
    largest = -(-quarter_bits // 4)
    groups = 1 << (STATE_BITS - largest)
    return Launch(tiles=1, block=min(groups, 4096), reuse=1, warps=16, programs=1)
