# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The way back of the trellis search: the states of the best path, from costs M that were kept every few steps.

A state and the bits that were shifted out since some earlier step make the state at that step, and all those between. So
the best of the 2^(bits) ways from one kept M to a known state is found by trying them all, side by side, in float32 with
the targets and the codebook as they are. Whatever it finds is a path of the trellis, however coarse M is.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def bits_between(low, high, Q):
    """The bits that the steps after `low` up to `high` shift in."""
    return sum((t % 4 + 1) * Q // 4 - t % 4 * Q // 4 for t in range(low + 1, high + 1))


@triton.jit
def _cheapest(cost, CONE: tl.constexpr):
    """Which of 2^CONE costs is the least, all but the last CONE bits compared: the first of equals."""
    bits = cost.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # float32 numbers in order, negative ones too
    key = (ordered & -(1 << CONE)) | tl.arange(0, 1 << CONE)
    return tl.min(key, 0) & ((1 << CONE) - 1)


@triton.jit
def _back(
    targets,
    codebook,
    m,
    states,
    state,
    t,
    LOW: tl.constexpr,
    COUNT: tl.constexpr,
    Q: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Stores the states at t + LOW and the COUNT - 1 steps after it, given the one after these and M before t + LOW.

    Returns the first of them and the last. t is a multiple of 4.
    """
    MASK: tl.constexpr = (1 << BITS) - 1
    CONE: tl.constexpr = bits_between(LOW, LOW + COUNT, Q)
    ENTRY: tl.constexpr = (1 << (BITS - bits_between(LOW - 1, LOW, Q))) - 1
    ways = (state << CONE) | tl.arange(0, 1 << CONE)
    cost = tl.load(m + (ways & ENTRY)).to(tl.float32)
    for n in tl.static_range(COUNT):
        x = tl.load(targets + ((t + LOW + n) & (TILE - 1)))
        d = x - tl.load(codebook + ((ways >> bits_between(LOW, LOW + n, Q)) & MASK))
        cost = tl.fma(d, d, cost)
    way = (state << CONE) | _cheapest(cost, CONE)
    for n in tl.static_range(COUNT):
        at = states + ((t + LOW + n) & (TILE - 1))
        tl.store(at, (way >> bits_between(LOW, LOW + n, Q)) & MASK)
    return way & MASK, (way >> bits_between(LOW, LOW + COUNT - 1, Q)) & MASK


@triton.jit(do_not_specialize_on_alignment=["codes"])
def back(
    targets,  # f32 [tiles, TILE]
    codebook,  # f32 [65536]
    seams,  # i32 [tiles]: the state before the first step
    ends,  # i32 [tiles]: the entry of M to come from, around the seam
    history,  # f16 [tiles, TILE / EVERY, entries]: M before every EVERY-th step
    states,  # i32 [tiles, TILE]
    codes,  # u8 [tiles, 8 Q]
    WHOLE: tl.constexpr,  # False: finds seams; True: finds codes
    Q: tl.constexpr,  # quarter bits per weight
    SEAM: tl.constexpr,
    EVERY: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    ENTRIES: tl.constexpr = 1 << (BITS - Q // 4)
    SLOTS: tl.constexpr = 4 // EVERY  # of four steps
    tile = tl.program_id(0).to(tl.int64)
    targets += tile * TILE
    states += tile * TILE
    history += tile * (TILE // EVERY * ENTRIES)
    first = 0
    begin = 0
    blocks = TILE // 4
    if WHOLE:
        state = tl.load(seams + tile)
        tl.store(states + TILE - 1, state)
        # The last block holds the last state already.
        blocks -= 1
        m = history + (blocks * SLOTS) * ENTRIES
        if EVERY > 1:
            last = m + (SLOTS - 1) * ENTRIES
            state, _ = _back(targets, codebook, last, states, state, -4, 4 - EVERY, EVERY - 1, Q, BITS, TILE)
        for n in tl.static_range(1, SLOTS):
            slot = m + (SLOTS - 1 - n) * ENTRIES
            state, _ = _back(
                targets, codebook, slot, states, state, -4, 4 - (n + 1) * EVERY, EVERY, Q, BITS, TILE
            )
    else:
        # An entry of M stands for the states that share it: the low bits of the state one step later.
        state = tl.load(ends + tile)
        begin = -SEAM
        blocks = SEAM // 2
        first = SEAM // 4
    for i in range(blocks - first):
        block = blocks - 1 - i
        for n in tl.static_range(SLOTS):
            m = history + (block * SLOTS + SLOTS - 1 - n) * ENTRIES
            state, _ = _back(
                targets,
                codebook,
                m,
                states,
                state,
                begin + block * 4,
                4 - (n + 1) * EVERY,
                EVERY,
                Q,
                BITS,
                TILE,
            )
    if not WHOLE:
        m = history + (SEAM // 4 * SLOTS - 1) * ENTRIES
        _, seam = _back(targets, codebook, m, states, state, -4, 4 - EVERY, EVERY, Q, BITS, TILE)
        tl.store(seams + tile, seam)
    else:
        tl.debug_barrier()
        # Byte n lies in the state of the first step that ends at or after bit 8 n + 8.
        byte = tl.arange(0, TILE)
        step = (32 * (byte + 1) + Q - 1) // Q - 1
        live = byte < 8 * Q
        value = tl.load(states + step, mask=live, other=0) >> (8 * byte + BITS - (step + 1) * Q // 4)
        tl.store(codes + tile * (8 * Q) + byte, (value & 255).to(tl.uint8), mask=live)
