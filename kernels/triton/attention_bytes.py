# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
# Triton adds tuples; it does not unpack them into one.
# ruff: noqa: RUF005
"""Pages of 4 bits (keys by channel, values by position; heads of 128, up to four queries of a key) on NVIDIA: the matrix
cores take codes where they lie in their bytes.

m16n8k32 multiplies unsigned bytes. A word masked twice has all of its eight codes as operands: as they are, and times 16.
Queries times the scales of a page's keys are whole numbers of two digits, to the base of 254, and so are weights times the
scales of its values, to the base of 256: four queries are the eight columns. Both are scaled by powers of two, by page.
Minimums of keys are multiplied by a product of 16 equal rows in float16, those of values in the lanes that have the weights.

A program is a warp. Lane 4 g + t has column g (query g / 2, its lower or upper digit) of right operands, rows g and g + 8 of
left ones, and columns 2 t and 2 t + 1 of sums, which are the digits of query t. Of keys it loads the rows 32 h + 8 (g / 2) +
2 i + g % 2 (h < 2, i < 4), and of each words 4 t .. 4 t + 3: those are the positions of which it has weights, and what a
transposition of 8 x 8 makes of the weights' digits stands as the words of values do, whose halves are neighbours.
"""

import triton
import triton.language as tl

from nstf.kernels.triton.attention_landing import (
    arrived,
    ask,
    load_four,
    load_key_codes,
    load_key_scales,
    load_value_codes,
    load_value_scales,
    room,
    slot_at,
)
from nstf.kernels.triton.attention_lanes import (
    digits2,
    even_bytes,
    largest2,
    low_bytes,
    mma_equal_rows,
    most2_of_columns,
    most2_of_rows,
    most_of_columns,
    most_of_rows,
    of_query,
    packed,
    product2,
    same_halves,
    sum2,
    turned_over,
    unpacked,
)
from nstf.kernels.triton.byte_product import mma_bytes

_LOW = tl.constexpr(0x0F0F0F0F)
_HIGH = tl.constexpr(0xF0F0F0F0)


@triton.jit
def _queries(q, GROUP: tl.constexpr, HARDWARE: tl.constexpr):
    """Of each lane's column 16 words of channels (by field, 8 t + 2 m and the next), times a power of two; and what undoes
    it, for query t."""
    i = tl.arange(0, 32)
    at = tl.minimum(i // 8, GROUP - 1) * 128 + i % 4 * 8
    wide = ()
    most = tl.zeros([32], tl.float32)
    for j in tl.static_range(4):
        some = load_four(q, at + 32 * j, HARDWARE) + load_four(q, at + 32 * j + 4, HARDWARE)
        for c in tl.static_range(8):
            number = some[c].to(tl.float32, bitcast=True)
            most = tl.maximum(most, tl.abs(number), propagate_nan=tl.PropagateNan.ALL)
            wide = wide + (number,)
    exponent = most_of_columns(most, HARDWARE).to(tl.int32, bitcast=True) >> 23
    back = tl.where(exponent == 255, float("nan"), 1.0)
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    back *= (exponent << 23).to(tl.float32, bitcast=True)
    up = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    found = ()
    for n in tl.static_range(16):
        found = found + (packed(wide[2 * n] * up, wide[2 * n + 1] * up, HARDWARE),)
    return found, of_query(back, HARDWARE)


@triton.jit
def _as_rows(x):
    """One number for each query, in all lanes t of it, as [8]: the four of them, twice."""
    four = tl.max(tl.reshape(x, [8, 4]), axis=0)
    return tl.reshape(tl.permute(tl.join(four, four), (1, 0)), [8])


@triton.jit
def _sum_as_rows(x):
    """The sums over the lanes of a query, as `_as_rows`."""
    four = tl.sum(tl.reshape(x, [8, 4]), axis=0)
    return tl.reshape(tl.permute(tl.join(four, four), (1, 0)), [8])


@triton.jit
def _fold(queries, scales, back, HARDWARE: tl.constexpr):
    """(words of right operands, for each word of a row and nibble; their unit; the sum with the minimums), for query t."""
    i = tl.arange(0, 32)
    upper = i // 4 % 2 == 1
    zero = i * 0
    turned = ()
    most = zero.to(tl.uint32, bitcast=True)
    for n in tl.static_range(16):
        turned = turned + (product2(queries[n], scales[n], HARDWARE),)
        most = largest2(most, turned[n], HARDWARE)
    most = most2_of_columns(most, HARDWARE)
    # Not beyond 127.5, and rounded up to a power of two.
    exponent = tl.maximum(most & 0x7FFF, most >> 16) + 8
    exponent = tl.maximum(exponent >> 10, 6)
    near = (36 - exponent) * 0x04000400
    by = tl.where(upper, near * 0, near)
    more = tl.where(upper, 0x3C003C00, 0x5BF05BF0).to(tl.uint32)
    digits = ()
    for n in tl.static_range(16):
        digits = digits + (digits2(turned[n], by, near, more, HARDWARE),)
    met = ()
    for nibble in tl.static_range(2):
        for m in tl.static_range(4):
            met = met + (even_bytes(digits[4 * nibble + m], digits[8 + 4 * nibble + m], HARDWARE),)
    # 8 / (16 * 254) of 2^(exponent - 21).
    factor = ((exponent + 106) << 23).to(tl.float32, bitcast=True)
    factor = of_query(factor, HARDWARE) * (back * (1.0 / 508))
    flat = zero.to(tl.float32)
    one = (flat, flat, flat, flat)
    two = one
    for n in tl.static_range(4):
        one = mma_equal_rows(
            scales[16 + 4 * n], scales[17 + 4 * n], queries[4 * n], queries[4 * n + 1], one, HARDWARE
        )
        two = mma_equal_rows(
            scales[18 + 4 * n], scales[19 + 4 * n], queries[4 * n + 2], queries[4 * n + 3], two, HARDWARE
        )
    return met, factor, (one[0] + two[0]) * (back * 8.0)


@triton.jit
def _scores(keys, met, factor, base, HARDWARE: tl.constexpr):
    """Eight scores of each lane: of positions (i, h) to query t."""
    zero = tl.zeros([32], tl.int32)
    none = (zero, zero, zero, zero)
    found = ()
    for r in tl.static_range(4):
        low = none
        high = none
        for n in tl.static_range(2):
            w0 = keys[8 * r + 2 * n]
            w1 = keys[8 * r + 4 + 2 * n]
            w2 = keys[8 * r + 2 * n + 1]
            w3 = keys[8 * r + 4 + 2 * n + 1]
            low = mma_bytes(
                w0 & _LOW, w1 & _LOW, w2 & _LOW, w3 & _LOW, met[2 * n], met[2 * n + 1], low, 1, HARDWARE
            )
            high = mma_bytes(
                w0 & _HIGH,
                w1 & _HIGH,
                w2 & _HIGH,
                w3 & _HIGH,
                met[4 + 2 * n],
                met[5 + 2 * n],
                high,
                1,
                HARDWARE,
            )
        first = (low[0] * 16 + high[0]) + (low[1] * 16 + high[1]) * 254
        second = (low[2] * 16 + high[2]) + (low[3] * 16 + high[3]) * 254
        found = found + (first.to(tl.float32) * factor + base, second.to(tl.float32) * factor + base)
    return found


@triton.jit
def _value_operands(weights, scales, HARDWARE: tl.constexpr):
    """(words of right operands, for each (h, i); units of both groups; sums of weights times minimums, for both groups).

    weights: eight, (i, h), of 1 at most. Beside 256 a float32 counts by 2^-15: its lower half is a whole number.
    """
    odd = (tl.arange(0, 32) // 4 % 2).to(tl.uint32, bitcast=True)
    # Scales, then minimums, by group and h: positions i 0, 1 and 2, 3.
    pairs = ()
    for n in tl.static_range(8):
        pairs = pairs + (
            same_halves(scales[4 * n], scales[4 * n + 1], odd, HARDWARE),
            same_halves(scales[4 * n + 2], scales[4 * n + 3], odd, HARDWARE),
        )
    first = largest2(largest2(pairs[0], pairs[1], HARDWARE), largest2(pairs[2], pairs[3], HARDWARE), HARDWARE)
    second = largest2(
        largest2(pairs[4], pairs[5], HARDWARE), largest2(pairs[6], pairs[7], HARDWARE), HARDWARE
    )
    zero = odd * 0
    most = largest2(
        same_halves(first, second, zero, HARDWARE), same_halves(first, second, zero + 1, HARDWARE), HARDWARE
    )
    exponents = most2_of_rows(most, HARDWARE) & 0x7C007C00
    up = 0x78007800 - exponents
    ups = (same_halves(up, up, zero, HARDWARE), same_halves(up, up, zero + 1, HARDWARE))
    units = (
        (((exponents & 0x7C00) << 13) + (97 << 23)).to(tl.float32, bitcast=True),
        (((exponents >> 16) << 13) + (97 << 23)).to(tl.float32, bitcast=True),
    )
    numbers = ()
    for n in tl.static_range(8):
        one, two = unpacked(product2(pairs[n], ups[n // 4], HARDWARE), HARDWARE)
        # Pair n of group n / 4: half h = n / 2 % 2, positions i = 2 (n % 2) and the next.
        numbers = numbers + (
            (weights[4 * (n % 2) + n // 2 % 2] * one + 256.0).to(tl.uint32, bitcast=True),
            (weights[4 * (n % 2) + n // 2 % 2 + 2] * two + 256.0).to(tl.uint32, bitcast=True),
        )
    met = ()
    for n in tl.static_range(8):
        # n = 4 h + i.
        met = met + (turned_over(low_bytes(numbers[n], numbers[8 + n], HARDWARE), HARDWARE),)
    sums = ()
    shorts = ()
    for n in tl.static_range(4):
        # As pairs: half h = n / 2, positions 2 (n % 2) and the next.
        pair = packed(weights[4 * (n % 2) + n // 2], weights[4 * (n % 2) + n // 2 + 2], HARDWARE)
        shorts = shorts + (pair,)
    for c in tl.static_range(2):
        acc = product2(shorts[0], pairs[8 + 4 * c], HARDWARE)
        for n in tl.static_range(1, 4):
            acc = sum2(shorts[n], pairs[8 + 4 * c + n], acc, HARDWARE)
        one, two = unpacked(acc, HARDWARE)
        sums = sums + (one + two,)
    return met, units, sums


@triton.jit
def _add_values(w0, w1, w2, w3, b0, b1, some, NIBBLE: tl.constexpr, HARDWARE: tl.constexpr):
    if NIBBLE == 0:
        return mma_bytes(w0 & _LOW, w1 & _LOW, w2 & _LOW, w3 & _LOW, b0, b1, some, 1, HARDWARE, False)
    else:
        return mma_bytes(w0 & _HIGH, w1 & _HIGH, w2 & _HIGH, w3 & _HIGH, b0, b1, some, 1, HARDWARE, False)


@triton.jit
def far_by_bytes(
    q,  # f32, of the first query of the head
    words,
    table,  # of the sequence
    shift,  # of the head's records, in units of 16 bytes
    split,
    active,
    count,  # pages of this program
    GROUP: tl.constexpr,
    SKIP: tl.constexpr,
    RECORD: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """(maxima [8], sums [8], four runs of 32 channels [32, 8], as eighths) of pages split, split + active, ..."""
    last = tl.maximum(count - 1, 0)
    lane = tl.arange(0, 32)
    if HARDWARE == 1:
        # Lane n asks for page n of 32: it knows where that is. Without pages of its own a program looks one up all the same.
        begin = room(SLOTS, RECORD)
        first = words.to(tl.int64) + shift.to(tl.int64) * 16
        begins = tl.where(count > 0, split, 0)
        source = first + tl.load(table + begins + tl.minimum(lane, last) * active) * 16
        for s in tl.static_range(SLOTS):
            slot = lane * 0 + s
            ask(begin, slot, source, (lane == s) & (s < count), 0, RECORD, SKIP)
            ask(begin, slot, source, (lane == s) & (s < count), 1, RECORD, SKIP)
        slot = lane * 0
        turn = slot.to(tl.uint32)
    if PDL:
        # Queries and the newest positions are the work of the launch in front.
        tl.extra.cuda.gdc_wait()
    queries, back = _queries(q, GROUP, HARDWARE)
    none = tl.zeros([32], tl.int32)
    flat = tl.zeros([32], tl.float32)
    top = tl.full([32], float("-inf"), tl.float32)
    total = flat
    lows = (flat, flat)
    acc = ()
    for _ in tl.static_range(16):
        acc = acc + (flat,)
    for step in tl.range(0, count, num_stages=1):
        if HARDWARE == 1:
            wanted = step + SLOTS
            if wanted % 32 == 0:
                source = first + tl.load(table + split + tl.minimum(wanted + lane, last) * active) * 16
            mine = (lane == wanted % 32) & (wanted < count)
            arrived(begin, slot, turn, 0)
            base_k = slot_at(begin, slot, RECORD)
            base_v = base_k + SKIP
        else:
            base_k = words + (tl.load(table + split + step * active) + shift) * 4
            base_v = base_k + SKIP // 4
        key_scales = load_key_scales(base_k, HARDWARE)
        keys = load_key_codes(base_k, HARDWARE)
        met, factor, base = _fold(queries, key_scales, back, HARDWARE)
        scores = _scores(keys, met, factor, base, HARDWARE)
        if HARDWARE == 1:
            ask(begin, slot, source, mine, 0, RECORD, SKIP)
        most = tl.maximum(
            tl.maximum(tl.maximum(scores[0], scores[1]), tl.maximum(scores[2], scores[3])),
            tl.maximum(tl.maximum(scores[4], scores[5]), tl.maximum(scores[6], scores[7])),
        )
        most = most_of_rows(most, HARDWARE)
        higher = tl.maximum(top, most)
        fade = tl.exp2(top - higher)
        gain = tl.exp2(most - higher)
        top = higher
        weights = ()
        for n in tl.static_range(8):
            weights = weights + (tl.exp2(scores[n] - most),)
        more = (weights[0] + weights[1]) + (weights[2] + weights[3])
        more += (weights[4] + weights[5]) + (weights[6] + weights[7])
        total = total * fade + more * gain
        if HARDWARE == 1:
            arrived(begin, slot, turn, 1)
        value_scales = load_value_scales(base_v, HARDWARE)
        values = load_value_codes(base_v, HARDWARE)
        met, units, sums = _value_operands(weights, value_scales, HARDWARE)
        lows = (
            lows[0] * fade + sums[0] * gain,
            lows[1] * fade + sums[1] * gain,
        )
        found = ()
        for c in tl.static_range(2):
            unit = units[c] * gain
            right = ()
            for n in tl.static_range(8):
                if c == 0:
                    right = right + (met[n] & 0x00FF00FF,)
                else:
                    right = right + (met[n] & 0xFF00FF00,)
            for nibble in tl.static_range(2):
                scale = unit
                if nibble == 1:
                    scale = unit * (1.0 / 16)
                for b in tl.static_range(2):
                    some = (none, none, none, none)
                    for n in tl.static_range(4):
                        # Half n / 2, words 2 (n % 2) and the next: rows 16 b + g and 16 b + g + 8.
                        some = _add_values(
                            values[16 * b + 4 * (n // 2) + 2 * (n % 2)],
                            values[16 * b + 4 * (n // 2) + 2 * (n % 2) + 8],
                            values[16 * b + 4 * (n // 2) + 2 * (n % 2) + 1],
                            values[16 * b + 4 * (n // 2) + 2 * (n % 2) + 9],
                            right[2 * n],
                            right[2 * n + 1],
                            some,
                            nibble,
                            HARDWARE,
                        )
                    found = found + (
                        acc[8 * c + 4 * nibble + 2 * b] * fade
                        + (some[0] + some[1] * 256).to(tl.float32) * scale,
                        acc[8 * c + 4 * nibble + 2 * b + 1] * fade
                        + (some[2] + some[3] * 256).to(tl.float32) * scale,
                    )
        acc = found
        if HARDWARE == 1:
            ask(begin, slot, source, mine, 1, RECORD, SKIP)
            turn = tl.where(slot == SLOTS - 1, 1 - turn, turn)
            slot = tl.where(slot == SLOTS - 1, 0, slot + 1)
    runs = ()
    for j in tl.static_range(4):
        # Field j: nibble j % 2 of the byte of group j / 2. Four quarters of eight channels.
        quarters = tl.join(
            tl.join(acc[8 * (j // 2) + 4 * (j % 2)], acc[8 * (j // 2) + 4 * (j % 2) + 2]),
            tl.join(acc[8 * (j // 2) + 4 * (j % 2) + 1], acc[8 * (j // 2) + 4 * (j % 2) + 3]),
        )
        run = tl.reshape(tl.permute(tl.reshape(quarters, [8, 4, 2, 2]), (2, 3, 0, 1)), [32, 4])
        run = tl.reshape(tl.permute(tl.join(run, run), (0, 2, 1)), [32, 8])
        runs = runs + (run + _sum_as_rows(lows[j // 2])[None, :],)
    return _as_rows(top), _sum_as_rows(total), runs
