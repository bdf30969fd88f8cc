"""One pass over the columns of a matrix that gives every weight its code, with or without error feedback.

For the columns j in order (H = (U + I) D (U + I)^T, dW = W - Q):

    target_j = W_j + sum_{i<j} dW_i U_ij        Q_j = nearest level to target_j

so that eta = dW (U + I) is the rounding error of the targets and tr(dW H dW^T) = sum_j D_j |eta_j|^2. This
is LDLQ (Chee et al., 2023) and equals GPTQ (Frantar et al., 2022, algorithm 1)
with its Cholesky factor of the inverse. The scales of a group are chosen when the sweep enters it, from the
targets as they are then. Rows do not influence each other. `nstf.kernels.cpu` has the same pass in C++;
this file is its reference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from nstf.kernels import cpu, triton
from nstf.kernels.formats.scales import group_count, group_size, per_column
from nstf.quantizers.rounding.factor import Factor
from nstf.quantizers.rounding.levels import F16_MAX, Levels
from nstf.quantizers.rounding.search import search

SCALE_MODES = ("f16", "f32", "u8", "e8m0")  # as in ldlq.cpp
BLOCK = 128  # columns between matrix products: what a Triton program keeps in registers
# Columns that take the errors of all before them in one product: the products of single blocks would fill a part of a GPU.
SPAN = 1024
SUPER_MARGIN = 1.05  # room for groups whose targets outgrow the weights they came from


@dataclass(frozen=True, eq=False)
class Grid:
    """The scales of a matrix: `scale` and `zero` float32 [rows, groups]; `largest` float32 [rows, 1], the
    super-scales of 8-bit scales (zeros otherwise); `group` columns share a scale (0: the row).
    """

    scale: Tensor
    zero: Tensor
    largest: Tensor
    group: int


@dataclass(frozen=True, eq=False)
class Rounded:
    """`codes`: uint8 [rows, cols]; `grid`: their scales; `losses`: 1/2 sum_j D_j eta_j^2 of rows or their parts, [rows] or
    [rows, parts]."""

    codes: Tensor
    grid: Grid
    losses: Tensor

    @cached_property
    def row_loss(self) -> Tensor:
        """Of whole rows, float64 [rows]."""
        return self.losses.sum(1, dtype=torch.float64) if self.losses.dim() == 2 else self.losses

    def decode(self, levels: Levels) -> Tensor:
        """The values, float32 [rows, cols]."""
        rows, cols = self.codes.shape
        group = self.grid.group
        if self.grid.scale.shape[1] * group == cols:  # whole groups: no copies of the scales
            points = levels.points_of(self.codes.float().reshape(rows, -1, group), self.grid.zero[:, :, None])
            return points.mul_(self.grid.scale[:, :, None]).reshape(rows, cols)
        points = levels.points_of(self.codes.float(), per_column(self.grid.zero, group, cols))
        return points * per_column(self.grid.scale, group, cols)


def sweep(
    weight: Tensor,
    levels: Levels,
    group: int,
    importance: Tensor,
    factor: Factor | None = None,
    grid: Grid | None = None,
) -> Rounded:
    """Codes and scales of `weight`, float32 [rows, cols].

    `importance`: float32 [cols], the weights of the scale search, and of `row_loss` when `factor` is None;
    `factor`: error feedback, None for rounding to nearest; `grid`: frozen scales, None to search them. With
    an ordered factor the grid must be given (groups are then not contiguous in the sweep).
    """
    if factor is not None and factor.order is not None and grid is None:
        raise ValueError("a sweep in another column order needs frozen scales")
    if compiled(weight):
        return sweep_compiled(weight, levels, group, importance, factor, grid)
    return sweep_torch(weight, levels, group, importance, factor, grid)


def sweep_with_errors(
    weight: Tensor,
    levels: Levels,
    group: int,
    importance: Tensor,
    grid: Grid | None = None,
    out: Tensor | None = None,
) -> tuple[Rounded, Tensor]:
    """`sweep` without a factor, and the weights less what they became, float32 [rows, cols], in `out` if given."""
    if in_triton(weight):
        return nearest_triton(weight, levels, group, importance.to(weight), grid, out)
    rounded = sweep(weight, levels, group, importance, None, grid)
    return rounded, torch.sub(weight, rounded.decode(levels), out=out)


def in_triton(weight: Tensor) -> bool:
    """Whether Triton's kernels take `weight`."""
    return weight.is_cuda and triton.AVAILABLE


def compiled(weight: Tensor) -> bool:
    """Whether the C++ passes exist and can take `weight`."""
    return hasattr(cpu.ext, "ldlq_sweep") and weight.device.type == "cpu"


def sweep_compiled(
    weight: Tensor,
    levels: Levels,
    group: int,
    importance: Tensor,
    factor: Factor | None,
    grid: Grid | None,
    most_lanes: int = 16,
) -> Rounded:
    """`sweep` in C++ (kernels/cpu/ldlq.cpp) on torch's number of threads; the result is the same for any."""
    rows, cols = weight.shape
    frozen = grid is not None
    if grid is None:
        empty = torch.zeros(rows, group_count(cols, group))
        grid = Grid(empty, empty.clone(), torch.zeros(rows, 1), group)
    importance = importance.float().contiguous()
    order = factor.order if factor is not None else None
    codes = torch.empty(rows, cols, dtype=torch.uint8)
    loss = torch.empty(rows, dtype=torch.float64)
    cpu.ext.ldlq_sweep(
        weight=weight.contiguous(),
        importance=importance,
        diagonal=importance if factor is None else factor.diagonal,
        upper=torch.empty(0, 0) if factor is None else factor.feedback,
        order=torch.empty(0, dtype=torch.int64) if order is None else order,
        table=levels.values(),
        middles=levels.midpoints(),
        ratios=torch.tensor(levels.ratios),
        width=min(cols, group_size(cols, group)),  # a group may be longer than the row
        bits=levels.bits,
        symmetric=levels.symmetric,
        signs=levels.signs,
        refit=levels.fit,
        frozen=frozen,
        mode=SCALE_MODES.index(levels.scale),
        reach=levels.reach,
        scale=grid.scale.contiguous(),
        zero=grid.zero.contiguous(),
        largest=grid.largest.contiguous(),
        codes=codes,
        loss=loss,
        threads=torch.get_num_threads(),
        most_lanes=most_lanes,
    )
    return Rounded(codes, grid, loss)


def sweep_torch(
    weight: Tensor,
    levels: Levels,
    group: int,
    importance: Tensor,
    factor: Factor | None,
    grid: Grid | None,
    block: "Callable[[Pass, slice], None] | None" = None,
) -> Rounded:
    """`sweep` in torch: any device, no compiler. Same arguments; `block`: how a block of columns is rounded.

    Between blocks of 128 columns of a span the feedback is a matrix product, and between spans another one.
    """
    if block is None:
        block = block_triton if in_triton(weight) else block_torch
    rows, cols = weight.shape
    width, groups = group_size(cols, group), group_count(cols, group)
    order = factor.order if factor is not None else None
    frozen = grid is not None
    importance = importance.to(weight)
    if factor is None and block is block_triton:
        return nearest_triton(weight, levels, group, importance, grid)[0]
    if grid is None:
        empty = weight.new_zeros(rows, groups)
        largest = super_scales(weight, levels, group, importance, block is block_triton)
        grid = Grid(empty, empty.clone(), largest, group)
    if factor is None:
        return _nearest_torch(weight, levels, importance, grid, frozen)
    where = torch.arange(cols, device=weight.device) if order is None else order
    own = weight.T[where].contiguous()
    at = Pass(
        own,
        own.clone(),
        torch.empty_like(own),
        torch.empty_like(own, dtype=torch.uint8),
        (where // width).int(),
        torch.zeros(rows, dtype=torch.float64, device=weight.device),
        factor,
        grid,
        levels,
    )
    step = BLOCK if frozen else width
    span = max(1, SPAN // step) * step
    for start in range(0, cols, step):
        end, opened = min(start + step, cols), start // span * span
        if start == opened:
            _feed(at, slice(start, min(start + span, cols)), 0)
        _feed(at, slice(start, end), opened)
        if not frozen:
            g = start // width
            find = search_triton if block is block_triton else search
            s, z = find(at.target[start:end].T, importance[start:end], levels, grid.largest)
            grid.scale[:, g : g + 1], grid.zero[:, g : g + 1] = s, z
        for first in range(start, end, BLOCK):
            columns = slice(first, min(first + BLOCK, end))
            _feed(at, columns, start)
            block(at, columns)
    return Rounded(at.codes[torch.argsort(where)].T.contiguous(), grid, at.loss)


@dataclass(frozen=True, eq=False)
class Pass:
    """A sweep on its way. `weight`, `target`, `error`: float32, and `codes`: uint8, all [cols, rows] in the order of the
    sweep; `group_of`: the group of each column, int32 [cols] in that order; `loss`: float64 [rows]."""

    weight: Tensor
    target: Tensor
    error: Tensor
    codes: Tensor
    group_of: Tensor
    loss: Tensor
    factor: Factor
    grid: Grid
    levels: Levels


def _feed(at: Pass, columns: slice, first: int) -> None:
    """Moves the targets of some columns by the errors of those from `first` on that are before them."""
    before = slice(first, columns.start)
    if first < columns.start:
        at.target[columns] += at.factor.feedback[before, columns].T @ at.error[before]


def block_torch(at: Pass, columns: slice) -> None:
    """Rounds some columns: fills `codes` and `error` there, adds to `loss`, moves the targets of the block's later ones."""
    for j in range(columns.start, columns.stop):
        group = at.group_of[j : j + 1]
        scale, zero = (a.index_select(1, group).squeeze(1) for a in (at.grid.scale, at.grid.zero))
        c = at.levels.codes_of(at.target[j], scale, zero)
        q = at.levels.points_of(c, zero) * scale
        at.codes[j] = c.to(torch.uint8)
        at.error[j] = at.weight[j] - q
        at.loss.add_((at.target[j] - q).square().double() * at.factor.diagonal[j] / 2)
        rest = slice(j + 1, columns.stop)
        at.target[rest] += at.factor.feedback[j, rest, None] * at.error[j]


def block_triton(at: Pass, columns: slice) -> None:
    """`block_torch` in one Triton kernel."""
    from nstf.kernels.triton.ldlq import sweep_block

    sweep_block(
        at.weight,
        at.target,
        at.factor.feedback,
        at.factor.diagonal,
        at.group_of,
        at.grid.scale.contiguous(),
        at.grid.zero.contiguous(),
        at.levels.values(at.weight.device),
        at.levels.midpoints(at.weight.device),
        at.levels.count,
        columns,
        at.codes,
        at.error,
        at.loss,
    )


def _nearest_torch(weight: Tensor, levels: Levels, importance: Tensor, grid: Grid, frozen: bool) -> Rounded:
    """Every weight alone, all groups of a row at once; the scales go into `grid` unless they are frozen."""
    rows, cols = weight.shape
    codes = torch.empty(rows, cols, dtype=torch.uint8, device=weight.device)
    loss = torch.zeros(rows, dtype=torch.float64, device=weight.device)
    for columns, numbers in spans(cols, grid.group):
        shape = (numbers.stop - numbers.start, -1)
        x, h = weight[:, columns].reshape(rows, *shape), importance[columns].view(shape)
        if not frozen:
            scale, zero = search(x, h, levels, grid.largest.unsqueeze(1))
            grid.scale[:, numbers], grid.zero[:, numbers] = scale.squeeze(2), zero.squeeze(2)
        scale, zero = grid.scale[:, numbers].unsqueeze(2), grid.zero[:, numbers].unsqueeze(2)
        c = levels.codes_of(x, scale, zero)
        error = x - levels.points_of(c, zero) * scale
        loss += (error.square_() * h).sum((1, 2), dtype=torch.float64) / 2
        codes[:, columns] = c.reshape(rows, -1).to(torch.uint8)
    return Rounded(codes, grid, loss)


def nearest_triton(
    weight: Tensor,
    levels: Levels,
    group: int,
    importance: Tensor,
    grid: Grid | None,
    out: Tensor | None = None,
) -> tuple[Rounded, Tensor]:
    """`sweep_with_errors` in one or two Triton kernels."""
    from nstf.kernels.triton.scale_search import round_groups

    weight, importance, width = (
        weight.contiguous(),
        importance.contiguous(),
        group_size(weight.shape[1], group),
    )
    largest = None
    if grid is None and levels.scale == "u8":
        largest = _largest_triton(weight, levels, group, importance)
    frozen = None if grid is None else (grid.scale.contiguous(), grid.zero.contiguous())
    found = round_groups(
        weight,
        importance,
        _packed(levels, width, weight.device),
        [width],
        levels.table is not None,
        frozen=frozen,
        largest=largest,
        margin=SUPER_MARGIN,
        errors=out,
    )
    grid = grid or Grid(found.scale, found.zero, found.largest, group)
    return Rounded(found.codes, grid, found.losses), found.errors


# A format for rounding to nearest: what it can represent, and columns to a scale (0: the row).
Rounding = tuple[Levels, int]


def launched_together(weight: Tensor, forms: Sequence[Rounding]) -> list[list[int]]:
    """Which of some forms `nearest_many` rounds this matrix to in one launch, by their places; [] where none of them is."""
    if not in_triton(weight) or any(levels.steps != 256 for levels, _ in forms):
        return []
    from nstf.kernels.triton.scale_search import is_narrow

    cols = weight.shape[-1]
    alike: dict[tuple[bool, bool, bool], list[int]] = {}
    for at, (levels, group) in enumerate(forms):
        kind = levels.table is None, is_narrow(group_size(cols, group), cols), levels.scale == "u8"
        alike.setdefault(kind, []).append(at)
    return list(alike.values())


def nearest_many(
    weight: Tensor,
    forms: Sequence[Rounding],
    importance: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    errors: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`sweep_with_errors` to several forms of one list of `launched_together`, in one or two launches for all of them.

    weight: float32 [rows, cols], or [forms, rows, cols]. scales: (scale, zero), each [forms, rows, most groups], to be kept;
    None: to be searched. errors: float32 [forms, rows, cols], takes what is left of the weights. -> (scale, zero, codes
    uint8 [forms, rows, cols]).
    """
    from nstf.kernels.triton.scale_search import round_groups

    rows, cols = weight.shape[-2:]
    many = tuple((levels, group_size(cols, group)) for levels, group in forms)
    widths, table = [w for _, w in many], many[0][0].table is not None
    largest = None
    if scales is None and many[0][0].scale == "u8":
        largest = weight.new_zeros(len(many), rows)
        form = _packed_together(many, weight.device, largest=True)
        round_groups(weight, importance, form, widths, table, largest=largest)
    found = round_groups(
        weight,
        importance,
        _packed_together(many, weight.device),
        widths,
        table,
        frozen=scales,
        largest=largest,
        margin=SUPER_MARGIN,
        errors=errors,
    )
    return found.scale, found.zero, found.codes


def search_triton(x: Tensor, importance: Tensor, levels: Levels, largest: Tensor) -> tuple[Tensor, Tensor]:
    """`search` in one Triton kernel, a group to a row: x [rows, n]."""
    from nstf.kernels.triton.scale_search import round_groups

    width = x.shape[1]
    found = round_groups(
        x.contiguous(),
        importance.contiguous(),
        _packed(levels, width, x.device),
        [width],
        levels.table is not None,
        largest=largest,
    )
    return found.scale, found.zero


def spans(cols: int, group: int) -> list[tuple[slice, slice]]:
    """(columns, group numbers) of the groups of full width, and of a shorter last one."""
    width, groups = group_size(cols, group), group_count(cols, group)
    full = cols // width
    spans = [(slice(0, full * width), slice(0, full))] if full else []
    return spans if full == groups else [*spans, (slice(full * width, cols), slice(full, groups))]


def super_scales(
    weight: Tensor, levels: Levels, group: int, importance: Tensor, in_triton: bool = False
) -> Tensor:
    """The super-scale of each row [rows, 1]: its largest group scale and a margin; zeros if not needed."""
    if levels.scale != "u8":
        return weight.new_zeros(weight.shape[0], 1)
    largest = (_largest_triton if in_triton else _largest_torch)(weight, levels, group, importance.to(weight))
    return (largest * SUPER_MARGIN).clamp(max=F16_MAX).half().float()


def _largest_torch(weight: Tensor, levels: Levels, group: int, importance: Tensor) -> Tensor:
    """The largest scale of each row [rows, 1], as float32 scales would be; at least 0."""
    free = replace(levels, scale="f32")
    rows, cols = weight.shape
    largest = weight.new_zeros(rows, 1)
    for columns, numbers in spans(cols, group):
        shape = (numbers.stop - numbers.start, -1)
        x = weight[:, columns].reshape(rows, *shape)
        found, _ = search(x, importance[columns].view(shape), free, largest.unsqueeze(1))
        largest = torch.maximum(largest, found.amax(1))
    return largest


def _largest_triton(weight: Tensor, levels: Levels, group: int, importance: Tensor) -> Tensor:
    """`_largest_torch` in one Triton kernel."""
    from nstf.kernels.triton.scale_search import round_groups

    largest = weight.new_zeros(weight.shape[0], 1)
    width = group_size(weight.shape[1], group)
    form = _packed(levels, width, weight.device, largest=True)
    round_groups(
        weight.contiguous(), importance.contiguous(), form, [width], levels.table is not None, largest=largest
    )
    return largest


# Kept on each device, as the tables of `Levels` are.
@lru_cache(maxsize=256)
def _packed(levels: Levels, width: int, device: torch.device, largest: bool = False) -> Tensor:
    """What the Triton kernel knows of `levels` in groups of `width`; `largest`: of float32 scales, whose largest are
    wanted."""
    from nstf.kernels.triton.scale_search import LARGEST, pack

    with torch.inference_mode(False):
        return pack(
            levels.count,
            levels.reach,
            LARGEST if largest else SCALE_MODES.index(levels.scale),
            levels.ratios,
            levels.table or (),
            levels.midpoints().tolist(),
            width=width,
            zero_points=levels.table is None and not levels.symmetric,
            signs=levels.signs,
            fit=levels.fit,
            device=device,
        )


@lru_cache(maxsize=64)
def _packed_together(
    many: tuple[tuple[Levels, int], ...], device: torch.device, largest: bool = False
) -> Tensor:
    """`_packed` of several (levels, width), zeros behind the shorter ones: [forms, numbers]."""
    with torch.inference_mode(False):
        each = [_packed(levels, width, torch.device("cpu"), largest) for levels, width in many]
        return torch.nn.utils.rnn.pad_sequence(each, batch_first=True).to(device)
