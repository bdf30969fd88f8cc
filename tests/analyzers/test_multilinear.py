"""Bounds from below by the unfoldings of a tensor."""

import numpy as np
import pytest
import torch

from nstf.analyzers import multilinear, signatures
from nstf.analyzers.multilinear import Metric
from nstf.analyzers.signatures import Signature
from nstf.quantizers.stats import Stats, loss


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hessian_of(size: int) -> torch.Tensor:
    x = noise(4 * size, size, seed=1) * torch.logspace(0, -1, size)
    return x.T @ x / x.shape[0]


def best_of_rank(weight, dims, axes, rank, hessian, row_weight) -> torch.Tensor:
    """The best approximation of a rank of the matrix, in the norm of the loss; of another unfolding one that is near it."""
    rows = None if row_weight is None else row_weight.sqrt()[:, None]
    root = None if hessian is None else torch.linalg.cholesky(hessian.double()).float()
    white = weight if rows is None else weight * rows
    white = white if root is None else white @ root
    others = [a for a in range(len(dims)) if a not in axes]
    order = [*axes, *others]
    matrix = white.reshape(dims).permute(order)
    u, s, vh = torch.linalg.svd(
        matrix.reshape(int(np.prod([dims[a] for a in axes])), -1), full_matrices=False
    )
    cut = ((u[:, :rank] * s[:rank]) @ vh[:rank]).reshape(matrix.shape)
    back = cut.permute([order.index(i) for i in range(len(dims))]).reshape(weight.shape)
    back = back if root is None else torch.linalg.solve_triangular(root, back, upper=False, left=False)
    return back if rows is None else back / rows


@pytest.mark.parametrize("shape", [(24, 32), (60, 24)])
@pytest.mark.parametrize("with_rows", [False, True])
@pytest.mark.parametrize("with_hessian", [False, True])
def test_the_matrix_bound_is_what_the_best_approximation_loses(
    shape, with_rows, with_hessian, monkeypatch
) -> None:
    weight = noise(*shape)
    hessian = hessian_of(shape[1]) if with_hessian else None
    rows = torch.rand(shape[0], generator=torch.Generator().manual_seed(3)) + 0.1 if with_rows else None
    monkeypatch.setattr(multilinear, "SMALL", 0)  # moments alone at first
    unfolding = Metric(weight, hessian, rows).unfolding(shape, (0,))
    quick = [unfolding.left_out(r) for r in range(min(shape) + 1)]
    unfolding.sharpen()
    for rank in (1, 3, 12, min(shape)):
        best = best_of_rank(weight, shape, (0,), rank, hessian, rows)
        lost, whole = loss(weight, best, Stats(hessian, rows)), unfolding.left_out(0)
        assert unfolding.left_out(rank) == pytest.approx(lost, rel=1e-3, abs=1e-5 * whole)
        assert quick[rank] <= unfolding.left_out(rank) + 1e-5 * whole
    assert quick[1] > 0.3 * unfolding.left_out(1)


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 2), (3,), (0, 3)])
@pytest.mark.parametrize("with_hessian", [False, True])
def test_no_tensor_of_a_rank_in_an_unfolding_loses_less_than_its_bound(axes, with_hessian) -> None:
    dims = (4, 6, 5, 8)
    weight, hessian = noise(24, 40), hessian_of(40) if with_hessian else None
    unfolding = Metric(weight, hessian, None).unfolding(dims, axes)
    for rank in (1, 2, 3):
        best = best_of_rank(weight, dims, axes, rank, hessian, None)
        assert unfolding.left_out(rank) <= loss(weight, best, Stats(hessian)) * (1 + 1e-4)
    splits_inputs = any(a > 1 for a in axes) and with_hessian
    if not splits_inputs:  # then it is no estimate
        assert unfolding.left_out(2) == pytest.approx(
            loss(weight, best_of_rank(weight, dims, axes, 2, hessian, None), Stats(hessian)), rel=1e-3
        )


def test_uneven_weights_of_rows_that_are_split_make_it_an_estimate_and_products_of_weights_do_not() -> None:
    weight = noise(24, 10)
    product = torch.outer(torch.linspace(1, 2, 4), torch.linspace(1, 3, 6)).reshape(-1)
    even = Metric(weight, None, product).unfolding((4, 6, 10), (0,))
    best = best_of_rank(weight, (4, 6, 10), (0,), 2, None, product)
    assert even.left_out(2) == pytest.approx(loss(weight, best, Stats(None, product)), rel=0.02)
    uneven = product.clone()
    uneven[5] *= 2
    below = Metric(weight, None, uneven).unfolding((4, 6, 10), (0,))
    assert below.left_out(2) < 0.5 * even.left_out(2)


def test_rank_and_energies_of_a_planted_tensor_are_seen() -> None:
    core = noise(2, 3, 4)
    weight = torch.einsum(
        "abc,ia,jb,kc->ijk", core, noise(6, 2, seed=1), noise(7, 3, seed=2), noise(8, 4, seed=3)
    )
    metric = Metric(weight.reshape(42, 8), None, None)
    for axis, rank in enumerate((2, 3, 4)):
        unfolding = metric.unfolding((6, 7, 8), (axis,))
        assert unfolding.left_out(rank) == 0.0 < unfolding.left_out(rank - 1)
        assert unfolding.effective_rank <= rank + 0.01 and len(unfolding.energies) == unfolding.side


def test_a_zero_tensor_loses_nothing() -> None:
    unfolding = Metric(torch.zeros(6, 4), None, None).unfolding((6, 4), (0,))
    assert list(unfolding.tails) == [0.0] * 5 and unfolding.effective_rank == 0.0


@pytest.mark.parametrize(
    "dims,axes",
    [((4, 6, 11), (0,)), ((4, 60), (0,)), ((4, 6, 10), ()), ((4, 6, 10), (0, 1, 2)), ((4, 6, 10), (3,))],
)
def test_what_is_no_unfolding_is_refused(dims, axes) -> None:
    with pytest.raises(ValueError, match=r"unfolding|not among"):
        Metric(torch.zeros(24, 10), None, None).unfolding(dims, axes)


def test_of_a_large_stack_some_experts_stand_for_all(monkeypatch) -> None:
    from nstf.analyzers import signatures

    stack = noise(16, 6, 10)
    whole = Signature(stack, Stats(), 2, "expert_stack").unfolding((16, 6, 10), (1,))
    monkeypatch.setattr(signatures, "MULTILINEAR_LIMIT", stack.numel() // 2)
    part = Signature(stack, Stats(), 2, "expert_stack").unfolding((16, 6, 10), (1,))
    assert part.left_out(0) == pytest.approx(whole.left_out(0), rel=0.2) and part.left_out(
        0
    ) != whole.left_out(0)


def test_energies_of_a_sampled_stack_add_up_to_those_of_the_tensor(monkeypatch) -> None:
    monkeypatch.setattr(signatures, "MULTILINEAR_LIMIT", 4 * 24 * 32)
    weight = noise(16, 24, 32)
    known = Signature(weight, Stats(), lead=2, role="expert_stack")
    whole = known.matrix.energies.sum()
    for axis in range(3):
        found = known.unfolding(tuple(weight.shape), (axis,)).energies
        assert float(found.sum()) == pytest.approx(float(whole), rel=0.1)
