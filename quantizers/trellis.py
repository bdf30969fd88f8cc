"""`trellis`: trellis-coded quantisation at 1 to 6 bits in steps of a quarter (formats `trellis` inside `rotated`).

Tseng et al., QTIP, 2024: the matrix is turned into a basis in which its entries are close to Gaussian, rounded in blocks
of 16 columns with LDLQ feedback, and each 16 x 16 tile becomes the nearest path through a trellis, found by the Viterbi
algorithm. At equal bits the mean squared error is 0.4 to 0.6 bit below a scalar quantiser's.
"""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nstf.kernels.formats import EncodedTensor, Node, bitpack, decode, join, rotated, stored_bytes
from nstf.kernels.formats import trellis as form
from nstf.kernels.trellis_encode import encode_tiles
from nstf.quantizers.rounding.block_ldlq import BLOCK, BlockFactor, block_factor, block_ldlq
from nstf.quantizers.rounding.factor import factor
from nstf.quantizers.rounding.matrix import matrix_view
from nstf.quantizers.stats import Stats

__all__ = ["Params", "bits", "decode", "encode", "estimate", "tree"]

# Mean squared error on N(0, 1) by quarter bits, at the width below (benchmarks/trellis.py), and the width: the ratio of the
# weights' standard deviation to the codebook's that is best. More bits reach further into the tails.
MSE = {
    4: 0.2733,
    5: 0.1960,
    6: 0.1394,
    7: 0.0987,
    8: 0.0694,
    9: 0.0492,
    10: 0.0352,
    11: 0.0250,
    12: 0.0178,
    13: 0.0126,
    14: 0.00893,
    15: 0.00630,
    16: 0.00443,
    17: 0.00313,
    18: 0.00222,
    19: 0.00157,
    20: 0.00111,
    21: 0.00079,
    22: 0.00056,
    23: 0.00040,
    24: 0.00028,
}
WIDTH = {
    q: 1.0 if q <= 11 else 1.03 if q == 12 else 1.06 if q <= 16 else 1.08 if q <= 20 else 1.12 for q in MSE
}
# A section's tiles are searched 16 at a time: smaller ones cost encoding time for hardly any gain.
SMALLEST_SECTION = 64
# One seed for the signs of all tensors, so that q, k and v share the rotation of their input.
SEED = 0
_STREAMS = threading.local()


@dataclass(frozen=True)
class Params:
    """`quarter_bits` 4..24 for all rows, or `sections` ((quarter bits, rows), ...) from the rows whose errors matter most
    to those that matter least; `scale_bits` 8 or 16 per row; `block`: Hadamard block along the columns (0: none);
    `rounding` nearest or ldlq; `damping` as in the other quantisers; `lead` axes make the rows.
    """

    quarter_bits: int = 12
    sections: tuple[tuple[int, int], ...] = ()
    scale_bits: int = 8
    block: int = 0
    rounding: str = "nearest"
    damping: float = 0.01
    lead: int = 1

    def __post_init__(self) -> None:
        tree(self)
        if self.rounding not in ("nearest", "ldlq"):
            raise ValueError(f"rounding must be one of nearest, ldlq, not {self.rounding[:40]!r}")
        if not 0 < self.damping <= 1:
            raise ValueError(f"damping must be above 0 and at most 1, not {self.damping}")


def tree(params: Params) -> Node:
    """The stored form."""
    leaf = Node(form.KIND, _leaf(params))
    return Node(rotated.KIND, _basis(params), {"x": leaf}) if params.block else leaf


def bits(shape: tuple[int, ...], params: Params) -> float:
    """Bits per weight on disk, scales included, without the file's header."""
    return stored_bytes(tree(params), shape) * 8 / math.prod(shape)


def encode(weight: Tensor, params: Params, stats: Stats | None = None) -> EncodedTensor:
    """`weight` (any floating dtype) as an encoded tensor; the arrays are on the CPU.

    A GPU does the work when there is one. Raises ValueError on weights or statistics that do not fit.
    """
    stats = stats or Stats()
    matrix = matrix_view(weight, params.lead).float()
    stats.check(*matrix.shape)
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError(f"{int((~torch.isfinite(matrix)).sum())} weights are NaN or infinite")
    rows, leaf = matrix.shape[0], _leaf(params)
    # In units of the largest weight, so that squares neither overflow nor vanish.
    unit = float(2.0 ** math.floor(math.log2(max(float(matrix.abs().max()), 1e-37))))
    matrix = _in_basis(matrix / unit, params)
    number = _sections_of_rows(matrix, params, stats)
    parts = [
        _encode_section(matrix[number == i], q, leaf, params, stats)
        for i, (q, _) in enumerate(_sections(params, rows))
    ]
    scales = torch.empty(rows)
    for i, (_, found) in enumerate(parts):
        scales[number == i] = found
    arrays = {"codes": torch.cat([codes for codes, _ in parts]), **form.store_scales(leaf, scales * unit)}
    if len(params.sections) > 1:
        width = max(1, (len(parts) - 1).bit_length())
        arrays["section"] = bitpack.pack(number.to(torch.uint8)[None], width)[0]
    prefix = "x" if params.block else ""
    return EncodedTensor(tree(params), tuple(weight.shape), {join(prefix, k): a for k, a in arrays.items()})


def estimate(weight: Tensor, params: Params, stats: Stats | None = None) -> float:
    """The expected loss of `encode`, without encoding: Gaussian weights and white errors make it a closed form."""
    energy = row_energy(weight, params, stats)
    order = torch.argsort(energy, descending=True, stable=True)
    total, at = 0.0, 0
    for q, n in _sections(params, len(energy)):
        total += float(energy[order[at : at + n]].sum()) * unit_loss(q, weight, params, stats)
        at += n
    return total


def row_energy(weight: Tensor, params: Params, stats: Stats | None = None) -> Tensor:
    """Variance of each row times its weight in the loss, float64 [rows]. Raises ValueError on non-finite values."""
    stats = stats or Stats()
    matrix = matrix_view(weight, params.lead).float()
    stats.check(*matrix.shape)
    energy = _mean_square(matrix)
    if stats.row_weight is not None:
        energy = energy * stats.row_weight.reshape(-1).cpu()
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
    metric = _metric(stats, params, -(-cols // BLOCK) * BLOCK)
    trace = float(cols) if metric is None else metric.trace
    if metric is None and stats.hessian is not None:
        trace = float(stats.hessian.diagonal().sum())
    return MSE[quarter_bits] * trace / (2 * (1 - _growth(metric, quarter_bits)))


def best_sections(
    energy: Tensor, losses: dict[int, float], cols: int, price: float
) -> tuple[tuple[int, int], ...]:
    """The sections ((quarter bits, rows), ...) that lose least when a byte costs `price` (in units of loss).

    energy: [rows], see `row_energy`. losses: quarter bits -> `unit_loss`. Sections are whole tiles of rows but the last.
    Reverse water-filling (Cover and Thomas, Elements of Information Theory, 10.3.3) over the rates there are.
    """
    rates = sorted(losses, reverse=True)
    order = torch.sort(energy, descending=True, stable=True).values
    tiles = torch.nn.functional.pad(order, (0, -len(order) % form.SIDE)).reshape(-1, form.SIDE).sum(1)
    bytes_of = torch.tensor([cols * q / 32 * form.SIDE for q in rates], dtype=torch.float64)
    cost = tiles[:, None] * torch.tensor([losses[q] for q in rates], dtype=torch.float64) + price * bytes_of
    chosen = cost.argmin(1).cummax(0).values  # rows that matter less never get more bits
    found = [[i, int((chosen == i).sum())] for i in range(len(rates)) if bool((chosen == i).any())]
    cumulative = torch.cat([cost.new_zeros(1, len(rates)), cost.cumsum(0)])
    while len(found) > 1 and min(n for _, n in found) < SMALLEST_SECTION // form.SIDE:
        at = min(range(len(found)), key=lambda i: found[i][1])
        start = sum(n for _, n in found[:at])
        end = start + found[at][1]
        near = [i for i in (at - 1, at + 1) if 0 <= i < len(found)]
        into = min(near, key=lambda i: float(cumulative[end, found[i][0]] - cumulative[start, found[i][0]]))
        found[into][1] += found[at][1]
        del found[at]
    sections = [(rates[i], n * form.SIDE) for i, n in found]
    q, rows = sections[-1]
    return (*sections[:-1], (q, rows - (-len(order) % form.SIDE)))


def _mean_square(matrix: Tensor) -> Tensor:
    """float64 [rows]."""
    return torch.cat(
        [matrix[s:e].double().square().mean(1) for s, e in _row_chunks(matrix.shape[0], matrix.shape[1])]
    )


def _encode_section(
    part: Tensor, quarter_bits: int, leaf: form.Params, params: Params, stats: Stats
) -> tuple[Tensor, Tensor]:
    """Codes [bytes] and row scales [rows] of the rows of one section, already in the stored basis."""
    part_rows, cols = part.shape
    part = _padded(part)
    metric = _metric(stats, params, part.shape[1])
    width = WIDTH[quarter_bits] * (1 - _growth(metric, quarter_bits)) ** -0.5
    scales = form.read_scales(leaf, form.store_scales(leaf, (part.square().sum(1) / cols).sqrt() * width))
    codes, gains = [], []
    with _device() as device:
        for start, end in _row_chunks(*part.shape):
            chunk = part[start:end].to(device)
            found, rounded = _round(chunk, scales[start:end].to(device), quarter_bits, metric)
            codes.append(found.reshape(-1).cpu())
            gains.append(_refit(chunk, rounded, metric).cpu())
    return torch.cat(codes), (scales * torch.cat(gains))[:part_rows]


@contextmanager
def _device() -> Iterator[torch.device]:
    """Where to search: the GPU when there is one, on a stream of the calling thread.

    Blocks follow one another and have few tiles each, so a GPU is filled by encoding several tensors at a time.
    """
    if not torch.cuda.is_available():
        yield torch.device("cpu")
        return
    if not hasattr(_STREAMS, "own"):
        _STREAMS.own = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(_STREAMS.own):
        yield torch.device("cuda")


def _round(
    part: Tensor, scale: Tensor, quarter_bits: int, metric: BlockFactor | None
) -> tuple[Tensor, Tensor]:
    """Codes [row tiles, column tiles, 8 q] and values [rows, cols] of some rows of a padded matrix."""
    rows, cols = part.shape
    table = form.codebook(quarter_bits).to(part.device)
    codes = torch.empty(rows // BLOCK, cols // BLOCK, 8 * quarter_bits, dtype=torch.uint8, device=part.device)

    inverse = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))[:, None]

    def round_block(index: int, target: Tensor) -> Tensor:
        found = encode_tiles((target * inverse).reshape(-1, form.TILE), quarter_bits, table)
        codes[:, index] = found
        return form.section_values(found[:, None], quarter_bits, rows, BLOCK) * scale[:, None]

    feedback = None if metric is None else metric.feedback.to(part.device)
    return codes, block_ldlq(part, feedback, round_block)


def _refit(part: Tensor, rounded: Tensor, metric: BlockFactor | None) -> Tensor:
    """The factor on each row's scale that is best for its codes, q H w / q H q: float32 [rows]."""
    along = rounded if metric is None else rounded @ metric.hessian.to(part.device)
    least = (along * rounded).sum(1)
    best = (along * part).sum(1) / least.clamp_min(1e-30)
    return torch.where((least > 0) & (best > 0), best, torch.ones_like(best))


def _metric(stats: Stats, params: Params, cols: int) -> BlockFactor | None:
    """The block factor of the Hessian in the stored basis, padded to `cols`; made once per Hessian and basis."""
    hessian = stats.hessian
    if params.rounding == "nearest" or hessian is None:
        return None

    def make() -> BlockFactor:
        turned = rotated.rotate_hessian(_basis(params), hessian.float()) if params.block else hessian.float()
        square = torch.zeros(cols, cols)
        square[: turned.shape[0], : turned.shape[0]] = turned
        return block_factor(factor(square, params.damping))

    return stats.derived(("trellis", params.block, params.damping, cols), make)


def _growth(metric: BlockFactor | None, quarter_bits: int) -> float:
    """By how much feedback widens the targets, as a share of their variance; at most a half."""
    return 0.0 if metric is None else min(0.5, MSE[quarter_bits] * metric.growth)


def _in_basis(matrix: Tensor, params: Params) -> Tensor:
    return rotated.to_basis(_basis(params), matrix) if params.block else matrix


def _padded(matrix: Tensor) -> Tensor:
    rows, cols = matrix.shape
    more = (0, -cols % BLOCK, 0, -rows % BLOCK)
    return torch.nn.functional.pad(matrix, more) if any(more) else matrix.contiguous()


def _row_chunks(rows: int, cols: int) -> list[tuple[int, int]]:
    """Ranges of whole tiles of at most about 2**22 weights."""
    step = max(1, (1 << 22) // cols // BLOCK) * BLOCK
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _leaf(params: Params) -> form.Params:
    if not params.sections:
        return form.Params((params.quarter_bits,), (), params.scale_bits, params.lead)
    rates, rows = zip(*params.sections, strict=True)
    return form.Params(rates, rows if len(rows) > 1 else (), params.scale_bits, params.lead)


def _sections(params: Params, rows: int) -> tuple[tuple[int, int], ...]:
    return params.sections or ((params.quarter_bits, rows),)


def _sections_of_rows(matrix: Tensor, params: Params, stats: Stats) -> Tensor:
    """The section of each row, int64 [rows]: by descending energy."""
    rows = matrix.shape[0]
    if sum(n for _, n in _sections(params, rows)) != rows:
        raise ValueError(f"the sections do not add up to {rows} rows")
    energy = _mean_square(matrix)
    if stats.row_weight is not None:
        energy = energy * stats.row_weight.reshape(-1).cpu()
    number = torch.empty(rows, dtype=torch.int64)
    order, at = torch.argsort(energy, descending=True, stable=True), 0
    for i, (_, n) in enumerate(_sections(params, rows)):
        number[order[at : at + n]] = i
        at += n
    return number


def _basis(params: Params) -> rotated.Params:
    return rotated.Params(params.block, 0, SEED, params.lead)
