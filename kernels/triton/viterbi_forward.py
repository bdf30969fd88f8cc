# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""The forward half of the trellis search on NVIDIA GPUs: the costs M of kernels/torch/viterbi.py in float16.

What limits the search is where the codebook comes from: 65536 numbers at every step, more than shared memory holds in
float32 and more than the second-level cache hands out in time. Here it is in registers, as float16: a program takes a
whole multiprocessor, and each of its 512 threads has the same 64 pairs of states at every step, so 64 registers of 128. A
step costs 2.5 instructions for a pair: a difference, a fused square and sum, and half a minimum of three. M changes hands
through shared memory, once a step. (Twice the threads with half the states each were slower by 5 to 20 percent.)

No back-pointers: which old bits were best is found on the way back (viterbi_back.py) from M, of which every EVERY-th step
goes to device memory. The numbers stay small, so that float16 tells the good paths apart: every RENORM steps the least of
a sample of M is taken off all of it.

A word is two numbers of float16. Words of M hold neighbours: entries 2 i and 2 i + 1. Words of states hold two states that
differ in bit K, K the largest step: [h | u | pair | a] from the top, h and a of K bits. So one operation serves two states
with the same h and a, and it takes two words of M to make two of them ready (prmt).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

STATE_BITS = gl.constexpr(16)
# Of a program. A thread's states are then 64 words.
WARPS = gl.constexpr(16)
# By how much a target may lie outside the codebook: squares of more would leave the range of float16.
_REACH = gl.constexpr(32.0)


@gluon.constexpr_function
def bits_of(K):
    """The bits of a word of states, 0 (of a) to 14 (of h), that number a thread's registers, lanes and warps."""
    a, u, h = list(range(K)), list(range(K, 15 - K)), list(range(15 - K, 15))
    # A thread takes the minimum over a by itself, except that 64 words of M would take all of its registers.
    own = a if K < 6 else [0, 1, 2, 3, 5]
    # The low bits of h choose the entry of M where a step is one bit short.
    own = own + h[max(len(own) + K - 6, 0) :]
    own = own + (u[len(own) - 6 :] if len(own) < 6 else [])
    near = [b for b in u if b not in own]
    rest = near + [b for b in a + h if b not in own]
    return own, rest[:5], rest[5:]


@gluon.constexpr_function
def at_bit(bit, shape):
    """The coordinates of the flat index 1 << bit."""
    where, value = [], 1 << bit
    for size in reversed(shape):
        where.append(value % size)
        value //= size
    return where[::-1]


@gluon.constexpr_function
def state_layout(K, shape):
    """Words of states, in any shape."""
    own, lane, warp = ([at_bit(b, shape) for b in bits] for bits in bits_of(K))
    return gl.DistributedLinearLayout(own, lane, warp, [], shape)


@gluon.constexpr_function
def entry_layout(K, rows):
    """The words of M [rows, 32] that a thread's states need: [u | pair | a without its lowest bit] of their bits."""

    def needed(bit):
        to = bit - 1 if bit < K else bit
        return None if bit == 0 or 1 << to >= rows * 32 else at_bit(to, [rows, 32])

    own, lane, warp = bits_of(K)
    registers = [needed(b) for b in own if needed(b) is not None] + [at_bit(K - 1, [rows, 32])]
    lanes, warps = ([needed(b) or [0, 0] for b in bits] for bits in (lane, warp))
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, 32])


@gluon.constexpr_function
def sample_layout(rows):
    """Some words of M [rows, 32], the same for every warp."""
    registers = [[0, 1], [0, 2]] + [[n, 0] for n in (4, 8) if n < rows]
    lanes = [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0]] * 4, [], [rows, 32])


@gluon.constexpr_function
def step_bits(t, Q):
    """k_t."""
    return (t % 4 + 1) * Q // 4 - t % 4 * Q // 4


@gluon.jit
def _of_two(a, b, CODE: gl.constexpr):
    return gl.inline_asm_elementwise(CODE, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _least(a, b):
    return _of_two(a, b, "min.f16x2 $0, $1, $2;")


@gluon.jit
def _most(a, b):
    return _of_two(a, b, "max.f16x2 $0, $1, $2;")


@gluon.jit
def _lows(a, b):
    """The low halves of two words."""
    return _of_two(a, b, "prmt.b32 $0, $1, $2, 0x5410;")


@gluon.jit
def _highs(a, b):
    return _of_two(a, b, "prmt.b32 $0, $1, $2, 0x7632;")


@gluon.jit
def _word(low, high):
    """Two float32 numbers as a word."""
    return _of_two(low, high, "cvt.rn.f16x2.f32 $0, $2, $1;")


@gluon.jit
def _low(word):
    """The low half of a word as float32."""
    return (word & 0xFFFF).to(gl.uint16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def _cost(x, c, m):
    """(x - c)^2 + m."""
    code: gl.constexpr = "{ .reg .b32 d; sub.f16x2 d, $1, $2; fma.rn.f16x2 $0, d, d, $3; }"
    return gl.inline_asm_elementwise(code, "=r,r,r,r", [x, c, m], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _turned(words):
    """[n, 2, m] words of two neighbours -> [n, 2 m] words of two that are 2 m apart; and, with m = 1, the way back."""
    first, second = gl.split(gl.permute(words, (0, 2, 1)))
    both = gl.join(_lows(first, second), _highs(first, second))
    return gl.reshape(both, [words.shape[0], 2 * words.shape[2]])


@gluon.jit
def _step(c, words, x, K: gl.constexpr, IN: gl.constexpr, OUT: gl.constexpr):
    """The words of the next M, from those of M that a step of IN bits needs; a step of OUT bits follows."""
    A: gl.constexpr = 1 << K
    H: gl.constexpr = 1 << IN
    U: gl.constexpr = 1 << (STATE_BITS - 1 - IN - K)
    LAYOUT: gl.constexpr = state_layout(K, [H, U, A])
    m = _turned(gl.reshape(words, [U, 2, A // 2]))
    m = gl.expand_dims(gl.convert_layout(m, gl.SliceLayout(0, LAYOUT), assert_trivial=True), 0)
    c = gl.convert_layout(gl.reshape(c, [H, U, A]), LAYOUT, assert_trivial=True)
    cost = _cost(gl.full([H, U, A], x, gl.int32, LAYOUT), c, m)
    if OUT == K:
        return gl.reduce(cost, 2, _least)
    else:
        halves = gl.reduce(gl.reshape(cost, [H * U, 2, A // 2]), 2, _least)
        return _turned(gl.expand_dims(halves, 2))


@gluon.jit
def _advance(
    c,
    now,
    then,
    history,
    x,
    renorm,
    R: gl.constexpr,
    Q: gl.constexpr,
    EVERY: gl.constexpr,
    FLAT: gl.constexpr,
):
    """One step, R of four: from M in `now` to the next in `then`, both shared memory [rows, 32]."""
    K: gl.constexpr = (Q + 3) // 4
    IN: gl.constexpr = step_bits(R, Q)
    OUT: gl.constexpr = step_bits(R + 1, Q)
    ROWS: gl.constexpr = 1 << (STATE_BITS - 6 - IN)
    NEXT: gl.constexpr = 1 << (STATE_BITS - 6 - OUT)
    LAYOUT: gl.constexpr = entry_layout(K, ROWS)
    words = now.slice(0, ROWS).load(LAYOUT)
    if R == 0:
        if renorm:
            SAMPLE: gl.constexpr = 16 if K == 6 else 8
            some = now.slice(0, SAMPLE).load(sample_layout(SAMPLE))
            least = gl.reduce(gl.reduce(some, 1, _least), 0, _least)
            least = _least(least, (least >> 16) | (least << 16))
            words = _of_two(words, gl.full([ROWS, 32], least, gl.int32, LAYOUT), "sub.f16x2 $0, $1, $2;")
    if R % EVERY == 0:
        # Loaded again, so that lanes store side by side. An M that is off by a constant will do.
        row = gl.arange(0, ROWS, gl.SliceLayout(1, FLAT))[:, None]
        column = gl.arange(0, 32, gl.SliceLayout(0, FLAT))[None, :]
        gl.store(history + row * 32 + column, now.slice(0, ROWS).load(FLAT))
    then.slice(0, NEXT).store(gl.reshape(_step(c, words, x, K, IN, OUT), [NEXT, 32]))


@gluon.jit
def _codebook(codebook, K: gl.constexpr):
    """Words [2^K, 2^(15 - 2 K), 2^K] of the codebook, and the range that targets are held to."""
    A: gl.constexpr = 1 << K
    U: gl.constexpr = 1 << (STATE_BITS - 1 - 2 * K)
    LAYOUT: gl.constexpr = state_layout(K, [A, U, A])
    h = gl.arange(0, A, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    u = gl.arange(0, U, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    a = gl.arange(0, A, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    at = codebook + ((h * U + u) * (2 * A) + a)
    c = _word(gl.load(at), gl.load(at + A))
    flat = gl.reshape(c, [1 << (STATE_BITS - 1)])
    most = gl.reduce(flat, 0, _most)
    least = gl.reduce(flat, 0, _least)
    most = gl.maximum(_low(most), _low(most >> 16)) + _REACH
    least = gl.minimum(_low(least), _low(least >> 16)) - _REACH
    return c, least, most


@gluon.jit
def _targets(targets, tile, tiles, t, T: gl.constexpr, TILE: gl.constexpr):
    """The targets of four steps, for T tiles; the last tile again where there is none."""
    found = ()
    for i in gl.static_range(T):
        at = targets + gl.minimum(tile + i, tiles - 1) * TILE
        for r in gl.static_range(4):
            found = found + (gl.load(at + ((t + r) & (TILE - 1))),)
    return found


@gluon.jit
def _words(targets, least, most):
    """Each target, held to a range, twice in a word."""
    words = ()
    for i in gl.static_range(len(targets)):
        half = gl.minimum(gl.maximum(targets[i], least), most).to(gl.float16).to(gl.uint16, bitcast=True)
        words = words + (half.to(gl.int32) * 0x10001,)
    return words


@gluon.jit
def _start(m, seam, whole, ROWS: gl.constexpr, LEAST: gl.constexpr, FLAT: gl.constexpr):
    """M before the first step: all states are as good, or the one at the seam (a pointer) alone will do."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, FLAT))[:, None]
    word = row * 32 + gl.arange(0, 32, gl.SliceLayout(0, FLAT))[None, :]
    start = gl.zeros([ROWS, 32], gl.int32, FLAT)
    if whole != 0:
        entry = gl.load(seam) >> LEAST
        one = gl.where(entry & 1 == 0, 0x7C000000, 0x7C00)  # 0x7C00: infinity
        start = gl.where(word == entry >> 1, one, 0x7C007C00)
    m.store(start)


@gluon.jit
def _store_best(end, m, ROWS: gl.constexpr, FLAT: gl.constexpr):
    """The entry of the least M, the first of several."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, FLAT))[:, None]
    entry = 2 * (row * 32 + gl.arange(0, 32, gl.SliceLayout(0, FLAT))[None, :])
    words = m.load(FLAT)
    first = _low(words)
    second = _low(words >> 16)
    least = gl.min(gl.reshape(gl.minimum(first, second), [ROWS * 32]), 0)
    found = gl.where(first == least, entry, gl.where(second == least, entry + 1, 1 << STATE_BITS))
    gl.store(end, gl.min(gl.reshape(found, [ROWS * 32]), 0))


@gluon.jit(do_not_specialize=["tiles", "whole"])
def forward(
    targets,  # f32 [tiles, TILE]
    codebook,  # f32 [65536]
    seams,  # i32 [tiles]: the state before the first step, which the whole tile starts from
    ends,  # i32 [tiles]: the best entry of M after the steps around the seam
    history,  # i32 [tiles, TILE / EVERY, WORDS]: M before every EVERY-th step
    tiles,
    whole,  # 0: SEAM steps on either side of the seam, from nowhere; 1: all steps
    Q: gl.constexpr,  # quarter bits per weight
    SEAM: gl.constexpr,
    TILE: gl.constexpr,
    EVERY: gl.constexpr,
    RENORM: gl.constexpr,
    T: gl.constexpr,  # tiles at a time: one computes while the other's M changes hands
):
    K: gl.constexpr = (Q + 3) // 4
    LEAST: gl.constexpr = Q // 4
    ROWS: gl.constexpr = 1 << (STATE_BITS - 6 - LEAST)
    SLOTS: gl.constexpr = TILE // EVERY
    # 16 bytes of a lane beside its neighbour's, in every layout that reads them.
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(4, 2 if K == 6 else 1, 8, [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    c, least, most = _codebook(codebook, K)
    even = ()
    odd = ()
    for _ in gl.static_range(T):
        even = even + (gl.allocate_shared_memory(gl.int32, [ROWS, 32], SHARED),)
        odd = odd + (gl.allocate_shared_memory(gl.int32, [ROWS, 32], SHARED),)
    begin = gl.where(whole != 0, 0, -SEAM)
    blocks = gl.where(whole != 0, TILE // 4, SEAM // 2)
    for index in range(gl.program_id(0), gl.cdiv(tiles, T), gl.num_programs(0)):
        tile = gl.cast(index, gl.int64) * T
        for i in gl.static_range(T):
            _start(even[i], seams + gl.minimum(tile + i, tiles - 1), whole, ROWS, LEAST, FLAT)
        slot = history + tile * (SLOTS * ROWS * 32)
        x = _words(_targets(targets, tile, tiles, begin, T, TILE), least, most)
        for block in range(blocks):
            # Asked for a block ahead: nothing waits for them.
            ahead = _targets(targets, tile, tiles, begin + block * 4 + 4, T, TILE)
            # In the first 16 steps of a whole tile some entries are still infinite.
            renorm = (block % (RENORM // 4) == 0) & (block >= 4)
            for r in gl.static_range(4):
                for i in gl.static_range(T):
                    now = even[i] if r % 2 == 0 else odd[i]
                    then = odd[i] if r % 2 == 0 else even[i]
                    own = slot + gl.minimum(i, tiles - 1 - tile) * (SLOTS * ROWS * 32)
                    _advance(c, now, then, own, x[4 * i + r], renorm, r, Q, EVERY, FLAT)
                if r % EVERY == 0:
                    slot += ROWS * 32
            x = _words(ahead, least, most)
        if whole == 0:
            for i in gl.static_range(T):
                _store_best(ends + gl.minimum(tile + i, tiles - 1), even[i], ROWS, FLAT)
