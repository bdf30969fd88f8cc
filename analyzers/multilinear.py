"""Evidence for low multilinear rank: would Tucker, tensor train or CP keep more of a tensor than the best
SVD?

Over every natural reshape (heads x head_dim x in; experts x out x in; out x in x kernel) the energy each
format
keeps with half as many numbers as the tensor has is compared with that of the truncated SVD of the plain
matrix
with as many numbers, which is optimal among matrices (Eckart and Young 1936). Tucker and tensor train are
really
cut (ST-HOSVD: Vannieuwenhoven et al. 2012; TT-SVD: Oseledets 2011). A CP of rank R has rank at most R in
every
unfolding, which bounds its energy from above at no cost; the CP itself is fitted on small tensors only.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nstf.analyzers.spectrum import singular_values, summarise

Shape = tuple[int, ...]
SHARE = 0.5
CP_FITTED_NUMEL = 1 << 15


@dataclass(frozen=True)
class Evidence:
    """Of one reshape. kept energies are between 0 and 1, for `parameters` numbers stored.

    mode_effective_ranks: exp of the entropy of the singular values of each unfolding. cp_bound: no CP of that
    many numbers keeps more. cp: what a fitted one kept, None on tensors too large to fit here.
    """

    name: str
    dims: Shape
    parameters: int
    mode_effective_ranks: tuple[float, ...]
    svd: float
    tucker: float
    tensor_train: float
    cp_bound: float
    cp: float | None

    @property
    def gain(self) -> float:
        """Energy kept by the best multilinear format over that kept by the SVD; positive speaks for it."""
        return max(self.tucker, self.tensor_train, self.cp or 0.0) - self.svd


def natural_reshapes(role: str, shape: Shape, config: Mapping[str, Any] | None = None) -> dict[str, Shape]:
    """The reshapes that mean something for a role; none for a plain matrix.

    config: the model's config.json.
    """
    if role == "conv" and len(shape) >= 3 and math.prod(shape[2:]) > 1 and shape[1] > 1:
        return {"kernel": (shape[0], shape[1], math.prod(shape[2:]))}
    if len(shape) == 3:
        return {"experts": shape}
    if len(shape) != 2 or role not in ("q", "k", "v", "o"):
        return {}
    numbers = config or {}
    names = ["num_key_value_heads"] if role in ("k", "v") else []
    names += ["num_attention_heads", "n_head", "encoder_attention_heads"]
    counts = [numbers[n] for n in names if type(numbers.get(n)) is int]
    size = shape[1] if role == "o" else shape[0]
    dim = numbers.get("head_dim")
    heads = size // dim if type(dim) is int and dim > 0 and size % dim == 0 else (counts or [0])[0]
    if heads < 2 or size % heads or size // heads < 2:
        return {}
    return {"heads": (shape[0], heads, size // heads) if role == "o" else (heads, size // heads, shape[1])}


def evidence(weight: Tensor, name: str, dims: Shape) -> Evidence:
    """Of the reshape `dims` of a weight whose plain matrix is [first axes, last axis], experts being rows.

    For dims of (out, in, kernel) or (out, heads, head_dim) the matrix is [out, the rest].
    """
    if math.prod(dims) != weight.numel() or len(dims) < 3:
        raise ValueError(f"{list(dims)} is not a reshape of {list(weight.shape)} to three axes or more")
    tensor = weight.detach().to(torch.float64).reshape(dims)
    total = float(tensor.square().sum())
    rows = math.prod(weight.shape[:-1]) if weight.ndim == 3 and name == "experts" else weight.shape[0]
    budget = int(SHARE * weight.numel())
    values = singular_values(weight.reshape(rows, -1))
    modes = [_eigen(_unfold(tensor, axis)) for axis in range(len(dims))]
    ranks = tuple(summarise(e.sqrt()).effective_rank for e, _ in modes)
    if total <= 0.0:
        return Evidence(name, dims, budget, ranks, 1.0, 1.0, 1.0, 1.0, None)
    svd_rank = max(1, budget // (rows + weight.numel() // rows))
    svd = float(values[:svd_rank].square().sum()) / total
    cp_rank = max(1, budget // sum(dims))
    bound = min(float(e[:cp_rank].sum()) for e, _ in modes) / total
    tucker = _tucker(tensor, [e for e, _ in modes], budget) / total
    train = _tensor_train(tensor, budget) / total
    cp = _cp(tensor, cp_rank) if weight.numel() <= CP_FITTED_NUMEL else None
    return Evidence(
        name, dims, budget, ranks, min(svd, 1.0), min(tucker, 1.0), min(train, 1.0), min(bound, 1.0), cp
    )


def _unfold(tensor: Tensor, axis: int) -> Tensor:
    return tensor.movedim(axis, 0).reshape(tensor.shape[axis], -1)


def _eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Squared singular values, descending, and left singular vectors."""
    values, vectors = torch.linalg.eigh(matrix @ matrix.T)
    return values.flip(0).clamp_min(0.0), vectors.flip(1)


def _ranks(energies: list[Tensor], size_of: Callable[[list[int]], int], budget: int) -> list[int]:
    """The largest common number of directions, by one energy threshold over all unfoldings, within the
    budget.
    """
    levels = torch.cat(energies).sort(descending=True).values
    low, high = 1, levels.numel()

    def at(step: int) -> list[int]:
        return [max(1, int((e >= float(levels[step - 1])).sum())) for e in energies]

    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size_of(at(middle)) <= budget else (low, middle - 1)
    return at(low)


def _tucker(tensor: Tensor, energies: list[Tensor], budget: int) -> float:
    """Energy kept by a sequentially truncated HOSVD of at most `budget` numbers."""
    dims = tuple(tensor.shape)

    def size_of(ranks: list[int]) -> int:
        bases = sum(n * r for n, r in zip(dims, ranks, strict=True) if r < n)
        return math.prod(ranks) + bases

    core = tensor
    for axis, rank in enumerate(_ranks(energies, size_of, budget)):
        if rank < dims[axis]:
            basis = _eigen(_unfold(core, axis))[1][:, :rank]
            moved = basis.T @ _unfold(core, axis)
            others = [n for i, n in enumerate(core.shape) if i != axis]
            core = moved.reshape(rank, *others).movedim(0, axis)
    return float(core.square().sum())


def _tensor_train(tensor: Tensor, budget: int) -> float:
    """Energy kept by a TT-SVD of at most `budget` numbers."""
    dims = tuple(tensor.shape)
    sides = [tensor.reshape(math.prod(dims[:k]), -1) for k in range(1, len(dims))]
    energies = [_eigen(m if m.shape[0] <= m.shape[1] else m.T)[0] for m in sides]

    def size_of(ranks: list[int]) -> int:
        bonds = [1, *ranks, 1]
        return sum(bonds[i] * n * bonds[i + 1] for i, n in enumerate(dims))

    rest, bond = tensor.reshape(1, -1), 1
    for size, rank in zip(dims[:-1], _ranks(energies, size_of, budget), strict=True):
        matrix = rest.reshape(bond * size, -1)
        if matrix.shape[0] <= matrix.shape[1]:
            rest = _eigen(matrix)[1][:, :rank].T @ matrix
        else:
            values, right = _eigen(matrix.T)
            rest = values[:rank].sqrt()[:, None] * right[:, :rank].T
        bond = rest.shape[0]
    return float(rest.square().sum())


def _cp(tensor: Tensor, rank: int) -> float | None:
    """Energy kept by a CP fitted with tensorly (seeded, 30 sweeps); None without tensorly."""
    try:
        import tensorly
        from tensorly.decomposition import parafac
    except ImportError:
        return None
    generator = torch.Generator().manual_seed(0)
    start = []
    for axis, size in enumerate(tensor.shape):
        vectors = _eigen(_unfold(tensor, axis))[1][:, :rank]
        extra = torch.randn(size, rank - vectors.shape[1], generator=generator, dtype=torch.float64)
        start.append(torch.cat([vectors, extra / math.sqrt(size)], dim=1))
    norm = tensor.norm()
    before = tensorly.get_backend()
    tensorly.set_backend("pytorch", local_threadsafe=True)
    try:
        ones = torch.ones(rank, dtype=torch.float64)
        fitted = parafac(tensor / norm, rank, n_iter_max=30, init=(ones, start), tol=1e-6, l2_reg=1e-10)
        error = float((tensorly.cp_to_tensor(fitted) - tensor / norm).square().sum())
    finally:
        tensorly.set_backend(before, local_threadsafe=True)
    return max(0.0, 1.0 - error)
