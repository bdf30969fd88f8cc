"""Tensor train by TT-SVD over a chosen reshape (Oseledets 2011), in the norm of the input where one is given.

The chain is cut left to right: each step splits [r * n, rest] into an orthonormal core and a remainder by the
eigenvectors of its smaller Gram matrix. The squared error is at most the sum of the left-out energies of all
bonds. With a covariance on one axis (see nstf.decomposers.modes) the same holds in ||T x_a S^(1/2)||, and the
whitening is undone on the core that holds the axis.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nstf.decomposers.bounds import Frontier, train_numbers
from nstf.decomposers.factors import BytesOf, Decomposition, Metrics, lead_for, unique
from nstf.decomposers.modes import Whitened, gram_eigen, gram_values, kron, whiten
from nstf.decomposers.norms import DAMPING, solve_spd
from nstf.decomposers.ranks import Ranks, ranks_for_bytes, ranks_for_tail
from nstf.decomposers.remembered import FORGETFUL, Remembered
from nstf.decomposers.views import views_for
from nstf.kernels.formats import tensor_train
from nstf.kernels.formats.tree import Shape
from nstf.proposals import Recipe, Room, Signature, Target

KIND = tensor_train.KIND
REMEMBERS = True


@dataclass(frozen=True)
class Params:
    """ranks: the bond sizes. view: reshape to decompose in (None: the tensor's own shape)."""

    ranks: tuple[int, ...]
    view: tuple[int, ...] | None = None
    damping: float = DAMPING


PARAMS = Params


def decompose(
    weight: Tensor,
    params: Params,
    stats_hessian: Tensor | None = None,
    row_weight: Tensor | None = None,
    remembered: Remembered = FORGETFUL,
) -> Decomposition:
    """The cores. weight, hessian, row_weight: see modes.whiten. Raises ValueError."""
    shape = tuple(weight.shape)
    view = params.view or shape
    node = tensor_train.Params(params.ranks, view)
    whitened = whiten(weight, view, stats_hessian, params.damping, row_weight, remembered)
    cores = _tt_svd(whitened, node.ranks)
    named = {f"core{i}": _stored(whitened.out_of(c, i, 1)) for i, c in enumerate(cores)}
    refit = _Refit(whitened, node)
    metrics = Metrics(named, lambda name: refit.metric(name, named))
    return Decomposition(KIND, node, shape, named, metrics, refit)


@dataclass(frozen=True)
class _Refit:
    """Least squares for one core given the others, in the whitened norm."""

    whitened: Whitened
    node: tensor_train.Params

    def __call__(self, name: str, current: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        axis = int(name.removeprefix("core"))
        left, right = self._sides(axis, current)
        n = self.node.view[axis]
        target = self.whitened.tensor.reshape(left.shape[0], n, right.shape[1])
        half = torch.einsum("anb,sb->ans", target, right).reshape(left.shape[0], -1)
        half = solve_spd(left.T @ left, left.T @ half).reshape(-1, right.shape[0])
        core = solve_spd(right @ right.T, half.T).T.reshape(left.shape[1], n, right.shape[0])
        return _stored(self.whitened.out_of(core, axis, 1)), self.metric(name, current)

    def metric(self, name: str, current: Mapping[str, Tensor]) -> Tensor | None:
        """Gram of all to the right, [s, s]; for a core read in rows of (n, s) times the axis' covariance.

        The left part is orthonormal or nearly so, and only couples rows.
        """
        axis = int(name.removeprefix("core"))
        _, right = self._sides(axis, current)
        gram = right @ right.T
        if lead_for(tuple(current[name].shape)) == 1:
            gram = kron(self.whitened.covariance(axis), gram)
        return gram.to(torch.float32)

    def _sides(self, axis: int, current: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The contracted cores left [rows, r] and right [s, cols] of `axis`, whitened."""
        left = self.whitened.tensor.new_ones(1, 1)
        for i in range(axis):
            core = self.whitened.into(current[f"core{i}"].to(torch.float64), i, 1)
            left = torch.einsum("ar,rns->ans", left, core).reshape(-1, core.shape[2])
        right = left.new_ones(1, 1)
        for i in reversed(range(axis + 1, len(self.node.view))):
            core = self.whitened.into(current[f"core{i}"].to(torch.float64), i, 1)
            right = torch.einsum("rns,sb->rnb", core, right).reshape(core.shape[0], -1)
        return left, right


def _stored(core: Tensor) -> Tensor:
    return core.to(torch.float32).contiguous()


def _tt_svd(whitened: Whitened, ranks: Ranks) -> list[Tensor]:
    """Cores [r, n, s], orthonormal but the last, of the whitened tensor."""
    tensor = whitened.tensor
    cores: list[Tensor] = []
    rest, bond = tensor.reshape(1, -1), 1
    for size, rank in zip(tensor.shape[:-1], ranks, strict=True):
        matrix = rest.reshape(bond * size, -1)
        if matrix.shape[0] <= matrix.shape[1]:
            # The first cut is the unfolding of the first axis, whatever the ranks.
            basis = (gram_eigen(matrix)[1] if cores else whitened.basis(0))[:, :rank]
            rest = basis.T @ matrix
        else:
            values, right = gram_eigen(matrix.T)
            scale = values[:rank].sqrt().clamp_min(1e-9 * max(float(values[0].sqrt()), 1e-30))
            basis = matrix @ (right[:, :rank] / scale)
            rest = right[:, :rank].T * scale[:, None]
        basis, rest = _padded(basis, rest, rank)
        cores.append(basis.reshape(bond, size, rank))
        bond = rank
    return [*cores, rest.reshape(bond, tensor.shape[-1], 1)]


def _padded(basis: Tensor, rest: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Zero columns and rows up to `rank`, when an earlier cut left fewer directions than were asked for."""
    missing = rank - basis.shape[1]
    if missing <= 0:
        return basis, rest
    return torch.nn.functional.pad(basis, (0, missing)), torch.nn.functional.pad(rest, (0, 0, 0, missing))


def energies(weight: Tensor, view: Shape, stats_hessian: Tensor | None = None) -> list[Tensor]:
    """Squared singular values at every bond, descending, in the whitened norm."""
    tensor = whiten(weight, view, stats_hessian).tensor
    found = []
    for bond in range(1, len(view)):
        matrix = tensor.reshape(tensor.shape[:bond].numel(), -1)
        found.append(gram_values(matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T))
    return found


def rank_for_bytes(
    view: Shape, size_bytes: int, bytes_of: BytesOf, energies: list[Tensor] | None = None
) -> Ranks | None:
    """Bond sizes that take at most `size_bytes`, none of which can grow; None if all ones do not fit.

    energies: see `energies`; steers which bonds keep more.
    """

    def size_of(ranks: Ranks) -> int:
        shapes = tensor_train.children(tensor_train.Params(ranks, view), view)
        return sum(bytes_of(s) for s in shapes.values())

    def useful(ranks: Ranks) -> Ranks:
        return useful_ranks(ranks, view)

    return ranks_for_bytes(tensor_train.max_ranks(view), size_of, size_bytes, energies, useful)


def proposals(signature: Signature, target: Target, room: Room) -> list[Recipe]:
    """In each view, at each of the room's sizes, the bond sizes that keep most energy, where no bound rules them out."""
    out = []
    for view in views_for("tensor_train", signature, room):
        bonds = [signature.unfolding(view.dims, tuple(range(k))) for k in range(1, len(view.dims))]
        frontier = Frontier(signature.signal, bonds, train_numbers(view.dims))
        for factor in room.factors:
            for size in room.sizes:
                least = frontier.may_win(room, "tensor_train", size, factor)
                if least is None:
                    continue
                energies = [b.energies for b in bonds]
                ranks = rank_for_bytes(view.dims, size, factor.bytes_of, energies)
                if ranks is None:
                    continue
                # These ranks need not be the ones that the bound allows.
                least = max(least, *(b.left_out(r) for b, r in zip(bonds, ranks, strict=True)))
                if room.may_win("tensor_train", size, least, factor, signature.signal):
                    params = {"ranks": list(ranks), "view": list(view.dims)}
                    out.append(Recipe("tensor_train", params, {"factor": factor.recipe}, least))
    return unique(out)


def useful_ranks(ranks: Ranks, view: Shape) -> Ranks:
    """The ranks lowered until no bond is larger than its neighbour times the axis between them."""
    bonds = [1, *ranks, 1]
    for i in range(1, len(bonds)):
        bonds[i] = min(bonds[i], bonds[i - 1] * view[i - 1])
    for i in reversed(range(1, len(bonds) - 1)):
        bonds[i] = min(bonds[i], bonds[i + 1] * view[i])
    return tuple(bonds[1:-1])


def rank_for_error(
    weight: Tensor, error: float, view: Shape | None = None, stats_hessian: Tensor | None = None
) -> Ranks:
    """Bond sizes whose TT-SVD has relative error at most `error` in the whitened norm."""
    view = view or tuple(weight.shape)
    spectra = energies(weight, view, stats_hessian)
    return useful_ranks(ranks_for_tail(spectra, error**2 * float(spectra[0].sum())), view)
