"""Low rank: W ~ A B, optimal in the norm ||(W - A B) X|| over the calibration inputs X.

With H = E[x x^T] = L L^T the best rank-k matrix is W_k = U_k S_k V_k^T L^{-1}, where W L = U S V^T, and its
expected loss is the sum of the squared singular values left out (Eckart and Young 1936 in the whitened
coordinates; SVD-LLM, Wang et al. 2024). Neither W L nor its SVD is formed:

    rows <= cols:  U from eigh(W H W^T), and W_k = U_k (U_k^T W): no L, no inverse
    rows >  cols:  V from eigh(L^T W^T W L), and W_k = (W L V_k) (V_k^T L^{-1})

Only the smaller Gram matrix is decomposed, in float64, so a 49152 x 576 table costs one 576 x 576
eigenproblem. Squaring loses singular values below 1e-8 of the largest: less than the weight's float32 noise.
`row_weight` (mean squared gradient of each output) adds diagonal weights on the other side.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nstf.decomposers import chains
from nstf.decomposers.factors import (
    BytesOf,
    Decomposition,
    check_finite,
    largest,
    unique,
)
from nstf.decomposers.norms import DAMPING, cholesky, damped, solve_spd
from nstf.decomposers.remembered import FORGETFUL, Remembered
from nstf.kernels.formats import low_rank
from nstf.kernels.formats.tree import Shape
from nstf.proposals import Recipe, Room, Signature, Target

KIND = low_rank.KIND
REMEMBERS = True
NAME = "low_rank"
CHUNK = 8192


@dataclass(frozen=True)
class Params:
    """rank: of the product. lead: leading axes that make the rows. damping: see norms.damped."""

    rank: int
    lead: int = 1
    damping: float = DAMPING


PARAMS = Params


@dataclass(frozen=True)
class Prepared:
    """A matrix with its whitened singular values, from which every rank can be cut without new eigenproblems.

    weight: [rows, cols] float32. singular_values: [min(rows, cols)] float64, descending. basis: eigenvectors
    of the smaller Gram matrix, as columns. hessian: damped, or None for the identity; root: its Cholesky
    factor, kept only when rows > cols.
    """

    weight: Tensor
    shape: Shape
    lead: int
    singular_values: Tensor
    basis: Tensor
    hessian: Tensor | None
    root: Tensor | None
    row_weight: Tensor | None

    @property
    def by_rows(self) -> bool:
        return self.weight.shape[0] <= self.weight.shape[1]

    def loss(self, rank: int) -> float:
        """The squared norm that `rank` leaves out: sum of s_i^2 for i > rank (twice the expected loss)."""
        return float((self.singular_values[rank:] ** 2).sum())

    def error(self, rank: int) -> float:
        """Relative error in the norm, between 0 and 1."""
        total = self.loss(0)
        return math.sqrt(self.loss(rank) / total) if total > 0 else 0.0

    def rank_for_error(self, error: float) -> int:
        """The smallest rank whose relative error is at most `error`."""
        tail = torch.nn.functional.pad((self.singular_values**2).flip(0).cumsum(0).flip(0), (0, 1))
        enough = torch.nonzero(tail <= error**2 * float(tail[0]))
        return max(1, int(enough[0]))

    def truncate(self, rank: int) -> Decomposition:
        """A and B of rank `rank`, with the singular values split evenly between them.

        The even split minimises the product of the two factors' rounding errors when groups share a scale.
        """
        params = low_rank.Params(rank, self.lead)
        low_rank.children(params, self.shape)
        w, basis = self.weight, self.basis[:, :rank]
        s = self.singular_values[:rank]
        split = torch.maximum(s, 1e-9 * self.singular_values[0].clamp_min(1e-30)).sqrt()
        if self.by_rows:
            scale = None if self.row_weight is None else self.row_weight.sqrt()[:, None]
            a = basis if scale is None else basis / scale
            b = (basis if scale is None else basis * scale).T @ w.to(torch.float64)
            a, b = a * split, b / split[:, None]
        else:
            whitened = basis if self.root is None else self.root @ basis
            a = _chunked(w, whitened / split)
            b = basis.T
            if self.root is not None:
                b = torch.linalg.solve_triangular(self.root, b, upper=False, left=False)
            b = b * split[:, None]
        b32, a32 = b.to(torch.float32).contiguous(), a.to(torch.float32).contiguous()
        metrics = {"b": _metric(self.hessian), "a": _metric(self._gram_b(b32))}
        return Decomposition(KIND, params, self.shape, {"b": b32, "a": a32}, metrics, self.refit)

    def refit(self, name: str, current: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The best A for a fixed B, (W H B^T)(B H B^T)^-1, or the best B for a fixed A, (A^T A)^-1 A^T W.

        For B the rows of A count with `row_weight`. Second value: the metric to round the result in.
        """
        if name == "a":
            b = current["b"].to(torch.float64)
            hb = b.T if self.hessian is None else self.hessian @ b.T
            gram = b @ hb
            a = solve_spd(gram, _chunked(self.weight, hb).T).T
            return a.to(torch.float32).contiguous(), _metric(gram)
        a = current["a"].to(torch.float64)
        weighted = a if self.row_weight is None else a * self.row_weight[:, None]
        b = solve_spd(weighted.T @ a, _chunked(self.weight.T, weighted).T)
        return b.to(torch.float32).contiguous(), _metric(self.hessian)

    def _gram_b(self, b: Tensor) -> Tensor:
        b64 = b.to(torch.float64)
        return b64 @ (b64.T if self.hessian is None else self.hessian @ b64.T)


def prepare(
    weight: Tensor,
    hessian: Tensor | None = None,
    row_weight: Tensor | None = None,
    lead: int = 1,
    damping: float = DAMPING,
    remembered: Remembered = FORGETFUL,
) -> Prepared:
    """The spectrum of a weight in the norm of its statistics. weight: any shape with `lead` leading row axes.

    hessian: [cols, cols] or None (plain SVD). row_weight: [rows] or None. Raises ValueError on shapes that do
    not fit and on NaN or infinity.
    """

    def root_of(known: Tensor) -> Tensor:
        return remembered.of_inputs(("root", damping), lambda: cholesky(known))

    def make() -> Prepared:
        w, h, rows = _checked(weight, hessian, row_weight, lead, damping, remembered)
        gram, root = _whitened_gram(w, h, rows, root_of)
        values, vectors = torch.linalg.eigh(gram)
        singular = values.flip(0).clamp_min(0.0).sqrt()
        return Prepared(w, tuple(weight.shape), lead, singular, vectors.flip(1), h, root, rows)

    return remembered.of_tensor(weight, "low rank", (lead, damping), make)


def _checked(
    weight: Tensor,
    hessian: Tensor | None,
    row_weight: Tensor | None,
    lead: int,
    damping: float,
    remembered: Remembered,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(the weight as a float32 matrix, the Hessian and the row weights with damping, float64)."""
    shape = tuple(weight.shape)
    low_rank.children(low_rank.Params(1, lead), shape)
    rows, cols = math.prod(shape[:lead]), math.prod(shape[lead:])
    w = weight.detach().reshape(rows, cols).to(torch.float32)
    check_finite(w)
    if hessian is not None and tuple(hessian.shape) != (cols, cols):
        raise ValueError(f"hessian of shape {list(hessian.shape)} for a {rows} x {cols} matrix")
    if row_weight is not None:
        if tuple(row_weight.shape) != (rows,) or not bool((row_weight >= 0).all()):
            raise ValueError(f"row_weight must be {rows} numbers that are not negative")
        row_weight = row_weight.to(torch.float64)
        mean = float(row_weight.mean())
        row_weight = row_weight + damping * mean if mean > 0 else None
    if hessian is None:
        return w, None, row_weight
    return w, remembered.of_inputs(("damped", damping), lambda: damped(hessian, damping)), row_weight


def _whitened_gram(
    w: Tensor, h: Tensor | None, row_weight: Tensor | None, root_of: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor | None]:
    """(the Gram matrix of R W H^1/2 on its smaller side, float64; the root of H where that is the columns')."""
    root = None
    if w.shape[0] <= w.shape[1]:
        wide = w.to(torch.float64)
        if row_weight is not None:
            wide = wide * row_weight.sqrt()[:, None]
        gram = wide @ (wide.T if h is None else h @ wide.T)
    else:
        gram = _gram(w, row_weight)
        if h is not None:
            root = root_of(h)
            gram = root.T @ gram @ root
    return (gram + gram.T) / 2, root


def decompose(
    weight: Tensor,
    params: Params,
    stats_hessian: Tensor | None = None,
    row_weight: Tensor | None = None,
    remembered: Remembered = FORGETFUL,
) -> Decomposition:
    """W ~ A B of `params.rank`. To cut several ranks from one weight use prepare(...).truncate(rank)."""
    prepared = prepare(weight, stats_hessian, row_weight, params.lead, params.damping, remembered)
    return prepared.truncate(params.rank)


def rank_for_bytes(shape: Shape, size_bytes: int, bytes_of: BytesOf, lead: int = 1) -> int | None:
    """The largest rank whose two factors take at most `size_bytes`, or None if rank 1 does not fit."""
    rows, cols = math.prod(shape[:lead]), math.prod(shape[lead:])
    return largest(lambda r: bytes_of((rows, r)) + bytes_of((r, cols)) <= size_bytes, min(rows, cols))


def proposals(signature: Signature, target: Target, room: Room) -> list[Recipe]:
    """At each of the room's sizes the largest rank that fits, where no bound rules it out: the energy that the matrix, in
    the norm of the loss, has beyond that rank. None where little is looked at. Of a convolution also what is faster."""
    if room.faster:
        return chains.low_ranks(signature, room)
    if room.quick or not room.sizes:
        if room.sizes:
            room.skip("svd", "the effort looks at no low ranks")
        return []
    out, matrix, signal = [], signature.matrix, signature.signal
    for factor in room.factors:
        for size in room.sizes:
            rank = rank_for_bytes(signature.shape, size, factor.bytes_of, signature.lead)
            if rank is None:
                continue
            if not room.rules_out(matrix.left_out(rank), size, factor, signal):
                matrix.sharpen()
            least = matrix.left_out(rank)
            if room.may_win("svd", size, least, factor, signal):
                out.append(Recipe("svd", {"rank": rank}, {"factor": factor.recipe}, least))
    return unique(out)


def rank_for_error(
    weight: Tensor,
    error: float,
    stats_hessian: Tensor | None = None,
    row_weight: Tensor | None = None,
    lead: int = 1,
) -> int:
    """The smallest rank with relative error at most `error` in the norm of the statistics."""
    return prepare(weight, stats_hessian, row_weight, lead).rank_for_error(error)


def _metric(h: Tensor | None) -> Tensor | None:
    return None if h is None else h.to(torch.float32)


def _gram(w: Tensor, row_weight: Tensor | None) -> Tensor:
    """W^T diag(row_weight) W in float64, rows a chunk at a time. w: [rows, cols]."""
    gram = torch.zeros(w.shape[1], w.shape[1], dtype=torch.float64, device=w.device)
    for start in range(0, w.shape[0], CHUNK):
        part = w[start : start + CHUNK].to(torch.float64)
        weighted = part if row_weight is None else part * row_weight[start : start + CHUNK, None]
        gram.addmm_(weighted.T, part)
    return gram


def _chunked(w: Tensor, right: Tensor) -> Tensor:
    """w @ right in float64, rows of w a chunk at a time."""
    return torch.cat([w[i : i + CHUNK].to(torch.float64) @ right for i in range(0, w.shape[0], CHUNK)])
