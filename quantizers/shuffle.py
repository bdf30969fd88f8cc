"""`shuffle`: trellis codes of 256 states that a byte shuffle decodes, at 2 to 5 bits (formats `shuffle` inside `rotated`).

The matrix is turned into a basis in which its entries are close to Gaussian, as for `trellis`, and rounded column by column
with LDLQ feedback (Chee et al., QuIP, 2023). A column is cut into paths of 256 rows, which the Viterbi algorithm finds. Up
to 4 bits the mean squared error is 0.15 to 0.21 bit above the rate-distortion bound (`trellis`: 0.08, sixteen levels: 0.64).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nstf.kernels.formats import EncodedTensor, Node, decode, join, rotated, stored_bytes
from nstf.kernels.formats import shuffle as form
from nstf.kernels.shuffle_encode import BLOCK
from nstf.proposals import Recipe, Room, Signature, Target
from nstf.quantizers.rounding.factor import Factor, gains
from nstf.quantizers.rounding.matrix import Rounding, matrix_view
from nstf.quantizers.rounding.shuffle_columns import search
from nstf.quantizers.rounding.turned import shared_factor, turned_factor
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

# `encode_many` gives the same whichever tensors of other Hessians are encoded with one, and is faster for them.
ACROSS = True
# Only where it is named or the plan counts time: what it gains over `trellis` is speed.
ON_REQUEST = True
# Mean squared error on N(0, 1) by quarter bits (benchmarks/shuffle.py).
MSE = {
    8: 0.0774,
    9: 0.0553,
    10: 0.0395,
    11: 0.0282,
    12: 0.0202,
    13: 0.0144,
    14: 0.0103,
    15: 0.00735,
    16: 0.00518,
    17: 0.00377,
    18: 0.00277,
    19: 0.00212,
    20: 0.00165,
}
# One seed for the signs of all tensors, so that q, k and v share the rotation of their input: that of `trellis`.
SEED = 0
# A path gives more of its bits to rows that matter more. Of neighbours that are so many the loss is close to what the best
# division of their bits leaves: the geometric mean of their weights instead of the arithmetic one.
_SHARING = 4
_LEAST = 2.0**-6  # of the mean of such neighbours: what the others cannot take more of
_CHUNK = 1 << 22  # weights at a time where only sums over rows are wanted


@dataclass(frozen=True)
class Params:
    """`quarter_bits` 8..20, four times the bits per weight; `scale_bits` 8 or 16 per row; `block`: Hadamard block along the
    columns (0: none); `rounding` nearest or ldlq; `damping` as in the other quantisers; `lead` axes make the rows.
    """

    quarter_bits: int = 16
    scale_bits: int = 8
    block: int = 0
    rounding: str = "nearest"
    damping: float = 0.01
    lead: int = 1

    def __post_init__(self) -> None:
        tree(self)
        Rounding(self.rounding, self.damping)  # raises for others


@dataclass(frozen=True, eq=False)
class _Metric:
    """Of a Hessian in the stored basis, n columns padded to blocks. `feedback`: U [n, n]; `hessian`: damped [n, n];
    `trace`: the loss of white target errors of variance 1 (twice, a row); `growth`: what they add to a target's variance."""

    feedback: Tensor
    hessian: Tensor
    trace: float
    growth: float


def tree(params: Params) -> Node:
    """The stored form."""
    leaf = Node(form.KIND, _leaf(params))
    return Node(rotated.KIND, _basis(params), {"x": leaf}) if params.block else leaf


def bits(shape: tuple[int, ...], params: Params) -> float:
    """Bits per weight on disk, scales included, without the file's header."""
    return stored_bytes(tree(params), shape) * 8 / math.prod(shape)


def encode(weight: Tensor, params: Params, stats: Stats | None = None) -> EncodedTensor:
    """`weight` (any floating dtype) as an encoded tensor; the arrays are on the CPU.

    All work is done where the weight is. Raises ValueError on weights or statistics that do not fit.
    """
    return encode_many([(weight, params, stats)])[0]


def encode_many(
    items: Sequence[tuple[Tensor, Params, Stats | None]], scratch: int = 1 << 28, room: int | None = None
) -> list[EncodedTensor]:
    """What `encode` gives for each (weight, params, stats), up to the rounding of sums.

    A path is 256 rows of one column, and a GPU goes through columns one after another. So matrices of one rate and one
    Hessian are searched under one another, as many as `scratch` bytes allow; those of other Hessians under these, which
    changes nothing in either (`ACROSS`); and those of other widths and rates beside them, as far as all that fits `room`
    bytes (None: scratch).
    """
    plans = [_Plan(*item) for item in items]
    together: dict[object, list[_Plan]] = {}
    for plan in plans:
        together.setdefault(plan.kind, []).append(plan)
    search(list(together.values()), scratch, scratch if room is None else room)
    return [plan.encoded() for plan in plans]


class _Plan:
    """A matrix that is being encoded. kind: alike in plans that may be searched together."""

    def __init__(self, weight: Tensor, params: Params, stats: Stats | None) -> None:
        stats = stats or Stats()
        self.weight, self.params = weight, params
        self.matrix = matrix = matrix_view(weight, params.lead)
        rows, cols = matrix.shape
        stats.check(rows, cols)
        largest = float(torch.stack([part.abs().amax() for part in _parts(matrix)]).max())
        if not math.isfinite(largest):
            raise ValueError(f"{int((~torch.isfinite(matrix)).sum())} weights are NaN or infinite")
        # What the weights are divided by, so that squares neither overflow nor vanish.
        self.unit = float(2.0 ** math.floor(math.log2(max(largest, 1e-37))))
        self.metric, leaf, q = _metric(stats, params), _leaf(params), params.quarter_bits
        deviation = torch.cat([_mean_square(part / self.unit) for part in _parts(matrix)]).sqrt()
        width = (1 - _growth(self.metric.growth if self.metric else 0.0, q)) ** -0.5
        self.scale = form.read_scales(leaf, form.store_scales(leaf, deviation.float() * width))
        row_weight = torch.ones(rows, device=matrix.device) if stats.row_weight is None else stats.row_weight
        self.row_weight = row_weight.reshape(-1).to(self.scale)
        self.kind = (id(self.metric) if self.metric else None, q, params.block, cols, matrix.device)
        self.quarter_bits, self.feedback = q, self.metric.feedback if self.metric else None
        self.codes: list[Tensor] = []
        self.gains: list[Tensor] = []

    def padded(self, some: slice) -> Tensor:
        """Some rows in the stored basis, as many as whole groups, of as many columns as whole blocks."""
        values = self.matrix[some].float() / self.unit
        if self.params.block:
            values = rotated.to_basis(_basis(self.params), values)
        return torch.nn.functional.pad(values, (0, -values.shape[1] % BLOCK, 0, -len(values) % form.GROUP))

    def take(self, codes: Tensor, values: Tensor, rounded: Tensor) -> None:
        """The next rows: what was searched for, and found."""
        self.codes.append(codes.cpu())
        self.gains.append(_refit(values, rounded, self.metric))

    def encoded(self) -> EncodedTensor:
        """The result, once all rows were searched."""
        scale = (self.scale * torch.cat(self.gains)).cpu() * self.unit
        arrays = {"codes": torch.cat(self.codes), **form.store_scales(_leaf(self.params), scale)}
        prefix = "x" if self.params.block else ""
        return EncodedTensor(
            tree(self.params), tuple(self.weight.shape), {join(prefix, k): a for k, a in arrays.items()}
        )


def estimate(weight: Tensor, params: Params, stats: Stats | None = None) -> float:
    """The expected loss of `encode`, without encoding: Gaussian weights and white errors make it a closed form."""
    return estimate_many(weight, [params], stats)[0]


def estimate_many(weight: Tensor, params: Sequence[Params], stats: Stats | None = None) -> list[float]:
    """`estimate` for several params; the weight is read once.

    With eta of variance e = MSE var(target), dW = eta K and K = (U + I)^-1, the loss of a row is e/2 (tr D - damping |K|^2),
    and targets have a variance larger by 1 / (1 - MSE |I - K|^2 / n) than the weights.
    """
    stats = stats or Stats()
    energies: dict[int, float] = {}
    for lead in {p.lead for p in params}:
        matrix = matrix_view(weight, lead)
        stats.check(*matrix.shape)
        energy = _mean_square(matrix)
        if stats.row_weight is not None:
            energy = energy * stats.row_weight.reshape(-1).to(energy)
        energies[lead] = float(_shared(energy))
        if not math.isfinite(energies[lead]):
            raise ValueError("weights or row weights are NaN or infinite")
    out = []
    for p in params:
        figures = _figures(stats, p)
        trace, growth = figures or (float(math.prod(weight.shape[p.lead :])), 0.0)
        if figures is None and stats.hessian is not None:
            trace = float(stats.hessian.diagonal().sum())
        lost = MSE[p.quarter_bits] * trace / (2 * (1 - _growth(growth, p.quarter_bits)))
        if not p.block:
            lost *= 1 + _beyond(matrix_view(weight, p.lead), p.quarter_bits) / MSE[p.quarter_bits]
        out.append(energies[p.lead] * lost)
    return out


def proposals(signature: Signature, target: Target, room: Room) -> list[Recipe]:
    """Every rate; none where another method loses less and time does not count.

    Of convolutions in the weights' own basis, the one that kernels read: what a kernel sees would have to be rotated patch
    by patch. Where time does not count, in a rotated one as well.
    """
    if room.from_bits and not target.timed:
        room.skip(
            "shuffle",
            f"another method loses less up to {room.from_bits} bits a weight, and time does not count",
        )
        return []
    own: list[dict[str, int]] = [{}]
    if not target.timed and basis_block(signature.shape, signature.lead) == 0:
        own.append({"block": rotated.block_for(signature.cols)})
    return [Recipe("shuffle", {"quarter_bits": q, **basis}) for basis in own for q in form.RATES]


def basis_block(shape: tuple[int, ...], lead: int) -> int:
    """The block of the rotation where a recipe names none: none for a convolution."""
    return 0 if len(shape) - lead > 1 else rotated.block_for(math.prod(shape[lead:]))


def _beyond(matrix: Tensor, q: int) -> float:
    """What the range of the codes cuts off weights in their own basis, as a share of their energy: a rotated basis has next
    to none of it, some trained kernels have more than everything else that is lost."""
    reach, lost, total = form.CENTRE * form.STEPS[q], 0.0, 0.0
    for part in _parts(matrix):
        rows = part.float()
        scale = rows.square().mean(1, keepdim=True).sqrt().clamp_min(1e-30)
        lost += float(((rows / scale).abs() - reach).clamp_min(0.0).square().sum(dtype=torch.float64))
        total += rows.numel()
    return lost / max(1.0, total)


def _shared(energy: Tensor) -> Tensor:
    """The sum of row energies [rows] with those of neighbours replaced by their geometric mean."""
    whole = len(energy) // _SHARING * _SHARING
    near = energy[:whole].view(-1, _SHARING)
    mean = near.mean(1, keepdim=True)
    kept = torch.maximum(near, mean * _LEAST).clamp_min(1e-300).log().mean(1).exp()
    return torch.minimum(kept, mean[:, 0]).sum() * _SHARING + energy[whole:].sum()


def _refit(part: Tensor, rounded: Tensor, metric: _Metric | None) -> Tensor:
    """The factor on each row's scale that is best for its codes, q H w / q H q: float32 [rows]."""
    along = rounded if metric is None else rounded @ metric.hessian
    least = (along * rounded).sum(1)
    best = (along * part).sum(1) / least.clamp_min(1e-30)
    return torch.where((least > 0) & (best > 0), best, 1.0)


def _metric(stats: Stats, params: Params) -> _Metric | None:
    """The factor of the Hessian in the stored basis; made once per Hessian and basis."""
    hessian = stats.hessian
    if params.rounding == "nearest" or hessian is None:
        return None

    def make() -> _Metric:
        found = turned_factor(hessian, _basis(params), params.damping, _up(len(hessian)))
        return _Metric(found.feedback, found.hessian, *_of_factor(found))

    return stats.derived(("shuffle", params.block, params.damping), make)


def _figures(stats: Stats, params: Params) -> tuple[float, ...] | None:
    """(trace, growth) of `_metric`, which is not kept: estimates want no more, and want it again of a Hessian read anew."""
    hessian = stats.hessian
    if params.rounding == "nearest" or hessian is None:
        return None

    def make() -> tuple[float, ...]:
        return _of_factor(shared_factor(stats, hessian, _basis(params), params.damping, _up(len(hessian))))

    return stats.figure(("shuffle", params.block, params.damping), make)


def _of_factor(found: Factor) -> tuple[float, float]:
    """(trace, growth) of the metric that a factor makes."""
    kept, added = gains(found.feedback)
    trace, lost, growth = torch.stack([found.diagonal.sum(), kept.sum(), added.sum()]).tolist()
    return trace - found.damping * found.mean * lost, growth / len(kept)


def _growth(growth: float, quarter_bits: int) -> float:
    """By how much feedback widens the targets, as a share of their variance; at most a half. growth: of the metric."""
    return min(0.5, MSE[quarter_bits] * growth)


def _up(cols: int) -> int:
    """Padded to whole blocks."""
    return cols + -cols % BLOCK


def _parts(matrix: Tensor) -> tuple[Tensor, ...]:
    return torch.split(matrix, max(1, _CHUNK // matrix.shape[1]))


def _mean_square(matrix: Tensor) -> Tensor:
    """float64 [rows]."""
    return torch.cat([part.double().square().mean(1) for part in _parts(matrix)])


def _leaf(params: Params) -> form.Params:
    return form.Params(params.quarter_bits, params.scale_bits, params.lead)


def _basis(params: Params) -> rotated.Params:
    return rotated.Params(params.block, 0, SEED, params.lead)
