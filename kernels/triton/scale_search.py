# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Rounding to nearest on a GPU, with the search of every group's scale, in one launch.

quantizers/rounding/search.py says what is searched, and is the reference. A program takes a few groups through all
candidates, some columns at a time; groups do not influence each other. What differs between formats are numbers in memory
(`pack`), so that only uniform grids against tables, and narrow groups against whole rows, are compiled apart.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# How scales are stored: SCALE_MODES of quantizers/rounding/sweep.py, and as they are with the row's largest kept.
F16, F32, U8, E8M0, LARGEST = range(5)
# Groups of a program, columns at a time, warps: a narrow group's sums stay inside a warp, a long row needs many threads.
NARROW, WIDE = (4, 32, 1), (1, 1024, 4)
WIDEST_NARROW = 256
HEAD = tl.constexpr(9)  # numbers before the ratios in what `pack` makes


@triton.jit
def _point(y, zero, form, table, top, TABLE: tl.constexpr):
    """(code - zero or the table's value, code) of the level nearest to y."""
    if not TABLE:
        # Adding 1.5 * 2^23 leaves no bits for a fraction: to the nearest, ties to even.
        code = (tl.minimum(tl.maximum(y + zero, 0.0), top) + 12582912.0) - 12582912.0
        return code - zero, code.to(tl.int32)
    code = tl.zeros_like(y).to(tl.int32)
    last = top.to(tl.int32)
    steps = tl.load(form + 7).to(tl.int32)
    for step in range(steps):
        probe = code + (1 << (steps - 1 - step))
        inside = probe <= last
        above = y > tl.load(table + last + probe, mask=inside, other=float("inf"))
        code = tl.where(inside & above, probe, code)
    return tl.load(table + code), code


@triton.jit
def _power_of_two(x):
    """The largest one that is not above |x|; 0 for subnormal numbers."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _stored(scale, mode, largest):
    """`Levels.round_scale`. mode: a scalar; largest: the rows' super-scales."""
    found = scale
    if mode == 0:
        found = tl.minimum(tl.maximum(scale, -65504.0), 65504.0).to(tl.float16).to(tl.float32)
    if mode == 2:
        steps = tl.where(largest == 0.0, 0.0, tl.div_rn(256.0, tl.where(largest == 0.0, 1.0, largest)))
        code = (tl.minimum(tl.maximum(scale * steps, -1.0), 300.0) + 12582912.0) - 12582912.0
        found = largest * tl.minimum(tl.maximum(code, 1.0), 256.0) * 0.00390625
    if mode == 3:
        power = _power_of_two(scale)
        found = tl.where(power == 0.0, 5.877471754111438e-39, power)
    return found


@triton.jit
def _inverse(scale):
    return tl.where(scale == 0.0, 0.0, tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale)))


@triton.jit
def _inputs(weight, importance, at, column, left, start, COLS: tl.constexpr):
    """Columns `start` on of every group and their importance, [GROUPS, COLS]; zeros beyond the groups' ends."""
    lane = start + tl.arange(0, COLS)[None, :]
    inside = lane < left[:, None]
    x = tl.load(weight + at[:, None] + lane, mask=inside, other=0.0)
    return x, tl.load(importance + column[:, None] + lane, mask=inside, other=0.0)


@triton.jit
def _loss(
    weight, importance, at, column, left, width, scale, zero, form, table, top,
    TABLE: tl.constexpr, GROUPS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """sum_i importance_i (x_i - q(x_i))^2 of every group."""
    inverse = _inverse(scale)
    lost = tl.zeros([GROUPS, COLS], tl.float32)
    for start in range(0, width, COLS):
        x, h = _inputs(weight, importance, at, column, left, start, COLS)
        point, _ = _point(x * inverse[:, None], zero[:, None], form, table, top, TABLE)
        error = x - point * scale[:, None]
        lost += error * error * h
    return tl.sum(lost, 1)


@triton.jit
def _extremes(
    weight, importance, at, column, left, width, GROUPS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """(least value or 0, greatest or 0, the first value of greatest magnitude) of every group."""
    lane = tl.zeros([GROUPS, 1], tl.int32) + tl.arange(0, COLS)[None, :]
    low = tl.zeros([GROUPS, COLS], tl.float32)
    high = tl.zeros([GROUPS, COLS], tl.float32)
    peak = tl.zeros([GROUPS, COLS], tl.float32)
    place = lane
    for start in range(0, width, COLS):
        x, _ = _inputs(weight, importance, at, column, left, start, COLS)
        low, high = tl.minimum(low, x), tl.maximum(high, x)
        above = tl.abs(x) > tl.abs(peak)
        peak = tl.where(above, x, peak)
        place = tl.where(above, start + lane, place)
    size = tl.max(tl.abs(peak), 1)
    first = tl.min(tl.where(tl.abs(peak) == size[:, None], place, width + COLS), 1)
    peak = tl.sum(tl.where(place == first[:, None], peak, 0.0), 1)
    return tl.min(low, 1), tl.max(high, 1), peak


_SIZES = ["margin", "rows", "cols", "most_groups", "form_stride", "weight_stride", "frozen"]
_ARRAYS = [
    "weight", "importance", "form", "largest", "scale_of", "zero_of", "loss_of", "top_of", "codes", "errors",
]  # fmt: skip


# Not compiled again for other sizes, nor for views that start anywhere.
@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ARRAYS)
def _round(
    weight,  # f32 [forms or 1, rows, cols]
    importance,  # f32 [cols]
    form,  # f32 [forms, numbers]: see `pack`
    largest,  # f32 [forms, rows]: before the margin, or what LARGEST adds to
    scale_of,  # f32 [forms, rows, most_groups]
    zero_of,  # f32 [forms, rows, most_groups]
    loss_of,  # f32 [forms, rows, most_groups]
    top_of,  # f32 [forms, rows]: the super-scales used
    codes,  # u8 [forms, rows, cols]
    errors,  # f32 [forms, rows, cols]
    margin,
    rows,
    cols,
    most_groups,
    form_stride,
    weight_stride,
    frozen,
    TABLE: tl.constexpr,
    GROUPS: tl.constexpr,
    COLS: tl.constexpr,
):
    which = tl.program_id(1).to(tl.int64)
    form += which * form_stride
    weight += which * weight_stride
    codes += which * rows * cols
    errors += which * rows * cols
    largest += which * rows
    top_of += which * rows
    width = tl.minimum(tl.load(form + 8).to(tl.int32), cols)
    groups = tl.cdiv(cols, width)
    index = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    live = index < rows * groups
    row, group = index // groups, index % groups
    index = which * rows * most_groups + row * most_groups + group
    column = group * width
    left = tl.where(live, tl.minimum(width, cols - column), 0)
    at = row.to(tl.int64) * cols + column
    top, reach = tl.load(form), tl.load(form + 1)
    mode, tries = tl.load(form + 2).to(tl.int32), tl.load(form + 3).to(tl.int32)
    ratios, fits = tl.load(form + 4).to(tl.int32), tl.load(form + 5).to(tl.int32)
    table = form + HEAD + ratios
    super_scale = tl.load(largest + row, mask=live & (mode == 2) & (frozen == 0), other=0.0)
    super_scale = tl.minimum(super_scale * margin, 65504.0).to(tl.float16).to(tl.float32)
    scale = tl.load(scale_of + index, mask=live & (frozen != 0), other=0.0)
    zero = tl.load(zero_of + index, mask=live & (frozen != 0), other=0.0)
    if frozen == 0:
        low, high, peak = _extremes(weight, importance, at, column, left, width, GROUPS, COLS)
        base = tl.where(tries == 3, high - low, tl.where(tries == 2, -peak, tl.abs(peak)))
        base = tl.where(mode == 3, _power_of_two(peak) * 0.25, tl.div_rn(base, reach + tl.zeros_like(base)))
        best = tl.full([GROUPS], float("inf"), tl.float32)
        for k in range(ratios * tries + fits):
            if k < ratios * tries:
                ratio = tl.load(form + HEAD + k // tries)
                turn = k % tries
                tried = _stored(
                    base * ratio * tl.where((tries == 2) & (turn == 1), -1.0, 1.0), mode, super_scale
                )
                middle = -low * ratio
                middle = tl.where(tried == 0.0, 0.0, tl.div_rn(middle, tl.where(tried == 0.0, 1.0, tried)))
                middle = (tl.minimum(tl.maximum(middle, -1e6), 1e6) + 12582912.0) - 12582912.0
                middle += tl.where(turn == 0, 0.0, tl.where(turn == 1, -1.0, 1.0))
                middle = tl.minimum(tl.maximum(middle, 0.0), top)
                with_zero = tl.where(tries == 3, middle, tl.load(form + 6))
            else:
                inverse = _inverse(scale)
                along = tl.zeros([GROUPS, COLS], tl.float32)
                across = tl.zeros([GROUPS, COLS], tl.float32)
                for start in range(0, width, COLS):
                    x, h = _inputs(weight, importance, at, column, left, start, COLS)
                    point, _ = _point(x * inverse[:, None], zero[:, None], form, table, top, TABLE)
                    along += point * h * x
                    across += point * h * point
                fitted = tl.div_rn(tl.sum(along, 1), tl.maximum(tl.sum(across, 1), 1e-30))
                tried = _stored(fitted, mode, super_scale)
                with_zero = zero
            lost = _loss(
                weight, importance, at, column, left, width, tried, with_zero, form, table, top,
                TABLE, GROUPS, COLS,
            )  # fmt: skip
            better = lost < best
            best = tl.where(better, lost, best)
            scale = tl.where(better, tried, scale)
            zero = tl.where(better, with_zero, zero)
        tl.store(scale_of + index, scale, mask=live)
        tl.store(zero_of + index, zero, mask=live)
        tl.store(top_of + row, super_scale, mask=live & (group == 0))
        tl.atomic_max(largest + row, scale, mask=live & (mode == 4))
    inverse = _inverse(scale)
    lost = tl.zeros([GROUPS, COLS], tl.float32)
    for start in range(0, width, COLS):
        x, h = _inputs(weight, importance, at, column, left, start, COLS)
        point, code = _point(x * inverse[:, None], zero[:, None], form, table, top, TABLE)
        error = x - point * scale[:, None]
        lost += error * error * h
        lane = start + tl.arange(0, COLS)[None, :]
        inside = lane < left[:, None]
        tl.store(codes + at[:, None] + lane, code.to(tl.uint8), mask=inside)
        tl.store(errors + at[:, None] + lane, error, mask=inside)
    tl.store(loss_of + index, tl.sum(lost, 1) * 0.5, mask=live)


class Groups(NamedTuple):
    """`scale`, `zero`: float32 [rows, groups]; `largest`: the super-scales, float32 [rows, 1], zeros without; `codes`: uint8
    and `errors`: weight less its rounded value, float32, both [rows, cols]; `losses`: half of each group's weighted squared
    error, float32 [rows, groups]. Of several forms all are [forms, ...], where one has fewer groups the rest is not set."""

    scale: Tensor
    zero: Tensor
    largest: Tensor
    codes: Tensor
    errors: Tensor
    losses: Tensor


def pack(
    count: int,
    reach: float,
    mode: int,
    ratios: Sequence[float],
    table: Sequence[float] = (),
    middles: Sequence[float] = (),
    *,
    width: int,
    zero_points: bool = False,
    signs: bool = False,
    fit: bool = False,
    device: torch.device,
) -> Tensor:
    """What the kernel knows of a format, float32; the arguments are those of `Levels`, `mode` as above. width: columns of a
    group."""
    tries = 3 if zero_points else 2 if signs else 1
    zero = 0 if table or zero_points else count // 2
    head = (
        count - 1,
        reach,
        mode,
        tries,
        len(ratios),
        2 if fit else 0,
        zero,
        (count - 1).bit_length(),
        width,
    )
    # middles[i - 1] decides between table[i - 1] and table[i]: it lies at the table's start + (count - 1) + i.
    numbers = [*head, *ratios, *table, *middles]
    return torch.tensor(numbers, dtype=torch.float32, device=device)


def round_groups(
    weight: Tensor,
    importance: Tensor,
    form: Tensor,
    widths: Sequence[int],
    table: bool,
    *,
    frozen: tuple[Tensor, Tensor] | None = None,
    largest: Tensor | None = None,
    margin: float = 1.0,
    errors: Tensor | None = None,
) -> Groups:
    """Every group of columns of `weight` float32 [rows, cols] rounded to nearest.

    importance: float32 [cols]. form: from `pack`; widths: the one it was made with; table: whether it has one. frozen:
    (scale, zero) instead of a search. largest: float32 [rows], what times `margin` are the super-scales under U8, and what
    is raised to each row's largest scale under LARGEST. errors: where they go. All contiguous.

    Several forms in one launch: form [forms, numbers], `widths` all narrow or all wide, `largest`, `frozen` and `errors`
    [forms, ...], and weight the same for all or [forms, rows, cols].
    """
    rows, cols = weight.shape[-2:]
    forms = form.shape[:-1]
    groups = max(triton.cdiv(cols, w) for w in widths)
    size, columns, warps = NARROW if is_narrow(widths[0], cols) else WIDE
    if errors is None:
        errors = weight.new_empty(*forms, rows, cols)
    codes = torch.empty(*forms, rows, cols, dtype=torch.uint8, device=weight.device)
    scale, zero, losses = weight.new_empty(3, *forms, rows, groups)
    if frozen is not None:
        scale, zero = frozen
    used = weight.new_empty(*forms, rows, 1)
    with torch.cuda.device_of(weight):
        _round[(triton.cdiv(rows * groups, size), len(widths))](
            weight,
            importance,
            form,
            form if largest is None else largest,
            scale,
            zero,
            losses,
            used,
            codes,
            errors,
            margin,
            rows,
            cols,
            groups,
            form.shape[-1],
            rows * cols if weight.dim() == 3 else 0,
            int(frozen is not None),
            TABLE=table,
            GROUPS=size,
            COLS=columns,
            num_warps=warps,
            num_stages=1,
        )
    return Groups(scale, zero, used, codes, errors, losses)


def is_narrow(width: int, cols: int) -> bool:
    """Whether groups of so many columns are a few to a program."""
    return min(width, cols) <= WIDEST_NARROW
