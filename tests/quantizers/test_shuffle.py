"""Shuffle codes: how close to the bound, the compiled search against torch's, what feedback gains."""

import math

import pytest
import torch

from nstf.analyzers.signatures import Signature
from nstf.kernels import shuffle_encode
from nstf.kernels.cpu import ext
from nstf.kernels.formats import decode
from nstf.kernels.formats import shuffle as form
from nstf.kernels.torch import shuffle_search
from nstf.proposals import Room, Target
from nstf.quantizers import filled, grid16, int_grid, shuffle
from nstf.quantizers.stats import Stats, loss
from tests.quantizers.conftest import correlated_hessian, normal

compiled = pytest.mark.skipif(not hasattr(ext, "shuffle_round"), reason="the extension is not built")


@compiled
@pytest.mark.parametrize("q", form.RATES)
def test_errors_on_a_gaussian_are_near_the_rate_distortion_bound(q):
    """Below 0.3 bit up to 4.5 bits a weight; benchmarks/shuffle.py measures it closely."""
    weight = torch.randn(512, 192, generator=torch.Generator().manual_seed(q))
    error = float((decode(shuffle.encode(weight, shuffle.Params(q))) - weight).square().mean())
    assert 0.5 * math.log2(error) + q / 4 < (0.3 if q <= 18 else 0.4)
    assert error == pytest.approx(shuffle.MSE[q], rel=0.06)


@compiled
@pytest.mark.parametrize("q", [8, 11, 16, 18])
def test_the_compiled_search_gives_the_codes_of_the_definition(q):
    generator = torch.Generator().manual_seed(q)
    target = torch.randn(288, 16, generator=generator)
    weight = target + 0.05 * torch.randn(288, 16, generator=generator)
    level = torch.rand(288, generator=generator) * 0.2 + 0.05
    level[3] = 0
    importance = torch.rand(288, generator=generator) * 3
    feedback = torch.randn(16, 16, generator=generator).mul(0.2).triu(1)
    tables = shuffle_search.float_tables(q)
    expected = shuffle_search.round_columns(target, weight, level, importance, feedback, q, tables)
    try:
        for isa in ext.isas():
            ext.use_isa(isa)
            rounded, codes = shuffle_encode.round_columns(target, weight, level, importance, feedback, q)
            assert torch.equal(codes, expected[1]) and torch.equal(rounded, expected[0])
    finally:
        ext.use_isa("")


def test_without_the_extension_torch_gives_the_same_bytes(monkeypatch):
    weight, params = normal(40, 24), shuffle.Params(12)
    with_ext = shuffle.encode(weight, params)
    monkeypatch.setattr(shuffle_encode, "ext", None)
    assert torch.equal(shuffle.encode(weight, params).arrays["codes"], with_ext.arrays["codes"])


@compiled
def test_feedback_inside_a_block_of_columns_is_used():
    """Columns are rounded one by one: two blocks of strongly correlated inputs gain as much as the factor says."""
    mixed = torch.randn(16, 32, generator=torch.Generator().manual_seed(3))
    weight, stats = normal(256, 32), Stats(mixed.T @ mixed / 16 + 0.05 * torch.eye(32))
    lost = {
        r: loss(weight, decode(shuffle.encode(weight, shuffle.Params(12, rounding=r), stats)), stats)
        for r in ("nearest", "ldlq")
    }
    assert lost["ldlq"] < 0.5 * lost["nearest"]


@compiled
@pytest.mark.parametrize("q", [8, 12, 16])
def test_forecasts_are_close_to_the_loss(q):
    spread = torch.randn(512, generator=torch.Generator().manual_seed(0)).mul(0.5).exp()
    weight, stats = normal(512, 128), Stats(correlated_hessian(128), spread)
    params = shuffle.Params(q, block=128, rounding="ldlq")
    lost = loss(weight, decode(shuffle.encode(weight, params, stats)), stats)
    assert shuffle.estimate(weight, params, stats) == pytest.approx(lost, rel=0.12)


@compiled
def test_it_beats_integers_and_grids_of_more_bytes():
    weight, stats = normal(256, 128), Stats(correlated_hessian(128))
    mine = shuffle.Params(16, block=128, rounding="ldlq")
    found = loss(weight, decode(shuffle.encode(weight, mine, stats)), stats)
    for module, params in (
        (int_grid, int_grid.Params(bits=4, group=64, scale_bits=8, rounding="ldlq")),
        (grid16, grid16.Params(group=64, scale_bits=8, rounding="ldlq")),
    ):
        assert module.bits((256, 128), params) > shuffle.bits((256, 128), mine)
        assert found < 0.75 * loss(weight, decode(module.encode(weight, params, stats)), stats)


@compiled
def test_rows_that_matter_more_lose_less():
    weight = normal(512, 64)
    weights = torch.ones(512)
    weights[::2] = 20.0
    error = (
        (decode(shuffle.encode(weight, shuffle.Params(12), Stats(None, weights))) - weight).square().mean(1)
    )
    assert float(error[::2].mean()) < 0.9 * float(error[1::2].mean())


@pytest.mark.parametrize("bad", [{"rounding": "up"}, {"damping": 0.0}, {"quarter_bits": 4}, {"block": 48}])
def test_parameters_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=r"must be|rounding"):
        shuffle.Params(**bad)


@compiled
@pytest.mark.parametrize("scratch", [1 << 28, 1])
def test_matrices_of_one_hessian_are_encoded_together_as_alone(monkeypatch, scratch):
    stats = Stats(correlated_hessian(64))
    calls = []

    def counted(target, *given):
        calls.append(len(target))
        return search(target, *given)

    search = shuffle.round_columns
    monkeypatch.setattr(shuffle, "round_columns", counted)
    # The third has rows beside whole segments: nothing goes under it.
    items = [
        (
            normal(rows, 64, seed=rows),
            shuffle.Params(q, rounding="ldlq", block=32),
            stats.for_rows(torch.ones(rows)),
        )
        for rows, q in ((256, 12), (512, 12), (40, 12), (256, 12), (256, 9))
    ]
    together = shuffle.encode_many(items, scratch)
    assert calls[::4] == ([256 + 512 + 64, 256, 256] if scratch > 1 else [256, 256, 512, 64, 256])
    for item, found in zip(items, together, strict=True):
        alone = shuffle.encode(*item)
        assert found.tree == alone.tree and found.shape == alone.shape
        lost, expected = (loss(item[0], decode(e), stats) for e in (found, alone))
        assert lost == pytest.approx(expected, rel=0.02)


@compiled
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rounding", ["ldlq", "nearest"])
def test_matrices_of_other_hessians_are_searched_at_the_same_time_and_change_nothing(
    monkeypatch, rounding, device
):
    calls = []

    def counted(target, *given):
        calls.append(len(target))
        return search(target, *given)

    search = shuffle.round_columns
    monkeypatch.setattr(shuffle, "round_columns", counted)
    params = [shuffle.Params(q, rounding=rounding, block=32) for q in (12, 9)]
    wider = 1 if device == "cpu" else 10
    groups = []
    for i, (sizes, cols, p) in enumerate(
        [([256, 512], 64, 0), ([512], 64, 0), ([288], 64, 0), ([40], 64, 0), ([256], 96, 0), ([256], 64, 1)]
    ):
        cols *= wider
        mixed = torch.randn(cols, cols, generator=torch.Generator().manual_seed(i))
        stats = Stats((mixed.T @ mixed / cols + 0.05 * torch.eye(cols)).to(device))
        rows = [(normal(n, cols, seed=n + i).to(device), torch.rand(n).to(device) + 0.5) for n in sizes]
        groups.append([(weight, params[p], stats.for_rows(counts)) for weight, counts in rows])
    alone = [found for group in groups for found in shuffle.encode_many(group)]
    calls.clear()
    together = shuffle.encode_many([item for group in groups for item in group])
    # Those of one width and rate are one search, but for a second one that ends beside a whole segment.
    if rounding == "ldlq" and device == "cpu":
        assert calls == [256 + 512 + 512 + 288] * 4 + [64] * 4 + [256] * 6 + [256] * 4
    for found, expected in zip(together, alone, strict=True):
        assert found.tree == expected.tree
        assert all(torch.equal(found.arrays[k], expected.arrays[k]) for k in expected.arrays)


@compiled
@pytest.mark.parametrize("q", [8, 12, 16])
def test_forecasts_in_the_weights_own_basis_know_what_the_codes_cannot_reach(q):
    generator = torch.Generator().manual_seed(q)
    weight = (
        normal(96, 192, seed=q) * torch.rand(96, 192, generator=generator).clamp_min(0.02).rsqrt()
    )  # long tails
    params = shuffle.Params(q, rounding="ldlq")
    stats = Stats(correlated_hessian(192))
    true = loss(weight, decode(shuffle.encode(weight, params, stats)), stats)
    gaussian = shuffle.estimate(normal(96, 192, seed=1) * weight.std(), params, stats)
    assert 0.6 < shuffle.estimate(weight, params, stats) / true < 1.4
    assert q < 16 or true > 1.6 * gaussian  # what a forecast for Gaussian weights would miss


@pytest.mark.parametrize("timed", [True, False])
def test_a_convolution_is_coded_in_the_basis_that_kernels_read(timed):
    weight = normal(64, 64, seed=1).reshape(64, 16, 2, 2)
    trees = {}
    for role, given in (("conv", weight), ("up", weight.flatten(1))):
        known = Signature(given, Stats(), 1, role)
        found = shuffle.proposals(known, Target(timed), Room())
        trees[role] = {shuffle.tree(filled(r, known.shape, 1)).kind for r in found}
    assert trees == {"conv": {"shuffle"} if timed else {"shuffle", "rotated"}, "up": {"rotated"}}
