"""The search of the shuffle format in plain torch: slow, on any device, and what the compiled one must give bit by bit.

16 columns are rounded one after another: what a column lost is fed back to the targets of those after it. A column is
cut into segments of 256 rows; in each the Viterbi algorithm finds the path of symbols whose values are nearest to the
targets, rows weighted. A state is the newest symbol and the one before it. Costs are integers: floor(weight d^2), at
most 16383, on top of the path's, which are kept over the cheapest path's and at most 32767; of equal ones the lowest
older symbol is taken.
"""

import torch
from torch import Tensor

from nstf.kernels.formats import shuffle

BLOCK = 16
FARTHEST, MOST = 16383, 32767
# Integer cost of a squared error of one standard deviation in a row of mean importance, for each quarter bit: coarse codes
# need a wider range, fine ones finer steps.
_UNIT = 400.0


def float_tables(quarter_bits: int) -> Tensor:
    """The tables with A centred: levels of a value are their sum, float32 [P, 2, 16], on the CPU."""
    found = shuffle.tables(quarter_bits).float()
    found[:, 0] -= shuffle.CENTRE
    return found


def costs_of(importance: Tensor, quarter_bits: int) -> Tensor:
    """What a squared error of one level costs in each row, given the rows' importance relative to their mean."""
    return importance * (_UNIT * quarter_bits * shuffle.STEPS[quarter_bits] ** 2)


def round_columns(
    target: Tensor,
    weight: Tensor,
    level: Tensor,
    importance: Tensor,
    feedback: Tensor,
    quarter_bits: int,
    tables: Tensor,
) -> tuple[Tensor, Tensor]:
    """(rounded [rows, 16], codes u8 [rows / 32, 2 q, 8]: two columns a byte); rows are a multiple of 32.

    target, weight: float32 [rows, 16], what to round with the feedback of columns before these, and the weights themselves.
    level: what a level is worth in each row, [rows]. importance: of rows, [rows]. feedback: [16, 16], how errors of a column
    add to the targets of those after it.
    """
    rows = len(target)
    values = row_values(quarter_bits, tables)
    costs = costs_of(importance, quarter_bits)
    rounded, errors = torch.empty_like(target), torch.empty_like(target)
    steps = 2 * quarter_bits
    symbols = target.new_empty(rows // shuffle.GROUP, steps, BLOCK, dtype=torch.uint8)
    for j in range(BLOCK):
        wanted = target[:, j].clone()
        for i in range(j):
            wanted += errors[:, i] * feedback[i, j]
        x = torch.where(level > 0, wanted / level, 0.0).clamp(float(values.min()), float(values.max()))
        whole = rows // shuffle.SEGMENT * shuffle.SEGMENT
        for part in (slice(0, whole), slice(whole, rows)):
            if part.start == part.stop:
                continue
            size = min(shuffle.SEGMENT, part.stop - part.start)
            path, found = _paths(x[part].view(-1, size), costs[part].view(-1, size), values, quarter_bits)
            groups = slice(part.start // shuffle.GROUP, part.stop // shuffle.GROUP)
            symbols[groups, :, j] = path.view(-1, steps).to(torch.uint8)
            rounded[part, j] = found.reshape(-1) * level[part]
        errors[:, j] = weight[:, j] - rounded[:, j]
    return rounded, symbols[..., ::2] | symbols[..., 1::2] << 4


def row_values(quarter_bits: int, tables: Tensor) -> Tensor:
    """The value of (a, c, b) in each row of a group: float32 [32, 16, 16, 16]."""
    a, c, b = torch.meshgrid(*[torch.arange(16, device=tables.device)] * 3, indexing="ij")
    first = tables[:, 0][:, a ^ c] + tables[:, 1][:, b]
    second = tables[:, 0][:, a ^ b] + tables[:, 1][:, a ^ c]
    twice = shuffle.ends(quarter_bits)[1]
    return torch.stack([(second if twice[r] else first)[r % len(tables)] for r in range(shuffle.GROUP)])


def _paths(x: Tensor, costs: Tensor, values: Tensor, quarter_bits: int) -> tuple[Tensor, Tensor]:
    """(symbols [segments, steps], values of the rows [segments, rows]) of the cheapest paths to x [segments, rows]."""
    count, rows = x.shape
    end = shuffle.ends(quarter_bits)[0]
    steps = 2 * quarter_bits
    every = torch.arange(count, device=x.device)

    def step_costs(group: int, step: int) -> Tensor:
        """Of the rows that end at a step, [segments, a, c, b]."""
        found = torch.zeros(count, 16, 16, 16, dtype=torch.int32, device=x.device)
        for r in (r for r in range(shuffle.GROUP) if end[r] == step):
            at = group * shuffle.GROUP + r
            d = x[:, at, None, None, None] - values[r]
            found += (d * d * costs[:, at, None, None, None]).clamp(max=FARTHEST).to(torch.int32)
        return found

    paths = torch.full((count, 16, 16), MOST, dtype=torch.int32, device=x.device)  # [c, b]
    paths[:, 0, 0] = 0
    before = []
    for group in range(rows // shuffle.GROUP):
        for step in range(steps):
            before.append(paths)
            best = (step_costs(group, step) + paths[:, None]).amin(2)  # [a, b]
            best = (best - best.amin((1, 2), keepdim=True)).clamp(max=MOST)
            paths = best.mT  # b becomes the older symbol
    # argmin gives no promise on ties, a sort does.
    state = torch.sort(paths.flatten(1), dim=1, stable=True).indices[:, 0]
    a, b = state % 16, state // 16
    symbols = torch.empty(count, len(before), dtype=torch.int64, device=x.device)
    found = torch.empty_like(x)
    for t in reversed(range(len(before))):
        group, step = t // steps, t % steps
        cost = step_costs(group, step)[every, a, :, b] + before[t][every, :, b]
        c = torch.sort(cost, dim=1, stable=True).indices[:, 0]
        for r in (r for r in range(shuffle.GROUP) if end[r] == step):
            found[:, group * shuffle.GROUP + r] = values[r][a, c, b]
        symbols[:, t] = a
        a, b = b, c
    return symbols, found
