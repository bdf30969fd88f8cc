# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""From 17 rows of activations on times a packed matrix on Hopper: Y = X W^T by asynchronous matrix instructions (wgmma).

W is the left operand, in registers: a warpgroup decodes the numbers of the next 64 columns while the product of these runs.
Plain Triton cannot say so (it waits for each product whose left operand is in registers), so this is Gluon, Triton's own
language one level down, where layouts and waits are written out. X comes by the bulk copy engine (TMA) into stages of shared
memory, words by asynchronous copies; words lie there as they do in the matrix, and each lane reads those that its operand
wants (`words_layout`: the change of layout is checked to be none, `assert_trivial`).

Programs of two warpgroups run them apart (`warp_specialize`), each with half of a tile's rows of W: it decodes, multiplies,
hands on and stores these by itself, so that barriers are among four warps and one decodes while the other's product runs.
They share the activations alone: a stage of these is filled again once both are done with it.

Where whole programs to a tile fill most of the device (SPLIT), each has a part of one tile. Else the grid is as large as the
device and each program has an equal share of all chunks of all tiles ("stream-K": Osama et al. 2023, arXiv:2301.03598): with
tiles as large as these, whole tiles would leave a good part of the multiprocessors idle in the last round. A program whose
share ends within a tile leaves its float32 sums to the one that ends the tile. It runs its last tile first, and one program
waits for lower numbers only, which were started before it: nobody waits for a program that cannot run. Sums are added in a
fixed order.

Numbers are rounded to the dtype of the activations after scaling, as `decode` to that dtype would round them (the scale of a
group too where it is bfloat16). Gluon has no interpreter: on a CPU this is compiled and its code read, not run.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nstf.kernels.triton import numbers as _numbers
from nstf.kernels.triton import operands as _operands

# Functions of plain Triton that work on elements alone, for use in Gluon.
codes_at = gluon.jit(_numbers.codes_at.fn)
numbers32 = gluon.jit(_numbers.numbers32.fn)
scale_value = gluon.jit(_numbers.scale_value.fn)
looked_up = gluon.jit(_operands.looked_up.fn)
bytes_of = gluon.jit(_operands.bytes_of.fn)


@gluon.constexpr_function
def words_layout(warps, rows):
    """Where the words [rows, 16] of a chunk are: lane 4 g + t has the words t, t + 4, t + 8 and t + 12 of the rows g and
    g + 8 of its warp's sixteen, whose columns are those that m64nNk16 wants of it, two to a word."""
    registers, warp, at = [[0, 4], [0, 8], [8, 0]], [], 16
    while at < 16 * warps:
        warp.append([at, 0])
        at *= 2
    while at < rows:
        registers.append([at, 0])
        at *= 2
    return gl.DistributedLinearLayout(
        registers, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warp, [], [rows, 16]
    )


@gluon.constexpr_function
def runs_of(planes, bk):
    """Runs of 32 columns of an iteration: a chunk of the narrowest plane, or two where that is an odd number of steps.

    An operand is alive for two steps, and the assembler waits for each product where it would have to be moved.
    """
    runs = 16 // planes[len(planes) - 1]
    return runs if runs * 32 // bk % 2 == 0 else 2 * runs


@gluon.constexpr_function
def period_of(bits, bk):
    """Steps of bk columns that a chunk of a plane lasts."""
    return 16 // bits * 32 // bk


@gluon.constexpr_function
def tiles_of(bits, ahead, bk):
    """Chunks of a plane that are in shared memory at once; one that has begun is in registers."""
    return -(-ahead // period_of(bits, bk))


@gluon.constexpr_function
def staged_rows(bm, planes):
    """Rows of Y that turn in shared memory at once: three planes of codes leave less room."""
    return min(bm, 64 if len(planes) < 3 else 32)


@gluon.jit
def _rounded(low, high, DTYPE: gl.constexpr):
    """Two float32 rounded to DTYPE, in a word."""
    if DTYPE == gl.float16:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, True, 1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, True, 1
        )


@gluon.jit
def _less(pairs, other, DTYPE: gl.constexpr):
    """Two numbers of a word less two others."""
    if DTYPE == gl.float16:
        return gl.inline_asm_elementwise(
            "sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [pairs, other], gl.int32, True, 1
        )
    else:
        return gl.inline_asm_elementwise(
            "sub.rn.bf16x2 $0, $1, $2;", "=r,r,r", [pairs, other], gl.int32, True, 1
        )


@gluon.jit
def _times(pairs, other, DTYPE: gl.constexpr):
    """Two numbers of a word times two others."""
    if DTYPE == gl.float16:
        return gl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [pairs, other], gl.int32, True, 1
        )
    else:
        return gl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [pairs, other], gl.int32, True, 1
        )


@gluon.jit
def _per_group(
    scale,
    zeros,
    local,
    rows,
    place,
    R: gl.constexpr,
    SPAN: gl.constexpr,
    BN: gl.constexpr,
    GROUP: gl.constexpr,
    GROUPS: gl.constexpr,
    RUNS: gl.constexpr,
    FLUSH: gl.constexpr,
    WHOLE: gl.constexpr,
    ZERO: gl.constexpr,
):
    """Scales and zeros, as they are stored, of the groups that begin in step R of the chunk at `place`: a load for each."""
    n, _, c, _ = place
    # Rows that do not exist have those of others: in bounds, and never stored.
    row = gl.minimum(gl.maximum(n * BN + local, 0), rows - 1)
    scales = ()
    offsets = ()
    for i in gl.static_range(RUNS):
        if (R * RUNS + i) % FLUSH == 0:
            at = row * GROUPS + gl.minimum((c * SPAN + (R * RUNS + i) * 32) // GROUP, GROUPS - 1)
            if not WHOLE:
                scales = scales + (gl.load(scale + at),)
            if ZERO < 0:
                offsets = offsets + (gl.load(zeros + at),)
    return scales, offsets


@gluon.jit
def _with_exponent(words, magic, MASK: gl.constexpr):
    """words & MASK | magic, in one instruction: of two constants the assembler makes two."""
    mask = gl.full_like(words, MASK)
    magic = gl.full_like(words, 0) + magic
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [words, mask, magic], gl.int32, True, 1
    )


@gluon.jit
def _spread(values, like):
    """[rows] -> the shape of `like`, [rows, 16]."""
    wide, _ = gl.broadcast(values[:, None], like)
    return wide


@gluon.jit
def _decoded(
    w,
    values,
    table,
    factor,
    less,
    raw,
    raw_zero,
    magic,
    R: gl.constexpr,
    RUNS: gl.constexpr,
    FLUSH: gl.constexpr,
    DTYPE: gl.constexpr,
    PLANES: gl.constexpr,
    SHIFTS: gl.constexpr,
    BITS: gl.constexpr,
    ZERO: gl.constexpr,
    SCALES: gl.constexpr,
    MODE: gl.constexpr,
    EXPONENT: gl.constexpr,
    BIAS: gl.constexpr,
    PAIRS: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """The numbers of step R of a chunk, two to a word, [rows, 16] for each run; and scale and zero of the last group."""
    MAGIC: gl.constexpr = 0x64006400 if DTYPE == gl.float16 else 0x43004300
    POWER: gl.constexpr = 1024.0 if DTYPE == gl.float16 else 128.0
    N0: gl.constexpr = 16 // PLANES[0]
    REST: gl.constexpr = ((1 << (BITS - 1)) - 1) * 0x00010001
    SIGN: gl.constexpr = (1 << (BITS - 1)) * 0x00010001
    LOW: gl.constexpr = (10 if DTYPE == gl.float16 else 7) - (BITS - 1 - EXPONENT)
    UP: gl.constexpr = 2.0 ** ((15 if DTYPE == gl.float16 else 127) - BIAS)
    found = ()
    for i in gl.static_range(RUNS):
        if (R * RUNS + i) % FLUSH == 0:
            if not WHOLE:
                factor = scale_value(raw[i // FLUSH], SCALES)
                if SCALES == 1 and MODE == 1:
                    # The largest float times the largest step stays in the range of float16.
                    factor = factor * 0.25
            if ZERO < 0:
                less = raw_zero[i // FLUSH].to(gl.float32)
        if MODE == 2:
            t = values[(R * RUNS + i) % N0]
        elif PAIRS and MODE == 0 and len(PLANES) == 1:
            t = _with_exponent(w[0] >> ((R * RUNS + i) % N0 * BITS), magic, REST | SIGN)
        else:
            t = codes_at(w[0], w[1], w[2], R * RUNS + i, PLANES, SHIFTS)
        if PAIRS:
            if MODE == 0:
                if len(PLANES) > 1:
                    t = t | MAGIC
                t = _less(t, _spread(_rounded(less + POWER, less + POWER, DTYPE), t), DTYPE)
            elif MODE == 1:
                # The bits of the float in place, then the difference of the biases.
                t = ((t & SIGN) << (16 - BITS)) | ((t & REST) << LOW)
                t = _times(t, _spread(_rounded(less * 0 + UP, less * 0 + UP, DTYPE), t), DTYPE)
            if not WHOLE:
                t = _times(t, _spread(_rounded(factor, factor, DTYPE), t), DTYPE)
        else:
            if MODE == 2:
                low = t.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
                high = (t >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
            else:
                zero = _spread(less, t)
                low = numbers32(t & 0xFFFF, table, zero, MODE, BITS, EXPONENT, BIAS)
                high = numbers32((t >> 16) & 0xFFFF, table, zero, MODE, BITS, EXPONENT, BIAS)
            if not WHOLE:
                scales = _spread(factor, t)
                low = low * scales
                high = high * scales
            t = _rounded(low, high, DTYPE)
        found = found + (t,)
    return found, factor, less


@gluon.jit
def _operand(pairs, RUNS: gl.constexpr, BN: gl.constexpr, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Runs of pairs side by side, [BN, 32 RUNS], as left operand: nothing changes lanes."""
    if RUNS == 4:
        both = gl.join(gl.join(pairs[0], pairs[1]), gl.join(pairs[2], pairs[3]))
        both = gl.reshape(gl.permute(both, (0, 3, 2, 1)), [BN, 64])
    elif RUNS == 2:
        both = gl.reshape(gl.permute(gl.join(pairs[0], pairs[1]), (0, 2, 1)), [BN, 32])
    else:
        both = pairs[0]
    low = both.to(gl.int16).to(DTYPE, bitcast=True)
    high = (both >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    wide = gl.reshape(gl.join(low, high), [BN, 32 * RUNS])
    return gl.convert_layout(wide, LAYOUT, assert_trivial=True)


@gluon.jit
def _after(place, begin, chunks, down):
    """The chunk after one in a program's order: the next of its tile, or the first that it has of the tile before.

    A place is (tile along the rows of W, tile along the batch, chunk, and the one at which the program leaves the tile).
    """
    n, m, c, stop = place
    ends = c + 1 == stop
    down_one = ends & (m == 0)
    next_n = gl.where(down_one, n - 1, n)
    next_m = gl.where(ends, gl.where(m == 0, down - 1, m - 1), m)
    first = gl.maximum(begin - (next_n * down + next_m) * chunks, 0)
    return next_n, next_m, gl.where(ends, first, c + 1), gl.where(ends, chunks, stop)


@gluon.jit
def _begin(program, programs, units, chunks, SPLIT: gl.constexpr, LAG: gl.constexpr):
    """The first of a program's units (chunks of tiles, one tile after the other).

    With SPLIT, a tile is shared by so many programs, of which the last has LAG chunks more than the others: these have
    written their sums when it comes to read them.
    """
    if SPLIT == 0:
        return (program * units) // programs
    return program // SPLIT * chunks + program % SPLIT * (chunks - LAG) // SPLIT


@gluon.jit
def _side_by_side(sums, BM: gl.constexpr, BN: gl.constexpr):
    """Sums [BN, BM] in the order in which lanes hold them: four of a lane, then the lanes of a warp, so that each stores and
    loads 16 bytes beside its neighbour's."""
    sums = gl.reshape(sums, [BN // 16, 2, 8, BM // 8, 4, 2])
    return gl.reshape(gl.permute(sums, (3, 0, 2, 4, 1, 5)), [BN * BM])


@gluon.jit
def _in_place(sums, BM: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr):
    """_side_by_side back to [BN, BM]."""
    sums = gl.reshape(sums, [BM // 8, BN // 16, 8, 4, 2, 2])
    sums = gl.reshape(gl.permute(sums, (1, 4, 2, 0, 3, 5)), [BN, BM])
    return gl.convert_layout(sums, LAYOUT, assert_trivial=True)


@gluon.jit
def _halves(sums, BM: gl.constexpr, BN: gl.constexpr):
    """[BN, BM] as two of [BN, BM / 2]: the first columns and the second."""
    return gl.split(gl.permute(gl.reshape(sums, [BN, 2, BM // 2]), (0, 2, 1)))


@gluon.jit
def _store(
    y,
    staged,
    sums,
    first_row,
    first_line,
    batch,
    rows,
    BM: gl.constexpr,
    BN: gl.constexpr,
    PART: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Sums [BN, BM] to Y, by way of shared memory, where they turn from rows of W to rows of Y; PART rows of Y at a time."""
    if BM > PART:
        first, second = _halves(sums, BM, BN)
        _store(y, staged, first, first_row, first_line, batch, rows, BM // 2, BN, PART, LAYOUT)
        _store(y, staged, second, first_row, first_line + BM // 2, batch, rows, BM // 2, BN, PART, LAYOUT)
    else:
        staged.store(gl.permute(sums, (1, 0)).to(y.dtype.element_ty))
        to_row = first_row + gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))
        to_line = first_line + gl.arange(0, BM, gl.SliceLayout(1, LAYOUT))
        to_ok = (to_line < batch)[:, None] & (to_row < rows)[None, :]
        gl.store(y + to_line[:, None] * rows + to_row[None, :], staged.load(LAYOUT), to_ok)


@gluon.jit
def _ask_lines(
    x,
    xs,
    full,
    empty,
    place,
    stage,
    phase,
    exists,
    R: gl.constexpr,
    GROUPED: gl.constexpr,
    BM: gl.constexpr,
    BK: gl.constexpr,
    SPAN: gl.constexpr,
):
    """Asks for the tile of activations of a step (R, counted within the chunk at `place`), once no warpgroup reads the one
    that was there before. phase: the parity of how often the stage was filled."""
    _, m, c, _ = place
    if GROUPED > 1:
        mbarrier.wait(empty.index(stage), phase ^ 1, pred=exists)
    mbarrier.expect(full.index(stage), BM * BK * 2, pred=exists)
    tma.async_copy_global_to_shared(
        x, [m * BM, c * SPAN + R * BK], full.index(stage), xs.index(stage), pred=exists
    )


@gluon.jit
def slot_of(step, WHICH: gl.constexpr, BITS: gl.constexpr, AHEAD: gl.constexpr, BK: gl.constexpr):
    """Where the words of a plane that a warpgroup has at a step are."""
    TILES: gl.constexpr = tiles_of(BITS, AHEAD, BK)
    return step // period_of(BITS, BK) % TILES + WHICH * TILES


@gluon.jit
def _ask_words(
    planes,
    words,
    rows,
    padded,
    place,
    step,
    exists,
    R: gl.constexpr,
    AHEAD: gl.constexpr,
    WHICH: gl.constexpr,
    WARPS: gl.constexpr,
    ROWS: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    SPAN: gl.constexpr,
    PLANES: gl.constexpr,
    SHIFTS: gl.constexpr,
):
    """Asks for the words that begin at a step, of each plane that has some."""
    n, _, c, _ = place
    lanes: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    word = gl.arange(0, 16, gl.SliceLayout(0, lanes))
    row = n * BN + WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, lanes))
    for p in gl.static_range(len(PLANES)):
        if R % period_of(PLANES[p], BK) == 0:
            width = padded // (32 * (16 // PLANES[p])) * 16
            tile = (c * (SPAN // BK) + R) // period_of(PLANES[p], BK)
            at = (rows * SHIFTS[p] * (padded // 32) + tile * 16) + row[:, None] * width + word[None, :]
            # The second chunk of an iteration may not exist; there are no activations for it either.
            ok = (row < rows)[:, None] & (exists & (tile < width // 16))
            slot = slot_of(step, WHICH, PLANES[p], AHEAD, BK)
            async_copy.async_copy_global_to_shared(planes[p].index(slot), words + at, ok)
    async_copy.commit_group()


@gluon.jit
def _take_words(
    planes,
    w,
    values,
    entries,
    step,
    R: gl.constexpr,
    AHEAD: gl.constexpr,
    WHICH: gl.constexpr,
    BK: gl.constexpr,
    PLANES: gl.constexpr,
    MODE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """The words that begin at a step, in place of those before them; and what a table has for them."""
    found = ()
    for p in gl.static_range(3):
        if p < len(PLANES):
            if R % period_of(PLANES[p], BK) == 0:
                some = planes[p].index(slot_of(step, WHICH, PLANES[p], AHEAD, BK)).load(LAYOUT)
            else:
                some = w[p]
        else:
            some = found[0]
        found = found + (some,)
    if MODE == 2:
        if R % (4 * 32 // BK) == 0:
            values = looked_up(found[0], entries)
    return found, values


@gluon.jit
def _multiply(
    x,
    words,
    scale,
    zeros,
    row_scale,
    table,
    y,
    parts,
    flags,
    xs,
    planes,
    staged,
    full,
    empty,
    begin,
    left,
    chunks,
    down,
    units,
    batch,
    rows,
    padded,
    PLANES: gl.constexpr,
    SHIFTS: gl.constexpr,
    BITS: gl.constexpr,
    ZERO: gl.constexpr,
    GROUP: gl.constexpr,
    GROUPS: gl.constexpr,
    SCALES: gl.constexpr,
    MODE: gl.constexpr,
    EXPONENT: gl.constexpr,
    BIAS: gl.constexpr,
    DTYPE: gl.constexpr,
    PAIRS: gl.constexpr,
    PDL: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    AHEAD: gl.constexpr,
    SPLIT: gl.constexpr,
    LAG: gl.constexpr,
    GROUPED: gl.constexpr,
    WARPS: gl.constexpr,
    WHICH: gl.constexpr,
):
    """The work of the warps of a part: their rows of each tile of the program, of which they hand on the sums by themselves.

    With two parts, each asks for every other tile of activations.
    """
    J: gl.constexpr = runs_of(PLANES, BK)
    SPAN: gl.constexpr = 32 * J
    STEPS: gl.constexpr = SPAN // BK  # of a chunk
    RUNS: gl.constexpr = BK // 32  # of a step
    STAGES: gl.constexpr = AHEAD + 2  # one of them for a part that is a step behind the other
    ROWS: gl.constexpr = BN // GROUPED
    PART: gl.constexpr = staged_rows(BM, PLANES)
    WHOLE: gl.constexpr = GROUPS == 1
    LONG: gl.constexpr = 1 if WHOLE else GROUP // 32
    FLUSH: gl.constexpr = J if (WHOLE or LONG % J == 0) else (LONG if J % LONG == 0 else 1)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    word_layout: gl.constexpr = words_layout(WARPS, ROWS)
    row_layout: gl.constexpr = gl.SliceLayout(1, word_layout)
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    total = left - begin
    local = WHICH * ROWS + gl.arange(0, ROWS, row_layout)
    entries = ()
    if MODE == 2:
        entries = bytes_of(table, 0) + bytes_of(table, 1)

    # From the last tile to the first: what others wait for comes first, and what waits for others last. The places of this
    # chunk and of those that steps are asked for: the next tile's first are asked for and decoded while this one ends.
    tile = (left - 1) // chunks
    here = (tile // down, tile % down, gl.maximum(begin - tile * chunks, 0), left - tile * chunks)
    places = (here,)
    for i in gl.static_range((STEPS - 1 + AHEAD) // STEPS):
        places = places + (_after(places[i], begin, chunks, down),)
    # What belongs to the matrix does not wait for the launch in front.
    for s in gl.static_range(AHEAD):
        _ask_words(
            planes, words, rows, padded, places[s // STEPS], s, s // STEPS < total, s % STEPS,
            AHEAD, WHICH, WARPS, ROWS, BN, BK, SPAN, PLANES, SHIFTS,
        )  # fmt: skip
    raw0, raw_zero0 = _per_group(
        scale, zeros, local, rows, here, 0, SPAN, BN, GROUP, GROUPS, RUNS, FLUSH, WHOLE, ZERO
    )
    raw, raw_zero = _per_group(
        scale, zeros, local, rows, here, 1, SPAN, BN, GROUP, GROUPS, RUNS, FLUSH, WHOLE, ZERO
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
    for s in gl.static_range(AHEAD):
        if s % GROUPED == WHICH:
            _ask_lines(
                x, xs, full, empty, places[s // STEPS], s, 0, s // STEPS < total, s % STEPS, GROUPED, BM, BK, SPAN
            )  # fmt: skip
    async_copy.wait_group(AHEAD - 1)
    tl.debug_barrier()
    # The exponents that make codes numbers, in a register: a batch is not negative, which the assembler does not know.
    magic = (0x64006400 if DTYPE == gl.float16 else 0x43004300) ^ (batch >> 31)
    none = gl.zeros([ROWS, 16], gl.int32, word_layout)
    factor = gl.zeros([ROWS], gl.float32, row_layout)
    less = gl.full([ROWS], ZERO if ZERO > 0 else 0, gl.float32, row_layout)
    w, values = _take_words(
        planes, (none, none, none), (none, none, none, none), entries, 0, 0, AHEAD, WHICH, BK, PLANES, MODE,
        word_layout,
    )  # fmt: skip
    pairs, factor, less = _decoded(
        w, values, table, factor, less, raw0, raw_zero0, magic, 0, RUNS, FLUSH,
        DTYPE, PLANES, SHIFTS, BITS, ZERO, SCALES, MODE, EXPONENT, BIAS, PAIRS, WHOLE,
    )  # fmt: skip
    a = _operand(pairs, RUNS, ROWS, DTYPE, operand)
    before = a
    end = left
    stage = 0
    phase = 0
    while left > begin:
        tile = (left - 1) // chunks
        first = gl.maximum(begin, tile * chunks)
        acc = gl.zeros([ROWS, BM], gl.float32, mma)
        for chunk in range(end - left, end - first):
            for r in gl.static_range(STEPS):
                now = chunk * STEPS + r
                mbarrier.wait(full.index(stage), phase)
                acc = warpgroup_mma(a, xs.index(stage).permute((1, 0)), acc, is_async=True)
                # `before` lives until the product that reads it is done: without this the assembler waits after each.
                acc, before = warpgroup_mma_wait(1, deps=[acc, before])
                async_copy.wait_group(AHEAD - 2)
                # All its warps are done with the product of the step before, and see the words of the next.
                tl.debug_barrier()
                if GROUPED > 1:
                    mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES, stage) - 1), pred=now > 0)
                place = places[(r + AHEAD) // STEPS]
                exists = chunk + (r + AHEAD) // STEPS < total
                if (r + AHEAD) % GROUPED == WHICH:
                    wraps = stage >= STAGES - AHEAD
                    to_stage = stage + gl.where(wraps, AHEAD - STAGES, AHEAD)
                    _ask_lines(
                        x, xs, full, empty, place, to_stage, phase ^ wraps.to(gl.int32), exists, (r + AHEAD) % STEPS,
                        GROUPED, BM, BK, SPAN,
                    )  # fmt: skip
                _ask_words(
                    planes, words, rows, padded, place, now + AHEAD, exists, (r + AHEAD) % STEPS,
                    AHEAD, WHICH, WARPS, ROWS, BN, BK, SPAN, PLANES, SHIFTS,
                )  # fmt: skip
                # The next step's weights, while the product runs.
                w, values = _take_words(
                    planes, w, values, entries, now + 1, (r + 1) % STEPS, AHEAD, WHICH, BK, PLANES, MODE,
                    word_layout,
                )  # fmt: skip
                pairs, factor, less = _decoded(
                    w, values, table, factor, less, raw, raw_zero, magic, (r + 1) % STEPS, RUNS, FLUSH,
                    DTYPE, PLANES, SHIFTS, BITS, ZERO, SCALES, MODE, EXPONENT, BIAS, PAIRS, WHOLE,
                )  # fmt: skip
                before = a
                a = _operand(pairs, RUNS, ROWS, DTYPE, operand)
                wraps = stage == STAGES - 1
                stage = gl.where(wraps, 0, stage + 1)
                phase ^= wraps.to(gl.int32)
                place = places[(r + 2) // STEPS]
                raw, raw_zero = _per_group(
                    scale, zeros, local, rows, place, (r + 2) % STEPS, SPAN, BN, GROUP, GROUPS, RUNS, FLUSH, WHOLE, ZERO
                )  # fmt: skip
            moved = ()
            for i in gl.static_range(len(places) - 1):
                moved = moved + (places[i + 1],)
            places = moved + (_after(places[len(places) - 1], begin, chunks, down),)
        acc, before = warpgroup_mma_wait(0, deps=[acc, before])
        first_row = tile // down * BN + WHICH * ROWS
        first_line = tile % down * BM

        if left < (tile + 1) * chunks:
            sums = _side_by_side(acc, BM, ROWS)
            mine = program * GROUPED + WHICH
            gl.store(parts + mine * (ROWS * BM) + gl.arange(0, ROWS * BM, sums.type.layout), sums)
            tl.debug_barrier()
            gl.atomic_xchg(flags + mine, 1, sem="release", scope="gpu")
        else:
            # What lower programs have of this tile: they ran it first.
            other = program
            from_unit = begin
            while from_unit > tile * chunks:
                other -= 1
                its = other * GROUPED + WHICH
                from_unit = _begin(other, programs, units, chunks, SPLIT, LAG)
                while gl.atomic_cas(flags + its, 1, 0, sem="acquire", scope="gpu") == 0:
                    pass
                tl.debug_barrier()
                inside = gl.arange(0, ROWS * BM, _side_by_side(acc, BM, ROWS).type.layout)
                sums = gl.load(parts + its * (ROWS * BM) + inside, cache_modifier=".cg")
                acc += _in_place(sums, BM, ROWS, mma)
            out_row = gl.arange(0, ROWS, gl.SliceLayout(1, mma))
            out_row = gl.where(first_row + out_row < rows, first_row + out_row, 0)
            if WHOLE:
                acc = acc * scale_value(gl.load(scale + out_row), SCALES)[:, None]
            if SCALES == 1:
                acc = (
                    acc * (gl.load(row_scale + out_row) * (4.0 if MODE == 1 and not WHOLE else 1.0))[:, None]
                )
            _store(
                y, staged.index(WHICH), acc, first_row, first_line, batch, rows, BM, ROWS, PART, out_layout
            )
        left = first
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["batch"])
def wgmma_kernel(
    x,  # descriptor of [batch, cols] in tiles [BM, BK]
    words,  # i32: all planes
    scale,  # [rows, GROUPS]
    zeros,  # u8 [rows, GROUPS]
    row_scale,  # f32 [rows]
    table,  # f16 [16]
    y,  # [batch, rows]
    parts,  # f32 [programs, GROUPED, BN / GROUPED * BM]: of the tile that a program begins and does not end
    flags,  # i32 [programs, GROUPED]: zeros before and after
    batch,
    rows,
    cols,
    padded,
    PLANES: gl.constexpr,
    SHIFTS: gl.constexpr,
    BITS: gl.constexpr,
    ZERO: gl.constexpr,
    GROUP: gl.constexpr,
    GROUPS: gl.constexpr,
    SCALES: gl.constexpr,
    MODE: gl.constexpr,
    EXPONENT: gl.constexpr,
    BIAS: gl.constexpr,
    DTYPE: gl.constexpr,
    PAIRS: gl.constexpr,  # numbers of 16 bits made two at a time, else through float32
    PDL: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    AHEAD: gl.constexpr,  # steps from asking to use
    SPLIT: gl.constexpr,  # programs to a tile; 0: shares are equal, and tiles begin anywhere in them
    LAG: gl.constexpr,
    GROUPED: gl.constexpr,  # parts of a tile's rows of W, each worked at by warps of its own
    WARPS: gl.constexpr,  # of a part
):
    SPAN: gl.constexpr = 32 * runs_of(PLANES, BK)
    STAGES: gl.constexpr = AHEAD + 2
    # Rows of 64 bytes: eight of them read at once meet in no bank.
    shared_w: gl.constexpr = gl.SwizzledSharedLayout(4, 2, 4, [1, 0])
    staged_layout: gl.constexpr = gl.NVMMASharedLayout(128, y.dtype.element_ty.primitive_bitwidth, 2)

    xs = gl.allocate_shared_memory(DTYPE, [STAGES, BM, BK], x.layout)
    planes = ()
    for p in gl.static_range(len(PLANES)):
        planes = planes + (
            gl.allocate_shared_memory(
                gl.int32, [GROUPED * tiles_of(PLANES[p], AHEAD, BK), BN // GROUPED, 16], shared_w
            ),
        )
    staged = gl.allocate_shared_memory(
        y.dtype.element_ty, [GROUPED, staged_rows(BM, PLANES), BN // GROUPED], staged_layout
    )
    # Tiles of activations that are there, and those that all warpgroups are done with.
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=GROUPED)

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    chunks = (padded + SPAN - 1) // SPAN
    down = (batch + BM - 1) // BM
    units = (rows + BN - 1) // BN * down * chunks
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    begin = _begin(program, programs, units, chunks, SPLIT, LAG)
    left = _begin(program + 1, programs, units, chunks, SPLIT, LAG)
    if GROUPED == 1:
        _multiply(
            x, words, scale, zeros, row_scale, table, y, parts, flags, xs, planes, staged, full, empty,
            begin, left, chunks, down, units, batch, rows, padded,
            PLANES, SHIFTS, BITS, ZERO, GROUP, GROUPS, SCALES, MODE, EXPONENT, BIAS, DTYPE, PAIRS, PDL,
            BM, BN, BK, AHEAD, SPLIT, LAG, GROUPED, WARPS, 0,
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    x, words, scale, zeros, row_scale, table, y, parts, flags, xs, planes, staged, full, empty,
                    begin, left, chunks, down, units, batch, rows, padded,
                    PLANES, SHIFTS, BITS, ZERO, GROUP, GROUPS, SCALES, MODE, EXPONENT, BIAS, DTYPE, PAIRS, PDL,
                    BM, BN, BK, AHEAD, SPLIT, LAG, GROUPED, WARPS, 0,
                )),
                (_multiply, (
                    x, words, scale, zeros, row_scale, table, y, parts, flags, xs, planes, staged, full, empty,
                    begin, left, chunks, down, units, batch, rows, padded,
                    PLANES, SHIFTS, BITS, ZERO, GROUP, GROUPS, SCALES, MODE, EXPONENT, BIAS, DTYPE, PAIRS, PDL,
                    BM, BN, BK, AHEAD, SPLIT, LAG, GROUPED, WARPS, 1,
                )),
            ],
            [WARPS],
            [256],
        )  # fmt: skip
