"""`trellis`: trellis-coded quantisation at 1 to 6 bits in steps of a quarter (formats `trellis` inside `rotated`).

Tseng et al., QTIP, 2024: the matrix is turned into a basis in which its entries are close to Gaussian, rounded in blocks
of 16 columns with LDLQ feedback, and each 16 x 16 tile becomes the nearest path through a trellis, found by the Viterbi
algorithm. At equal bits the mean squared error is 0.4 to 0.6 bit below a scalar quantiser's.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nstf.kernels.formats import EncodedTensor, Node, bitpack, decode, join, rotated, stored_bytes
from nstf.kernels.formats import trellis as form
from nstf.proposals import Recipe, Room, Signature, Target
from nstf.quantizers import filled
from nstf.quantizers.rounding.block_ldlq import BLOCK, BlockFactor
from nstf.quantizers.rounding.matrix import Rounding, matrix_view
from nstf.quantizers.rounding.sections import (
    SMALLEST_SECTION,
    best_sections,
    mean_square,
    row_order,
    weighted,
)
from nstf.quantizers.rounding.trellis_lanes import refit, search
from nstf.quantizers.rounding.turned import block_figures, block_metric
from nstf.quantizers.stats import Stats

__all__ = [
    "Params",
    "bits",
    "decode",
    "encode",
    "encode_many",
    "estimate",
    "estimate_many",
    "proposals",
    "tree",
]

# Mean squared error on N(0, 1) by quarter bits, at the width below (benchmarks/trellis.py), and the width: the ratio of the
# weights' standard deviation to the codebook's that is best. More bits reach further into the tails.
MSE = {
    4: 0.2733, 5: 0.1960, 6: 0.1394, 7: 0.0987, 8: 0.0694, 9: 0.0492, 10: 0.0352,
    11: 0.0250, 12: 0.0178, 13: 0.0126, 14: 0.00893, 15: 0.00630, 16: 0.00443, 17: 0.00313,
    18: 0.00222, 19: 0.00157, 20: 0.00111, 21: 0.00079, 22: 0.00056, 23: 0.00040, 24: 0.00028,
}  # fmt: skip
WIDTH = {
    q: 1.0 if q <= 11 else 1.03 if q == 12 else 1.06 if q <= 16 else 1.08 if q <= 20 else 1.12 for q in MSE
}
# Up to so many bits a weight no other plain format loses less at the same bytes.
REACH = 6
# The estimate is a closed form over all rows: a sample would only be coarser.
EVERY_ROW = True
# Encoding takes minutes on a large model.
SLOW = True
# Rates that rows may have when they differ, in quarter bits.
SECTION_RATES = (4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24)
# Rows that matter less than this, relative to the one that matters most, count as this much in a typical row.
SMALLEST_ENERGY = 1e-6
# One seed for the signs of all tensors, so that q, k and v share the rotation of their input.
SEED = 0
# Bytes that rounding takes for each weight: the weights in the stored basis, what they become, errors, products and codes.
_BYTES_PER_WEIGHT = 20
SCRATCH = 1 << 28
_CHUNK = 1 << 22  # weights at a time where only sums over rows are wanted


@dataclass(frozen=True)
class Params:
    """`quarter_bits` 4..24 for all rows, or `sections` ((quarter bits, rows), ...) from the rows whose errors matter
    most to those that matter least, with as many tiles of 16 rows of each in all of `ranges` equal parts of the rows
    or, if they need not be `even`, with whole tiles in each part;
    `scale_bits` 8 or 16 per row; `block`: Hadamard block along the columns (0: none); `rounding` nearest or ldlq;
    `damping` as in the other quantisers; `lead` axes make the rows.
    """

    quarter_bits: int = 12
    sections: tuple[tuple[int, int], ...] = ()
    ranges: int = 1
    even: bool = True
    scale_bits: int = 8
    block: int = 0
    rounding: str = "nearest"
    damping: float = 0.01
    lead: int = 1

    def __post_init__(self) -> None:
        tree(self)
        Rounding(self.rounding, self.damping)  # raises for others


def tree(params: Params) -> Node:
    """The stored form."""
    leaf = Node(form.KIND, _leaf(params))
    return Node(rotated.KIND, _basis(params), {"x": leaf}) if params.block else leaf


def bits(shape: tuple[int, ...], params: Params) -> float:
    """Bits per weight on disk, scales included, without the file's header."""
    return stored_bytes(tree(params), shape) * 8 / math.prod(shape)


def encode(weight: Tensor, params: Params, stats: Stats | None = None) -> EncodedTensor:
    """`weight` (any floating dtype) as an encoded tensor; the arrays are on the CPU.

    The weight's device does the work. Raises ValueError on weights or statistics that do not fit.
    """
    return encode_many([(weight, params, stats)])[0]


def encode_many(
    items: Sequence[tuple[Tensor, Params, Stats | None]], scratch: int = SCRATCH
) -> list[EncodedTensor]:
    """What `encode` gives for each (weight, params, stats), up to the rounding of sums.

    Rows of equally many columns are rounded side by side whatever their rates, those of one Hessian under one another and
    those of several in one batched product, so that each block of columns is one search for every rate. All weights are on
    one device. `scratch`: bytes that may be used beyond the weights, the Hessians' factors and the search's own.
    """
    plans = [_plan(*item) for item in items]
    widths: dict[int, list[_Piece]] = {}
    for plan in plans:
        for piece in plan.pieces(scratch):
            widths.setdefault(piece.cols, []).append(piece)
    for cols, pieces in widths.items():
        for batch in _batches(pieces, cols, scratch):
            _round(batch, cols)
    return [plan.encoded() for plan in plans]


def estimate(weight: Tensor, params: Params, stats: Stats | None = None) -> float:
    """The expected loss of `encode`, without encoding: Gaussian weights and white errors make it a closed form."""
    return estimate_many(weight, [params], stats)[0]


def estimate_many(weight: Tensor, params: Sequence[Params], stats: Stats | None = None) -> list[float]:
    """`estimate` for several params; the weight is read once."""
    energies = {p.lead: row_energy(weight, p, stats) for p in {p.lead: p for p in params}.values()}
    sums: dict[tuple[int, int, bool], list[float]] = {}
    lost: dict[tuple[int, int, int, float, str], float] = {}
    out = []
    for p in params:
        energy = energies[p.lead]
        dealt = p.lead, p.ranges, p.even
        if dealt not in sums or p.ranges > 1:
            order = row_order(energy, p.ranges, _sections(p, len(energy)), p.even)  # also checks the sections
            sums[dealt] = [0.0, *energy[order].cumsum(0).tolist()]
        total, at, cumulative = 0.0, 0, sums[dealt]
        for q, n in _sections(p, len(cumulative) - 1):
            key = q, p.lead, p.block, p.damping, p.rounding
            if key not in lost:
                lost[key] = unit_loss(q, weight, p, stats)
            total += (cumulative[at + n] - cumulative[at]) * lost[key]
            at += n
        out.append(total)
    return out


def fits(cols: int) -> bool:
    """Whether rows of so many columns are as long as a tile is wide."""
    return cols >= form.SIDE


def proposals(signature: Signature, target: Target, room: Room) -> list[Recipe]:
    """Every rate for all rows, and rates by row.

    The rates by row are the best there are at a price per byte; the prices are those at which a typical row gets each rate.
    """
    rows, cols, inner, stats = signature.rows, signature.cols, signature.weight, signature.stats
    if room.planned is not None:
        return []  # every rate there is was proposed at first
    if not fits(cols):
        room.skip("trellis", f"rows of {cols} columns; a tile has {form.SIDE}")
        return []
    out = [Recipe("trellis", {"quarter_bits": q}) for q in sorted(MSE)]
    if signature.lead != 1 or rows < 2 * SMALLEST_SECTION:
        return out
    params = filled(Recipe("trellis"), signature.shape, signature.lead)
    energy = row_energy(inner, params, stats)
    losses = {q: unit_loss(q, inner, params, stats) for q in MSE}
    typical = float(energy.clamp_min(float(energy.max()) * SMALLEST_ENERGY).log().mean().exp())
    allowed = {q: losses[q] for q in SECTION_RATES}
    # At these prices the loss saved by the last byte is the same for all rows: dloss/dbyte = 2 ln 2 loss / (cols / 8).
    prices = [typical * losses[q] * 2 * math.log(2) / (cols / 8) for q in sorted(losses)]
    found = best_sections(energy, allowed, cols, prices)
    different = [s for s in dict.fromkeys(found) if len(s) > 1]
    return [*out, *(Recipe("trellis", {"sections": [list(section) for section in s]}) for s in different)]


def row_energy(weight: Tensor, params: Params, stats: Stats | None = None) -> Tensor:
    """Variance of each row times its weight in the loss, float64 [rows]. Raises ValueError on non-finite values."""
    stats = stats or Stats()
    matrix = matrix_view(weight, params.lead)
    stats.check(*matrix.shape)
    energy = weighted(mean_square(matrix), stats)
    if not bool(torch.isfinite(energy).all()):
        raise ValueError("weights or row weights are NaN or infinite")
    return energy


def unit_loss(quarter_bits: int, weight: Tensor, params: Params, stats: Stats | None = None) -> float:
    """The expected loss of a row per unit of its energy.

    With eta of variance e = MSE var(target), dW = eta K and K = (U + I)^-1, the loss of a row is e/2 (tr D - damping |K|^2),
    and targets have a variance larger by 1 / (1 - MSE |I - K|^2 / n) than the weights.
    """
    stats = stats or Stats()
    cols = math.prod(weight.shape[params.lead :])
    known = params.rounding != "nearest"
    figures = block_figures(stats, _basis(params), params.damping, _up(cols)) if known else None
    trace, growth = figures or (float(cols), 0.0)
    if figures is None and stats.hessian is not None:
        trace = float(stats.hessian.diagonal().sum())
    return MSE[quarter_bits] * trace / (2 * (1 - _growth(growth, quarter_bits)))


@dataclass(frozen=True, eq=False)
class _Section:
    """Rows of a plan with one rate. `rows`: which, int64 [n]; `scale`: what they are rounded at, [n padded to 16];
    `metric`: of their errors; `codes`, `gains`: what is found, a part for each piece."""

    quarter_bits: int
    rows: Tensor
    scale: Tensor
    metric: BlockFactor | None
    codes: list[Tensor]
    gains: list[Tensor]


@dataclass(frozen=True, eq=False)
class _Plan:
    """A tensor to be encoded. `matrix`: [rows, cols] as given; `unit`: what it is divided by, so that squares neither
    overflow nor vanish; `number`: the section of each row."""

    shape: tuple[int, ...]
    params: Params
    matrix: Tensor
    unit: float
    number: Tensor
    sections: list[_Section]

    def pieces(self, scratch: int) -> Iterator["_Piece"]:
        """The rows in parts that fit the scratch by themselves."""
        cols = _up(self.matrix.shape[1])
        step = max(1, scratch // (_BYTES_PER_WEIGHT * cols * BLOCK)) * BLOCK
        for section in self.sections:
            for start in range(0, len(section.rows), step):
                yield _Piece(self, section, start, min(start + step, len(section.rows)), cols)

    def encoded(self) -> EncodedTensor:
        """The tensor, from what was found for its sections."""
        leaf = _leaf(self.params)
        scales = torch.empty(len(self.matrix), device=self.matrix.device)
        for section in self.sections:
            scales[section.rows] = section.scale[: len(section.rows)] * torch.cat(section.gains)
        codes = torch.cat([part for section in self.sections for part in section.codes])
        arrays = {"codes": codes, **form.store_scales(leaf, scales.cpu() * self.unit)}
        if len(self.sections) > 1:
            width = max(1, (len(self.sections) - 1).bit_length())
            arrays["section"] = bitpack.pack(self.number.to(torch.uint8)[None], width)[0].cpu()
        prefix = "x" if self.params.block else ""
        named = {join(prefix, k): a for k, a in arrays.items()}
        return EncodedTensor(tree(self.params), self.shape, named)


@dataclass(frozen=True, eq=False)
class _Piece:
    """Rows `start` to `end` of a section, padded to whole tiles and to `cols` columns."""

    plan: _Plan
    section: _Section
    start: int
    end: int
    cols: int

    @property
    def padded(self) -> int:
        return _up(self.end - self.start)

    def values(self) -> Tensor:
        """The rows in the stored basis, float32 [rows, cols] without padding."""
        rows = self.plan.matrix[self.section.rows[self.start : self.end]].float() / self.plan.unit
        return rotated.to_basis(_basis(self.plan.params), rows) if self.plan.params.block else rows

    def scale(self) -> Tensor:
        return self.section.scale[self.start : self.start + self.padded]


def _plan(weight: Tensor, params: Params, stats: Stats | None) -> _Plan:
    stats = stats or Stats()
    matrix = matrix_view(weight, params.lead)
    rows, cols = matrix.shape
    stats.check(rows, cols)
    energy = mean_square(matrix)
    largest = float(
        torch.stack([part.abs().amax() for part in torch.split(matrix, max(1, _CHUNK // cols))]).max()
    )
    if not math.isfinite(largest):
        raise ValueError(f"{int((~torch.isfinite(matrix)).sum())} weights are NaN or infinite")
    unit = float(2.0 ** math.floor(math.log2(max(largest, 1e-37))))
    sizes = _sections(params, rows)
    if sum(n for _, n in sizes) != rows:
        raise ValueError(f"the sections do not add up to {rows} rows")
    order = row_order(weighted(energy, stats), params.ranges, sizes, params.even)
    number = torch.empty(rows, dtype=torch.int64, device=matrix.device)
    deviation, metric, leaf = energy.sqrt() / unit, _metric(stats, params, _up(cols)), _leaf(params)
    sections, at = [], 0
    for i, (q, n) in enumerate(sizes):
        members = order[at : at + n].sort().values
        number[members] = i
        width = WIDTH[q] * (1 - _growth(metric.growth if metric else 0.0, q)) ** -0.5
        scale = form.read_scales(leaf, form.store_scales(leaf, deviation[members].float() * width))
        padded = torch.nn.functional.pad(scale, (0, _up(n) - n))
        sections.append(_Section(q, members, padded, metric, [], []))
        at += n
    return _Plan(tuple(weight.shape), params, matrix, unit, number, sections)


def _batches(pieces: list[_Piece], cols: int, scratch: int) -> Iterator[list[list[_Piece]]]:
    """Pieces to be rounded together, those of each metric in a list of their own; as many as fit the scratch."""
    batch: dict[int, list[_Piece]] = {}
    for piece in pieces:
        key = id(piece.section.metric)
        more = {**batch, key: [*batch.get(key, []), piece]}
        most = max(sum(p.padded for p in same) for same in more.values())
        # Several factors are copied to lie beside each other.
        factors = 4 * cols * cols * len(more) if len(more) > 1 else 0
        plain = {p.section.metric is None for same in more.values() for p in same}
        size = _BYTES_PER_WEIGHT * cols * most * len(more) + factors
        if batch and (size > scratch or len(plain) > 1):
            yield list(batch.values())
            more = {key: [piece]}
        batch = more
    if batch:
        yield list(batch.values())


def _round(batch: list[list[_Piece]], cols: int) -> None:
    """Codes and gains of the pieces; `batch`: a list for each metric."""
    device = batch[0][0].plan.matrix.device
    rows = max(sum(piece.padded for piece in same) for same in batch)
    part = torch.zeros(len(batch), rows, cols, device=device)
    scale = torch.zeros(len(batch), rows, device=device)
    tiles: dict[int, list[tuple[_Piece, range]]] = {}  # by rate: the pieces and their tiles in the batch
    for i, same in enumerate(batch):
        at = 0
        # Those of one rate beside each other.
        for piece in sorted(same, key=lambda piece: piece.section.quarter_bits):
            values = piece.values()
            part[i, at : at + len(values), : values.shape[1]] = values
            scale[i, at : at + piece.padded] = piece.scale()
            first = (i * rows + at) // BLOCK
            own = range(first, first + piece.padded // BLOCK)
            tiles.setdefault(piece.section.quarter_bits, []).append((piece, own))
            at += piece.padded
    metrics = [same[0].section.metric for same in batch]
    found, rounded = search(
        part, scale, metrics, {q: [t for _, own in of for t in own] for q, of in tiles.items()}
    )
    gains = torch.stack([refit(part[i], rounded[i], metric) for i, metric in enumerate(metrics)]).view(-1)
    for q, of in tiles.items():
        codes, at = found[q].cpu(), 0
        for piece, own in of:
            piece.section.codes.append(codes[at : at + len(own)].reshape(-1))
            row = own.start * BLOCK
            piece.section.gains.append(gains[row : row + piece.end - piece.start])
            at += len(own)


def _metric(stats: Stats, params: Params, cols: int) -> BlockFactor | None:
    """The block factor of the Hessian in the stored basis, padded to `cols`."""
    return None if params.rounding == "nearest" else block_metric(stats, _basis(params), params.damping, cols)


def _growth(growth: float, quarter_bits: int) -> float:
    """By how much feedback widens the targets, as a share of their variance; at most a half. growth: of the metric."""
    return min(0.5, MSE[quarter_bits] * growth)


def _up(size: int) -> int:
    """Padded to whole tiles."""
    return -(-size // BLOCK) * BLOCK


def _leaf(params: Params) -> form.Params:
    if not params.sections:
        return form.Params((params.quarter_bits,), (), params.scale_bits, params.lead)
    rates, rows = zip(*params.sections, strict=True)
    return form.Params(rates, rows if len(rows) > 1 else (), params.scale_bits, params.lead)


def _sections(params: Params, rows: int) -> tuple[tuple[int, int], ...]:
    return params.sections or ((params.quarter_bits, rows),)


def _basis(params: Params) -> rotated.Params:
    return rotated.Params(params.block, 0, SEED, params.lead)
