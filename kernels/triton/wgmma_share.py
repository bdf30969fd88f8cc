# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, misc"
"""How programs of wgmma.py share tiles: a program's chunks and their order, the sums it hands on, and its results."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def after(place, begin, chunks, down):
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
def begin_of(program, programs, units, chunks, SPLIT: gl.constexpr, LAG: gl.constexpr):
    """The first of a program's units (chunks of tiles, one tile after the other).

    With SPLIT, a tile is shared by so many programs, of which the last has LAG chunks more than the others: these have
    written their sums when it comes to read them.
    """
    if SPLIT == 0:
        return (program * units) // programs
    return program // SPLIT * chunks + program % SPLIT * (chunks - LAG) // SPLIT


@gluon.jit
def side_by_side(sums, BM: gl.constexpr, BN: gl.constexpr):
    """Sums [BN, BM] in the order in which lanes hold them: four of a lane, then the lanes of a warp, so that each stores and
    loads 16 bytes beside its neighbour's."""
    sums = gl.reshape(sums, [BN // 16, 2, 8, BM // 8, 4, 2])
    return gl.reshape(gl.permute(sums, (3, 0, 2, 4, 1, 5)), [BN * BM])


@gluon.jit
def in_place(sums, BM: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr):
    """side_by_side back to [BN, BM]."""
    sums = gl.reshape(sums, [BM // 8, BN // 16, 8, 4, 2, 2])
    sums = gl.reshape(gl.permute(sums, (1, 4, 2, 0, 3, 5)), [BN, BM])
    return gl.convert_layout(sums, LAYOUT, assert_trivial=True)


@gluon.jit
def _halves(sums, BM: gl.constexpr, BN: gl.constexpr):
    """[BN, BM] as two of [BN, BM / 2]: the first columns and the second."""
    return gl.split(gl.permute(gl.reshape(sums, [BN, 2, BM // 2]), (0, 2, 1)))


@gluon.jit
def store_turned(
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
        store_turned(y, staged, first, first_row, first_line, batch, rows, BM // 2, BN, PART, LAYOUT)
        store_turned(
            y, staged, second, first_row, first_line + BM // 2, batch, rows, BM // 2, BN, PART, LAYOUT
        )
    else:
        staged.store(gl.permute(sums, (1, 0)).to(y.dtype.element_ty))
        to_row = first_row + gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))
        to_line = first_line + gl.arange(0, BM, gl.SliceLayout(1, LAYOUT))
        to_ok = (to_line < batch)[:, None] & (to_row < rows)[None, :]
        gl.store(y + to_line[:, None] * rows + to_row[None, :], staged.load(LAYOUT), to_ok)
