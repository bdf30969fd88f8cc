"""Tucker: a core and one orthonormal basis an axis, by HOSVD and then HOOI; axes may be left whole (partial).

HOSVD (De Lathauwer, De Moor, Vandewalle 2000) takes the leading eigenvectors of every unfolding; HOOI
improves them in turn, with the numbers of tensorly's `partial_tucker`. With a covariance the fit is in ||(W - W~)
S^(1/2)||, see nstf.decomposers.modes; where the view splits the input
(a convolution's channels and kernel), the bases come from the separable approximation there, and the core is
then the exact least-squares solution in the full norm. Tucker-2 over (out, in) of a convolution: Kim et al.
2015.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nstf.decomposers import chains
from nstf.decomposers.bounds import Frontier, tucker_numbers
from nstf.decomposers.factors import BytesOf, Decomposition, lead_for, unique
from nstf.decomposers.modes import Whitened, gram_eigen, gram_values, kron, mode_product, unfold, whiten
from nstf.decomposers.norms import DAMPING, solve_spd
from nstf.decomposers.ranks import Ranks, ranks_for_bytes, ranks_for_tail
from nstf.decomposers.remembered import FORGETFUL, Remembered
from nstf.decomposers.views import views_for
from nstf.kernels.formats import tucker
from nstf.kernels.formats.tree import Shape
from nstf.proposals import Recipe, Room, Signature, Target

KIND = tucker.KIND
REMEMBERS = True
CHANGE = 1e-6
"""Of the relative error of a fit: sweeps end below it."""


@dataclass(frozen=True)
class Params:
    """ranks: core size along each axis of `view` (full size: no factor). iterations: HOOI sweeps."""

    ranks: tuple[int, ...]
    view: tuple[int, ...] | None = None
    iterations: int = 10
    damping: float = DAMPING


PARAMS = Params


def decompose(
    weight: Tensor,
    params: Params,
    stats_hessian: Tensor | None = None,
    row_weight: Tensor | None = None,
    remembered: Remembered = FORGETFUL,
) -> Decomposition:
    """Core and bases. weight, hessian, row_weight: see modes.whiten. Raises ValueError."""
    shape = tuple(weight.shape)
    view = params.view or shape
    node = tucker.Params(params.ranks, view)
    whitened = whiten(weight, view, stats_hessian, params.damping, row_weight, remembered)
    factors = _fit(whitened, node.ranks, params.iterations)
    refit = _Refit(whitened, node)
    named = {f"factor{i}": _stored(whitened.out_of(f, i)) for i, f in factors.items()}
    core, core_metric = refit.core(named)
    named["core"] = core
    metrics: dict[str, Tensor | None] = {
        n: refit.gram(n, named).to(torch.float32) for n in named if n != "core"
    }
    metrics["core"] = core_metric
    return Decomposition(KIND, node, shape, named, metrics, refit)


@dataclass(frozen=True)
class _Refit:
    """Least squares for the core or for one basis given the rest, in the whitened norm."""

    whitened: Whitened
    node: tucker.Params

    def __call__(self, name: str, current: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        if name == "core":
            return self.core(current)
        axis = int(name.removeprefix("factor"))
        rest = self._rest(axis, current)
        gram = rest @ rest.T
        factor = solve_spd(gram, rest @ unfold(self.whitened.tensor, axis).T).T
        return _stored(self.whitened.out_of(factor, axis)), gram.to(torch.float32)

    def gram(self, name: str, current: Mapping[str, Tensor]) -> Tensor:
        rest = self._rest(int(name.removeprefix("factor")), current)
        return rest @ rest.T

    def _rest(self, axis: int, current: Mapping[str, Tensor]) -> Tensor:
        """What the basis of `axis` is multiplied with: [rank, product of the other axes], whitened."""
        out = current["core"].to(torch.float64)
        for i in range(len(self.node.view)):
            factor = current.get(f"factor{i}")
            if factor is None:
                out = self.whitened.into(out, i, i)
            elif i != axis:
                out = mode_product(out, self.whitened.into(factor.to(torch.float64), i), i)
        return unfold(out, axis)

    def core(self, current: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The best core for the bases in `current`, and the metric to round it in."""
        view = self.node.view
        names = {i: f"factor{i}" for i in range(len(view)) if f"factor{i}" in current}
        factors = {i: current[n].to(torch.float64) for i, n in names.items()}
        split = self.whitened.patch is not None
        separable = range(self.whitened.columns if split else len(view))
        core = self.whitened.original
        for i in separable:
            core = self.whitened.into(core, i, i)
            if i in factors:
                f = self.whitened.into(factors[i], i)
                core = mode_product(core, solve_spd(f.T @ f, f.T), i)
            else:
                core = self.whitened.out_of(core, i, i)
        if self.whitened.patch is not None:
            core, metric = self._core_of_patches(core, factors, self.whitened.patch)
        else:
            metric = self._core_metric(factors)
        return _stored(core), None if metric is None else metric.to(torch.float32)

    def _core_of_patches(
        self, core: Tensor, factors: Mapping[int, Tensor], patch: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Exact for the whole covariance H: C = U^+ W H P (P^T H P)^-1, P = kron of the input axes' bases.

        core: U^+ W, the rows' bases already applied.
        """
        projection = core.new_ones(1, 1)
        for i in range(self.whitened.columns, len(self.node.view)):
            identity = torch.eye(self.node.view[i], dtype=torch.float64, device=core.device)
            projection = kron(projection, factors.get(i, identity))
        hp = patch @ projection
        metric = projection.T @ hp
        flat = core.reshape(-1, patch.shape[0]) @ hp
        solved = solve_spd(metric, flat.T).T.reshape(self.node.ranks)
        return solved, metric if lead_for(self.node.ranks) == self.whitened.columns else None

    def _core_metric(self, factors: Mapping[int, Tensor]) -> Tensor | None:
        """Over the trailing axes of the core: bases are orthonormal, a whole axis has its covariance."""
        trailing = range(lead_for(self.node.ranks), len(self.node.view))
        if not any(i in self.whitened.roots and i not in factors for i in trailing):
            return None
        metric = self.whitened.tensor.new_ones(1, 1)
        for i in trailing:
            identity = torch.eye(self.node.ranks[i], dtype=torch.float64, device=metric.device)
            metric = kron(metric, identity if i in factors else self.whitened.covariance(i))
        return metric


def _stored(factor: Tensor) -> Tensor:
    return factor.to(torch.float32).contiguous()


def _fit(whitened: Whitened, ranks: Ranks, iterations: int) -> dict[int, Tensor]:
    """Orthonormal bases [n, rank] of the axes whose rank is below their size."""
    tensor = whitened.tensor
    axes = [i for i, (rank, size) in enumerate(zip(ranks, tensor.shape, strict=True)) if rank < size]
    if not axes:
        return {}
    spectral = {i: whitened.basis(i)[:, : ranks[i]] for i in axes}
    if len(axes) == 1 or iterations < 1 or float(tensor.norm()) == 0.0:
        return spectral
    # HOOI cannot fill a rank above the product of the others.
    useful = useful_ranks(ranks, tuple(tensor.shape))
    start = [spectral[i][:, : useful[i]] for i in axes]
    improved = _improved(tensor, axes, start, iterations)
    return {i: _filled(basis, spectral[i], ranks[i]) for i, basis in zip(axes, improved, strict=True)}


def _improved(tensor: Tensor, axes: Sequence[int], start: Sequence[Tensor], iterations: int) -> list[Tensor]:
    """The bases after so many sweeps, or those after which the error of the fit changes by less than `CHANGE`.

    As tensorly's `partial_tucker`, to the bit; that asks a GPU for one number after the other of the columns' signs.
    """
    bases = list(start)
    norm, errors = _norm(tensor), list[float]()
    for sweep in range(iterations):
        for k, axis in enumerate(axes):
            rest = _projected(tensor, axes, bases, k)
            vectors = torch.linalg.svd(unfold(rest, axis), full_matrices=False)[0][:, : bases[k].shape[1]]
            largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
            bases[k] = vectors * largest.sgn()
        core = _norm(_projected(tensor, axes, bases))
        errors.append(math.sqrt(abs(norm * norm - core * core)) / norm)
        if sweep > 1 and abs(errors[-2] - errors[-1]) < CHANGE:
            break
    return bases


def _projected(
    tensor: Tensor, axes: Sequence[int], bases: Sequence[Tensor], but: int | None = None
) -> Tensor:
    """The tensor in the coordinates of the bases, of all but one."""
    for k, (axis, basis) in enumerate(zip(axes, bases, strict=True)):
        if k != but:
            tensor = mode_product(tensor, basis.T, axis)
    return tensor


def _norm(tensor: Tensor) -> float:
    return math.sqrt(float(tensor.square().sum()))


def _filled(basis: Tensor, spectral: Tensor, rank: int) -> Tensor:
    """The basis with the leading spectral directions it lacks, up to `rank` orthonormal columns."""
    if basis.shape[1] >= rank:
        return basis
    rest = spectral - basis @ (basis.T @ spectral)
    extra = gram_eigen(rest)[1][:, : rank - basis.shape[1]]
    return torch.cat([basis, extra], dim=1)


def energies(weight: Tensor, view: Shape, stats_hessian: Tensor | None = None) -> list[Tensor]:
    """Squared singular values of every unfolding, descending, in the whitened norm."""
    tensor = whiten(weight, view, stats_hessian).tensor
    return [gram_values(unfold(tensor, axis)) for axis in range(len(view))]


def rank_for_bytes(
    view: Shape,
    size_bytes: int,
    bytes_of: BytesOf,
    axes: tuple[int, ...] | None = None,
    energies: list[Tensor] | None = None,
) -> Ranks | None:
    """Ranks of the core that take at most `size_bytes` and cannot grow; None if the smallest do not fit.

    axes: those to compress (None: all); the others stay whole. energies: of all axes, see `energies`; steers
    which axes keep more.
    """
    chosen = tuple(range(len(view))) if axes is None else axes

    def whole(part: Ranks) -> Ranks:
        given = dict(zip(chosen, part, strict=True))
        return tuple(given.get(i, size) for i, size in enumerate(view))

    def size_of(part: Ranks) -> int:
        shapes = tucker.children(tucker.Params(whole(part), view), view)
        return sum(bytes_of(s) for s in shapes.values())

    some = None if energies is None else [energies[i] for i in chosen]

    def useful(part: Ranks) -> Ranks:
        ranks = useful_ranks(whole(part), view)
        return tuple(ranks[i] for i in chosen)

    part = ranks_for_bytes(tuple(view[i] for i in chosen), size_of, size_bytes, some, useful)
    return None if part is None else whole(part)


def proposals(signature: Signature, target: Target, room: Room) -> list[Recipe]:
    """In each view, at each of the room's sizes, the core that keeps most energy, where no bound rules it out. Of a
    convolution also what is faster."""
    if room.faster:
        return chains.tuckers(signature, room)
    out = []
    for view in views_for("tucker", signature, room):
        axes = [signature.unfolding(view.dims, (i,)) for i in range(len(view.dims))]
        frontier = Frontier(signature.signal, [*axes, signature.matrix], tucker_numbers(view.dims))
        for factor in room.factors:
            for size in room.sizes:
                least = frontier.may_win(room, "tucker", size, factor)
                if least is None:
                    continue
                ranks = rank_for_bytes(view.dims, size, factor.bytes_of, energies=[a.energies for a in axes])
                if ranks is None:
                    continue
                # These ranks need not be the ones that the bound allows.
                least = max(least, *(a.left_out(r) for a, r in zip(axes, ranks, strict=True)))
                if room.may_win("tucker", size, least, factor, signature.signal):
                    params = {"ranks": list(ranks), "view": list(view.dims)}
                    out.append(Recipe("tucker", params, {"factor": factor.recipe}, least))
    return unique(out)


def useful_ranks(ranks: Ranks, view: Shape) -> Ranks:
    """The ranks lowered until none is above the product of the others, which nothing is lost by."""
    lowered = list(ranks)
    for _ in view:
        for i in range(len(view)):
            lowered[i] = min(lowered[i], math.prod(lowered[:i]) * math.prod(lowered[i + 1 :]))
    return tuple(lowered)


def rank_for_error(
    weight: Tensor, error: float, view: Shape | None = None, stats_hessian: Tensor | None = None
) -> Ranks:
    """Ranks whose HOSVD has relative error at most `error` in the whitened norm; HOOI only lowers it."""
    spectra = energies(weight, view or tuple(weight.shape), stats_hessian)
    return ranks_for_tail(spectra, error**2 * float(spectra[0].sum()))
