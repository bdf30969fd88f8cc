"""Low rank: optimal in the norm of the input, exact at full rank, and rounded so that one factor helps the other."""

import math

import pytest
import torch

from nstf.decomposers import svd
from nstf.decomposers.factors import dense_bytes, dense_leaf, lead_for
from nstf.kernels.formats import EncodedTensor, check, decode, stored_bytes
from nstf.quantizers import int_grid
from nstf.quantizers.stats import Stats, loss

SHAPES = [(24, 24), (40, 24), (24, 40), (7, 31), (31, 7), (1, 5), (5, 1), (1, 1)]


def weight_of(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hessian_of(size: int, seed: int = 1) -> torch.Tensor:
    """Of skewed, correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * size, size, generator=generator) * torch.logspace(0, -2, size)
    x = x @ (torch.eye(size) + 0.3 * torch.randn(size, size, generator=generator) / math.sqrt(size))
    return x.T @ x / x.shape[0]


def int8_leaf(name: str, factor: torch.Tensor, metric: torch.Tensor | None) -> EncodedTensor:
    params = int_grid.Params(bits=8, group=0, lead=lead_for(tuple(factor.shape)))
    return int_grid.encode(factor, params, Stats(metric))


def int4_leaf(name: str, factor: torch.Tensor, metric: torch.Tensor | None) -> EncodedTensor:
    params = int_grid.Params(bits=4, group=32, rounding="ldlq", lead=lead_for(tuple(factor.shape)))
    return int_grid.encode(factor, params, Stats(metric))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("whitened", [False, True])
def test_full_rank_is_exact(shape, whitened) -> None:
    w = weight_of(shape)
    h = hessian_of(shape[1]) if whitened else None
    decomposition = svd.decompose(w, svd.Params(min(shape)), h)
    assert float((decomposition.dense() - w).norm() / w.norm()) < 1e-5


@pytest.mark.parametrize("shape", SHAPES[:5])
@pytest.mark.parametrize("whitened", [False, True])
def test_error_is_what_was_predicted_and_falls_with_the_rank(shape, whitened) -> None:
    w = weight_of(shape)
    h = hessian_of(shape[1]) if whitened else None
    prepared = svd.prepare(w, h)
    errors = []
    for rank in range(1, min(shape) + 1):
        d = prepared.truncate(rank)
        missing = w.double() - d.dense().double()
        weighted = missing if prepared.hessian is None else missing @ prepared.hessian
        left = float((weighted * missing).sum())
        assert left == pytest.approx(prepared.loss(rank), rel=1e-3, abs=1e-5 * prepared.loss(0))
        errors.append(prepared.error(rank))
    assert errors == sorted(errors, reverse=True)


def test_plain_svd_agrees_with_torch() -> None:
    w = weight_of((20, 30))
    u, s, v = torch.linalg.svd(w, full_matrices=False)
    best = (u[:, :5] * s[:5]) @ v[:5]
    torch.testing.assert_close(svd.decompose(w, svd.Params(5)).dense(), best, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(svd.prepare(w).singular_values, s.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
@pytest.mark.parametrize("rank", [1, 4, 12])
def test_whitened_beats_plain_in_the_norm_of_the_input(shape, rank) -> None:
    w, h = weight_of(shape), hessian_of(shape[1])
    plain = svd.decompose(w, svd.Params(rank)).dense()
    whitened = svd.decompose(w, svd.Params(rank), h).dense()
    assert loss(w, whitened, Stats(h)) < 0.9 * loss(w, plain, Stats(h))


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_row_weights_beat_none_in_the_weighted_norm(shape) -> None:
    w, h = weight_of(shape), hessian_of(shape[1])
    rows = torch.logspace(0, -4, shape[0])
    stats = Stats(h, rows)
    without = svd.decompose(w, svd.Params(5), h).dense()
    weighted = svd.decompose(w, svd.Params(5), h, rows).dense()
    assert loss(w, weighted, stats) < loss(w, without, stats)
    full = svd.decompose(w, svd.Params(24), h, rows).dense()
    assert float((full - w).norm() / w.norm()) < 1e-5


def test_expert_stacks_are_one_tall_matrix() -> None:
    w = weight_of((3, 5, 8))
    d = svd.decompose(w, svd.Params(8, lead=2), hessian_of(8))
    assert tuple(d.factors["a"].shape) == (15, 8)
    torch.testing.assert_close(d.dense(), w, rtol=1e-4, atol=1e-5)
    encoded = d.encode(dense_leaf("float32"))
    check(encoded)
    assert decode(encoded).shape == (3, 5, 8)


@pytest.mark.parametrize("size_bytes", [0, 90, 500, 1000, 3000, 10**6])
@pytest.mark.parametrize("leaf", ["bfloat16", "int8"])
def test_rank_for_bytes_fills_the_budget_and_never_exceeds_it(size_bytes, leaf) -> None:
    shape = (24, 40)

    def bytes_of(child: tuple[int, ...]) -> int:
        if leaf == "bfloat16":
            return dense_bytes("bfloat16")(child)
        return stored_bytes(int_grid.tree(int_grid.Params(bits=8, group=0)), child)

    def stored(rank: int) -> int:
        encode = dense_leaf("bfloat16") if leaf == "bfloat16" else int8_leaf
        encoded = svd.decompose(weight_of(shape), svd.Params(rank)).encode(encode)
        return stored_bytes(encoded.tree, shape)

    rank = svd.rank_for_bytes(shape, size_bytes, bytes_of)
    if rank is None:
        assert stored(1) > size_bytes
        return
    assert stored(rank) <= size_bytes
    assert rank == 24 or stored(rank + 1) > size_bytes


@pytest.mark.parametrize("error", [0.9, 0.5, 0.1, 0.0])
def test_rank_for_error_is_the_smallest_that_holds(error) -> None:
    w, h = weight_of((24, 40)), hessian_of(40)
    rank = svd.rank_for_error(w, error, h)
    prepared = svd.prepare(w, h)
    assert prepared.error(rank) <= error
    assert rank == 1 or prepared.error(rank - 1) > error


@pytest.mark.parametrize("leaf,bound", [(dense_leaf("bfloat16"), 0.01), (int8_leaf, 0.02), (int4_leaf, 0.2)])
def test_rounded_factors_round_trip(leaf, bound) -> None:
    w, h = weight_of((48, 64)), hessian_of(64)
    prepared = svd.prepare(w, h)
    d = prepared.truncate(16)
    encoded = d.encode(leaf)
    check(encoded)
    total = 2 * loss(w, torch.zeros_like(w), Stats(h))
    extra = 2 * loss(w, decode(encoded), Stats(h)) - 2 * loss(w, d.dense(), Stats(h))
    assert extra / total < bound**2 + 1e-6


def test_refitting_a_against_the_rounded_b_lowers_the_loss() -> None:
    w, h = weight_of((48, 64)), hessian_of(64)
    d = svd.decompose(w, svd.Params(16), h)
    no_refit = type(d)(d.kind, d.params, d.shape, d.factors, d.metrics)
    assert loss(w, decode(d.encode(int4_leaf)), Stats(h)) < loss(
        w, decode(no_refit.encode(int4_leaf)), Stats(h)
    )


def test_metrics_are_the_ones_of_the_product_rule() -> None:
    w, h = weight_of((10, 12)), hessian_of(12)
    prepared = svd.prepare(w, h)
    d = prepared.truncate(4)
    b = d.factors["b"].double()
    torch.testing.assert_close(d.metrics["b"].double(), prepared.hessian, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(d.metrics["a"].double(), b @ prepared.hessian @ b.T, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_low_rank_and_zero_matrices_survive(shape) -> None:
    w = weight_of((shape[0], 2)) @ weight_of((2, shape[1]), 3)
    for rank in (2, 5, 12):
        for h in (None, hessian_of(shape[1])):
            dense = svd.decompose(w, svd.Params(rank), h).dense()
            torch.testing.assert_close(dense, w, rtol=1e-3, atol=1e-4)
    zero = svd.decompose(torch.zeros(shape), svd.Params(3), hessian_of(shape[1]))
    assert float(zero.dense().abs().max()) == 0.0
    assert bool(torch.isfinite(decode(zero.encode(dense_leaf()))).all())


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_singular_and_zero_hessians_are_survived(shape) -> None:
    w = weight_of(shape)
    dead = hessian_of(shape[1])
    dead[:3] = 0
    dead[:, :3] = 0
    rank_one = torch.ones(shape[1], shape[1])
    for h in (dead, rank_one, torch.zeros(shape[1], shape[1])):
        dense = svd.decompose(w, svd.Params(12), h).dense()
        assert float((dense - w).norm() / w.norm()) < 1e-4


def test_same_input_gives_the_same_factors() -> None:
    w, h = weight_of((30, 20)), hessian_of(20)
    first, second = (svd.decompose(w, svd.Params(7), h) for _ in range(2))
    assert all(torch.equal(first.factors[n], second.factors[n]) for n in ("a", "b"))


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: svd.decompose(weight_of((4, 6)), svd.Params(5)), "rank 5 is above"),
        (lambda: svd.decompose(weight_of((4, 6)), svd.Params(0)), "positive"),
        (lambda: svd.decompose(weight_of((4,)), svd.Params(1)), "no columns"),
        (lambda: svd.prepare(weight_of((4, 6)), hessian_of(4)), "hessian of shape"),
        (lambda: svd.prepare(weight_of((4, 6)), None, torch.ones(5)), "row_weight must be 4"),
        (lambda: svd.prepare(weight_of((4, 6)), None, -torch.ones(4)), "not negative"),
        (lambda: svd.prepare(torch.full((4, 6), torch.nan)), "NaN or infinity"),
        (lambda: svd.prepare(weight_of((4, 6)), torch.full((6, 6), torch.inf)), "NaN or infinity"),
    ],
)
def test_bad_input_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()
