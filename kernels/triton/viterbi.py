# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The Viterbi search of kernels/torch/viterbi.py on a GPU: the same codes, bit for bit.

For GPUs that viterbi_half.py does not run on, AMD's above all; on those that it does it is the exact search to compare with.

A program (one thread block) searches one tile at a time, one step after the other. At a step a thread owns 4 groups of
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

# The share of the free device memory that the back-pointers may take: up to 8 MiB for each program.
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
    block: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """The least fma(d, d, M) over the next `count` rows, and which of them it is: the lowest on ties."""
    best = tl.full([block], float("inf"), tl.float32)
    arg = tl.zeros([block], tl.int32)
    unroll: tl.constexpr = count if count < UNROLL else UNROLL
    for part in range(count // unroll):
        for i in tl.static_range(unroll):
            row = part * unroll + i
            d = x - tl.load(codebook + row * groups, eviction_policy="evict_last")
            cost = tl.fma(d, d, tl.load(m + row * stride))
            better = cost < best
            best = tl.where(better, cost, best)
            arg = tl.where(better, row, arg)
    return best, arg


@triton.jit
def _quarters(values, block: tl.constexpr):
    """The four interleaved parts of a vector; a thread that holds 4 numbers in a row keeps them."""
    even, odd = tl.split(tl.reshape(values, [block // 4, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _scatter(costs, at, values, block: tl.constexpr):
    """costs[at] = values. Stored in quarters: as one, Triton would first hand the numbers to other threads."""
    at_a, at_b, at_c, at_d = _quarters(at, block)
    a, b, c, d = _quarters(values, block)
    tl.store(costs + at_a, a)
    tl.store(costs + at_b, b)
    tl.store(costs + at_c, c)
    tl.store(costs + at_d, d)


@triton.jit
def _previous(state, k, oldest, UNIFORM: tl.constexpr, KMAX: tl.constexpr, BITS: tl.constexpr):
    """s_{t-1} from s_t. k: the bits of step t; oldest: the back-pointers of its entries of M."""
    entry = state & ((1 << (BITS - k)) - 1)
    at = entry
    if not UNIFORM:
        if k < KMAX:  # stored as two halves
            at = (entry & 1) * (1 << (BITS - KMAX)) + (entry >> 1)
    return (entry << k) | tl.load(oldest + at).to(tl.int32)


@triton.jit(do_not_specialize=["tiles", "quarter_bits"])
def _search(
    targets,  # f32 [tiles, 256]
    codebook,  # f32 [2^KMAX, 2^(16 - KMAX)]: of state (column << KMAX) | row
    codes,  # u8 [tiles, 8 * quarter_bits]
    costs,  # f32 [programs, 2, entries of M]
    back,  # u8 [programs, 255, entries of M]
    states,  # i32 [programs, 256]
    tiles,
    quarter_bits,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    SEAM: tl.constexpr,
    KMAX: tl.constexpr,  # the largest step
    UNIFORM: tl.constexpr,  # all steps are KMAX; else some are KMAX - 1
    BLOCK: tl.constexpr,  # groups at a time
    UNROLL: tl.constexpr,
):
    ROWS: tl.constexpr = 1 << KMAX
    HALF: tl.constexpr = ROWS // 2
    GROUPS: tl.constexpr = 1 << (BITS - KMAX)
    ENTRIES: tl.constexpr = GROUPS if UNIFORM else 2 * GROUPS
    STRIDE: tl.constexpr = ENTRIES // ROWS
    CHUNKS: tl.constexpr = GROUPS // BLOCK
    REDUCE: tl.constexpr = 1024
    lane = tl.arange(0, BLOCK)
    wide = tl.arange(0, REDUCE)
    first_bits = quarter_bits // 4

    program = tl.program_id(0).to(tl.int64)
    costs += program * (2 * ENTRIES)
    back += program * ((TILE - 1) * ENTRIES)
    states += program * TILE

    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile_targets = targets + tl.cast(tile, tl.int64) * TILE
        seam = tl.full([], 0, tl.int32)
        # First around the seam, from nowhere, to find the state there; then the whole tile from that state.
        for whole in range(2):
            start = seam >> first_bits
            start = (start & (ROWS - 1)) * STRIDE + (start >> KMAX)
            other = tl.where(whole == 1, float("inf"), 0.0)
            for i in range(ENTRIES // REDUCE):
                at = wide + i * REDUCE
                tl.store(costs + at, tl.where(at == start, 0.0, other))
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
                m_from = costs + odd * ENTRIES
                m_to = (1 - odd) * ENTRIES
                oldest = back + step * ENTRIES
                for i in range(CHUNKS):
                    # Back and forth: what was read last is in the cache.
                    group = tl.where(odd == 1, CHUNKS - 1 - i, i) * BLOCK + lane
                    column = tl.max_contiguous(tl.multiple_of(group & (columns - 1), 4), 4)
                    c = codebook + group
                    m = m_from + column
                    if UNIFORM:
                        best, arg = _nearest_row(x, c, m, GROUPS, STRIDE, ROWS, BLOCK, UNROLL)
                        _scatter(costs, m_to + (group & (ROWS - 1)) * STRIDE + (group >> KMAX), best, BLOCK)
                        tl.store(oldest + group, arg.to(tl.uint8), cache_modifier=".cs")
                    else:
                        best, arg = _nearest_row(x, c, m, GROUPS, STRIDE, HALF, BLOCK, UNROLL)
                        c += HALF * GROUPS
                        m += HALF * STRIDE
                        best_2, arg_2 = _nearest_row(x, c, m, GROUPS, STRIDE, HALF, BLOCK, UNROLL)
                        if shorter:
                            entry = group * 2
                            to = m_to + (entry & (ROWS - 1)) * STRIDE + (entry >> KMAX)
                            _scatter(costs, to, best, BLOCK)
                            _scatter(costs, to + STRIDE, best_2, BLOCK)
                            tl.store(oldest + group, arg.to(tl.uint8), cache_modifier=".cs")
                            tl.store(oldest + GROUPS + group, arg_2.to(tl.uint8), cache_modifier=".cs")
                        else:
                            better = best_2 < best
                            best = tl.where(better, best_2, best)
                            arg = tl.where(better, arg_2 + HALF, arg)
                            _scatter(
                                costs, m_to + (group & (ROWS - 1)) * STRIDE + (group >> KMAX), best, BLOCK
                            )
                            tl.store(oldest + group, arg.to(tl.uint8), cache_modifier=".cs")
                tl.debug_barrier()

            if whole == 0:
                # After 2 * SEAM steps, an even number, M lies in the first buffer.
                best = tl.full([REDUCE], float("inf"), tl.float32)
                arg = tl.zeros([REDUCE], tl.int32)
                for i in range(ENTRIES // REDUCE):
                    at = wide + i * REDUCE
                    cost = tl.load(costs + at)
                    entry = ((at % STRIDE) << KMAX) | (at // STRIDE)
                    better = (cost < best) | ((cost == best) & (entry < arg))
                    best = tl.where(better, cost, best)
                    arg = tl.where(better, entry, arg)
                # The entry stands for the states that share it: the low bits of the state one step later.
                seam = tl.min(tl.where(best == tl.min(best, 0), arg, 1 << BITS), 0)
                for i in range(SEAM + 1):
                    oldest = back + (2 * SEAM - 1 - i) * ENTRIES
                    seam = _previous(seam, _step_bits(SEAM - i, quarter_bits), oldest, UNIFORM, KMAX, BITS)
                tl.debug_barrier()

        state = seam
        for i in range(TILE - 1):
            t = TILE - 1 - i
            tl.store(states + t, state)
            oldest = back + (t - 1) * ENTRIES
            state = _previous(state, _step_bits(t, quarter_bits), oldest, UNIFORM, KMAX, BITS)
        tl.store(states, state)
        tl.debug_barrier()
        # Byte n lies in the state of the first step that ends at or after bit 8 n + 8.
        byte = tl.arange(0, TILE)
        step = (32 * (byte + 1) + quarter_bits - 1) // quarter_bits - 1
        end = (step + 1) * quarter_bits // 4
        live = byte < 8 * quarter_bits
        value = tl.load(states + step, mask=live, other=0) >> (8 * byte + BITS - end)
        out = codes + tl.cast(tile, tl.int64) * (8 * quarter_bits) + byte
        tl.store(out, (value & 255).to(tl.uint8), mask=live)


@dataclass(frozen=True)
class Launch:
    """How the search is laid out on the device. The codes do not depend on it."""

    block: int  # groups of states at a time
    threads: int  # of a program
    programs: int  # per multiprocessor


def launch_for(tiles: int, quarter_bits: int, processors: int) -> Launch:
    """A launch for so many tiles on a device of so many multiprocessors.

    From sweeps on an H100 and an H200. Few tiles want all threads on one tile. Many want smaller programs beside each
    other, so that one computes while another waits at its barrier, as far as registers last (fractional rates need
    more) and what they read stays in the cache.
    """
    largest = -(-quarter_bits // 4)
    block = min(1 << (STATE_BITS - largest), 4096)
    if tiles <= processors:
        return Launch(block, 1024, 1)
    if quarter_bits % 4 == 0 and largest > 2:
        block = 2048 if largest == 3 else 1024
    return Launch(block, block // 4, 4096 // block)


def viterbi(targets: Tensor, quarter_bits: int, codebook: Tensor, launch: Launch | None = None) -> Tensor:
    """Codes of the tail-biting path nearest to each tile: targets [tiles, 256] -> uint8 [tiles, 8 quarter_bits].

    Needs up to 255 * 2^(16 - quarter_bits / 4) bytes for each program, and takes no more than SCRATCH_SHARE of the free
    device memory. Raises ValueError as kernels.torch.viterbi.check does.
    """
    check(targets, quarter_bits, codebook)
    tiles, device = targets.shape[0], targets.device
    codes = torch.empty(tiles, 8 * quarter_bits, dtype=torch.uint8, device=device)
    if tiles == 0:
        return codes
    largest, uniform = -(-quarter_bits // 4), quarter_bits % 4 == 0
    entries = (1 << (STATE_BITS - largest)) * (1 if uniform else 2)
    processors, lanes, room = 1, 32, tiles
    if targets.is_cuda:
        properties = torch.cuda.get_device_properties(device)
        processors, lanes = properties.multi_processor_count, properties.warp_size
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
        room = max(1, int(SCRATCH_SHARE * free) // ((TILE - 1) * entries))
    launch = launch or launch_for(tiles, quarter_bits, processors)
    programs = min(tiles, processors * launch.programs, room)
    with torch.cuda.device_of(targets):
        _search[(programs,)](
            targets.contiguous(),
            codebook.view(-1, 1 << largest).T.contiguous(),
            codes,
            torch.empty(programs, 2, entries, device=device),
            torch.empty(programs, TILE - 1, entries, dtype=torch.uint8, device=device),
            torch.empty(programs, TILE, dtype=torch.int32, device=device),
            tiles,
            quarter_bits,
            BITS=STATE_BITS,
            TILE=TILE,
            SEAM=SEAM,
            KMAX=largest,
            UNIFORM=uniform,
            BLOCK=launch.block,
            UNROLL=UNROLL,
            num_warps=launch.threads // lanes,
            num_stages=1,
        )
    return codes
