"""The sweep, the refit and the factor: torch against C++, against plain definitions, and on bad Hessians."""

import math

import pytest
import torch
from torch import Tensor

from nstf.kernels import cpu
from nstf.kernels.formats import decode
from nstf.quantizers import int_grid
from nstf.quantizers.rounding.factor import factor
from nstf.quantizers.rounding.ldlq import ldlq, refit, refit_compiled, refit_torch
from nstf.quantizers.rounding.nearest import nearest
from nstf.quantizers.rounding.sweep import sweep, sweep_compiled, sweep_torch
from nstf.quantizers.stats import Stats, loss, row_loss
from tests.quantizers.conftest import correlated_hessian, normal
from tests.quantizers.levels import LEVELS

needs_extension = pytest.mark.skipif(
    not hasattr(cpu.ext, "ldlq_sweep"), reason="the C++ extension was not built"
)


@needs_extension
@pytest.mark.parametrize("group", [0, 8, 24, 32, 128])
@pytest.mark.parametrize("name", LEVELS)
def test_compiled_sweep_equals_the_torch_sweep(name, group):
    levels, weight, hessian = LEVELS[name], normal(37, 100), correlated_hessian(100)
    importance = hessian.diagonal()
    for way in (None, factor(hessian)):
        ours = sweep_compiled(weight, levels, group, importance, way, None)
        reference = sweep_torch(weight, levels, group, importance, way, None)
        # A tie between two scales or two levels may fall the other way; from there a row goes its own way.
        assert float((ours.codes == reference.codes).float().mean()) > 0.97
        assert float((ours.grid.scale == reference.grid.scale).float().mean()) > 0.97
        assert torch.allclose(ours.row_loss.sum(), reference.row_loss.sum(), rtol=1e-3)
    ordered = factor(hessian, act_order=True)
    grid = sweep(weight, levels, group, importance).grid
    ours = sweep_compiled(weight, levels, group, importance, ordered, grid)
    reference = sweep_torch(weight, levels, group, importance, ordered, grid)
    assert float((ours.codes == reference.codes).float().mean()) > 0.97


@pytest.mark.parametrize("group", [0, 32, 96, 256])
def test_spans_of_blocks_pass_on_the_errors_that_blocks_alone_do(group, monkeypatch):
    levels, weight, hessian = LEVELS["int4-scale8"], normal(21, 700), correlated_hessian(700)
    ways = (factor(hessian), factor(hessian, act_order=True))
    frozen = sweep_torch(weight, levels, group, hessian.diagonal(), None, None).grid
    # The second case are blocks of 128 columns without spans; in the first two or three are in one.
    for way, grid in ((ways[0], None), (ways[0], frozen), (ways[1], frozen)):
        found = []
        for span in (300, 1):
            monkeypatch.setattr("nstf.quantizers.rounding.sweep.SPAN", span)
            found.append(sweep_torch(weight, levels, group, hessian.diagonal(), way, grid))
        assert float((found[0].codes == found[1].codes).float().mean()) > 0.97
        assert torch.allclose(found[0].row_loss.sum(), found[1].row_loss.sum(), rtol=1e-3)


@needs_extension
@pytest.mark.parametrize("group", [0, 8, 24, 32, 128])
@pytest.mark.parametrize("name", LEVELS)
def test_compiled_refit_equals_the_torch_refit(name, group):
    levels, weight, way = LEVELS[name], normal(37, 100), factor(correlated_hessian(100))
    rounded = sweep(weight, levels, group, way.diagonal, way)
    ours, reference = refit_compiled(weight, rounded, levels, way), refit_torch(weight, rounded, levels, way)
    assert float((ours.grid.scale == reference.grid.scale).float().mean()) > 0.97
    assert torch.allclose(ours.row_loss, reference.row_loss, rtol=1e-4)


@needs_extension
@pytest.mark.parametrize("lanes", [4, 8])
def test_narrower_vectors_give_the_same_codes(lanes):
    levels, weight, way = LEVELS["int4-scale8"], normal(37, 100), factor(correlated_hessian(100))
    wide = sweep_compiled(weight, levels, 32, way.diagonal, way, None)
    narrow = sweep_compiled(weight, levels, 32, way.diagonal, way, None, lanes)
    assert float((wide.codes == narrow.codes).float().mean()) > 0.99
    assert torch.allclose(
        refit_compiled(weight, wide, levels, way).row_loss,
        refit_compiled(weight, wide, levels, way, lanes).row_loss,
        rtol=1e-5,
    )


@needs_extension
def test_compiled_sweep_refuses_arguments_that_do_not_fit():
    levels, weight = LEVELS["int3"], normal(4, 16)
    with pytest.raises(ValueError, match="importance or diagonal is too short"):
        sweep_compiled(weight, levels, 0, torch.ones(15), None, None)
    with pytest.raises(ValueError, match="another shape"):
        sweep_compiled(
            weight, levels, 0, torch.ones(16), None, nearest(normal(5, 16), levels, 0, torch.ones(16)).grid
        )


@pytest.mark.parametrize("act_order", [False, True])
def test_row_loss_is_the_loss_in_the_norm_of_the_damped_hessian(act_order):
    weight, way = normal(9, 64), factor(correlated_hessian(64), act_order=act_order)
    for group in (0, 16):
        rounded = ldlq(weight, LEVELS["int3"], group, way)
        error = weight - rounded.decode(LEVELS["int3"])
        assert torch.allclose(rounded.row_loss, row_loss(error, way.hessian), rtol=1e-4)


def test_sweep_follows_the_definition_of_ldlq():
    """Column by column in float64, with Q_j = nearest(W_j + (W - Q) U_j)."""
    levels, weight, way = LEVELS["int4-asymmetric"], normal(5, 24), factor(correlated_hessian(24))
    rounded = sweep(weight, levels, 8, way.diagonal, way)
    grid, values = rounded.grid, rounded.decode(levels)
    done = torch.zeros(5, 24, dtype=torch.float64)
    for j in range(24):
        target = weight[:, j] + (weight.double() - done)[:, :j] @ way.feedback.double()[:j, j]
        scale, zero = grid.scale[:, j // 8].double(), grid.zero[:, j // 8].double()
        done[:, j] = scale * ((target / scale + zero).round().clamp(0, 15) - zero)
    assert torch.allclose(done.float(), values, atol=1e-7)


def test_without_correlations_ldlq_is_nearest():
    levels, weight = LEVELS["int3"], normal(5, 64)
    diagonal = torch.rand(64) + 0.5
    way = factor(torch.diag(diagonal))
    plain = nearest(weight, levels, 16, way.importance)
    assert torch.equal(sweep(weight, levels, 16, way.importance, way).codes, plain.codes)


def test_refit_never_raises_the_loss_of_a_row():
    weight, way = normal(30, 64), factor(correlated_hessian(64))
    for levels in LEVELS.values():
        rounded = sweep(weight, levels, 16, way.diagonal, way)
        fitted = refit(weight, rounded, levels, way)
        before = row_loss(weight - rounded.decode(levels), way.hessian)
        after = row_loss(weight - fitted.decode(levels), way.hessian)
        assert bool((after <= before * (1 + 1e-6)).all())
        assert torch.equal(fitted.codes, rounded.codes)


def test_activation_order_helps_where_inputs_differ_in_size(weight, stats):
    losses = {}
    for act_order in (False, True):
        params = int_grid.Params(bits=3, group=32, rounding="ldlq", act_order=act_order)
        losses[act_order] = loss(weight, decode(int_grid.encode(weight, params, stats)), stats)
    assert losses[True] < losses[False]


@pytest.mark.parametrize("act_order", [False, True])
def test_factor_gives_back_the_damped_hessian(act_order):
    hessian = correlated_hessian(40)
    way = factor(hessian, 0.01, act_order)
    order = way.order if way.order is not None else torch.arange(40)
    unit = way.feedback.double() + torch.eye(40)
    rebuilt = unit @ torch.diag(way.diagonal.double()) @ unit.T
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(40)
    assert torch.allclose(rebuilt.float(), damped[order][:, order], rtol=1e-4, atol=1e-5)
    assert torch.allclose(way.hessian, damped)
    assert torch.equal(way.importance[order], way.diagonal)
    assert float(way.feedback.tril().abs().max()) == 0 and way.recovery == ""
    if act_order:
        assert bool((hessian.diagonal()[order].diff() <= 0).all())


def rank_one(cols: int) -> Tensor:
    x = torch.arange(1.0, cols + 1)
    return torch.outer(x, x)


def dead_column(cols: int) -> Tensor:
    hessian = correlated_hessian(cols)
    hessian[3], hessian[:, 3] = 0, 0
    return hessian


def with_nan(cols: int) -> Tensor:
    hessian = correlated_hessian(cols)
    hessian[2, 5] = math.nan
    hessian[7, 7] = math.inf
    return hessian


def indefinite(cols: int, by: float) -> Tensor:
    return torch.eye(cols) - by * torch.ones(cols, cols) / cols


@pytest.mark.parametrize(
    ("hessian", "recovery"),
    [
        (rank_one(24), ""),
        (torch.zeros(24, 24), "24 dead columns"),
        (dead_column(24), "1 dead columns"),
        (with_nan(24), "non-finite entries: diagonal only"),
        (torch.full((24, 24), math.nan), "non-finite entries: diagonal only"),
        (indefinite(24, 1.05), "damping 0.1"),
        (indefinite(24, 5), "indefinite: diagonal only; damping 1"),
    ],
    ids=["rank-1", "zero", "dead-column", "one-nan", "all-nan", "slightly-indefinite", "indefinite"],
)
def test_bad_hessians_are_recovered_and_reported(hessian, recovery):
    weight = normal(6, 24)
    for act_order in (False, True):
        way = factor(hessian, act_order=act_order)
        assert way.recovery == recovery
        assert bool(torch.isfinite(way.feedback).all()) and bool((way.diagonal > 0).all())
        rounded = ldlq(weight, LEVELS["int4-asymmetric"], 8, way)
        assert float((rounded.decode(LEVELS["int4-asymmetric"]) - weight).norm() / weight.norm()) < 0.5
    params = int_grid.Params(rounding="ldlq")
    assert math.isfinite(int_grid.estimate(weight, params, Stats(hessian.nan_to_num(1.0, 1.0, 1.0))))


def test_factor_refuses_what_it_cannot_use():
    with pytest.raises(ValueError, match=r"must be square, not \[3, 4\]"):
        factor(torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"damping must be above 0 and at most 1\.0, not 2"):
        factor(torch.eye(3), 2)


def test_factor_is_computed_once_for_all_row_weights():
    stats = Stats(correlated_hessian(16))
    assert stats.ldl() is stats.for_rows(torch.ones(4)).ldl()
    assert stats.ldl() is not stats.ldl(0.02)
    with pytest.raises(ValueError, match="no Hessian to factor"):
        Stats().ldl()


def test_loss_is_half_the_weighted_trace():
    weight, hessian, rows = normal(7, 12), correlated_hessian(12), torch.rand(7)
    error = normal(7, 12, seed=5)
    expected = 0.5 * torch.trace(torch.diag(rows) @ error @ hessian @ error.T)
    got = loss(weight, weight - error, Stats(hessian, rows))
    assert got == pytest.approx(float(expected), rel=1e-5)
    assert loss(weight, weight - error) == pytest.approx(float(error.square().sum() / 2), rel=1e-5)
    stack = weight.reshape(1, 7, 12)
    assert loss(stack, stack - error, Stats(hessian, rows), lead=2) == pytest.approx(got, rel=1e-5)
    with pytest.raises(ValueError, match="differ in shape"):
        loss(weight, weight[:3])


def test_without_the_extension_the_result_is_as_good(weight, stats, monkeypatch):
    params = int_grid.Params(bits=4, group=32, symmetric=False, scale_bits=8, rounding="ldlq")
    fast = loss(weight, decode(int_grid.encode(weight, params, stats)), stats)
    monkeypatch.setattr(cpu, "ext", None)
    assert loss(weight, decode(int_grid.encode(weight, params, stats)), stats) == pytest.approx(
        fast, rel=1e-3
    )


@needs_extension
@pytest.mark.parametrize("shape", [(1, 1 << 19), (2, 1 << 19), (3, 1 << 19)])
def test_losses_of_rows_longer_than_the_sample_are_estimated(shape):
    # No row was taken, which the C++ refused: a ValueError in the middle of a conversion.
    from nstf.quantizers.rounding.estimate import Form, expected_losses
    from nstf.quantizers.rounding.matrix import Rounding

    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    form = Form(LEVELS["int3"], 64, Rounding("nearest"))
    rounded = sweep(weight, form.levels, 64, torch.ones(shape[1]))
    exact = float((weight - rounded.decode(form.levels)).square().sum()) / 2
    (found,) = expected_losses(weight, 1, [form], None)
    assert 0.9 * exact < found < 1.1 * exact
