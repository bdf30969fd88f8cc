# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""A page of one head as codes, inside kernels: written, and read as numbers.

Codes of b bits. Keys: a position has W = size b / 32 words; the field of bits J b.. of the lower (upper) half of word w is
channel 2 J W + 2 w (+ 1). Values: C = size b / 16 rows of 32 words; the field of word w of row r is channel J C + r of
position 2 w (+ 1). So the halves of a word are neighbours in the sum of a matrix product, channels of keys and positions of
values, and `field | 0x6400` of a half is a float16: 1024 + code. Minimums, then scales, stand by channel, or by 64 channels
and position; those of 4 and 2 bits as eighths. A minimum less 2^b scales, which numbers are made of (attention_codes.py),
is up to 3.2 times as large as the page's largest number, and float16 ends at 65504.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def unit_of(bits: int) -> float:
    """What minimums and scales were divided by, and so the numbers that are made of them."""
    return 8.0 if bits < 8 else 1.0


@triton.jit
def store_codes(
    x,
    words,
    halves,
    at,
    BITS: tl.constexpr,
    CHANNEL: tl.constexpr,
    VALUES: tl.constexpr,
    SIZE: tl.constexpr,
    SKIP: tl.constexpr,
):
    """Stores a page x f32 [64, SIZE] of keys (VALUES: of values) as codes, `SKIP` bytes after the place `at`."""
    MOST: tl.constexpr = (1 << BITS) - 1
    GROUPS: tl.constexpr = 1 if CHANNEL else SIZE // 64
    n = tl.arange(0, 64)
    c = tl.arange(0, SIZE)
    pairs = halves + at * 8 + (SKIP + 8 * SIZE * BITS) // 2
    if CHANNEL:
        low = tl.min(x, axis=0)
        high = tl.max(x, axis=0)
    else:
        grouped = tl.reshape(x, [64, GROUPS, 64])
        low = tl.min(grouped, axis=2)
        high = tl.max(grouped, axis=2)
    low = tl.minimum(tl.maximum(low, -65504.0), 65504.0).to(tl.float16)
    # Divisions rounded to nearest, as where codes are defined: others tip codes over.
    step = tl.div_rn(high - low.to(tl.float32), MOST + 0.0)
    step = tl.minimum(tl.maximum(step, 0.0), 65504.0).to(tl.float16)
    BY: tl.constexpr = 1.0 / unit_of(BITS)
    if CHANNEL:
        tl.store(pairs + c, (low.to(tl.float32) * BY).to(tl.float16))
        tl.store(pairs + SIZE + c, (step.to(tl.float32) * BY).to(tl.float16))
        base = low.to(tl.float32)[None, :]
        by = step.to(tl.float32)[None, :]
        code = tl.div_rn(x - base, tl.where(by > 0.0, by, 1.0))
    else:
        g = tl.arange(0, GROUPS)[None, :] * 64 + n[:, None]
        tl.store(pairs + g, (low.to(tl.float32) * BY).to(tl.float16))
        tl.store(pairs + 64 * GROUPS + g, (step.to(tl.float32) * BY).to(tl.float16))
        base = low.to(tl.float32)[:, :, None]
        by = step.to(tl.float32)[:, :, None]
        code = tl.reshape(tl.div_rn(grouped - base, tl.where(by > 0.0, by, 1.0)), [64, SIZE])
        by = tl.reshape(tl.broadcast_to(by, [64, GROUPS, 64]), [64, SIZE])
    # Adding and taking away 1.5 * 2^23 rounds to nearest even.
    code = tl.minimum(tl.maximum(code, 0.0), 1.0 * MOST)
    code = (code + 12582912.0) - 12582912.0
    code = tl.where(by > 0.0, code, 0.0).to(tl.int32)
    into = words + at * 4 + SKIP // 4
    if VALUES:
        C: tl.constexpr = SIZE * BITS // 16
        shift = ((n % 2) * 16)[:, None] + ((c // C) * BITS)[None, :]
        fields = tl.reshape(code << shift, [32, 2, 16 // BITS, C])
        packed = tl.sum(tl.sum(fields, axis=2), axis=1)
        tl.store(into + tl.arange(0, 32)[:, None] + tl.arange(0, C)[None, :] * 32, packed)
    else:
        W: tl.constexpr = SIZE * BITS // 32
        shift = ((c % 2) * 16 + (c // (2 * W)) * BITS)[None, :]
        fields = tl.reshape(code << shift, [64, 16 // BITS, W, 2])
        packed = tl.sum(tl.sum(fields, axis=3), axis=1)
        tl.store(into + n[:, None] * W + tl.arange(0, W)[None, :], packed)


@triton.jit
def load_numbers(
    words,
    halves,
    at,
    BITS: tl.constexpr,
    CHANNEL: tl.constexpr,
    VALUES: tl.constexpr,
    SIZE: tl.constexpr,
    SKIP: tl.constexpr,
):
    """A page of codes as f32 [64, SIZE]: for prefill, once a chunk."""
    GROUPS: tl.constexpr = 1 if CHANNEL else SIZE // 64
    n = tl.arange(0, 64)
    c = tl.arange(0, SIZE)
    pairs = halves + at * 8 + (SKIP + 8 * SIZE * BITS) // 2
    if VALUES:
        C: tl.constexpr = SIZE * BITS // 16
        place = (n // 2)[:, None] + ((c % C) * 32)[None, :]
        shift = ((n % 2) * 16)[:, None] + ((c // C) * BITS)[None, :]
    else:
        W: tl.constexpr = SIZE * BITS // 32
        place = n[:, None] * W + ((c % (2 * W)) // 2)[None, :]
        shift = ((c % 2) * 16 + (c // (2 * W)) * BITS)[None, :]
    word = tl.load(words + at * 4 + SKIP // 4 + place)
    code = ((word >> shift) & ((1 << BITS) - 1)).to(tl.float32)
    if CHANNEL:
        low = tl.load(pairs + c).to(tl.float32)[None, :]
        step = tl.load(pairs + SIZE + c).to(tl.float32)[None, :]
    else:
        g = (c // 64)[None, :] * 64 + n[:, None]
        low = tl.load(pairs + g).to(tl.float32)
        step = tl.load(pairs + 64 * GROUPS + g).to(tl.float32)
    return (low + step * code) * unit_of(BITS)
