# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""States of a trellis on NVIDIA, for trellis_gemm.py and trellis_bytes.py: a lane takes two neighbouring rows of a tile.

Two rows are 8 q bits (q: four times the bits per weight), a multiple of 32 at whole bits a weight: what follows in a row is
then at places known at compile time, and the words of the eight lanes of a tile lie side by side.
"""

import triton
import triton.language as tl


@triton.jit
def _funnel(low, high, SHIFT: tl.constexpr, HARDWARE: tl.constexpr):
    """Bits SHIFT to SHIFT + 31 of two words."""
    if HARDWARE == 1:
        # Written out, so that a shift of one word is shared by the states in it, not merged into a mask for each.
        shift = tl.full([1], SHIFT, tl.uint32)
        return tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, shift], tl.uint32, True, 1
        )
    else:
        return (low >> SHIFT) | (high << (32 - SHIFT))


@triton.jit
def _half(word, BYTE: tl.constexpr, DOT: tl.constexpr, HARDWARE: tl.constexpr):
    """Bits 8 BYTE to 8 BYTE + 15."""
    if DOT and BYTE != 1 and HARDWARE == 1:
        return tl.inline_asm_elementwise(
            "dp2a.lo.u32.u32 $0, $1, $2, 0;",
            "=r,r,r",
            [word, 0x0001 if BYTE == 0 else 0x0100],
            tl.uint32,
            True,
            1,
        )
    elif BYTE == 1:
        if HARDWARE == 1:
            return tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, 0, 0x4421;", "=r,r", [word], tl.uint32, True, 1
            )
        else:
            return (word >> 8) & 0xFFFF
    elif BYTE == 2:
        return word >> 16
    else:
        return word & 0xFFFF


@triton.jit
def state(words, P: tl.constexpr, QUARTER: tl.constexpr, DOT: tl.constexpr, HARDWARE: tl.constexpr):
    """The state of place P of two rows. A shift serves the states at its bit and one and two bytes above."""
    OFF: tl.constexpr = 16 if QUARTER % 4 == 0 else 0
    AT: tl.constexpr = ((P + 1) * QUARTER) // 4
    S: tl.constexpr = (AT + OFF) % 32
    if S % 8 == 0 and S < 24:
        return _half(words[(AT + OFF) // 32], S // 8, DOT, HARDWARE)
    else:
        FROM: tl.constexpr = AT // 24 * 24 + AT % 8 + OFF
        LAST: tl.constexpr = FROM // 32 + 1 == len(words)
        low = words[FROM // 32]
        high = low if LAST else words[FROM // 32 + (0 if LAST else 1)]
        return _half(_funnel(low, high, FROM % 32, HARDWARE), (AT + OFF - FROM) // 8, DOT, HARDWARE)


@triton.constexpr_function
def words_of_pair(quarter):
    """The most words that two rows and the 16 bits before them touch, which begin at a multiple of 16 bits or, where the
    quarters of a bit are odd, of 8."""
    return (8 * quarter + 16 + (16 if quarter % 2 == 0 else 24) + 31) // 32


@triton.jit
def lane_words(group, QUARTER: tl.constexpr, S: tl.constexpr, GROUPS: tl.constexpr):
    """[32 S] where the words of two neighbouring rows of a tile begin for each lane: the first, the others, the last."""
    i = tl.arange(0, 32 * S)
    tile = ((group + i // 32 * GROUPS) * 4 + i % 4) * (2 * QUARTER)
    first = (i // 4 % 8 * (8 * QUARTER) + (64 * QUARTER - 16)) // 32
    # The stream is circular.
    SIZE: tl.constexpr = 2 * QUARTER
    last = first + words_of_pair(QUARTER) - 1
    return tile + first % SIZE, tile + (first + 1) % SIZE, tile + last % SIZE


@triton.jit
def _load(at, ct, across, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=ct < across, other=0)


@triton.jit
def pair_words(
    codes,
    lanes,
    group,
    across,
    C: tl.constexpr,
    QUARTER: tl.constexpr,
    S: tl.constexpr,
    GROUPS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """[32 S] each: the words of two rows of a tile and the 16 bits before them, sixteen rows by four tiles for each warp."""
    i = tl.arange(0, 32 * S)
    ct = (group + C + i // 32 * GROUPS) * 4 + i % 4
    ON: tl.constexpr = C * 8 * QUARTER
    found = (_load(codes + lanes[0] + ON, ct, across, EVEN),)
    if QUARTER % 8 == 0:
        wide = (codes + lanes[1]).to(tl.pointer_type(tl.uint64)) + ON // 2
        for k in tl.static_range(QUARTER // 8):
            two = _load(wide + k, ct, across, EVEN)
            found = found + (two.to(tl.uint32), (two >> 32).to(tl.uint32))
    elif QUARTER % 4 == 0:
        for k in tl.static_range(QUARTER // 4):
            found = found + (_load(codes + lanes[1] + (ON + k), ct, across, EVEN),)
    else:
        COUNT: tl.constexpr = words_of_pair(QUARTER)
        for k in tl.static_range(COUNT - 2):
            found = found + (_load(codes + lanes[1] + (ON + k), ct, across, EVEN),)
        found = found + (_load(codes + lanes[2] + ON, ct, across, EVEN),)
    return found


@triton.jit
def aligned(words, QUARTER: tl.constexpr, S: tl.constexpr, HARDWARE: tl.constexpr):
    """Those words from the first of the 16 bits on; as they are where all pairs of rows begin at bit 16."""
    if QUARTER % 4 == 0:
        return words
    else:
        shift = ((tl.arange(0, 32 * S) // 4 % 8 * (8 * QUARTER) + (64 * QUARTER - 16)) % 32).to(tl.uint32)
        found = ()
        for k in tl.static_range((8 * QUARTER + 16 + 31) // 32):
            if k + 1 < len(words):
                if HARDWARE == 1:
                    word = tl.inline_asm_elementwise(
                        "shf.r.wrap.b32 $0, $1, $2, $3;",
                        "=r,r,r,r",
                        [words[k], words[k + 1], shift],
                        tl.uint32,
                        True,
                        1,
                    )
                else:
                    word = (words[k] >> shift) | ((words[k + 1] << 1) << (31 - shift))
                found = found + (word,)
            else:
                found = found + (words[k] >> shift,)
        return found
