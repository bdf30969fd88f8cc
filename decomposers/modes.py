"""A tensor of several axes in the norm of its input: unfoldings, mode products, spectra, whitened axis.

For a tensor T and an input covariance S on axis a the norm is ||T x_a S^(1/2)||. Multiplying axis a by L^T
(with S = L L^T) turns it into the plain norm, keeps every CP, Tucker and tensor-train structure, and is
undone on the one factor that holds the axis: the covariance-weighted decompositions of "distribution-aware
tensor decomposition" (arXiv 2511.04494, 2025) for convolutions, SVD-LLM's whitening for matrices.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nstf.decomposers.factors import check_finite
from nstf.decomposers.norms import DAMPING, cholesky, damped
from nstf.kernels.formats.cp import check_view, check_view_of
from nstf.kernels.formats.tree import Shape


@dataclass(frozen=True)
class Whitened:
    """A tensor in the coordinates where its norm is plain.

    tensor: [view] float64. axis, root: the whitened axis and the Cholesky factor L of its covariance, or
    None. patch: the damped covariance of whole convolution patches [in * kh * kw, same], when that was given.
    original: the unwhitened tensor.
    """

    tensor: Tensor
    original: Tensor
    axis: int | None = None
    root: Tensor | None = None
    patch: Tensor | None = None

    def covariance(self, axis: int) -> Tensor | None:
        """The covariance on `axis`, None for identity."""
        return self.root @ self.root.T if self.root is not None and axis == self.axis else None

    def into(self, factor: Tensor, axis: int, dim: int = 0) -> Tensor:
        """A factor in whitened coordinates: L^T along its dimension `dim` if it holds the axis."""
        if self.root is None or axis != self.axis:
            return factor
        return mode_product(factor, self.root.T, dim)

    def out_of(self, factor: Tensor, axis: int, dim: int = 0) -> Tensor:
        """The inverse of `into`."""
        if self.root is None or axis != self.axis:
            return factor
        flat = unfold(factor, dim)
        solved = torch.linalg.solve_triangular(self.root.T, flat, upper=True)
        return fold(solved, dim, tuple(factor.shape))


def whiten(weight: Tensor, view: Shape, hessian: Tensor | None, damping: float = DAMPING) -> Whitened:
    """The weight in `view`, whitened. weight: [out, in], [experts, out, in] or [out, in, kernel...].

    hessian: [n, n] with n = the last axis of the weight, kept whole as the last axis of the view; or, for a
    convolution whose view keeps (out, in) in front, n = in (channel covariance) or in * kernel (covariance of
    patches, whose average over kernel positions is used for the axis). Raises ValueError for any other size.
    """
    check_view(view)
    shape = tuple(weight.shape)
    check_view_of(view, shape)
    check_finite(weight)
    original = weight.detach().to(torch.float64).reshape(view)
    if hessian is None:
        return Whitened(original, original)
    n = hessian.shape[0]
    convolution = len(shape) >= 3 and view[:2] == shape[:2]
    if len(shape) <= 3 and n == shape[-1] == view[-1]:
        axis, patch = len(view) - 1, None
        covariance = damped(hessian, damping)
    elif convolution and n == shape[1]:
        axis, patch = 1, None
        covariance = damped(hessian, damping)
    elif convolution and n == math.prod(shape[1:]):
        axis, patch = 1, damped(hessian, damping)
        taps = n // shape[1]
        covariance = torch.einsum("ikjk->ij", patch.reshape(shape[1], taps, shape[1], taps)) / taps
    else:
        raise ValueError(
            f"a hessian of size {n} belongs to no axis of {list(shape)} in the view {list(view)}"
        )
    root = cholesky(covariance)
    return Whitened(mode_product(original, root.T, axis), original, axis, root, patch)


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


def relative_error(whitened: Whitened, approximation: Tensor) -> float:
    """||T - approximation|| / ||T|| in the whitened coordinates. approximation: in the original ones."""
    total = float(whitened.tensor.norm())
    difference = approximation.to(torch.float64).reshape(whitened.original.shape) - whitened.original
    if whitened.root is not None and whitened.axis is not None:
        difference = mode_product(difference, whitened.root.T, whitened.axis)
    return float(difference.norm()) / total if total > 0 else float(difference.norm())
