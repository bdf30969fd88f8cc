"""A tensor of several axes in the norm of its input: unfoldings, mode products, and the whitened axes.

For a tensor T and an input covariance S on axis a the norm is ||T x_a S^(1/2)||. Multiplying axis a by L^T
(with
S = L L^T) turns it into the plain norm, keeps every CP, Tucker and tensor-train structure, and is undone on
the
one factor that holds the axis: SVD-LLM's whitening for matrices, and the covariance-weighted decompositions
of
"distribution-aware tensor decomposition" (arXiv 2511.04494, 2025) for convolutions.

Where the view splits the input into several axes (heads x head_dim, channels x kernel), its covariance is
taken as
the Kronecker product of its partial traces; row weights over several axes likewise as a product of their
means.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nstf.decomposers.factors import check_finite
from nstf.decomposers.norms import DAMPING, cholesky, damped
from nstf.decomposers.remembered import FORGETFUL, Remembered
from nstf.kernels.formats.cp import check_view, check_view_of
from nstf.kernels.formats.tree import Shape


@dataclass(frozen=True)
class Whitened:
    """A tensor in the coordinates where its norm is plain.

    tensor: [view] float64; original: the same unwhitened. roots: per whitened axis a Cholesky factor L [n,
    n], or
    a scale [n] for an axis of rows. patch: the whole damped covariance [m, m] when the last axes, from
    `columns`
    on, split it, else None. row_scale: sqrt of the row weights [rows], or None.
    """

    tensor: Tensor
    original: Tensor
    roots: Mapping[int, Tensor] = field(default_factory=dict)
    patch: Tensor | None = None
    columns: int = 0
    row_scale: Tensor | None = None
    _covariances: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    _bases: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def covariance(self, axis: int) -> Tensor:
        """The covariance on `axis`, identity where there is none; made once, as every factor's rounding asks for it."""
        if axis not in self._covariances:
            root = self.roots.get(axis)
            if root is None:
                made = torch.eye(self.tensor.shape[axis], dtype=torch.float64, device=self.tensor.device)
            else:
                made = root @ root.T if root.ndim == 2 else torch.diag(root.square())
            self._covariances[axis] = made
        return self._covariances[axis]

    def basis(self, axis: int) -> Tensor:
        """The eigenvectors of the whitened tensor's unfolding, as columns, the largest first; made once."""
        if axis not in self._bases:
            self._bases[axis] = gram_eigen(unfold(self.tensor, axis))[1]
        return self._bases[axis]

    def into(self, factor: Tensor, axis: int, dim: int = 0) -> Tensor:
        """A factor in whitened coordinates: L^T along its dimension `dim`, which is the tensor's `axis`."""
        root = self.roots.get(axis)
        if root is None:
            return factor
        if root.ndim == 2:
            return mode_product(factor, root.T, dim)
        return fold(unfold(factor, dim) * root[:, None], dim, tuple(factor.shape))

    def out_of(self, factor: Tensor, axis: int, dim: int = 0) -> Tensor:
        """The inverse of `into`."""
        root = self.roots.get(axis)
        if root is None:
            return factor
        flat = unfold(factor, dim)
        if root.ndim == 2:
            flat = torch.linalg.solve_triangular(root.T, flat, upper=True)
        else:
            flat = flat / root[:, None]
        return fold(flat, dim, tuple(factor.shape))

    def squared_norm(self, difference: Tensor) -> float:
        """sum_j row_weight_j d_j H d_j^T, with the whole covariance when there is one.

        difference: original form.
        """
        d = difference.to(torch.float64).reshape(self.original.shape)
        if self.patch is None:
            for axis in self.roots:
                d = self.into(d, axis, axis)
            return float(d.square().sum())
        matrix = d.reshape(-1, self.patch.shape[0])
        if self.row_scale is not None:
            matrix = matrix * self.row_scale[:, None]
        return float(((matrix @ self.patch) * matrix).sum())

    def error(self, approximation: Tensor) -> float:
        """||T - approximation|| / ||T||. approximation: in the original coordinates."""
        total = self.squared_norm(self.original)
        difference = approximation.to(torch.float64).reshape(self.original.shape) - self.original
        return math.sqrt(max(self.squared_norm(difference), 0.0) / total) if total > 0 else 0.0


def whiten(
    weight: Tensor,
    view: Shape,
    hessian: Tensor | None = None,
    damping: float = DAMPING,
    row_weight: Tensor | None = None,
    remembered: Remembered = FORGETFUL,
) -> Whitened:
    """The weight in `view`, whitened. weight: [out, in], [experts, out, in] or [out, in, kernel...].

    hessian: [n, n], n the product of the last axes of the view; or, for a convolution whose view keeps (out,
    in)
    in front, n = in, the covariance of channels. row_weight: [rows], rows the product of the first axes of
    the
    view (for a view that splits rows and columns elsewhere it is not used). Raises ValueError for other
    sizes.
    """
    return remembered.of_tensor(
        weight,
        "whitened",
        (view, damping),
        lambda: _whitened(weight, view, hessian, damping, row_weight, remembered),
    )


def _whitened(
    weight: Tensor,
    view: Shape,
    hessian: Tensor | None,
    damping: float,
    row_weight: Tensor | None,
    remembered: Remembered,
) -> Whitened:
    check_view(view)
    shape = tuple(weight.shape)
    check_view_of(view, shape)
    check_finite(weight)
    original = weight.detach().to(torch.float64).reshape(view)
    roots: dict[int, Tensor] = {}
    patch, columns = None, len(view)
    if hessian is not None:
        h = remembered.of_inputs(("damped", damping), lambda: damped(hessian, damping))
        covariances, columns = _covariances(shape, view, h)
        if len(covariances) == 1:
            roots = {
                axis: remembered.of_inputs(("root", damping), lambda: cholesky(h)) for axis in covariances
            }
        else:
            roots = {axis: cholesky(c) for axis, c in covariances.items()}
            patch = h
    row_scale = None
    if row_weight is not None:
        scales = _row_scales(view[:columns], row_weight.reshape(-1).to(torch.float64), damping)
        roots |= {axis: scale for axis, scale in scales.items() if axis not in roots}
        if scales:
            row_scale = (row_weight.reshape(-1).to(torch.float64) + damping * float(row_weight.mean())).sqrt()
    tensor = original
    whitened = Whitened(original, original, roots, patch, columns, row_scale)
    for axis in roots:
        tensor = whitened.into(tensor, axis, axis)
    return Whitened(tensor, original, roots, patch, columns, row_scale)


def _covariances(shape: Shape, view: Shape, h: Tensor) -> tuple[dict[int, Tensor], int]:
    """The covariance of each input axis, and the first input axis. h: damped; where one axis has all inputs, it is its."""
    n = h.shape[0]
    kernels = len(shape) > 3 or (len(shape) == 3 and n != shape[-1])
    if kernels and view[:2] == shape[:2] and n == shape[1]:
        return {1: h}, 1
    for first in reversed(range(1, len(view))):
        sizes = view[first:]
        if math.prod(sizes) == n:
            break
    else:
        raise ValueError(f"a hessian of size {n} belongs to no last axes of {list(shape)} as {list(view)}")
    if len(sizes) == 1:
        return {first: h}, first
    share = float(h.diagonal().sum()) ** (1.0 / len(sizes) - 1.0)
    found = {}
    for i, size in enumerate(sizes):
        before, after = math.prod(sizes[:i]), math.prod(sizes[i + 1 :])
        blocks = h.reshape(before, size, after, before, size, after)
        found[first + i] = torch.einsum("aibajb->ij", blocks) * share
    return found, first


def _row_scales(sizes: Shape, weight: Tensor, damping: float) -> dict[int, Tensor]:
    """sqrt of the weight of each row axis: means over the others, so that their product has the overall
    mean.
    """
    if math.prod(sizes) != weight.numel():
        return {}
    if not bool((weight >= 0).all()):
        raise ValueError("row_weight must be numbers that are not negative")
    mean = float(weight.mean())
    if mean <= 0:
        return {}
    grid = (weight + damping * mean).reshape(sizes)
    total = float(grid.mean())
    share = total ** (1.0 / len(sizes) - 1.0)
    scales = {}
    for axis, size in enumerate(sizes):
        scales[axis] = (unfold(grid, axis).mean(1) * share).sqrt().reshape(size)
    return scales


def unfold(tensor: Tensor, axis: int) -> Tensor:
    """[n_axis, product of the others in their order]."""
    return tensor.movedim(axis, 0).reshape(tensor.shape[axis], -1)


def fold(matrix: Tensor, axis: int, shape: Shape) -> Tensor:
    """The inverse of `unfold` for a tensor of `shape`."""
    moved = (shape[axis], *shape[:axis], *shape[axis + 1 :])
    return matrix.reshape(moved).movedim(0, axis)


def mode_product(tensor: Tensor, matrix: Tensor, axis: int) -> Tensor:
    """tensor x_axis matrix. matrix: [m, n_axis]."""
    shape = (*tensor.shape[:axis], matrix.shape[0], *tensor.shape[axis + 1 :])
    return fold(matrix @ unfold(tensor, axis), axis, shape)


def gram_eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (descending, clamped at 0) and eigenvectors of matrix matrix^T, float64."""
    gram = matrix @ matrix.T
    values, vectors = torch.linalg.eigh((gram + gram.T) / 2)
    return values.flip(0).clamp_min(0.0), vectors.flip(1)


def gram_values(matrix: Tensor) -> Tensor:
    """Those eigenvalues alone, which is several times as fast."""
    gram = matrix @ matrix.T
    values: Tensor = torch.linalg.eigvalsh((gram + gram.T) / 2)
    return values.flip(0).clamp_min(0.0)


def kron(a: Tensor, b: Tensor) -> Tensor:
    """Kronecker product of two matrices. (torch.kron refuses some strides: "view size is not compatible".)"""
    product = torch.einsum("ij,kl->ikjl", a, b)
    return product.reshape(a.shape[0] * b.shape[0], a.shape[1] * b.shape[1])
