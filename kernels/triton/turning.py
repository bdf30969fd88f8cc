# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Queries and keys of a new token: bias, norm and rotary position embedding (Su et al. 2021) of whole heads.

In parts, so that a kernel can ask for angles and gains before the launch in front has ended, and for all that it reads of
the token before it uses any of it.
"""

import triton
import triton.language as tl


@triton.jit
def angles_of(cos, sin, at, d, SIZE: tl.constexpr):
    """(cos, sin with the sign of the half) [SIZE] of a position."""
    PAIRS: tl.constexpr = SIZE // 2
    angle = at * PAIRS + d % PAIRS
    c = tl.load(cos + angle, mask=d < SIZE, other=0.0)
    s = tl.load(sin + angle, mask=d < SIZE, other=0.0)
    return c, tl.where(d < PAIRS, -s, s)


@triton.jit
def gains_of(gain, d, SIZE: tl.constexpr, NORM: tl.constexpr):
    """(gain, that of the other half) [SIZE] of the norm of a head; what is not there is read as zeros of no use."""
    PAIRS: tl.constexpr = SIZE // 2
    other = tl.where(d < PAIRS, d + PAIRS, d - PAIRS)
    ok = (d < SIZE) & NORM
    return tl.load(gain + d, mask=ok, other=0.0), tl.load(gain + other, mask=ok, other=0.0)


@triton.jit
def halves_of(source, bias, first, heads, d, ok, SIZE: tl.constexpr, BIAS: tl.constexpr):
    """Heads [heads, SIZE] from `first` on where `ok`, with bias, and the other half of each: f32."""
    PAIRS: tl.constexpr = SIZE // 2
    other = tl.where(d < PAIRS, d + PAIRS, d - PAIRS)
    ok = ok & (d < SIZE)[None, :]
    mine = first + heads[:, None] * SIZE + d[None, :]
    theirs = first + heads[:, None] * SIZE + other[None, :]
    a = tl.load(source + mine, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(source + theirs, mask=ok, other=0.0).to(tl.float32)
    if BIAS:
        a += tl.load(bias + mine, mask=ok, other=0.0)
        b += tl.load(bias + theirs, mask=ok, other=0.0)
    return a, b


@triton.jit
def turn(a, b, c, s, gain, other_gain, epsilon, SIZE: tl.constexpr, NORM: tl.constexpr):
    """Halves that `halves_of` loaded, normed and turned."""
    if NORM:
        factor = tl.rsqrt(tl.sum(a * a, axis=1) / SIZE + epsilon)[:, None]
        a *= factor * gain[None, :]
        b *= factor * other_gain[None, :]
    return a * c[None, :] + b * s[None, :]


@triton.jit
def turned(
    source, first, heads, d, cos, sin, at, gain, bias, epsilon,
    SIZE: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Heads [heads, SIZE] from `first` on, with bias and norm, turned by the angles of row `at`: f32."""
    a, b = halves_of(source, bias, first, heads, d, (heads >= 0)[:, None], SIZE, BIAS)
    c, s = angles_of(cos, sin, at, d, SIZE)
    mine, theirs = gains_of(gain, d, SIZE, NORM)
    return turn(a, b, c, s, mine, theirs, epsilon, SIZE, NORM)
