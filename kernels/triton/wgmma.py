# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
# Triton adds tuples, it does not unpack them.
# ruff: noqa: RUF005
"""Products of a packed matrix with 17 rows of activations or more on Hopper: Y = X W^T by asynchronous instructions (wgmma).

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

from nstf.kernels.triton.wgmma_decode import bytes_of, decoded, looked_up, operand_of, per_group, scale_value
from nstf.kernels.triton.wgmma_share import after, begin_of, in_place, side_by_side, store_turned


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
    twin,
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
    TWICE: gl.constexpr,
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
        places = places + (after(places[i], begin, chunks, down),)
    # What belongs to the matrix does not wait for the launch in front.
    for s in gl.static_range(AHEAD):
        _ask_words(
            planes, words, rows, padded, places[s // STEPS], s, s // STEPS < total, s % STEPS,
            AHEAD, WHICH, WARPS, ROWS, BN, BK, SPAN, PLANES, SHIFTS,
        )  # fmt: skip
    raw0, raw_zero0 = per_group(
        scale, zeros, local, rows, here, 0, SPAN, BN, GROUP, GROUPS, RUNS, FLUSH, WHOLE, ZERO
    )
    raw, raw_zero = per_group(
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
    pairs, factor, less = decoded(
        w, values, table, factor, less, raw0, raw_zero0, magic, 0, RUNS, FLUSH,
        DTYPE, PLANES, SHIFTS, BITS, ZERO, SCALES, MODE, EXPONENT, BIAS, PAIRS, WHOLE,
    )  # fmt: skip
    a = operand_of(pairs, RUNS, ROWS, DTYPE, operand)
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
                pairs, factor, less = decoded(
                    w, values, table, factor, less, raw, raw_zero, magic, (r + 1) % STEPS, RUNS, FLUSH,
                    DTYPE, PLANES, SHIFTS, BITS, ZERO, SCALES, MODE, EXPONENT, BIAS, PAIRS, WHOLE,
                )  # fmt: skip
                before = a
                a = operand_of(pairs, RUNS, ROWS, DTYPE, operand)
                wraps = stage == STAGES - 1
                stage = gl.where(wraps, 0, stage + 1)
                phase ^= wraps.to(gl.int32)
                place = places[(r + 2) // STEPS]
                raw, raw_zero = per_group(
                    scale, zeros, local, rows, place, (r + 2) % STEPS, SPAN, BN, GROUP, GROUPS, RUNS, FLUSH, WHOLE, ZERO
                )  # fmt: skip
            moved = ()
            for i in gl.static_range(len(places) - 1):
                moved = moved + (places[i + 1],)
            places = moved + (after(places[len(places) - 1], begin, chunks, down),)
        acc, before = warpgroup_mma_wait(0, deps=[acc, before])
        first_row = tile // down * BN + WHICH * ROWS
        first_line = tile % down * BM

        if left < (tile + 1) * chunks:
            sums = side_by_side(acc, BM, ROWS)
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
                from_unit = begin_of(other, programs, units, chunks, SPLIT, LAG)
                while gl.atomic_cas(flags + its, 1, 0, sem="acquire", scope="gpu") == 0:
                    pass
                tl.debug_barrier()
                inside = gl.arange(0, ROWS * BM, side_by_side(acc, BM, ROWS).type.layout)
                sums = gl.load(parts + its * (ROWS * BM) + inside, cache_modifier=".cg")
                acc += in_place(sums, BM, ROWS, mma)
            out_row = gl.arange(0, ROWS, gl.SliceLayout(1, mma))
            out_row = gl.where(first_row + out_row < rows, first_row + out_row, 0)
            if WHOLE:
                acc = acc * scale_value(gl.load(scale + out_row), SCALES)[:, None]
            if SCALES == 1:
                acc = (
                    acc * (gl.load(row_scale + out_row) * (4.0 if MODE == 1 and not WHOLE else 1.0))[:, None]
                )
            store_turned(
                y, staged.index(WHICH), acc, first_row, first_line, batch, rows, BM, ROWS, PART, out_layout
            )
            if TWICE:
                store_turned(
                    twin,
                    staged.index(WHICH),
                    acc,
                    first_row,
                    first_line,
                    batch,
                    rows,
                    BM,
                    ROWS,
                    PART,
                    out_layout,
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
    twin,  # another place of Y, such as in another GPU's memory (TWICE)
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
    TWICE: gl.constexpr,
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
    begin = begin_of(program, programs, units, chunks, SPLIT, LAG)
    left = begin_of(program + 1, programs, units, chunks, SPLIT, LAG)
    if GROUPED == 1:
        _multiply(
            x, words, scale, zeros, row_scale, table, y, twin, parts, flags, xs, planes, staged, full, empty,
            begin, left, chunks, down, units, batch, rows, padded,
            PLANES, SHIFTS, BITS, ZERO, GROUP, GROUPS, SCALES, MODE, EXPONENT, BIAS, DTYPE, PAIRS, TWICE, PDL,
            BM, BN, BK, AHEAD, SPLIT, LAG, GROUPED, WARPS, 0,
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    x, words, scale, zeros, row_scale, table, y, twin, parts, flags, xs, planes, staged, full, empty,
                    begin, left, chunks, down, units, batch, rows, padded,
                    PLANES, SHIFTS, BITS, ZERO, GROUP, GROUPS, SCALES, MODE, EXPONENT, BIAS, DTYPE, PAIRS, TWICE, PDL,
                    BM, BN, BK, AHEAD, SPLIT, LAG, GROUPED, WARPS, 0,
                )),
                (_multiply, (
                    x, words, scale, zeros, row_scale, table, y, twin, parts, flags, xs, planes, staged, full, empty,
                    begin, left, chunks, down, units, batch, rows, padded,
                    PLANES, SHIFTS, BITS, ZERO, GROUP, GROUPS, SCALES, MODE, EXPONENT, BIAS, DTYPE, PAIRS, TWICE, PDL,
                    BM, BN, BK, AHEAD, SPLIT, LAG, GROUPED, WARPS, 1,
                )),
            ],
            [WARPS],
            [256],
        )  # fmt: skip
