"""CP: a sum of rank-one tensors, by alternating least squares with several starts and bounded terms.

ALS (Carroll and Chang, Harshman 1970) is tensorly's `parafac`. It starts from the leading eigenvectors of
each unfolding and from seeded random factors, and the start with the smallest error wins. A best CP of a
given rank need not exist, and ALS then returns terms that grow while cancelling each other, which ruins
them for quantisation. So the result is corrected as in "Stable low-rank tensor decomposition" (Phan et al.
2020): when the sum of the squared norms of the terms exceeds `intensity` times that of the tensor, ALS
goes on from there with a growing penalty on the factors until it does not. Their correction fixes the
error and minimises the norm; here the norm is bounded and the error minimised.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from nstf.decomposers.bounds import Frontier, cp_numbers
from nstf.decomposers.factors import BytesOf, Decomposition, largest, unique
from nstf.decomposers.modes import Whitened, gram_eigen, mode_product, unfold, whiten
from nstf.decomposers.norms import DAMPING, solve_spd
from nstf.decomposers.remembered import FORGETFUL, Remembered
from nstf.decomposers.tensorly_backend import torch_backend
from nstf.decomposers.views import LARGEST, views_for
from nstf.kernels.formats import cp
from nstf.kernels.formats.tree import Shape
from nstf.proposals import Recipe, Room, Signature, Target

KIND = cp.KIND
REMEMBERS = True
PENALTIES = (1e-10, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Ridge on the factors of a tensor of unit norm. The first only keeps the normal equations solvable."""
WORK = 5e9
"""Multiply-adds spent on one weight before starts and sweeps are saved: about a second on one core."""
MAX_RANK = 512
"""Largest rank that is offered for a byte budget: beyond it alternating least squares take minutes."""
POLISH = 4
"""Sweeps on the uncompressed tensor after ALS on the compressed one."""


@dataclass(frozen=True)
class Params:
    """rank: terms. view: reshape to decompose in (None: the tensor's own). iterations: ALS sweeps per start.

    restarts: random starts besides the spectral one. intensity: bound on sum ||term||^2 / ||T||^2.
    """

    rank: int
    view: tuple[int, ...] | None = None
    iterations: int = 40
    restarts: int = 2
    seed: int = 0
    intensity: float = 20.0
    damping: float = DAMPING


PARAMS = Params


def decompose(
    weight: Tensor,
    params: Params,
    stats_hessian: Tensor | None = None,
    row_weight: Tensor | None = None,
    remembered: Remembered = FORGETFUL,
) -> Decomposition:
    """The terms' factors, weights folded in evenly. weight, hessian, row_weight: see modes.whiten.

    Raises ValueError.
    """
    shape = tuple(weight.shape)
    view = params.view or shape
    node = cp.Params(params.rank, view)
    whitened = whiten(weight, view, stats_hessian, params.damping, row_weight, remembered)
    norm = float(whitened.tensor.norm())
    if norm == 0.0:
        factors = [whitened.tensor.new_zeros(size, params.rank) for size in view]
    else:
        factors = _fit(whitened.tensor / norm, params)
        factors[0] = factors[0] * norm
        factors = _even([whitened.out_of(f, axis) for axis, f in enumerate(factors)])
    # The largest factor last: it has most freedom to take up the rounding errors of the others.
    order = sorted(range(len(view)), key=lambda i: view[i])
    current = {f"factor{i}": factors[i].to(torch.float32) for i in order}
    fit = _Refit(whitened)
    metrics: dict[str, Tensor | None] = {n: fit.gram(n, current).to(torch.float32) for n in current}
    return Decomposition(KIND, node, shape, current, metrics, fit)


@dataclass(frozen=True)
class _Refit:
    """Least squares for one factor given the others, in the whitened norm."""

    whitened: Whitened

    def _others(self, name: str, current: Mapping[str, Tensor]) -> tuple[int, dict[int, Tensor]]:
        axis = int(name.removeprefix("factor"))
        factors = {int(n.removeprefix("factor")): f.to(torch.float64) for n, f in current.items()}
        return axis, {i: self.whitened.into(f, i) for i, f in factors.items() if i != axis}

    def gram(self, name: str, current: Mapping[str, Tensor]) -> Tensor:
        """[rank, rank]: the elementwise product of the other factors' Gram matrices."""
        _, others = self._others(name, current)
        return _hadamard(f.T @ f for f in others.values())

    def __call__(self, name: str, current: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        axis, others = self._others(name, current)
        gram = self.gram(name, current)
        factor = solve_spd(gram, _mttkrp(self.whitened.tensor, others, axis).T).T
        factor = self.whitened.out_of(factor, axis)
        return factor.to(torch.float32).contiguous(), gram.to(torch.float32)


def _mttkrp(tensor: Tensor, others: Mapping[int, Tensor], axis: int) -> Tensor:
    """Unfolding of `axis` times the Khatri-Rao product of the others, never formed: [n_axis, rank]."""
    out = tensor.movedim(axis, 0)
    rest = [others[i] for i in sorted(others)]
    out = out @ rest[-1]
    for factor in reversed(rest[:-1]):
        out = torch.einsum("...dr,dr->...r", out, factor)
    return out


def _fit(tensor: Tensor, params: Params) -> list[Tensor]:
    """Factors for a tensor of unit norm, float64.

    The starts are run on the tensor compressed to at most `rank` directions an axis (CANDELINC: Carroll,
    Pruzansky and Kruskal 1980; Bro and Andersson 1998), the best is then polished on the tensor itself.
    """
    view = tuple(tensor.shape)
    if params.rank == math.prod(view) // max(view):
        return _exact(tensor)
    bases: dict[int, Tensor] = {}
    core = tensor
    for axis, size in enumerate(view):
        if size > params.rank:
            bases[axis] = gram_eigen(unfold(tensor, axis))[1][:, : params.rank]
    for axis, basis in bases.items():
        core = mode_product(core, basis.T, axis)
    factors = [bases[i] @ f if i in bases else f for i, f in enumerate(_best_start(core, params))]
    if not bases:
        return factors
    polished = list(factors)
    for _ in range(POLISH):
        for axis in range(len(view)):
            others = {i: f for i, f in enumerate(polished) if i != axis}
            gram = _hadamard(f.T @ f for f in others.values())
            gram.diagonal().add_(PENALTIES[0])
            polished[axis] = solve_spd(gram, _mttkrp(tensor, others, axis).T).T
        polished = _even(polished)
    return polished if _intensity(polished) <= params.intensity else factors


def _best_start(tensor: Tensor, params: Params) -> list[Tensor]:
    best: list[Tensor] | None = None
    best_error = math.inf
    per_sweep = 2.0 * tensor.ndim * params.rank * (tensor.numel() + params.rank**2)
    sweeps = max(4, min(params.iterations, int(WORK / per_sweep)))
    starts = max(1, min(1 + params.restarts, int(WORK / (per_sweep * sweeps))))
    for start in range(starts):
        generator = torch.Generator("cpu").manual_seed(params.seed + start)
        if start == 0:
            factors = _spectral(tensor, params.rank, generator)
        else:
            factors = [_random(n, params.rank, generator).to(tensor.device) for n in tensor.shape]
        for penalty in PENALTIES:
            factors = _als(tensor, factors, params.rank, sweeps, penalty)
            if _intensity(factors) <= params.intensity:
                break
        error = _squared_error(tensor, factors)
        if error < best_error:
            best, best_error = factors, error
    if best is None:
        raise ValueError(f"CP of rank {params.rank} did not converge for the view {list(tensor.shape)}")
    return best


def _squared_error(tensor: Tensor, factors: list[Tensor]) -> float:
    """||T - sum of the terms||^2 from inner products: ||T||^2 - 2 <T, T~> + ||T~||^2."""
    cross = (_mttkrp(tensor, dict(enumerate(factors[1:], 1)), 0) * factors[0]).sum()
    return float(tensor.square().sum() - 2 * cross + _hadamard(f.T @ f for f in factors).sum())


def _hadamard(matrices: Iterable[Tensor]) -> Tensor:
    """The elementwise product."""
    return reduce(torch.mul, matrices)


def _exact(tensor: Tensor) -> list[Tensor]:
    """At the largest rank: one term for every position of the shorter axes, so nothing is lost."""
    view = tuple(tensor.shape)
    longest = max(range(len(view)), key=lambda i: view[i])
    rest = [size for i, size in enumerate(view) if i != longest]
    positions = torch.cartesian_prod(*[torch.arange(n, device=tensor.device) for n in rest]).reshape(
        -1, len(rest)
    )
    axes = iter(range(len(rest)))
    factors = []
    for axis, size in enumerate(view):
        if axis == longest:
            factors.append(unfold(tensor, axis))
        else:
            hot = torch.nn.functional.one_hot(positions[:, next(axes)], size)
            factors.append(hot.T.to(torch.float64))
    return factors


def _als(tensor: Tensor, factors: list[Tensor], rank: int, sweeps: int, penalty: float) -> list[Tensor]:
    start: Any = (tensor.new_ones(rank), _even(factors))
    with torch_backend():
        from tensorly.decomposition import parafac

        weights, fitted = parafac(tensor, rank, n_iter_max=sweeps, init=start, tol=1e-6, l2_reg=penalty)
    return _even([fitted[0] * weights, *fitted[1:]])


def _spectral(tensor: Tensor, rank: int, generator: torch.Generator) -> list[Tensor]:
    """Leading eigenvectors of every unfolding, filled up with random columns where the axis is short."""
    factors = []
    for axis, size in enumerate(tensor.shape):
        vectors = gram_eigen(unfold(tensor, axis))[1][:, :rank]
        missing = rank - vectors.shape[1]
        factors.append(
            torch.cat([vectors, _random(size, missing, generator).to(vectors)], dim=1) if missing else vectors
        )
    return factors


def _random(size: int, rank: int, generator: torch.Generator) -> Tensor:
    """On the CPU, so that every device starts from the same numbers."""
    return torch.randn(size, rank, generator=generator, dtype=torch.float64, device="cpu") / math.sqrt(size)


def _even(factors: list[Tensor]) -> list[Tensor]:
    """The same terms with every factor's column of equal norm."""
    norms = [f.norm(dim=0) for f in factors]
    target = _hadamard(norms) ** (1.0 / len(factors))
    return [f * (target / n.clamp_min(1e-300)) for f, n in zip(factors, norms, strict=True)]


def _intensity(factors: list[Tensor]) -> float:
    """Sum of the squared norms of the terms."""
    return float(_hadamard(f.square().sum(0) for f in factors).sum())


def rank_for_bytes(view: Shape, size_bytes: int, bytes_of: BytesOf) -> int | None:
    """The largest rank up to MAX_RANK whose factors take at most `size_bytes`, or None if one term does not
    fit.
    """
    most = min(MAX_RANK, math.prod(view) // max(view))
    return largest(lambda r: sum(bytes_of((size, r)) for size in view) <= size_bytes, most)


def proposals(signature: Signature, target: Target, room: Room) -> list[Recipe]:
    """In each view, at each of the room's sizes, the rank that fits, where no bound rules it out.

    Of ranks above half the longest axis the unfoldings say little, and alternating least squares take long: these, and
    tensors of more than LARGEST weights, are left out.
    """
    out: list[Recipe] = []
    # In no view of a matrix of the models in docs/structure.md it won, and its bound says least of all.
    if len(signature.shape) == 2:
        room.skip("cp", "it won on no matrix that was measured")
        return out
    if signature.weight.numel() > LARGEST:
        room.skip("cp", f"more than {LARGEST} weights")
        return out
    for view in views_for("cp", signature, room):
        axes = [signature.unfolding(view.dims, (i,)) for i in range(len(view.dims))]
        frontier = Frontier(signature.signal, [*axes, signature.matrix], cp_numbers(view.dims))
        for factor in room.factors:
            for size in room.sizes:
                rank = rank_for_bytes(view.dims, size, factor.bytes_of)
                if rank is None or rank > max(view.dims) // 2:
                    continue
                least = frontier.may_win(room, "cp", size, factor)
                if least is not None:
                    params = {"rank": rank, "view": list(view.dims)}
                    out.append(Recipe("cp", params, {"factor": factor.recipe}, least))
    return unique(out)


def rank_for_error(
    weight: Tensor, error: float, params: Params, stats_hessian: Tensor | None = None
) -> int | None:
    """The smallest rank up to `params.rank` found to reach the relative error, or None if that one does not.

    By bisection on fitted decompositions, as nothing cheaper bounds the error of CP from below and above.
    """
    view = params.view or tuple(weight.shape)
    whitened = whiten(weight, view, stats_hessian, params.damping)

    def reaches(rank: int) -> bool:
        trial = decompose(weight, replace(params, rank=rank), stats_hessian)
        return whitened.error(trial.dense()) <= error

    if not reaches(params.rank):
        return None
    low, high = 1, params.rank
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle + 1, high)
    return low
