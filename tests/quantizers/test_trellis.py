"""Trellis codes: how close to the bound, what feedback and rates by row gain, and that forecasts hold."""

import math
from dataclasses import replace

import pytest
import torch

from nstf.kernels.cpu import ext
from nstf.kernels.formats import FormatError, decode, rotated
from nstf.kernels.formats import trellis as form
from nstf.kernels.formats.shards import Span, shard
from nstf.kernels.trellis_encode import encode_tiles
from nstf.quantizers import int_grid, trellis
from nstf.quantizers.rounding import block_ldlq as ldlq
from nstf.quantizers.rounding.block_ldlq import Lane, block_factor, block_ldlq
from nstf.quantizers.rounding.factor import factor
from nstf.quantizers.rounding.sections import dealt_out
from nstf.quantizers.stats import Stats, loss
from tests.quantizers.conftest import correlated_hessian, normal

pytestmark = pytest.mark.skipif(not hasattr(ext, "trellis_viterbi"), reason="minutes without the extension")

ROWS, COLS = 128, 128


def problem(rows: int = ROWS) -> tuple[torch.Tensor, Stats]:
    spread = torch.randn(rows, generator=torch.Generator().manual_seed(0)).mul(1.5).exp()
    return normal(rows, COLS), Stats(correlated_hessian(COLS), spread)


@pytest.mark.parametrize("q", [6, 8, 10, 12, 14, 16])
def test_errors_on_a_gaussian_are_near_the_rate_distortion_bound(q):
    """Within 0.13 bit on 8192 weights; benchmarks/trellis.py measures it closely."""
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(q)) / trellis.WIDTH[q]
    values = form.section_values(encode_tiles(x, q, form.codebook(q))[:, None], q, 512, 16).reshape(32, 256)
    error = float((x - values).square().mean()) * trellis.WIDTH[q] ** 2
    assert 0.5 * math.log2(error) + q / 4 < 0.13
    assert error == pytest.approx(trellis.MSE[q], rel=0.06)


@pytest.mark.parametrize("q", [8, 12])
def test_forecasts_are_close_to_the_loss(q):
    weight, stats = problem()
    for params in (
        trellis.Params(q, block=128, rounding="ldlq"),
        trellis.Params(sections=((q + 4, 64), (q - 2, 64)), block=128, rounding="ldlq"),
    ):
        lost = loss(weight, decode(trellis.encode(weight, params, stats)), stats)
        assert trellis.estimate(weight, params, stats) == pytest.approx(lost, rel=0.12)


def test_feedback_rotation_and_codes_beat_the_integer_grid_at_fewer_bits():
    weight, stats = problem()
    stats = stats.for_rows(None)
    params = trellis.Params(12, block=128, rounding="ldlq")
    grid = int_grid.Params(bits=3, group=64, scale_bits=8, rounding="ldlq")
    assert trellis.bits((ROWS, COLS), params) < int_grid.bits((ROWS, COLS), grid)
    mine = loss(weight, decode(trellis.encode(weight, params, stats)), stats)
    assert mine < 0.6 * loss(weight, decode(int_grid.encode(weight, grid, stats)), stats)


def test_rates_by_row_lose_less_than_one_rate_of_the_same_size():
    weight, stats = problem(512)
    base = trellis.Params(rounding="ldlq", block=128)
    energy = trellis.row_energy(weight, base, stats)
    losses = {q: trellis.unit_loss(q, weight, base, stats) for q in trellis.MSE}
    price = float(energy.log().mean().exp()) * losses[12] * 2 * math.log(2) / (COLS / 8)
    sections = trellis.best_sections(energy, losses, COLS, [price])[0]
    mixed = replace(base, sections=sections)
    assert sum(n for _, n in sections) == 512 and len(sections) > 1
    assert trellis.bits((512, COLS), mixed) == pytest.approx(3, abs=0.3)
    uniform = replace(base, quarter_bits=math.ceil(trellis.bits((512, COLS), mixed) * 4))
    mine = loss(weight, decode(trellis.encode(weight, mixed, stats)), stats)
    assert mine < 0.9 * loss(weight, decode(trellis.encode(weight, uniform, stats)), stats)


def test_rates_by_row_can_be_dealt_out_within_the_rows_of_each_rank():
    weight, stats = problem(512)
    free = trellis.Params(sections=((16, 128), (12, 192), (8, 192)), block=128, rounding="ldlq")
    params = replace(free, ranges=4)
    encoded = trellis.encode(weight, params, stats)
    assert encoded.tree == trellis.tree(free)
    parts = [shard(encoded, Span(0, 128 * i, 128 * (i + 1))) for i in range(4)]
    assert torch.equal(torch.cat([decode(part) for part in parts]), decode(encoded))
    # Without it this matrix cannot be cut there.
    with pytest.raises(FormatError):
        shard(trellis.encode(weight, free, stats), Span(0, 0, 128))
    before, after = trellis.estimate_many(weight, [free, params], stats)
    assert before <= after < 1.05 * before
    mine = loss(weight, decode(encoded), stats)
    assert mine < 1.1 * loss(weight, decode(trellis.encode(weight, free, stats)), stats)
    with pytest.raises(ValueError, match="512 rows are not 64 ranges"):
        trellis.encode(weight, replace(free, ranges=64), stats)
    with pytest.raises(ValueError, match="a section of 96 rows has no whole tiles of 16 of each of 4 ranges"):
        trellis.encode(weight, replace(params, sections=((16, 96), (12, 224), (8, 192))), stats)


def test_every_rank_takes_as_many_bytes_however_much_more_the_rows_of_one_matter():
    weight, stats = problem(1024)
    weight[:128] *= 30  # a head
    weight[512:640] *= 0.01
    free = trellis.Params(sections=((24, 200), (12, 424), (4, 400)))
    params = replace(free, sections=dealt_out(free.sections, 8), ranges=8)
    assert params.sections == ((24, 256), (12, 384), (4, 384))
    encoded = trellis.encode(weight, params, stats)
    parts = [shard(encoded, Span(0, 128 * i, 128 * (i + 1))) for i in range(8)]
    assert len({part.size_bytes for part in parts}) == 1
    assert torch.equal(torch.cat([decode(part) for part in parts]), decode(encoded))
    # What that costs is known before.
    before, after = trellis.estimate_many(weight, [free, params], stats)
    assert after > 2 * before
    assert loss(weight, decode(encoded), stats) == pytest.approx(after, rel=0.25)


def test_ranks_may_have_more_of_a_rate_than_others():
    weight, stats = problem(1024)
    weight[:128] *= 30
    weight[512:640] *= 0.01
    free = trellis.Params(sections=((24, 128), (12, 512), (4, 384)))
    params = replace(free, ranges=8, even=False)
    encoded = trellis.encode(weight, params, stats)
    assert (
        encoded.tree == trellis.tree(free)
        and encoded.size_bytes == trellis.encode(weight, free, stats).size_bytes
    )
    parts = [shard(encoded, Span(0, 128 * i, 128 * (i + 1))) for i in range(8)]
    # All of the highest rate's rows are the first rank's.
    assert [24 in part.tree.params.quarter_bits for part in parts] == [True] + [False] * 7
    assert torch.equal(torch.cat([decode(part) for part in parts]), decode(encoded))
    before, after = trellis.estimate_many(weight, [free, params], stats)
    assert before <= after < 1.15 * before
    assert loss(weight, decode(encoded), stats) == pytest.approx(after, rel=0.25)
    with pytest.raises(ValueError, match="a section of 120 rows has no whole tiles of 16"):
        trellis.encode(weight, replace(params, sections=((24, 120), (12, 904))), stats)


def test_sections_move_by_as_little_as_equal_parts_take():
    assert dealt_out([(16, 128), (12, 192), (8, 192)], 4) == ((16, 128), (12, 192), (8, 192))
    assert dealt_out([(16, 64), (12, 16), (8, 176)], 8) == ((16, 128), (8, 128))
    assert dealt_out([(16, 16), (8, 240)], 8) == ((8, 256),)
    assert dealt_out([(16, 240), (8, 16)], 8) == ((16, 256),)
    with pytest.raises(ValueError, match="250 rows are not 8 ranges of whole tiles"):
        dealt_out([(16, 250)], 8)


def test_sections_are_chosen_by_energy_and_small_ones_are_merged():
    energy = torch.cat([torch.full((16,), 1000.0), torch.full((200,), 1.0), torch.full((40,), 1e-4)]).double()
    losses = {q: 2.0 ** (-q / 2) for q in range(4, 25, 2)}
    sections = trellis.best_sections(energy[torch.randperm(256)], losses, 64, [1e-3])[0]
    assert [q for q, _ in sections] == sorted((q for q, _ in sections), reverse=True)
    assert min(n for _, n in sections) >= trellis.SMALLEST_SECTION and sum(n for _, n in sections) == 256


def test_the_block_factor_is_a_factor():
    hessian = correlated_hessian(64)
    found = block_factor(factor(hessian, 0.01))
    unit = found.feedback.double() + torch.eye(64)
    inner = torch.linalg.inv(unit)
    middle = inner @ found.hessian.double() @ inner.T
    for i in range(4):
        at = slice(16 * i, 16 * i + 16)
        middle[at, at] = 0
    assert float(middle.abs().max()) < 1e-5 * float(found.hessian.max())


def test_block_feedback_lowers_the_loss_of_plain_rounding():
    weight, stats = problem()
    metric = block_factor(factor(stats.hessian, 0.01))

    def to_grid(target: torch.Tensor) -> tuple[torch.Tensor]:
        return ((target / 0.02).round() * 0.02,)

    lanes = [Lane(slice(0, 24), to_grid), Lane(slice(24, None), to_grid)]
    fed = block_ldlq(weight, metric.feedback, lanes)
    assert torch.allclose(fed, block_ldlq(weight, metric.feedback, [Lane(slice(None), to_grid)]), atol=1e-6)
    assert loss(weight, fed, stats) < 0.8 * loss(weight, block_ldlq(weight, None, lanes), stats)


@pytest.mark.parametrize("cols", [48, 256, 320])
@pytest.mark.parametrize("metrics", [0, 1, 2])
def test_block_by_block_is_what_spans_of_columns_are(cols, metrics):
    """As a GPU rounds narrow matrices, whose blocks are one captured step."""
    count = max(1, metrics)
    weight = torch.stack([normal(32, cols).double() * (i + 1) for i in range(count)])
    fed = block_factor(factor(correlated_hessian(cols), 0.01)).feedback.double()
    feedback = torch.stack([fed * (1 - 0.1 * i) for i in range(count)]) if metrics else None

    def to_grid(target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        steps = (target / 0.02).round()
        return steps * 0.02, steps.flatten(0, -2)

    def run(work) -> tuple[torch.Tensor, dict[tuple[int, int], torch.Tensor]]:
        kept = {}
        lanes = [
            Lane(
                rows,
                to_grid,
                lambda columns, codes, at=at: kept.update({(at, columns.start): codes[0].clone()}),
            )
            for at, rows in enumerate((slice(0, 16), slice(16, None)))
        ]
        return work(weight, feedback, lanes), kept

    (spans, kept), (blocks, found) = run(block_ldlq), run(ldlq._by_blocks)
    assert torch.allclose(spans, blocks, atol=1e-12) and not torch.equal(spans, weight)
    assert kept.keys() == found.keys() and all(torch.equal(kept[k], found[k]) for k in kept)


def test_the_same_bytes_at_any_number_of_threads():
    weight, stats = problem()
    params = trellis.Params(10, block=128, rounding="ldlq")
    found = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        found.append(trellis.encode(weight, params, stats).arrays["x.codes"])
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_sections_must_add_up():
    with pytest.raises(ValueError, match="do not add up"):
        trellis.encode(normal(64, 64), trellis.Params(sections=((8, 16), (6, 32))))


def test_widths_without_a_block_are_padded_and_not_rotated():
    weight = normal(40, 40)
    encoded = trellis.encode(weight, trellis.Params(16, block=rotated.block_for(40)))
    assert encoded.tree.kind == "trellis"
    assert float((decode(encoded) - weight).square().mean()) < 0.02 * float(weight.square().mean())
