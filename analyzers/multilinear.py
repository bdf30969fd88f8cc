"""What no low rank can take away: lower bounds of the expected loss from the unfoldings of a tensor.

The loss of an approximation is 1/2 sum_j g_j d_j H d_j^T over the rows d_j of the error, with the input's second moment H
and the weights g_j of the outputs: a plain norm of R dW L, R^2 = diag(g), L L^T = H. An unfolding is the matrix that a
tensor becomes with some axes of a view as rows. A decomposition of given ranks has at most a certain rank in each of its
unfoldings (SVD: the matrix; Tucker: a rank for each axis; tensor train: one for each bond; CP: the same for all), and no
tensor of that rank is nearer than the energy of the unfolding's singular values beyond it (Eckart and Young 1936). The
largest of these over the unfoldings is a bound from below.

The norm is exact where the unfolding keeps the inputs together and R is a product over its two sides. Where it splits the
inputs (channels from taps), H is taken as the Kronecker product of its partial traces, and uneven weights of split rows as a
product of their means: then what follows is no bound, and a fourth of it is taken (MARGIN).

Small sides get all singular values. Of large ones, of n values with the sum of energies t and of their squares f, the r
largest add up to at most r t / n + sqrt(r (n - r) / n (f - t^2 / n)) (Cauchy and Schwarz, after their mean is taken off),
which needs no eigenproblem; `sharpen` solves it where that does not settle the question.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Shape = tuple[int, ...]
T = TypeVar("T")

MARGIN = 4.0
"""What an estimate that is no bound is divided by."""
SMALL = 128
"""Sides up to this have their singular values found at once."""
CHUNK = 1 << 26
"""Weights that are looked at in one product."""
KEPT = 1 << 24
"""Numbers up to which a root, or the weight times it, is kept for further unfoldings."""
ROUNDING = 2e-6
"""Share of the energy that is taken off: products are in float32."""
EVEN = 1.01
"""Weights of rows that a product of their means meets within this factor count as such a product."""


class Unfolding:
    """One unfolding's energies beyond each rank, as losses (nats)."""

    def __init__(
        self, product: Tensor, symmetric: Callable[[], Tensor], share: float, sampled: float = 1.0
    ) -> None:
        """product: [n, n], has the squared singular values as its eigenvalues; symmetric() too, and is symmetric; share: by
        which losses are multiplied; sampled: by which energies are, where a part stands for a tensor."""
        self.side, self._share, self._symmetric = product.shape[0], share, symmetric
        self._sampled = sampled
        self._values: Tensor | None = None
        self._energies: Tensor | None = None
        if self.side <= SMALL:
            self.sharpen()
            return
        sums = (part.sum(dtype=torch.float64) for part in (product.diagonal(), product * product.T))
        total, squares = torch.stack(list(sums)).tolist()
        ranks = np.arange(self.side + 1)
        spread = max(0.0, squares - total * total / self.side) / self.side
        most = ranks * total / self.side + np.sqrt(spread * ranks * (self.side - ranks))
        self.tails = np.clip(total - most, 0.0, None) * share / 2

    def sharpen(self) -> None:
        """From now on the tails are those of the singular values."""
        if self._values is not None:
            return
        gram = self._symmetric().double()
        values = torch.linalg.eigvalsh((gram + gram.T) / 2).flip(0).clamp_min(0.0)
        self._values = values
        tails = torch.nn.functional.pad(values.flip(0).cumsum(0).flip(0), (0, 1)).cpu().numpy()
        self.tails = np.clip(tails - ROUNDING * tails[0], 0.0, None) * self._share / 2

    @property
    def energies(self) -> Tensor:
        """Squared singular values, falling, float64 [side], on the CPU; of a part, so that they add up to the tensor's."""
        self.sharpen()
        if self._energies is None:
            assert self._values is not None
            self._energies = self._values.cpu() * self._sampled
        return self._energies

    @property
    def effective_rank(self) -> float:
        """exp of the entropy of the singular values (Roy and Vetterli 2007); 0 for a zero tensor."""
        values = self.energies.sqrt()
        if float(values.sum()) <= 0.0:
            return 0.0
        p = values / values.sum()
        return math.exp(float(-(p * p.clamp_min(1e-300).log()).sum()))

    def left_out(self, rank: int) -> float:
        """What is lost at least at a rank."""
        return float(self.tails[min(rank, self.side)])


@dataclass(frozen=True, eq=False)
class Metric:
    """A tensor as a matrix with its norm. weight: [rows, cols]; hessian: [cols, cols] or None for the identity; row_weight:
    [rows] or None for ones. share: by which losses and energies of its unfoldings are multiplied, where it is a part of a
    tensor. derived: (key, make) -> what `make` gives of the Hessian, made once a key; without it everything is made anew."""

    weight: Tensor
    hessian: Tensor | None
    row_weight: Tensor | None
    share: float = 1.0
    derived: Callable[[Hashable, Callable[[], Any]], Any] | None = None

    @property
    def elements(self) -> int:
        return self.weight.numel()

    def _of_inputs(self, key: Hashable, make: Callable[[], T]) -> T:
        """What follows from the Hessian alone: tensors of the same inputs share it."""
        if self.derived is None or self.weight.shape[1] ** 2 > KEPT:
            return make()
        return self.derived(("unfoldings", key), make)  # type: ignore[no-any-return]

    @cached_property
    def _root(self) -> Tensor:
        known = self.hessian
        assert known is not None
        return self._of_inputs("root", lambda: _root(known).to(self.weight.device, torch.float32))

    @cached_property
    def _product(self) -> Tensor:
        """R W L, for the unfoldings that split neither the weights of rows nor the inputs."""
        weighted = self.weight.float()
        if self.row_weight is not None:
            weighted = weighted * self.row_weight.to(weighted).sqrt()[:, None]
        return weighted @ self._root

    def unfolding(self, dims: Shape, axes: tuple[int, ...]) -> Unfolding:
        """That of the view `dims` with `axes` as rows. Raises ValueError where the view does not keep rows and columns of
        the matrix apart, or an axis is not one of its own."""
        rows, _ = self.weight.shape
        first = next((k for k in range(1, len(dims)) if math.prod(dims[:k]) == rows), 0)
        inside = tuple(sorted(set(axes)))
        if math.prod(dims) != self.elements or not first or not inside or len(inside) == len(dims):
            raise ValueError(
                f"axes {list(axes)} of {list(dims)} are no unfolding of {list(self.weight.shape)}"
            )
        if inside[-1] >= len(dims) or inside[0] < 0:
            raise ValueError(f"axes {list(axes)} are not among those of {list(dims)}")
        if inside in (tuple(range(first)), tuple(range(first, len(dims)))):
            return self._of_matrix()
        return self._of_view(dims, first, inside)

    def _of_matrix(self) -> Unfolding:
        """The matrix itself; of a large table some rows at a time."""
        w, (rows, cols) = self.weight, self.weight.shape
        hessian, weights = self.hessian, self.row_weight
        if rows <= cols:
            w = w.float()
            gram = (w if hessian is None else w @ hessian.to(w)) @ w.T
            if weights is not None:
                root = weights.to(w).sqrt()
                gram = gram * root * root[:, None]
            return Unfolding(gram, lambda: gram, 1.0)
        gram = torch.zeros(cols, cols, device=w.device)
        step = max(1, CHUNK // cols)
        for start in range(0, rows, step):
            some = slice(start, start + step)
            part = w[some].float()
            gram += part.T @ (part if weights is None else part * weights[some].to(part)[:, None])
        if hessian is None:
            return Unfolding(gram, lambda: gram, 1.0)
        known = hessian.to(gram)
        return Unfolding(known @ gram, lambda: _sandwich(_root(known), gram.double()), 1.0)

    def _of_view(self, dims: Shape, first: int, axes: tuple[int, ...]) -> Unfolding:
        """An unfolding that splits rows, columns or both."""
        tensor, share, split = self.weight.float(), self.share, False
        if self.row_weight is not None:
            inside = [a for a in axes if a < first]
            split = 0 < len(inside) < first
            weights, exact = _separable(self.row_weight.to(tensor), dims[:first], inside) if split else (
                self.row_weight.to(tensor), True,
            )  # fmt: skip
            tensor = tensor * weights.sqrt()[:, None]
            share = share if exact else share / MARGIN
        columns = [a - first for a in axes if a >= first]
        if self.hessian is not None:
            if columns and len(columns) < len(dims) - first:
                known, sizes = self.hessian, dims[first:]
                roots = self._of_inputs(
                    ("apart", sizes, tuple(columns)),
                    lambda: tuple(_root(part).to(tensor) for part in _apart(known, sizes, columns)),
                )
                tensor, share = _whitened_apart(tensor, roots, sizes, columns), share / MARGIN
            else:
                tensor = tensor @ self._root if split or self.elements > KEPT else self._product
        others = [a for a in range(len(dims)) if a not in axes]
        side = math.prod(dims[a] for a in axes)
        matrix = tensor.reshape(dims).permute(*axes, *others).reshape(side, -1)
        matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
        gram = matrix @ matrix.T
        return Unfolding(gram, lambda: gram, share, self.share)


def _root(h: Tensor) -> Tensor:
    """L, L L^T = H, float64; H is lifted by what keeps it positive."""
    h = h.double()
    h = (h + h.T) / 2
    lift = 1e-7 * h.diagonal().mean().clamp_min(1e-30)
    factor: Tensor
    for _ in range(8):
        h.diagonal().add_(lift)
        factor, info = torch.linalg.cholesky_ex(h)
        if int(info) == 0:
            break
        lift = 4 * lift
    else:
        values, vectors = torch.linalg.eigh(h)
        factor = vectors * values.clamp_min(0.0).sqrt()
    return factor


def _sandwich(root: Tensor, gram: Tensor) -> Tensor:
    product: Tensor = root.T @ gram @ root
    return product


def _separable(weights: Tensor, sizes: Shape, inside: list[int]) -> tuple[Tensor, bool]:
    """(row weights [rows] as a product over the axes `inside` and the others, whether that is what they are)."""
    grid = weights.reshape(sizes)
    rest = [a for a in range(len(sizes)) if a not in inside]
    mean = grid.mean().clamp_min(1e-30)
    product = grid.mean(rest, keepdim=True) * grid.mean(inside, keepdim=True) / mean
    ratio = (grid + 1e-12 * mean) / (product + 1e-12 * mean)
    low, high = torch.stack(ratio.aminmax()).tolist()
    if high <= EVEN * low:
        return (product.expand(sizes) * min(1.0, low)).reshape(-1), True
    return product.expand(sizes).reshape(-1), False


def _apart(h: Tensor, sizes: Shape, inside: list[int]) -> tuple[Tensor, Tensor]:
    """The partial traces of H over the axes `inside` and the others; their Kronecker product has the trace of H."""
    n = len(sizes)
    rest = [a for a in range(n) if a not in inside]
    order = [*inside, *rest]
    a, b = math.prod(sizes[i] for i in inside), math.prod(sizes[i] for i in rest)
    blocks = h.double().reshape(*sizes, *sizes).permute(*order, *(n + i for i in order)).reshape(a, b, a, b)
    left, right = torch.einsum("ibjb->ij", blocks), torch.einsum("aiaj->ij", blocks)
    return left, right / torch.trace(left).clamp_min(1e-30)


def _whitened_apart(tensor: Tensor, roots: tuple[Tensor, ...], sizes: Shape, inside: list[int]) -> Tensor:
    """The rows times the roots of the partial traces of H, each on its own axes."""
    left, right = roots
    rest = [a for a in range(len(sizes)) if a not in inside]
    order = [*inside, *rest]
    t = tensor.reshape(-1, *sizes).permute(0, *(1 + i for i in order))
    shape = t.shape
    t = torch.einsum("nab,ac->ncb", t.reshape(len(tensor), len(left), len(right)), left) @ right
    back = [1 + order.index(i) for i in range(len(sizes))]
    return t.reshape(shape).permute(0, *back).reshape(tensor.shape)
